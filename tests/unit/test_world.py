"""Who a process is, what the ranks share, and how an error of one becomes everyone's. Without any other process."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from miles_k3 import world
from miles_k3.errors import ConfigError, EngineError, LaunchError, MilesError
from miles_k3.world import ALONE, PeerLostError, World, first_to_say, world_of


class Recorded(World):
    """A rank whose exchanges are a script: `gather` gives what is there for the others."""

    def __init__(self, rank: int, others: dict[int, object]) -> None:
        super().__init__(rank=rank, size=len(others) + 1)
        object.__setattr__(self, "others", others)

    def gather(self, value):
        passed = pickle.loads(pickle.dumps(value))
        return [passed if rank == self.rank else self.others[rank] for rank in range(self.size)]  # type: ignore[attr-defined]

    def broadcast(self, value, source=0):
        return pickle.loads(pickle.dumps(value if source == self.rank else self.others[source]))  # type: ignore[attr-defined]


def raiser(error: BaseException):
    def work() -> None:
        raise error

    return work


def failed(error: MilesError | OSError):
    return world._attempt(raiser(error))


@pytest.mark.parametrize("count", [0, 1, 3, 8, 13])
@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_shares_are_a_partition_in_order_and_even(count: int, size: int) -> None:
    shares = [World(rank=rank, size=size).share(count) for rank in range(size)]
    assert [i for share in shares for i in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, World()),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, World()),
        ({"WORLD_SIZE": "1"}, World()),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
         World(rank=3, size=4, local_rank=1, local_size=2)),
        ({"WORLD_SIZE": "1", "MILES_K3_LAUNCHER": "ray"}, World(launcher="ray")),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}, World(rank=3, size=4, local_rank=3, local_size=4)),
    ],
)  # fmt: skip
def test_the_launcher_says_who_we_are(environ: dict[str, str], found: World) -> None:
    assert world_of(environ) == found


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "expected whole numbers in all of RANK, WORLD_SIZE, LOCAL_RANK"),
        ({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "start with torchrun"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK is 2 of WORLD_SIZE 2"),
    ],
)
def test_half_a_launch_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        world_of(environ)


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ({}, "MASTER_ADDR expected, but not set"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "abc"}, r"MASTER_PORT abc \(invalid literal"),
    ],
)
def test_without_a_place_to_meet_there_is_a_sentence(
    places: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=said):
        world._meet(World(rank=0, size=2))


def test_alone_everything_is_a_plain_call() -> None:
    assert ALONE.everywhere(lambda: 3) == [3]
    assert (ALONE.once(lambda: 4), ALONE.together(lambda: 5), ALONE.gather(6), ALONE.broadcast(7)) == (4, 5, [6], 7)
    assert ALONE.any(True)
    with pytest.raises(ZeroDivisionError):
        ALONE.everywhere(lambda: 1 // 0)
    assert first_to_say("anything")


def test_values_of_all_ranks_come_in_their_order() -> None:
    assert Recorded(1, {0: "a", 2: "c"}).everywhere(lambda: "b") == ["a", "b", "c"]
    assert Recorded(0, {1: None}).once(lambda: "mine") == "mine"
    assert Recorded(1, {0: "theirs"}).once(raiser(AssertionError("rank 0 alone does it"))) == "theirs"
    assert Recorded(1, {0: None}).together(lambda: "mine") == "mine"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_is_raised_on_all_and_names_it(rank: int) -> None:
    error = EngineError("the engine sleeps")
    with pytest.raises(EngineError, match="the engine sleeps") as caught:
        Recorded(rank, {1 - rank: failed(error) if rank == 0 else None}).together(
            raiser(error) if rank == 1 else lambda: 1
        )
    assert caught.value.__notes__ == ["rank 1"]


def test_the_same_error_on_every_rank_names_none_and_rank_0_decides_for_all() -> None:
    problem = ConfigError(["one", "two"])
    with pytest.raises(ConfigError) as caught:
        Recorded(1, {0: failed(problem)}).everywhere(raiser(ConfigError("one\ntwo")))
    assert (str(caught.value), getattr(caught.value, "__notes__", [])) == ("one\ntwo", [])
    with pytest.raises(OSError, match="No space left") as refused:
        Recorded(1, {0: failed(OSError(28, "No space left on device", "/runs/x"))}).once(lambda: None)
    assert (refused.value.errno, refused.value.filename) == (28, "/runs/x")


def test_bugs_and_lost_peers_are_not_passed_around() -> None:
    for error in (ZeroDivisionError(), PeerLostError("gone")):
        with pytest.raises(type(error)):
            Recorded(0, {1: None}).everywhere(raiser(error))


def test_a_broken_exchange_says_that_a_peer_is_gone() -> None:
    with pytest.raises(PeerLostError, match="another process of this run has ended"):
        world._exchange(raiser(RuntimeError("Connection closed by peer")))


def test_of_the_ranks_that_say_the_same_one_is_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._C._distributed_c10d import HashStore

    monkeypatch.setattr(world, "_store", HashStore())
    monkeypatch.setattr(world.signal, "signal", lambda number, handler: None)
    assert [first_to_say(text) for text in ("a", "a", "b", "a" * 10_000)] == [True, False, True, True]
