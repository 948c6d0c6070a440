"""The parameter table against spec 3 (names, shapes, dtypes), 4.2 (splits, gradients) and 5.1 (LoRA targets)."""

import dataclasses
import re
import subprocess
import sys
import time
from collections import Counter

import pytest
from k3_cases import published, tiny

from miles_k3.k3.config import K3Config
from miles_k3.k3.params import (
    DType,
    GradRule,
    Param,
    Part,
    attn_prefix,
    expert_params,
    expert_prefix,
    iter_params,
    layer_params,
    layer_prefix,
    mlp_prefix,
    moe_prefix,
    text_params,
)

P = "language_model.model."
BF16, F32, U8 = "BF16", "F32", "U8"
# Spec section 3, row by row, for the published config: suffix -> (shape, dtype).
MODEL = {
    P + "embed_tokens.weight": ((163840, 7168), BF16),
    "language_model.lm_head.weight": ((163840, 7168), BF16),
    P + "norm.weight": ((7168,), BF16),
    P + "output_attn_res_norm.weight": ((7168,), BF16),
    P + "output_attn_res_proj.weight": ((1, 7168), BF16),
}
EVERY_LAYER = {
    "input_layernorm.weight": ((7168,), BF16),
    "post_attention_layernorm.weight": ((7168,), BF16),
    "self_attention_res_norm.weight": ((7168,), BF16),
    "mlp_res_norm.weight": ((7168,), BF16),
    "self_attention_res_proj.weight": ((1, 7168), BF16),
    "mlp_res_proj.weight": ((1, 7168), BF16),
    "self_attn.o_proj.weight": ((7168, 12288), BF16),
    "self_attn.g_proj.weight": ((12288, 7168), BF16),
}
KDA = {
    **{f"self_attn.{n}_proj.weight": ((12288, 7168), BF16) for n in "qkv"},
    **{f"self_attn.{n}_conv1d.weight": ((12288, 1, 4), F32) for n in "qkv"},
    "self_attn.f_a_proj.weight": ((128, 7168), BF16),
    "self_attn.f_b_proj.weight": ((12288, 128), BF16),
    "self_attn.b_proj.weight": ((96, 7168), BF16),
    "self_attn.A_log": ((128,), F32),
    "self_attn.dt_bias": ((12288,), F32),
    "self_attn.o_norm.weight": ((128,), F32),
}
MLA = {
    "self_attn.q_a_proj.weight": ((1536, 7168), BF16),
    "self_attn.q_a_layernorm.weight": ((1536,), BF16),
    "self_attn.q_b_proj.weight": ((18432, 1536), BF16),
    "self_attn.kv_a_proj_with_mqa.weight": ((576, 7168), BF16),
    "self_attn.kv_a_layernorm.weight": ((512,), BF16),
    "self_attn.kv_b_proj.weight": ((24576, 512), BF16),
}
DENSE = {
    "mlp.gate_proj.weight": ((33792, 7168), BF16),
    "mlp.up_proj.weight": ((33792, 7168), BF16),
    "mlp.down_proj.weight": ((7168, 33792), BF16),
}
MOE = {
    "block_sparse_moe.gate.weight": ((896, 7168), BF16),
    "block_sparse_moe.gate.e_score_correction_bias": ((896,), F32),
    "block_sparse_moe.routed_expert_down_proj.weight": ((3584, 7168), BF16),
    "block_sparse_moe.routed_expert_norm.weight": ((3584,), BF16),
    "block_sparse_moe.routed_expert_up_proj.weight": ((7168, 3584), BF16),
    "block_sparse_moe.shared_experts.gate_proj.weight": ((6144, 7168), BF16),
    "block_sparse_moe.shared_experts.up_proj.weight": ((6144, 7168), BF16),
    "block_sparse_moe.shared_experts.down_proj.weight": ((7168, 6144), BF16),
}
EXPERT = {
    "w1.weight_packed": ((3072, 1792), U8),
    "w1.weight_scale": ((3072, 112), U8),
    "w3.weight_packed": ((3072, 1792), U8),
    "w3.weight_scale": ((3072, 112), U8),
    "w2.weight_packed": ((3584, 1536), U8),
    "w2.weight_scale": ((3584, 96), U8),
}
BLOCK = {
    "wqkv.weight": ((4608, 1024), BF16),
    "wo.weight": ((1024, 1536), BF16),
    "mlp.fc0.weight": ((4096, 1024), BF16),
    "mlp.fc1.weight": ((1024, 4096), BF16),
    "norm0.weight": ((1024,), BF16),
    "norm1.weight": ((1024,), BF16),
}
VISION = {
    "vision_tower.patch_embed.proj.weight": ((1024, 3, 14, 14), BF16),
    "vision_tower.patch_embed.pos_emb.weight": ((64, 64, 1024), BF16),
    **{f"vision_tower.encoder.blocks.{i}.{name}": row for i in range(27) for name, row in BLOCK.items()},
    "vision_tower.encoder.final_layernorm.weight": ((1024,), BF16),
    "mm_projector.proj.0.weight": ((4096, 4096), BF16),
    "mm_projector.proj.2.weight": ((7168, 4096), BF16),
    "mm_projector.post_norm.weight": ((7168,), BF16),
}


