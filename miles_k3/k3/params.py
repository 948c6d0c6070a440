"""The parameter table: every tensor of a K3 checkpoint, once. Nobody else spells a Hugging Face name.

Loader, trainer, engine, exporter and planner read it. Shapes and names: spec section 3; splits and gradient rules:
spec 4.2; LoRA targets: spec 5.1. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from miles_k3.k3.config import MXFP4_GROUP, K3Config

TEXT = "language_model.model."
LM_HEAD = "language_model.lm_head.weight"


class DType(StrEnum):
    """Storage types as safetensors spells them."""

    BF16 = "BF16"
    F32 = "F32"
    U8 = "U8"

    @property
    def num_bytes(self) -> int:
        return {"BF16": 2, "F32": 4, "U8": 1}[self.value]


class GradRule(StrEnum):
    """What a tensor-parallel rank must do with its gradient of a parameter (spec 4.2, trap 21)."""

    LOCAL = "local"  # sharded: each rank owns its part
    COMPLETE = "complete"  # replicated, and every rank already holds the whole gradient
    SUM_TP = "sum_tp"  # replicated, each rank saw only its own heads: sum always
    SUM_TP_UNDER_SP = "sum_tp_under_sp"  # replicated, each rank saw only its own tokens under sequence parallel
    EXPERT_DP = "expert_dp"  # owned by one expert-parallel rank


class Part(StrEnum):
    """Which piece of the model a tensor belongs to."""

    EMBED = "embed"
    HEAD = "head"
    NORM = "norm"
    ATTN_RES = "attn_res"
    KDA = "kda"
    MLA = "mla"
    DENSE = "dense"
    ROUTER = "router"
    LATENT = "latent"
    SHARED = "shared"
    EXPERT = "expert"
    VISION = "vision"
    DRAFT = "draft"  # of the draft model's own table, draft_params


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One tensor of the checkpoint.

    `shape` is the stored shape, `logical_shape` the weight's own where it is packed. `tp_dim` is the dimension that
    tensor parallelism splits, None when replicated; routed experts are split by `expert` instead, whole experts to a
    rank, since LoRA on them needs ETP 1 (spec 5.1). `lora` says whether an adapter may target the module.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    part: Part
    layer: int | None = None
    logical_shape: tuple[int, ...] = ()
    tp_dim: int | None = None
    grad: GradRule = GradRule.LOCAL
    lora: bool = False
    expert: int | None = None
    is_scale: bool = False

    @property
    def num_params(self) -> int:
        """Parameters of the model that this tensor holds; 0 for MXFP4 scales."""
        return 0 if self.is_scale else prod(self.logical_shape or self.shape)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.num_bytes

    @property
    def quantised(self) -> bool:
        """MXFP4 is decided by the presence of weight_packed, never by the config's ignore list (spec 1.3)."""
        return self.dtype is DType.U8

    @property
    def module(self) -> str:
        """The name without its last component."""
        return self.name.rpartition(".")[0]


def layer_prefix(layer: int) -> str:
    return f"{TEXT}layers.{layer}."


def attn_prefix(layer: int) -> str:
    return layer_prefix(layer) + "self_attn."


def moe_prefix(layer: int) -> str:
    return layer_prefix(layer) + "block_sparse_moe."


def mlp_prefix(config: K3Config, layer: int) -> str:
    """Prefix of the plain gate/up/down MLP of a layer: the dense MLP, or the shared experts."""
    return moe_prefix(layer) + "shared_experts." if config.is_moe(layer) else layer_prefix(layer) + "mlp."


def expert_prefix(layer: int, expert: int) -> str:
    return f"{moe_prefix(layer)}experts.{expert}."


def iter_params(config: K3Config, *, packed: bool = True) -> Iterator[Param]:
    """Every tensor of the checkpoint, in model order, vision last. `packed`: routed experts in MXFP4, else in BF16."""
    yield from _model_level(config)
    for layer in range(config.num_hidden_layers):
        yield from layer_params(config, layer, packed=packed)
    yield from vision_params(config)


def vision_params(config: K3Config) -> Iterator[Param]:
    """The vision tower and its projector; none where the config describes none."""
    if config.vision is not None:
        yield from _vision(config)


def text_params(config: K3Config, *, packed: bool = True) -> Iterator[Param]:
    """The language model's tensors only."""
    return (p for p in iter_params(config, packed=packed) if p.part is not Part.VISION)


def layer_params(config: K3Config, layer: int, *, packed: bool = True) -> Iterator[Param]:
    """The tensors of one decoder layer."""
    yield from _layer_norms(config, layer)
    yield from _mla(config, layer) if config.is_mla(layer) else _kda(config, layer)
    if config.is_moe(layer):
        yield from _moe(config, layer, packed)
    else:
        yield from _mlp(config, layer, config.intermediate_size, Part.DENSE)


