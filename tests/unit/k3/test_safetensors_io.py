"""Shards in and out: bit-equal, one tensor at a time, whole or not at all, every fault named with file and tensor."""

import dataclasses
import errno
import json
import os
import resource
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from k3_cases import OneAtATime, peak_of_anonymous_memory, published, random_tensors, tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from miles_k3.errors import CheckpointError
from miles_k3.k3 import safetensors_header, safetensors_io
from miles_k3.k3.params import DType, Param, Part, attn_prefix, iter_params, text_params
from miles_k3.k3.safetensors_io import INDEX, SINGLE, Checkpoint, read_header, write_checkpoint

CONFIG = tiny()
PARAMS = list(iter_params(CONFIG))
TENSORS = random_tensors(CONFIG)
A_LOG = attn_prefix(0) + "A_log"
LAST = PARAMS[-1].name


def get(p: Param) -> Tensor:
    return TENSORS[p.name]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The tiny checkpoint in shards of at most 200 kB."""
    folder = tmp_path_factory.mktemp("shards") / "k3"
    write_checkpoint(folder, PARAMS, get, shard_bytes=200_000, extra_files={"config.json": "{}"})
    return folder


@pytest.fixture
def folder(written, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(written, tmp_path / "k3"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def refusal(folder: Path, call: Callable[[Checkpoint], object] = lambda c: None) -> list[str]:
    with pytest.raises(CheckpointError) as caught, Checkpoint(folder) as checkpoint:
        call(checkpoint)
    return str(caught.value).splitlines()


def change_header(path: Path, change: Callable[[dict], object]) -> None:
    """Rewrite a shard's header, keep its data."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    text = json.dumps(change(header) or header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def change_index(folder: Path, change: Callable[[dict], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def params_with(name: str, **changes: object) -> list[Param]:
    return [dataclasses.replace(p, **changes) if p.name == name else p for p in PARAMS]