def layer_rows(layer: int) -> dict[str, tuple[tuple[int, ...], str]]:
    is_mla = layer % 4 == 3 or layer == 92
    rows = {**EVERY_LAYER, **(MLA if is_mla else KDA), **(DENSE if layer == 0 else MOE)}
    if layer:
        for expert in range(896):
            rows |= {f"block_sparse_moe.experts.{expert}.{name}": row for name, row in EXPERT.items()}
    return {f"{P}layers.{layer}.{name}": row for name, row in rows.items()}


@pytest.fixture(scope="module")
def timed() -> tuple[list[Param], float]:
    start = time.process_time()
    rows = list(iter_params(published()))
    return rows, time.process_time() - start


@pytest.fixture(scope="module")
def full(timed) -> list[Param]:
    return timed[0]


class TestSection3:
    def test_model_and_vision_rows(self, full):
        others = {p.name: (p.shape, p.dtype.value) for p in full if p.layer is None}
        assert others == {**MODEL, **VISION}

    @pytest.mark.parametrize("layer", [0, 1, 3, 90, 91, 92])
    def test_layer_rows(self, layer):
        assert {p.name: (p.shape, p.dtype.value) for p in layer_params(published(), layer)} == layer_rows(layer)

    def test_every_layer_has_the_right_kind(self, full):
        kinds = {p.layer: p.part for p in full if p.name.endswith("self_attn.g_proj.weight")}
        assert [i for i, kind in kinds.items() if kind is Part.MLA] == [*range(3, 92, 4), 92]
        assert Counter(kinds.values()) == {Part.KDA: 69, Part.MLA: 24}

    def test_sums(self, full):
        assert len(full) == 497_220
        assert len({p.name for p in full}) == 497_220
        assert sum(p.num_params for p in full if p.part is not Part.VISION) == 2_779_484_478_208
        assert round(sum(p.num_bytes for p in full) / 1e9, 3) == 1560.860
        assert round(sum(p.num_bytes for p in full if p.part is Part.VISION) / 1e9, 2) == 0.89

    def test_active_parameters_of_one_token(self, full):
        """16 of 896 routed experts and everything else but the embedding table: the advertised 104.2 B."""
        routed = sum(p.num_params for p in full if p.part is Part.EXPERT)
        others = sum(p.num_params for p in full if p.part not in (Part.EXPERT, Part.VISION, Part.EMBED))
        active = others + routed * 16 // 896
        embedding = sum(p.num_params for p in full if p.part is Part.EMBED)
        assert round(active / 1e9, 2) == 104.19
        assert round((active + embedding) / 1e9, 2) == 105.36

    def test_four_layer_prune(self):
        pruned = dataclasses.replace(published(), num_hidden_layers=4, mla_layers=(3,))
        assert sum(1 for _ in iter_params(pruned)) == 16_402
        assert sum(1 for p in iter_params(pruned) if p.part is Part.VISION) == 168

    def test_f32_list(self, full):
        """Spec 3.2, nothing more and nothing less."""
        leaves = {p.name.split("self_attn.")[-1].split("block_sparse_moe.")[-1] for p in full if p.dtype is DType.F32}
        assert leaves == {
            "A_log",
            "dt_bias",
            "q_conv1d.weight",
            "k_conv1d.weight",
            "v_conv1d.weight",
            "o_norm.weight",
            "gate.e_score_correction_bias",
        }

    def test_only_routed_experts_are_quantised(self, full):
        assert all(p.quantised is (p.part is Part.EXPERT) for p in full)
        assert all(
            re.fullmatch(r".*\.experts\.\d+\.w[123]\.weight_(packed|scale)", p.name) for p in full if p.quantised
        )

    def test_packed_and_scale_count_their_weight_once(self):
        packed, scale = list(expert_params(published(), 1, 0))[:2]
        assert (packed.logical_shape, packed.num_params) == ((3072, 3584), 3072 * 3584)
        assert (scale.is_scale, scale.num_params, scale.num_bytes) == (True, 0, 3072 * 112)
        assert packed.num_bytes == 3072 * 1792

    def test_latent_norm_follows_the_config(self):
        names = {p.name for p in iter_params(dataclasses.replace(tiny(), latent_moe_use_norm=False))}
        assert names == {p.name for p in iter_params(tiny()) if "routed_expert_norm" not in p.name}

    def test_without_vision(self):
        c = tiny()
        text = list(text_params(c))
        assert list(iter_params(dataclasses.replace(c, vision=None))) == text
        assert len(text) < sum(1 for _ in iter_params(c))

    def test_model_order_with_vision_last(self):
        layers = [p.layer for p in text_params(tiny()) if p.layer is not None]
        assert layers == sorted(layers)
        parts = [p.part for p in iter_params(tiny())]
        assert Part.VISION not in parts[: parts.index(Part.VISION)]
        assert set(parts[parts.index(Part.VISION) :]) == {Part.VISION}


