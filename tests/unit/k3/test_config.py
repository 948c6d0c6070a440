"""K3Config and the published config.json: what is read, what is kept, what is refused (spec 1, trap 1)."""

import copy
import dataclasses
import json
from typing import Any

import pytest
from k3_cases import published, published_json, tiny, tiny_json

from miles_k3.errors import CheckpointError
from miles_k3.k3.config import K3Config

REMOVED = object()


def changed(path: str, value: Any) -> dict[str, Any]:
    """The published file with one field replaced; `path` is dotted below text_config, or begins with a slash."""
    raw = published_json()
    *owners, key = path.removeprefix("/").split(".")
    found = raw if path.startswith("/") else raw["text_config"]
    for owner in owners:
        found = found[owner]
    if value is REMOVED:
        del found[key]
    else:
        found[key] = value
    return raw


def refusal(raw: dict[str, Any]) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        K3Config.from_json(raw)
    return str(caught.value).splitlines()


class TestPublished:
    def test_reads_and_writes_back_equal(self):
        raw = published_json()
        assert K3Config.from_json(raw).to_json() == raw

    def test_unknown_fields_survive_everywhere(self):
        raw = published_json()
        for owner in (raw, raw["text_config"], raw["text_config"]["linear_attn_config"], raw["vision_config"]):
            owner["a_later_field"] = {"deep": [1, None, "x"]}
        assert K3Config.from_json(raw).to_json() == raw

    def test_the_callers_object_stays_the_callers(self):
        raw = published_json()
        config = K3Config.from_json(raw)
        raw["text_config"]["head_dim"] = 1
        config.to_json()["text_config"]["linear_attn_config"]["use_full_rank_gate"] = 1
        assert config.to_json() == published_json()

    def test_numbers(self):
        c = published()
        assert (c.hidden_size, c.vocab_size, c.num_experts, c.num_experts_per_token) == (7168, 163840, 896, 16)
        assert (c.kda_dim, c.qk_head_dim, c.mla_value_dim, c.latent_cache_dim) == (12288, 192, 12288, 576)
        assert (c.shared_intermediate_size, c.a_log_padded) == (6144, 128)
        assert (c.situ_beta, c.situ_linear_beta, c.gate_lower_bound) == (4.0, 25.0, -5.0)
        assert (c.bos_token_id, c.eos_token_id, c.pad_token_id) == (163584, 163586, 163839)
        assert c.vision is not None
        assert c.vision.merge_factor == 4

    def test_layers_count_from_zero_here_and_from_one_in_the_file(self):
        c = published()
        assert (len(c.kda_layers), len(c.mla_layers)) == (69, 24)
        assert c.mla_layers == (*range(3, 92, 4), 92)
        assert [c.is_mla(i) for i in (0, 3, 4, 90, 91, 92)] == [False, True, False, False, True, True]
        assert c.kda_layers == tuple(i for i in range(91) if i % 4 != 3)
        assert (c.is_moe(0), c.is_moe(1)) == (False, True)
        assert c.moe_layers == tuple(range(1, 93))

    def test_bank_rows(self):
        """Spec 2.2: eight writes, at 0, 12, ..., 84; ceil(l/12) rows before layer l."""
        c = published()
        assert [i for i in range(93) if c.starts_block(i)] == list(range(0, 93, 12))
        assert [c.bank_rows(i) for i in (0, 1, 12, 13, 84, 85, 92, 93)] == [0, 1, 1, 2, 7, 8, 8, 8]

    def test_folder(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(published_json()))
        assert K3Config.from_folder(tmp_path) == published()


