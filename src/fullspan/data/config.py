"""The [data] section of a run. Leaves out the model, the tokenizer and the number of ranks."""

from dataclasses import dataclass, fields

from fullspan.errors import ConfigError

FORMATS = ("auto", "messages", "prompt_completion", "text", "tokens", "files")
OVERLONG = ("error", "truncate", "split", "drop")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the training data is and how it becomes packs.

    path         a JSONL file, a folder, or a glob
    eval_path    held-out data in the same format, or None
    format       one of FORMATS; auto reads it off the first row
    pack_length  rows of every pack, padding included
    overlong     what happens to a document longer than pack_length, one of OVERLONG
    max_bad_rows rows that may be skipped (and reported) before reading stops with an error
    shuffle      packs in an order derived from `seed` and the epoch, or else in file order
    """

    path: str
    eval_path: str | None = None
    format: str = "auto"
    pack_length: int = 8192
    overlong: str = "error"
    max_bad_rows: int = 0
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        kinds = {"eval_path": (str, type(None)), "shuffle": bool}
        texts = ("path", "format", "overlong")
        for field in fields(self):
            kind = kinds.get(field.name, str if field.name in texts else int)
            value = getattr(self, field.name)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise ConfigError(f"data.{field.name}: got {value!r} ({type(value).__name__})")
        for name, allowed in (("format", FORMATS), ("overlong", OVERLONG)):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"data.{name}: got {value!r}, allowed are {', '.join(allowed)}")
        if not self.path:
            raise ConfigError("data.path: got an empty path; name a JSONL file, a folder or a glob")
        for name, least in (("pack_length", 2), ("max_bad_rows", 0)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"data.{name}: got {getattr(self, name)}, it must be at least {least}"
                )
