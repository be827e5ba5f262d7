"""Messages between pipeline stages."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, _p2p_ops
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor

__all__ = ["ScheduleGroups", "StageMessages", "schedule_groups"]


class ScheduleGroups(TypedDict):
    """Arguments of a schedule."""

    p2p_communicator: StageMessages
    pg_collection: ProcessGroupCollection


DIMENSIONS = 3
"""Of activations: ``[L, 1, H]``."""


def schedule_groups(config: TransformerConfig, device: torch.device) -> ScheduleGroups:
    """Arguments of Megatron's pipeline schedules, with `StageMessages`."""
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "embd", "pos_embd", "pp", "dp_cp"])
    group = mpu.get_pipeline_model_parallel_group()
    return {"p2p_communicator": StageMessages(group, config, device), "pg_collection": groups}


class StageMessages(P2PCommunicator):  # type: ignore[misc]
    """Exchanges the shapes of activations in the order in which Megatron exchanges the activations.

    Megatron sends shapes to both neighbours in one batch (p2p_communication.py: ``_communicate_shapes``).
    In an interleaved pipeline of two stages these are one and the same rank, which then takes the shape of
    an activation for that of a gradient. And it waits until the shapes that it sends are received, which
    on gloo may never be: the neighbour may first have to hand over an activation.
    """

    def __init__(self, group: Any, config: TransformerConfig, device: torch.device) -> None:
        super().__init__(group, config)
        self._device = device
        self._under_way: list[tuple[Any, Tensor | None]] = []
        """Shapes that were sent, in memory that must stay until they are received."""

    def finish(self) -> None:
        """Return when everything that was sent has been received."""
        for request, _ in self._under_way:
            request.wait()
        self._under_way.clear()

    def abandon(self) -> None:
        """Forget what was sent, after a failed pass."""
        self._under_way.clear()

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[list[int], list[int]]:
        from_prev, from_next = self._room(recv_prev), self._room(recv_next)
        to_prev, to_next = self._shape(tensor_send_prev), self._shape(tensor_send_next)
        requests = _p2p_ops(
            tensor_send_prev=to_prev,
            tensor_recv_prev=from_prev,
            tensor_send_next=to_next,
            tensor_recv_next=from_next,
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        sent = {"send_prev": to_prev, "send_next": to_next}
        self._under_way += [(requests.pop(name), shape) for name, shape in sent.items() if name in requests]
        for request in requests.values():
            request.wait()
        return self._read(from_prev), self._read(from_next)

    def _room(self, needed: bool) -> Tensor | None:
        return torch.empty(DIMENSIONS, dtype=torch.int64, device=self._device) if needed else None

    def _shape(self, value: Tensor | None) -> Tensor | None:
        return None if value is None else torch.tensor(value.shape, dtype=torch.int64, device=self._device)

    @staticmethod
    def _read(received: Tensor | None) -> list[int]:
        return [0] * DIMENSIONS if received is None else [int(size) for size in received.tolist()]
