"""The container of an optimizer that is the method as well."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from topology.collectives import ReplicaCollectives
from torchtitan_scape.core.consistency import ReplicatedTensors
from torchtitan_scape.core.observer import ObservedState, Observer
from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.methods.interface import State
from torchtitan_scape.methods.pending import CheckpointReader
from torchtitan_scape.replica.optimizer import ReplicaOptimizersBase, Replicas
from torchtitan_scape.replica.rows import rows_of


class OwnStepOptimizers(ReplicaOptimizersBase):
    """An optimizer that is the method as well and owns the whole step, clipping included, as SCAPE does.

    It has `step(gradients=...)` and the attributes and calls of `torchtitan_scape.methods.scape.method.Scape` that are
    used here.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        make_optimizer: Callable[[ReplicaCollectives], Any],
        replicas: Replicas,
    ) -> None:
        self.replicas = replicas
        self.each = replicas.run(lambda i: make_optimizer(replicas.endpoints[i]))
        self.first = self.each[0]
        for other in self.each[1:]:
            other.param_groups = self.first.param_groups  # the schedule's rates
        self._own(model_parts, self.first)
        self._shards = self.first.ordered
        self.timer, self.guard, self.grad_norm = self.first.timer, self.first.guard, self.first.grad_norm

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> None:
        rows = self._gradients()
        self.replicas.run(lambda i: self.each[i].step(gradients=rows[i]))
        self.sharding.version.changed_if(self.guard.last_applied)

    def finish_previous_step(self) -> None:
        self.replicas.run(lambda i: self.each[i].finish_previous_step())

    def request_full_exchange(self) -> None:
        self.replicas.run(lambda i: self.each[i].request_full_exchange())

    def states(self, residual: str) -> list[State]:
        return rows_of(self.replicas.run(lambda i: self.each[i].states(residual)))

    def optimizer_state(self) -> dict[str, Any]:
        return {}

    def put_counters(self, saved: dict[str, int]) -> None:
        for one in self.each:
            one.guard.skipped, one.guard.skipped_in_a_row = saved["skipped"], saved["skipped_in_a_row"]

    def counters(self) -> dict[str, Any]:
        return super().counters() | self.first.counters()

    def load(self, reader: CheckpointReader, same_layout: bool, step: int) -> str:
        self.finish_previous_step()
        self.sharding.unsent.loading(reader, self._shards)
        return self.first.load_each(self.each, reader, same_layout, step)

    def describe_states(self, residual: str) -> dict[str, dict[str, Any]]:
        return self.first.describe_states()

    def checkpoint_sizes(self, residual: str) -> dict[str, int]:
        return self.first.checkpoint_sizes(residual)

    def shared(self) -> list[ReplicatedTensors]:
        return self.first.shared()

    def observe(self, observer: Observer | None) -> None:
        super().observe(observer)
        self.first.observe(observer)

    def observed_state(self, shard: Shard) -> ObservedState:
        each = self.replicas.run(lambda i: self.each[i].moment_and_residual(shard.name))
        return ObservedState(each[0][0], [residual for _, residual in each])

    def planned_bytes(self) -> float:
        return self.first.planned_bytes()

    def payload_parts(self) -> int:
        return self.first.payload_parts()

    def statistics(self) -> dict[str, float]:
        return self.replicas.run(lambda i: self.each[i].statistics())[0]
