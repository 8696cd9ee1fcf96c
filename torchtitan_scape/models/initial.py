"""The first weights of a model, which are the same in every layout."""

from collections.abc import Callable

import torch
import torch.nn as nn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from torchtitan_scape.core.parameters import local, plain_name


@torch.no_grad()
def initialise(model: nn.Module, draw: Callable[[], None], whole: Callable[[], nn.Module]) -> None:
    """Fills the model's parameters and its own buffers, which have memory already.

    DTensor draws no random numbers on a CPU: every rank would fill its shard from the same seed, so that all shards
    are alike. There each rank draws the whole model and keeps its part, which bounds the size of models to the host's
    memory. A GPU draws in place.

    Args:
        draw: draws in place.
        whole: a model of the same kind on the CPU, not cut and drawn.
    """
    parameters = dict(model.named_parameters())
    first = next(iter(parameters.values()))
    if first.device.type != "cpu":
        draw()
        return
    if isinstance(local(first), FakeTensor):
        return  # a dry run has no values
    drawn = whole()
    for name, buffer in drawn.named_buffers(recurse=False):
        setattr(model, name, buffer)
    values = dict(drawn.named_parameters())
    for name, parameter in parameters.items():
        full = values[plain_name(name)]
        local(parameter).copy_(_local_part(full, parameter) if isinstance(parameter, DTensor) else full)


def _local_part(full: Tensor, like: DTensor) -> Tensor:
    """This rank's part of `full`, laid out as `like`.

    The innermost mesh axis cuts first: FSDP shards what tensor parallelism left on this rank.
    """
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    part = full
    for axis in reversed(range(like.device_mesh.ndim)):
        placement = like.placements[axis]
        if placement.is_replicate():
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        pieces = part.chunk(like.device_mesh.size(axis), dim)
        index = coordinate[axis]
        part = pieces[index] if index < len(pieces) else part.narrow(dim, 0, 0)
    return part
