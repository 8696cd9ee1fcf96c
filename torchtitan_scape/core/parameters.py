"""Local views of parameters and gradients, plain tensors or DTensors, and parameters that are stored in BF16."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NoReturn, TypeGuard, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Cut
from torch.utils._pytree import tree_leaves, tree_map_only

_EMPTY = (torch.ops.aten.new_empty.default, torch.ops.aten.empty_like.default)


class ScaledTensor(torch.Tensor):
    """FP32 tensor weight * scale: BF16 numbers, and float64 () or None for 1, both written by the optimizer.

    Its gradients are FP32. Views share the storage. Any other operation receives the FP32 values. An operation that
    writes them rounds them to BF16 again, divided by the scale, which does not change. FSDP2 gathers weight * scale in
    the dtype of its mixed precision.
    """

    weight: Tensor
    scale: Tensor | None

    @staticmethod
    def __new__(cls, weight: Tensor, scale: Tensor | None) -> "ScaledTensor":
        made: ScaledTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            weight.shape,
            strides=weight.stride(),
            storage_offset=weight.storage_offset(),
            dtype=torch.float32,
            device=weight.device,
        )
        made.weight, made.scale = weight, scale
        return made

    def __init__(self, weight: Tensor, scale: Tensor | None) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ScaledTensor(weight={self.weight}, scale={self.scale})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the FP32 values as a plain tensor, which any program can load."""
        return self.values().__reduce_ex__(protocol)

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return weight * scale in `dtype`, rounded once."""
        if self.scale is None:
            return self.weight.to(dtype)
        # A 0-dimensional scale would be rounded to BF16 before the multiplication.
        scale = self.scale.float().view((1,) * self.weight.ndim)
        return torch.mul(self.weight, scale, out=torch.empty_like(self.weight, dtype=dtype))

    def set_values(self, values: Tensor) -> None:
        """Set the weight to values / scale."""
        values = values.to(self.weight.device)
        self.weight.copy_(values if self.scale is None else values / self.scale.float())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view and isinstance(args[0], ScaledTensor):
            scale = args[0].scale
            viewed = func(args[0].weight, *args[1:], **kwargs)
            return tree_map_only(Tensor, lambda weight: ScaledTensor(weight, scale), viewed)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], ScaledTensor):
            target, source = args[:2]
            target.set_values(source.values() if isinstance(source, ScaledTensor) else source)
            return target
        if func in _EMPTY and kwargs.get("dtype") in (None, torch.float32):
            # Checkpoint staging creates an empty tensor of this class and then copies into it.
            like = args[0]
            return ScaledTensor(func(like.weight, *args[1:], **kwargs | {"dtype": torch.bfloat16}), like.scale)
        unwrapped: dict[int, tuple[ScaledTensor, Tensor]] = {}

        def unwrap(tensor: ScaledTensor) -> Tensor:
            return unwrapped.setdefault(id(tensor), (tensor, tensor.values()))[1]

        plain_args, plain_kwargs = tree_map_only(ScaledTensor, unwrap, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                argument_value = args[i] if i < len(args) else kwargs.get(argument.name)
                for written in tree_leaves(argument_value):
                    if isinstance(written, ScaledTensor):
                        written.set_values(unwrapped[id(written)][1])
        back = {id(values): tensor for tensor, values in unwrapped.values()}
        return tree_map_only(Tensor, lambda values: back.get(id(values), values), result)

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: MixedPrecisionPolicy
    ) -> tuple[tuple[Tensor, ...], None]:
        """Return FSDP2's all-gather input: the values, equal to FSDP2's cast of an FP32 parameter."""
        return (self.values(mp_policy.param_dtype or torch.float32),), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the gathered tensor as the parameter."""
        return None if out is not None else (all_gather_outputs[0], ())


def share_scale(parameter: Tensor, scale: Tensor, writes: bool = True) -> None:
    """Copy the parameter's scale into `scale`, float64 (). If `writes`, the parameter and its views use that."""
    local_tensor = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()
    if not isinstance(local_tensor, ScaledTensor) or local_tensor.scale is None:
        raise ValueError("update = 'sharded' needs weights with a scale; call hold_in_bfloat16 with scaled=True")
    scale.copy_(local_tensor.scale)
    if writes:
        local_tensor.scale.set_(scale)


@torch.no_grad()
def hold_in_bfloat16(module: nn.Module, scaled: bool) -> None:
    """Convert the module's parameters to `ScaledTensor`s, in place, and free the FP32 numbers.

    Values are rounded to BF16 once; masters are initialized from the rounded values. Call it after `fully_shard` and
    initialization, before the first forward pass. With `scaled` each parameter has a scale, for a sharded update.
    Raises ValueError if the shards of a parameter differ in size; FSDP2 would pad them with FP32 numbers.
    """
    converted: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        local_tensor = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
        if isinstance(parameter, DTensor):
            placed = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
            shards = math.prod(size for placement, size in placed if not placement.is_replicate())
            if local_tensor.numel() * shards != parameter.numel():
                raise ValueError(
                    f"{name!r} of shape {tuple(parameter.shape)} has no even shards on {parameter.device_mesh}, but "
                    "weights in BF16 need them: keep weights_dtype 'float32', or choose another shard degree"
                )
        scale = torch.ones((), dtype=torch.float64, device=local_tensor.device) if scaled else None
        scaled_tensor = ScaledTensor(local_tensor.to(torch.bfloat16), scale)
        if isinstance(parameter, DTensor):
            parameter._local_tensor = scaled_tensor
            local_tensor.untyped_storage().resize_(0)  # FSDP2 holds a reference until the first forward pass.
        else:
            converted[id(parameter)] = nn.Parameter(scaled_tensor, parameter.requires_grad)
    for owner in module.modules():  # A parameter may be registered in several modules.
        for last, own_parameter in owner._parameters.items():
            if id(own_parameter) in converted:
                owner._parameters[last] = converted[id(own_parameter)]


# ------------------------------------------------------------------------------------------ parameters and their shards

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


def stored(parameter: Tensor) -> Tensor:
    """Return the stored numbers of the local shard: the BF16 weight of a `ScaledTensor`, else the shard itself."""
    shard = local(parameter).detach()
    return shard.weight if isinstance(shard, ScaledTensor) else shard


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
    shard = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return shard.weight.data_ptr() if isinstance(shard, ScaledTensor) else shard.data_ptr()


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
            raise ValueError(f"method {method!r} needs contiguous parameters, and {shard.name!r} is not")


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
    parameter.grad = placed_like(parameter, values.view(local(parameter).shape).to(parameter.dtype))


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