class TestRoundTrip:
    def test_bit_equal_with_vision(self, written):
        with Checkpoint(written) as checkpoint:
            assert checkpoint.check(iter_params(CONFIG)) == []
            for p in PARAMS:
                assert torch.equal(checkpoint.read(p).view(torch.uint8), TENSORS[p.name].view(torch.uint8)), p.name
        assert any(p.part is Part.VISION for p in PARAMS)

    def test_dtypes_after_writing_and_reading(self, written):
        """Trap 16: no float32 tensor comes back as anything else."""
        dtypes = {n: t.dtype for path in shards(written) for n, t in load_file(path).items()}
        table = {DType.BF16: torch.bfloat16, DType.F32: torch.float32, DType.U8: torch.uint8}
        assert dtypes == {p.name: table[p.dtype] for p in PARAMS}
        assert list(dtypes.values()).count(torch.float32) == 5 * 6 + 7

    def test_the_library_reads_what_we_write(self, written):
        found = {n: t for path in shards(written) for n, t in load_file(path).items()}
        assert found.keys() == TENSORS.keys()
        assert all(torch.equal(found[n], t) for n, t in TENSORS.items())

    def test_we_read_what_the_library_writes(self, tmp_path):
        save_file(TENSORS, tmp_path / SINGLE, metadata={"format": "pt"})
        with Checkpoint(tmp_path) as checkpoint:
            checkpoint.require(iter_params(CONFIG))
            assert all(torch.equal(checkpoint.read(p), TENSORS[p.name]) for p in PARAMS)

    def test_shards_and_index(self, written):
        index = json.loads((written / INDEX).read_text())
        names = [path.name for path in shards(written)]
        assert len(names) > 3
        assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
        assert set(index["weight_map"].values()) == set(names)
        assert index["metadata"]["total_size"] == sum(p.num_bytes for p in PARAMS)
        for path in shards(written):
            data = sum(p.num_bytes for p in PARAMS if index["weight_map"][p.name] == path.name)
            assert data <= 200_000

    def test_one_shard_has_the_plain_name(self, tmp_path):
        write_checkpoint(tmp_path / "k3", PARAMS, get)
        assert [path.name for path in shards(tmp_path / "k3")] == [SINGLE]
        with Checkpoint(tmp_path / "k3") as checkpoint:
            assert len(checkpoint.headers) == len(PARAMS)

    def test_a_tensor_larger_than_a_shard_gets_its_own(self, tmp_path):
        write_checkpoint(tmp_path / "k3", PARAMS[:4], get, shard_bytes=1)
        assert len(shards(tmp_path / "k3")) == 4

    def test_copying_a_checkpoint_copies_its_bytes(self, written, tmp_path):
        """The path for exporters: what they don't change goes through `read`, vision included."""
        with Checkpoint(written) as source:
            write_checkpoint(tmp_path / "copy", list(source.present(iter_params(CONFIG))), source.read,
                             shard_bytes=200_000, extra_files={"config.json": "{}"})  # fmt: skip
        names = sorted(path.name for path in written.iterdir())
        assert names == sorted(path.name for path in (tmp_path / "copy").iterdir())
        assert all((written / n).read_bytes() == (tmp_path / "copy" / n).read_bytes() for n in names)

    def test_copying_one_without_vision(self, tmp_path):
        write_checkpoint(tmp_path / "text", list(text_params(CONFIG)), get)
        with Checkpoint(tmp_path / "text") as source:
            source.require(iter_params(CONFIG))
            present = list(source.present(iter_params(CONFIG)))
        assert present == list(text_params(CONFIG))

    def test_extra_files(self, tmp_path):
        extra = {"config.json": '{"ö": 1}', "tiktoken.model": b"\x00\xff", "empty.txt": ""}
        write_checkpoint(tmp_path / "deep" / "k3", PARAMS[:1], get, extra_files=extra)
        made = tmp_path / "deep" / "k3"
        assert (made / "config.json").read_text(encoding="utf-8") == '{"ö": 1}'
        assert (made / "tiktoken.model").read_bytes() == b"\x00\xff"
        assert (made / "empty.txt").read_bytes() == b""

    def test_views_and_strides_are_written_as_their_values(self, tmp_path):
        p = Param(name="t", shape=(3, 4), dtype=DType.F32, part=Part.NORM)
        whole = torch.randn(4, 6)
        write_checkpoint(tmp_path / "k3", [p], lambda _: whole[:, ::2].t())
        with Checkpoint(tmp_path / "k3") as checkpoint:
            assert torch.equal(checkpoint.read(p), whole[:, ::2].t())


