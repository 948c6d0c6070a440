"""The adapter's own table: every LoRA tensor of a K3 model by exported name, derived from the parameter table.

Names and shapes: spec 5.2; targets: the `lora` column of `k3/params.py`. A dense module has A [r, in] and B [out, r].
Routed experts have one 3-D pair per projection: the outer factor, which touches the latent stream, is shared by all
experts ([1, ...]), the inner factor is per expert ([E, ...]):
w1, w3: A [1, r, latent], B [E, inter, r]; w2: A [E, r, inter], B [1, latent, r].
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from miles_k3.errors import AdapterError
from miles_k3.k3.config import K3Config
from miles_k3.k3.params import Part, expert_params, layer_params, layer_prefix
from miles_k3.types import AdapterConfig

Factor = Literal["A", "B"]
OUTER_FACTOR: Mapping[str, Factor] = {"w1": "A", "w3": "A", "w2": "B"}  # the factor that experts share
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_EXPERT_MODULE = re.compile(r"(?P<experts>.+\.experts)\.(?P<expert>\d+)\.(?P<leaf>w[123])")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTensor:
    """One exported tensor. `module` is the model's own module name (experts: without the expert's number)."""

    name: str
    shape: tuple[int, ...]
    layer: int
    module: str
    factor: Factor
    kind: Literal["dense", "expert"]
    shared: bool = False  # outer factor: one copy for all experts

    @property
    def local_module(self) -> str:
        """The module within its layer, e.g. `self_attn.o_proj`."""
        return self.module.removeprefix(layer_prefix(self.layer))

    @property
    def per_expert(self) -> bool:
        """Whether dimension 0 counts experts, each of which has its own."""
        return self.kind == "expert" and not self.shared

    @property
    def rank_dim(self) -> int:
        """The dimension that has length r: -2 for A, -1 for B."""
        return -2 if self.factor == "A" else -1


def adapter_layout(config: K3Config, adapter: AdapterConfig) -> dict[str, AdapterTensor]:
    """The tensors of a whole adapter, name -> AdapterTensor, in model order.

    Raises AdapterError on a rank or an alpha that is not above 0.
    """
    if adapter.rank < 1:
        raise AdapterError(f"adapter rank is {adapter.rank}; expected at least 1")
    if not (math.isfinite(adapter.alpha) and adapter.alpha > 0):
        raise AdapterError(f"adapter alpha is {adapter.alpha}; expected a finite number above 0")
    tensors = (t for layer in range(config.num_hidden_layers) for t in _layer_tensors(config, layer, adapter.rank))
    return {t.name: t for t in tensors}


def _layer_tensors(config: K3Config, layer: int, rank: int) -> Iterator[AdapterTensor]:
    dense = takewhile(lambda p: p.part is not Part.EXPERT, layer_params(config, layer))
    for p in (p for p in dense if p.lora):
        for factor, shape in _factor_shapes(p.shape, rank):
            name = tensor_name(p.module, factor)
            yield AdapterTensor(name=name, shape=shape, layer=layer, module=p.module, factor=factor, kind="dense")
    if not config.is_moe(layer):
        return
    for p in (p for p in expert_params(config, layer, 0) if p.lora and not p.is_scale):
        module, _ = split_expert(p.module)
        outer = OUTER_FACTOR[module.rpartition(".")[2]]
        for factor, shape in _factor_shapes(p.logical_shape, rank):
            yield AdapterTensor(
                name=tensor_name(module, factor), shape=(1 if factor == outer else config.num_experts, *shape),
                layer=layer, module=module, factor=factor, kind="expert", shared=factor == outer,
            )  # fmt: skip


def _factor_shapes(weight: tuple[int, ...], rank: int) -> tuple[tuple[Factor, tuple[int, ...]], ...]:
    """Factors of a weight [out, in]."""
    rows, cols = weight
    return ("A", (rank, cols)), ("B", (rows, rank))


def tensor_name(module: str, factor: Factor) -> str:
    """Exported name of a module's factor."""
    return f"{module}.lora_{factor}.weight"


def split_name(name: str) -> tuple[str, Factor]:
    """Module and factor of an exported name. Raises AdapterError when it isn't one."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise AdapterError(
            f"{name!r} is not an adapter tensor; expected <module>.lora_A.weight or <module>.lora_B.weight"
        )
    return match["module"], "A" if match["factor"] == "A" else "B"


def split_expert(module: str) -> tuple[str, int | None]:
    """`...experts.7.w1` -> (`...experts.w1`, 7); any other module -> (module, None)."""
    match = _EXPERT_MODULE.fullmatch(module)
    if match is None:
        return module, None
    return f"{match['experts']}.{match['leaf']}", int(match["expert"])


def join_expert(module: str, expert: int) -> str:
    """The inverse of `split_expert`: (`...experts.w1`, 7) -> `...experts.7.w1`."""
    experts, _, leaf = module.rpartition(".")
    return f"{experts}.{expert}.{leaf}"


def by_module(layout: Mapping[str, AdapterTensor]) -> dict[str, tuple[AdapterTensor, AdapterTensor]]:
    """module -> its (A, B), in model order."""
    return {t.module: (t, layout[tensor_name(t.module, "B")]) for t in layout.values() if t.factor == "A"}


def gate_up_pairs(layout: Mapping[str, object]) -> list[tuple[str, str]]:
    """Names of the (gate, up) A tensors of dense and shared MLPs, which `share_gate_up_a` makes equal."""
    up = {name: name.replace(".gate_proj.lora_A.", ".up_proj.lora_A.") for name in layout}
    return [(gate, other) for gate, other in up.items() if gate != other]


def parameter_count(layout: Mapping[str, AdapterTensor]) -> int:
    """Numbers in the exported adapter (a shared gate/up A counts twice, as it is exported twice)."""
    return sum(math.prod(t.shape) for t in layout.values())


def layout_bytes(layout: Mapping[str, AdapterTensor], itemsize: int = 2) -> int:
    """Bytes of the exported adapter at `itemsize` bytes a number (BF16: 2)."""
    return parameter_count(layout) * itemsize
