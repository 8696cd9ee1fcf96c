"""What the optimizer is made of, as those see it that save, compare and report its state."""

from typing import Any, Protocol

from torch import Tensor

from kernels.scape.ownership import OwnedSlice
from kernels.scape.passes import ScapePasses
from topology.collectives import ReplicaCollectives
from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.methods.scape.masks import DelayedMasks
from torchtitan_scape.replica.guard import FiniteGuard


class Parts(Protocol):
    """Of a `Scape`.

    ordered: shards in the order of the state. pieces: what the passes call tensors, (number in `ordered`, the part of
        it or None for all).
    applied_steps: float64 (), on the device. clip_factor, grad_norm: FP32 ().
    """

    passes: ScapePasses
    masks: DelayedMasks
    collectives: ReplicaCollectives
    guard: FiniteGuard
    ordered: list[Shard]
    pieces: list[tuple[int, OwnedSlice | None]]
    param_groups: list[dict[str, Any]]
    fingerprint: dict[str, Any]
    bf16_weights: bool
    attempted_steps: int
    applied_steps: Tensor
    clip_factor: Tensor
    grad_norm: Tensor

    def shard_of(self, tensor: int) -> Shard: ...
