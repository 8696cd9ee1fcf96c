"""Local views of parameters and gradients, which are plain tensors or DTensors."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NoReturn, TypeGuard, cast
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Cut

from torchtitan_scape.core.bf16_weights import ScaledTensor

_WRAPPED_IN_FP8 = "_tensor"  # the attribute with the weight in torchao's wrappers that FSDP2 gathers in FP8
_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")


class SliceParameter(torch.nn.Parameter):
    """Entries [start, start + n) of a parameter of `whole` shape, flat, of the shape (1, ..., n) with as many
    dimensions.

    Usually a view of a larger buffer. It takes part in steps and checkpoints under the parameter's name.
    """

    whole: torch.Size
    start: int

    def __new__(cls, values: Tensor, whole: Sequence[int], start: int) -> "SliceParameter":
        made = super().__new__(cls, values, True)
        made.whole, made.start = torch.Size(whole), start
        return made

    def __init__(self, values: Tensor, whole: Sequence[int], start: int) -> None:
        pass


def is_slice(tensor: Any) -> TypeGuard[SliceParameter]:
    """Return whether this is a `SliceParameter`: fake tensors of a dry run have its attributes but not its class."""
    return hasattr(tensor, "whole")


@dataclass(eq=False)
class Shard:
    """The local shard of one parameter, named as in `model.named_parameters()`, and the index of its param group.

    `counted` is False on ranks that hold another rank's copy, so that a norm over the model counts every entry once. A
    replica optimizer sets it, see `replica.checks.count_copies_once`.
    """

    name: str
    parameter: Tensor
    group: int
    counted: bool = True

    @property
    def size(self) -> int:
        return local(self.parameter).numel()

    @property
    def entries(self) -> int:
        """Number of entries of the whole parameter, over all ranks."""
        parameter = self.parameter
        return parameter.whole.numel() if is_slice(parameter) else parameter.numel()

    @property
    def whole_shape(self) -> torch.Size:
        """Shape of the whole parameter, over all ranks."""
        parameter = self.parameter
        return parameter.whole if is_slice(parameter) else parameter.shape

    @property
    def local_shape(self) -> torch.Size:
        return local(self.parameter).shape

    @property
    def device(self) -> torch.device:
        return local(self.parameter).device

    @property
    def columns(self) -> int:
        """Entries per row: the product of all dimensions but the first.

        For a slice, the greatest common divisor of that product and of the slice's size, so that the slice has complete
        rows.
        """
        parameter = self.parameter
        if is_slice(parameter):
            return max(1, math.gcd(parameter.numel(), math.prod(parameter.whole[1:])))
        return max(1, math.prod(local(parameter).shape[1:]))


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of activation checkpointing, FSDP1 and torch.compile."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def matching(shards: Iterable[Shard], pattern: str) -> list[Shard]:
    """Return the shards with this name, or with a name that the pattern matches, as of `fnmatch`."""
    return [shard for shard in shards if shard.name == pattern or fnmatchcase(shard.name, pattern)]


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, or the tensor itself."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def weak_hook(method: Callable[..., None], *args: Any) -> Callable[[Tensor], None]:
    """Return a hook of a parameter that calls `method(*args, tensor)` as long as the object of the method exists.

    A strong reference would be part of a cycle (object, parameter, hook) that Python's garbage collector does not see.
    """
    reference = WeakMethod(method)

    def hook(tensor: Tensor) -> None:
        if (existing := reference()) is not None:
            existing(*args, tensor)

    return hook


def stored(parameter: Tensor) -> Tensor:
    """Return the plain tensor with the data of the local shard: the BF16 weight of a `ScaledTensor`, else the shard."""
    return _within_wrapper(local(parameter)).detach()


def is_gathered_in_fp8(parameter: Tensor) -> bool:
    """Return whether the local shard is torchao's wrapper of a weight, which has no address of its own."""
    return hasattr(local(parameter), _WRAPPED_IN_FP8)


def _within_wrapper(shard: Tensor) -> Tensor:
    """Return the plain tensor that holds a local shard's data."""
    return shard.weight if isinstance(shard, ScaledTensor) else getattr(shard, _WRAPPED_IN_FP8, shard)


