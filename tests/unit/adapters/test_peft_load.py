"""PEFT folders that are wrong, each in one way."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_k3.adapters.peft_config import LAYOUT_FIELD
from miles_k3.adapters.peft_io import PREFIX, load_peft, save_peft
from miles_k3.adapters.store import AdapterStore
from miles_k3.adapters.update import make_update
from miles_k3.errors import AdapterError

LAYER = "language_model.model.layers.1."
W1 = LAYER + "block_sparse_moe.experts.w1"


@pytest.fixture
def saved(new_update, tmp_path):
    folder = tmp_path / "adapter"
    save_peft(folder, new_update(0), "some/base")
    return folder


def edit_config(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def edit_tensors(folder, edit):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_rslora", True),
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"o_proj": 8}),
        ("alpha_pattern", {"o_proj": 8}),
        ("fan_in_fan_out", True),
        ("lora_bias", True),
        ("init_lora_weights", "pissa"),
        ("target_parameters", ["experts.w1"]),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [1]),
        ("some_future_field", 1),
        ("peft_type", "IA3"),
        ("r", 0),
        ("r", 4.0),
        ("r", True),
        ("lora_alpha", 0),
        ("lora_alpha", None),
        ("lora_alpha", "32"),
        (LAYOUT_FIELD, "sideways"),
    ],
)
def test_config_that_is_not_plain_lora(config, saved, field, value):
    edit_config(saved, **{field: value})
    with pytest.raises(AdapterError, match=f"{field} is "):
        load_peft(saved, config)


def test_config_findings_come_together(config, saved):
    edit_config(saved, use_dora=True, use_rslora=True, r=-1)
    with pytest.raises(AdapterError) as e:
        load_peft(saved, config)
    assert len(str(e.value).splitlines()) == 3


def test_missing_folder_and_torn_files(config, saved, tmp_path):
    with pytest.raises(AdapterError, match="does not exist"):
        load_peft(tmp_path / "nowhere", config)
    tensors = saved / "adapter_model.safetensors"
    whole = tensors.read_bytes()
    for size in (0, 4, 100, len(whole) - 1):
        tensors.write_bytes(whole[:size])
        with pytest.raises(AdapterError, match="not a whole safetensors file"):
            load_peft(saved, config)
    tensors.unlink()
    with pytest.raises(AdapterError, match="expected a PEFT folder with adapter_model"):
        load_peft(saved, config)
    (saved / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError, match="not JSON"):
        load_peft(saved, config)


def test_missing_unmatched_and_renamed_keys(config, saved):
    good = f"{LAYER}block_sparse_moe.experts.3.w1.lora_A.weight"

    def rename(tensors):
        tensors[(PREFIX + good).replace(".w1.", ".w_1.")] = tensors.pop(PREFIX + good)
        tensors["lm_head.lora_A.weight"] = torch.zeros(4, 4)

    edit_tensors(saved, rename)
    with pytest.raises(AdapterError) as e:
        load_peft(saved, config)
    text = str(e.value)
    assert "lacks 1 of" in text
    assert "2 keys that match nothing in this model" in text
    assert f"(did you mean {good}?)" in text
    assert "lm_head.lora_A.weight" in text


def test_a_key_with_and_without_prefix(config, saved):
    name = f"{LAYER}self_attn.o_proj.lora_A.weight"
    edit_tensors(saved, lambda t: t.update({name: t[PREFIX + name] + 1}))
    with pytest.raises(AdapterError, match="both with and without"):
        load_peft(saved, config)


def test_a_wrong_rank_is_told_in_a_few_lines(config, saved):
    edit_config(saved, r=8)
    with pytest.raises(AdapterError, match=r"or another r than adapter_config.json says") as refusal:
        load_peft(saved, config)
    *spelt_out, counted = str(refusal.value).splitlines()
    assert len(spelt_out) == 3
    assert "tensors of other shapes than this model and rank need, in all" in counted


def test_adapter_for_another_model(config, saved):
    other = replace(config, hidden_size=64)
    with pytest.raises(
        AdapterError, match=r"of shape \[4, 48\], this model and rank need \[4, 64\]: an adapter for another"
    ):
        load_peft(saved, other)
    with pytest.raises(AdapterError, match="match nothing in this model"):
        load_peft(saved, replace(config, num_experts=4))
    edit_config(saved, r=8)
    with pytest.raises(AdapterError, match="another model"):
        load_peft(saved, config)


def test_outer_factors_that_differ_between_experts(config, saved):
    name = f"{PREFIX}{LAYER}block_sparse_moe.experts.2.w1.lora_A.weight"
    edit_tensors(saved, lambda t: t[name].add_(1e-3))
    with pytest.raises(AdapterError, match=rf"1 experts of {W1} whose lora_A differs.*experts\.2\.w1"):
        load_peft(saved, config)


@pytest.mark.parametrize("path", ["self_attn.o_proj.lora_B.weight", "block_sparse_moe.experts.4.w1.lora_B.weight"])
def test_non_finite_values_and_other_dtypes(config, saved, path):
    name = PREFIX + LAYER + path
    edit_tensors(saved, lambda t: t[name].view(-1)[-1:].fill_(float("nan")))
    with pytest.raises(AdapterError, match="1 non-finite values"):
        load_peft(saved, config)
    edit_tensors(saved, lambda t: t.update({name: torch.zeros_like(t[name], dtype=torch.float16)}))
    with pytest.raises(AdapterError, match=r"F16.*expected F32 or BF16"):
        load_peft(saved, config)


def test_experts_of_different_dtypes(config, saved):
    name = f"{PREFIX}{LAYER}block_sparse_moe.experts.4.w1.lora_B.weight"
    edit_tensors(saved, lambda t: t.update({name: t[name].bfloat16()}))
    with pytest.raises(AdapterError, match="different dtypes"):
        load_peft(saved, config)


def test_loaded_tensors_outlive_the_file(config, saved):
    found, tensors = load_peft(saved, config)
    before = make_update(0, found, tensors)
    path = saved / "adapter_model.safetensors"
    with path.open("r+b") as file:  # safetensors maps files into memory: what is written there must not show
        file.write(bytes(path.stat().st_size))
    assert make_update(0, found, tensors).sha256 == before.sha256
    store = AdapterStore(config, max_rank=4, dtype=torch.float32)
    store.load(replace(before, tensors=tensors))  # refuses tensors that do not own their memory
