"""What a rollout engine takes of one rank's memory beside the base. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from miles_k3.config import Recipe
from miles_k3.k3.config import K3Config
from miles_k3.k3.draft_config import DraftConfig
from miles_k3.k3.draft_params import draft_params
from miles_k3.plan import sglang
from miles_k3.plan.weights import Share, adapter_numbers

FP32, BF16 = 4, 2
ADAPTER_SLOTS = 2
PADDING_BLOCKS = 1  # of each kind in the embedded engine's pool
SGLANG_HOST_BYTES = 17 << 30  # of one scheduler process, as published after host copies were given back
SGLANG_PAGE = 1  # tokens of a page where attention asks for no other; the pool has a spare one
SAMPLED_COPIES = 5  # logits, scaled, log-probabilities, and two of the draw


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBytes:
    """Of one GPU. `base` is 0 where the engine reads the trainer's; `draft`: its weights, while its keys and values are
    in `kv`; `replay`: what moves the states of a verify, or all of them; `kept`: adapters beside their slots."""

    base: int
    slots: int
    kv: int
    states: int
    graphs: int
    work: int
    draft: int = 0
    replay: int = 0
    kept: int = 0


def engine_bytes(recipe: Recipe, c: K3Config, itemsize: int) -> EngineBytes:
    """An embedded engine has everything on its rank; an SGLang engine splits it over `rollout.engine_tp` GPUs."""
    rollout = recipe.rollout
    whole = adapter_numbers(c, Share.whole(c), rollout.max_lora_rank, one_gate_up_a=False)
    requests, tokens = rollout.max_running, cache_tokens(recipe)
    if rollout.engine == "embedded":
        slots = requests
        if rollout.prefix_cache != "off":
            slots += rollout.cache_slots or -(-requests // 4)
        padded, draft = tokens + PADDING_BLOCKS * rollout.page_size, _draft_config(recipe)
        of_draft = 0 if draft is None else draft.context_width * itemsize
        return EngineBytes(
            base=0, slots=ADAPTER_SLOTS * whole.total * itemsize,
            kv=padded * (kv_bytes_per_token(c, itemsize) + of_draft),
            states=(slots + PADDING_BLOCKS) * state_bytes(c, itemsize), graphs=0,
            work=_embedded_work(recipe, c, itemsize, draft),
            draft=0 if draft is None else _draft_bytes(recipe, c, draft, itemsize),
            replay=0 if draft is None else _replay_bytes(recipe, c, draft, itemsize),
        )  # fmt: skip
    split, draft = sglang.split_of(recipe), sglang.draft_of(recipe)
    rows = sglang.verified_rows(draft)
    if draft is not None:
        tokens += sglang.verify_tokens(recipe, draft)
    return EngineBytes(
        base=sglang.weight_bytes(c, split),
        slots=sglang.SLOTS * sglang.slot_numbers(c, rollout.max_lora_rank, split) * BF16,
        kept=sglang.kept_numbers(c, recipe.lora.rank, split) * BF16,
        kv=(tokens + SGLANG_PAGE) * (kv_bytes_per_token(c, BF16) + sglang.draft_kv_bytes(draft, split)),
        states=sglang.state_slots(recipe) * state_bytes(c, BF16, split.tp),
        graphs=sglang.graph_bytes(recipe, c, split, rows),
        work=requests * rows * c.vocab_size * FP32 * SAMPLED_COPIES // split.tp,
        draft=sglang.draft_weight_bytes(draft, split),
        replay=0 if draft is None else (requests + 1) * rows * state_bytes(c, BF16, split.tp),
    )  # fmt: skip


def _draft_config(recipe: Recipe) -> DraftConfig | None:
    at = recipe.rollout.speculative
    return None if at.mode == "off" or at.draft is None else DraftConfig.from_folder(at.draft)


def _draft_bytes(recipe: Recipe, c: K3Config, draft: DraftConfig, itemsize: int) -> int:
    """Weights. Where it is trained: a second
    version, fp32 weights with gradients and two moments, those that it began with, and hidden states to learn from."""
    numbers, at = sum(math.prod(p.shape) for p in draft_params(draft)), recipe.rollout.speculative
    weights = numbers * itemsize
    if at.train:
        weights += numbers * (itemsize + 5 * FP32) + at.train_tokens * (draft.tap_width + c.hidden_size) * itemsize
    return weights


def _replay_bytes(recipe: Recipe, c: K3Config, draft: DraftConfig, itemsize: int) -> int:
    """What moves the states of all positions of a verify (spec 6.6), and under rejection what each token of a block was
    drawn from; given back while the engine sleeps."""
    step, at = 5 * c.kda_dim * itemsize + (c.kda_dim + c.kda_num_heads) * FP32, recipe.rollout
    probs = (at.max_running + 1) * draft.block_size * c.vocab_size * FP32
    rejects = at.speculative.accept == "rejection"
    return _verify_positions(recipe, draft) * len(c.kda_layers) * step + rejects * probs


def _verify_positions(recipe: Recipe, draft: DraftConfig) -> int:
    at, requests = recipe.rollout.speculative, recipe.rollout.max_running
    most = requests * (1 + min(draft.block_size, at.num_draft_tokens or draft.block_size))
    return min(at.verify_tokens or most, most)


def cache_tokens(recipe: Recipe) -> int:
    """Tokens that the engine's KV pages hold."""
    rollout, page = recipe.rollout, recipe.rollout.page_size
    longest = recipe.task.max_prompt_tokens + rollout.sampling.max_new_tokens
    return (rollout.num_pages or rollout.max_running * -(-longest // page)) * page


def kv_bytes_per_token(c: K3Config, itemsize: int) -> int:
    """Latents of all MLA layers, whole on each of an engine's GPUs: K3 at bf16: 24 * 576 * 2 = 27,648."""
    return len(c.mla_layers) * c.latent_cache_dim * itemsize


def state_bytes(c: K3Config, itemsize: int, tp: int = 1) -> int:
    """fp32 states of all KDA layers and their convolution windows: K3 at tp 8: 54.3 MB and 1.9 MB."""
    return len(c.kda_layers) * (kda_state_numbers(c, tp) * FP32 + _window_numbers(c, tp) * itemsize)


def kda_state_numbers(c: K3Config, tp: int = 1) -> int:
    """Of one layer."""
    return c.kda_num_heads // tp * c.kda_head_dim**2


def _window_numbers(c: K3Config, tp: int) -> int:
    return 3 * (c.kda_dim // tp) * (c.short_conv_kernel_size - 1)


def _embedded_work(recipe: Recipe, c: K3Config, itemsize: int, draft: DraftConfig | None) -> int:
    """A prompt step through the widest sublayer, with the residual bank; or the logits of all requests, of a verify
    with the block's own beside them."""
    tokens = recipe.rollout.prefill_chunk_tokens
    bank = (c.bank_rows(c.num_hidden_layers) + 1) * c.hidden_size * itemsize
    kda = c.kda_dim * FP32 * 25
    moe = c.num_experts_per_token * (c.moe_intermediate_size * FP32 * 5 + 2 * c.routed_expert_hidden_size * itemsize)
    dense = c.intermediate_size * FP32 * 5 if c.first_k_dense_replace else 0
    rows = recipe.rollout.max_running
    if draft is not None:
        rows = _verify_positions(recipe, draft) + rows * draft.block_size
    logits = rows * c.vocab_size * FP32 * SAMPLED_COPIES
    return max(tokens * (bank + max(kda, moe, dense)), logits)
