"""Killed, refused by the disk, or asked for what can't be: nothing is lost, nothing half-done has the final name."""

import errno
import json
import os
import shutil
import signal
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from helpers.exports import contents, write_base
from helpers.ordinary_rights import ordinary_rights
from helpers.tiny import tiny_adapter
from safetensors import safe_open
from safetensors.torch import save_file

from miles_k3.adapters.peft_io import save_peft
from miles_k3.adapters.peft_read import PeftReader
from miles_k3.adapters.update import make_update
from miles_k3.errors import AdapterError, CheckpointError, ConfigError
from miles_k3.export.merging import Merger
from miles_k3.export.shards import ShardedFolder
from miles_k3.export.verify import verify_merged
from miles_k3.files import FolderLock
from miles_k3.k3.safetensors_io import INDEX, NewFile


def killed(export, folder: Path, at: str, *, resume: bool) -> bool:
    """Export in a child that kills itself when it comes to tensor `at`; whether it came that far."""
    child = os.fork()
    if child == 0:
        inner = Merger.pieces

        def pieces(self, p):
            if p.name == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(self, p)

        Merger.pieces = pieces
        export(folder, "mxfp4", resume=resume)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.fixture
def inside(merged) -> list[str]:
    """A tensor amid each shard."""
    weight_map = json.loads((merged("mxfp4") / INDEX).read_text())["weight_map"]
    shards = [[n for n, file in weight_map.items() if file == name] for name in sorted(set(weight_map.values()))]
    return [names[len(names) // 2] for names in shards]


def test_killed_at_every_shard_and_resumed(export, merged, inside, tmp_path):
    """Each process makes one shard more than the one before; the last folder is that of one that was never killed."""
    folder, partial = tmp_path / "out", tmp_path / "out.partial"
    assert len(inside) > 4
    for number, name in enumerate(inside):
        assert killed(export, folder, name, resume=number > 0)
        assert not folder.exists()
        assert len(list(partial.glob("note-*"))) == number
    export(folder, "mxfp4", resume=True)
    made, whole = contents(folder), contents(merged("mxfp4"))
    for name in ("export.json", "export.txt"):  # this one wasn't read back
        del made[name], whole[name]
    assert made == whole


def test_the_losses_of_shards_made_earlier_are_in_the_report(export, merged, inside, tmp_path):
    assert killed(export, tmp_path / "out", inside[2], resume=False)
    report = export(tmp_path / "out", "mxfp4", resume=True, verify=True)
    assert contents(tmp_path / "out") == contents(merged("mxfp4"))
    assert report["rounding"]["expert"]["below_half_step"] > 0


def test_a_shard_that_changed_after_it_was_noted_is_made_again(export, merged, inside, tmp_path):
    assert killed(export, tmp_path / "out", inside[2], resume=False)
    first = sorted((tmp_path / "out.partial").glob("model-*.safetensors"))[0]
    with first.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    export(tmp_path / "out", "mxfp4", resume=True, verify=True)
    assert contents(tmp_path / "out") == contents(merged("mxfp4"))


def test_a_full_disk_loses_nothing(export, merged, tmp_path, monkeypatch):
    write, room = NewFile.write, [400_000]

    def full(self, data, what):
        room[0] -= len(data)
        if room[0] < 0:
            raise CheckpointError(f"{self._path}{what} can't be written") from OSError(errno.ENOSPC, "No space left")
        write(self, data, what)

    monkeypatch.setattr(NewFile, "write", full)
    with pytest.raises(CheckpointError, match="go on with --resume once there is room; what is written stays"):
        export(tmp_path / "out", "mxfp4")
    left = sorted(p.name for p in (tmp_path / "out.partial").glob("model-*.safetensors"))
    assert len(left) == 2
    assert not list((tmp_path / "out.partial").glob(".tmp-*")), "what was begun would keep the room"
    room[0] = 10**9
    export(tmp_path / "out", "mxfp4", resume=True, verify=True)
    assert contents(tmp_path / "out") == contents(merged("mxfp4"))


def test_a_disk_that_can_not_hold_it_is_refused_before_anything(export, tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="more bytes, its disk has 1,000 free; go on with --resume"):
        export(tmp_path / "out", "mxfp4")


def test_folders_that_are_there_already(export, case, inside, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="out exists already; name a new folder"):
        export(tmp_path / "out", "bf16")
    assert not (tmp_path / "out.partial").exists()
    assert killed(export, tmp_path / "x", inside[2], resume=False)
    with pytest.raises(ConfigError, match="was interrupted; go on with --resume, or remove it"):
        export(tmp_path / "x", "mxfp4")
    with pytest.raises(ConfigError, match="was begun with another to, shards; export the same as then"):
        export(tmp_path / "x", "bf16", resume=True)
    (tmp_path / "y.partial").mkdir()
    (tmp_path / "y.partial" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds other files \(notes.txt\); choose another folder"):
        export(tmp_path / "y", "bf16", resume=True)
    assert (tmp_path / "y.partial" / "notes.txt").read_text() == "mine"


def test_two_at_once(export, tmp_path):
    (tmp_path / "out.partial").mkdir()
    lock = FolderLock.take(tmp_path / "out.partial")
    with pytest.raises(ConfigError, match="being written by this very process"):
        export(tmp_path / "out", "bf16", resume=True)
    lock.release()
    export(tmp_path / "out", "bf16", resume=True)


def test_another_adapter_or_base_does_not_go_on(export, case, inside, tmp_path):
    assert killed(export, tmp_path / "out", inside[2], resume=False)
    update = make_update(0, case.update.config, tiny_adapter(case.config, case.update.config, seed=1))
    save_peft(tmp_path / "other", update, str(case.base))
    with pytest.raises(ConfigError, match="was begun with another adapter"):
        export(tmp_path / "out", "mxfp4", source=tmp_path / "other", resume=True)
    shutil.copytree(case.base, tmp_path / "base")
    with pytest.raises(ConfigError, match="was begun with another base"):
        export(tmp_path / "out", "mxfp4", model=tmp_path / "base", resume=True)


def test_no_permission(export, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="can't be written"):
        export(tmp_path / "file" / "out", "bf16")

    (tmp_path / "closed").mkdir(mode=0o555)
    with ordinary_rights():
        for folder in (tmp_path / "closed" / "out", tmp_path / "closed" / "deep" / "out"):
            with pytest.raises(CheckpointError, match=r"can't be written \(Permission denied\); change its"):
                export(folder, "bf16")
    assert list((tmp_path / "closed").iterdir()) == []


def changed(folder: Path, match: str, to: Path, keep_hash: bool = True) -> Path:
    """A copy of an adapter with one value of the first tensor of that name changed."""
    shutil.copytree(folder, to)
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 not a dict
        metadata = file.metadata()
    name = next(n for n in sorted(tensors) if match in n)
    tensors[name].view(-1)[0] += 1
    save_file(tensors, to / "adapter_model.safetensors", metadata=metadata if keep_hash else None)
    return to


def test_a_tampered_adapter(export, case, tmp_path):
    folder = changed(case.peft, "o_proj.lora_B", tmp_path / "changed")
    with pytest.raises(AdapterError, match="holds other tensors, rank or alpha than it was written with"):
        export(tmp_path / "out", "bf16", source=folder)
    config = (case.peft / "adapter_config.json").read_text()
    scaled = shutil.copytree(case.peft, tmp_path / "scaled")
    (scaled / "adapter_config.json").write_text(config.replace('"lora_alpha": 6', '"lora_alpha": 60'))
    with pytest.raises(AdapterError, match="rank or alpha than it was written with"):
        export(tmp_path / "out", "bf16", source=scaled)
    assert not list(tmp_path.glob("out*"))
    plain = changed(case.peft, "o_proj.lora_B", tmp_path / "plain", keep_hash=False)
    export(tmp_path / "out", "bf16", source=plain)  # a file of other tools has no hash to go by


def test_an_adapter_of_another_model(export, case, tmp_path):
    from k3_cases import random_tensors, tiny

    other = tiny(hidden_size=128, num_experts=4)
    write_base(tmp_path / "other", other, random_tensors(other))
    with pytest.raises(AdapterError, match="an adapter for another model"):
        export(tmp_path / "out", "bf16", model=tmp_path / "other")


def test_no_adapter_is_merged_twice(export, case, merged, tmp_path):
    with pytest.raises(AdapterError, match=r"already holds adapter .* name the base that it was trained on"):
        export(tmp_path / "out", "bf16", model=merged("bf16"))
    update = make_update(0, case.update.config, tiny_adapter(case.config, case.update.config, seed=1))
    save_peft(tmp_path / "next", update, str(merged("mxfp4")))
    export(tmp_path / "out", "bf16", source=tmp_path / "next", verify=True)  # trained on the merged base


def flip(folder: Path, match: str, bit: int) -> str:
    """Flip a bit of the middle byte of the first tensor of that name; its name."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 not a dict
            metadata = file.metadata()
        if name := next((n for n in sorted(tensors) if match in n), None):
            flat = tensors[name].view(-1).view(torch.uint8)
            flat[len(flat) // 2 & ~1] ^= 1 << bit
            save_file(tensors, path, metadata=metadata)
            return name
    raise AssertionError(match)


@pytest.mark.parametrize(
    ("target", "match", "bit"),
    [
        ("bf16", "layers.2.input_layernorm.weight", 0),  # untouched by the adapter: any bit
        ("bf16", "experts.3.w1.weight", 1),
        ("bf16", "layers.1.self_attn.o_proj.weight", 1),
        ("mxfp4", "experts.3.w1.weight_packed", 0),
        ("mxfp4", "experts.2.w2.weight_scale", 0),
        ("mxfp4", "vision_tower.patch_embed.proj", 0),
    ],
)
def test_verify_finds_a_flipped_bit(case, merged, tmp_path, target, match, bit):
    folder = shutil.copytree(merged(target), tmp_path / "copy")
    with PeftReader(case.peft, case.config) as adapter:
        assert verify_merged(folder, case.base, case.config, adapter) > 100
        name = flip(folder, match, bit)
        with pytest.raises(CheckpointError, match="export it again") as error:
            verify_merged(folder, case.base, case.config, adapter)
    assert name.removesuffix("_scale") in str(error.value)


def test_a_finished_export_is_left_as_it_is(export, merged, tmp_path):
    folder = shutil.copytree(merged("mxfp4"), tmp_path / "copy")
    assert export(folder, "mxfp4", resume=True, verify=True)["to"] == "mxfp4"
    assert contents(folder) == contents(merged("mxfp4"))
    with pytest.raises(ConfigError, match="exists already"):
        export(folder, "bf16", resume=True)
    flip(folder, "experts.3.w1.weight_packed", 0)
    with pytest.raises(CheckpointError, match="export it again"):
        export(folder, "mxfp4", resume=True, verify=True)


def test_a_shard_asks_for_no_more_than_it_says(tmp_path, case):
    """The plan covers every tensor once, in order."""
    from miles_k3.k3.params import iter_params

    params = list(iter_params(case.config))
    with ShardedFolder(tmp_path / "out", params, {}, shard_bytes=100_000, resume=False) as out:
        assert [p for shard in out.shards for p in shard.params] == params
        assert all(shard.num_bytes <= 100_000 or len(shard.params) == 1 for shard in out.shards)
