"""Read and write folders of safetensors in Hugging Face layout, one tensor or one slice at a time.

A folder is `config.json` and either `model.safetensors` or shards named by
`model.safetensors.index.json`. Opening one reads headers only and checks the index against them, so
a missing or truncated shard is found before the first byte of data is loaded. What the tensors mean
is left to `mapping.py`; scales of quantised tensors are tensors like any other.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fullspan.errors import CheckpointError

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# The format's names. F4 and F6 pack values into bytes and have no element size: not readable.
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
_OPEN_FILES = 4  # shards that one reader keeps mapped; a fused tensor may gather from two
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_PARTIAL = ".partial-"  # prefix of files that are being written


NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """What a header says about one tensor, and the file that holds it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor in the file."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """The tensors of a folder by name, known from the headers."""

    path: Path
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, path: Path) -> "CheckpointFolder":
        """Read every header of the folder.

        Raises:
            CheckpointError: the folder, its config.json, its index or a shard is missing, damaged
                or contradicts another; the message names the file.
        """
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise CheckpointError(
                f"checkpoint folder {path} {what}: model.path must name a local Hugging Face "
                "folder (a model of the hub is fetched with `hf download`)"
            )
        if not (path / CONFIG_NAME).is_file():
            raise CheckpointError(
                f"no {CONFIG_NAME} in {path}: model.path must name a Hugging Face folder"
            )
        if (path / INDEX_NAME).is_file():
            return cls(path=path, tensors=_read_sharded(path))
        if (path / SINGLE_NAME).is_file():
            return cls(path=path, tensors=_read_header(path / SINGLE_NAME))
        others = sorted(p.name for p in path.iterdir() if p.suffix in WEIGHT_SUFFIXES)
        found = f", but {others[0]} (of {len(others)} weight files)" if others else ""
        raise CheckpointError(
            f"no {INDEX_NAME} and no {SINGLE_NAME} in {path}{found}: only these can be read"
        )

    def read_config(self) -> dict[str, Any]:
        """The fields of config.json."""
        return _read_json(self.path / CONFIG_NAME)

    def reader(self) -> "TensorReader":
        """A context in which tensors can be read."""
        return TensorReader(self)


class TensorReader:
    """Reads tensors of one folder. Keeps a few files mapped; the end of the context frees them."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._open: OrderedDict[Path, Any] = OrderedDict()

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)

    def read(self, name: str, window: tuple[slice, ...] | None = None) -> torch.Tensor:
        """One tensor, or only its part under `window` (one slice of step 1 per dimension).

        The result is on the CPU, has the file's dtype and may be a view of the mapped file, which
        it keeps mapped as long as it lives: copy it, and never write to it.
        """
        file = self._folder.tensors[name].file
        try:
            handle = self._handle(file)
            return handle.get_tensor(name) if window is None else handle.get_slice(name)[window]
        except (SafetensorError, OSError) as error:
            reason = _reason(file, error)
            raise CheckpointError(f"cannot read {name} from {file}: {reason}") from None

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            while len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)[1].__exit__(None, None, None)
            self._open[file] = safe_open(file, framework="pt", device="cpu").__enter__()
        self._open.move_to_end(file)
        return self._open[file]


def write_checkpoint(
    folder: Path, tensors: NamedTensors, *, max_shard_bytes: int = 5_000_000_000
) -> list[str]:
    """Write shards and their index; returns the names of the files.

    Tensors are taken one at a time and at most one shard of them is held; a tensor larger than the
    limit gets a shard of its own. All files are written under temporary names and renamed at the
    end, the index last: a folder whose writing was interrupted has the old index with the old
    shards, or none.

    Raises:
        CheckpointError: a file cannot be written (no space, no permission); nothing half-written
            is left.
    """
    with writing(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        _remove_partial(folder)
    try:
        shards: list[list[str]] = []
        total = 0
        for shard in _shards(tensors, max_shard_bytes):
            total += sum(tensor.nbytes for tensor in shard.values())
            file = folder / f"{_PARTIAL}{len(shards)}"
            with writing(str(file)):
                save_tensors(file, shard)
            shards.append(list(shard))
        return _publish(folder, shards, total)
    finally:
        _remove_partial(folder)


def _remove_partial(folder: Path) -> None:
    for file in folder.glob(f"{_PARTIAL}*"):
        file.unlink()


def _shards(tensors: NamedTensors, limit: int) -> Iterator[dict[str, torch.Tensor]]:
    """Consecutive tensors up to `limit` bytes, as contiguous host copies that share nothing."""
    shard: dict[str, torch.Tensor] = {}
    seen: set[str] = set()
    size = 0
    for name, tensor in tensors:
        assert name not in seen, f"{name} is written twice"
        seen.add(name)
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)
        size += tensor.nbytes
    if shard:
        yield shard


