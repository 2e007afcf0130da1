"""The whole path from a data path to packs: read, encode, pack. Leaves out order (loader.py)."""

import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fullspan.data.config import DataConfig
from fullspan.data.encode import Encoder
from fullspan.data.formats import read_rows
from fullspan.data.packing import Document, Pack, pack_documents
from fullspan.data.report import PackingReport, ReadLog, RowError, brief
from fullspan.errors import DataError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder. Raises DataError when it is missing or damaged."""
    if not folder.is_dir():
        raise DataError(f"tokenizer: {folder} is not a folder; name one with tokenizer.json")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise DataError(f"tokenizer: {folder} has no {' and no '.join(TOKENIZER_FILES)}")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers lets through whatever it stumbles over
        raise DataError(f"tokenizer: cannot load {folder}: {brief(error)}") from error


def load_documents(
    path: str,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int | None = None,
    setting: str = "data.path",
) -> tuple[list[Document], ReadLog]:
    """Every sample of `path`, encoded, in file order, and what was met. See load_packs."""
    encoder = Encoder(tokenizer, vocab_size=vocab_size or len(tokenizer))
    log = ReadLog(max_bad_rows=config.max_bad_rows)
    documents: list[Document] = []
    for row in read_rows(path, config.format, log, setting=setting):
        try:
            documents.append(encoder.encode(row))
        except RowError as error:
            log.bad(error)
    return documents, log


def load_packs(
    path: str,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int | None = None,
    setting: str = "data.path",
) -> tuple[list[Pack], PackingReport]:
    """Packs of `path` (config.path or config.eval_path), and what became of every row.

    vocab_size: the model's; None: the tokenizer's. setting: what messages call the path. Raises
    DataError with file, line and field.
    """
    documents, log = load_documents(path, config, tokenizer, vocab_size=vocab_size, setting=setting)
    return pack_documents(
        documents,
        pack_length=config.pack_length,
        overlong=config.overlong,
        pad_token=pad_token(tokenizer),
        log=log,
        source=f"{setting}: {path}",
    )


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills a pack: the pad token, else eos. No mask is ever derived from it."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    raise DataError("the tokenizer has neither pad_token nor eos_token")


def model_vocab_size(folder: Path) -> int | None:
    """vocab_size of the config.json in `folder`; None when the folder holds only a tokenizer."""
    file = folder / "config.json"
    if not file.is_file():
        return None
    try:
        size = json.loads(file.read_text("utf-8")).get("vocab_size")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"tokenizer: cannot read {file}: {error}") from error
    return size if isinstance(size, int) else None
