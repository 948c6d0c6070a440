"""SGLang with a DSpark draft beside two adapters. Run as a process of its own; prints JSON.

python tests/sglang/drafted.py FOLDER    in SGLang's environment, with the stubs first on PYTHONPATH
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from helpers.sglang_cpu import CPU_ARGUMENTS, RANK, drafted_recipe, small_config, write_small_draft, write_small_k3
from helpers.tiny import tiny_adapter

from miles_k3.adapters.update import make_update
from miles_k3.rollout.sglang.arguments import Machine, server_arguments
from miles_k3.rollout.sglang.engine import SglangEngine
from miles_k3.rollout.sglang.hooks.report import KEY
from miles_k3.rollout.sglang.running import RunningSglang
from miles_k3.types import AdapterConfig

ADAPTER = AdapterConfig(rank=RANK, alpha=8.0)
TOLD = ("speculative_algorithm", "speculative_draft_model_path", "speculative_dspark_block_size", "max_total_tokens")


def main(folder: Path) -> None:
    config, draft = small_config(), folder / "draft"
    write_small_k3(folder / "k3")
    write_small_draft(draft)
    ours = server_arguments(drafted_recipe(draft), config, Machine())
    sglang = RunningSglang({
        "model_path": str(folder / "k3"), "log_level": "warning", **CPU_ARGUMENTS, **{key: ours[key] for key in TOLD},
        "speculative_draft_attention_backend": "triton", "mem_fraction_static": 0.7,
    }, config)  # fmt: skip
    engine = SglangEngine(
        sglang, config, tokenizer=None, adapter_config=ADAPTER, max_lora_rank=RANK, max_sequence_tokens=256
    )
    for version in range(3):  # the third while the first is retired
        engine.load_adapter(make_update(version, ADAPTER, tiny_adapter(config, ADAPTER, seed=version)))
    told = sglang.state()
    engine.close()
    print("FOUND", json.dumps({"hooks": told[KEY], "bytes": told["bytes"], "draft": told["draft"]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
