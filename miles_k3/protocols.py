"""The three seams of the product: Task, Engine, Trainer. Everything else is detail behind one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from miles_k3.types import AdapterUpdate, Completion, Grade, Prompt, SamplingParams, StepStats, TrainBatch

if TYPE_CHECKING:
    import torch

# Told of new tokens and their log-probabilities, on the thread that drives the engine; must be quick and not raise.
OnTokens = Callable[[Sequence[int], Sequence[float]], None]


class Task(Protocol):
    """A source of prompts and the scorer of their answers."""

    name: str

    def next(self, n: int) -> list[Prompt]:
        """The next `n` training prompts; advances the cursor."""
        ...

    def eval_prompts(self, n: int) -> list[Prompt]:
        """The first `n` held-out prompts; never the same as any training prompt, same list at every call."""
        ...

    def grade(self, prompt: Prompt, text: str) -> Grade:
        """Score one answer. Called in worker processes under a wall-clock limit; must not import torch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The data cursor, JSON-serialisable."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the cursor back. Raises CheckpointError when the state is not this task's."""
        ...


class Engine(Protocol):
    """Samples from the current adapter. One request at a time from the caller's view; batches inside."""

    @property
    def adapter_version(self) -> int:
        """The version that new requests use."""
        ...

    async def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        adapter_version: int | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Continue `token_ids`. `adapter_version` pins a live version; default is the newest.

        `on_tokens` hears of all tokens of the completion, in order, as they are sampled.

        Raises EngineError when the prompt is empty or too long, the version is not live, or the engine sleeps.
        """
        ...

    def score(self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[torch.Tensor]:
        """Log-probabilities of tokens 1.. of each sequence under the newest adapter: fp32 [len - 1] each."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request; its `generate` returns what it has, with FinishReason.ABORT. Unknown ids are ignored."""
        ...

    def load_adapter(self, update: AdapterUpdate) -> None:
        """All or nothing: verify, fill the idle slot, flip. Requests in flight finish on their version.

        Raises AdapterError and keeps the old version when anything is wrong.
        """
        ...

    def sleep(self) -> None:
        """Give cache memory back. Raises EngineError while requests run."""
        ...

    def wake(self) -> None:
        """Take cache memory again."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges: running, waiting, free pages, free state slots, generated tokens, seconds per phase."""
        ...

    def close(self) -> None:
        """End the engine; pending requests are aborted."""
        ...


class Writing(Protocol):
    """A checkpoint of the trainer on its way to disk; this rank's part of it."""

    @property
    def files(self) -> Sequence[Path]:
        """What this rank writes."""
        ...

    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks; not collective."""
        ...

    def wait(self) -> None:
        """Return once this rank's files are written and flushed. Raises what the writing raised. Not collective."""
        ...


class Trainer(Protocol):
    """Owns the adapter's parameters and their optimizer.

    One object a rank. All verbs but `sleep` and `wake` are collective: every rank of the run calls them in the same
    order with the same arguments, and gets the same, whole result; how model and batch are split is the trainer's own
    affair.
    """

    @property
    def version(self) -> int:
        """Calls of `step` so far; the version of the adapter that `export_adapter` gives."""
        ...

    def step(self, batch: TrainBatch) -> StepStats:
        """Train on one harvest: an optimizer step per mini-batch. An empty batch (all groups dropped) takes none.

        `batch` is the whole harvest on every rank; the trainer takes its data-parallel share itself. The statistics are
        those of the whole.
        """
        ...

    def score(self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[torch.Tensor]:
        """Like Engine.score, from the trainer's weights. All scores on every rank."""
        ...

    def export_adapter(self, experts: range | None = None) -> AdapterUpdate:
        """The adapter as it is now, the same on every rank; tensors own their memory.

        `experts`: only this rank's shard, with the factors of these routed experts. Ranks may ask for different ones,
        which make up all of them together.
        """
        ...

    def save(self, folder: Path) -> Writing | None:
        """Write adapter, optimizer, RNG and version into an existing empty folder, shared by all ranks.

        None: this rank's part is written. Otherwise it is being written, in the state of this call, while the trainer
        goes on; all ranks give None or none does. Nobody reads the folder before every rank has done its part.
        """
        ...

    def load(self, folder: Path) -> None:
        """Bring back what `save` wrote, bit for bit, also at another layout or number of ranks (random states are then
        those of rank 0 everywhere). Raises CheckpointError on anything missing or foreign."""
        ...

    def load_adapter(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Start from an exported adapter (PEFT import): fills the parameters, leaves optimizer and version alone."""
        ...

    def sleep(self) -> None:
        """Move optimizer state and gradients to host memory. Nothing where they are there already."""
        ...

    def wake(self) -> None:
        """Bring them back; must have happened before `step`, `save` and `load`. Nothing while awake."""
        ...
