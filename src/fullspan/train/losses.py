"""Losses beyond cross-entropy, for `Session.forward_backward(packs, loss)`.

A loss sees the negative log likelihood of each local row and the Microbatch, so it works on any
split of the sequence: what it needs per token or per document travels with the pack, which every
rank has whole, and is looked up by the rows' places. Sums over a document may span ranks; they go
through `document_sums`. Documents in one pack never see each other, so the two answers of a
preference pair are simply two documents, each with the prompt in front.

Leaves out where weights, preferences, rewards and advantages come from, and generation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.nn import functional as F

from fullspan.data.packing import IGNORE, Pack
from fullspan.errors import ConfigError, LayoutError
from fullspan.shapes import Float, Tensor
from fullspan.train.session import Loss, Microbatch

# ------------------------------------------------------------------------------------ packs


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedPack(Pack):
    """weights[i]: of predicting labels[i]; not negative. Without meaning where not trained.

    Raises LayoutError where they do not fit.
    """

    weights: Float[Tensor, "pack"]

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rows(self, "weights", self.weights)
        if bool((self.weights[self.labels != IGNORE] < 0).any()):
            raise LayoutError("pack: weights must not be negative")


@dataclass(frozen=True, kw_only=True, eq=False)
class PairedPack(Pack):
    """Documents 2i and 2i + 1 are the chosen and the rejected answer to one prompt, which stands in
    front of each and is not trained.

    reference: log-probability of the trained tokens of each document under the reference model,
    natural logarithm, summed; None: `DPO.reference` computes it.
    Raises LayoutError for an odd number of documents or a reference that does not fit.
    """

    reference: Float[Tensor, "docs"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        documents = len(self.cu_seqlens) - 1
        if documents % 2:
            raise LayoutError(f"pack: {documents} documents, but pairs need an even number")
        if self.reference is None:
            return
        if self.reference.shape != (documents,) or not bool(self.reference.isfinite().all()):
            raise LayoutError(
                f"pack: reference must be {documents} finite numbers, one of each document, got "
                f"shape {tuple(self.reference.shape)}"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyPack(Pack):
    """Sampled answers. behaviour[i]: log-probability (natural logarithm) of labels[i] under the
    policy that sampled it. advantages[i]: of that token. Without meaning where not trained.

    Raises LayoutError where they do not fit.
    """

    behaviour: Float[Tensor, "pack"]
    advantages: Float[Tensor, "pack"]

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rows(self, "behaviour", self.behaviour)
        _check_rows(self, "advantages", self.advantages)


# ----------------------------------------------------------------------------------- losses


@dataclass(frozen=True, kw_only=True)
class WeightedTokens(Loss):
    """Weighted mean of the tokens' negative log likelihoods, over WeightedPacks:

        L = sum_t w_t nll_t / sum_t w_t          t over the trained tokens of all packs

    Weights of 1 give the plain loss, weights of 0 and 1 that of the tokens with 1.
    """

    def __call__(self, nll: Tensor, microbatch: Microbatch) -> Float[Tensor, "rows"]:
        pack = _as(WeightedPack, microbatch.pack)
        return nll * _local(_trained_only(pack, pack.weights), microbatch)

    def count(self, pack: Pack) -> float:
        """The sum of its weights."""
        pack = _as(WeightedPack, pack)
        return float(_trained_only(pack, pack.weights).sum(dtype=torch.float64))


@dataclass(frozen=True, kw_only=True)
class DPO(Loss):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290, equation 7), over
    PairedPacks:

        L = mean over pairs of -log sigmoid(beta ((p_c - q_c) - (p_r - q_r)))

    p and q: log-probabilities of the chosen (c) and rejected (r) answer, summed over its trained
    tokens, of the model and of the reference. A pair without a trained token counts as none.

    beta: how closely the model is held to the reference. reference: a microbatch -> negative log
    likelihood of each local row under the reference model, for packs that carry no reference;
    `session.base_losses` is that of the model without its adapters.
    """

    beta: float = 0.1
    reference: Callable[[Microbatch], Tensor] | None = None

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ConfigError(f"DPO: beta is {self.beta}: it must be above 0")

    def __call__(self, nll: Tensor, microbatch: Microbatch) -> Tensor:
        pack = _as(PairedPack, microbatch.pack)
        gain = document_sums(-nll, microbatch) - self._reference(pack, microbatch)
        chosen, rejected = gain.view(-1, 2).unbind(1)
        losses = -F.logsigmoid(self.beta * (chosen - rejected))
        # All ranks of the sequence have every pair: the one with its first row counts it.
        firsts = torch.isin(pack.cu_seqlens[:-1:2], microbatch.row_ids.cpu())
        return losses * (firsts & _trained_pairs(pack)).to(losses)

    def count(self, pack: Pack) -> float:
        """Its pairs."""
        return int(_trained_pairs(_as(PairedPack, pack)).sum())

    def _reference(self, pack: PairedPack, microbatch: Microbatch) -> Float[Tensor, "docs"]:
        if pack.reference is not None:
            return pack.reference.to(microbatch.row_ids.device, torch.float64)
        if self.reference is None:
            raise ConfigError(
                "DPO: the pack carries no reference: give PairedPack(reference=...) the "
                "log-probability of each document, or DPO(reference=session.base_losses)"
            )
        return document_sums(-self.reference(microbatch).detach(), microbatch)


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Loss):
    """Importance-weighted policy gradient, over PolicyPacks:

        r_t = exp(log p(t) - behaviour_t)
        L   = -mean_t min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)

    as in PPO (Schulman et al. 2017, arXiv 1707.06347, equation 7); unlike bounds are DAPO's (Yu et
    al. 2025, arXiv 2503.14476). No penalty towards a reference policy.

    clip: (low, high); None: r_t A_t alone. mean: over all trained "tokens" (DAPO), or over those of
    each document and then over "documents" (GRPO, Shao et al. 2024, arXiv 2402.03300, equation 3).
    """

    clip: tuple[float, float] | None = (0.2, 0.2)
    mean: str = "tokens"

    def __post_init__(self) -> None:
        pair = self.clip is None or (isinstance(self.clip, tuple) and len(self.clip) == 2)
        if not pair or (self.clip and not (0 <= self.clip[0] <= 1 and self.clip[1] >= 0)):
            raise ConfigError(
                f"PolicyGradient: clip is {self.clip}: (low, high) with low in [0, 1], high >= 0"
            )
        if self.mean not in ("tokens", "documents"):
            raise ConfigError(f"PolicyGradient: mean is {self.mean!r}: tokens or documents")

    def __call__(self, nll: Tensor, microbatch: Microbatch) -> Float[Tensor, "rows"]:
        pack = _as(PolicyPack, microbatch.pack)
        advantages = _local(_trained_only(pack, pack.advantages), microbatch)
        ratio = (-nll - _local(_trained_only(pack, pack.behaviour), microbatch)).exp()
        gain = ratio * advantages
        if self.clip is not None:
            low, high = self.clip
            gain = torch.minimum(gain, ratio.clamp(1 - low, 1 + high) * advantages)
        if self.mean == "documents":
            gain = gain * _local(_document_shares(pack), microbatch)
        return -gain

    def count(self, pack: Pack) -> float:
        """Its trained tokens, or its documents with any."""
        pack = _as(PolicyPack, pack)
        if self.mean == "tokens":
            return pack.trained_tokens
        return int((_trained_counts(pack) > 0).sum())


