"""Checks of the use of a replica optimizer: its arguments when it is built, the training loop, and its `state_dict`."""

import gc
import logging
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from torchtitan_scape.core.parameters import Shard, check_contiguous, copies_key, local, stored, weak_hook
from torchtitan_scape.kernels.backends import choose_backend
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.optimizers.pytorch import difference_from_adamw, has_step_of
from torchtitan_scape.optimizers.registry import OPTIMIZERS
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.groups import gather_lists
from torchtitan_scape.topology.torch_version import fsdp_copies

logger = logging.getLogger(__name__)

# Optimizers whose step is not a function of one dense gradient, and why.
_UNSUPPORTED = {
    torch.optim.LBFGS: "evaluates the loss several times in a step",
    torch.optim.SparseAdam: "needs sparse gradients, which no method exchanges",
}
# What to do about a setting that differs between replicas.
_ADVICE = {
    "kernels": "they divide the gradients differently: install triton on all machines, or set kernels to 'torch' on all"
}

DCP = (
    "Every rank can save into one checkpoint instead, which load_checkpoint() loads with another number of ranks, "
    "method or options too: torch.distributed.checkpoint.save(checkpoint_states(model, optimizer), "
    "checkpoint_id=path), with both functions from torchtitan_scape"
)
ONE_OPTIMIZER = (
    "replicate() takes one optimizer with all trainable parameters: use param groups for different rates, and in place "
    "of two optimizers, Muon and AdamW, pass torchtitan_scape.Muon(model.named_parameters()), which contains both"
)


WAIT_SECONDS = 300.0  # the first rank waits so long for the others, which may be late
WARNING_SECONDS = 10.0  # after which it says that it waits
_CALLS: Counter[str] = Counter()  # of this process, by ranks and name

# A gradient and its version, which every change in place increments. That of a DTensor excludes what FSDP2 adds to its
# local tensor.
_Seen = tuple[ReferenceType[Tensor], int]


def check_arguments(max_norm: float | None, reduction: str) -> None:
    """Raise ValueError for values that no replica optimizer accepts."""
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it must be positive; pass None to switch clipping off")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")