class TestDamagedShards:
    def offsets(self, path: Path) -> Iterator[tuple[int, str | None]]:
        """(size after the cut, name of the tensor that is cut or None where the header is)."""
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        yield from ((size, None) for size in (0, 1, 7, 8, 9, 8 + length // 2, 8 + length - 1))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                yield from ((8 + length + at, name) for at in {begin, (begin + end) // 2, end - 1})

    def test_truncated_anywhere(self, folder):
        path = shards(folder)[1]
        whole = path.read_bytes()
        cuts = list(self.offsets(path))
        assert len(cuts) > 20
        for size, name in cuts:
            path.write_bytes(whole[:size])
            (line,) = refusal(folder)
            assert str(path) in line, size
            assert "copy the file again" in line
            assert name is None or f"cut in tensor {name}" in line, size
        path.write_bytes(whole)
        Checkpoint(folder)

    def test_longer_than_its_header_says(self, folder):
        path = shards(folder)[0]
        path.write_bytes(path.read_bytes() + b"\0")
        (line,) = refusal(folder)
        assert str(path) in line
        assert "its header speaks of" in line

    @pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", b"<html>" * 9])
    def test_another_kind_of_file(self, folder, content):
        shards(folder)[0].write_bytes(content)
        (line,) = refusal(folder)
        assert "no safetensors file" in line

    @pytest.mark.parametrize("text", [b"{", b"[]", b"\xff\xff", b'{"a": 1}', b'{"a": {}}', b'"x"', b"[" * 100_000])
    def test_torn_header(self, folder, text):
        path = shards(folder)[0]
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        (line,) = refusal(folder)
        assert str(path) in line
        assert "header" in line

    @pytest.mark.parametrize(
        "entry",
        [
            {"dtype": 5},
            {"shape": None},
            {"shape": [-1, -56]},
            {"shape": ["2"]},
            {"data_offsets": [0]},
            {"data_offsets": [0, 1, 2]},
            {"data_offsets": [8, 0]},
            {"data_offsets": "ab"},
            {"shape": [7]},
            {"dtype": "F64"},
        ],
    )
    def test_torn_entry_names_its_tensor(self, folder, entry):
        path, first = shards(folder)[0], PARAMS[0].name
        change_header(path, lambda h: h[first].update(entry))
        (line,) = refusal(folder)
        assert f"{path}: tensor {first} " in line

    def test_a_tensor_named_twice_in_one_header(self, folder):
        path = shards(folder)[0]
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        names = [n for n in json.loads(raw[8 : 8 + length]) if n != "__metadata__"]
        text = raw[8 : 8 + length].replace(names[1].encode(), names[0].encode())
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
        (line,) = refusal(folder)
        assert f"tensor {names[0]} begins at byte" in line

    def test_overlaps_and_holes(self, folder):
        path = shards(folder)[0]

        def swap(header: dict) -> None:
            header.pop(PARAMS[2].name)

        change_header(path, swap)
        (line,) = refusal(folder)
        assert f"tensor {PARAMS[3].name} begins at byte" in line

    def test_missing_shards_are_listed_together(self, folder):
        gone = shards(folder)[1:3]
        for path in gone:
            path.unlink()
        lines = refusal(folder)
        assert lines == [f"{p}: shard is missing; copy it from the checkpoint's source" for p in gone]

    def test_a_shard_that_is_a_folder(self, folder):
        path = shards(folder)[0]
        path.unlink()
        path.mkdir()
        (line,) = refusal(folder)
        assert f"{path}: can't be read" in line

    def test_two_shards_with_the_same_tensor(self, folder):
        first, second = shards(folder)[:2]
        save_file({**load_file(second), PARAMS[0].name: get(PARAMS[0])}, second)
        (line,) = refusal(folder)
        assert f"{first}: tensor {PARAMS[0].name} is in {second.name} as well" in line

    def test_cut_after_the_headers_were_read(self, folder):
        with Checkpoint(folder) as checkpoint:
            for path in shards(folder):
                os.truncate(path, 100)
            with pytest.raises(CheckpointError, match=f"tensor {PARAMS[0].name} can't be read"):
                checkpoint.read(PARAMS[0])


class TestDamagedIndex:
    def test_names_tensors_that_no_shard_holds(self, folder):
        change_index(folder, lambda m: m.update(ghost=shards(folder)[0].name))
        (line,) = refusal(folder)
        assert f"{folder / INDEX}: places tensor ghost in {shards(folder)[0].name}" in line

    def test_places_a_tensor_in_the_wrong_shard(self, folder):
        change_index(folder, lambda m: m.update({PARAMS[0].name: shards(folder)[-1].name}))
        (line,) = refusal(folder)
        assert f"places tensor {PARAMS[0].name} in {shards(folder)[-1].name}, which doesn't hold it" in line

    def test_twenty_problems_are_shown_and_the_rest_counted(self, folder):
        change_index(folder, lambda m: m.update({f"ghost{i}": shards(folder)[0].name for i in range(1030)}))
        lines = refusal(folder)
        assert len(lines) == 21
        assert lines[-1] == "... and 1,010 more problems like these"

    @pytest.mark.parametrize(
        "text",
        ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b"}}', "3",
         '{"weight_map": {"a": ["b"]}}'],
    )  # fmt: skip
    def test_no_index(self, folder, text):
        (folder / INDEX).write_text(text)
        (line,) = refusal(folder)
        assert f"{folder / INDEX}: not a safetensors index" in line

    @pytest.mark.parametrize("make", [False, True])
    def test_no_checkpoint_at_all(self, tmp_path, make):
        folder = tmp_path / "k3"
        if make:
            folder.mkdir()
        (line,) = refusal(folder)
        assert str(folder) in line
        assert "expected a Hugging Face checkpoint folder" in line


class TestAgainstTheTable:
    def lines(self, tmp_path: Path, params: list[Param], tensors: Callable[[Param], Tensor] = get) -> list[str]:
        write_checkpoint(tmp_path / "k3", params, tensors)
        return refusal(tmp_path / "k3", lambda c: c.require(iter_params(CONFIG)))

    def test_wrong_shape(self, tmp_path):
        params = params_with(A_LOG, shape=(4,))
        (line,) = self.lines(tmp_path, params, lambda p: get(p)[:4] if p.name == A_LOG else get(p))
        assert f"{SINGLE}: tensor {A_LOG} has shape [4], expected [128]; copy" in line

    @pytest.mark.parametrize("part", [Part.KDA, Part.ROUTER])
    def test_a_float32_tensor_that_was_downcast(self, tmp_path, part):
        name = next(p.name for p in PARAMS if p.dtype is DType.F32 and p.part is part)
        params = params_with(name, dtype=DType.BF16)
        (line,) = self.lines(tmp_path, params, lambda p: get(p).bfloat16() if p.name == name else get(p))
        assert f"{SINGLE}: tensor {name} is BF16, expected F32; copy" in line

    def test_a_dtype_that_the_table_does_not_know(self, tmp_path):
        save_file({**TENSORS, A_LOG: TENSORS[A_LOG].half()}, tmp_path / SINGLE)
        (line,) = refusal(tmp_path, lambda c: c.require(iter_params(CONFIG)))
        assert "is F16, expected F32" in line

    def test_missing_tensor_names_the_list_that_lacks_it(self, tmp_path):
        (line,) = self.lines(tmp_path, [p for p in PARAMS if p.name != A_LOG])
        assert f"{INDEX}: tensor {A_LOG} is missing, but config.json asks for it" in line

    def test_foreign_tensor(self, tmp_path):
        foreign = dataclasses.replace(PARAMS[2], name="model.layers.99.extra.weight")
        (line,) = self.lines(tmp_path, [*PARAMS, foreign], lambda p: get(PARAMS[2]) if p is foreign else get(p))
        assert f"{SINGLE}: tensor model.layers.99.extra.weight has no place in the model" in line

    def test_half_a_vision_tower(self, tmp_path):
        vision = [p for p in PARAMS if p.part is Part.VISION]
        lines = self.lines(tmp_path, [p for p in PARAMS if p not in vision[1:3]])
        assert len(lines) == 2
        assert all(f"tensor {p.name} is missing" in line for p, line in zip(vision[1:3], lines, strict=True))

    def test_vision_tensors_without_a_vision_config(self, written):
        text_only = dataclasses.replace(CONFIG, vision=None)
        with Checkpoint(written) as checkpoint:
            lines = checkpoint.check(iter_params(text_only))
        assert len(lines) == sum(p.part is Part.VISION for p in PARAMS)
        assert "has no place in the model that config.json describes" in lines[0]

    def test_another_models_config(self, written):
        """Everything is wrong at once; the message stays readable."""
        lines = refusal(written, lambda c: c.require(iter_params(tiny(hidden_size=128, num_experts=16))))
        assert len(lines) == 21
        assert "more problems like these" in lines[-1]

    def test_all_kinds_of_problems_at_once(self, tmp_path):
        foreign = dataclasses.replace(PARAMS[2], name="extra")
        params = [p for p in params_with(A_LOG, shape=(4,)) if p.name != PARAMS[3].name] + [foreign]

        def tensor(p: Param) -> Tensor:
            return get(PARAMS[2]) if p is foreign else get(p)[:4] if p.name == A_LOG else get(p)

        text = "\n".join(self.lines(tmp_path, params, tensor))
        assert text.count("\n") == 2
        for words in (f"{A_LOG} has shape", f"{PARAMS[3].name} is missing", "extra has no place"):
            assert words in text

    def test_reading_checks_the_one_tensor_again(self, tmp_path):
        params = params_with(A_LOG, shape=(4,))
        write_checkpoint(tmp_path / "k3", params[:-1], lambda p: get(p)[:4] if p.name == A_LOG else get(p))
        (a_log,) = (p for p in PARAMS if p.name == A_LOG)
        (line,) = refusal(tmp_path / "k3", lambda c: c.read(a_log))
        assert f"{SINGLE}: tensor {A_LOG} has shape" in line
        (line,) = refusal(tmp_path / "k3", lambda c: c.read(PARAMS[-1]))
        assert f"tensor {LAST} is missing" in line


class TestInterruptedWrites:
    def left(self, tmp_path: Path) -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    def test_an_existing_folder_is_refused(self, tmp_path):
        (tmp_path / "k3").mkdir()
        with pytest.raises(CheckpointError, match="k3 exists already; name a new folder or remove it"):
            write_checkpoint(tmp_path / "k3", PARAMS, get)
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match="link exists already"):
            write_checkpoint(tmp_path / "link", PARAMS, get)
        assert self.left(tmp_path) == ["k3", "link"]

    @pytest.mark.parametrize("error", [ValueError("no such expert"), KeyboardInterrupt(), OSError(errno.EIO, "I/O")])
    def test_an_error_of_get_passes_and_nothing_stays(self, tmp_path, error):
        def failing(p: Param) -> Tensor:
            if p.name == LAST:
                raise error
            return get(p)

        with pytest.raises(type(error)) as caught:
            write_checkpoint(tmp_path / "k3", PARAMS, failing, shard_bytes=200_000)
        assert caught.value is error
        assert self.left(tmp_path) == []

    @pytest.mark.parametrize("wrong", [lambda t: t.bfloat16(), lambda t: t[:4], lambda t: t[None]])
    def test_a_tensor_that_is_not_as_tabled(self, tmp_path, wrong):
        with pytest.raises(CheckpointError, match=f"{SINGLE}: tensor {A_LOG} would be written as"):
            write_checkpoint(tmp_path / "k3", PARAMS, lambda p: wrong(get(p)) if p.name == A_LOG else get(p))
        assert self.left(tmp_path) == []

    def test_a_write_that_the_disk_cuts_short(self, tmp_path):
        """A real one: the kernel takes part of a tensor and refuses the rest."""
        big = Param(name="big", shape=(300_000,), dtype=DType.F32, part=Part.NORM)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))
            with pytest.raises(CheckpointError) as caught:
                write_checkpoint(tmp_path / "k3", [PARAMS[2], big], lambda p: torch.zeros(p.shape).to(
                    torch.bfloat16 if p.dtype is DType.BF16 else torch.float32))  # fmt: skip
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert f"k3.partial/{SINGLE}: tensor big can't be written (File too large)" in str(caught.value)
        assert self.left(tmp_path) == []

    @pytest.mark.parametrize("call", ["fsync", "rename"])
    def test_a_disk_that_fails_later(self, tmp_path, monkeypatch, call):
        def full(*args: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, call, full)
        with pytest.raises(CheckpointError, match=r"k3.* can't be written \(No space left on device\)"):
            write_checkpoint(tmp_path / "k3", PARAMS, get)
        monkeypatch.undo()
        assert self.left(tmp_path) == []

    @pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads Linux's /proc")
    def test_every_file_is_on_the_disk_before_the_folder_appears(self, tmp_path, monkeypatch):
        synced: list[str] = []
        fsync = os.fsync

        def recorded(descriptor: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(f"{tmp_path}/"))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", recorded)
        write_checkpoint(tmp_path / "k3", PARAMS, get, shard_bytes=200_000, extra_files={"config.json": "{}"})
        files = {f"k3.partial/{path.name}" for path in (tmp_path / "k3").iterdir()}
        assert set(synced[:-2]) == files
        assert synced[-2:] == ["k3.partial", str(tmp_path)]  # its names, then its own name after the renaming

    def test_too_little_space_is_said_before_the_first_tensor(self, tmp_path, monkeypatch):
        asked = []
        usage = shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(CheckpointError, match="its disk has 1,000 free; choose another disk"):
            write_checkpoint(tmp_path / "k3", PARAMS, lambda p: asked.append(p) or get(p))
        assert asked == []
        assert self.left(tmp_path) == []

    def test_a_parent_that_is_a_file(self, tmp_path):
        (tmp_path / "file").write_text("x")
        with pytest.raises(CheckpointError, match="can't be written"):
            write_checkpoint(tmp_path / "file" / "k3", PARAMS, get)

    def test_an_index_among_the_extra_files(self, tmp_path):
        """A stale index copied along with the tokenizer would describe other shards."""
        with pytest.raises(CheckpointError, match=f"{INDEX} is made from the tensors"):
            write_checkpoint(tmp_path / "k3", PARAMS, get, extra_files={INDEX: "{}"})

    def test_until_the_end_there_is_only_the_partial_folder(self, tmp_path):
        """So that is all a killed process leaves; the next call replaces it, whatever is in it."""
        (tmp_path / "k3.partial" / "old").mkdir(parents=True)
        (tmp_path / "k3.partial" / "model-00001-of-00009.safetensors").write_text("cut")

        def watched(p: Param) -> Tensor:
            assert self.left(tmp_path) == ["k3.partial"]
            return get(p)

        write_checkpoint(tmp_path / "k3", PARAMS, watched, shard_bytes=200_000)
        assert self.left(tmp_path) == ["k3"]
        assert not (tmp_path / "k3" / "old").exists()
        assert not (tmp_path / "k3" / "model-00001-of-00009.safetensors").exists()