def save_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Durably. Raises what `writing` takes."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)  # safetensors 0.8 leaves the private mode of its own temporary file
    flush(file)


def _publish(folder: Path, shards: list[list[str]], total: int) -> list[str]:
    """Rename the partial shards and write the index that names them."""
    count = len(shards)
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    pairs = zip(names, shards, strict=True)
    weight_map = {tensor: name for name, shard in pairs for tensor in shard}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    index = folder / f"{_PARTIAL}index"
    with writing(str(folder / INDEX_NAME)):
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        flush(index)
        (folder / INDEX_NAME).unlink(missing_ok=True)
        for number, name in enumerate(names):
            (folder / f"{_PARTIAL}{number}").replace(folder / name)
        index.replace(folder / INDEX_NAME)
    return [*names, INDEX_NAME]


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Raises CheckpointError where `what` cannot be written."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointError(f"cannot write {what}: {reason}") from None


def flush(file: Path) -> None:
    """Make the file's content durable before it is renamed."""
    with file.open("rb") as handle:
        os.fsync(handle.fileno())


def _read_sharded(path: Path) -> dict[str, TensorInfo]:
    """The tensors of every shard, after the index and the shards were found to say the same."""
    index = path / INDEX_NAME
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map: it must give the shard of every tensor")
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted({str(name) for name in weight_map.values()}):
        if Path(shard).name != shard:
            raise CheckpointError(
                f"{index} names the shard {shard!r}: it must be a file name in the same folder"
            )
        if not (path / shard).is_file():
            count = sum(name == shard for name in weight_map.values())
            raise CheckpointError(
                f"{path / shard} is missing: {INDEX_NAME} says it holds {count} of "
                f"{len(weight_map)} tensors"
            )
        for name, info in _read_header(path / shard).items():
            if name in tensors:
                raise CheckpointError(f"{name} is in both {tensors[name].file} and {info.file}")
            tensors[name] = info
    for name, shard in weight_map.items():
        holder = tensors[name].file.name if name in tensors else "no shard"
        if holder != shard:
            raise CheckpointError(f"{index} says {name} is in {shard}, but {holder} holds it")
    if extra := [name for name in tensors if name not in weight_map]:
        raise CheckpointError(
            f"{tensors[extra[0]].file} holds {extra[0]}, which {INDEX_NAME} does not list "
            f"({len(extra)} such tensors)"
        )
    return tensors


def _read_header(file: Path) -> dict[str, TensorInfo]:
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            names: list[str] = handle.keys()
            views = {name: handle.get_slice(name) for name in names}
            found = {n: (tuple(view.get_shape()), view.get_dtype()) for n, view in views.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {_reason(file, error)}") from None
    for name, (_, dtype) in found.items():
        if dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise CheckpointError(f"{name} in {file} has dtype {dtype}: readable are {known}")
    return {
        name: TensorInfo(shape=shape, dtype=_DTYPES[dtype], file=file)
        for name, (shape, dtype) in found.items()
    }


def _reason(file: Path, error: Exception) -> str:
    """What is wrong with a file that safetensors refuses: what is missing, else its own words."""
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or (size < 8 + length < 100_000_000):
                return f"truncated inside its header, {size:,} bytes are there"
            header = json.loads(handle.read(length)) if length < 100_000_000 else {}
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        if ends and size < (whole := 8 + length + max(ends)):
            return f"truncated, {size:,} of {whole:,} bytes are there"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return f"not a sound safetensors file ({error})"


def _read_json(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file} holds {type(fields).__name__}: it must hold a JSON object")
    return fields
