"""SGLang's arguments from a recipe and a model, and why some can't be had. Imports neither torch nor SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from miles_k3.config import Recipe
from miles_k3.errors import CheckpointError
from miles_k3.k3.config import K3Config
from miles_k3.k3.draft_config import DraftConfig
from miles_k3.plan.engine import cache_tokens
from miles_k3.plan.sglang import verify_tokens
from miles_k3.rollout.sglang.names import SLOTS, TARGETS

STATES_PER_REQUEST = 5  # KDA states that the published LoRA recipe draws for a running request (spec 6.6)
MAX_RANK = 64  # the largest that the published runs were made with
MAX_BANK_ROWS = 15  # rows that SGLang's attention-residual kernel takes
_HIDDEN_BLOCK = 1024  # of that kernel; it has no mask, so that other widths give garbage without a word
_LATENT_BLOCK, _EXPERT_BLOCK = 256, 128  # Marlin's tiles; it pads to them, which LoRA doesn't know
_KDA_HEAD = 128
_TRITON_CACHE_WIDTH = 576
_EMBEDDED_ONLY = {
    "cache_pool": "unified", "cache_min_tokens": 64, "reserve_tokens": None, "overlap": None, "track_interval": 1024,
    "cache_slots": 0,
}  # fmt: skip
_DCP_ATTENTION = ("cutedsl_mla", "tokenspeed_mla")
_UNIFIED_ATTENTION = ("auto", "triton", "fa3", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What an engine runs on, as far as its arguments depend on it."""

    hopper: bool = True
    first_gpu: int = 0
    node: int = 0  # of rollout.sglang.nodes
    meeting_place: str | None = None  # HOST:PORT of the first node, where there are several


def server_arguments(recipe: Recipe, config: K3Config, machine: Machine) -> dict[str, Any]:
    """What SGLang's Engine is made with. Meaningful where `sglang_problems` has none."""
    rollout, own = recipe.rollout, recipe.rollout.sglang
    longest = recipe.task.max_prompt_tokens + rollout.sampling.max_new_tokens
    arguments: dict[str, Any] = {
        "model_path": recipe.model.path, "dtype": "bfloat16", "skip_tokenizer_init": True, "enable_multimodal": False,
        "context_length": longest + 1, "tp_size": rollout.engine_tp, "ep_size": own.ep,
        "base_gpu_id": machine.first_gpu, "random_seed": recipe.run.seed % 2**31, "skip_server_warmup": True,
        "grammar_backend": "none",
        "sampling_backend": "pytorch", "moe_runner_backend": "marlin", "linear_attn_backend": "triton",
        "max_running_requests": rollout.max_running, "max_total_tokens": cache_tokens(recipe),
        "max_mamba_cache_size": own.state_slots or STATES_PER_REQUEST * rollout.max_running,
        "chunked_prefill_size": rollout.prefill_chunk_tokens, "disable_custom_all_reduce": rollout.engine_tp == 1,
        **_lora(rollout.max_lora_rank), **_graphs(own.cuda_graphs, rollout.max_running),
    }  # fmt: skip
    if rollout.prefix_cache == "off":
        arguments["disable_radix_cache"] = True
    else:
        arguments["mamba_radix_cache_strategy"] = "extra_buffer"
    attention = "triton" if own.attention == "auto" and machine.hopper else own.attention
    if own.dcp > 1:
        arguments |= {"dcp_size": own.dcp, "decode_attention_backend": attention}
    elif attention == "flashmla":
        arguments |= {"prefill_attention_backend": "triton", "decode_attention_backend": attention, "page_size": 64}
    elif attention != "auto":
        arguments["attention_backend"] = attention
    if own.memory_fraction is not None:
        arguments["mem_fraction_static"] = own.memory_fraction
    if own.unified_memory:
        arguments["enable_unified_memory"] = True
    if recipe.algorithm.routing_replay:
        arguments["enable_return_routed_experts"] = True
    if rollout.sleep_while_training:
        arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    if own.draft is not None:
        arguments |= _drafting(recipe, own.draft)
    if own.nodes > 1:
        arguments |= {"nnodes": own.nodes, "node_rank": machine.node, "dist_init_addr": machine.meeting_place}
    return arguments


def _lora(rank: int) -> dict[str, Any]:
    return {
        "enable_lora": True, "lora_backend": "triton", "max_lora_rank": rank, "max_loras_per_batch": SLOTS,
        "lora_target_modules": list(TARGETS), "experts_shared_outer_loras": True, "lora_strict_loading": True,
    }  # fmt: skip


