"""Folders of safetensors: lazy reads equal safetensors' own, every kind of damage is named by file,
what is written appears whole or not at all."""

import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullspan.checkpoint.safetensors_io import INDEX_NAME, CheckpointFolder, write_checkpoint
from fullspan.errors import CheckpointError
from tests.support.ranks import run_ranks
from tests.unit.checkpoint.conftest import all_tensors, peak_bytes, shards


def index_of(folder: Path) -> dict[str, dict[str, str]]:
    return json.loads((folder / INDEX_NAME).read_text())


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def refused(folder: Path) -> str:
    """The message with which the folder is refused: one line."""
    with pytest.raises(CheckpointError) as caught:
        CheckpointFolder.open(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_headers_and_tensors_are_those_that_safetensors_reads(folder):
    opened = CheckpointFolder.open(folder)
    wanted = all_tensors(folder)
    assert len(shards(folder)) > 1
    assert set(opened.tensors) == set(wanted)
    with opened.reader() as reader:
        for name, tensor in wanted.items():
            info = opened.tensors[name]
            assert (info.shape, info.dtype) == (tuple(tensor.shape), tensor.dtype)
            assert info.nbytes == tensor.nbytes
            assert torch.equal(reader.read(name), tensor)


def test_a_window_is_the_slice_of_the_tensor(folder):
    opened = CheckpointFolder.open(folder)
    with opened.reader() as reader:
        name = "model.layers.4.mlp.experts.5.down_proj.weight"
        part = reader.read(name, (slice(3, 60), slice(7, 9)))
        assert torch.equal(part, reader.read(name)[3:60, 7:9])
        assert part.shape == (57, 2)


def test_a_window_reads_only_its_bytes(tmp_path):
    """1 GiB in a sparse file: a slice of it costs no more memory than the slice."""
    rows, header = 1 << 18, {"a": {"dtype": "F32", "shape": [1 << 18, 1024], "data_offsets": []}}
    header["a"]["data_offsets"] = [0, rows * 4096]
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + rows * 4096)
    (tmp_path / "config.json").write_text("{}")
    window = (slice(100_000, 100_010), slice(0, 1024))

    def grown(*_):
        opened = CheckpointFolder.open(tmp_path)
        before = peak_bytes()
        with opened.reader() as reader:
            assert reader.read("a", window).clone().shape == (10, 1024)
        return peak_bytes() - before

    assert run_ranks(1, grown)[0] < 64 << 20


def test_a_folder_with_one_unsharded_file_is_read(tmp_path):
    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    opened = CheckpointFolder.open(tmp_path)
    with opened.reader() as reader:
        assert torch.equal(reader.read("a"), torch.arange(6.0).view(2, 3))


def test_more_shards_than_files_kept_open(tmp_path):
    tensors = {f"t{i}": torch.full((4,), float(i)) for i in range(9)}
    names = write_checkpoint(tmp_path, tensors.items(), max_shard_bytes=16)
    (tmp_path / "config.json").write_text("{}")
    assert len(names) == 10
    with CheckpointFolder.open(tmp_path).reader() as reader:
        for name in [*tensors, *reversed(tensors)]:
            assert torch.equal(reader.read(name), tensors[name])


