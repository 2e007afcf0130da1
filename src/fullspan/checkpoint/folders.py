"""Checkpoint folders on disk: which are complete, how one becomes complete, which are deleted.

Plain files and JSON, for one process: no tensors, no ranks (resume.py has both). A save goes into
`.saving-step-N` and gets its name `step-N` last; a deletion takes the name away first. So a folder
named `step-N` whose state.json lists files that are all there with their sizes is complete, and
nothing else counts.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import fullspan
from fullspan.errors import CheckpointError

FORMAT = 1
STATE_FILE = "state.json"
_STEP, _SAVING, _OLD = "step-", ".saving-", ".old-"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Header:
    """state.json: everything of a checkpoint that is not a tensor.

    step          finished optimizer steps
    world_size    ranks that wrote it
    fingerprint   {setting: value} that must be the same on resume; only compared here
    loader        the place in the data; only stored here
    files         sizes of the other files, in bytes
    """

    step: int
    world_size: int
    fingerprint: dict[str, Any]
    loader: dict[str, Any]
    files: dict[str, int]
    format: int = FORMAT
    fullspan: str = fullspan.__version__
    torch: str = str(torch.__version__)


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"{_STEP}{step}"


def saving_folder(folder: Path, step: int) -> Path:
    return folder / f"{_SAVING}{_STEP}{step}"


def read_header(path: Path) -> Header:
    """Reads state.json and checks that the checkpoint is complete.

    Raises:
        CheckpointError: no checkpoint, an incomplete one, or one of another format.
    """
    try:
        values = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        found = values["format"]
        header = Header(**values) if found == FORMAT else None
    except OSError as error:
        reason = f"{STATE_FILE}: {error.strerror}"
        raise CheckpointError(f"{path} is no complete checkpoint ({reason})") from error
    except (ValueError, TypeError, KeyError) as error:
        reason = f"{STATE_FILE} is damaged"
        raise CheckpointError(f"{path} is no complete checkpoint ({reason})") from error
    if header is None:
        raise CheckpointError(f"{path} has checkpoint format {found}: allowed is {FORMAT}")
    for name, size in header.files.items():
        file = path / name
        got = file.stat().st_size if file.exists() else None
        if got != size:
            what = "is missing" if got is None else f"has {got} bytes instead of {size}"
            raise CheckpointError(f"{path} is no complete checkpoint ({name} {what})")
    return header


def newest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The complete checkpoint with the highest step in `folder`, and a remark on each folder that
    was passed over because it is incomplete."""
    remarks = [
        f"ignored {path}, left by a save that did not finish"
        for path in sorted(folder.glob(f"{_SAVING}*"))
    ]
    for path in reversed(step_folders(folder)):
        try:
            read_header(path)
        except CheckpointError as error:
            remarks.append(f"ignored: {error}")
        else:
            return path, remarks
    return None, remarks


def step_folders(folder: Path) -> list[Path]:
    """Folders named step-<number>, complete or not, by their number."""
    steps = {}
    for path in folder.glob(f"{_STEP}*"):
        number = path.name.removeprefix(_STEP)
        if number.isdecimal() and path.is_dir():
            steps[int(number)] = path
    return [steps[number] for number in sorted(steps)]


def make_empty(folder: Path) -> None:
    """An empty folder in place of whatever was there. Raises OSError."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def complete(saving: Path, final: Path, header: Header, names: Iterable[str]) -> None:
    """Adds state.json with the sizes of the files `names`, and gives the folder its name.

    What had that name before goes away after that. Raises OSError.
    """
    sizes = {}
    for name in sorted(names):
        if not (saving / name).exists():
            raise OSError(f"{saving} lacks {name}: every rank must see the same output folder")
        sizes[name] = (saving / name).stat().st_size
    with (saving / STATE_FILE).open("w", encoding="utf-8") as file:
        json.dump(asdict(replace(header, files=sizes)), file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(saving)
    if final.exists():
        _retire(final)
    saving.rename(final)
    _sync_folder(final.parent)


def discard(saving: Path) -> str:
    """Removes an unfinished save; says how much room there is then."""
    shutil.rmtree(saving, ignore_errors=True)
    existing = next(path for path in saving.absolute().parents if path.exists())
    return f"{shutil.disk_usage(existing).free / 2**20:.0f} MiB are free there"


def prune(folder: Path, keep_last: int) -> None:
    """Deletes all complete checkpoints but the newest, and what earlier saves and deletions that
    were cut short left behind. Folders that look like a checkpoint and are not stay."""
    whole = []
    for path in step_folders(folder):
        try:
            read_header(path)
        except CheckpointError as error:
            logger.info("kept, though %s", error)
        else:
            whole.append(path)
    for path in whole[:-keep_last]:
        _retire(path)
    for path in (*folder.glob(f"{_OLD}*"), *folder.glob(f"{_SAVING}*")):
        shutil.rmtree(path, ignore_errors=True)


def _retire(path: Path) -> None:
    """Takes a checkpoint's name away; `prune` deletes it later."""
    aside = path.with_name(f"{_OLD}{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