def _bf16(name: str, *shape: int, part: Part, layer: int | None = None, tp: int | None = None,
          grad: GradRule | None = None, lora: bool = False) -> Param:  # fmt: skip
    rule = grad or (GradRule.LOCAL if tp is not None else GradRule.SUM_TP_UNDER_SP)
    return Param(name=name, shape=shape, dtype=DType.BF16, part=part, layer=layer, tp_dim=tp, grad=rule, lora=lora)


def _f32(name: str, *shape: int, part: Part, layer: int, tp: int | None = None,
         grad: GradRule = GradRule.LOCAL) -> Param:  # fmt: skip
    return Param(name=name, shape=shape, dtype=DType.F32, part=part, layer=layer, tp_dim=tp, grad=grad)


def _model_level(c: K3Config) -> Iterator[Param]:
    yield _bf16(TEXT + "embed_tokens.weight", c.vocab_size, c.hidden_size, part=Part.EMBED, tp=0)
    yield _bf16(LM_HEAD, c.vocab_size, c.hidden_size, part=Part.HEAD, tp=0)
    yield _bf16(TEXT + "norm.weight", c.hidden_size, part=Part.NORM)
    yield _bf16(TEXT + "output_attn_res_norm.weight", c.hidden_size, part=Part.ATTN_RES)
    yield _bf16(TEXT + "output_attn_res_proj.weight", 1, c.hidden_size, part=Part.ATTN_RES)


def _layer_norms(c: K3Config, layer: int) -> Iterator[Param]:
    p, h = layer_prefix(layer), c.hidden_size
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield _bf16(f"{p}{name}.weight", h, part=Part.NORM, layer=layer)
    for name in ("self_attention_res", "mlp_res"):
        yield _bf16(f"{p}{name}_norm.weight", h, part=Part.ATTN_RES, layer=layer)
        yield _bf16(f"{p}{name}_proj.weight", 1, h, part=Part.ATTN_RES, layer=layer)


def _kda(c: K3Config, layer: int) -> Iterator[Param]:
    p, h, d, n = attn_prefix(layer), c.hidden_size, c.kda_dim, c.kda_num_heads
    kda = {"part": Part.KDA, "layer": layer}
    for name in "qkvg":
        yield _bf16(f"{p}{name}_proj.weight", d, h, tp=0, **kda)
    for name in "qkv":
        yield _f32(f"{p}{name}_conv1d.weight", d, 1, c.short_conv_kernel_size, tp=0, **kda)
    yield _bf16(p + "f_a_proj.weight", c.kda_head_dim, h, grad=GradRule.COMPLETE, **kda)
    yield _bf16(p + "f_b_proj.weight", d, c.kda_head_dim, tp=0, **kda)
    yield _bf16(p + "b_proj.weight", n, h, tp=0, **kda)
    yield _f32(p + "A_log", c.a_log_padded, tp=0, **kda)
    yield _f32(p + "dt_bias", d, tp=0, **kda)
    yield _f32(p + "o_norm.weight", c.kda_head_dim, grad=GradRule.SUM_TP, **kda)
    yield _bf16(p + "o_proj.weight", h, d, tp=1, lora=True, **kda)


def _mla(c: K3Config, layer: int) -> Iterator[Param]:
    p, h, n = attn_prefix(layer), c.hidden_size, c.num_attention_heads
    mla = {"part": Part.MLA, "layer": layer}
    whole = GradRule.COMPLETE
    yield _bf16(p + "q_a_proj.weight", c.q_lora_rank, h, grad=whole, lora=True, **mla)
    yield _bf16(p + "q_a_layernorm.weight", c.q_lora_rank, grad=whole, **mla)
    yield _bf16(p + "q_b_proj.weight", n * c.qk_head_dim, c.q_lora_rank, tp=0, **mla)
    yield _bf16(p + "kv_a_proj_with_mqa.weight", c.latent_cache_dim, h, grad=whole, lora=True, **mla)
    yield _bf16(p + "kv_a_layernorm.weight", c.kv_lora_rank, grad=whole, **mla)
    yield _bf16(p + "kv_b_proj.weight", n * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank, tp=0, **mla)
    yield _bf16(p + "g_proj.weight", c.mla_value_dim, h, tp=0, **mla)
    yield _bf16(p + "o_proj.weight", h, c.mla_value_dim, tp=1, lora=True, **mla)


