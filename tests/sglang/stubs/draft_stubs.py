"""What a DSpark draft beside K3 needs on a CPU, as far as its runner's making goes."""

from __future__ import annotations

from typing import Any


def allow_a_cpu(module: Any) -> None:
    """DSpark's arguments are judged as they would be on a GPU."""
    judge = module._handle_dspark

    def judged(server_args: Any) -> None:
        device, server_args.device = server_args.device, "cuda"
        try:
            judge(server_args)
        finally:
            server_args.device = device

    module._handle_dspark = judged


def rotate_natively(module: Any) -> None:
    """A CPU without AMX is sent to a kernel of vLLM's otherwise."""
    make = module.RotaryEmbedding.__init__

    def made(self: Any, *arguments: Any, **options: Any) -> None:
        kept, module._is_cpu = module._is_cpu, True
        try:
            make(self, *arguments, **options)
        finally:
            module._is_cpu = kept

    module.RotaryEmbedding.__init__ = made


def copy_nothing_ahead(module: Any) -> None:
    """A copy of nothing, by which a Triton kernel is compiled before it is needed."""
    module.MHATokenToKVPool._init_kv_copy_and_warmup = lambda self: None


PATCHES = {
    "sglang.srt.arg_groups.speculative_hook": allow_a_cpu,
    "sglang.srt.layers.rotary_embedding.base": rotate_natively,
    "sglang.srt.mem_cache.memory_pool": copy_nothing_ahead,
}
