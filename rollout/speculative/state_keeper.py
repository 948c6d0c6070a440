"""Hidden states that rollouts compute anyway, kept to train the draft on.

A request is kept whole or not at all: from its prompt's first token on, which it or its leader has to compute while
this listens, and as long as the room for its longest answer is free. Shapes: T tokens, W tap width, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from miles_k3.rollout.embedded.request import Request
from miles_k3.rollout.speculative.blocks import Example
from miles_k3.rollout.speculative.target_states import TargetStates
from miles_k3.types import FinishReason


@dataclass(slots=True, eq=False)
class _Kept:
    taps: list[Tensor] = field(default_factory=list)
    finals: list[Tensor] = field(default_factory=list)  # of answer tokens only
    room: int = 0


class StateKeeper:
    """At most `num_tokens` of finished and running requests together."""

    def __init__(self, num_tokens: int) -> None:
        self._left = num_tokens
        self._kept: dict[Request, _Kept] = {}
        self.examples: list[Example] = []

    def chunk(self, request: Request, taps_TW: Tensor) -> None:
        """The next tokens of a prompt; called before they count as cached."""
        if request.num_cached == 0:
            self.drop(request)
            self._begin(request, [])
        if request in self._kept:
            self._kept[request].taps.append(taps_TW.clone())

    def fork(self, leader: Request, followers: Sequence[Request]) -> None:
        """Followers take over their leader's prompt."""
        if leader in self._kept:
            for follower in followers:
                self._begin(follower, list(self._kept[leader].taps))

    def decoded(self, request: Request, taps_TW: Tensor, final_TH: Tensor) -> None:
        """Tokens of an answer; `kept` tells how many of them are committed."""
        if request in self._kept:
            self._kept[request].taps.append(taps_TW.clone())
            self._kept[request].finals.append(final_TH.clone())

    def kept(self, request: Request, count: int) -> None:
        """Only the first `count` of the tokens that it decoded last stay."""
        if request in self._kept:
            states = self._kept[request]
            states.taps[-1], states.finals[-1] = states.taps[-1][:count], states.finals[-1][:count]

    def finish(self, request: Request) -> None:
        """It ended: an example, if it is whole and has a token to draft."""
        states = self._kept.pop(request, None)
        if states is None:
            return
        tokens, num_prompt = request.tokens, len(request.prompt)
        fed, answered = len(tokens) - 1, len(tokens) - 1 - num_prompt
        sound = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not sound or answered < 1 or sum(map(len, states.taps)) < fed or sum(map(len, states.finals)) < answered:
            self._left += states.room
            return
        self._left += states.room - len(tokens)
        taps, finals = torch.cat(states.taps)[:fed], torch.cat(states.finals)[:answered]
        # A row for the last token, which is never fed, and rows for the prompt: no block reads them.
        final_TH = torch.nn.functional.pad(finals, (0, 0, num_prompt, 1))
        self.examples.append(
            Example(
                token_ids=tokens, num_prompt_tokens=num_prompt,
                states=TargetStates(taps_TW=torch.nn.functional.pad(taps, (0, 0, 0, 1)), final_TH=final_TH),
            )
        )  # fmt: skip

    def drop(self, request: Request) -> None:
        """Forget what there is of it."""
        states = self._kept.pop(request, None)
        if states is not None:
            self._left += states.room

    def _begin(self, request: Request, taps: list[Tensor]) -> None:
        room = request.total_tokens + 1
        if room <= self._left and not request.token_ids:  # one that was retracted has an answer already
            self._left -= room
            self._kept[request] = _Kept(taps=taps, room=room)


def on_host(example: Example) -> Example:
    """One that can be sent to other processes."""
    states = TargetStates(taps_TW=example.states.taps_TW.cpu(), final_TH=example.states.final_TH.cpu())
    return replace(example, states=states)