class TestTinyDimensions:
    """Where the published config has equal numbers (128 = 128, 12288 = 12288), tiny-A has different ones."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {p.name: p.shape for p in iter_params(tiny())}

    def test_kda_and_mla_widths_differ(self):
        shapes = self.shapes()
        assert shapes[attn_prefix(0) + "g_proj.weight"] == (64, 96)
        assert shapes[attn_prefix(3) + "g_proj.weight"] == (96, 96)
        assert shapes[attn_prefix(0) + "o_proj.weight"] == (96, 64)
        assert shapes[attn_prefix(3) + "q_b_proj.weight"] == (4 * 24, 40)
        assert shapes[attn_prefix(3) + "kv_b_proj.weight"] == (4 * (16 + 24), 32)
        assert shapes[attn_prefix(3) + "kv_a_proj_with_mqa.weight"] == (40, 96)
        assert shapes[attn_prefix(0) + "f_a_proj.weight"] == (16, 96)
        assert shapes[attn_prefix(0) + "A_log"] == (128,)

    def test_expert_directions(self):
        shapes = self.shapes()
        assert shapes[expert_prefix(1, 7) + "w1.weight_packed"] == (32, 32)
        assert shapes[expert_prefix(1, 7) + "w2.weight_packed"] == (64, 16)
        assert shapes[expert_prefix(1, 7) + "w2.weight_scale"] == (64, 1)
        assert shapes[moe_prefix(1) + "shared_experts.down_proj.weight"] == (96, 64)

    def test_vision_widths(self):
        shapes = self.shapes()
        assert shapes["vision_tower.patch_embed.pos_emb.weight"] == (3, 5, 12)
        assert shapes["vision_tower.encoder.blocks.0.wqkv.weight"] == (48, 12)
        assert shapes["vision_tower.encoder.blocks.0.wo.weight"] == (12, 16)
        assert shapes["mm_projector.proj.2.weight"] == (96, 48)

    def test_prefixes(self):
        c = tiny()
        assert layer_prefix(5) == "language_model.model.layers.5."
        assert mlp_prefix(c, 0) == "language_model.model.layers.0.mlp."
        assert mlp_prefix(c, 1) == "language_model.model.layers.1.block_sparse_moe.shared_experts."
        first = next(expert_params(c, 1, 0))
        assert first.module == "language_model.model.layers.1.block_sparse_moe.experts.0.w1"


LOCAL, COMPLETE, UNDER_SP = GradRule.LOCAL, GradRule.COMPLETE, GradRule.SUM_TP_UNDER_SP
# Spec 4.2, row by row: pattern -> (dimension that TP splits, what to do with the gradient).
SPLITS = [
    (r"(embed_tokens|lm_head)\.weight", 0, LOCAL),
    (r"self_attn\.(q|k|v|g|q_b|kv_b|f_b|b)_proj\.weight", 0, LOCAL),
    (r"self_attn\.([qkv]_conv1d\.weight|A_log|dt_bias)", 0, LOCAL),
    (r"self_attn\.o_proj\.weight", 1, LOCAL),
    (r"(mlp|shared_experts)\.(gate|up)_proj\.weight", 0, LOCAL),
    (r"(mlp|shared_experts)\.down_proj\.weight", 1, LOCAL),
    (r"self_attn\.(f_a_proj|q_a_proj|kv_a_proj_with_mqa|q_a_layernorm|kv_a_layernorm)\.weight", None, COMPLETE),
    (r"self_attn\.o_norm\.weight", None, GradRule.SUM_TP),
    (r"(self_attention|mlp|output_attn)_res_(norm|proj)\.weight", None, UNDER_SP),
    (r"routed_expert_norm\.weight", None, UNDER_SP),
    (r"(model\.norm|input_layernorm|post_attention_layernorm)\.weight", None, UNDER_SP),
    (r"block_sparse_moe\.gate\.(weight|e_score_correction_bias)", None, UNDER_SP),
    (r"routed_expert_(down|up)_proj\.weight", None, UNDER_SP),
    (r"experts\.\d+\.w[123]\.weight_(packed|scale)", None, GradRule.EXPERT_DP),
]
LORA = (
    r".*(o_proj|q_a_proj|kv_a_proj_with_mqa|(mlp|shared_experts)\.(gate|up|down)_proj|experts\.\d+\.w[123])\.weight.*"
)


class TestSection4And5:
    def test_every_text_tensor_has_exactly_one_row_and_obeys_it(self):
        met = Counter()
        for p in text_params(tiny()):
            rows = [row for row in SPLITS if re.search(r"(^|\.)" + row[0] + "$", p.name)]
            assert len(rows) == 1, p.name
            pattern, tp_dim, grad = rows[0]
            assert (p.tp_dim, p.grad) == (tp_dim, grad), p.name
            met[pattern] += 1
        assert len(met) == len(SPLITS)

    def test_what_tp_splits_divides(self):
        for p in layer_params(published(), 1):
            if p.tp_dim is not None:
                size = 96 if p.name.endswith("A_log") else p.shape[p.tp_dim]  # the padding is cut before the split
                assert size % 4 == 0

    def test_lora_targets(self):
        for p in iter_params(tiny()):
            assert p.lora is bool(re.fullmatch(LORA, p.name)), p.name

    def test_lora_size(self):
        """Spec 5.1 derives 132.3 M adapter numbers a MoE layer at rank 16 from the experts' shapes."""
        w1, _, w2, *_ = (p for p in expert_params(published(), 1, 0))
        (inter, latent), rank = w1.logical_shape, 16
        assert w2.logical_shape == (latent, inter)
        assert round(rank * (896 * 3 * inter + 3 * latent) / 1e6, 1) == 132.3


def test_the_full_table_is_fast(timed):
    """Loader, planner and exporter walk 497,220 rows; about 2 s on one slow core."""
    assert timed[1] < 8


def test_no_torch_needed():
    code = "import sys, miles_k3.k3.params, miles_k3.k3.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_parts_of_the_model_are_all_in_use():
    config: K3Config = tiny()
    assert {p.part for p in iter_params(config)} == set(Part) - {Part.DRAFT}