def test_missing_folder(tmp_path):
    assert "does not exist" in refused(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(tmp_path / "file")


def test_no_config(folder):
    (folder / "config.json").unlink()
    message = refused(folder)
    assert "no config.json" in message and str(folder) in message


def test_no_weights(folder):
    for file in [*shards(folder), folder / INDEX_NAME]:
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    message = refused(folder)
    assert "no model.safetensors.index.json" in message and "pytorch_model.bin" in message


def test_missing_shard(folder):
    gone = shards(folder)[1]
    gone.unlink()
    held = sum(name == gone.name for name in index_of(folder)["weight_map"].values())
    message = refused(folder)
    assert f"{gone} is missing" in message and f"holds {held} of" in message


@pytest.mark.parametrize("kept", [0, 5, 200])
def test_shard_truncated_inside_its_header(folder, kept):
    file = shards(folder)[0]
    file.write_bytes(file.read_bytes()[:kept])
    message = refused(folder)
    assert str(file) in message and f"truncated inside its header, {kept} bytes" in message


def test_shard_truncated_inside_its_data(folder):
    file = shards(folder)[2]
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    message = refused(folder)
    assert str(file) in message
    assert f"truncated, {len(whole) - 100:,} of {len(whole):,} bytes" in message


def test_shard_that_is_something_else(folder):
    file = shards(folder)[0]
    file.write_bytes(b"<html>not found</html>" * 100)
    message = refused(folder)
    assert str(file) in message and "not a sound safetensors file" in message


def test_shard_that_shrinks_after_it_was_opened(folder):
    opened = CheckpointFolder.open(folder)
    name, info = next(iter(opened.tensors.items()))
    info.file.write_bytes(info.file.read_bytes()[:-8])
    with opened.reader() as reader, pytest.raises(CheckpointError, match=r"cannot read .* trunc"):
        reader.read(name)


def test_index_names_a_tensor_that_no_shard_holds(folder):
    weight_map = index_of(folder)["weight_map"]
    weight_map["model.ghost.weight"] = shards(folder)[0].name
    write_index(folder, weight_map)
    message = refused(folder)
    assert "model.ghost.weight" in message and "no shard holds it" in message


def test_index_names_the_wrong_shard(folder):
    weight_map = index_of(folder)["weight_map"]
    name, right = next(iter(weight_map.items()))
    weight_map[name] = wrong = next(file.name for file in shards(folder) if file.name != right)
    write_index(folder, weight_map)
    assert f"{name} is in {wrong}, but {right} holds it" in refused(folder)


def test_shard_holds_a_tensor_that_the_index_does_not_list(folder):
    weight_map = index_of(folder)["weight_map"]
    del weight_map["lm_head.weight"]
    write_index(folder, weight_map)
    message = refused(folder)
    assert "lm_head.weight" in message and "does not list" in message


def test_tensor_in_two_shards(folder):
    first, second = shards(folder)[:2]
    doubled = load_file(first)
    name = next(iter(doubled))
    save_file(load_file(second) | {name: doubled[name]}, second)
    message = refused(folder)
    assert name in message and str(first) in message and str(second) in message


@pytest.mark.parametrize(
    ("text", "told"),
    [("{", "cannot be read as JSON"), ("[]", "JSON object"), ("{}", "no weight_map")],
)
def test_damaged_index(folder, text, told):
    (folder / INDEX_NAME).write_text(text)
    message = refused(folder)
    assert told in message and INDEX_NAME in message


def test_index_that_leaves_the_folder(folder):
    write_index(folder, {"a": "../other.safetensors"})
    assert "file name in the same folder" in refused(folder)


def test_unknown_dtype(folder):
    file = shards(folder)[0]
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    header[name]["dtype"] = "C64"
    header[name]["shape"][-1] //= 2
    text = json.dumps(header).encode()
    data = file.read_bytes()[8 + length :]
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    message = refused(folder)
    assert name in message and "C64" in message and "BF16" in message


def test_shards_keep_to_the_limit_and_the_index_is_right(tmp_path):
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}
    tensors["large"] = torch.zeros(100)
    names = write_checkpoint(tmp_path, tensors.items(), max_shard_bytes=80)
    assert [file.name for file in shards(tmp_path)] == names[:-1] and len(names) == 5
    for file in shards(tmp_path):
        held = load_file(file)
        assert sum(t.nbytes for t in held.values()) <= 80 or len(held) == 1
    index = index_of(tmp_path)
    assert index["metadata"] == {"total_size": 600}
    assert {n: t.tolist() for n, t in all_tensors(tmp_path).items()} == {
        n: t.tolist() for n, t in tensors.items()
    }
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / file)


def test_views_of_one_tensor_are_written_apart(tmp_path):
    whole = torch.arange(24.0).view(2, 4, 3)
    views = {"a": whole[0, :2], "b": whole[0, 2:], "c": whole[1].t()}
    write_checkpoint(tmp_path, views.items())
    held = all_tensors(tmp_path)
    assert all(torch.equal(held[name], view) for name, view in views.items())


def test_files_are_as_readable_as_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        write_checkpoint(tmp_path, [("a", torch.zeros(2))])
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o640}


def test_interrupted_writing_leaves_the_old_checkpoint(folder):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def tensors():
        yield "a", torch.zeros(1000)
        yield "b", torch.zeros(1000)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(folder, tensors(), max_shard_bytes=4000)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_full_disk_is_one_line_and_leaves_the_old_checkpoint(folder):
    """A real limit on the size of files, in a process of its own, stands in for a full disk."""
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def refusal(*_):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, unlimited[1]))
        try:
            write_checkpoint(folder, [(f"t{i}", torch.zeros(1000)) for i in range(3)])
        except CheckpointError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

    message = run_ranks(1, refusal)[0]
    assert message.startswith(f"cannot write {folder}") and "large" in message.lower()
    assert "\n" not in message
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        write_checkpoint(tmp_path / "file" / "below", [("a", torch.zeros(2))])