# ------------------------------------------------------------------------------------ parts


def document_sums(values: Float[Tensor, "rows"], microbatch: Microbatch) -> Float[Tensor, "docs"]:
    """The sum of `values` over all rows of each document, on whatever ranks they are, in float64.

    Differentiable, see `SequenceContext.sum_over_ranks`: every rank calls it. The order of the sum
    is fixed, so it is the same on every run.
    """
    rows = microbatch.row_ids.cpu()
    assert bool((rows.diff() > 0).all()), "every partition keeps its rows in the pack's order"
    ends = torch.searchsorted(rows, microbatch.pack.cu_seqlens)
    parts = values.double()[: int(ends[-1])].split(ends.diff().tolist())
    local = torch.stack([part.sum() for part in parts])
    return microbatch.sequence.sum_over_ranks(local)


Kind = TypeVar("Kind", bound=Pack)


def _as(kind: type[Kind], pack: Pack) -> Kind:
    if not isinstance(pack, kind):
        raise ConfigError(f"this loss needs packs of {kind.__name__}, got {type(pack).__name__}")
    return pack


def _check_rows(pack: Pack, name: str, values: Tensor) -> None:
    if not isinstance(values, Tensor):
        raise LayoutError(f"pack: {name} must be a tensor, got {type(values).__name__}")
    if values.shape != pack.labels.shape:
        raise LayoutError(
            f"pack: {len(pack.labels)} rows but {name} of shape {tuple(values.shape)}"
        )
    if not bool(values[pack.labels != IGNORE].isfinite().all()):
        raise LayoutError(f"pack: {name} must be finite on every trained row")


def _trained_only(pack: Pack, values: Tensor) -> Float[Tensor, "pack"]:
    """`values`, and 0 on rows that are not trained, where they may be anything."""
    return torch.where(pack.labels != IGNORE, values, 0.0)


def _local(values: Tensor, microbatch: Microbatch) -> Float[Tensor, "rows"]:
    """This rank's rows of something that the whole pack carries."""
    device = microbatch.row_ids.device
    return values[microbatch.row_ids.to(values.device)].to(device, torch.float32)


def _trained_counts(pack: Pack) -> Tensor:
    """Trained tokens of each document."""
    trained = (pack.labels != IGNORE)[: pack.real_length]
    parts = trained.split(pack.cu_seqlens.diff().tolist())
    return torch.stack([part.sum() for part in parts])


def _document_shares(pack: Pack) -> Float[Tensor, "pack"]:
    """1 / trained tokens of each row's document, at least 1 of them; 0 on padding."""
    shares = (1 / _trained_counts(pack).clamp(min=1)).repeat_interleave(pack.cu_seqlens.diff())
    return F.pad(shares, (0, len(pack.tokens) - pack.real_length))


def _trained_pairs(pack: PairedPack) -> Tensor:
    """Whether each pair has a trained token."""
    return _trained_counts(pack).view(-1, 2).sum(1) > 0
