"""Rows to the ranks that hold their experts and back, in the latent width.

Shape legend: M rows of this rank's tokens sorted by expert, S rows that it receives, E experts of a rank, D any width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_k3.trainer.distributed import Axis
from miles_k3.trainer.mcore import all_to_all
from miles_k3.trainer.model.collectives import all_gather_states
from miles_k3.trainer.model.experts import Rows
from miles_k3.trainer.model.permute import permute


@dataclass(frozen=True, slots=True, eq=False)
class ExpertExchange:
    """One dispatch of a layer. `ends_E` int32: end of each own expert's segment of the received rows.

    `order_S`, `inverse_S`: from the order of arrival (by rank, then expert) to that of the experts, and back.
    """

    ends_E: Tensor
    send_counts: list[int]
    receive_counts: list[int]
    order_S: Tensor | None
    inverse_S: Tensor | None
    ep: Axis

    @classmethod
    def of(cls, rows: Rows, ep: Axis) -> ExpertExchange:
        """Collective: the ranks tell each other how many rows go where; the device is waited for once."""
        if ep.size == 1:
            return cls(rows.ends_E, [], [], None, None, ep)
        counts_XE = all_gather_states(rows.ends_E.diff(prepend=rows.ends_E.new_zeros(1)), ep)
        host_XYE = counts_XE.cpu().unflatten(1, (ep.size, -1))  # from rank X to rank Y's experts
        own_XE = counts_XE.unflatten(1, (ep.size, -1))[:, ep.rank]
        send, receive = host_XYE[ep.rank].sum(1).tolist(), host_XYE[:, ep.rank].sum(1).tolist()
        expert = torch.arange(own_XE.shape[1], device=own_XE.device).repeat(ep.size)
        expert_S = torch.repeat_interleave(expert, own_XE.reshape(-1), output_size=sum(receive))
        order_S = torch.argsort(expert_S, stable=True)
        inverse_S = torch.empty_like(order_S)
        inverse_S[order_S] = torch.arange(order_S.shape[0], device=order_S.device)
        return cls(own_XE.sum(0).cumsum(0).to(torch.int32), send, receive, order_S, inverse_S, ep)

    def send(self, x_MD: Tensor) -> Tensor:
        """[M, D] -> [S, D], sorted by expert."""
        if self.order_S is None or self.inverse_S is None:
            return x_MD
        received = all_to_all(self.ep.group, x_MD.contiguous(), self.receive_counts, self.send_counts)
        return permute(received, self.order_S, self.inverse_S)

    def give_back(self, y_SD: Tensor) -> Tensor:
        """[S, D] -> [M, D]."""
        if self.order_S is None or self.inverse_S is None:
            return y_SD
        returned = permute(y_SD, self.inverse_S, self.order_S)
        return all_to_all(self.ep.group, returned, self.send_counts, self.receive_counts)
