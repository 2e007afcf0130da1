"""A byte-level tokenizer of 320 ids that behaves as GLM-5's wherever training depends on it.

One id a byte, so every UTF-8 text round-trips, and GLM's special tokens with GLM's stop rules: no
end-of-turn token, three eos ids, pad equal to the first eos. Leaves out merges: a tiny model has
nothing to gain from a larger vocabulary.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

VOCAB_SIZE = 320
"""Of config.json too: 256 bytes, special tokens, spare ids."""

_CONTROL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
)
# Ordinary text may hold these (GLM declares them with special=false): no turn opens or closes so.
_TAG_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
_EOS_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")


@dataclass(frozen=True, kw_only=True)
class TokenizerIds:
    """What config.json must say of the tokenizer. The pad id is the first eos id, as in GLM-5."""

    vocab_size: int
    eos_token_id: list[int]
    pad_token_id: int


def write_tokenizer(folder: Path) -> TokenizerIds:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`.

    AutoTokenizer loads the folder, with or without a config.json beside it. Returns the ids that
    config.json needs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _build()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _EOS_TOKENS[0],
        "pad_token": _EOS_TOKENS[0],
        "additional_special_tokens": list(_CONTROL_TOKENS),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_048_576,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    template = Path(__file__).with_name("glm_chat_template.jinja").read_text("utf-8")
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    ids = tokenizer.get_vocab()
    eos = [ids[token] for token in _EOS_TOKENS]
    return TokenizerIds(vocab_size=VOCAB_SIZE, eos_token_id=eos, pad_token_id=eos[0])


def _build() -> Tokenizer:
    characters = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=characters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in _CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in _TAG_TOKENS])
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE
    return tokenizer
