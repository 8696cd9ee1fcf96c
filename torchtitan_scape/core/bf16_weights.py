"""Parameters that are kept in BF16 and look like FP32: to the model, to FSDP2, and to who reads a checkpoint."""

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
    """weight * scale, an FP32 tensor of which BF16 numbers are kept.

    Its gradients are FP32, too. Views share the numbers. Any other operation sees the FP32 values; one that writes them
    rounds them to BF16 again, divided by the scale, which it leaves alone. FSDP2 gathers weight * scale in the dtype of
    its mixed precision.

    Args:
        weight: BF16, written by the optimizer.
        scale: float64 (), written by the optimizer; None for 1.
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
        """A file has the FP32 values, as plain tensors, which anybody can load."""
        return self.values().__reduce_ex__(protocol)

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """weight * scale, rounded once, to `dtype`."""
        if self.scale is None:
            return self.weight.to(dtype)
        # A scale of no dimensions would be rounded to BF16 before it is multiplied.
        scale = self.scale.float().view((1,) * self.weight.ndim)
        return torch.mul(self.weight, scale, out=torch.empty_like(self.weight, dtype=dtype))

    def set_values(self, values: Tensor) -> None:
        """weight = values / scale."""
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
            # As checkpoints are staged: such a tensor, whose numbers are filled in.
            like = args[0]
            return ScaledTensor(func(like.weight, *args[1:], **kwargs | {"dtype": torch.bfloat16}), like.scale)
        held: dict[int, tuple[ScaledTensor, Tensor]] = {}

        def unwrap(tensor: ScaledTensor) -> Tensor:
            return held.setdefault(id(tensor), (tensor, tensor.values()))[1]

        plain_args, plain_kwargs = tree_map_only(ScaledTensor, unwrap, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[i] if i < len(args) else kwargs.get(argument.name)
                for written in tree_leaves(given):
                    if isinstance(written, ScaledTensor):
                        written.set_values(held[id(written)][1])
        back = {id(values): tensor for tensor, values in held.values()}
        return tree_map_only(Tensor, lambda values: back.get(id(values), values), result)

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: MixedPrecisionPolicy
    ) -> tuple[tuple[Tensor, ...], None]:
        """FSDP2's all-gather input: the values, as its cast of an FP32 parameter would give them."""
        return (self.values(mp_policy.param_dtype or torch.float32),), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """What was gathered is the parameter."""
        return None if out is not None else (all_gather_outputs[0], ())


def share_scale(parameter: Tensor, scale: Tensor, writes: bool = True) -> None:
    """Copies the parameter's scale into this float64 (), which the parameter and its views take over if it `writes`."""
    own = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()
    if not isinstance(own, ScaledTensor) or own.scale is None:
        raise ValueError("update = 'sharded' needs weights with a scale; call hold_in_bfloat16 with scaled=True")
    scale.copy_(own.scale)
    if writes:
        own.scale.set_(scale)


@torch.no_grad()
def hold_in_bfloat16(module: nn.Module, scaled: bool) -> None:
    """Turns the module's parameters into `ScaledTensor`s, in place, and frees the FP32 numbers.

    What is not a BF16 number is rounded, once: a master starts from what was rounded.

    Call it after `fully_shard` and initialisation, before the first forward pass.

    scaled: with a scale of their own, for a sharded update.

    Raises ValueError for a parameter whose shards differ in size: FSDP2 would pad it with FP32 numbers.
    """
    made: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        own = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
        if isinstance(parameter, DTensor):
            placed = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
            shards = math.prod(size for placement, size in placed if not placement.is_replicate())
            if own.numel() * shards != parameter.numel():
                raise ValueError(
                    f"{name!r} of shape {tuple(parameter.shape)} has no even shards on {parameter.device_mesh}, and "
                    "weights in BF16 need them: keep weights_dtype 'float32', or choose another shard degree"
                )
        scale = torch.ones((), dtype=torch.float64, device=own.device) if scaled else None
        held = ScaledTensor(own.to(torch.bfloat16), scale)
        if isinstance(parameter, DTensor):
            parameter._local_tensor = held
            own.untyped_storage().resize_(0)  # FSDP2 keeps a reference to it until the first forward pass
        else:
            made[id(parameter)] = nn.Parameter(held, parameter.requires_grad)
    for owner in module.modules():  # a parameter may stand in several places
        for last, own_parameter in owner._parameters.items():
            if id(own_parameter) in made:
                owner._parameters[last] = made[id(own_parameter)]
