"""How many drafted tokens a target accepts: speculative decoding by brute force, an uncached forward for each round.

Slow and plain on purpose: no cache, no rollback, nothing shared with the engine's verify, which can be held against it.
Shapes: S sequences, G tokens of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.speculative.draft import DraftModel, drawn
from miles_k3.rollout.speculative.taps import target_states
from miles_k3.rollout.speculative.target_states import TargetStates


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Acceptance over all rounds of all answers, one drafted block a round.

    `room` is the mean of what could have been accepted: the block's size, or what was left of the answer where that is
    less. `reached[k]` rounds had room for a k-th token and accepted all before it, `accepted[k]` of them that one too.
    """

    rounds: int
    mean_accepted: float
    room: float
    reached: tuple[int, ...]
    accepted: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]

    @property
    def rates(self) -> tuple[float, ...]:
        """Of each position, the share accepted where it was reached; NaN where it never was."""
        return tuple(a / r if r else float("nan") for a, r in zip(self.accepted, self.reached, strict=True))


@dataclass(slots=True)
class _Answer:
    tokens: list[int]
    num_prompt: int
    blocks: list[tuple[int, int]]  # (answer tokens before the block, drafted tokens accepted)
    done: bool = False


@torch.no_grad()
def measure_acceptance(
    model: DraftModel,
    engine: EmbeddedEngine,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    sampled: bool,
    seed: int = 0,
) -> Acceptance:
    """Answer all prompts with drafted blocks: greedy on both sides, or `sampled` on both sides at temperature 1.

    As in decoding, the target alone gives an answer's first token. Sampled blocks are judged by rejection sampling
    (Leviathan et al. 2023), so answers follow the target's distribution.
    """
    rng = torch.Generator().manual_seed(seed) if sampled else None
    answers = [_Answer(tokens=list(p), num_prompt=len(p), blocks=[]) for p in prompts]
    states = _states(model, engine, [a.tokens for a in answers])
    for answer, state in zip(answers, states, strict=True):
        p = _target(model, state.final_TH[-1:]).softmax(-1)[0]
        _commit(answer, [_choose(p, rng)], max_new_tokens, stop_token_ids)
    while active := [i for i, a in enumerate(answers) if not a.done]:
        drafted, logits = _draft([answers[i] for i in active], [states[i] for i in active], model, rng)
        extended = [answers[i].tokens + row for i, row in zip(active, drafted.tolist(), strict=True)]
        for n, (i, state) in enumerate(zip(active, _states(model, engine, extended), strict=True)):
            p_GV = _target(model, state.final_TH[-model.config.block_size - 1 :]).softmax(-1)
            committed = judge_block(drafted[n], logits[n].softmax(-1), p_GV, rng)
            before = len(answers[i].tokens) - answers[i].num_prompt
            answers[i].blocks.append((before, len(committed) - 1))
            _commit(answers[i], committed, max_new_tokens, stop_token_ids)
            states[i] = state
    return _summary(answers, model.config.block_size)


def _states(model: DraftModel, engine: EmbeddedEngine, sequences: Sequence[Sequence[int]]) -> list[TargetStates]:
    return target_states(engine, sequences, model.config.target_layer_ids)


def _target(model: DraftModel, final: Tensor) -> Tensor:
    return final.float() @ model.head_VH.float().t()


def _draft(
    answers: Sequence[_Answer], states: Sequence[TargetStates], model: DraftModel, rng: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Blocks [S, G] and their logits; the context is what the target computed before the anchor."""
    anchors = [len(a.tokens) - 1 for a in answers]
    taps = torch.zeros(len(answers), max(anchors), model.config.tap_width, device=model.embed_VH.device)
    for n, (anchor, state) in enumerate(zip(anchors, states, strict=True)):
        taps[n, :anchor] = state.taps_TW[:anchor].float()
    shape = (len(answers), model.config.block_size)
    uniforms = None if rng is None else torch.rand(shape, generator=rng).to(taps.device)
    choose = None if uniforms is None else lambda logits, k: drawn(logits, uniforms[:, k])
    tokens = torch.tensor([a.tokens[-1] for a in answers], device=taps.device)
    block = model.draft(tokens, torch.tensor(anchors, device=taps.device), model.context(taps), choose)
    return block.tokens_SG, block.logits_SGV


def judge_block(drafted_G: Tensor, q_GV: Tensor, p_GV: Tensor, rng: torch.Generator | None) -> list[int]:
    """The accepted tokens and the target's own one behind them; `p_GV` has a row more than the block has tokens."""
    committed: list[int] = []
    for token, q, p in zip(drafted_G.tolist(), q_GV, p_GV, strict=False):
        if rng is None:
            if int(p.argmax()) != token:
                return [*committed, int(p.argmax())]
        elif float(torch.rand((), generator=rng)) * float(q[token]) >= float(p[token]):
            return [*committed, _choose((p - q).clamp(min=0.0), rng)]
        committed.append(token)
    return [*committed, _choose(p_GV[-1], rng)]


def _choose(p_V: Tensor, rng: torch.Generator | None) -> int:
    return int(p_V.argmax()) if rng is None else int(torch.multinomial(p_V.cpu(), 1, generator=rng))


def _commit(answer: _Answer, tokens: Sequence[int], most: int, stop: Sequence[int]) -> None:
    for token in tokens:
        answer.tokens.append(token)
        if token in stop or len(answer.tokens) - answer.num_prompt == most:
            answer.done = True
            return


def _summary(answers: Sequence[_Answer], block_size: int) -> Acceptance:
    reached, accepted, counts, rooms = [0] * block_size, [0] * block_size, [], []
    for answer in answers:
        total = len(answer.tokens) - answer.num_prompt
        for before, count in answer.blocks:
            room = min(block_size, total - before)
            count = min(count, room)
            counts.append(count)
            rooms.append(room)
            for k in range(min(count + 1, room)):
                reached[k] += 1
                accepted[k] += k < count
    rounds = len(counts)
    return Acceptance(
        rounds=rounds, mean_accepted=sum(counts) / rounds if rounds else 0.0,
        room=sum(rooms) / rounds if rounds else 0.0, reached=tuple(reached), accepted=tuple(accepted),
        answers=tuple(tuple(a.tokens[a.num_prompt :]) for a in answers),
    )  # fmt: skip
