"""What one layer holds while it runs, term by term as models/dsa and models/common allocate it.

Three things are counted, for the rows of one rank:

    kept       what lives from the forward to the backward pass of a layer: its input and selection
               with recompute, all of `saved` without
    saved      what autograd keeps between a layer's (second) forward and its backward
    moments    what exists beside `saved` at the places where a layer peaks

A row's widths are in elements; `wide` is float32. A norm keeps its input and 1/rms. An adapter
keeps its input and its low-rank product.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from fullspan.ops.sparse_attention.chunks import HOPPER_BLOCK, Sizes, choose_rows
from fullspan.planning.case import Case
from fullspan.planning.model_cost import Adapter

WIDE, LONG, INT = 4, 8, 4
STREAMS = "residual stream and gradient"
PLAN = "plan of the selection"

Bytes = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a case. adapted: its adapters by their module's name inside the layer."""

    case: Case
    number: int
    adapted: Mapping[str, Adapter]

    @classmethod
    def all(cls, case: Case) -> "list[Layer]":
        """Every layer of the model, in its order."""
        here: list[dict[str, Adapter]] = [{} for _ in range(case.model.num_hidden_layers)]
        for adapter in case.adapters:
            here[adapter.layer][adapter.module.split(".", 3)[3]] = adapter
        return [cls(case=case, number=n, adapted=adapted) for n, adapted in enumerate(here)]

    @property
    def full(self) -> bool:
        return self.case.model.indexer_types[self.number] == "full"

    @property
    def sparse(self) -> bool:
        return self.case.model.mlp_layer_types[self.number] == "sparse"

    @property
    def kind(self) -> tuple[bool, bool, frozenset[str]]:
        """Layers of one kind have the same weights and adapters."""
        return self.full, self.sparse, frozenset(self.adapted)

    def has(self, *modules: str) -> bool:
        """Whether one of the modules has an adapter."""
        return any(module in self.adapted for module in modules)

    def lows(self, *modules: str) -> int:
        """Elements a row of the low-rank products that plain adapters keep."""
        return self.case.run.lora.r * sum(self.has(module) for module in modules)

    # ------------------------------------------------------------------------------ kept

    def selection(self) -> int:
        """ids and counts that a full layer makes (ops/selection.py): rows x (topk + 1) int32."""
        return self.case.rows * (self.case.model.index_topk + 1) * INT

    def input(self) -> int:
        """The layer's input: rows x hidden (anchors: "saved layer inputs")."""
        return self.case.rows * self.case.model.hidden_size * self.case.item

    # ----------------------------------------------------------------------------- saved

    @property
    def gathered_latent(self) -> int:
        model = self.case.model
        return self.case.pack * (model.kv_lora_rank + model.qk_rope_head_dim) * self.case.item

    @cached_property
    def saved_attention(self) -> Bytes:
        """By item. models/dsa/{attention,absorbed}.py, lora/layers.py."""
        case, model, item = self.case, self.case.model, self.case.item
        hidden, q_latent, latent = model.hidden_size, model.q_lora_rank, model.kv_lora_rank
        heads, qk = model.num_attention_heads, latent + model.qk_rope_head_dim
        q_a, q_b, kv_a, kv_b, out = (
            f"self_attn.{name}"
            for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
        )
        row = {
            "norms": 3 * WIDE,  # 1/rms; what they read comes next, and the layer's input
            "q latent": item * q_latent * (self.has(q_b) + 1),
            "kv latent": item * qk,
            "normed input": item * hidden if self.has(q_a, kv_a) else 0,
            "query": item * heads * model.qk_head_dim,
            # The kernel's output for an adapter of kv_b_proj, in its place the values without one.
            "attention output and lse": heads * (latent * item * self.has(kv_b) + WIDE),
            "values": item * heads * model.v_head_dim * (self.has(out) or not self.has(kv_b)),
            "LoRA": item * self.lows(q_a, q_b, kv_a, out),
        }
        found = {name: case.rows * size for name, size in row.items()}
        return {**found, "gathered latent": self.gathered_latent}

    @cached_property
    def saved_mlp(self) -> Bytes:
        """By item. models/common/{mlp,moe,linear}.py, parallel/expert.py."""
        case, model, item = self.case, self.case.model, self.case.item
        hidden = model.hidden_size
        row = {"norms": WIDE + item * hidden}
        gate, up, down = (
            f"mlp.{'shared_experts.' if self.sparse else ''}{name}"
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        inner = model.intermediate_size
        if self.sparse:
            inner = model.moe_intermediate_size * model.n_shared_experts
        row["normed input"] = item * hidden if self.has(gate, up) else 0
        row["MLP intermediates"] = item * inner * (2 + self.has(down))
        row["LoRA"] = item * self.lows(gate, up, down)
        found = {name: case.rows * size for name, size in row.items()}
        return {**found, **self._saved_experts()} if self.sparse else found

    def _saved_experts(self) -> Bytes:
        case, model, item = self.case, self.case.model, self.case.item
        inner, hidden, chosen = (
            model.moe_intermediate_size,
            model.hidden_size,
            model.num_experts_per_tok,
        )
        gate_up, down = (self.has(f"mlp.experts.{n}") for n in ("gate_up_proj", "down_proj"))
        slots = case.busiest_slots
        # scores, chosen experts (int64), their scores and the sum of them; then the places of rows
        # and slots (int64), the slots of each expert, and the weights where they are applied.
        normalised = chosen + 1 if model.norm_topk_prob else 0
        router = (model.n_routed_experts + normalised) * WIDE + chosen * LONG
        places = 3 * case.slots * LONG + (2 * slots * LONG if case.ep > 1 else 0) + slots * WIDE
        places += case.chunks * (model.n_routed_experts // case.ep) * LONG
        return {
            "router": case.rows * router + places,
            "expert rows in": slots * hidden * item if gate_up else 0,
            "expert intermediates": slots * inner * item * (2 + down),
            "expert LoRA": slots * case.run.lora.r * item * (gate_up + down),
        }

    def adapter_casts(self) -> int:
        """Adapters in the dtype of the activations (lora/layers.py), but for kv_b_proj's, which are
        cast in each pass (models/dsa/absorbed.py)."""
        case = self.case
        if case.item == WIDE:
            return 0
        return sum(
            a.numel // (case.ep if a.routed else 1) * case.item
            for name, a in self.adapted.items()
            if not name.endswith("kv_b_proj")
        )

    def saved(self) -> int:
        """All of it, the input and selection aside."""
        parts = (*self.saved_attention.values(), *self.saved_mlp.values())
        return sum(parts) + self.adapter_casts()

    # --------------------------------------------------------------------------- moments

    def recompute_moments(self) -> dict[str, Bytes]:
        """Where the second forward peaks: {moment: bytes beside the layer's input by item}.

        With experts that is in their last chunk of rows, after the shared expert: on the way there
        what is sent, what arrives and this by expert; at the first product the rows and the
        dequantised weights, or what an FP8 product takes; then the rows and what the second product
        would read. That one is made where it has an adapter, and where this is the only forward
        pass: then what goes in and comes out, and on the way back the rows, the outputs, these in
        the order of arrival, and what comes.
        """
        streams = self._streams() + self.input()  # and the gradient of the layer's output
        # Outputs of routed and shared experts; of a dense layer with the residual.
        joined = self.sparse and self.case.chunks > 1
        ends = streams + (2 + joined) * self.input()
        moments = {"end": self._with_saved({STREAMS: ends})}
        if self.sparse:
            streams += self._finished_chunks() + self.input()  # the shared expert's output
            moved = self.case.busiest_chunk_slots * self.case.model.hidden_size * self.case.item
            given = 0 if self.has("mlp.experts.gate_up_proj") else moved
            ways = 2 if self.case.ep > 1 else 0
            adapted = self.has("mlp.experts.down_proj")
            saved = (2 + adapted) * self._gated()  # not there when the rows arrive
            exchanges = {
                "expert rows": (given + ways * moved - saved, 0),
                "expert products": (given, self.operands()),
                "expert gates": (given + self._gated(), 0),
            }
            if adapted or not self.case.run.train.recompute:
                # Its input, which an adapter keeps, and its output, to which an adapter's is added.
                second = 2 * moved if adapted else moved + self._gated()
                exchanges["second expert product"] = given + second, self.operands(down=True)
                exchanges["experts"] = given + (1 + ways) * moved, 0
            for name, (exchange, weights) in exchanges.items():
                items = {"expert exchange": exchange, self._operand: weights}
                moments[name] = self._with_saved({STREAMS: streams, **items})
        return moments

    def _gated(self) -> int:
        """What the second product of the experts reads, of one chunk."""
        return (
            self.case.busiest_chunk_slots * self.case.model.moe_intermediate_size * self.case.item
        )

    def _finished_chunks(self) -> int:
        """What came of the chunks before the last, until all are joined."""
        last = self.case.rows - (self.case.chunks - 1) * self.case.chunk_rows
        return self.input() * (self.case.rows - last) // self.case.rows

    def _streams(self) -> int:
        """Locals of a layer while its MLP runs (models/dsa/model.DecoderLayer): the attention's
        output, and the normed rows where autograd does not keep them."""
        prefix = "mlp.shared_experts." if self.sparse else "mlp."
        normed = not self.has(f"{prefix}gate_proj", f"{prefix}up_proj")
        return self.input() * (1 + normed)

    def backward_moments(self) -> dict[str, Bytes]:
        """Where the backward pass peaks: the experts' first gradients with everything still saved,
        and the attention's, when the MLP's tensors are gone."""
        case, model, item = self.case, self.case.model, self.case.item
        stream = case.rows * model.hidden_size * item
        ordered = 1 if case.run.parallel.partition == "contiguous" or case.cp == 1 else 2
        heads = case.rows * model.num_attention_heads * item
        attention = {
            **self.saved_attention,
            "values": 0 if self.has("self_attn.kv_b_proj") else heads * model.v_head_dim,
            PLAN: self.plan,
            "LoRA": self.saved_attention["LoRA"] + self.adapter_casts(),
            STREAMS: 2 * stream,
            "gradient of values": heads * model.v_head_dim,
            "gradient of gathered latent": ordered * self.gathered_latent // item * WIDE,
            **self.spans,
        }
        moments: dict[str, Bytes] = {"attention": attention}
        if not self.sparse:
            # Gradients of gate, up and their product; the product itself is gone.
            inner = case.rows * model.intermediate_size * item
            grown = inner * (3 - self.has("mlp.down_proj"))
            moments["MLP"] = self._with_saved({STREAMS: 2 * stream, "MLP intermediates": grown})
            return moments
        moved = case.busiest_chunk_slots * model.hidden_size * item
        for name, exchange, weights in (
            ("experts", (2 if case.ep > 1 else 1) * moved, 0),
            ("second expert product", moved + self._gated(), self.dequantised(down=True)),
            ("expert gates", 3 * self._gated(), 0),
            ("expert products", moved, self.dequantised()),
        ):
            items = {STREAMS: 2 * stream + self._finished_chunks(), "expert exchange": exchange}
            moments[name] = self._with_saved({**items, "dequantised weights": weights})
        return moments

    def forward_moments(self) -> dict[str, Bytes]:
        """Where the first forward, which keeps nothing of the layer, peaks."""
        case, model, item = self.case, self.case.model, self.case.item
        streams = 3 * case.rows * model.hidden_size * item
        shared = {
            STREAMS: self.input(),
            "q latent": case.rows * model.q_lora_rank * item,
            "gathered latent": self.gathered_latent,
        }
        heads = case.rows * model.num_attention_heads * item
        attend = {
            **shared,
            "query": heads * model.qk_head_dim,
            "attention output": heads * model.v_head_dim,
            **self.spans,
        }
        moments: dict[str, Bytes] = {"attention": attend}
        if self.full:
            width = model.index_n_heads * (model.index_head_dim * item + WIDE)
            moments["indexer"] = {
                **shared,
                "index query": case.rows * width,
                "gathered index keys": case.pack * model.index_head_dim * item,
                "index scores": case.run.ops.workspace_bytes,
            }
        if self.sparse:
            streams += self._finished_chunks() + self.input()  # the shared expert's output
            moved = case.busiest_chunk_slots * model.hidden_size * item
            for name, exchange, weights in (
                ("experts", 4 * moved, 0),
                ("expert products", moved + 3 * self._gated(), self.operands()),
                ("second expert product", 2 * moved + self._gated(), self.operands(down=True)),
            ):
                items = {STREAMS: streams, "expert exchange": exchange}
                moments[name] = {**items, self._operand: weights}
        else:
            inner = 3 * case.rows * model.intermediate_size * item
            moments["MLP"] = {
                STREAMS: streams,
                "MLP intermediates": inner,
            }
        return moments

    @cached_property
    def _sizes(self) -> Sizes:
        """Of the attention's backward by the kernels of an H200; its heads go in tiles of 64."""
        case, model = self.case, self.case.model
        heads, latent, rope = model.num_attention_heads, model.kv_lora_rank, model.qk_rope_head_dim
        tiles = -(-heads // 64)
        return Sizes(
            topk=model.index_topk, pack=case.pack, qk=latent + rope, heads=64 * tiles,
            itemsize=case.item, units=132, tiles=tiles, fused=tiles == 1 and case.item != WIDE,
            beside=heads * (3 * latent + 2 * rope) * case.item,
            block=HOPPER_BLOCK,
        )  # fmt: skip

    @cached_property
    def plan(self) -> int:
        """Of the selection, which the layers that share it hand on in the backward pass; 0 where it
        is too large, and made in every layer."""
        rows, room, sizes = self.case.rows, self.case.run.ops.attention_bytes, self._sizes
        chunk = choose_rows(sizes, rows, room).chunk
        return sizes.kept_bytes(rows, chunk) if sizes.keeps(rows, chunk, room) else 0

    @cached_property
    def spans(self) -> Bytes:
        """What attention holds for a span of its rows (models/dsa/absorbed.py), what its kernels
        take (ops/sparse_attention/chunks.py), and kv_b_proj as it is multiplied."""
        case, model, sizes = self.case, self.case.model, self._sizes
        room = case.run.ops.attention_bytes
        chunk, span, block = choose_rows(sizes, case.rows, room)
        kernels = chunk * sizes.row_bytes + span * (sizes.span_bytes - sizes.beside)
        kernels += 0 if self.plan else sizes.kept_bytes(block, chunk)
        width = model.num_attention_heads * (model.qk_nope_head_dim + model.v_head_dim)
        return {
            "attention span": span * sizes.beside,
            "kernel workspace": kernels,
            "dequantised weights": width * model.kv_lora_rank * case.item if case.form.block else 0,
        }

    @property
    def _operand(self) -> str:
        """The item of a plan that `operands` is."""
        return "FP8 operands" if self.case.run.ops.fp8_products else "dequantised weights"

    def operands(self, *, down: bool = False) -> int:
        """What a forward product of the experts takes beside its rows and outputs: dequantised
        weights, or for FP8 products the outputs of padded experts, after whose rounded rows the
        outputs come, or weights that are rounded again (ops/expert_products/README.md, Cost)."""
        case, model = self.case, self.case.model
        if not case.run.ops.fp8_products:
            return self.dequantised(down=down)
        hidden, inner = model.hidden_size, model.moe_intermediate_size
        read, made = (inner, hidden) if down else (hidden, 2 * inner)
        slots, held = case.busiest_chunk_slots, model.n_routed_experts // case.ep
        if case.run.ops.expert_products == "scaled_grouped_mm":
            one = read * made
            again = one * max(1, min(held, case.run.ops.expert_bytes // one))
            return slots * (read + WIDE) + again
        rows = slots + 127 * min(slots, held)
        rounded, outputs = rows * (read + WIDE * read // 128), slots * made * case.item
        return rows * made * case.item + max(0, rounded - outputs)

    def dequantised(self, *, down: bool = False) -> int:
        """FP8 experts as they are multiplied: as many as ops.expert_bytes holds, at least one
        (models/common/linear.py); of the first product or the second."""
        case, model = self.case, self.case.model
        if case.form.block is None:
            return 0
        one = (1 if down else 2) * model.moe_intermediate_size * model.hidden_size * case.item
        held = model.n_routed_experts // case.ep
        return one * max(1, min(held, case.run.ops.expert_bytes // one))

    def _with_saved(self, items: Bytes) -> Bytes:
        """`items` and everything that is saved."""
        total = {**self.saved_attention, PLAN: self.plan}
        for more in (self.saved_mlp, {"LoRA": self.adapter_casts()}, items):
            for name, size in more.items():
                total[name] = total.get(name, 0) + size
        return total
