"""Batches that reach the corners of every layout: odd lengths, lone loss tokens, sequences across all cuts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from helpers.batches import mini_batch, random_tokens, train_batch
from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.types import MicroBatch, MiniBatch, TrainBatch

TEMPERATURE = 0.7

# Harvests of (seed, micro-batch -> sequence lengths); a negative length has no loss token. Some counts of micro-batches
# don't divide by 2 and none by everything; sequences of 61 tokens and more span every chunk of four context-parallel
# ranks; the micro-batch of one length-2 sequence is shorter than the ranks are many, and that of -23 earns nothing.
# Of 16 seeds each these are among the best conditioned: an adapter that is off by 1e-6 moves no gradient by more than
# 8e-6. The worst draws (a loss that cancels, a token of no probability) go to 4e-4: there a bound of 1e-5 says nothing.
UNEVEN = (
    (6000, ((37, 2, 9), (71,), (5, 3, 2, 17, 11), (2,), (29, 3, 31))),
    (4100, ((61, 7), (13, 3, -2, 43), (-23,))),
    (9200, ((83,), (19, 2, -21, 5), (3, 3), (47, 8))),
)
# Fewer micro-batches than ranks and stages, and a harvest without a usable group.
FEW = ((9000, ((37, 2, 9),)), (14100, ((71,),)), (0, ()), (11300, ((53, 3),)))
# Half the work of UNEVEN, with most of its corners.
SHORT = ((6000, ((37, 2, 9), (71,), (5, 3, 2, 11))), (4100, ((61, 7), (-23,))), (9200, ((29, 8),)))
HARVESTS = {"uneven": UNEVEN, "few": FEW, "short": SHORT, "one": UNEVEN[:1]}

# Longer than a micro-batch, shorter than the ranks are many, and one with nothing to predict.
SCORED = (71, 2, 33, 1, 103, 3, 18)


def harvests(kind: str, config: K3Config, *, updates: int = 1, replay: bool = False) -> list[TrainBatch]:
    """The batches of one run: each harvest's micro-batches in `updates` mini-batches."""
    made = []
    for seed, lengths in HARVESTS[kind]:
        micros = [packed(part, config, seed=seed + m, replay=replay) for m, part in enumerate(lengths)]
        made.append(train_batch(*_split(micros, updates), temperature=TEMPERATURE))
    return made


def scored_sequences() -> list[list[int]]:
    return [tokens.tolist() for tokens in random_tokens(SCORED, seed=7)]


def _split(micros: Sequence[MicroBatch], updates: int) -> list[MiniBatch]:
    size = max(1, -(-len(micros) // updates))
    return [mini_batch(*micros[i : i + size]) for i in range(0, len(micros), size)]


def packed(lengths: Sequence[int], config: K3Config, *, seed: int, replay: bool = False) -> MicroBatch:
    """One micro-batch; every second sequence has a single loss token, the others lose some at random."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [abs(n) for n in lengths]
    sequences = random_tokens(sizes, vocab=config.vocab_size, seed=seed)
    mask = torch.cat([_loss_mask(n, lone=i % 2 == 1, generator=generator) for i, n in enumerate(lengths)])
    advantages = torch.cat([torch.randn(1, generator=generator).expand(n) for n in sizes])
    return MicroBatch(
        tokens=torch.cat(sequences),
        cu_seqlens=torch.tensor([0, *sizes]).cumsum(0).to(torch.int32),
        targets=torch.cat([torch.cat([s[1:], torch.zeros(1, dtype=s.dtype)]) for s in sequences]),
        loss_mask=mask.float(),
        advantages=torch.where(mask, advantages, 0.0),
        rollout_logprobs=torch.where(mask, torch.rand(len(mask), generator=generator) * -8.0, 0.0),
        sequence_ids=torch.arange(len(sizes)),
        routed_experts=_routes(sizes, config, generator) if replay else None,
    )


def _loss_mask(length: int, *, lone: bool, generator: torch.Generator) -> Tensor:
    mask = torch.zeros(abs(length), dtype=torch.bool)
    if length > 0:
        mask[:-1] = torch.rand(length - 1, generator=generator) < (0.0 if lone else 0.7)
        mask[-2] = True
    return mask


def _routes(lengths: Sequence[int], config: K3Config, generator: torch.Generator) -> Tensor:
    """Experts at random, int16 [T, L, K]; -1 at each sequence's last token, as the engine leaves it, and a few more."""
    shape = (sum(lengths), len(config.moe_layers), config.num_experts)
    routes = torch.rand(shape, generator=generator).argsort(-1)[..., : config.num_experts_per_token].to(torch.int16)
    free = torch.rand(shape[0], generator=generator) < 0.1
    free[torch.tensor(lengths).cumsum(0) - 1] = True
    routes[free] = -1
    return routes
