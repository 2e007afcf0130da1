"""GLM-5.x and DeepSeek-V3.2 as a causal language model over the local rows of one packed sequence.

Module names are those of Hugging Face, so that checkpoint keys, adapter targets and gradients are
named alike. It leaves out caches, generation, the multi-token-prediction layer and every process
group: a model asks its SequenceContext, which is the identity on one rank.
"""

from functools import partial

import torch
from torch import nn

from fullspan.models.common.host_inputs import HostInputs, HostMemory
from fullspan.models.common.linear import Linear
from fullspan.models.common.mlp import GatedMLP
from fullspan.models.common.moe import GroupedExperts, MixtureOfExperts, Router
from fullspan.models.common.norm import RMSNorm
from fullspan.models.common.recompute import run_recomputed
from fullspan.models.dsa.attention import Angles, SparseLatentAttention
from fullspan.models.dsa.config import DsaConfig
from fullspan.ops.linear_cross_entropy.op import linear_cross_entropy
from fullspan.ops.options import OpOptions
from fullspan.ops.rope.op import inverse_frequencies, rope_angles
from fullspan.ops.selection import Selection
from fullspan.parallel.context import SequenceContext
from fullspan.parallel.shard import ResidentWeights, WeightStore
from fullspan.shapes import Float, Int64, Tensor


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DsaConfig, layer: int, options: OpOptions, experts: range) -> None:
        super().__init__()
        self.sparse = config.mlp_layer_types[layer] == "sparse"
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SparseLatentAttention(config, layer, options)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _experts(config, options, experts) if self.sparse else _dense(config)

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
        normed = self.post_attention_layernorm(x)
        if not isinstance(self.mlp, MixtureOfExperts):
            return x + self.mlp(normed), selection
        # Of a recompute the graph is wanted, not what comes out.
        return x + self.mlp(normed, sequence.experts, unread=kept is not None), selection


class LanguageModelHead(Linear):
    """The output projection: logits of rows, or without them the loss of each row's label."""

    def forward(
        self,
        x: Float[Tensor, "rows hidden"],
        labels: Int64[Tensor, "rows"] | None = None,
        options: OpOptions | None = None,
    ) -> Tensor:
        if labels is None or options is None:
            return super().forward(x)
        return linear_cross_entropy(x, self.weight, labels, options=options)


class DsaModel(nn.Module):
    """Embedding, layers and final norm.

    host: where the inputs of recomputed layers wait for the backward pass; None: on the device.
    """

    def __init__(
        self, config: DsaConfig, options: OpOptions, *, recompute: bool, experts: range
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.host: HostMemory | None = None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.requires_grad_(False)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, options, experts) for layer in layers
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rope = (config.qk_rope_head_dim, config.rope_theta, config.yarn)

    def forward(
        self, tokens: Int64[Tensor, "rows"], sequence: SequenceContext, weights: WeightStore
    ) -> Float[Tensor, "rows hidden"]:
        inv_freq, factor = inverse_frequencies(*self.rope)
        angles = Angles(*rope_angles(sequence.positions, inv_freq.to(tokens.device), factor))
        hidden = weights.run(0, self.embed_tokens, tokens)
        selection: Selection | None = None
        inputs = None if self.host is None else HostInputs(self.host, len(self.layers))
        for index, layer in enumerate(self.layers):
            run = partial(_run_layer, weights, index + 1, layer, angles, sequence, selection)
            if self.recompute and torch.is_grad_enabled():
                trained = [p for p in layer.parameters() if p.requires_grad]
                hidden, selection = run_recomputed(run, hidden, trained, inputs)
            else:
                hidden, selection = run(hidden, None)
        return self.norm(hidden)


class DsaForCausalLM(nn.Module):
    """The model as training uses it: hidden rows, then the loss of each row in chunks.

    Args:
        recompute: keep layer inputs and selections only; run layers again in the backward pass.
        experts: the routed experts that this rank holds; None: all.
    """

    def __init__(
        self,
        config: DsaConfig,
        options: OpOptions,
        *,
        recompute: bool,
        experts: range | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.options = options
        held = range(config.n_routed_experts) if experts is None else experts
        self.model = DsaModel(config, options, recompute=recompute, experts=held)
        self.lm_head = LanguageModelHead(config.hidden_size, config.vocab_size)
        self.weights: WeightStore = ResidentWeights()
        for module in self.modules():
            if isinstance(module, RMSNorm | GatedMLP | GroupedExperts | MixtureOfExperts):
                module.backend = options.rows

    @property
    def units(self) -> list[nn.Module]:
        """What runs as one, in the order of the forward pass, as a WeightStore counts them."""
        return [self.model.embed_tokens, *self.model.layers, self.lm_head]

    def forward(
        self, tokens: Int64[Tensor, "rows"], sequence: SequenceContext
    ) -> Float[Tensor, "rows hidden"]:
        """Hidden rows after the final norm, for the local rows of the pack."""
        return self.model(tokens, sequence, self.weights)

    def token_losses(
        self, hidden: Float[Tensor, "rows hidden"], labels: Int64[Tensor, "rows"]
    ) -> Float[Tensor, "rows"]:
        """Negative log likelihood of each row's label, 0 where the row is not trained."""
        return self.weights.run(self._head, self.lm_head, hidden, labels, self.options)

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """All logits of the given rows at once: for tests, parity and short texts."""
        return self.weights.run(self._head, self.lm_head, hidden)

    @property
    def _head(self) -> int:
        return len(self.model.layers) + 1


def _run_layer(
    weights: WeightStore,
    unit: int,
    layer: nn.Module,
    angles: Angles,
    sequence: SequenceContext,
    inherited: Selection | None,
    hidden: Tensor,
    kept: Selection | None,
) -> tuple[Tensor, Selection]:
    """One layer; with a kept selection it is a recompute."""
    return weights.run(
        unit, layer, hidden, angles, sequence, inherited, kept, backward=kept is not None
    )


def _dense(config: DsaConfig) -> GatedMLP:
    return GatedMLP(config.hidden_size, config.intermediate_size)


def _experts(config: DsaConfig, options: OpOptions, held: range) -> MixtureOfExperts:
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
        config.n_routed_experts, held, config.hidden_size, config.moe_intermediate_size
    )
    shared = GatedMLP(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)
    return MixtureOfExperts(router, experts, shared, expert_bytes=options.expert_bytes)
