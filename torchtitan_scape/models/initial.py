"""Initialization of a model; on a CPU with the same weights in every layout."""

from collections.abc import Callable

import torch
import torch.nn as nn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from torchtitan_scape.core.parameters import local, plain_name


@torch.no_grad()
def initialize(model: nn.Module, draw: Callable[[], None], whole: Callable[[], nn.Module]) -> None:
    """Initialize the model's parameters and direct buffers, whose memory exists already.

    DTensor draws no random numbers on a CPU: every rank would fill its shard from the same seed, so that all shards
    were equal. On a CPU each rank therefore draws the `whole` model and keeps its shards, which limits the model size
    to the host's memory. A GPU draws in place: every replica the same weights, but other ones in another layout.
    """
    parameters = dict(model.named_parameters())
    first = next(iter(parameters.values()))
    if first.device.type != "cpu":
        draw()
        return
    if isinstance(local(first), FakeTensor):
        return  # A dry run has no values.
    drawn = whole()
    for name, buffer in drawn.named_buffers(recurse=False):
        setattr(model, name, buffer)
    values = dict(drawn.named_parameters())
    for name, parameter in parameters.items():
        full = values[plain_name(name)]
        local(parameter).copy_(_local_part(full, parameter) if isinstance(parameter, DTensor) else full)


def _local_part(full: Tensor, like: DTensor) -> Tensor:
    """Return this rank's shard of `full` with the layout of `like`.

    The innermost mesh axis is applied first: FSDP shards the tensor-parallel shard of this rank.
    """
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    part = full
    for axis in reversed(range(like.device_mesh.ndim)):
        placement = like.placements[axis]
        if placement.is_replicate():
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        chunks = part.chunk(like.device_mesh.size(axis), dim)
        index = coordinate[axis]
        part = chunks[index] if index < len(chunks) else part.narrow(dim, 0, 0)
    return part
