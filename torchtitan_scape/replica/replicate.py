"""`replicate`: any synchronization method in any training loop; `Scape`: the SCAPE method in one constructor."""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_scape.core.options import renamed
from torchtitan_scape.core.parameters import Shard, collect_shards, model_group_of
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.methods.scape.method import ScapeMethod
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.optimizers.elementwise import AdamS
from torchtitan_scape.replica.checks import ONE_OPTIMIZER, LoopChecks, refuse_wrappers
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.replica.simulation import Named
from torchtitan_scape.topology.collectives import OneReplica, ReplicaCollectives
from torchtitan_scape.topology.groups import ReplicaGroups
from torchtitan_scape.topology.in_process import SimulatedReplicas, collectives_of

MethodChoice: TypeAlias = MethodOptions | str | dict[str, Any]
RealReplicas: TypeAlias = ProcessGroup | DeviceMesh | ReplicaGroups | ReplicaCollectives | None
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

    It serves the replicate axis as `fully_shard` serves the shard axis. Do not wrap the model in
    DistributedDataParallel, and do not call `clip_grad_norm_` before `step()`: replicas still differ there.

    Args:
        model: with plain parameters, or DTensors sharded by FSDP2 over one mesh dimension. The weights of replica 0 are
            broadcast.
        optimizer: a `torch.optim` optimizer on all trainable parameters of the model, or a function that builds one on
            named parameters (needed for simulated replicas of methods with per-replica weights).
        method: the options of a method, its name, or a dict as a TOML section: {"method": "sparta", "interval": 3}.
        replicas: the ranks that hold the same shard: a ProcessGroup, a one-dimensional DeviceMesh, `ReplicaGroups` for
            several link levels, or `SimulatedReplicas`; None for one replica on all ranks of the job.
        max_norm: bound on the norm of the synchronized gradient over the whole model; None for no clipping.
        reduction: "mean" if each replica averages the loss over its batch; "sum" if all divide by the global tokens.
        total_steps: of the run, for methods with a schedule; 0 if unknown.
        overlap: start the exchange during the last backward pass of a step: call `prepare_last_backward()` before it,
            do not change gradients after it, and call `finish_previous_step()` before other code than the next forward
            pass reads weights.
        max_skipped_steps: raise `NonFiniteGradientError` after so many steps in a row with a non-finite gradient.
        consistency_interval: steps between two calls of `check_consistency`, which waits for the device; 0 for none,
            also after the first step and in `checkpoint_states`.
        kernels: "auto" (Triton on a GPU, PyTorch on a CPU), "triton" or "torch".

    Raises:
        ValueError: for unsupported parameters, options or optimizers, and for replicas that disagree on any of them.
    """
    options = _options(method, overlap)
    _check_parameters(model, optimizer)
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
        LoopChecks(replicated, replicated.shards())
    return replicated


def _options(method: MethodChoice, overlap: bool) -> MethodOptions:
    """Return the options of a method. Raises ValueError if it does not support `overlap`."""
    options = method if isinstance(method, MethodOptions) else _options_of(method)
    if overlap and not options.supports_overlap():
        raise ValueError(
            f"overlap = True does not go with method {options.method_name()!r} and these options; leave it out"
        )
    return options


def _options_of(method: str | dict[str, Any]) -> MethodOptions:
    """Return the options in a section. Raises ValueError for an unknown name or option."""
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


def _check_parameters(model: nn.Module, optimizer: Any) -> None:
    """Give the param groups the model's parameter names. Raises ValueError if the optimizer has other parameters."""
    refuse_wrappers(model)
    if isinstance(optimizer, ReplicaOptimizer):
        raise ValueError("the optimizer is the result of replicate() already; pass the optimizer inside it")
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
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


def replicas_of(replicas: RealReplicas, shards: Iterable[Shard]) -> ReplicaCollectives:
    """Return the collectives between the ranks that hold the same shards.

    Raises:
        ValueError: a mesh of several dimensions, or no replicas in a job with more ranks than those of the model.
    """
    if isinstance(replicas, ReplicaCollectives):
        return replicas
    if isinstance(replicas, ReplicaGroups):
        return collectives_of(replicas, None)
    model = model_group_of(shards)
    if isinstance(replicas, DeviceMesh):
        if replicas.ndim != 1:
            raise ValueError(f"replicas is a mesh of {replicas.ndim} dimensions; pass one of them: mesh['replicate']")
        replicas = replicas.get_group()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    own = dist.get_world_size(model) if model else 1
    if replicas is None and own < ranks:
        raise ValueError(
            f"replicas is None, but the job has {ranks} ranks and the model is on {own} of them, so the others would "
            "train models of their own; pass dist.group.WORLD or mesh['replicate'], or, if this is intended, a process "
            "group with this rank alone"
        )
    return collectives_of(None if replicas is None or dist.get_world_size(replicas) == 1 else replicas, model)


class Scape(ReplicaOptimizer):
    """AdamS with a sparse, delayed-mask exchange of the first moment over replicas.

    Use it without DDP: it synchronizes the replicas. The start is that of replica 0: its parameters are broadcast. See
    `ScapeMethod` for the dtypes of the parameters, and `ReplicaOptimizer` for the step.

    Args:
        params: named parameters (`model.named_parameters()`), or dicts of them with their own `lr`, `weight_decay`,
            `betas` or `eps`; plain tensors or DTensors.
        options: see `ScapeOptions`, or a dictionary of its values.
        replicas, max_norm and others: see `replicate`; `ReplicaCollectives` are accepted as replicas, too.

    Raises:
        ValueError: for arguments out of range, integer parameters, and replicas that disagree on any of this.
    """

    methods: list[ScapeMethod]  # type: ignore[assignment]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        options: ScapeOptions | dict[str, Any] | None = None,
        replicas: RealReplicas = None,
        *,
        max_norm: float | None = 1.0,
        reduction: Literal["mean", "sum"] = "mean",
        max_skipped_steps: int = 10,
        kernels: str = "auto",
    ) -> None:
        rates = AdamS(params, lr, betas, eps, weight_decay, kernels, allocate_state=False)
        super().__init__(
            rates,
            ScapeOptions(**options) if isinstance(options, dict) else options or ScapeOptions(),
            OneReplica(replicas_of(replicas, collect_shards(rates.param_groups))),
            max_norm=max_norm,
            reduction=reduction,
            max_skipped_steps=max_skipped_steps,
            kernels=kernels,
        )

    @property
    def method(self) -> ScapeMethod:
        return self.methods[0]
