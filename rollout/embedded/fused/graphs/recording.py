"""Steps recorded as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded[Left: tuple[Tensor | None, ...]]:
    """A graph and what it leaves behind: valid until another replay of any graph."""

    replay: Callable[[], None]
    left: Left


class Recorder:
    """Graphs that share one memory, since they run one after another, on the caller's stream. Counts them."""

    def __init__(self) -> None:
        self._graph_memory: Any = None
        self._stream: torch.cuda.Stream | None = None
        self.count = 0

    def forget(self) -> None:
        """All graphs are gone: their memory goes too, and the next ones get one of their own."""
        self._graph_memory = None

    def record[Left: tuple[Tensor | None, ...]](self, step: Callable[[], Left]) -> Recorded[Left]:
        """`step` runs here, on padding alone: nothing that anybody holds is touched."""
        self.count += 1
        return self._record(step)

    def _record[Left: tuple[Tensor | None, ...]](self, step: Callable[[], Left]) -> Recorded[Left]:
        if self._graph_memory is None:
            self._graph_memory = torch.cuda.graph_pool_handle()
        if self._stream is None:  # one for all: what a graph frees is only given to others of the same stream
            self._stream = torch.cuda.Stream(priority=-1)  # of its branches, the one that others wait for longest
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # kernels are compiled and libraries take their memory outside of the graph
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory, stream=stream, capture_error_mode="thread_local"):
            left = step()
        return Recorded(replay=graph.replay, left=left)
