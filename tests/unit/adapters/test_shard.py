"""Shards of an adapter: cut from a whole one, judged by themselves, one identity for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from helpers.tiny import tiny_adapter, tiny_config

from miles_k3.adapters.layout import adapter_layout
from miles_k3.adapters.shard import Claim, Holding, sums_of, whole_sha256
from miles_k3.adapters.update import as_shard, make_update, verify_update
from miles_k3.errors import AdapterError
from miles_k3.types import AdapterConfig, AdapterUpdate

CONFIG, ADAPTER = tiny_config(), AdapterConfig(rank=4, alpha=8.0)
LAYOUT = adapter_layout(CONFIG, ADAPTER)
EXPERTS = range(2, 4)


@pytest.fixture
def update() -> AdapterUpdate:
    return make_update(0, ADAPTER, tiny_adapter(CONFIG, ADAPTER))


def judge(update: AdapterUpdate, experts: range | None = EXPERTS) -> None:
    verify_update(update, LAYOUT, max_rank=8, expected_version=None, experts=experts)


def test_a_shard_has_the_updates_identity_and_memory_of_its_own(update: AdapterUpdate) -> None:
    shard = as_shard(update, LAYOUT, EXPERTS)
    judge(shard)
    assert shard.sha256 == update.sha256
    assert shard.shard is not None
    for name, tensor in shard.tensors.items():
        whole = update.tensors[name]
        assert torch.equal(tensor, whole[2:4] if LAYOUT[name].per_expert else whole)
        assert tensor.untyped_storage().data_ptr() == shard.shard.flat.untyped_storage().data_ptr()
    assert shard.shard.flat.numel() == sum(t.numel() for t in shard.tensors.values())


def moved(shard: AdapterUpdate) -> AdapterUpdate:
    name = next(iter(shard.tensors))
    return dataclasses.replace(shard, tensors={**shard.tensors, name: shard.tensors[name].clone()})


def changed(shard: AdapterUpdate) -> AdapterUpdate:
    next(t for n, t in shard.tensors.items() if LAYOUT[n].per_expert)[0, 0, 0] += 1
    return shard


def renumbered(shard: AdapterUpdate) -> AdapterUpdate:
    assert shard.shard is not None
    return dataclasses.replace(shard, shard=dataclasses.replace(shard.shard, experts=range(4, 6)))


@pytest.mark.parametrize(
    ("fault", "experts", "said"),
    [
        (moved, EXPERTS, "elsewhere than the shard's flat memory has it"),
        (changed, EXPERTS, "has sha256"),
        (renumbered, range(4, 6), "has sha256"),
        (lambda s: s, range(4, 6), "came as the shard of experts 2-3, expected was the shard of experts 4-5"),
        (lambda s: s, None, "came as the shard of experts 2-3, expected was a whole"),
        (lambda s: dataclasses.replace(s, tensors=dict([*s.tensors.items()][1:])), EXPERTS, "lacks 1 of"),
        (lambda s: dataclasses.replace(s, version=3), EXPERTS, "has sha256"),
    ],
    ids=["moved", "changed", "renumbered", "another", "not whole", "incomplete", "version"],
)
def test_what_is_refused(
    update: AdapterUpdate, fault: Callable[[AdapterUpdate], AdapterUpdate], experts: range | None, said: str
) -> None:  # fmt: skip
    with pytest.raises(AdapterError, match=said):
        judge(fault(as_shard(update, LAYOUT, EXPERTS)), experts)


def test_a_whole_is_no_shard(update: AdapterUpdate) -> None:
    with pytest.raises(AdapterError, match="came as a whole, expected was the shard of experts 2-3"):
        judge(update)


def test_the_sums_of_shards_make_up_the_whole_hash(update: AdapterUpdate) -> None:
    """As ranks of two engines claim them; the owners have cut the experts otherwise."""
    holdings = [
        Holding.of(0, ADAPTER, as_shard(update, LAYOUT, experts).tensors, LAYOUT, experts)
        for experts in (range(4), range(4, 8)) * 2
    ]
    owned = {name: t for name, t in update.tensors.items() if LAYOUT[name].per_expert}
    sent = [sums_of({n: t[a:b] for n, t in owned.items()}, dict.fromkeys(owned, a)) for a, b in ((0, 2), (2, 8))]
    claims = [
        Claim.made(held, sent[rank] if rank < 2 else {}, first=rank < 2) for rank, held in enumerate(holdings)
    ]  # fmt: skip
    assert {whole_sha256(LAYOUT, held, claims) for held in holdings} == {update.sha256}
    with pytest.raises(AdapterError, match="held by ranks with experts 0-3; expected shares that make up 8"):
        whole_sha256(LAYOUT, holdings[0], claims[::2])
    odd = [*claims[:3], dataclasses.replace(claims[3], shard="other")]
    with pytest.raises(AdapterError, match=r"has other factors of experts on ranks \[3\] than on rank 1"):
        whole_sha256(LAYOUT, holdings[0], odd)