class TestVariants:
    def test_fields_that_a_file_may_leave_out(self):
        raw = published_json()
        for key in ("moe_layer_freq", "num_expert_group", "topk_group", "topk_method", "num_nextn_predict_layers",
                    "tie_word_embeddings", "quantization_config", "num_key_value_heads", "head_dim"):  # fmt: skip
            del raw["text_config"][key]
        del raw["tie_word_embeddings"]
        assert K3Config.from_json(raw) == published()
        assert K3Config.from_json(raw).to_json() == raw

    def test_the_other_spelling_of_experts_per_token(self):
        raw = published_json()
        raw["text_config"]["num_experts_per_tok"] = raw["text_config"].pop("num_experts_per_token")
        config = K3Config.from_json(raw)
        assert config.num_experts_per_token == 16
        assert config.to_json() == raw

    def test_token_ids_may_sit_in_text_config(self):
        raw = published_json()
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            raw["text_config"][key] = raw.pop(key)
        assert K3Config.from_json(raw) == published()
        assert K3Config.from_json(raw).to_json() == raw

    def test_top_level_token_ids_win(self):
        raw = published_json()
        raw["text_config"]["pad_token_id"] = 0  # a class default that savers write out
        assert K3Config.from_json(raw).pad_token_id == 163839
        assert K3Config.from_json(raw).to_json() == raw

    def test_without_vision(self):
        raw = published_json()
        del raw["vision_config"]
        config = K3Config.from_json(raw)
        assert config.vision is None
        assert config.to_json() == raw

    def test_latent_norm_eps_is_a_choice_of_its_own(self):
        """Trap 11: the reference has 1e-6, serving and training stacks 1e-5; whichever is chosen must survive."""
        assert published().mla_latent_norm_eps == 1e-5
        other = K3Config.from_json(published_json(), mla_latent_norm_eps=1e-6)
        assert (other.mla_latent_norm_eps, other.rms_norm_eps) == (1e-6, 1e-5)
        assert K3Config.from_json(other.to_json()) == other

    def test_a_pruned_model_writes_its_own_layers(self):
        pruned = dataclasses.replace(published(), num_hidden_layers=4, mla_layers=(3,))
        text = pruned.to_json()["text_config"]
        assert text["num_hidden_layers"] == 4
        assert text["linear_attn_config"]["full_attn_layers"] == [4]
        assert text["linear_attn_config"]["kda_layers"] == [1, 2, 3]
        assert K3Config.from_json(pruned.to_json()) == pruned

    def test_dropping_the_vision_tower_drops_its_config(self):
        assert "vision_config" not in dataclasses.replace(published(), vision=None).to_json()

    @pytest.mark.parametrize("merge_factor", [4, 6])
    def test_a_model_made_from_scratch_writes_the_published_shape(self, merge_factor):
        c = tiny()
        assert c.vision is not None
        vision = dataclasses.replace(c.vision, merge_factor=merge_factor)
        scratch = dataclasses.replace(c, raw={}, vision=vision)
        raw = json.loads(json.dumps(scratch.to_json()))
        assert K3Config.from_json(raw) == scratch
        like = published_json()
        for key in ("architectures", "model_type"):
            assert raw[key] == like[key]
            assert raw["text_config"][key] == like["text_config"][key]
        assert raw["text_config"]["num_key_value_heads"] == 4
        ours, theirs = (x["text_config"]["quantization_config"] for x in (raw, like))
        assert ours["ignore"] == theirs["ignore"]
        assert theirs["config_groups"]["group_0"].items() >= {"targets": ["Linear"]}.items()
        assert ours["config_groups"]["group_0"]["weights"].items() >= (
            theirs["config_groups"]["group_0"]["weights"].items()
        )

    def test_a_raw_that_was_never_a_whole_file_is_filled_in(self):
        part = dataclasses.replace(tiny(), raw={"mine": 1, "text_config": {"also_mine": 2, "topk_method": "noaux_tc"}})
        raw = part.to_json()
        assert (raw["mine"], raw["text_config"]["also_mine"]) == (1, 2)
        assert K3Config.from_json(raw) == part


REFUSALS = {
    "hidden_size": ("7168", 0, -1, True, 7168.0, None, REMOVED),
    "rms_norm_eps": ("1e-5", REMOVED, float("nan"), 0),
    "latent_moe_use_norm": (1, "true", REMOVED),
    "activation_situ_beta": (REMOVED, 0.0),
    "activation_situ_linear_beta": (None,),
    "num_experts_per_token": (0, 897, REMOVED),
    "num_shared_experts": (0,),
    "first_k_dense_replace": (0, 94),
    "moe_intermediate_size": (3080,),
    "routed_expert_hidden_size": (3600,),
    "hidden_act": ("silu", REMOVED),
    "mla_use_nope": (False, 1, REMOVED),
    "mla_use_output_gate": (False, REMOVED),
    "moe_router_activation_func": ("softmax", REMOVED),
    "moe_layer_freq": (2,),
    "num_expert_group": (8,),
    "topk_method": ("greedy",),
    "num_nextn_predict_layers": (1,),
    "num_key_value_heads": (8,),
    "tie_word_embeddings": (True,),
    "quantization_config.format": ("pack-quantized",),
    "quantization_config.quant_method": ("fp8", REMOVED),
    "quantization_config.config_groups.group_0.weights.group_size": (16,),
    "linear_attn_config.num_heads": ("96", REMOVED),
    "linear_attn_config.use_full_rank_gate": (False, REMOVED),
    "linear_attn_config.gate_lower_bound": (REMOVED, -5.5, 0.0),
    "/tie_word_embeddings": (True,),
    "/eos_token_id": ([163586, 163585], 163840, -1, REMOVED),
    "/vision_config.patch_size": ("14", REMOVED),
    "/vision_config.merge_kernel": (2, [2, "2"], REMOVED),
}