def check_optimizer(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Raise ValueError for an optimizer whose algorithm does not work with the method `name`.

    Most methods work with any optimizer but some of this project's. Those that compute with its moments, or update the
    parameters themselves, need an algorithm that they know.
    """
    given = type(optimizer).__name__
    for kind, reason in _UNSUPPORTED.items():
        if isinstance(optimizer, kind):
            raise ValueError(f"{given} {reason}; pass another optimizer, such as AdamW")
    known = {key for key, one in OPTIMIZERS.items() if has_step_of(optimizer, one.kind)}
    entry = METHODS[name]
    method, accepted = entry.method, " or ".join(entry.optimizers)
    must_be_known = entry.options.holds_optimizer_state or method.reads_moments
    if not known.intersection(entry.optimizers) and (known or must_be_known):
        raise ValueError(
            f"method {name!r} works with {accepted}, not with {given} ({type(optimizer).__module__}); pass one of "
            "these as optimizer, or a subclass with the same step"
        )
    if isinstance(optimizer, Muon) and not entry.options.divides_update:
        optimizer.check_dtypes()
    if must_be_known and (difference := difference_from_adamw(optimizer)):
        raise ValueError(
            f"method {name!r} works with {accepted} without amsgrad, maximize and L2 weight decay, and this {given} "
            f"has {difference}; pass torch.optim.AdamW without it"
        )


def refuse_wrappers(model: nn.Module) -> None:
    """Raise ValueError for a model inside, or with parts inside, a wrapper that synchronizes or flattens parameters."""
    for name, module in model.named_modules():
        which = f"its module {name!r}" if name else "it"
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"the model is refused because {which} is wrapped in DistributedDataParallel, which all-reduces the "
                "gradients in the backward pass; pass the module inside it (model.module), and let replicate() "
                "synchronize"
            )
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(
                f"the model is refused because {which} is wrapped in FullyShardedDataParallel (FSDP1), whose flat "
                "parameters have no position in the model; shard with torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        if isinstance(module, FSDPModule):
            refuse_copies(module, f"the model is refused because {which} is")


def refuse_copies(module: FSDPModule, what: str) -> None:
    """Raise ValueError for a module that FSDP2 replicates, on a two-dimensional mesh (HSDP) or without shards.

    Args:
        what: Start of the message, for example "the parameters are".
    """
    if (copies := fsdp_copies(module)) > 1:
        raise ValueError(
            f"{what} on a mesh on which FSDP2 has {copies} copies of the parameters (HSDP) and all-reduces their "
            "gradients in the backward pass; pass the dimension of the shards alone to fully_shard, mesh['shard'] of a "
            "mesh ('replicate', 'shard'), and mesh['replicate'] as replicas"
        )


def refuse_synchronized(shards: Sequence[Shard]) -> None:
    """Raise ValueError if DistributedDataParallel holds the parameters, as in Fabric's `setup`, or FSDP2 with replicas.

    They would all-reduce all gradients before the method sees them, unless `noop_hook` is registered as the hook of
    DDP. A module can be wrapped after the optimizer is built, and no parameter leads to its modules, so all objects of
    this process are searched.
    """
    parameters = {id(shard.parameter) for shard in shards}
    objects = gc.get_objects()
    wrappers = {kind for kind in set(map(type, objects)) if issubclass(kind, (DistributedDataParallel, FSDPModule))}
    for one in objects if wrappers else ():
        if type(one) not in wrappers or not any(id(p) in parameters for p in one.parameters()):
            continue
        if isinstance(one, FSDPModule):
            refuse_copies(one, "the parameters are")
        elif not any(hook.__name__ == "noop_hook" for hook, _ in one._comm_hooks):
            raise ValueError(
                "the parameters belong to a DistributedDataParallel module, which all-reduces the gradients in the "
                "backward pass; use the module inside it. With Lightning Fabric or Accelerate, do not pass the "
                "model to setup() or prepare(). If a trainer always wraps the model, call register_comm_hook(None, "
                "noop_hook) of the wrapper before the first step; noop_hook is in "
                "torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks"
            )


def count_copies_once(shards: Sequence[Shard], collectives: ReplicaCollectives) -> None:
    """Set `counted` of the shards: of the ranks with copies of the same entries, only the first counts. Collective.

    Tensor parallelism leaves such copies, of norms for example, as DTensors or as plain tensors. Plain parameters of
    one name are copies.
    """
    group = collectives.groups.model
    if group is None or collectives.is_fake:
        return
    own, rank = [copies_key(shard) for shard in shards], collectives.model_rank
    first: dict[Any, int] = {}
    for other, keys in gather_lists(group, [(rank, own)]):
        for key in keys:
            first[key] = min(other, first.get(key, other))
    for shard, key in zip(shards, own, strict=True):
        shard.counted = key is None or first[key] == rank


def refuse_converted(shards: Sequence[Shard], method: str, collectives: ReplicaCollectives) -> None:
    """Raise ValueError on every rank if the memory of a parameter has another order than its entries. Collective.

    The model may have been converted since `check_contiguous` ran at construction.
    """
    error = ""
    try:
        check_contiguous(shards, method)
    except ValueError as refused:
        error = str(refused)
    raise_on_all_ranks(collectives, error)


def refuse_unreduced(shards: Sequence[Shard], gradients: Sequence[Tensor], collectives: ReplicaCollectives) -> None:
    """Raise ValueError if the ranks of a replica have different gradients of a plain parameter. Collective.

    FSDP2 reduces only the gradients of modules on which `fully_shard` was called. Copies of other parameters would
    diverge, and one of them would be saved. About 1,000 entries of each are compared; differences below a thousandth of
    the norm of all are rounding.
    """
    group = collectives.groups.model
    if group is None or collectives.is_fake:
        return
    own = {
        shard.name: gradient.view(-1)[:: 1 + shard.size // 1024].float().cpu()
        for shard, gradient in zip(shards, gradients, strict=True)
        if copies_key(shard) == (shard.name,)
    }
    least, found = 1e-6 * sum(_square(values) for values in own.values()), dict[str, None]()
    for other in gather_lists(group, [own]):
        for name, values in own.items():  # stages of a pipeline have different parameters
            if name in other and other[name].shape == values.shape:
                difference = _square(values - other[name])
                if difference > max(least, 0.01 * max(_square(values), _square(other[name]))):
                    found[name] = None
    raise_on_all_ranks(
        collectives,
        f"{len(found)} parameters, first {next(iter(found))!r}, are not sharded, so that the ranks of a replica have "
        "copies, whose gradients differ: FSDP2 does not reduce them; call fully_shard on the model too, after its "
        "blocks, or reduce these gradients over the ranks of the replica before step()"
        if found
        else "",
    )


def _square(values: Tensor) -> float:
    return float(values.square().sum())


def frozen_parameters(
    model: nn.Module | None, shards: Sequence[Shard], collectives: ReplicaCollectives
) -> list[tuple[str, Tensor]]:
    """Return the names and the stored values of the frozen parameters of the model. Collective.

    Raises:
        ValueError: the optimizer has one of them. Raised on every rank.
    """
    frozen = [shard.name for shard in shards if not shard.parameter.requires_grad]
    error = ""
    if frozen:
        error = (
            f"the optimizer has the frozen parameter {frozen[0]!r}, which weight decay and momentum would change; pass "
            "[(name, p) for name, p in model.named_parameters() if p.requires_grad] to the optimizer"
        )
    raise_on_all_ranks(collectives, error)
    parameters = model.named_parameters() if model is not None else ()
    return [(name, stored(parameter)) for name, parameter in parameters if not parameter.requires_grad]


def chosen_kernels(collectives: ReplicaCollectives, kernels: str, shards: Sequence[Shard]) -> str:
    """Return the kernels of this rank, "triton" or "torch". Collective.

    Raises:
        ValueError: on every rank if one cannot run `kernels`.
    """
    chosen = error = ""
    try:
        chosen = choose_backend(kernels, shards[0].device, {shard.parameter.dtype for shard in shards})
    except ValueError as raised:
        error = str(raised)
    raise_on_all_ranks(collectives, error)
    return chosen


def make_equal(
    collectives: ReplicaCollectives,
    shards: Sequence[Shard],
    optimizer: torch.optim.Optimizer,
    model: nn.Module | None,
    kernels: str,
    settings: dict[str, Any],
    run_settings: dict[str, Any],
) -> dict[str, Any]:
    """Check that all replicas have equal settings, parameters and optimizers, and broadcast the weights. Collective.

    Args:
        settings: those that a checkpoint depends on; at least "method".

    Returns:
        `settings`, and a checksum of the parameters.

    Raises:
        ValueError: on every rank if two replicas differ, or one cannot run `kernels`.
    """
    frozen = frozen_parameters(model, shards, collectives)
    parameters = zlib.crc32(repr([(s.name, s.size, s.columns, s.group) for s in shards]).encode())
    settings = {"method": settings["method"], "parameters": parameters, **settings}
    run_settings = run_settings | {
        "optimizer": type(optimizer).__name__,
        "kernels": chosen_kernels(collectives, kernels, shards),
        **(optimizer.fingerprint() if isinstance(optimizer, Muon) else {}),
        "frozen parameters": zlib.crc32(repr([(name, tuple(t.shape), t.dtype) for name, t in frozen]).encode()),
    }
    check_replicas_agree(collectives, settings | run_settings, optimizer.param_groups)
    trained = [stored(shard.parameter) for shard in shards]
    collectives.broadcast_from_first([*trained, *(values for _, values in frozen)])
    return settings


@torch.no_grad()
def broadcast_loaded_weights(
    collectives: ReplicaCollectives, shards: Sequence[Shard], anchors: Mapping[str, Tensor]
) -> bool:
    """Broadcast the weights of the first replica if some differ from the anchors. Return whether. Collective.

    They were loaded into the model after the optimizer was built; until the first exchange they equal the anchors.
    """
    parameters = [stored(shard.parameter) for shard in shards]
    starts = [anchors[s.name].to(p.device, p.dtype) for s, p in zip(shards, parameters, strict=True)]
    loaded = not all(torch.equal(p, start) for p, start in zip(parameters, starts, strict=True))
    if not any(collectives.gather_objects(loaded)):
        return False
    collectives.broadcast_from_first(parameters)
    logger.info("weights were loaded after the optimizer was built; all replicas start from those of the first one")
    return True


def raise_on_all_ranks(collectives: ReplicaCollectives, error: str) -> None:
    """Raise ValueError on every rank if one has an error: each its own, or else the first one. Collective."""
    errors = [other for other in collectives.gather_objects(error) if other]
    if errors:
        raise ValueError(error or errors[0])


def check_replicas_agree(
    collectives: ReplicaCollectives, settings: dict[str, Any], param_groups: Sequence[dict[str, Any]]
) -> None:
    """Compare settings, and the options of the param groups, over the replicas. Collective.

    Raises:
        ValueError: on every rank if two replicas differ, with the setting and both values.
    """
    for i, group in enumerate(param_groups):
        for key, value in group.items():
            value = value.tolist() if isinstance(value, torch.Tensor) else value
            if isinstance(value, bool | int | float | str | tuple | None):
                settings = settings | {f"{key} of group {i}": value}
    ranks, own = collectives.peers
    error = ""
    for rank, other in zip(ranks, collectives.gather_from_replicas(settings), strict=True):
        different = [key for key in {**settings, **other} if other.get(key) != settings.get(key)]
        if different and not error:
            key = different[0]
            advice = _ADVICE.get(key, "every replica needs the same model, optimizer and options")
            error = f"rank {rank} has {key}={other.get(key)!r}, rank {ranks[own]} has {settings.get(key)!r}; {advice}"
    raise_on_all_ranks(collectives, error)


# ------------------------------------------------------------------------------------------------- training loops


class LoopChecks:
    """Warns once about each mistake in a loop that a step can notice, on the first rank.

    It follows the gradient of one parameter, the first that receives one. With DTensors it notices fewer mistakes:
    FSDP2 runs no hook before it accumulates, and foreach functions, as in `clip_grad_norm_`, keep their version.

    Args:
        optimizer: a `ReplicaOptimizer` of a single replica per process.
        shards: its parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, shards: Sequence[Shard]) -> None:
        self._shards, self._is_first, self._warned = shards, True, set[str]()
        self._parameter: Tensor | None = None
        self._after_backward: _Seen | None = None
        self._after_step: _Seen | None = None
        self._left: Tensor | None = None  # whether the backward pass adds to values that are not zero
        self._may_read, self._has_none = True, False
        if (dist.get_rank() if dist.is_initialized() else 0) == 0:
            trained = [shard.parameter for shard in self._shards if shard.parameter.requires_grad]
            self._hooks = [(p, p.register_post_accumulate_grad_hook(weak_hook(self._on_backward))) for p in trained]
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._on_step)

    def _follow(self, parameter: Tensor) -> None:
        """Follow this parameter, and remove the hooks of the others."""
        self._parameter = parameter
        for other, hook in self._hooks:
            if other is not parameter:
                hook.remove()
        self._hooks = []
        parameter.register_hook(weak_hook(self._before_accumulation))

    def _before_accumulation(self, _: Tensor) -> None:
        """Compute whether an unchanged gradient of the last step has values. `torch.autograd.grad` calls this, too."""
        # Writes to `grad.data` do not change the version, so that the values are needed; they are read once in a run.
        is_left = self._may_read and self._changes_since(self._after_step) == 0
        self._left = local(self._parameter.grad).any() if is_left else None  # type: ignore[union-attr, arg-type]

    def _on_backward(self, parameter: Tensor) -> None:
        if self._parameter is None:
            self._follow(parameter)
        if self._left is not None:
            self._may_read = False
            if self._left.item():
                self._warn(
                    "the gradients of the last step were not cleared before this backward pass, which adds to them; "
                    "call optimizer.zero_grad() after step(), which uses their storage as scratch space"
                )
        self._left, self._after_step, self._after_backward = None, None, self._seen()

    def _before_step(self, *_: Any) -> None:
        if self._changes_since(self._after_backward):
            self._warn(
                "the gradients were changed between the backward pass and step(), where they are those of one replica; "
                "that is right only for a change that is the same on all replicas, such as a constant factor. If "
                "clip_grad_norm_() does it, remove it and pass max_norm to replicate(), which clips by the "
                "synchronized norm"
            )
        missing = [shard.name for shard in self._shards if shard.parameter.grad is None] if self._is_first else []
        if 0 < len(missing) < len(self._shards):  # without any, a closure runs the backward pass later
            self._warn(
                f"{len(missing)} parameters have no gradient, first {missing[0]!r}; step() treats it as zero, so that "
                "momentum and weight decay change them, where PyTorch's optimizers skip them. Do not pass parameters "
                "that are never used to the optimizer"
            )
        self._has_none = len(missing) == len(self._shards)
        self._is_first = False

    def _on_step(self, *_: Any) -> None:
        if self._has_none and self._parameter is None:
            self._warn(
                "no parameter of the optimizer has a gradient. fully_shard() and load_state_dict(assign=True) replace "
                "the parameters of a model: call them before the optimizer is built"
            )
        self._after_backward, self._after_step = None, self._seen()

    def _seen(self) -> _Seen | None:
        gradient = None if self._parameter is None else self._parameter.grad
        return None if gradient is None else (ref(gradient), gradient._version)

    def _changes_since(self, seen: _Seen | None) -> int | None:
        """Return how often the gradient was changed since then; None if it is another tensor, or there is none."""
        before = None if seen is None else seen[0]()
        if self._parameter is None or seen is None or before is None or self._parameter.grad is not before:
            return None
        return before._version - seen[1]

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)


