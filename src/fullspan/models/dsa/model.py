"""GLM-5.x and DeepSeek-V3.2 as a causal language model over the local rows of one packed sequence.

Module names are those of Hugging Face, so that checkpoint keys, adapter targets and gradients are
named alike. It leaves out caches, generation, the multi-token-prediction layer and every process
group: a model asks its SequenceContext, which is the identity on one rank.
"""

import torch
from torch import nn

from fullspan.models.common.linear import Linear
from fullspan.models.common.mlp import GatedMLP
from fullspan.models.common.moe import GroupedExperts, MixtureOfExperts, Router
from fullspan.models.common.norm import RMSNorm
from fullspan.models.common.recompute import run_recomputed
from fullspan.models.dsa.attention import Angles, SparseLatentAttention
from fullspan.models.dsa.config import DsaConfig
from fullspan.ops.backend import OpOptions
from fullspan.ops.rope.op import inverse_frequencies, rope_angles
from fullspan.ops.selection import Selection
from fullspan.parallel.context import SequenceContext
from fullspan.shapes import Float, Int64, Tensor


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DsaConfig, layer: int, options: OpOptions) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SparseLatentAttention(config, layer, options)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _mlp(config, layer)

    def forward(
        self,
        x: Float[Tensor, "rows hidden"],
        angles: Angles,
        sequence: SequenceContext,
        inherited: Selection | None,
        kept: Selection | None,
    ) -> tuple[Float[Tensor, "rows hidden"], Selection]:
        """See SparseLatentAttention for `inherited` and `kept`."""
        out, selection = self.self_attn(self.input_layernorm(x), angles, sequence, inherited, kept)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), selection


class DsaModel(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: DsaConfig, options: OpOptions, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.requires_grad_(False)
        layers = (DecoderLayer(config, layer, options) for layer in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rope = (config.qk_rope_head_dim, config.rope_theta, config.yarn)

    def forward(
        self, tokens: Int64[Tensor, "rows"], sequence: SequenceContext
    ) -> Float[Tensor, "rows hidden"]:
        inv_freq, factor = inverse_frequencies(*self.rope)
        angles = Angles(*rope_angles(sequence.positions, inv_freq.to(tokens.device), factor))
        hidden = self.embed_tokens(tokens)
        selection: Selection | None = None
        for layer in self.layers:
            hidden, selection = self._run(layer, hidden, angles, sequence, selection)
        return self.norm(hidden)

    def _run(
        self,
        layer: nn.Module,
        hidden: Tensor,
        angles: Angles,
        sequence: SequenceContext,
        inherited: Selection | None,
    ) -> tuple[Tensor, Selection]:
        if not (self.recompute and torch.is_grad_enabled()):
            return layer(hidden, angles, sequence, inherited, None)
        trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        return run_recomputed(
            lambda x, kept: layer(x, angles, sequence, inherited, kept), hidden, trained
        )


class DsaForCausalLM(nn.Module):
    """The model as training uses it: `forward` gives final hidden rows, the loss applies `lm_head`
    in chunks.

    Args:
        recompute: keep only layer inputs and selections, and run each layer again in the backward
        pass.
    """

    def __init__(self, config: DsaConfig, options: OpOptions, *, recompute: bool) -> None:
        super().__init__()
        self.config = config
        self.options = options
        self.model = DsaModel(config, options, recompute=recompute)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def forward(
        self, tokens: Int64[Tensor, "rows"], sequence: SequenceContext
    ) -> Float[Tensor, "rows hidden"]:
        """Hidden rows after the final norm, for the local rows of the pack."""
        return self.model(tokens, sequence)

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """All logits of the given rows at once: for tests, parity and short texts, never for
        training.
        """
        return self.lm_head(hidden)


def _mlp(config: DsaConfig, layer: int) -> nn.Module:
    if config.mlp_layer_types[layer] == "dense":
        return GatedMLP(config.hidden_size, config.intermediate_size)
    router = Router(
        config.hidden_size,
        config.n_routed_experts,
        chosen=config.num_experts_per_tok,
        groups=config.n_group,
        topk_group=config.topk_group,
        scaling=config.routed_scaling_factor,
        normalise=config.norm_topk_prob,
    )
    experts = GroupedExperts(
        config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    )
    shared = GatedMLP(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)
    return MixtureOfExperts(router, experts, shared)
