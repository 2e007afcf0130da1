"""The [ops] section and the names that it can use. Imports no torch.

Which backend can run, and why not, is known by the registry in backend.py, whose keys these are.
"""

from dataclasses import dataclass

from fullspan.errors import BackendError, ConfigError

# As in backend.BACKENDS, in the order in which "auto" tries them; it never takes an optional one.
BACKEND_NAMES = {
    "index_topk": ("hopper", "triton", "reference", "cudnn"),
    "sparse_attention": ("hopper", "triton", "reference", "flash_mla", "cudnn"),
    "fp8": ("triton", "reference"),
    "rows": ("triton", "reference"),
    "expert_products": ("bf16", "reference", "deep_gemm", "scaled_grouped_mm"),
}

# Kernels of others, in packages of their own, and what rounds otherwise: never by "auto", and on
# Hopper alone.
OPTIONAL = ("flash_mla", "cudnn", "deep_gemm", "scaled_grouped_mm")

INDEX_SCORES = ("bf16", "fp8")


@dataclass(frozen=True, kw_only=True)
class OpOptions:
    """The [ops] section.

    index_topk, sparse_attention, fp8, rows: name of a backend, or "auto" for the first that can
    run.
    index_scores: "bf16" multiplies the indexer's queries and keys as the model makes them, "fp8"
    rounds them to e4m3 with a scale per vector first: faster, and other selections
    (index_topk/README.md).
    expert_products: "bf16" multiplies rows with the dequantised weights of the routed experts;
    "deep_gemm" and "scaled_grouped_mm" with the FP8 ones in forward and recompute, rows rounded to
    e4m3 (expert_products/README.md); "reference" is what the first of these computes, slowly.
    workspace_bytes: bound on the temporaries of index_topk.
    attention_bytes: bound on those of sparse_attention, and on the absorbed queries at hand.
    expert_bytes: bound on the rows that are at the experts at once, and on the experts' dequantised
    weights.
    loss_chunk_rows: rows whose logits over the vocabulary exist at once.

    Every backend gives the same bits on every run, but for sparse_attention = "cudnn", which warns.
    """

    index_topk: str = "auto"
    sparse_attention: str = "auto"
    fp8: str = "auto"
    rows: str = "auto"
    index_scores: str = "bf16"
    expert_products: str = "bf16"
    workspace_bytes: int = 1 << 30
    attention_bytes: int = 1 << 32
    expert_bytes: int = 1 << 32
    loss_chunk_rows: int = 1024

    @property
    def fp8_products(self) -> bool:
        """Whether the experts' forward products have both operands in FP8."""
        return self.expert_products not in ("auto", "bf16")

    def __post_init__(self) -> None:
        for op, backends in BACKEND_NAMES.items():
            name = getattr(self, op)
            if name not in ("auto", *backends):
                known = ", ".join(("auto", *backends))
                raise BackendError(f"ops.{op} is {name!r}; it can be one of: {known}")
        if self.index_scores not in INDEX_SCORES:
            known = ", ".join(INDEX_SCORES)
            raise ConfigError(f"ops.index_scores is {self.index_scores!r}; it can be: {known}")
        for setting, least in (
            ("workspace_bytes", 1 << 20),
            ("attention_bytes", 1 << 20),
            ("expert_bytes", 1 << 20),
            ("loss_chunk_rows", 1),
        ):
            value = getattr(self, setting)
            if value < least:
                raise ConfigError(f"ops.{setting} is {value}; it must be at least {least}")
