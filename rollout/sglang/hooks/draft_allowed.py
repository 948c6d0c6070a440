"""DSpark beside LoRA, which SGLang refuses at its start. The last hook of those that this takes.

Only with as many verified tokens of every request (`static`, SGLang's default): see `verify_batch`. And only where what
is accepted is judged: SGLang can be told to suppose it.
"""

from __future__ import annotations

import functools
from typing import Any

from miles_k3.rollout.sglang.hooks.expect import expect_parameters

ALGORITHM, MODE = "DSPARK", "static"


def refuse_ragged(mode: str) -> None:
    """Raise ValueError for another SGLANG_RAGGED_VERIFY_MODE than the one that adapters can go along with."""
    if mode != MODE:
        raise ValueError(
            f"SGLANG_RAGGED_VERIFY_MODE is {mode}, but a draft beside LoRA needs as many verified tokens of every "
            f"request: unset it, or set it to {MODE}"
        )


def refuse_supposed(length: float) -> None:
    """Raise ValueError where SGLang would commit drafted tokens up to a length that it is told, whatever they are."""
    if length > 0:
        raise ValueError(
            f"SGLANG_SIMULATE_ACC_LEN is {length:g}: a draft's tokens would be committed without being judged; unset it"
        )


def install() -> None:
    from sglang.srt.environ import envs
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.ragged_verify import read_ragged_verify_mode

    check = ServerArgs.check_lora_server_args
    expect_parameters(check, "self")

    @functools.wraps(check)
    def check_the_rest(self: Any) -> None:
        if not self.enable_lora or self.speculative_algorithm != ALGORITHM:
            check(self)
            return
        refuse_ragged(read_ragged_verify_mode().value)
        refuse_supposed(envs.SGLANG_SIMULATE_ACC_LEN.get())
        # Past its own guard against assignments: what it hides lasts no longer than this check.
        object.__setattr__(self, "speculative_algorithm", None)
        try:
            check(self)
        finally:
            object.__setattr__(self, "speculative_algorithm", ALGORITHM)

    ServerArgs.check_lora_server_args = check_the_rest
