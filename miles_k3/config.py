"""The recipe's models: frozen, strict, every field with a unit and a reason. Imports no torch.

`recipe.py` loads and merges YAML into these; nobody passes a whole `Recipe` further than the loop.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from miles_k3.config_sglang import SglangSection
from miles_k3.config_speculative import SpeculativeSection
from miles_k3.config_types import FolderName, Fraction, PositiveInt, Section, Text


class RunSection(Section):
    """Where a run lives and how long it goes on."""

    name: FolderName = Field(default="run", description="Folder name under `folder`.")
    folder: Text = Field(default="runs", description="Parent folder of all runs.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seeds data order, sampling and adapter initialisation.")
    steps: int = Field(default=100, ge=0, description="Optimizer steps; 0 evaluates only.")
    save_every: int = Field(default=10, ge=0, description="Steps between checkpoints; 0 saves only at the end.")
    keep_checkpoints: PositiveInt = Field(default=2, description="Newest checkpoints kept on disk.")
    wandb: Literal["off", "offline", "online"] = Field(
        default="off", description="Chosen before start; never ends a run."
    )
    wandb_project: Text = Field(default="miles-k3", description="Project name for wandb.")
    threads: int = Field(
        default=0, ge=0, le=1024, description="CPU threads of a rank; 0: torch's choice, or its share of the cores."
    )


class ModelSection(Section):
    """The base checkpoint and the precision it is computed in."""

    path: Text = Field(description="Hugging Face folder: config.json, tokenizer.json, MXFP4 safetensors.")
    weights: Literal["checkpoint", "random"] = Field(
        default="checkpoint", description="random: drawn at the start, for sizes that no checkpoint is at hand for."
    )
    tokenizer: str | None = Field(default=None, description="Folder of the tokenizer; null takes model.path.")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="Compute and storage type of the dense base."
    )
    base_dtype: Literal["bf16", "mxfp4"] = Field(
        default="bf16",
        description="bf16: experts dequantised once, shared by trainer and engine; mxfp4: they stay packed.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto takes CUDA where there is one.")

    @property
    def tokenizer_folder(self) -> str:
        return self.tokenizer or self.path

    mla_latent_norm_eps: float | None = Field(
        default=None, gt=0.0, description="Eps of the MLA latent norms; null takes rms_norm_eps."
    )


class LoraSection(Section):
    """Shape of the adapter."""

    rank: PositiveInt = Field(default=16, description="Rank r of every factor pair.")
    alpha: float = Field(default=32.0, gt=0.0, le=1e6, description="The delta is (alpha / rank) * B A x, applied once.")
    share_gate_up_a: bool = Field(default=True, description="One A for gate and up of dense and shared MLPs.")
    init_from: str | None = Field(default=None, description="PEFT folder to start from; null starts at B = 0.")


class TaskSection(Section):
    """Prompts and their scorer."""

    name: Text = Field(description="reasoning_gym:<dataset> or jsonl:<path>.")
    params: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the dataset (reasoning_gym) or columns (jsonl)."
    )
    system_prompt: str | None = Field(default=None, description="System message put before every question.")
    max_prompt_tokens: PositiveInt = Field(
        default=1024, description="Longer prompts are an error, or skipped and counted."
    )
    on_bad_prompt: Literal["error", "skip"] = Field(
        default="error", description="Malformed lines and overlong prompts."
    )
    scorer: Literal["auto", "math", "exact", "length"] = Field(
        default="auto", description="jsonl only: math-verify, exact match or number of characters; auto is math."
    )
    reward_timeout_s: float = Field(
        default=5.0, gt=0.0, le=86400.0, description="Wall-clock limit of one grading; then reward 0, counted."
    )
    reward_workers: PositiveInt = Field(default=1, description="Grading processes.")


class SamplingSection(Section):
    """How rollouts are sampled."""

    temperature: float = Field(default=1.0, gt=0.0, description="Must be above 0 for training.")
    top_p: Fraction = Field(default=1.0, description="Likeliest tokens up to this probability; 1 keeps all.")
    top_k: int = Field(default=0, ge=0, lt=2**31, description="0 keeps every token.")
    max_new_tokens: PositiveInt = Field(default=64, description="Answer length limit in tokens.")
    stop: tuple[Text, ...] = Field(
        default=(), strict=False, description="Stop strings, beside the end-of-message token."
    )


class RolloutSection(Section):
    """The engine and the size of one step's harvest."""

    engine: Literal["embedded", "sglang"] = Field(
        default="embedded",
        description="embedded: in the trainer's process, on the same base; sglang: in processes of SGLang's own.",
    )
    engine_tp: PositiveInt = Field(
        default=1, description="GPUs that one engine spans; an embedded one lives on its rank's own."
    )
    sglang: SglangSection = SglangSection()
    prompts_per_step: PositiveInt = Field(default=32, description="Groups per optimizer step.")
    group_size: PositiveInt = Field(default=8, description="Samples per prompt.")
    sampling: SamplingSection = SamplingSection()
    max_lora_rank: PositiveInt = Field(default=16, description="Rank that the engine's adapter slots hold.")
    max_running: PositiveInt = Field(default=256, description="Requests decoded at once.")
    page_size: PositiveInt = Field(default=16, description="Tokens per MLA latent page.")
    num_pages: int = Field(
        default=0, ge=0, description="MLA latent pages; 0 sizes them for max_running full-length requests."
    )
    reserve_tokens: int | None = Field(
        default=None, ge=0,
        description="Answer tokens that a request gets pages for at first, growing later; null: all of them.",
    )  # fmt: skip
    preempt_groups: bool = Field(
        default=False, description="Whether samples of a group may be retracted to make room; reserve_tokens needs it."
    )
    prefill_chunk_tokens: PositiveInt = Field(
        default=4096,
        description="Tokens computed per engine step: one of each decoding request, the rest of prompts.",
    )
    prefix_cache: Literal["radix", "paged", "off"] = Field(
        default="radix", description="Policy of what prompts take over from earlier requests; off: nothing."
    )
    cache_slots: int = Field(
        default=0, ge=0, description="State slots for checkpoints beside max_running; 0 takes a quarter of max_running."
    )
    cache_pool: Literal["unified", "split"] = Field(
        default="unified", description="One memory for states and KV pages, or one of each kind."
    )
    track_interval: int = Field(
        default=1024, ge=0,
        description="Tokens between state snapshots inside long prompts and answers; 0 takes none.",
    )  # fmt: skip
    overlap: bool | None = Field(
        default=None, description="Plan and queue a step while the one before runs; null does so on CUDA."
    )
    kernels: Literal["auto", "plain", "fused"] = Field(
        default="auto",
        description="The engine's forward in plain torch or on Triton kernels; auto takes those on CUDA.",
    )
    cuda_graphs: bool | None = Field(
        default=None, description="Record steps as CUDA graphs; null does so with the Triton kernels on CUDA."
    )
    cache_min_tokens: PositiveInt = Field(
        default=64,
        description="Shorter prefixes are computed again: a state costs as much as thousands of tokens of KV.",
    )
    sleep_while_training: bool = Field(
        default=False, description="Give the engine's cache memory back while the trainer works."
    )
    speculative: SpeculativeSection = SpeculativeSection()


