"""What `miles-k3 serve` runs: model, engine, adapters and server, put together."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from miles_k3.assemble import DTYPES
from miles_k3.config import ModelSection, RolloutSection
from miles_k3.errors import ConfigError, LaunchError
from miles_k3.k3.config import K3Config
from miles_k3.k3.weights import load_base
from miles_k3.launch import pick_device, refuse_draft
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.server.adapters import Adapters
from miles_k3.rollout.server.backend import Backend
from miles_k3.rollout.server.chat import Chat
from miles_k3.rollout.server.errors import ApiError
from miles_k3.rollout.server.gate import Gate
from miles_k3.rollout.server.metrics import Metrics
from miles_k3.rollout.server.names import NAME, Names
from miles_k3.rollout.server.run import address_of, serve
from miles_k3.rollout.server.state import Server, ServerOptions
from miles_k3.speculating import prepare_speculation, speculative_of
from miles_k3.tokenizer import load_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePlan:
    """What to serve. `adapters`: name -> PEFT folder, loaded in this order, the last is the newest; all are pinned.

    `adapter_slots`: versions live at once beside the base; 0 takes two more than `adapters`.
    """

    model: ModelSection
    rollout: RolloutSection
    max_sequence_tokens: int
    options: ServerOptions
    adapters: dict[str, Path]
    adapter_slots: int = 0
    threads: int = 0
    drain_s: float = 30.0


def named_adapters(given: Sequence[str]) -> dict[str, Path]:
    """NAME=FOLDER or FOLDER, whose name is then the folder's. Raises ConfigError with every problem."""
    adapters: dict[str, Path] = {}
    problems = []
    for text in given:
        name, equals, path = text.partition("=")
        folder = Path(path if equals else text)
        name = name if equals else folder.absolute().name
        if not folder.is_dir():
            problems.append(f"--adapter {text}: no such folder; expected a PEFT folder with adapter_config.json")
        elif not NAME.fullmatch(name):
            problems.append(f"--adapter {text}: {name!r} is no name for an adapter; write --adapter NAME={folder}")
        elif name in adapters:
            problems.append(f"--adapter {text}: {name!r} is taken by {adapters[name]}; write --adapter NAME={folder}")
        else:
            adapters[name] = folder
    if problems:
        raise ConfigError(problems)
    return adapters


def run_server(plan: ServePlan, bound: socket.socket) -> None:
    """Load everything, then serve until a signal. Raises MilesError before anything is served."""
    if plan.threads:
        torch.set_num_threads(plan.threads)
    engine, tokenizer = _engine(plan)
    asyncio.run(_serve(plan, engine, tokenizer, bound))


async def _serve(plan: ServePlan, engine: EmbeddedEngine, tokenizer: object, bound: socket.socket) -> None:
    server = make_server(engine, tokenizer, plan.options)
    server.backend.start()
    for name, folder in plan.adapters.items():
        try:
            await server.adapters.load(folder, name=name, version=None, pin=True, source=str(folder))
        except ApiError as e:
            await server.backend.close()
            raise ConfigError([f"--adapter {name}={folder}: {line}" for line in e.message.splitlines()]) from e
    names = server.adapters.names

    def started() -> None:
        log.info("serving %s on %s", ", ".join(names.models()), address_of(bound))

    await serve(server, bound, drain_s=plan.drain_s, started=started)


def make_server(engine: EmbeddedEngine, tokenizer: object, options: ServerOptions) -> Server:
    """The parts around an engine; `server.backend.start()` sets it going."""
    metrics = Metrics()
    backend = Backend(engine, on_first_token=metrics.first_token, on_gap=metrics.gap)
    names = Names(options.model_id)
    return Server(
        options=options,
        config=engine.config,
        max_sequence_tokens=engine.max_sequence_tokens,
        num_pages=int(engine.stats()["free_pages"]),
        backend=backend,
        chat=Chat(tokenizer),
        gate=Gate(max_running=engine.max_running, max_queue=options.max_queue),
        adapters=Adapters(backend, engine.config, names, options.adapter_root),
        metrics=metrics,
    )


def _engine(plan: ServePlan) -> tuple[EmbeddedEngine, object]:
    model, rollout = plan.model, plan.rollout
    config = K3Config.from_folder(model.path)
    if model.mla_latent_norm_eps is not None:
        config = replace(config, mla_latent_norm_eps=model.mla_latent_norm_eps)
    if plan.max_sequence_tokens > config.max_position_embeddings:
        raise ConfigError(
            f"--max-sequence-tokens {plan.max_sequence_tokens}: the model takes {config.max_position_embeddings} "
            "(max_position_embeddings)"
        )
    refuse_draft(rollout.speculative, config)
    tokenizer = load_tokenizer(model.path)
    base = load_base(
        model.path, config, dtype=DTYPES[model.dtype], device=pick_device(model.device), base_dtype=model.base_dtype
    )
    slots = plan.adapter_slots or len(plan.adapters) + 2
    if slots < len(plan.adapters) + 1:
        raise ConfigError(
            f"--adapter-slots {slots}: {len(plan.adapters)} adapters and one slot to load the next into need "
            f"{len(plan.adapters) + 1}"
        )
    try:
        engine = EmbeddedEngine(
            base, config, tokenizer=tokenizer, max_lora_rank=rollout.max_lora_rank, adapter_slots=max(2, slots),
            max_running=rollout.max_running, page_size=rollout.page_size, num_pages=rollout.num_pages,
            prefill_chunk_tokens=rollout.prefill_chunk_tokens, max_sequence_tokens=plan.max_sequence_tokens,
            prefix_cache=rollout.prefix_cache, cache_slots=rollout.cache_slots, cache_pool=rollout.cache_pool,
            cache_min_tokens=rollout.cache_min_tokens, track_interval=rollout.track_interval,
            reserve_tokens=rollout.reserve_tokens, overlap=rollout.overlap,
            speculative=speculative_of(rollout.speculative, config),
            kernels=rollout.kernels, cuda_graphs=rollout.cuda_graphs,
        )  # fmt: skip
        prepare_speculation(engine, rollout.speculative)
    except (MemoryError, OverflowError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and not re.search("alloc|memory|overflow", str(e)):
            raise
        raise LaunchError(
            f"--max-running {rollout.max_running}, --max-sequence-tokens {plan.max_sequence_tokens} and {slots} "
            f"adapter slots of rank {rollout.max_lora_rank} don't fit into memory ({str(e).splitlines()[0]}); "
            "lower one of them"
        ) from e
    return engine, tokenizer
