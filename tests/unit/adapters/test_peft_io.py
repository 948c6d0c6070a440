import json
import os
import warnings
from dataclasses import replace

import peft
import pytest
import torch
from helpers.ordinary_rights import ordinary_rights
from safetensors.torch import load_file, save_file
from torch import nn

from miles_k3.adapters.layout import adapter_layout, by_module, join_expert, split_expert, tensor_name
from miles_k3.adapters.merge import merge_into
from miles_k3.adapters.peft_config import LAYOUT_FIELD
from miles_k3.adapters.peft_io import PREFIX, load_peft, save_peft
from miles_k3.adapters.store import AdapterStore
from miles_k3.adapters.update import make_update
from miles_k3.errors import AdapterError
from miles_k3.types import AdapterConfig

LAYER = "language_model.model.layers.1."


def module_tree(config, seed=5):
    """Every adapted weight as an nn.Linear below the checkpoint's module name, and a few that no adapter may touch."""
    generator = torch.Generator().manual_seed(seed)
    root = nn.Module()

    def put(path, width_out, width_in):
        *parents, leaf = path.split(".")
        at = root
        for part in parents:
            if part not in dict(at.named_children()):
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        linear = nn.Linear(width_in, width_out, bias=False)
        linear.weight.data = torch.randn(width_out, width_in, generator=generator) * 0.2
        at.add_module(leaf, linear)

    for module, (a, b) in by_module(adapter_layout(config, AdapterConfig(rank=1, alpha=1.0))).items():
        paths = [module] if a.kind == "dense" else [join_expert(module, e) for e in range(config.num_experts)]
        for path in paths:
            put(path, b.shape[-2], a.shape[-1])
    put(LAYER + "self_attn.q_proj", 8, 8)
    put(LAYER + "block_sparse_moe.gate", 8, 8)
    put(LAYER + "block_sparse_moe.routed_expert_down_proj", 8, 8)
    return root


def linears(model):
    """Module name -> module, peft's wrapping taken off; only what a caller of the model would call."""
    out = {}
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Linear | peft.tuners.lora.LoraLayer)
            and ".lora_" not in name
            and "base_layer" not in name
        ):
            out[name.removeprefix(PREFIX)] = module
    return out


def inputs(width):
    return torch.randn(3, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64).float()


def load_with_peft(config, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # peft only warns about keys that it could not place
        return peft.PeftModel.from_pretrained(module_tree(config), str(folder))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "adapters" / "final"


@pytest.mark.parametrize(("rank", "alpha"), [(4, 6.0), (8, 16.0), (3, 3.0), (2, 0.5)])
def test_trainer_engine_merged_and_peft_agree(config, new_update, folder, rank, alpha):
    update = new_update(0, adapter=AdapterConfig(rank=rank, alpha=alpha))
    save_peft(folder, update, "some/base")
    base, tuned = linears(module_tree(config)), linears(load_with_peft(config, folder))
    assert base.keys() == tuned.keys()
    merged = merge_into({f"{name}.weight": m.weight.detach() for name, m in base.items()}, update)
    store = AdapterStore(config, max_rank=8, dtype=torch.float32)
    store.load(update)
    slot = store.slots[0]
    touched = 0
    for name, plain in base.items():
        x = inputs(plain.in_features)
        by_peft = tuned[name](x) - plain(x)
        by_merge = x @ (merged[f"{name}.weight"] - plain.weight).T
        module, expert = split_expert(name)
        if module not in slot.factors:
            assert not by_peft.any()
            assert not by_merge.any()
            continue
        touched += 1
        a, b = (update.tensors[tensor_name(module, factor)] for factor in ("A", "B"))
        by_trainer = lora(x, a, b, expert) * (alpha / rank)
        pair = slot.get(module)
        by_engine = lora(x, pair.a, pair.b, expert) * slot.scaling
        for other in (by_engine, by_merge, by_peft):
            torch.testing.assert_close(other, by_trainer, rtol=1e-5, atol=2e-5)
        assert by_trainer.abs().max() > 0.01
    assert touched == len(base) - 3


def lora(x, a, b, expert):
    if expert is not None:
        a, b = a[min(expert, len(a) - 1)], b[min(expert, len(b) - 1)]
    return x @ a.T @ b.T


@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(config, adapter, new_update, folder, expand, dtype):
    update = new_update(0, dtype=dtype)
    save_peft(folder, update, "some/base", expand_experts=expand)
    found, tensors = load_peft(folder, config)
    assert found == adapter
    assert list(tensors) == list(adapter_layout(config, adapter))
    for name, tensor in tensors.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, update.tensors[name])
    assert make_update(0, found, tensors).sha256 == update.sha256


def test_round_trip_without_a_shared_a(config, adapter, new_update, folder):
    own = replace(adapter, share_gate_up_a=False)
    update = new_update(0, adapter=own)
    save_peft(folder, update, "some/base")
    assert load_peft(folder, config)[0] == own


def test_what_peft_saves_loads_here(config, adapter, new_update, folder, tmp_path):
    update = new_update(0)
    save_peft(folder, update, "some/base")
    load_with_peft(config, folder).save_pretrained(str(tmp_path / "by_peft"), save_embedding_layers=False)
    found, tensors = load_peft(tmp_path / "by_peft", config)
    assert found == adapter
    assert all(torch.equal(tensors[n], t) for n, t in update.tensors.items())


