"""Whether processes reach one another: two of this host through gloo and NCCL, other hosts by TCP.

As a program (`python -m miles_k3.doctor.reach BACKEND RANK FILE`) it is one of the two.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from miles_k3.findings import Findings

PORT = 29500  # torchrun's
TIMEOUT_S = 60
_SUM = 3.0  # of 1 and 2


def check_reach(found: Findings, *, devices: int = 0) -> None:
    """A sum over two local processes; with two GPUs through NCCL too."""
    for backend in ("gloo", "nccl") if devices > 1 else ("gloo",):
        start = time.perf_counter()
        error = _sum_over_two(backend)
        if error is None:
            found.add(
                backend, True, f"two processes of this host reach one another ({time.perf_counter() - start:.1f} s)"
            )
        else:
            way = "NCCL_DEBUG=INFO says why; NCCL_SOCKET_IFNAME chooses a network" if backend == "nccl" else (
                f"the name {socket.gethostname()} must resolve to an address of this host; or set GLOO_SOCKET_IFNAME=lo"
            )  # fmt: skip
            found.fail(backend, f"two processes of this host don't reach one another ({error})", way)


def check_hosts(found: Findings, hosts: Sequence[str], *, timeout_s: float = 3.0) -> None:
    """Each `host` or `host:port` by TCP. A refused connection has reached the host: nobody listens there yet."""
    for host in hosts:
        name, _, port = host.partition(":")
        if port and not (port.isdigit() and int(port) < 1 << 16):
            found.fail(host, f"{port!r} is no port", "name hosts as HOST or HOST:PORT")
            continue
        try:
            address = socket.getaddrinfo(name, int(port or PORT), type=socket.SOCK_STREAM)[0]
        except OSError as error:
            found.fail(host, f"the name doesn't resolve ({error.strerror or error})", "check DNS or /etc/hosts")
            continue
        try:
            with socket.socket(address[0], address[1]) as connection:
                connection.settimeout(timeout_s)
                connection.connect(address[4])
            found.add(host, True, f"{address[4][0]} answers on port {address[4][1]}")
        except ConnectionRefusedError:
            found.add(host, True, f"{address[4][0]} is reached; nobody listens on port {address[4][1]} yet")
        except OSError as error:
            found.fail(host, f"{address[4][0]} port {address[4][1]} is not reached ({error.strerror or error})",
                       "open the port between the hosts, or name one that is open")  # fmt: skip


def _sum_over_two(backend: str) -> str | None:
    """None, or why it failed: what the first process to fail said last."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        said = [stack.enter_context(open(f"{folder}/said-{rank}", "w+")) for rank in range(2)]
        command = [sys.executable, "-m", "miles_k3.doctor.reach", backend]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), f"{folder}/store"], stdout=subprocess.DEVNULL, stderr=said[rank],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            failed = _first_to_fail(ranks)
        except TimeoutError:
            return f"no answer within {2 * TIMEOUT_S} s"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if failed is None:
            return None
        said[failed].seek(0)
        return (said[failed].read().strip().splitlines() or ["it ended without a word"])[-1]


def _first_to_fail(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Its number, at once and not when the others have waited for it long enough; None when all end well."""
    end = time.monotonic() + 2 * TIMEOUT_S
    while time.monotonic() < end:
        codes = [rank.poll() for rank in ranks]
        if any(codes):
            return next(number for number, code in enumerate(codes) if code)
        if None not in codes:
            return None
        time.sleep(0.05)
    raise TimeoutError


def _main(backend: str, rank: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    limit = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(backend, init_method=f"file://{Path(store)}", rank=rank, world_size=2, timeout=limit)
    total = torch.tensor(float(rank + 1), device=device)
    dist.all_reduce(total)
    dist.destroy_process_group()
    if float(total) != _SUM:
        raise SystemExit(f"1 + 2 became {float(total)}")


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
