"""One checked row into a Document: tokens, and which of them are learned.

A prompt_completion row learns the completion and an eos; text and files learn everything and an
eos; tokens learn everything unless labels or mask say otherwise, and get no eos. Special tokens
that are spelled out in text and prompt_completion rows are recognised, since such data is often
rendered beforehand; in plain files they are characters like any other; messages refuse them.
Leaves out the chat template (chat.py).
"""

import torch
from transformers import PreTrainedTokenizerBase

from fullspan.data.chat import ChatFormat, encode_chat, learn_format
from fullspan.data.formats import Row
from fullspan.data.packing import IGNORE, Document
from fullspan.data.report import FieldError
from fullspan.errors import DataError


class Encoder:
    """Rows of any format into Documents. `vocab_size` is the model's; ids beyond it are refused."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int) -> None:
        eos = tokenizer.eos_token_id
        if not isinstance(eos, int):
            raise DataError("the tokenizer has no eos_token, a sample could not learn to end")
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos = eos
        self._chat: ChatFormat | None = None

    @property
    def chat(self) -> ChatFormat:
        """What the chat template does, learned once. Raises DataError when none is usable."""
        if self._chat is None:
            self._chat = learn_format(self.tokenizer)
        return self._chat

    def encode(self, row: Row) -> Document:
        """Raises RowError, with file, line and field, for a row that does not fit."""
        try:
            tokens, trained = self._encode(row)
            self._check_range(tokens, row.format)
        except FieldError as error:
            raise row.error(error) from error
        return Document(
            tokens=torch.tensor(tokens, dtype=torch.int32),
            trained=torch.tensor(trained, dtype=torch.bool),
            source=row.source,
        )

    def _encode(self, row: Row) -> tuple[list[int], list[bool]]:
        value = row.value
        if row.format == "messages":
            return encode_chat(
                self.tokenizer, self.chat, value["messages"], value.get("tools"), self.eos
            )
        if row.format == "tokens":
            tokens = value["tokens"]
            if "labels" in value:
                return tokens, [label != IGNORE for label in value["labels"]]
            return tokens, [bool(flag) for flag in value.get("mask", [1] * len(tokens))]
        prompt: list[int] = []
        if row.format == "prompt_completion":
            prompt = self._ids(value["prompt"])
            answer = self._ids(value["completion"], first=False)
        else:
            answer = self._ids(value["text"], raw=row.format == "files")
        if not answer or answer[-1] != self.eos:
            answer.append(self.eos)
        return prompt + answer, [False] * len(prompt) + [True] * len(answer)

    def _ids(self, text: str, *, first: bool = True, raw: bool = False) -> list[int]:
        return self.tokenizer(
            text, add_special_tokens=first, split_special_tokens=raw, verbose=False
        )["input_ids"]

    def _check_range(self, tokens: list[int], format: str) -> None:
        if min(tokens) >= 0 and max(tokens) < self.vocab_size:
            return
        index = next(i for i, t in enumerate(tokens) if not 0 <= t < self.vocab_size)
        reason = f"token id {tokens[index]} is outside the vocabulary (0 to {self.vocab_size - 1})"
        if format == "tokens":
            raise FieldError(f"tokens[{index}]", reason)
        raise DataError(f"{reason}: the tokenizer does not belong to this model")