def test_keys_and_config(config, adapter, new_update, folder, tmp_path):
    update = new_update(0)
    save_peft(folder, update, "some/base")
    keys = load_file(folder / "adapter_model.safetensors")
    assert f"{PREFIX}{LAYER}block_sparse_moe.experts.4.w1.lora_A.weight" in keys
    assert all(t.dim() == 2 for t in keys.values())
    fields = json.loads((folder / "adapter_config.json").read_text())
    assert (fields["r"], fields["lora_alpha"], fields["base_model_name_or_path"]) == (4, 6, "some/base")
    assert LAYOUT_FIELD not in fields

    grouped = tmp_path / "grouped"
    save_peft(grouped, update, "some/base", expand_experts=False)
    assert load_file(grouped / "adapter_model.safetensors").keys() == {PREFIX + n for n in update.tensors}
    fields = json.loads((grouped / "adapter_config.json").read_text())
    assert fields[LAYOUT_FIELD] == "grouped"
    targets = ["o_proj", "q_a_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj", "down_proj"]
    assert sorted(fields["target_modules"]) == sorted(targets)


def test_names_of_the_spec_without_a_prefix_load_too(config, new_update, folder):
    update = new_update(0)
    save_peft(folder, update, "some/base", expand_experts=False)
    save_file(dict(update.tensors), folder / "adapter_model.safetensors")
    assert all(torch.equal(t, update.tensors[n]) for n, t in load_peft(folder, config)[1].items())


def test_same_tensors_give_the_same_bytes(new_update, tmp_path):
    update = new_update(0)
    other = make_update(9, update.config, dict(reversed(update.tensors.items())))
    for name, u in (("a", update), ("b", other)):
        save_peft(tmp_path / name, u, "some/base")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


# --- saving -----------------------------------------------------------------------------------------------------------
def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_existing_folders(new_update, folder):
    save_peft(folder, new_update(0), "some/base")
    before = contents(folder)
    save_peft(folder, new_update(0), "some/base")  # the same again
    with pytest.raises(AdapterError, match=r"another adapter.*overwrite"):
        save_peft(folder, new_update(1), "some/base")
    assert contents(folder) == before
    save_peft(folder, new_update(1), "some/base", overwrite=True)
    assert contents(folder) != before
    assert [p.name for p in folder.parent.iterdir()] == ["final"]


def test_a_folder_with_other_files_is_never_replaced(new_update, folder):
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("x")
    with pytest.raises(AdapterError, match=r"other files \(thesis\.tex\)"):
        save_peft(folder, new_update(0), "some/base", overwrite=True)
    assert contents(folder) == {"thesis.tex": b"x"}
    assert [p.name for p in folder.parent.iterdir()] == ["final"]


def test_a_file_in_the_way_and_an_empty_folder(new_update, folder):
    folder.parent.mkdir()
    folder.write_text("x")
    with pytest.raises(AdapterError, match="is a file"):
        save_peft(folder, new_update(0), "some/base", overwrite=True)
    folder.unlink()
    folder.mkdir()
    save_peft(folder, new_update(0), "some/base")
    assert len(contents(folder)) == 2


def test_a_failed_write_leaves_the_old_adapter(new_update, folder, monkeypatch):
    save_peft(folder, new_update(0), "some/base")
    before = contents(folder)

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_peft(folder, new_update(1), "some/base", overwrite=True)
    assert contents(folder) == before
    assert [p.name for p in folder.parent.iterdir()] == ["final"]


def test_an_old_adapter_that_may_not_be_removed(new_update, folder):
    """The new one is in place and whole; what is in the way is named."""
    save_peft(folder, new_update(0), "some/base")
    folder.chmod(0o555)
    with ordinary_rights(), pytest.raises(PermissionError) as refusal:
        save_peft(folder, new_update(1), "some/base", overwrite=True)
    [old] = [p for p in folder.parent.iterdir() if p != folder]
    assert str(refusal.value.filename).startswith(f"{old}/")
    assert len(contents(folder)) == 2
    old.chmod(0o755)


def test_files_are_synced_before_they_get_their_name(new_update, folder, monkeypatch):
    events = []
    fsync, rename = os.fsync, type(folder).rename
    monkeypatch.setattr(os, "fsync", lambda d: (events.append(os.readlink(f"/proc/self/fd/{d}")), fsync(d))[1])
    monkeypatch.setattr(type(folder), "rename", lambda s, t: (events.append(f"rename to {t.name}"), rename(s, t))[1])
    save_peft(folder, new_update(0), "some/base")
    names = [e if e.startswith("rename") else e.rpartition("/")[2] for e in events]
    assert names[:2] == ["adapter_config.json", "adapter_model.safetensors"]
    assert names[2].endswith(".tmp")
    assert names[3:] == ["rename to final", "adapters"]


def test_a_changed_update_is_not_saved(new_update, folder):
    update = new_update(0)
    next(iter(update.tensors.values()))[0, 0] += 1
    with pytest.raises(AdapterError, match="changed after the export"):
        save_peft(folder, update, "some/base")
    assert not folder.exists()