BIG = [Param(name=f"t{i}", shape=(8, 2**20), dtype=DType.BF16, part=Part.NORM) for i in range(12)]


class TestMemory:
    def test_one_tensor_lives_at_a_time(self, tmp_path):
        source = OneAtATime(TENSORS)
        write_checkpoint(tmp_path / "k3", PARAMS, source.get, shard_bytes=200_000)
        assert source.given == len(PARAMS)

    @pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
    def test_writing_and_copying_hold_one_tensor(self, tmp_path):
        """192 MiB in shards of 64 MiB, tensors of 16 MiB: never as much as a shard (the allocator keeps one)."""
        tensor_bytes = BIG[0].num_bytes
        with peak_of_anonymous_memory() as peak:
            write_checkpoint(tmp_path / "a", BIG, lambda p: torch.full(p.shape, 1.5, dtype=torch.bfloat16),
                             shard_bytes=4 * tensor_bytes)  # fmt: skip
        assert tensor_bytes / 2 < peak[0] < 3 * tensor_bytes
        with Checkpoint(tmp_path / "a") as source, peak_of_anonymous_memory() as peak:
            write_checkpoint(tmp_path / "b", BIG, source.read, shard_bytes=4 * tensor_bytes)
        assert peak[0] < 2 * tensor_bytes
        for path in shards(tmp_path / "a"):
            assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


