"""The one dimension legend. Every tensor annotation in the package is written in these words.

pack         rows of the whole padded pack; also the number of global keys
rows         rows that this rank holds (pack / context-parallel size)
docs         documents in the pack; bounds: their ends and 0, docs + 1
hidden       model width
width        any last dimension, where its size does not matter
heads        attention heads
nope, rope   the parts of a query or key head without and with rotary position
latent       width of the compressed key/value (kv_lora_rank)
qk           latent + rope, the width of an absorbed query and of a gathered key
value        width of a value head
q_latent     width of the compressed query (q_lora_rank)
topk         key slots a query may select
index_heads, index_dim   heads of the indexer and their width
half         half of the rotary width: one cos and sin each
chosen       experts that a row is sent to
experts      routed experts
in, out      input and output width of a projection
in_blocks, out_blocks   blocks of an FP8 weight along them
local_experts   those that this rank holds
slots        (row, chosen expert) pairs, sorted by expert
ranks        ranks of a group
sent, kept   rows or slots that leave this rank, and that stay
scored       rows that this rank's indexer scores: those kept and those received
sampled      rows that a comparison looks at
rank         LoRA rank
vocab        vocabulary size
"""

from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

__all__ = ["Float", "Float32", "Int32", "Int64", "Tensor"]
