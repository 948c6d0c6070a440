"""The trainable factors beside the frozen weights: construction, deterministic start, and their exported names.

Shape legend: T tokens, R rank, I in, O out, F MLP inner width, E experts, Z latent width.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from miles_k3.adapters.layout import AdapterTensor, adapter_layout, tensor_name
from miles_k3.k3.config import K3Config
from miles_k3.trainer.distributed import Ranks
from miles_k3.trainer.lora_rules import RULES, FactorRule, Site, Split
from miles_k3.types import AdapterConfig


class AdapterSwitch:
    """Whether the factors take part in the forward; shared by all modules of a model."""

    def __init__(self) -> None:
        self.on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """The base alone, without a second model."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before


class Factory:
    """Makes this rank's factors: the layout says the shapes, `seed` and the exported name say the start values."""

    def __init__(
        self, config: K3Config, adapter: AdapterConfig, *, seed: int, dtype: torch.dtype, device: torch.device,
        ranks: Ranks | None = None,
    ):  # fmt: skip
        self.layout = adapter_layout(config, adapter)
        self.adapter, self.seed, self.dtype, self.device = adapter, seed, dtype, device
        self.ranks = Ranks() if ranks is None else ranks
        self.switch = AdapterSwitch()

    def factor(self, names: tuple[str, ...], site: Site, which: str) -> Parameter:
        """A parameter that holds this rank's parts of the tensors `names` one below the other, marked with its rule."""
        rule = RULES[site, which]
        parameter = Parameter(torch.cat([self._start(self.layout[name], rule) for name in names]).to(self.dtype))
        mark(parameter, rule)
        return parameter

    def _start(self, tensor: AdapterTensor, rule: FactorRule) -> Tensor:
        """A: Xavier uniform, per expert where there are several. B: zero. A shared [1, ...] drops that dimension."""
        split = Split.of(rule, self.ranks)
        shape = tensor.shape[1:] if tensor.shared else tensor.shape
        if tensor.factor == "B":
            local = list(shape)
            if split.dim is not None:
                local[split.dim] //= split.axis.size
            return torch.zeros(local, device=self.device)
        if tensor.kind == "expert" and not tensor.shared:
            own = range(shape[0])[split.axis.part(shape[0])]
            return torch.stack([self._xavier(f"{tensor.name}[{e}]", shape[1:]) for e in own])
        return split.part(self._xavier(tensor.name, shape)).clone()

    def _xavier(self, name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(name_seed(self.seed, name))
        bound = math.sqrt(6.0 / sum(shape))
        return torch.empty(shape).uniform_(-bound, bound, generator=generator).to(self.device)


def name_seed(seed: int, name: str) -> int:
    """A 63-bit seed that depends on nothing but the two: not on layer order, not on the number of ranks."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def mark(parameter: Parameter, rule: FactorRule) -> None:
    """Attach the rule, and say it in the attributes that megatron reads."""
    marked: Any = parameter
    marked.factor_rule = rule
    marked.tensor_model_parallel = rule.tp_dim is not None
    marked.partition_dim = -1 if rule.tp_dim is None else rule.tp_dim
    marked.partition_stride = 1
    marked.allreduce = not rule.per_expert


class LoraModule(nn.Module):
    """Base of the factor modules. `exports` names each exported tensor as a view of a parameter (or of its like)."""

    def __init__(self, factory: Factory):
        super().__init__()
        self.switch, self.scaling, self.rank = factory.switch, factory.adapter.scaling, factory.adapter.rank

    def exports(self, of: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, str]]:
        """Exported name -> (view, name of the parameter it is a view of), given this module's parameters, or tensors of
        their shapes (gradients, moments)."""
        raise NotImplementedError


class DenseLora(LoraModule):
    """One weight [O, I]: a [R, I], b [O, R]."""

    def __init__(self, factory: Factory, module: str, site: Site):
        super().__init__(factory)
        self.names = tensor_name(module, "A"), tensor_name(module, "B")
        self.a = factory.factor((self.names[0],), site, "a")
        self.b = factory.factor((self.names[1],), site, "b")

    def forward(self, x_TI: Tensor, y_TO: Tensor) -> Tensor:
        """y plus the delta of x; y itself while the adapter is off."""
        if not self.switch.on:
            return y_TO
        return torch.addmm(y_TO, x_TI @ self.a.t() * self.scaling, self.b.t())

    def exports(self, of: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, str]]:
        return {self.names[0]: (of["a"], "a"), self.names[1]: (of["b"], "b")}


class GateUpLora(LoraModule):
    """A fused gate/up weight [2F, I]: a [R, I] for both, or [2R, I] gate rows then up rows; b [2F, R] likewise."""

    def __init__(self, factory: Factory, prefix: str):
        super().__init__(factory)
        self.modules_ = prefix + "gate_proj", prefix + "up_proj"
        self.shared = factory.adapter.share_gate_up_a
        names_a = tuple(tensor_name(m, "A") for m in self.modules_)
        self.a = factory.factor(names_a[:1] if self.shared else names_a, Site.FC1, "a")
        self.b = factory.factor(tuple(tensor_name(m, "B") for m in self.modules_), Site.FC1, "b")

    def forward(self, x_TI: Tensor, y_TO: Tensor) -> Tensor:
        """y [T, 2F] plus the deltas of x; y itself while the adapter is off."""
        if not self.switch.on:
            return y_TO
        b = self.b if self.shared else torch.block_diag(*self.b.chunk(2))
        return torch.addmm(y_TO, x_TI @ self.a.t() * self.scaling, b.t())

    def exports(self, of: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, str]]:
        a, (b_gate, b_up) = of["a"], of["b"].chunk(2)
        gate, up = self.modules_
        return {
            tensor_name(gate, "A"): (a[: self.rank], "a"),
            tensor_name(gate, "B"): (b_gate, "b"),
            tensor_name(up, "A"): (a[-self.rank :], "a"),  # the same rows where A is shared
            tensor_name(up, "B"): (b_up, "b"),
        }


class ExpertLora(LoraModule):
    """One layer's routed experts: outer factors a1, a3 [R, Z], b2 [Z, R]; inner b1, b3 [E, F, R], a2 [E, R, F]."""

    a1: Parameter
    a3: Parameter
    a2: Parameter
    b1: Parameter
    b3: Parameter
    b2: Parameter

    def __init__(self, factory: Factory, prefix: str):
        super().__init__(factory)
        self.prefix = prefix
        for which in ("1", "3", "2"):
            site = Site.EXPERT_FC2 if which == "2" else Site.EXPERT_FC1
            for letter in "ab":
                name = self._exported(letter + which)
                self.register_parameter(letter + which, factory.factor((name,), site, letter))

    def _exported(self, parameter: str) -> str:
        return tensor_name(f"{self.prefix}w{parameter[1]}", "A" if parameter[0] == "a" else "B")

    def exports(self, of: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, str]]:
        return {self._exported(name): (t if t.ndim == 3 else t.unsqueeze(0), name) for name, t in of.items()}
