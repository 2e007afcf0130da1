"""Multi-head latent attention in absorbed form over the keys that the DSA indexer selects.

DeepSeek-V2 (arXiv 2405.04434) stores one latent per token; DeepSeek-V3.2 scores it with a small
indexer and attends to the best `index_topk` keys; GLM-5.2 lets most layers share the selection of
the last full layer (IndexShare). In absorbed form the key half of kv_b_proj is applied to the query
and its value half to the output, so that attention itself sees one key of kv_lora_rank + rope
values for all heads:

    query[t, h] = (W_k[h]^T q_nope[t, h],  rope(q_rope[t, h]))
    key[s]      = (norm(latent[s]),  rope(k_rope[s]))
    out[t, h]   = W_v[h] sum_s softmax(query . key * scale)[s] norm(latent[s])

The selection belongs to the forward call that made it: it is taken and returned as a value, never
stored here.
"""

from typing import NamedTuple

import torch
from torch import nn

from fullspan.models.common.frozen import FrozenProjection, LinearMap, frozen_product
from fullspan.models.common.linear import Linear
from fullspan.models.common.norm import LayerNorm, RMSNorm
from fullspan.models.dsa.config import DsaConfig
from fullspan.ops.options import OpOptions
from fullspan.ops.rope.op import apply_rope
from fullspan.ops.selection import Selection
from fullspan.parallel.context import SequenceContext
from fullspan.shapes import Float, Float32, Tensor


class Angles(NamedTuple):
    """cos and sin of the local rows' positions, made once per microbatch for all layers."""

    cos: Float32[Tensor, "rows half"]
    sin: Float32[Tensor, "rows half"]


class KVUpProjection(FrozenProjection):
    """kv_b_proj [heads * (nope + value), latent], used in halves: its key half on queries, its
    value half on outputs.
    """

    def __init__(self, heads: int, nope: int, value: int, latent: int) -> None:
        super().__init__(heads * (nope + value), latent)
        self.heads, self.nope, self.value = heads, nope, value

    def split(self, rows: Float[Tensor, "out width"]) -> tuple[Tensor, Tensor]:
        """Views of the key half [heads, nope, width] and the value half [heads, value, width] of a
        tensor whose rows are laid out as the weight's.
        """
        key, value = rows.unflatten(0, (self.heads, -1)).split([self.nope, self.value], dim=1)
        return key, value

    def absorb_query(
        self, query: Float[Tensor, "rows heads nope"]
    ) -> Float[Tensor, "rows heads latent"]:
        """W_k[h]^T q for every head."""
        return frozen_product(query, self.frozen, self._by_head(0, transposed=False))

    def project_value(
        self, out: Float[Tensor, "rows heads latent"]
    ) -> Float[Tensor, "rows heads value"]:
        """W_v[h] o for every head."""
        return frozen_product(out, self.frozen, self._by_head(1, transposed=True))

    def _by_head(self, half: int, *, transposed: bool) -> LinearMap:
        """x[:, h] W[h] for every head, or W[h]^T. Heads are no whole number of FP8 blocks, so each
        half dequantises both.
        """
        return LinearMap(
            lambda x, weight: _times_heads(x, self.split(weight)[half], transposed),
            lambda grad, weight: _times_heads(grad, self.split(weight)[half], not transposed),
        )


