"""Measures one attention layer of GLM-5.2, forward and backward, against the one of `transformers`
in the same run.

    python benchmarks/layer.py --out benchmarks/results/h200.jsonl --commit "$(git rev-parse HEAD)"

Frozen weights, gradient of the input, one document, bf16, a full layer (with indexer), 1 GiB for
attention and as much for index scores. `transformers` runs its sdpa path up to the length at which
it runs out of memory. Peak memory is what the call needs above the weights and the input.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as theirs
from transformers.models.glm_moe_dsa.configuration_glm_moe_dsa import GlmMoeDsaConfig

from benchmarks.run import machine, measure
from fullspan.models.dsa.attention import Angles, SparseLatentAttention
from fullspan.models.dsa.config import DsaConfig
from fullspan.ops.backend import resolve
from fullspan.ops.options import OpOptions
from fullspan.ops.packed import PackedLayout
from fullspan.ops.rope.op import inverse_frequencies, rope_angles
from fullspan.parallel.context import SequenceContext
from fullspan.parallel.expert import ExpertParallel
from fullspan.parallel.sequence import Partition

SHAPE = {
    "hidden_size": 6144, "num_hidden_layers": 1, "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "v_head_dim": 256, "index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128,
    "indexer_types": ["full"], "mlp_layer_types": ["dense"], "max_position_embeddings": 1048576,
}  # fmt: skip
OURS = (8192, 16384, 131072)
THEIRS = (8192, 16384)


def config() -> GlmMoeDsaConfig:
    """GLM-5.2 with one layer."""
    return GlmMoeDsaConfig(**SHAPE)


def our_layer(rows: int, options: OpOptions) -> tuple[Callable[[], None], torch.Tensor]:
    """Forward and backward of the layer, and its input."""
    fields = config().to_dict()
    fields.pop("layer_types", None)  # its one value has other names in other releases
    own = DsaConfig.from_hf(fields)
    with torch.device("cuda"):
        layer = SparseLatentAttention(own, 0, options).requires_grad_(False)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    layer.bfloat16()
    assert layer.indexer is not None
    layer.indexer.weights_proj.float()
    frequencies, factor = inverse_frequencies(own.qk_rope_head_dim, own.rope_theta, own.yarn)
    layout = PackedLayout(cu_seqlens=torch.tensor([0, rows]), padded_length=rows)
    device = torch.device("cuda")
    partition = Partition(size=1, length=rows)
    sequence = SequenceContext.create(
        layout, partition, experts=ExpertParallel(experts=own.n_routed_experts), device=device
    )
    angles = Angles(*rope_angles(sequence.positions, frequencies.to(device), factor))
    x = torch.randn(rows, own.hidden_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn_like(x)

    def call() -> None:
        out, _ = layer(x, angles, sequence, None, None)
        torch.autograd.grad(out, x, grad)

    return call, x


def their_layer(rows: int) -> tuple[Callable[[], None], torch.Tensor]:
    """The same by `transformers`, attention by sdpa."""
    settings = config()
    settings._attn_implementation = "sdpa"
    with torch.device("cuda"):
        layer = theirs.GlmMoeDsaAttention(settings, 0).bfloat16().requires_grad_(False)
        rotary = theirs.GlmMoeDsaRotaryEmbedding(settings)
    x = torch.randn(
        1, rows, settings.hidden_size, device="cuda", dtype=torch.bfloat16
    ).requires_grad_()
    grad = torch.randn_like(x)
    positions = torch.arange(rows, device="cuda")[None]
    angles = rotary(x, positions)
    mask = torch.full((rows, rows), torch.finfo(x.dtype).min, dtype=x.dtype, device="cuda")
    mask = mask.triu_(1)[None, None]

    def call() -> None:
        out = layer(x, position_embeddings=angles, attention_mask=mask, position_ids=positions)[0]
        torch.autograd.grad(out, x, grad)

    return call, x


def runs() -> Iterator[tuple[str, int, Callable[[], tuple[Callable[[], None], torch.Tensor]]]]:
    """(backend, rows, maker)."""
    widths = {"qk": 576, "value_dim": 512, "index_dim": 128, "topk": 2048}
    small = OpOptions(attention_bytes=1 << 30, workspace_bytes=1 << 30)
    options = resolve(small, torch.device("cuda"), torch.bfloat16, **widths)
    for rows in OURS:
        yield options.sparse_attention, rows, lambda rows=rows: our_layer(rows, options)
    for rows in THEIRS:
        yield "transformers_sdpa", rows, lambda rows=rows: their_layer(rows)


def main() -> int:
    """Measure both."""
    parser = argparse.ArgumentParser(description="Measure one attention layer of GLM-5.2.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--warm", type=int, default=250, help="milliseconds")
    parser.add_argument("--repeat", type=int, default=500, help="milliseconds")
    given = parser.parse_args()
    for backend, rows, make in runs():
        row: dict[str, object] = {"op": "attention_layer", "backend": backend, "rows": rows}
        try:
            call, x = make()
            row |= measure(call, given.warm, given.repeat)
            del call, x
        except torch.OutOfMemoryError:
            row["failed"] = "out of memory"
        gc.collect()
        torch.cuda.empty_cache()
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | machine(given.commit)) + "\n")
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
