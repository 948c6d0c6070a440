"""`miles-k3 serve`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from miles_k3.errors import ConfigError

if TYPE_CHECKING:
    from miles_k3.config import ModelSection, RolloutSection

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")
# Without a recipe: memory for this many tokens of each running answer, which may grow longer while others are short.
POOL_TOKENS = 1024
RESERVE_TOKENS = 64
LONGEST = 8192
ANSWER_TOKENS = 256


def _limit(flag: str, text: str, **bounds: Any) -> Any:
    return typer.Option(flag, help=text, rich_help_panel="Limits", **bounds)


Recipe = Annotated[
    str | None, typer.Option("--recipe", metavar="RECIPE", help="A recipe, or a run's folder and its adapter.")
]
Model = Annotated[
    Path | None, typer.Option("--model", metavar="FOLDER", help="A Hugging Face folder, in place of a recipe.")
]
Adapter = Annotated[
    list[str] | None,
    typer.Option("--adapter", metavar="[NAME=]FOLDER", help="PEFT folder to serve; may be repeated."),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one value of the recipe.")
]
Host = Annotated[str, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key", envvar="MILES_K3_API_KEY",
        help="A key that is accepted; may be repeated. The variable keeps it out of the list of processes.",
    ),
]  # fmt: skip
ModelName = Annotated[str | None, typer.Option("--model-name", help="Default: the name of the model's folder.")]
AdapterRoot = Annotated[
    Path, typer.Option("--adapter-root", metavar="FOLDER", help="Clients may load adapters from below it.")
]
MaxRunning = Annotated[int | None, _limit("--max-running", "Answers decoded at once.", min=1)]
MaxQueue = Annotated[int, _limit("--max-queue", "Answers that may wait; more get 429.", min=0)]
MaxSequence = Annotated[int | None, _limit("--max-sequence-tokens", "Of prompt and answer together.", min=2)]
MaxRank = Annotated[int | None, _limit("--max-lora-rank", "Of adapters.", min=1)]
Slots = Annotated[int, _limit("--adapter-slots", "Versions live at once; 0: two more than --adapter names.", min=0)]
DefaultTokens = Annotated[int | None, _limit("--default-max-tokens", "Of chat answers that name no limit.", min=1)]
BodyMb = Annotated[float, _limit("--max-body-mb", "Of a request's body.", min=0.001)]
UploadMb = Annotated[float, _limit("--max-upload-mb", "Of an uploaded adapter.", min=0.001)]
ReaderTimeout = Annotated[float, _limit("--reader-timeout", "Seconds a stream waits for its reader.", min=0.1)]
Drain = Annotated[float, _limit("--drain", "Seconds that running answers have at the end.", min=0.0)]


def serve(
    recipe: Recipe = None,
    model: Model = None,
    adapter: Adapter = None,
    overrides: Overrides = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = None,
    model_name: ModelName = None,
    adapter_root: AdapterRoot = Path(),
    max_running: MaxRunning = None,
    max_queue: MaxQueue = 1024,
    max_sequence_tokens: MaxSequence = None,
    max_lora_rank: MaxRank = None,
    adapter_slots: Slots = 0,
    default_max_tokens: DefaultTokens = None,
    max_body_mb: BodyMb = 4.0,
    max_upload_mb: UploadMb = 8192.0,
    reader_timeout: ReaderTimeout = 60.0,
    drain: Drain = 30.0,
) -> None:
    """Serve a model over HTTP: OpenAI's API, tokens in and out, adapters that are loaded and pinned while it runs.

    Ended by Ctrl-C or SIGTERM it takes no new requests, finishes those that run, and exits with 0.
    """
    if (recipe is None) == (model is None):
        raise ConfigError("miles-k3 serve takes either --recipe RECIPE or --model FOLDER; give one of them")
    if model is not None and overrides:
        raise ConfigError("--set changes values of a recipe; with --model, use the options of miles-k3 serve")
    from miles_k3.rollout.server.run import bind

    bound = bind(host, port)  # before the model is read: a port in use shouldn't cost a load
    from miles_k3.rollout.server.state import ServerOptions
    from miles_k3.serving import ServePlan, named_adapters, run_server

    limits = {"max_running": max_running, "max_lora_rank": max_lora_rank}
    limits = {key: value for key, value in limits.items() if value is not None}
    source = _from_recipe(recipe, overrides or [], limits) if recipe is not None else _from_folder(model, limits)
    options = ServerOptions(
        model_id=model_name or Path(source.model.path).absolute().name,
        api_keys=tuple(api_key or ()),
        max_queue=max_queue,
        max_body_bytes=int(max_body_mb * 2**20),
        max_upload_bytes=int(max_upload_mb * 2**20),
        default_max_tokens=default_max_tokens or source.answer_tokens,
        reader_timeout_s=reader_timeout,
        adapter_root=adapter_root,
    )
    if not options.api_keys and host not in LOOPBACK:
        log.warning("no --api-key: whoever reaches %s can use this server and change its adapters", host)
    run_server(
        ServePlan(
            model=source.model, rollout=source.rollout, options=options,
            max_sequence_tokens=max_sequence_tokens or source.sequence_tokens,
            adapters=named_adapters(source.adapters if adapter is None else adapter),
            adapter_slots=adapter_slots, threads=source.threads, drain_s=drain,
        ),
        bound,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """What a recipe or a model's folder says about serving."""

    model: ModelSection
    rollout: RolloutSection
    sequence_tokens: int
    answer_tokens: int
    threads: int = 0
    adapters: tuple[str, ...] = ()


def _from_recipe(name: str, overrides: list[str], limits: dict[str, int]) -> _Source:
    from miles_k3.recipe import load_recipe

    recipe = load_recipe(name, overrides).recipe
    if recipe.rollout.engine != "embedded":
        raise ConfigError(
            f"rollout.engine is {recipe.rollout.engine}, but miles-k3 serve runs the embedded engine; write "
            "--set rollout.engine=embedded --set rollout.engine_tp=1, or start SGLang's own server (miles-k3 "
            "sglang-commands RECIPE prints how)"
        )
    exported = Path(name) / "adapter"
    answer = recipe.rollout.sampling.max_new_tokens
    return _Source(
        model=recipe.model,
        rollout=recipe.rollout.model_copy(update=limits),
        sequence_tokens=recipe.task.max_prompt_tokens + answer,
        answer_tokens=answer,
        threads=recipe.run.threads,
        adapters=(f"{Path(name).absolute().name}={exported}",) if exported.is_dir() else (),
    )


def _from_folder(folder: Path | None, limits: dict[str, int]) -> _Source:
    import torch

    from miles_k3.config import ModelSection, RolloutSection
    from miles_k3.k3.config import K3Config

    rollout = RolloutSection().model_copy(update=limits)
    longest = min(LONGEST, K3Config.from_folder(str(folder)).max_position_embeddings)
    pages = -(-max(longest, rollout.max_running * POOL_TOKENS) // rollout.page_size)
    return _Source(
        model=ModelSection(path=str(folder), dtype="bfloat16" if torch.cuda.is_available() else "float32"),
        rollout=rollout.model_copy(update={"num_pages": pages, "reserve_tokens": RESERVE_TOKENS}),
        sequence_tokens=longest,
        answer_tokens=ANSWER_TOKENS,
    )
