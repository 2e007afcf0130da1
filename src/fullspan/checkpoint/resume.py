"""Checkpoints that training resumes from, in PyTorch's Distributed Checkpoint format.

    <output_dir>/checkpoints/step-40/   adapters, optimizer moments, random states (.distcp files)
                                        state.json: step, settings, place in the data, file sizes

A checkpoint is written beside its place, synced, and renamed by the first rank when every rank has
finished, so a half-written one is never picked up (folders.py). Base weights are not in it, and the
adapter in PEFT layout is lora/state.py's.

Every function here that takes a `group` is entered by all its ranks (None: one process). What the
first rank alone decides, or fails at, reaches the others: all return the same or raise the same.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fullspan.checkpoint.config import CheckpointConfig
from fullspan.checkpoint.folders import (
    Header,
    complete,
    discard,
    make_empty,
    newest_checkpoint,
    prune,
    read_header,
    saving_folder,
    step_folder,
    step_folders,
)
from fullspan.checkpoint.random_state import random_states, restore_random_states
from fullspan.errors import CheckpointError

FOLDER = "checkpoints"

T = TypeVar("T")


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    tensors: Mapping[str, Tensor],
    loader: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
    keep_last: int,
    group: dist.ProcessGroup | None,
) -> Path:
    """Writes `folder`/step-<step>, deletes all but the newest `keep_last`, returns its path.

    `tensors` {name: tensor} are the same on every rank; each rank's random states are added here.
    `loader` and `fingerprint` are JSON values, see `Header`.

    Raises:
        CheckpointError: it could not be written. Older checkpoints are untouched and the unfinished
            one is removed.
    """
    saving, final = saving_folder(folder, step), step_folder(folder, step)
    header = Header(
        step=step,
        world_size=1 if group is None else dist.get_world_size(group),
        fingerprint=dict(fingerprint),
        loader=dict(loader),
        files={},
    )
    prefix = f"random.{_rank(group)}."
    states = {prefix + name: state for name, state in random_states().items()}
    try:
        _on_first_rank(lambda: make_empty(saving), group)
        _write(saving, {**tensors, **states}, group)
        _on_first_rank(lambda: complete(saving, final, header, _files(saving)), group)
    except (CheckpointException, OSError) as error:
        room = _on_first_rank(lambda: discard(saving), group)
        raise CheckpointError(
            f"could not save {final}: {_reason(error)} ({room}); older checkpoints are untouched: "
            "make room, or choose another train.output_dir"
        ) from error
    _on_first_rank(lambda: prune(folder, keep_last), group)
    return final


def find_checkpoint(
    config: CheckpointConfig, output_dir: Path, group: dist.ProcessGroup | None
) -> tuple[Path | None, list[str]]:
    """The checkpoint that a run starts from, if any, and remarks on incomplete ones passed over.

    Raises:
        CheckpointError: `resume` is a path without a complete checkpoint or older than what
            `output_dir` holds, or it is false and `output_dir` holds a checkpoint; or all of
            `output_dir` are damaged, since a new start would write over what the run has recorded.
    """

    def find() -> tuple[Path | None, list[str]]:
        newest, remarks = newest_checkpoint(output_dir / FOLDER)
        if newest is None and step_folders(output_dir / FOLDER):
            raise CheckpointError(
                f"{output_dir} holds a run without a checkpoint to go on from "
                f"({'; '.join(remarks)}): mend it, remove {output_dir / FOLDER} to start anew, or "
                "choose another train.output_dir"
            )
        if config.resume is True or (newest is None and config.resume is False):
            return newest, remarks
        if config.resume is False:
            raise CheckpointError(
                f"{output_dir} already holds a run ({newest}) and checkpoint.resume is false: "
                "set it to true, or choose another train.output_dir"
            )
        chosen, remarks = _find_named(Path(config.resume))
        if newest is not None and read_header(newest).step > read_header(chosen).step:
            raise CheckpointError(
                f"checkpoint.resume is {config.resume!r} but train.output_dir holds a later one "
                f"({newest}): set it to true to continue from that, or choose another "
                "train.output_dir"
            )
        return chosen, remarks

    return _on_first_rank(find, group)


def check_fingerprint(path: Path, header: Header, fingerprint: Mapping[str, Any]) -> None:
    """Refuses to resume under other settings than those of the checkpoint.

    Raises:
        CheckpointError: names each setting that differs, with both values.
    """
    changed = []
    for name in sorted(header.fingerprint.keys() | fingerprint.keys()):
        values = header.fingerprint, fingerprint
        was, now = [repr(v[name]) if name in v else "not there" for v in values]
        if was != now:
            changed.append(f"{name} was {was} and is {now}")
    if changed:
        raise CheckpointError(
            f"cannot resume exactly from {path}: {'; '.join(changed)} (set it back, or start anew "
            "in another train.output_dir)"
        )


def load_checkpoint(
    path: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Reads what `save_checkpoint` got and restores this rank's random states.

    `tensors` say which names, shapes and devices are wanted and are not written to. The random
    states of a rank that the checkpoint does not know stay as they are.

    Raises:
        CheckpointError: names or shapes differ from those in the checkpoint, or it is damaged.
    """
    reader = FileSystemReader(path)
    stored = stored_shapes(path)
    _check_fit(path, {name: tuple(t.shape) for name, t in tensors.items()}, stored)
    prefix = f"random.{_rank(group)}."
    states = {
        name: torch.empty(shape, dtype=torch.uint8)
        for name, shape in stored.items()
        if name.startswith(prefix)
    }
    loaded = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    try:
        with alone():
            state_dict_loader.load(
                {**loaded, **states},
                storage_reader=reader,
                process_group=group,
                no_dist=group is None,
            )
    except (CheckpointException, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {_reason(error)}") from error
    restore_random_states({name.removeprefix(prefix): state for name, state in states.items()})
    return loaded


class _Writer(FileSystemWriter):
    """Keeps the operating system's error when a write fails: PyTorch's zip writer hides it, and it
    would be lost on the way to the other ranks."""

    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise OSError(error.__context__.errno, error.__context__.strerror) from error
            raise


def _write(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Saves and syncs."""
    with alone():
        state_dict_saver.save(
            dict(tensors),
            storage_writer=_Writer(folder),
            process_group=group,
            no_dist=group is None,
        )


def _files(folder: Path) -> set[str]:
    """Names of the files that all ranks wrote, as the last of them says."""
    stored = FileSystemReader(folder).read_metadata().storage_data
    return {info.relative_path for info in stored.values()} | {".metadata"}


@contextmanager
def alone() -> Iterator[None]:
    """PyTorch warns that it saves for one process, which here is on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _find_named(path: Path) -> tuple[Path, list[str]]:
    newest, remarks = newest_checkpoint(path / FOLDER)
    if newest is not None:
        return newest, remarks
    try:
        read_header(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoint.resume is {str(path)!r}: {error}; allowed are true, false, the output "
            f"folder of a run or one of its {FOLDER}/step-N"
        ) from error
    return path, []


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in a checkpoint, whole ones where ranks wrote parts.

    Raises:
        CheckpointError: its list of contents is damaged.
    """
    try:
        metadata = FileSystemReader(path).read_metadata()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise CheckpointError(f"cannot read {path / '.metadata'}: {_reason(error)}") from error
    return {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _check_fit(
    path: Path, wanted: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]
) -> None:
    names = {name for name in stored if not name.startswith("random.")}
    for lacking, odd in (("run", names - wanted.keys()), ("checkpoint", wanted.keys() - names)):
        if odd:
            raise CheckpointError(
                f"{path} does not fit this run: {len(odd)} tensor(s) such as {min(odd)} are not in "
                f"the {lacking} (settings of [lora] and [model])"
            )
    for name, shape in wanted.items():
        if shape != stored[name]:
            raise CheckpointError(
                f"{path} does not fit this run: {name} is {list(stored[name])} there and "
                f"{list(shape)} here (settings of [lora] and [model])"
            )


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def _on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Runs `action` on the first rank; its result, or its error, is that of every rank."""
    outcome: list[Any] = [None, None]
    if _rank(group) == 0:
        try:
            outcome[0] = action()
        except (CheckpointError, OSError) as error:
            outcome[1] = error
    if group is not None:
        dist.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _reason(error: BaseException) -> str:
    """One line on why the system, or PyTorch's checkpoint code, failed."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        return f"{_reason(cause)}, on rank {rank}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0]
