"""What SGLang takes of each of an engine's GPUs, by the sizes that its release computes. Imports no torch.

Routed experts are split over expert-parallel ranks, and their columns over what tensor parallelism is left; everything
else over all tensor-parallel ranks or copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from miles_k3.config import Recipe
from miles_k3.k3.config import K3Config
from miles_k3.k3.draft_config import DraftConfig
from miles_k3.k3.draft_params import draft_params
from miles_k3.k3.params import Part, vision_params
from miles_k3.plan.weights import Share, adapter_numbers, base_bytes, dense_params

FP32, BF16 = 4, 2
VERSIONS = 2  # adapters alive at once (rollout.sglang.names)
SLOTS = VERSIONS + 1  # requests of the bare base take one as well
STATES_PER_REQUEST = 5  # KDA slots that the published LoRA recipe draws for each running request (spec 6.6)
GRAPH_BYTES = 3_000_000_000  # assumed: captured graphs; a published figure is not known
WORK_BYTES = 1_000_000_000  # assumed: Marlin's and attention's work space, libraries
LORA_BLOCK = 64  # rows of a block of SGLang's expert LoRA kernels, for which it allocates where graphs are captured


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How an engine's GPUs share it: `tp` of them, `ep` groups of experts."""

    tp: int
    ep: int

    @property
    def columns(self) -> int:
        """Parts that the columns of an expert are cut into."""
        return self.tp // self.ep


def split_of(recipe: Recipe) -> Split:
    return Split(tp=recipe.rollout.engine_tp, ep=recipe.rollout.sglang.ep)


def weight_bytes(c: K3Config, split: Split) -> int:
    """The release's weights, experts packed, with MLA's absorbed copies of kv_b_proj and the vision tower.

    Marlin's layout takes as much as the file's, where nothing is padded.
    """
    experts = base_bytes(c, Share.whole(c), itemsize=BF16, packed=True).experts
    dense = sum(p.num_bytes // (split.tp if p.tp_dim is not None else 1) for p in dense_params(c, Share.whole(c)))
    absorbed = sum(
        p.num_bytes // split.tp for p in dense_params(c, Share.whole(c)) if p.part is Part.MLA and "kv_b_proj" in p.name
    )
    vision = sum(p.num_bytes for p in vision_params(c))
    return experts // split.tp + dense + absorbed + vision


def slot_numbers(c: K3Config, rank: int, split: Split) -> int:
    """Of one slot of the LoRA pool. Each layer has room for every target, whether it has the module or not."""
    return sum(
        (a_rows * inputs + outputs * b_copies) * rank
        for layer in range(c.num_hidden_layers)
        for a_rows, inputs, outputs, b_copies in _factors(c, layer, split)
    )


def _factors(c: K3Config, layer: int, split: Split) -> Iterator[tuple[int, int, int, int]]:
    """(copies or parts in A, inputs, outputs, copies of B) of each target of a layer on a GPU, by the rank."""
    hidden, latent, tp = c.hidden_size, c.routed_expert_hidden_size, split.tp
    attention = c.mla_value_dim if c.is_mla(layer) else c.kda_dim
    mlp = c.shared_intermediate_size if c.is_moe(layer) else c.intermediate_size
    experts, width = c.num_experts // split.ep, c.moe_intermediate_size // split.columns
    yield 1, attention // tp, hidden, 1
    yield 2, hidden, c.q_lora_rank + c.latent_cache_dim, 1
    yield 2, hidden, 2 * mlp // tp, 1
    yield 1, mlp // tp, hidden, 1
    yield 2, latent, 2 * width, experts
    yield experts, width, latent, 1


def kept_numbers(c: K3Config, rank: int, split: Split) -> int:
    """Of all adapters beside their slots: what isn't an expert's, whole on each GPU, of each; the experts' factors of
    the newest, until its first use moves them into the slot."""
    whole = adapter_numbers(c, Share.whole(c), rank, one_gate_up_a=False)
    return VERSIONS * whole.dense + whole.expert // split.ep


def state_slots(recipe: Recipe) -> int:
    """The pool's own spare one included."""
    return (recipe.rollout.sglang.state_slots or STATES_PER_REQUEST * recipe.rollout.max_running) + 1


def draft_of(recipe: Recipe) -> DraftConfig | None:
    """Raises CheckpointError where the recipe names a folder that holds no draft."""
    folder = recipe.rollout.sglang.draft
    return None if folder is None else DraftConfig.from_folder(folder)


def verified_rows(draft: DraftConfig | None) -> int:
    """Rows of a request in a step: its last token, and those that are drafted behind it."""
    return 1 if draft is None else draft.block_size + 1


def verify_tokens(recipe: Recipe, draft: DraftConfig) -> int:
    """Tokens in the KV cache for what is being verified, and for the step after it."""
    return 2 * verified_rows(draft) * recipe.rollout.max_running


def draft_weight_bytes(draft: DraftConfig | None, split: Split) -> int:
    """Products of its layers are cut over all GPUs, the rest is on each."""
    if draft is None:
        return 0
    return sum(
        math.prod(p.shape) * BF16 // (split.tp if p.layer is not None and len(p.shape) == 2 else 1)
        for p in draft_params(draft)
    )


def draft_kv_bytes(draft: DraftConfig | None, split: Split) -> int:
    """Of a token: keys and values of all the draft's layers, at least one head on each GPU."""
    if draft is None:
        return 0
    return 2 * draft.num_hidden_layers * max(1, draft.num_key_value_heads // split.tp) * draft.head_dim * BF16


def graph_bytes(recipe: Recipe, c: K3Config, split: Split, rows_per_request: int = 1) -> int:
    """Where graphs are captured: theirs, the logits of the largest batch, and what SGLang's expert LoRA sorts into."""
    rows = recipe.rollout.max_running * rows_per_request
    if not recipe.rollout.sglang.cuda_graphs:
        return WORK_BYTES
    width, k = c.moe_intermediate_size // split.columns, c.num_experts_per_token
    padded = -(-(rows * k + c.num_experts * (LORA_BLOCK - 1)) // LORA_BLOCK) * LORA_BLOCK
    caches = rows * (k * (2 * width + width + c.routed_expert_hidden_size) + c.routed_expert_hidden_size) * BF16
    sorting = SLOTS * (padded + padded // LORA_BLOCK + rows * k + c.num_experts + 1) * FP32
    return WORK_BYTES + GRAPH_BYTES + caches + sorting + rows * c.vocab_size * FP32
