"""The row-wise LoRA kernels against plain torch; `python -m helpers.row_lora_cases` (TRITON_INTERPRET=1 on a CPU).

Prints case -> largest difference, relative to the largest value. Everything in fp32, so only the order of sums differs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from miles_k3.rollout.sglang.hooks.row_lora import MAX_TOKENS, RowHooks, row_hooks

K, SLOTS, EXPERTS, LATENT, WIDTH = 3, 3, 4, 70, 128
MIXED = (1, 0, 2, -1, 1)  # who uses which slot: 0 is the base's and holds zeros, -1 is nobody's
VERIFIED = (2, 2, 2, 1, 1, 1)  # two requests with three rows each
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def info(rank: int, users: Sequence[int] = MIXED) -> SimpleNamespace:
    """A layer's slots, and the one of each token."""
    slots = SimpleNamespace(
        gate_up_lora_a_weights=draw(SLOTS, 1, 2 * rank, LATENT),
        gate_up_lora_b_weights=draw(SLOTS, EXPERTS, 2 * WIDTH, rank),
        down_lora_a_weights=draw(SLOTS, EXPERTS, rank, WIDTH), down_lora_b_weights=draw(SLOTS, 1, LATENT, rank),
    )  # fmt: skip
    for factor in vars(slots).values():
        factor[0] = 0
    slots.token_lora_mapping = torch.tensor(users, dtype=torch.int32, device=DEVICE)
    return slots


def differences(rank: int, *, users: Sequence[int] = MIXED, remote_experts: bool = False) -> tuple[float, float]:
    """Of gate and up, and of what comes down."""
    torch.manual_seed(0)
    slots, tokens = info(rank, users), len(users)
    hooks = row_hooks(slots, tokens)
    assert isinstance(hooks, RowHooks)
    chosen = torch.stack([torch.randperm(EXPERTS)[:K] for _ in range(tokens)]).to(DEVICE, torch.int32)
    if remote_experts:  # of other expert-parallel ranks
        chosen[:, 1] = -1
    weights, z, rows = torch.rand(tokens, K, device=DEVICE), draw(tokens, LATENT), draw(tokens * K, WIDTH)
    gate_up, down = draw(tokens, K, 2 * WIDTH), draw(tokens, K, LATENT)
    expected_up, expected_down = gate_up.clone(), down.sum(1)
    for t in range(tokens):
        slot = int(slots.token_lora_mapping[t])
        for j in range(K):
            expert = int(chosen[t, j])
            if slot < 0 or expert < 0:
                continue
            a13, b13 = slots.gate_up_lora_a_weights[slot, 0], slots.gate_up_lora_b_weights[slot, expert]
            low = a13 @ z[t]
            expected_up[t, j] += torch.cat([b13[:WIDTH] @ low[:rank], b13[WIDTH:] @ low[rank:]])
            low = slots.down_lora_a_weights[slot, expert] @ rows[t * K + j]
            expected_down[t] += weights[t, j] * (slots.down_lora_b_weights[slot, 0] @ low)
    hooks.after_gate_up(z, gate_up, weights, chosen)
    hooks.after_down(rows, down, weights, chosen)
    return _relative(gate_up, expected_up), _relative(down.sum(1), expected_down)


def _relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def main() -> None:
    found = {f"rank {rank}": differences(rank) for rank in (3, 16)}
    found["a verify"] = differences(4, users=VERIFIED)
    found["experts elsewhere"] = differences(3, remote_experts=True)
    many = row_hooks(info(4), MAX_TOKENS + 1) is None
    print(json.dumps({"differences": found, "many tokens are SGLang's affair": many}))


if __name__ == "__main__":
    main()
