"""A few tensors with random gradients, trained by the product and by the reference algorithm."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.literal import Literal
from tests.replicas import ThreadCollectives
from torchtitan_scape import Scape
from torchtitan_scape.core.bf16_weights import ScaledTensor, hold_in_bfloat16
from torchtitan_scape.core.parameters import local
from torchtitan_scape.kernels.scape.reference import mask_indices
from torchtitan_scape.methods.scape.options import ScapeOptions

SPARSE: list[tuple[int, ...]] = [(7, 9), (33, 5), (1, 1), (20, 20)]
DENSE: list[tuple[int, ...]] = [(7,), (1,)]


def draw(seed: int, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def gradient(step: int, replica: int, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    return draw(1000 + 97 * step + replica, shapes)


def make_scape(params: Any, **options: Any) -> Scape:
    """Build `Scape` from options of the section and arguments of the constructor.

    What it keeps of its weights is read off the parameters.
    """
    params = list(params)
    first = params[0]["params"][0] if isinstance(params[0], dict) else params[0]
    weight = first[1] if isinstance(first, tuple) else first
    if isinstance(local(weight), ScaledTensor):
        options.setdefault("weights_dtype", "bfloat16")
    section = {f.name: options.pop(f.name) for f in fields(ScapeOptions) if f.name in options}
    return Scape(params, options=ScapeOptions(**section), **options)


def train(
    collectives: ThreadCollectives | None,
    steps: int,
    shapes: list[tuple[int, ...]] = SPARSE + DENSE,
    probe: Any = None,
    bf16_weights: bool = False,
    **options: Any,
) -> list[list[Tensor]]:
    """Parameters after every step; `probe(optimizer, step)` is called after each."""
    parameters = nn.ParameterList(draw(0, shapes))
    if bf16_weights:
        hold_in_bfloat16(parameters, scaled=options.get("update") == "sharded")
    options = {"lr": 1e-2, "block_size": 16, **options}
    optimizer = make_scape([(f"p{i}", p) for i, p in enumerate(parameters)], replicas=collectives, **options)
    replica = collectives.replica if collectives else 0
    history = []
    for step in range(steps):
        for p, g in zip(parameters, gradient(step, replica, shapes), strict=True):
            p.grad = g
        optimizer.step()
        history.append([p.detach() * 1.0 for p in parameters])
        if probe:
            probe(optimizer, step)
    return history


def positions(optimizer: Scape, tensor: int) -> Tensor:
    """Where the mask in use is set in a sparsified tensor; as many as the layout says."""
    layout, in_use = optimizer.method.passes.layout, optimizer.method.masks.in_use
    bits, nnz = layout.bits(in_use, tensor), layout.nnz(tensor, in_use.density, optimizer.method.passes.selection)
    assert bits is not None
    indices = mask_indices(bits, layout.sizes[tensor], nnz)
    assert indices.numel() == nnz
    return indices


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def literal(
    replicas: int, steps: int, shapes: list[tuple[int, ...]] = SPARSE + DENSE, **options: Any
) -> list[list[Tensor]]:
    values, sparse = draw(0, shapes), sum(len(shape) > 1 for shape in shapes)
    reference = Literal(values[:sparse], values[sparse:], replicas, **options)
    history = []
    for step in range(steps):
        reference.step([gradient(step, r, shapes) for r in range(replicas)])
        history.append([p.clone() for p in reference.theta])
    return history


def sum_gradients(model: nn.Module) -> None:
    """Let FSDP2 add gradients, in place of the mean."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def copied(state: Any) -> Any:
    """A state dict whose tensors are copies."""
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list):
        return [copied(value) for value in state]
    return state.clone() if isinstance(state, Tensor) else state


def lasting(optimizer: Scape) -> list[Tensor]:
    """Return what determines the next steps, beside the parameters and the mask."""
    passes: Any = optimizer.method.passes
    common = [passes.owner.common] if passes.owner else []
    return [*passes.kept(), passes.code_residual, *common]


def resume(collectives: ThreadCollectives, at: int, **options: Any) -> tuple[Scape, Scape]:
    """An optimizer after ten steps, and one that has its state of step `at` and took the rest: bitwise equal so far."""
    shapes, made = SPARSE + DENSE, []
    options = {"lr": 1e-2, "block_size": 16, "density_warmup_steps": 4, "replicas": collectives, **options}
    parameters = [nn.Parameter(p) for p in draw(0, shapes)]
    made.append((make_scape(parameters, **options), parameters))
    for step in range(10):
        for optimizer, own in made:
            for p, g in zip(own, gradient(step, collectives.replica, shapes), strict=True):
                p.grad = g
            optimizer.step()
        if step == at:
            saved = copied(made[0][0].state_dict())
            copies = [nn.Parameter(p.detach().clone()) for p in parameters]
            made.append((make_scape(copies, **options), copies))
            made[1][0].load_state_dict(saved)
    (whole, _), (resumed, _) = made
    assert torch.equal(flat([p.detach() for p in copies]), flat([p.detach() for p in parameters]))
    return whole, resumed
