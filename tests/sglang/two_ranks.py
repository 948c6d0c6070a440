"""SGLang over two tensor- and expert-parallel ranks, as if on a machine each, with an adapter loaded into both. Run as
a process of its own; prints JSON.

    python tests/sglang/two_ranks.py FOLDER    in SGLang's environment, with the stubs first on PYTHONPATH

The second machine's part is started with the arguments that `miles-k3 launch` gives it.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.sglang_cpu import CPU_ARGUMENTS, small_config, write_small_k3
from helpers.tiny import tiny_adapter

from miles_k3.adapters.update import make_update
from miles_k3.rollout.sglang.commands import command_line
from miles_k3.rollout.sglang.hooks.report import KEY
from miles_k3.rollout.sglang.running import RunningSglang
from miles_k3.rollout.sglang.visible import make_visible
from miles_k3.types import AdapterConfig

ADAPTER = AdapterConfig(rank=4, alpha=8.0)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main(folder: Path) -> None:
    config = small_config()
    write_small_k3(folder)
    arguments: dict[str, Any] = {
        "model_path": str(folder), "log_level": "warning", **CPU_ARGUMENTS, "tp_size": 2, "ep_size": 2, "nnodes": 2,
        "node_rank": 0, "dist_init_addr": f"127.0.0.1:{free_port()}",
    }  # fmt: skip
    make_visible()
    words = command_line({**arguments, "node_rank": 1, "host": "127.0.0.1", "port": free_port()})
    other = subprocess.Popen([sys.executable, *words[1:]])
    sglang = RunningSglang(arguments, config)
    sglang.load("policy@0", make_update(0, ADAPTER, tiny_adapter(config, ADAPTER)))
    told = sglang.state()
    sglang.unload("policy@0")
    sglang.close()
    other.wait(timeout=120)  # it ends when the first machine's part has gone
    print("FOUND", json.dumps({"bytes": told["bytes"], "hooks": told[KEY]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