def _times_heads(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """[rows, heads, in], [heads, in, out] or transposed -> [rows, heads, out]."""
    weight = weight.transpose(1, 2) if transposed else weight
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


class Indexer(nn.Module):
    """Selects the keys of each row. Frozen: it runs without autograd, and its keys are gathered
    without it.

    score(t, s) = sum_h w_h(t) relu(q_h(t) . k(s)), w scaled by index_heads^-0.5 * index_dim^-0.5.
    The rope dims come first in an index head (they come last in an attention head).
    """

    def __init__(self, config: DsaConfig) -> None:
        super().__init__()
        self.heads, self.width = config.index_n_heads, config.index_head_dim
        self.rope = config.qk_rope_head_dim
        self.topk = config.index_topk
        self.interleaved = config.indexer_rope_interleave
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.width)
        self.wk = Linear(config.hidden_size, self.width)
        self.k_norm = LayerNorm(self.width, eps=1e-6)
        self.weights_proj = Linear(config.hidden_size, self.heads)

    @torch.no_grad()
    def forward(
        self,
        x: Float[Tensor, "rows hidden"],
        q_latent: Float[Tensor, "rows q_latent"],
        angles: Angles,
        sequence: SequenceContext,
        options: OpOptions,
    ) -> Selection:
        """`x` is the layer's normed input, `q_latent` the *normed* output of q_a_proj."""
        keys = sequence.start_index_gather(self._rotate(self.k_norm(self.wk(x)), angles))
        query = self._rotate(self.wq_b(q_latent).unflatten(-1, (self.heads, self.width)), angles)
        # In float32 whatever the model's dtype: rounding the head weights flips picks near ties.
        weights = self.weights_proj(x.to(self.weights_proj.weight.dtype)).float()
        weights = weights * (self.heads**-0.5 * self.width**-0.5)
        return sequence.select(query, keys, weights, topk=self.topk, options=options)

    def _rotate(
        self, x: Float[Tensor, "rows *heads width"], angles: Angles
    ) -> Float[Tensor, "rows *heads width"]:
        rotated, rest = x.split([self.rope, x.shape[-1] - self.rope], dim=-1)
        rotated = apply_rope(rotated, *angles, interleaved=self.interleaved)
        return torch.cat([rotated, rest], dim=-1)


class SparseLatentAttention(nn.Module):
    """The attention of one layer; `indexer` is None on layers that share the selection of an
    earlier one.
    """

    def __init__(self, config: DsaConfig, layer: int, options: OpOptions) -> None:
        super().__init__()
        heads = config.num_attention_heads
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        latent, q_latent = config.kv_lora_rank, config.q_lora_rank
        self.heads, self.nope, self.rope, self.latent = heads, nope, rope, latent
        self.scale = config.softmax_scale
        self.options = options
        self.q_a_proj = Linear(config.hidden_size, q_latent)
        self.q_a_layernorm = RMSNorm(q_latent, config.latent_norm_eps)
        self.q_b_proj = Linear(q_latent, heads * (nope + rope))
        self.kv_a_proj_with_mqa = Linear(config.hidden_size, latent + rope)
        self.kv_a_layernorm = RMSNorm(latent, config.latent_norm_eps)
        self.kv_b_proj = KVUpProjection(heads, nope, config.v_head_dim, latent)
        self.o_proj = Linear(heads * config.v_head_dim, config.hidden_size)
        self.indexer = Indexer(config) if config.indexer_types[layer] == "full" else None

    def forward(
        self,
        x: Float[Tensor, "rows hidden"],
        angles: Angles,
        sequence: SequenceContext,
        inherited: Selection | None,
        kept: Selection | None,
    ) -> tuple[Float[Tensor, "rows hidden"], Selection]:
        """Attention output and the selection that it used.

        `inherited` is the selection of the last full layer before this one. `kept` is this layer's
        own selection from an earlier run of the same microbatch: with it, recompute uses the same
        keys and never runs the indexer.
        """
        gathered = sequence.start_gather(self._latent(x, angles))
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        selection = kept
        if selection is None:
            selection = inherited
            if self.indexer is not None:
                selection = self.indexer(x, q_latent.detach(), angles, sequence, self.options)
        assert selection is not None, "the config guarantees a full layer before every shared one"
        out = sequence.attend(
            self._absorbed_query(q_latent, angles), gathered, selection,
            last=self.indexer is not None, scale=self.scale, value_dim=self.latent,
            options=self.options,
        )  # fmt: skip
        return self.o_proj(self.kv_b_proj.project_value(out).flatten(1)), selection

    def _latent(self, x: Float[Tensor, "rows hidden"], angles: Angles) -> Float[Tensor, "rows qk"]:
        latent, rope = self.kv_a_proj_with_mqa(x).split([self.latent, self.rope], dim=-1)
        rope = apply_rope(rope, *angles, interleaved=True)
        return torch.cat([self.kv_a_layernorm(latent), rope], dim=-1)

    def _absorbed_query(
        self, q_latent: Float[Tensor, "rows q_latent"], angles: Angles
    ) -> Float[Tensor, "rows heads qk"]:
        query = self.q_b_proj(q_latent).unflatten(-1, (self.heads, -1))
        nope, rope = query.split([self.nope, self.rope], dim=-1)
        rope = apply_rope(rope, *angles, interleaved=True)
        return torch.cat([self.kv_b_proj.absorb_query(nope), rope], dim=-1)
