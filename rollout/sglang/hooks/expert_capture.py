"""Which experts each token took, with the layer's number: SGLang's capturer needs it, and K3's router has none.

Without it the first generate with `return_routed_experts` ends the scheduler on a shape.
"""

from __future__ import annotations

import functools
from typing import Any


def install() -> None:
    from sglang.srt.models.kimi_k3 import KimiK3MoE

    make = KimiK3MoE.__init__

    @functools.wraps(make)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self.topk.layer_id = self.layer_idx

    KimiK3MoE.__init__ = init
