"""Parameters stored in BF16 that appear as FP32 to the model, to FSDP2 and in checkpoints."""

import math
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
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
