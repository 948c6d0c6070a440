"""What runs in a cluster's processes: a rank of the trainer, and the engine that it samples from.

A rank makes its engine, in its own bundle and so on its own device, and the engine ends with it. Torch is imported
only after the environment is set.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from miles_k3.errors import TransportError
from miles_k3.ray.engine_nodes import OtherNodes, free_address
from miles_k3.ray.order import Order, Place, settle_in
from miles_k3.ray.remote_engine import EngineGoneError, RemoteEngine
from miles_k3.types import AdapterUpdate, Completion, LentAdapter, SamplingParams

if TYPE_CHECKING:
    from miles_k3.loop import RunResult
    from miles_k3.protocols import Engine, OnTokens
    from miles_k3.rollout.embedded.engine import EmbeddedEngine
    from miles_k3.rollout.sglang.neighbour import NeighbourEngine
    from miles_k3.world import World

log = logging.getLogger(__name__)

SHARE = 0.5  # of a bundle's devices: the rank has one half, its engine the other
MANY = 100_000  # requests at once; the engine itself decides how many run
REPLY_S = 10.0  # for the end of a process to become known


class RankActor:
    """One rank of the trainer: the run that `miles-k3 train` makes, with its engine in another process."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:  # Ray puts it before each line of this process
        return f"rank {self._rank}"

    def place(self) -> Place:
        return Place(
            node=ray.get_runtime_context().get_node_id(), address=ray.util.get_node_ip_address(),
            devices=tuple(int(gpu) for gpu in ray.get_gpu_ids()),
        )  # fmt: skip

    def run(self, order: Order) -> RunResult:
        """Train; whatever ends it early is raised. Collective."""
        engine = self._engine(order, settle_in(order))
        try:
            from miles_k3.loop import run_training
            from miles_k3.run_folder import RunFolder
            from miles_k3.world import join_world

            world = join_world()
            with RunFolder.create(order.recipe, resume=order.resume, world=world) as run:
                return run_training(order.recipe, run, resume=order.resume, new_engine=lambda *_: _ready(engine))
        finally:
            engine.close()

    def _engine(self, order: Order, world: World) -> RemoteEngine | NeighbourEngine:
        name, cluster = f"the engine of rank {self._rank}", order.recipe.cluster
        limits = {"restarts": cluster.engine_restarts, "timeout_s": cluster.engine_timeout_s}

        def start() -> RayEngineProcess:
            return RayEngineProcess(order, name, cluster.engine_timeout_s)

        if order.recipe.rollout.engine == "embedded":
            return RemoteEngine(start, name=name, **limits)
        from miles_k3.assemble import model_config
        from miles_k3.rollout.sglang.lending import Lending
        from miles_k3.rollout.sglang.neighbour import NeighbourEngine, SpeakingEngine

        lending = Lending(order.recipe, model_config(order.recipe), world)
        return SpeakingEngine(start, lending, name=name, **limits) if order.engine else NeighbourEngine(lending)

    def stop(self, number: int) -> bool:
        """Ask the run for its end, as a signal would. False where it has not begun yet."""
        from miles_k3.stop import ask_to_stop

        return ask_to_stop(signal.Signals(number))


class EngineActor:
    """An engine, alone in its process. All but the receiving of an adapter runs on the actor's event loop."""

    def __init__(self, order: Order, name: str) -> None:
        self._order, self._name = order, name
        self._engine: Engine  # from `start` on

    def __repr__(self) -> str:
        return self._name

    async def meeting_place(self) -> str:
        """Where the machines of an engine find one another."""
        return free_address()

    async def start(self, meeting_place: str | None = None) -> None:
        """Load the model. Raises what is wrong with it."""
        world = settle_in(self._order)
        from miles_k3.assemble import load_recipe_engine

        self._engine = load_recipe_engine(
            self._order.recipe, world, first_gpu=self._order.engine[0].first_gpu, meeting_place=meeting_place
        )

    async def generate(
        self, token_ids: tuple[int, ...], params: SamplingParams, request_id: str, version: int
    ) -> Completion:
        return await self._engine.generate(token_ids, params, request_id=request_id, adapter_version=version)

    async def stream(
        self, token_ids: tuple[int, ...], params: SamplingParams, request_id: str, version: int
    ) -> AsyncIterator[tuple[tuple[int, ...], tuple[float, ...]] | Completion]:
        """(tokens, their log-probabilities) as they are sampled, and the completion at the end."""
        news: asyncio.Queue[tuple[tuple[int, ...], tuple[float, ...]] | None] = asyncio.Queue()
        answer = asyncio.ensure_future(self._engine.generate(
            token_ids, params, request_id=request_id, adapter_version=version,
            on_tokens=lambda tokens, logprobs: news.put_nowait((tuple(tokens), tuple(logprobs))),
        ))  # fmt: skip
        answer.add_done_callback(lambda _: news.put_nowait(None))
        while (told := await news.get()) is not None:
            yield told
        yield await answer

    async def score(self, sequences: list[tuple[int, ...]], temperature: float) -> list[Any]:
        return self._engine.score(sequences, temperature=temperature)

    async def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    async def load_adapter(self, address: str, source: str) -> int:
        """Fetch what `source` offers, while requests go on, and load it; the version served then."""
        from miles_k3.adapters.transport.local import fetch

        update = await asyncio.to_thread(fetch, address, source=source)
        self._engine.load_adapter(update)
        return self._engine.adapter_version

    async def load_lent(self, lent: LentAdapter) -> int:
        """Load what ranks have lent; the version served then."""
        from miles_k3.rollout.sglang.engine import SglangEngine

        assert isinstance(self._engine, SglangEngine), "nothing is lent to others"
        self._engine.load_adapter(lent)
        return self._engine.adapter_version

    async def listen(self, num_tokens: int) -> None:
        self._drafting.listen(num_tokens)

    async def heard(self) -> list[Any]:
        return self._drafting.heard()

    async def load_draft(self, weights: dict[str, Any], version: int) -> None:
        self._drafting.load_draft(weights, version)

    @property
    def _drafting(self) -> EmbeddedEngine:
        from miles_k3.rollout.embedded.engine import EmbeddedEngine

        assert isinstance(self._engine, EmbeddedEngine), "recipes with other engines don't draft"
        return self._engine

    async def sleep(self) -> None:
        self._engine.sleep()

    async def wake(self) -> None:
        self._engine.wake()

    async def stats(self) -> dict[str, float]:
        return dict(self._engine.stats())


