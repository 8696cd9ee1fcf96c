"""`replicate`: any synchronization method in any training loop."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.core.renamed_keys import renamed
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.replica.groups import RealReplicas, replicas_of
from torchtitan_scape.replica.loop_checks import LoopChecks
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.replica.setup_checks import ONE_OPTIMIZER, refuse_wrappers
from torchtitan_scape.replica.simulation import Named
from torchtitan_scape.topology.in_process import OneReplica, SimulatedReplicas

MethodChoice: TypeAlias = MethodOptions | str | dict[str, Any]
ReplicaChoice: TypeAlias = RealReplicas | SimulatedReplicas


def replicate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Callable[[Named], torch.optim.Optimizer],
    method: MethodChoice = "dense",
    replicas: ReplicaChoice = None,
    *,
    max_norm: float | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    total_steps: int = 0,
    overlap: bool = False,
    max_skipped_steps: int = 10,
    consistency_interval: int = 100,
    kernels: str = "auto",
) -> ReplicaOptimizer:
    """Wrap an optimizer so that `step()` synchronizes the replicas, clips by the synchronized norm and updates.

    It serves the replicate axis as `fully_shard` serves the shard axis. PyTorch's private function of the same name
    (`torch.distributed._composable.replicate`) is DDP; this one all-reduces nothing in the backward pass unless
    `overlap` is set, and the method decides what is exchanged.

    Do not wrap the model in DistributedDataParallel, and do not call `clip_grad_norm_` before `step()`: replicas still
    differ there. Gradient accumulation needs nothing special; with `overlap`, call `prepare_last_backward()` before the
    last backward pass of a step.

    Args:
        model: any module; plain parameters, or DTensors sharded by FSDP2 over one mesh dimension. The weights of
            replica 0 are broadcast.
        optimizer: a `torch.optim` optimizer on all trainable parameters of the model, or a function that builds one on
            named parameters (needed for simulated replicas of methods with per-replica weights).
        method: the options of a method, its name for the defaults, or a dict as a TOML section has it:
            {"method": "sparta", "interval": 3}.
        replicas: the ranks that hold the same shard: a ProcessGroup, a one-dimensional DeviceMesh such as
            `mesh["replicate"]`, `ReplicaGroups` for several link levels, or `SimulatedReplicas`; None for one replica
            on all ranks of the job.
        max_norm: bound on the norm of the synchronized gradient over the whole model; None for no clipping.
        reduction: "mean" if each replica averages the loss over its own batch; "sum" if the loss is divided by the
            global number of tokens.
        total_steps: of the run, for methods with a schedule; 0 if unknown.
        overlap: start the exchange during the backward pass, if the method supports it. Gradients must not be changed
            between the backward pass and `step`. Changes of the weights of `quantized_update` then arrive during the
            model's next forward pass: call `finish_previous_step()` before other code reads weights.
        max_skipped_steps: raise `NonFiniteGradientError` after so many steps in a row with a non-finite gradient.
        consistency_interval: steps between two calls of `check_consistency`; 0 for none. One reads the parameters, and
            waits for the device.
        kernels: "auto" (Triton on a GPU, PyTorch on a CPU), "triton" or "torch".

    Returns:
        The optimizer of the training loop. Learning-rate schedulers work on it or on the wrapped optimizer.

    Raises:
        ValueError: for unsupported parameters, options or optimizers, and for replicas that disagree on any of them.
    """
    refuse_wrappers(model)
    if isinstance(optimizer, ReplicaOptimizer):
        raise ValueError("the optimizer is the result of replicate() already; pass the optimizer inside it")
    options = _options(method)
    if isinstance(optimizer, torch.optim.Optimizer):
        _name_parameters(model, optimizer)
    if overlap and not options.cost().supports_overlap:
        raise ValueError(
            f"overlap = True does not go with method {options.method_name()!r} and these options; leave it out"
        )
    replicated = ReplicaOptimizer(
        optimizer,
        options,
        _replicas(replicas, model),
        model=model,
        max_norm=max_norm,
        reduction=reduction,
        total_steps=total_steps,
        overlap=overlap,
        max_skipped_steps=max_skipped_steps,
        consistency_interval=consistency_interval,
        kernels=kernels,
    )
    if len(replicated.replicas.endpoints) == 1:
        LoopChecks(replicated)
    return replicated


def _options(method: MethodChoice) -> MethodOptions:
    """Return the options of a method. Raises ValueError for an unknown name or option."""
    if isinstance(method, MethodOptions):
        return method
    section = {"method": method} if isinstance(method, str) else dict(method)
    name = section.pop("method", None)
    if name not in METHODS:
        raise ValueError(f"method is {name!r}; it must be one of {', '.join(METHODS)}")
    entry = METHODS[name]
    for key, value in section.items():
        if message := renamed(entry.options.section, key, value):
            raise ValueError(message)
    known = [field.name for field in fields(entry.options)]
    if unknown := sorted(section.keys() - set(known)):
        raise ValueError(f"method {name!r} has no option {unknown[0]!r}; its options are {', '.join(known) or 'none'}")
    return entry.options(**section)


def _name_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give the param groups the model's parameter names. Raises ValueError if the optimizer has other parameters."""
    names = {id(p): name for name, p in model.named_parameters()}
    optimized: set[int] = set()
    for group in optimizer.param_groups:
        foreign = [p for p in group["params"] if id(p) not in names]
        if foreign:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(foreign[0].shape)} that the model does not contain; "
                "build the optimizer after fully_shard, on model.parameters()"
            )
        group["param_names"] = [names[id(p)] for p in group["params"]]
        optimized.update(id(p) for p in group["params"])
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in optimized]
    if left:
        raise ValueError(
            f"{len(left)} trainable parameters are not in the optimizer, first {left[0]!r}; {ONE_OPTIMIZER}; set "
            "requires_grad to False for parameters that are not trained"
        )


def _replicas(replicas: ReplicaChoice, model: nn.Module) -> OneReplica | SimulatedReplicas:
    if isinstance(replicas, SimulatedReplicas):
        return replicas
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    group = {"params": [p for _, p in trained], "param_names": [name for name, _ in trained]}
    return OneReplica(replicas_of(replicas, collect_shards([group])))
