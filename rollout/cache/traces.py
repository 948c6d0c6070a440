"""Traces of requests as reinforcement learning makes them, to replay against cache policies.

Every trace is a function of its seed. Prompts are keys (`contract.encode`): a request shares a prefix with another one
exactly where its bytes do. Shape legend: lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

VOCAB = 160_000


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One request: it arrives in wave `wave` (all of a wave at once), under an adapter version, and answers so."""

    wave: int
    version: int
    prompt: bytes
    answer: bytes


Trace = Iterator[Call]


class _Draw:
    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def tokens(self, length: int) -> bytes:
        return self.random.integers(0, VOCAB, length, dtype=np.int32).tobytes()

    def length(self, low: int, high: int) -> int:
        """Between the two, short ones more often: uniform in the logarithm."""
        return int(np.exp(self.random.uniform(np.log(low), np.log(high + 1))))


def grpo(count: int, seed: int = 0) -> Trace:
    """64 prompts of 8 samples a step below one system prompt; each step has a new adapter."""
    draw = _Draw(seed)
    system = draw.tokens(180)
    for call in range(count):
        wave, within = divmod(call, 512)
        if within % 8 == 0:
            prompt = system + draw.tokens(draw.length(60, 600))
        yield Call(wave, wave, prompt, draw.tokens(draw.length(100, 4096)))  # pyright: ignore[reportPossiblyUnboundVariable]


def shared_system(count: int, seed: int = 0) -> Trace:
    """Few long system prompts, many private tails, one adapter."""
    draw = _Draw(seed)
    systems = [draw.tokens(draw.length(4_000, 12_000)) for _ in range(6)]
    for call in range(count):
        system = systems[int(draw.random.integers(len(systems)))]
        yield Call(call // 64, 0, system + draw.tokens(draw.length(20, 500)), draw.tokens(draw.length(20, 400)))


def agents(count: int, seed: int = 0, longest: int = 1_000_000) -> Trace:
    """Sessions of many turns, 32 at a time: each asks with all that was said before and a tool's output. Every
    sixteenth session reads whole repositories and grows towards `longest` tokens. The adapter changes at times."""
    draw = _Draw(seed)
    system = draw.tokens(3_000)
    sessions = [(system, 0) for _ in range(32)]
    for call in range(count):
        place = call % len(sessions)
        context, turns = sessions[place]
        heavy = place % 16 == 0
        if turns > 40 or len(context) > 4 * longest or (not heavy and len(context) > 4 * 60_000):
            context, turns = system, 0
        context += draw.tokens(draw.length(200, 60_000 if heavy else 3_000))
        answer = draw.tokens(draw.length(40, 600))
        yield Call(call // len(sessions), call // 2_500, context, answer)
        sessions[place] = context + answer, turns + 1


def drifting(count: int, seed: int = 0) -> Trace:
    """From many short requests to few long ones: what they need of states and of KV drifts by a factor of a hundred."""
    draw = _Draw(seed)
    for call in range(count):
        mean = 150 * 200 ** (call / max(1, count - 1))
        prompt = draw.tokens(draw.length(int(mean / 2), int(mean * 2)))
        yield Call(call // 64, 0, prompt, draw.tokens(draw.length(50, 500)))


TRACES: dict[str, Callable[[int, int], Trace]] = {
    "grpo": grpo, "shared-system": shared_system, "agents": agents, "drifting": drifting,
}  # fmt: skip