class RayEngineProcess:
    """Implements `EngineProcess`: an EngineActor on the engine's first machine, and SGLang's parts on the others."""

    def __init__(self, order: Order, name: str, timeout_s: float) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._actor: Any = order.engine[0].actor(EngineActor, order.share, max_concurrency=MANY).remote(order, name)
        self._others = OtherNodes(order, name, lost=lambda: ray.kill(self._actor)) if len(order.engine) > 1 else None

    def call(self, verb: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        try:
            if verb == "start" and self._others is not None:
                arguments = (ray.get(self._ask("meeting_place")),)
                self._others.start(*arguments)
            return ray.get(self._ask(verb, *arguments), timeout=timeout_s)
        except GetTimeoutError:
            raise TimeoutError from None
        except RayError as error:
            raise self._told(error) from error

    async def acall(self, verb: str, *arguments: Any) -> Any:
        try:
            return await self._ask(verb, *arguments)
        except RayError as error:
            raise self._told(error) from error

    async def stream(self, on_tokens: OnTokens, *arguments: Any) -> Completion:
        try:
            async for coming in self._actor.stream.options(num_returns="streaming").remote(*arguments):
                told = await coming
                if isinstance(told, Completion):
                    return told
                on_tokens(*told)
        except RayError as error:
            raise self._told(error) from error
        raise EngineGoneError("it ended a stream without a completion")

    def tell(self, verb: str, *arguments: Any) -> None:
        self._ask(verb, *arguments)

    def load(self, update: AdapterUpdate | LentAdapter) -> int:
        from miles_k3.adapters.transport.local import Offer

        if isinstance(update, LentAdapter):
            return self._loaded(self._ask("load_lent", update))
        with Offer(update, to=self._name, timeout_s=self._timeout_s) as offer:
            loading = self._ask("load_adapter", offer.address, f"the rank of {self._name}")
            loading.future().add_done_callback(lambda _: offer.withdraw())  # it has ended, or does not want it
            try:
                offer.serve()
            except TransportError:
                done, _ = ray.wait([loading], timeout=REPLY_S)
                if not done:
                    self.end()
                    raise EngineGoneError("it neither took its adapter nor said why, and was ended") from None
        return self._loaded(loading)

    def _loaded(self, loading: Any) -> int:
        try:
            return ray.get(loading, timeout=self._timeout_s)
        except GetTimeoutError:
            self.end()
            raise EngineGoneError(f"it did not load its adapter in {self._timeout_s:g} s and was ended") from None
        except RayError as error:
            raise self._told(error) from error

    def end(self) -> None:
        ray.kill(self._actor)
        if self._others is not None:
            self._others.end()

    def _ask(self, verb: str, *arguments: Any) -> Any:
        return getattr(self._actor, verb).remote(*arguments)

    def _told(self, error: RayError) -> Exception:
        """The far end's own error, or what its end was; it is ended when another machine's part has gone."""
        from miles_k3.rollout.sglang.backend import SglangGoneError

        if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
            gone = isinstance(error.cause, SglangGoneError)
            return EngineGoneError(str(error.cause)) if gone else error.cause
        elsewhere = None if self._others is None else self._others.reason
        return EngineGoneError(elsewhere or end_of_process(error))


def _ready(engine: RemoteEngine | NeighbourEngine) -> RemoteEngine | NeighbourEngine:
    return engine.ready() if isinstance(engine, RemoteEngine) else engine


def end_of_process(error: RayError) -> str:
    """Ray's page about the end of a process, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "exit" in line.lower() or "killed" in line.lower()]
    return (told or lines or [type(error).__name__])[0]