class AlgorithmSection(Section):
    """Advantages and loss. Each knob changes the loss; a test proves it."""

    advantage: Literal["grpo", "rloo", "group_mean", "none"] = Field(
        default="grpo",
        description="grpo: (r - mean) / std; group_mean: r - mean; rloo: r - mean of the others; none: r.",
    )
    drop_equal_groups: bool = Field(
        default=True, description="Groups whose rewards are all equal carry no signal and are dropped."
    )
    mask_truncated: bool = Field(
        default=False, description="Answers cut by max_new_tokens keep their reward but get no loss."
    )
    loss_normalization: Literal["token", "sequence"] = Field(
        default="token", description="Mean over tokens, or over sequences of token means."
    )
    clip_low: float = Field(default=0.2, ge=0.0, le=1.0, description="Ratio floor 1 - clip_low.")
    clip_high: float = Field(default=0.28, ge=0.0, description="Ratio ceiling 1 + clip_high (clip-higher).")
    dual_clip: float | None = Field(
        default=None, gt=1.0, description="Bound c of the loss for negative advantages; null is off."
    )
    kl_coef: float = Field(
        default=0.0,
        ge=0.0,
        description="Weight of KL(policy || base) in the loss; the base is the model with the adapter off.",
    )
    importance_cap: float | None = Field(
        default=2.0,
        gt=0.0,
        description="Truncated importance correction: weight min(p_trainer / p_engine, cap); null is off.",
    )
    entropy_coef: float = Field(default=0.0, ge=0.0, description="Weight of the entropy bonus.")
    routing_replay: bool = Field(
        default=False, description="The trainer takes the experts that the engine chose instead of routing afresh."
    )