class JointCalls:
    """Notices a call of some ranks only, such as `if rank == 0: torch.save(optimizer.state_dict(), ...)`.

    Such a call would save the state of these ranks alone, or wait for the others until the group's timeout. The first
    rank waits on the host until all others have made the same call, and raises an error if they do not. The others do
    not wait, because the first one may be late: it often evaluates or writes alone before. Calls that load are not
    checked, because the ranks may have read files of different sizes before.

    Construction is collective.
    """

    def __init__(self, collectives: ReplicaCollectives) -> None:
        self._ranks: list[int] = []
        if dist.is_initialized() and not collectives.is_fake:
            self._ranks = sorted(set(collectives.gather_objects(dist.get_rank())))

    def expect(self, call: str, advice: str = "call it on every rank") -> None:
        """Check that all ranks make this call. It returns at once on all ranks but the first.

        Args:
            call: name of the function for the message.
            advice: the end of the message.

        Raises:
            ValueError: on the first rank, after `WAIT_SECONDS` without the call of another one.
        """
        if len(self._ranks) < 2:
            return
        store = dist.distributed_c10d._get_default_store()
        key = f"torchtitan_scape/{zlib.crc32(repr(self._ranks).encode())}/{call}"
        numbered = f"{key}/{_CALLS[key]}"
        _CALLS[key] += 1
        arrived = store.add(numbered, 1)
        if dist.get_rank() != self._ranks[0]:
            return
        begin, warned = time.monotonic(), False
        while arrived < len(self._ranks) and (waited := time.monotonic() - begin) < WAIT_SECONDS:
            if waited > WARNING_SECONDS and not warned:
                warned = True
                logger.warning(
                    f"{call}() was called on {arrived} of {len(self._ranks)} ranks; rank {self._ranks[0]} waits for "
                    f"the others, {WAIT_SECONDS:.0f} s at most: {advice}"
                )
            time.sleep(0.005)
            arrived = store.add(numbered, 0)
        store.delete_key(numbered)
        if arrived < len(self._ranks):
            _CALLS[key] -= 1  # the others have not counted it
            raise ValueError(
                f"{call}() was called on {arrived} of {len(self._ranks)} ranks within {WAIT_SECONDS:.0f} s, rank "
                f"{self._ranks[0]} among them; {advice}"
            )