class TestRefusals:
    @pytest.mark.parametrize(("path", "value"), [(p, v) for p, values in REFUSALS.items() for v in values])
    def test_one_sentence_that_names_the_field(self, path, value):
        (line,) = refusal(changed(path, value))
        assert line.startswith("config.json: ")
        assert path.split(".")[-1].removeprefix("/") in line
        if value is REMOVED:
            assert "missing" in line or "is null" in line

    @pytest.mark.parametrize("path", ["/text_config", "linear_attn_config", "/vision_config"])
    @pytest.mark.parametrize("value", [[], "x"])
    def test_an_object_of_another_kind(self, path, value):
        (line,) = refusal(changed(path, value))
        assert path.removeprefix("/") in line

    def test_every_problem_at_once(self):
        raw = changed("hidden_size", "7168")
        raw["text_config"]["hidden_act"] = "silu"
        del raw["text_config"]["q_lora_rank"]
        raw["text_config"]["linear_attn_config"]["kda_layers"].remove(91)
        lines = refusal(raw)
        assert len(lines) == 4
        for word in ("hidden_size", "hidden_act", "q_lora_rank", "[91]"):
            assert any(word in line for line in lines)

    def test_two_spellings_that_disagree(self):
        (line,) = refusal(changed("num_experts_per_tok", 8))
        assert "is 16 but" in line

    def test_a_long_value_is_cut(self):
        (line,) = refusal(changed("hidden_size", list(range(1000))))
        assert len(line) < 200


class TestLayerLists:
    def lists(self, full: Any = None, kda: Any = None) -> dict[str, Any]:
        raw = tiny_json()
        linear = raw["text_config"]["linear_attn_config"]
        linear["full_attn_layers"] = [4, 7, 8] if full is None else full
        linear["kda_layers"] = [1, 2, 3, 5, 6] if kda is None else kda
        return raw

    def test_the_good_case_of_these_tests(self):
        assert K3Config.from_json(self.lists()).mla_layers == (3, 6, 7)

    def test_overlapping(self):
        (line,) = refusal(self.lists(full=[4, 6, 7, 8]))
        assert "layers [6] are in full_attn_layers and in kda_layers" in line

    def test_missing(self):
        (line,) = refusal(self.lists(kda=[1, 2, 5, 6]))
        assert "layers [3] are in neither" in line

    def test_twice(self):
        (line,) = refusal(self.lists(full=[4, 7, 7, 8]))
        assert "layers [7] are named twice" in line

    def test_counted_from_zero(self):
        lines = refusal(self.lists(full=[3, 6, 7], kda=[0, 1, 2, 4, 5]))
        assert len(lines) == 2
        assert "layers [8] are in neither" in lines[0]
        assert "layers [0] are outside 1..8; layers count from 1" in lines[1]

    @pytest.mark.parametrize("value", [3, "4,7,8", [4, "7", 8], [4, 7.0, 8], [4, True]])
    def test_no_list_of_whole_numbers(self, value):
        (line,) = refusal(self.lists(full=value))
        assert "full_attn_layers is" in line

    def test_absent(self):
        raw = self.lists()
        del raw["text_config"]["linear_attn_config"]["kda_layers"]
        (line,) = refusal(raw)
        assert "kda_layers is null" in line


class TestDirect:
    @pytest.mark.parametrize(
        "change",
        [
            {"mla_layers": (3, 6, 8)},
            {"mla_layers": (6, 3)},
            {"mla_layers": (3, 3)},
            {"hidden_size": 0},
            {"hidden_size": 96.0},
            {"moe_renormalize": 1},
            {"gate_lower_bound": -6.0},
            {"mla_latent_norm_eps": 0.0},
        ],
    )
    def test_an_inconsistent_object_is_refused_too(self, change):
        with pytest.raises(CheckpointError, match=f"K3Config: {next(iter(change))} is"):
            dataclasses.replace(tiny(), **change)


class TestFolderErrors:
    def message(self, folder) -> str:
        with pytest.raises(CheckpointError) as caught:
            K3Config.from_folder(folder)
        assert "\n" not in str(caught.value)
        assert str(folder / "config.json") in str(caught.value)
        return str(caught.value)

    def test_missing(self, tmp_path):
        assert "does not exist" in self.message(tmp_path)

    def test_folder_is_a_file(self, tmp_path):
        (tmp_path / "model").write_text("x")
        assert "can't be read" in self.message(tmp_path / "model")

    def test_torn_json_names_its_line(self, tmp_path):
        (tmp_path / "config.json").write_text('{\n"a": 1,\n')
        assert "config.json:3: not JSON" in self.message(tmp_path)

    def test_bytes_that_are_no_text(self, tmp_path):
        (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
        assert "not UTF-8" in self.message(tmp_path)

    def test_no_object(self, tmp_path):
        (tmp_path / "config.json").write_text("[1]")
        assert "list" in self.message(tmp_path)

    def test_unfit_file(self, tmp_path):
        raw = copy.deepcopy(published_json())
        raw["text_config"]["hidden_act"] = "silu"
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert "hidden_act" in self.message(tmp_path)