class StoredTensors:
    """The `stored` tensors of shards, created again only if the storage of a parameter was replaced.

    They are views, so that values written to the parameters are seen. While they exist, no other storage can have the
    address of theirs.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._wrapped = any(isinstance(shard.parameter, DTensor | ScaledTensor) for shard in shards)
        self._addresses: list[int] = []
        self._tensors: list[Tensor] = []

    def __call__(self) -> list[Tensor]:
        """Return one tensor per shard. The caller must not change the list."""
        if self._wrapped:
            addresses = [_address(shard.parameter) for shard in self._shards]
        else:
            addresses = [shard.parameter.data_ptr() for shard in self._shards]
        if addresses != self._addresses:
            self._addresses, self._tensors = addresses, [stored(shard.parameter) for shard in self._shards]
        return self._tensors


def _address(parameter: Tensor) -> int:
    """Return the address of the first entry of `stored(parameter)`, without creating that view."""
    return _within_wrapper(parameter._local_tensor if isinstance(parameter, DTensor) else parameter).data_ptr()


def collect_shards(param_groups: list[dict[str, Any]]) -> list[Shard]:
    """Return the shards of all parameters in constructor order. Raises ValueError for one that cannot be trained."""
    shards = []
    for index, group in enumerate(param_groups):
        named = group.get("param_names") or []
        names = named or [f"group{index}.{i}" for i in range(len(group["params"]))]
        for i, (name, parameter) in enumerate(zip(names, group["params"], strict=True)):
            name = plain_name(name)
            if not parameter.dtype.is_floating_point:
                of_group = f"{i} of param group {index}, of shape {tuple(parameter.shape)},"
                _refuse_dtype(repr(name) if named else of_group, parameter.dtype)
            _check_even(name, parameter)
            shards.append(Shard(name, parameter, index))
    if not shards:
        raise ValueError("no parameters to optimize")
    return shards


def check_contiguous(shards: Sequence[Shard], method: str) -> None:
    """Raise ValueError for a parameter whose memory has another order than its entries."""
    for shard in shards:
        if not stored(shard.parameter).is_contiguous():
            raise ValueError(
                f"method {method!r} needs contiguous parameters, and {shard.name!r} is not; "
                "choose another method, such as 'quantized', or set its data to data.contiguous()"
            )


def contiguous_gradient(shard: Shard) -> Tensor:
    """Return the local gradient, contiguous and of any shape, in its own dtype, without a copy or a view if possible.

    A missing gradient is returned as zeros, because a replica that did not use a parameter still takes part in every
    collective.
    """
    gradient = shard.parameter.grad
    if type(gradient) is not Tensor:  # one check in the usual case: this runs for every parameter in every step
        if gradient is None:
            if not shard.parameter.requires_grad:
                raise ValueError(f"{shard.name!r} was frozen after the optimizer was built; build a new one without it")
            return torch.zeros(shard.local_shape, dtype=torch.float32, device=shard.device)
        if isinstance(gradient, DTensor) and gradient.placements != cast(DTensor, shard.parameter).placements:
            # A gradient may still be partial where tensor parallelism replicates its parameter.
            gradient = gradient.redistribute(placements=cast(DTensor, shard.parameter).placements)
        gradient = local(gradient)
    if gradient.layout != torch.strided:
        raise ValueError(f"the gradient of {shard.name!r} is {gradient.layout}; build the module with sparse=False")
    return (gradient.detach() if gradient.requires_grad else gradient).contiguous()


def store_gradient(shard: Shard, values: Tensor) -> None:
    """Store FP32 values, of any shape, as the parameter's gradient, unless they are in its memory already."""
    parameter = shard.parameter
    gradient = parameter.grad
    if gradient is values:
        return  # the common case first, as in `contiguous_gradient`
    same_layout = not isinstance(gradient, DTensor) or gradient.placements == cast(DTensor, parameter).placements
    if gradient is not None and same_layout:
        local_gradient = local(gradient)
        if local_gradient.data_ptr() != values.data_ptr():
            local_gradient.copy_(values.view(local_gradient.shape))
        return
    own = local(parameter)
    values = values.view(own.shape).to(parameter.dtype)
    if not own.is_contiguous():  # PyTorch's fused optimizers read both in the order of their memory
        values = torch.empty_like(own).copy_(values)
    parameter.grad = placed_like(parameter, values)


def placed_like(parameter: Tensor, values: Tensor) -> Tensor:
    """Return values of a parameter's local shape as a DTensor that is sharded like it, or unchanged if it is plain."""
    if not isinstance(parameter, DTensor):
        return values
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(values, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def copies_key(shard: Shard) -> tuple[Any, ...] | None:
    """Return a key that ranks of a replica with copies of the same entries share; None if there are no copies."""
    parameter = shard.parameter
    if is_slice(parameter):
        return None
    if not isinstance(parameter, DTensor):
        return (shard.name,)
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    places = zip(coordinate, parameter.placements, strict=True)
    return shard.name, *(index for index, placement in places if not placement.is_replicate())


def model_group_of(shards: Iterable[Shard]) -> ProcessGroup | None:
    """Return the group over which DTensor parameters are sharded, from their mesh; None for plain tensors.

    Used if replicas are given as a plain ProcessGroup. Raises ValueError if there is more than one mesh dimension;
    `ReplicaGroups` is then required.
    """
    meshes = {p.device_mesh for p in (s.parameter for s in shards) if isinstance(p, DTensor)}
    if not meshes:
        return None
    mesh = meshes.pop()
    if meshes or mesh.ndim != 1:
        raise ValueError(
            "the parameters are DTensors on more than one mesh dimension; with FSDP2 alone, pass the dimension of the "
            "shards to fully_shard, such as mesh['shard']; with tensor parallelism, pass replicas="
            "torchtitan_scape.topology.groups.ReplicaGroups with the group of the ranks that hold one replica together"
        )
    return mesh.get_group() if mesh.size() > 1 else None


def _refuse_dtype(name: str, dtype: torch.dtype) -> NoReturn:
    fix = "leave it out of the optimizer"
    if dtype.is_complex:
        fix = (
            "store torch.view_as_real(values) as the parameter and call torch.view_as_complex in the forward pass, or "
            f"freeze it with requires_grad_(False) and {fix}"
        )
    raise ValueError(f"parameter {name} has dtype {dtype}; only real floating-point parameters can be trained: {fix}")


def _check_even(name: str, parameter: Tensor) -> None:
    """Raise ValueError for a parameter that tensor parallelism divides unevenly.

    Tensor-parallel ranks hold copies of the parameters that are not split. If the sizes of their other shards differ,
    the copies have different offsets in the exchanged buffers, so that different ranks sum and encode them, and they
    diverge.
    """
    if not isinstance(parameter, DTensor):
        return
    mesh = parameter.device_mesh
    for axis, size, placement in zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=False):
        if axis == "tp" and isinstance(placement, Cut) and parameter.shape[placement.dim] % size:
            raise ValueError(
                f"parallelism.tensor_parallel_degree = {size} does not divide dimension {placement.dim} of {name!r}, "
                f"{tuple(parameter.shape)}; choose one that does, or a model whose vocabulary and width it divides"
            )