# ----------------------------------------------------------------------------------------- `state_dict` of a rank


def refuse_dcp(caller: str) -> None:
    """Raise ValueError if the module `caller`, which asks for the state of one of several replicas, is of DCP."""
    if caller.startswith("torch.distributed.checkpoint"):
        raise ValueError(
            "torch.distributed.checkpoint stores one of the replicas' entries of the same name, so the others' state "
            "would be lost; save checkpoint_states(model, optimizer) and load with load_checkpoint(), both from "
            "torchtitan_scape"
        )


def state_mismatch(saved: dict[str, Any] | None, present: dict[str, Any]) -> str:
    """Return why the saved state of a rank cannot be loaded on this one, or an empty string.

    Args:
        saved: the entry "replica" of `ReplicaOptimizer.state_dict`.
        present: the layout of this rank.
    """
    if saved is None:
        return (
            "the state has no 'replica' entry; save what ReplicaOptimizer.state_dict() returns, each rank its own "
            "(helpers that gather optimizer state by parameter drop the method's state). Load the state of a run "
            "that was trained without replicate() into the optimizer that you pass to replicate(), before the call"
        )
    for key, value in present.items():
        if saved["layout"].get(key) == value:
            continue
        different = f"the saved state has {key}={saved['layout'].get(key)!r}, this run has {value!r}; "
        if key in ("replica", "shard"):
            return f"{different}ranks differ, so every rank has to load the file that it saved. {DCP}"
        return (
            f"{different}the file of a rank needs the layout and options that saved it. To change them, load the files "
            f"with these, and save once more. {DCP}"
        )
    return ""