class ParallelSection(Section):
    """Megatron layout. Data-parallel ranks are what is left: world size / (tp * pp * cp)."""

    tp: PositiveInt = Field(default=1, description="Tensor-parallel ranks.")
    sequence_parallel: bool = Field(
        default=True, description="Split activations between sublayers over the tensor-parallel ranks; MoE needs it."
    )
    pp: PositiveInt = Field(default=1, description="Pipeline-parallel ranks.")
    vpp: PositiveInt = Field(default=1, description="Virtual stages a pipeline rank (interleaved schedule).")
    stage_layers: tuple[PositiveInt, ...] | None = Field(
        default=None, strict=False,
        description="Layers of each of the pp * vpp stages, in model order; null: equal, the last takes what is left.",
    )  # fmt: skip
    cp: PositiveInt = Field(default=1, description="Context-parallel ranks: they share the tokens of a micro-batch.")
    ep: PositiveInt = Field(
        default=1, description="Expert-parallel ranks; they are ranks of tp * cp * dp, so they add none to the world."
    )


class TrainerSection(Section):
    """Optimizer and batching of the trainer."""

    lr: float = Field(default=1e-5, ge=0.0, le=100.0, description="Adam's peak learning rate.")
    lr_warmup_steps: int = Field(default=0, ge=0, description="Linear warm-up from 0.")
    lr_decay: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="After the warm-up: constant, or down to 0 at run.steps."
    )
    adam_beta1: float = Field(default=0.9, ge=0.0, lt=1.0, description="Decay of the gradient's mean.")
    adam_beta2: float = Field(default=0.95, ge=0.0, lt=1.0, description="Decay of the squared gradient's mean.")
    adam_eps: float = Field(default=1e-8, ge=1e-30, description="Keeps Adam's division finite.")
    weight_decay: float = Field(default=0.0, ge=0.0, description="Decoupled (AdamW), on every adapter factor.")
    grad_clip: float = Field(default=1.0, ge=0.0, description="Global gradient norm limit; 0 is off.")
    micro_batch_tokens: PositiveInt = Field(
        default=8192, description="Tokens of one packed micro-batch; a longer sequence is refused."
    )
    updates_per_rollout: PositiveInt = Field(
        default=1, description="Optimizer steps per harvest: the groups are split into this many batches."
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none", description="Activations computed again in the backward: recompute_sublayers, or whole layers."
    )
    recompute_sublayers: tuple[Literal["attention", "mlp"], ...] = Field(
        default=("mlp",), strict=False, description="What recompute: selective does not keep."
    )
    mla_attention: Literal["torch", "transformer_engine"] = Field(
        default="torch", description="Core attention of MLA layers; transformer_engine must be installed."
    )
    kda_kernel: Literal["auto", "torch", "fla"] = Field(
        default="auto", description="Delta rule of KDA layers; auto takes fla's Triton kernels on CUDA in bfloat16."
    )
    distributed_optimizer: bool = Field(
        default=True, description="Adam's masters and moments split over the data-parallel ranks."
    )
    sleep_while_rollout: bool = Field(
        default=False, description="Optimizer state and gradients go to host memory while the engine samples."
    )
    async_checkpoint: bool = Field(default=True, description="Write checkpoints while the next step runs.")
    parallel: ParallelSection = ParallelSection()


class ClusterSection(Section):
    """The machines that a run asks for: what `miles-k3 plan` plans for and `miles-k3 launch` waits for.

    Ranks are nodes * ranks_per_node; on CUDA each has a GPU of its own.
    """

    nodes: PositiveInt = Field(default=1, description="Machines.")
    ranks_per_node: int = Field(
        default=0, ge=0, description="Ranks, and on CUDA GPUs, of each; 0: whatever the launcher starts."
    )
    ray_address: Text = Field(
        default="local", description="miles-k3 launch: local starts Ray here; auto or HOST:PORT joins one that runs."
    )
    engine_restarts: int = Field(
        default=3, ge=0, description="miles-k3 launch: how often an engine that ended is started again, an adapter."
    )
    engine_timeout_s: float = Field(
        default=600.0, gt=0.0, le=86400.0,
        description="miles-k3 launch: an engine without a sign of life for so long is started again.",
    )  # fmt: skip
    gpu_memory_gb: float | None = Field(
        default=None, gt=0.0, description="Memory of one GPU, 1e9 bytes, to plan for; null: what this machine has."
    )
    host_memory_gb: float | None = Field(
        default=None, gt=0.0, description="Memory of one machine, 1e9 bytes, to plan for; null: what this one has."
    )


class EvalSection(Section):
    """Held-out accuracy while training."""

    every: int = Field(default=0, ge=0, description="Steps between evaluations; 0 evaluates before and after only.")
    prompts: int = Field(default=256, ge=0, description="Held-out prompts, one answer each; 0 turns evaluation off.")
    temperature: float = Field(default=1.0, ge=0.0, description="0 is greedy.")


