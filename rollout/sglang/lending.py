"""A rank's part in handing an adapter to an SGLang engine: its shard stays where it is, and the engine's processes on
its GPU read it there. What travels between ranks, and to SGLang, are handles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from miles_k3.adapters.layout import adapter_layout
from miles_k3.adapters.transport.loan import Loan
from miles_k3.adapters.update import as_shard, verify_update
from miles_k3.config import Recipe
from miles_k3.errors import AdapterError
from miles_k3.k3.config import K3Config
from miles_k3.rollout.sglang.span import engine_ranks, held_experts
from miles_k3.types import AdapterUpdate, LentAdapter, LentShard
from miles_k3.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a rank has lent."""

    version: int
    sha256: str
    shard: LentShard


class Lending:
    """One rank's. Every rank of the run has one, of an engine over several ranks or of its own."""

    def __init__(self, recipe: Recipe, config: K3Config, world: World) -> None:
        self._recipe, self._config, self._world = recipe, config, world
        self._ranks = engine_ranks(recipe, world.rank, world.size)
        self._kept: Loan | None = None  # of the version that is loaded: a new process of the engine reads it again

    def hand_over(self, update: AdapterUpdate, current: int, load: Callable[[LentAdapter], None] | None) -> None:
        """Lend this rank's shard, and have the rank that speaks for the engine `load` all of its ranks' shards.

        Collective: it returns once every engine has loaded its own, and raises on every rank what failed on one. Each
        shard is judged by its rank, and all of them are lent, before any engine hears of them. `current`: the version
        before.
        """
        loan = self._world.together(lambda: self._lent(update, current))
        offers = self._world.gather(Offer(version=update.version, sha256=update.sha256, shard=loan.lent))
        self._refuse_foreign(offers)
        shards = tuple(offers[rank].shard for rank in self._ranks)
        lent = LentAdapter(version=update.version, config=update.config, sha256=update.sha256, shards=shards)
        self._world.together(lambda: load(lent) if load else None)
        if self._kept is not None:
            self._kept.close()
        self._kept = loan
        loan.read()

    def _lent(self, update: AdapterUpdate, current: int) -> Loan:
        layout = adapter_layout(self._config, update.config)
        limits = {
            "max_rank": self._recipe.rollout.max_lora_rank, "expected_version": None if current < 0 else current + 1
        }  # fmt: skip
        own = held_experts(self._recipe, self._config, self._world.rank, self._world.size)
        if update.shard is None:  # of a file, for instance
            verify_update(update, layout, **limits)
            update = as_shard(update, layout, own)
        verify_update(update, layout, **limits, experts=own)
        assert update.shard is not None
        readers = self._recipe.rollout.engine_tp // len(self._ranks)
        return Loan(update.shard.flat, update.shard.experts, readers=readers, keep=True)

    def _refuse_foreign(self, offers: list[Offer]) -> None:
        """Every rank sees all offers, so all of them refuse the same."""
        first = offers[0]
        for rank, offer in enumerate(offers):
            expected = held_experts(self._recipe, self._config, rank, len(offers))
            if (offer.version, offer.sha256) != (first.version, first.sha256):
                raise AdapterError(
                    f"rank {rank} lends a shard of adapter v{offer.version}, sha256 {offer.sha256[:12]}..., rank 0 of "
                    f"v{first.version}, {first.sha256[:12]}...; all must be of one export"
                )
            if offer.shard.experts != expected:
                raise AdapterError(
                    f"rank {rank} lends experts {offer.shard.experts}, its part of the engine has {expected}"
                )
