"""The drafts that an engine holds: a draft belongs to the adapter version that it came with, and serves it to its end.

Shapes: T tokens, W tap width, C numbers of a draft's keys and values, a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from miles_k3.errors import AdapterError
from miles_k3.k3.draft_config import DraftConfig
from miles_k3.rollout.speculative.serving_draft import ServingDraft

FIRST_VERSION = -1  # that of the base, before any adapter


class DraftVersions:
    """Ascending by the first adapter version that each one drafts for; the newest serves all later ones."""

    def __init__(
        self, config: DraftConfig, weights: Mapping[str, Tensor], embed_VH: Tensor, head_VH: Tensor, dtype: torch.dtype
    ) -> None:
        self.config, self._target, self._dtype = config, (embed_VH, head_VH), dtype
        self._models: list[tuple[int, ServingDraft]] = []
        self.keeps_memory = False  # whether the next draft is copied to where one that is gone was: graphs read there
        self._spares: list[ServingDraft] = []
        self.load(FIRST_VERSION, weights)

    @property
    def newest(self) -> int:
        """The first adapter version of the newest draft."""
        return self._models[-1][0]

    def __len__(self) -> int:
        return len(self._models)

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Take a copy of `weights` for adapter `version` and those after it. Raises AdapterError when it comes late,
        CheckpointError when the weights are another draft's."""
        if self._models and version < self.newest:
            raise AdapterError(f"a draft for adapter v{version} came after the one for v{self.newest}")
        model = self._made(weights)
        if self._models and version == self.newest:
            self._set_aside([self._models.pop()[1]])
        self._models.append((version, model))

    def _made(self, weights: Mapping[str, Tensor]) -> ServingDraft:
        if not self._spares:
            own = {
                name: w.detach().to(device=self._target[0].device, dtype=self._dtype, copy=True)
                for name, w in weights.items()
            }
            return ServingDraft(self.config, own, *self._target)
        self._spares[-1].refill(weights)
        return self._spares.pop()

    def _set_aside(self, gone: Sequence[ServingDraft]) -> None:
        if self.keeps_memory:
            self._spares += gone

    def of(self, version: int) -> ServingDraft:
        """The draft of an adapter version."""
        return next((m for first, m in reversed(self._models) if first <= version), self._models[0][1])

    def forget_all_but(self, live: Iterable[int]) -> None:
        """Drop drafts that none of the live versions uses; the newest one stays."""
        used = {id(self.of(version)) for version in live} | {id(self._models[-1][1])}
        gone = [m for _, m in self._models if id(m) not in used]
        self._models = [(first, m) for first, m in self._models if id(m) in used]
        self._set_aside(gone)

    def used_by(self, versions: Sequence[int]) -> tuple[tuple[ServingDraft, ...], list[int]]:
        """The drafts of these versions, the older first, and the place of each version's own among them."""
        own = [self.of(version) for version in versions]
        models = tuple(m for _, m in self._models if any(m is o for o in own))
        return models, [next(i for i, m in enumerate(models) if m is o) for o in own]

    def groups(self, versions: Sequence[int]) -> list[tuple[ServingDraft, list[int]]]:
        """Drafts, and the indices of the versions that are theirs."""
        models = {version: self.of(version) for version in dict.fromkeys(versions)}
        distinct = list({id(model): model for model in models.values()}.values())
        if len(distinct) == 1:
            return [(distinct[0], list(range(len(versions))))]
        return [(model, [i for i, v in enumerate(versions) if models[v] is model]) for model in distinct]
