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

import torch
from torch import nn

from fullspan.models.common.frozen import FrozenProjection
from fullspan.models.common.linear import Linear
from fullspan.models.common.norm import LayerNorm, RMSNorm
from fullspan.models.dsa.absorbed import Angles, UpProjection, UpWeights, absorbed_attention
from fullspan.models.dsa.config import DsaConfig
from fullspan.ops.options import OpOptions
from fullspan.ops.rope.op import apply_rope, rope_into
from fullspan.ops.selection import Selection
from fullspan.parallel.context import SequenceContext
from fullspan.shapes import Float, Tensor


class KVUpProjection(FrozenProjection):
    """kv_b_proj [heads * (nope + value), latent], used in halves: its key half on queries, its
    value half on outputs (absorbed.py).
    """

    def __init__(self, heads: int, nope: int, value: int, latent: int) -> None:
        super().__init__(heads * (nope + value), latent)
        self.heads, self.nope, self.value = heads, nope, value

    def parts(self) -> tuple[UpProjection, UpWeights]:
        """How it lies, and its tensors as they are held now."""
        up = UpProjection(heads=self.heads, nope=self.nope, value=self.value, layout=self.layout)
        return up, UpWeights(self.weight, self.weight_scale_inv)


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
        keys = sequence.start_index_gather(self._rotate(self.k_norm(self.wk(x)), angles, options))
        query = self.wq_b(q_latent).unflatten(-1, (self.heads, self.width))
        query = self._rotate(query, angles, options)
        # In float32 whatever the model's dtype: rounding the head weights flips picks near ties.
        weights = self.weights_proj(x.to(self.weights_proj.weight.dtype)).float()
        weights = weights * (self.heads**-0.5 * self.width**-0.5)
        return sequence.select(query, keys, weights, topk=self.topk, options=options)

    def _rotate(
        self, x: Float[Tensor, "rows *heads width"], angles: Angles, options: OpOptions
    ) -> Float[Tensor, "rows *heads width"]:
        """In place: x is a projection's fresh output."""
        part = x[..., : self.rope]
        rope_into(part, *angles, part, interleaved=self.interleaved, backend=options.rows)
        return x


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
        latent = sequence.start_gather(self._latent(x, angles))
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        selection = kept
        if selection is None:
            selection = inherited
            if self.indexer is not None:
                selection = self.indexer(x, q_latent.detach(), angles, sequence, self.options)
        assert selection is not None, "the config guarantees a full layer before every shared one"
        query = self.q_b_proj(q_latent).unflatten(-1, (self.heads, -1))
        out = absorbed_attention(
            query, latent, selection, *self.kv_b_proj.parts(), angles, scale=self.scale,
            last=self.indexer is not None, options=self.options,
        )  # fmt: skip
        return self.o_proj(out.flatten(1)), selection

    def _latent(self, x: Float[Tensor, "rows hidden"], angles: Angles) -> Float[Tensor, "rows qk"]:
        latent, rope = self.kv_a_proj_with_mqa(x).split([self.latent, self.rope], dim=-1)
        rope = apply_rope(rope, *angles, interleaved=True, backend=self.options.rows)
        return torch.cat([self.kv_a_layernorm(latent), rope], dim=-1)