@pytest.mark.slow
def test_the_published_checkpoint_is_judged_in_seconds(tmp_path):
    """497,220 headers over 98 shards, 1.56 TB that take no room: the files are holes."""
    params = list(iter_params(published()))
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(safetensors_io.plan_shards(params, 16 * 10**9)):
        path, header, at = tmp_path / f"{i}.safetensors", {}, 0
        for p in shard:
            header[p.name] = {"dtype": p.dtype, "shape": p.shape, "data_offsets": [at, at + p.num_bytes]}
            weight_map[p.name] = path.name
            at += p.num_bytes
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(path, 8 + len(text) + at)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    start = time.process_time()
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.require(iter_params(published()))
        assert len(checkpoint.headers) == 497_220
    assert time.process_time() - start < 30


class TestHeaders:
    def test_read_header_reads_no_data(self, written):
        found = read_header(shards(written)[0])
        first = PARAMS[0]
        assert found[first.name].shape == first.shape
        assert found[first.name].dtype == "BF16"
        assert found[first.name].file == shards(written)[0].name
        assert "__metadata__" not in found

    def test_a_header_larger_than_the_limit(self, written, monkeypatch):
        monkeypatch.setattr(safetensors_header, "HEADER_LIMIT", 100)
        with pytest.raises(CheckpointError, match="no safetensors file"):
            read_header(shards(written)[0])

    def test_types_whose_size_is_unknown_are_left_to_the_table(self, tmp_path):
        text = json.dumps({"t": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
        (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + b"\0\0")
        assert read_header(tmp_path / SINGLE)["t"].dtype == "F4"

    def test_public_names_stay_together(self):
        assert safetensors_io.TensorHeader is safetensors_header.TensorHeader