def _graphs(wanted: bool, requests: int) -> dict[str, Any]:
    if not wanted:
        return {"disable_cuda_graph": True}
    return {"disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": requests}


def _drafting(recipe: Recipe, folder: str) -> dict[str, Any]:
    """A DSpark draft, and room for the tokens that a request has under verification and those of the step after it."""
    draft = DraftConfig.from_folder(folder)
    return {
        "speculative_algorithm": "DSPARK", "speculative_draft_model_path": folder,
        "speculative_dspark_block_size": draft.block_size,
        "max_total_tokens": cache_tokens(recipe) + verify_tokens(recipe, draft),
    }  # fmt: skip


def sglang_problems(recipe: Recipe, config: K3Config) -> list[str]:
    """Why SGLang can't serve this model with this recipe, a sentence each with what to change."""
    return [text for _, text in named_problems(recipe, config)]


def named_problems(recipe: Recipe, config: K3Config) -> Iterator[tuple[str, str]]:
    """The same, each behind the name of what it is about."""
    parts = {
        "sglang model": _model_problems(config, recipe), "sglang split": _split_problems(config, recipe),
        "sglang options": _option_problems(recipe), "sglang draft": _draft_problems(config, recipe),
    }  # fmt: skip
    for name, texts in parts.items():
        yield from ((name, text) for text in texts)


def _model_problems(c: K3Config, recipe: Recipe) -> Iterator[str]:
    other = "or set rollout.engine: embedded"
    if recipe.model.weights == "random":
        yield (
            "model.weights is random, which the trainer draws for itself, but SGLang reads model.path; point that at a "
            f"checkpoint and set model.weights: checkpoint, {other}"
        )
    if c.hidden_size % _HIDDEN_BLOCK:
        yield (
            f"the model's hidden_size is {c.hidden_size}; SGLang's attention-residual kernel computes multiples of "
            f"{_HIDDEN_BLOCK} only, and garbage otherwise; choose another model, {other}"
        )
    if (rows := c.bank_rows(c.num_hidden_layers)) > MAX_BANK_ROWS:
        yield f"the model keeps {rows} residual snapshots; SGLang's kernel takes {MAX_BANK_ROWS}; {other[3:]}"
    if (c.kda_head_dim, c.v_head_dim) != (_KDA_HEAD, _KDA_HEAD):
        yield (
            f"the model's KDA head_dim is {c.kda_head_dim} and its v_head_dim {c.v_head_dim}; SGLang's kernels take "
            f"{_KDA_HEAD}; choose another model, {other}"
        )
    if c.latent_cache_dim != _TRITON_CACHE_WIDTH and recipe.rollout.sglang.attention in ("auto", "triton"):
        yield (
            f"the model caches {c.latent_cache_dim} numbers a token; SGLang's Triton attention knows "
            f"{_TRITON_CACHE_WIDTH}; choose another rollout.sglang.attention, {other}"
        )
    if c.routed_expert_hidden_size % _LATENT_BLOCK:
        yield (
            f"the model's routed_expert_hidden_size is {c.routed_expert_hidden_size}; Marlin pads it to a multiple of "
            f"{_LATENT_BLOCK}, which LoRA doesn't know; choose another model, {other}"
        )
    if c.mla_latent_norm_eps != c.rms_norm_eps:
        yield (
            f"model.mla_latent_norm_eps is {c.mla_latent_norm_eps}, SGLang's latent norms take rms_norm_eps "
            f"{c.rms_norm_eps}; set it to null, {other}"
        )
    if recipe.model.dtype != "bfloat16":
        yield f"model.dtype is {recipe.model.dtype}; SGLang's MXFP4 experts compute in bfloat16; set that, {other}"


def _split_problems(c: K3Config, recipe: Recipe) -> Iterator[str]:
    tp, own = recipe.rollout.engine_tp, recipe.rollout.sglang
    for key, value in (("ep", own.ep), ("dcp", own.dcp), ("nodes", own.nodes)):
        if tp % value:
            yield f"rollout.sglang.{key} {value} doesn't divide rollout.engine_tp {tp}; choose one that does"
    for name, count in (("attention", c.num_attention_heads), ("KDA", c.kda_num_heads)):
        if count % tp:
            yield f"rollout.engine_tp {tp} doesn't divide the model's {count} {name} heads; choose one that does"
    if c.num_experts % own.ep:
        yield f"rollout.sglang.ep {own.ep} doesn't divide the model's {c.num_experts} experts; choose one that does"
    columns = c.moe_intermediate_size * own.ep / tp
    if not tp % own.ep and columns % _EXPERT_BLOCK:
        yield (
            f"rollout.engine_tp {tp} and rollout.sglang.ep {own.ep} leave each GPU {columns:g} columns of an expert; "
            f"Marlin takes multiples of {_EXPERT_BLOCK}: raise rollout.sglang.ep or lower rollout.engine_tp"
        )