class SyncSection(Section):
    """Checks at every adapter hand-over."""

    canary_tokens: PositiveInt = Field(
        default=64, description="Answer tokens of the canary that both sides score at each sync."
    )
    canary_max_diff: float | None = Field(
        default=None,
        gt=0.0,
        description="Largest |dlogprob| allowed; null takes 1e-3 in float32 and 0.1 in bfloat16.",
    )


class Recipe(Section):
    """A whole run."""

    run: RunSection = RunSection()
    model: ModelSection
    lora: LoraSection = LoraSection()
    task: TaskSection
    rollout: RolloutSection = RolloutSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    trainer: TrainerSection = TrainerSection()
    cluster: ClusterSection = ClusterSection()
    eval: EvalSection = EvalSection()
    sync: SyncSection = SyncSection()

    @model_validator(mode="after")
    def _cross_checks(self) -> Recipe:
        problems = []
        if self.lora.rank > self.rollout.max_lora_rank:
            problems.append(
                f"lora.rank is {self.lora.rank} but the engine's slots hold rank {self.rollout.max_lora_rank}; "
                f"set rollout.max_lora_rank: {self.lora.rank}"
            )
        if self.rollout.group_size == 1 and self.algorithm.advantage != "none":
            problems.append(
                f"rollout.group_size is 1 but algorithm.advantage {self.algorithm.advantage!r} compares samples of a "
                "group: every advantage would be 0; set rollout.group_size: 2 or more, or algorithm.advantage: none"
            )
        if self.rollout.prompts_per_step % self.trainer.updates_per_rollout:
            problems.append(
                f"rollout.prompts_per_step {self.rollout.prompts_per_step} is not a multiple of "
                f"trainer.updates_per_rollout {self.trainer.updates_per_rollout}; the groups are split evenly over the "
                "updates, so choose numbers that divide"
            )
        longest = self.task.max_prompt_tokens + self.rollout.sampling.max_new_tokens
        if longest > self.trainer.micro_batch_tokens:
            problems.append(
                f"a sequence may have {longest} tokens (task.max_prompt_tokens + rollout.sampling.max_new_tokens), a "
                f"micro-batch holds {self.trainer.micro_batch_tokens}; set trainer.micro_batch_tokens: {longest} or "
                "more, or lower one of the others"
            )
        problems += [*self._idle_clipping(), *self._engine_span()]
        problems += self.rollout.speculative.problems(self.rollout.engine, self.rollout.max_running)
        if self.rollout.reserve_tokens is not None and not self.rollout.preempt_groups:
            problems.append(
                f"rollout.reserve_tokens is {self.rollout.reserve_tokens}, but samples of a group hold memory "
                "for their whole length while rollout.preempt_groups is false; set that to true, or this to null"
            )
        num_pages, page_size = self.rollout.num_pages, self.rollout.page_size
        if 0 < num_pages * page_size < longest:
            problems.append(
                f"rollout.num_pages {num_pages} of rollout.page_size {page_size} hold {num_pages * page_size} tokens, "
                f"but one request may take {longest} (task.max_prompt_tokens + rollout.sampling.max_new_tokens); "
                f"set rollout.num_pages: {-(-longest // page_size)} or more, or 0"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _engine_span(self) -> list[str]:
        """An embedded engine has no ranks of its own to spread over; others take whole groups of the cluster's."""
        rollout, ranks = self.rollout, self.cluster.nodes * self.cluster.ranks_per_node
        if rollout.engine == "embedded" and rollout.engine_tp > 1:
            return [
                f"rollout.engine_tp is {rollout.engine_tp} but an embedded engine lives on one rank; set "
                "rollout.engine_tp: 1"
            ]
        if ranks % rollout.engine_tp:
            return [
                f"rollout.engine_tp {rollout.engine_tp} doesn't divide the {ranks} ranks of cluster.nodes * "
                "cluster.ranks_per_node; choose one that does"
            ]
        return []

    def _idle_clipping(self) -> list[str]:
        """With one update a harvest the policy is the one before it, so no ratio is ever clipped."""
        if self.trainer.updates_per_rollout > 1:
            return []
        usual = {"clip_low": AlgorithmSection().clip_low, "clip_high": AlgorithmSection().clip_high, "dual_clip": None}
        return [
            f"algorithm.{name} is {getattr(self.algorithm, name)} but would do nothing: with "
            "trainer.updates_per_rollout 1 the ratio to the policy before the harvest is always 1; set "
            f"trainer.updates_per_rollout: 2 or more, or leave algorithm.{name} at {value or 'null'}"
            for name, value in usual.items()
            if getattr(self.algorithm, name) != value
        ]