def _mlp(c: K3Config, layer: int, width: int, part: Part) -> Iterator[Param]:
    p = mlp_prefix(c, layer)
    for name in ("gate_proj", "up_proj"):
        yield _bf16(f"{p}{name}.weight", width, c.hidden_size, part=part, layer=layer, tp=0, lora=True)
    yield _bf16(p + "down_proj.weight", c.hidden_size, width, part=part, layer=layer, tp=1, lora=True)


def _moe(c: K3Config, layer: int, packed: bool) -> Iterator[Param]:
    p, h, z = moe_prefix(layer), c.hidden_size, c.routed_expert_hidden_size
    under_sp = GradRule.SUM_TP_UNDER_SP
    yield _bf16(p + "gate.weight", c.num_experts, h, part=Part.ROUTER, layer=layer)
    yield _f32(p + "gate.e_score_correction_bias", c.num_experts, part=Part.ROUTER, layer=layer, grad=under_sp)
    yield _bf16(p + "routed_expert_down_proj.weight", z, h, part=Part.LATENT, layer=layer)
    if c.latent_moe_use_norm:
        yield _bf16(p + "routed_expert_norm.weight", z, part=Part.LATENT, layer=layer)
    yield _bf16(p + "routed_expert_up_proj.weight", h, z, part=Part.LATENT, layer=layer)
    yield from _mlp(c, layer, c.shared_intermediate_size, Part.SHARED)
    for expert in range(c.num_experts):
        yield from expert_params(c, layer, expert, packed=packed)


def expert_params(c: K3Config, layer: int, expert: int, *, packed: bool = True) -> Iterator[Param]:
    """The six MXFP4 tensors of one routed expert (spec 3.1: two codes a byte, one E8M0 byte per 32 inputs), or its
    three BF16 ones."""
    prefix, inter, latent = expert_prefix(layer, expert), c.moe_intermediate_size, c.routed_expert_hidden_size
    for name, rows, cols in (("w1", inter, latent), ("w2", latent, inter), ("w3", inter, latent)):
        if not packed:
            yield Param(name=f"{prefix}{name}.weight", shape=(rows, cols), dtype=DType.BF16, part=Part.EXPERT,
                        layer=layer, expert=expert, grad=GradRule.EXPERT_DP, lora=True)  # fmt: skip
            continue
        yield _mxfp4(f"{prefix}{name}.weight_packed", rows, cols, cols // 2, layer, expert)
        yield _mxfp4(f"{prefix}{name}.weight_scale", rows, cols, cols // MXFP4_GROUP, layer, expert)


def expert_names(
    c: K3Config, layer: int, experts: Iterable[int] | None = None, *, packed: bool = True
) -> Iterator[str]:
    """Names of the routed-expert tensors of one layer, of all experts or of some."""
    chosen = range(c.num_experts) if experts is None else experts
    return (p.name for expert in chosen for p in expert_params(c, layer, expert, packed=packed))


def _mxfp4(name: str, rows: int, cols: int, stored_cols: int, layer: int, expert: int) -> Param:
    is_scale = name.endswith("_scale")
    return Param(name=name, shape=(rows, stored_cols), dtype=DType.U8, part=Part.EXPERT, layer=layer, expert=expert,
                 logical_shape=() if is_scale else (rows, cols), grad=GradRule.EXPERT_DP, lora=True,
                 is_scale=is_scale)  # fmt: skip


def _vision(c: K3Config) -> Iterator[Param]:
    v = c.vision
    assert v is not None
    h, tower = v.hidden_size, "vision_tower."

    def tensor(name: str, *shape: int) -> Param:
        return _bf16(name, *shape, part=Part.VISION, grad=GradRule.COMPLETE)

    yield tensor(tower + "patch_embed.proj.weight", h, 3, v.patch_size, v.patch_size)
    yield tensor(tower + "patch_embed.pos_emb.weight", v.pos_emb_height, v.pos_emb_width, h)
    for i in range(v.num_layers):
        block = f"{tower}encoder.blocks.{i}."
        yield tensor(block + "wqkv.weight", 3 * v.qkv_hidden_size, h)
        yield tensor(block + "wo.weight", h, v.qkv_hidden_size)
        yield tensor(block + "mlp.fc0.weight", v.intermediate_size, h)
        yield tensor(block + "mlp.fc1.weight", h, v.intermediate_size)
        yield tensor(block + "norm0.weight", h)
        yield tensor(block + "norm1.weight", h)
    yield tensor(tower + "encoder.final_layernorm.weight", h)
    merged = v.merge_factor * h
    yield tensor("mm_projector.proj.0.weight", merged, merged)
    yield tensor("mm_projector.proj.2.weight", c.hidden_size, merged)
    yield tensor("mm_projector.post_norm.weight", c.hidden_size)