def _option_problems(recipe: Recipe) -> Iterator[str]:
    rollout, own = recipe.rollout, recipe.rollout.sglang
    if rollout.max_lora_rank > MAX_RANK:
        yield (
            f"rollout.max_lora_rank is {rollout.max_lora_rank}; SGLang's expert LoRA is known to work up to "
            f"{MAX_RANK}; lower it and lora.rank to {MAX_RANK}"
        )
    if rollout.sampling.top_p < 1.0 or rollout.sampling.top_k > 0:
        yield (
            f"rollout.sampling.top_p is {rollout.sampling.top_p} and top_k {rollout.sampling.top_k}, but SGLang's "
            "log-probabilities leave both out; set them to 1.0 and 0, or set rollout.engine: embedded"
        )
    if own.dcp > 1 and own.attention not in _DCP_ATTENTION:
        yield (
            f"rollout.sglang.dcp is {own.dcp} with attention {own.attention}; SGLang shares a request's KV with "
            f"{' or '.join(_DCP_ATTENTION)} only: set rollout.sglang.attention to one of them"
        )
    yield from _memory_problems(recipe)
    for key, usual in _EMBEDDED_ONLY.items():
        if getattr(rollout, key) != usual:
            yield (
                f"rollout.{key} is {getattr(rollout, key)}, which only the embedded engine reads; leave it out beside "
                "rollout.engine: sglang"
            )
    whole = rollout.max_running * (recipe.task.max_prompt_tokens + rollout.sampling.max_new_tokens)
    if not rollout.preempt_groups and cache_tokens(recipe) < whole:
        yield (
            f"rollout.num_pages hold {cache_tokens(recipe)} tokens, {rollout.max_running} whole requests need {whole}: "
            "SGLang would retract some of a group, which rollout.preempt_groups false forbids; set that to true, "
            "rollout.num_pages to 0 or more, or lower rollout.max_running"
        )
    if rollout.prefix_cache == "paged":
        yield "rollout.prefix_cache is paged, which SGLang doesn't have; set it to radix or off"


def _draft_problems(c: K3Config, recipe: Recipe) -> Iterator[str]:
    own = recipe.rollout.sglang
    if own.draft is None:
        return
    key = f"rollout.sglang.draft is {own.draft}"
    try:
        draft = DraftConfig.from_folder(own.draft)
        draft.refuse_target(c, own.draft)
    except CheckpointError as e:
        yield f"{key}, which can't draft for this model: {'; '.join(str(e).splitlines())}"
        return
    if draft.num_target_layers is None and max(draft.target_layer_ids) >= draft.num_hidden_layers:
        yield (
            f"{key}, whose config.json has no num_target_layers: SGLang takes the draft's own "
            f'{draft.num_hidden_layers} for it and refuses the taps; add "num_target_layers": {c.num_hidden_layers}'
        )
    if recipe.algorithm.routing_replay:
        yield (
            f"{key} beside algorithm.routing_replay: SGLang's DSpark worker doesn't hand out the experts of what it "
            "verified; set one of them back"
        )
    for name, there in (("disaggregation", own.disaggregation.transfer != "off"), ("dcp", own.dcp > 1)):
        if there:
            yield f"{key} beside rollout.sglang.{name}, which nobody has tried with adapters; set one of them back"


def _memory_problems(recipe: Recipe) -> Iterator[str]:
    own = recipe.rollout.sglang
    if not own.unified_memory:
        return
    rivals = {
        "rollout.sglang.dcp": own.dcp > 1,
        "rollout.sglang.draft": own.draft is not None,
        "rollout.sglang.disaggregation": own.disaggregation.transfer != "off",
    }
    for key, there in rivals.items():
        if there:
            yield f"rollout.sglang.unified_memory is true beside {key}, which SGLang refuses; set one of them back"
    if own.attention not in _UNIFIED_ATTENTION:
        yield (
            f"rollout.sglang.unified_memory is true with attention {own.attention}; SGLang wants one of "
            f"{', '.join(_UNIFIED_ATTENTION)}"
        )
