"""Names that SGLang and we share about adapters. Imports neither torch nor SGLang."""

from __future__ import annotations

# As PEFT spells them; SGLang fuses q_a with kv_a and gate with up by itself, so both of a pair must be given.
TARGETS = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj")
VERSIONS = 2  # adapters alive at once: the current one, and the last while its requests end or the next is loaded
SLOTS = VERSIONS + 1  # requests of the bare base take one as well
