"""The commands that start SGLang outside of a run: prefill and decode workers, and the nodes of one engine."""

from __future__ import annotations

import shlex
from typing import Any

from miles_k3.config import Recipe
from miles_k3.k3.config import K3Config
from miles_k3.rollout.sglang.arguments import Machine, server_arguments

# Engine arguments without a flag of SGLang's command line, and how the same is said there.
_UNSAID = {"enable_multimodal": []}
_PORT, _BOOTSTRAP_PORT = 30000, 8998


def command_line(arguments: dict[str, Any]) -> list[str]:
    """`python -m sglang.launch_server` with the same arguments as an Engine's."""
    words = ["python", "-m", "sglang.launch_server"]
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if name in _UNSAID or value is False or value is None:
            continue
        if value is True:
            words.append(flag)
        elif isinstance(value, (list, tuple)):
            words += [flag, *map(str, value)]
        else:
            words += [flag, str(value)]
    return words


def node_command(
    recipe: Recipe, config: K3Config, *, node: int, first_gpu: int, meeting_place: str, port: int
) -> list[str]:
    """What runs on machine `node` >= 1 of an engine over several. `port` is of its answers to health checks."""
    from miles_k3.rollout.sglang.start import is_hopper

    machine = Machine(hopper=is_hopper(first_gpu), first_gpu=first_gpu, node=node, meeting_place=meeting_place)
    arguments = server_arguments(recipe, config, machine)
    return command_line(arguments | {"host": "127.0.0.1", "port": port})


def serve_commands(recipe: Recipe, config: K3Config) -> list[str]:
    """Shell lines, each after a comment that says where it runs; a worker that spans several nodes has one for each."""
    own = recipe.rollout.sglang
    parts = own.disaggregation
    if parts.transfer == "off":
        return _worker_lines("engine", server_arguments(recipe, config, Machine()), own.nodes)
    lines, addresses = [], []
    for kind, count in (("prefill", parts.prefill_workers), ("decode", parts.decode_workers)):
        for index in range(count):
            lines += _worker_lines(f"{kind} worker {index}", worker_arguments(recipe, config, kind), own.nodes)
            addresses.append(f"--{kind} http://{kind.upper()}_{index}:{_PORT}")
    router = " ".join(["python -m sglang_router.launch_router --pd-disaggregation", *addresses])
    return [*lines, "# in front of all of them", router]


def worker_arguments(recipe: Recipe, config: K3Config, kind: str) -> dict[str, Any]:
    """Those of one of the two kinds: prefill workers are cut into stages, decode workers share a request's KV."""
    own = recipe.rollout.sglang
    arguments = server_arguments(recipe, config, Machine())
    arguments |= {"disaggregation_mode": kind, "disaggregation_transfer_backend": own.disaggregation.transfer}
    if kind == "prefill":
        arguments.pop("dcp_size", None)
        arguments |= {"pp_size": own.disaggregation.prefill_pp, "disaggregation_bootstrap_port": _BOOTSTRAP_PORT}
    return arguments


def _worker_lines(where: str, arguments: dict[str, Any], nodes: int) -> list[str]:
    lines = []
    for node in range(nodes):
        own = dict(arguments)
        if nodes > 1:
            own |= {"nnodes": nodes, "node_rank": node, "dist_init_addr": "NODE_0:20000"}
        own |= {"host": "0.0.0.0", "port": _PORT}
        suffix = f", node {node} of {nodes}" if nodes > 1 else ""
        lines += [f"# {where}{suffix}", shlex.join(command_line(own))]
    return lines
