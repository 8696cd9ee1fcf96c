"""Interface to FSDP2's collectives on the shard axis: parameter groups and their rows, collective hooks, residuals.

FSDP2 all-gathers and reduce-scatters a parameter group as one flat buffer of shape (S, m) for S ranks, rank-major. One
row is a rank's share: the padded local shards of the group's parameters, concatenated. FSDP2 calls the all-gather hook
before every forward pass of a module and before every backward pass of a resharded module. It calls the reduce-scatter
hook after the backward pass of every micro-batch, on a separate stream. A hook completes its work within the call and
returns None, or returns a `Work` handle.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from torchtitan_scape.core.parameters import Shard, plain_name, store_gradient
from torchtitan_scape.kernels.common.tensors import add_in_order_
from torchtitan_scape.methods.imported import CheckpointReader
from torchtitan_scape.methods.interface import State
from torchtitan_scape.topology.groups import LevelGroups, ShardGroups
from torchtitan_scape.topology.layout import RankGroup
from torchtitan_scape.topology.shard_collectives import ShardLedger
from torchtitan_scape.topology.torch_version import (
    all_gather_into,
    fsdp_parameter_group,
    keep_unused_gradients,
    reduce_scatter_into,
)
from torchtitan_scape.topology.traffic import TrafficLedger

# Kinds of bytes in the ledger.
WEIGHTS, GRADIENTS, UPDATE, INDEX = KINDS = ("weights", "gradients", "update", "index")
RESIDUAL = "shard_residual"  # Kind of state in checkpoints.


@dataclass(frozen=True)
class ParameterSlice:
    """The slice of a row that belongs to one parameter.

    Attributes:
        name: Name of the parameter.
        start: First entry in the row.
        size: Number of entries, padding included.
        dims: Number of dimensions of the parameter.
    """

    name: str
    start: int
    size: int
    dims: int


@dataclass(frozen=True)
class ShardedParamGroup:
    """One parameter group of FSDP2.

    Attributes:
        name: Names of the group's modules, for messages.
        number: Index among the model's groups, in module order.
        gathered: Layout of the row that is all-gathered.
        reduced: Layout of the row that is reduce-scattered; parameters that are not trained are absent.
        modules: Modules of the group. Hooks are registered on any one of them.
    """

    name: str
    number: int
    gathered: tuple[ParameterSlice, ...]
    reduced: tuple[ParameterSlice, ...]
    modules: tuple[FSDPModule, ...]

    def check_gather(self, output: Tensor, local: Tensor, group: ProcessGroup, ranks: int) -> None:
        """Raise RuntimeError, on every rank, if FSDP2 all-gathers anything other than this group's row."""
        self._check("all-gather", group.size(), ranks, self.gathered, local.numel(), output.numel())

    def check_reduce(self, output: Tensor, flat: Tensor, group: ProcessGroup, op: Any, ranks: int) -> None:
        """Raise RuntimeError, on every rank, if FSDP2 does not reduce-scatter this group's flat buffer by a sum."""
        if op != dist.ReduceOp.SUM:
            raise RuntimeError(f"FSDP's reduce-scatter of {self.name} has op {op}; its replacement only supports SUM")
        self._check("reduce-scatter", group.size(), ranks, self.reduced, output.numel(), flat.numel())

    def check_row(self, reduced: Tensor) -> None:
        """Apply `check_reduce` to the tensor that FSDP2 passes to its all-reduce hook on a shard axis of one rank."""
        self._check("reduce-scatter", 1, 1, self.reduced, reduced.numel(), reduced.numel())

    def _check(
        self, collective: str, actual: int, ranks: int, slices: tuple[ParameterSlice, ...], local: int, total: int
    ) -> None:
        if actual != ranks:
            raise RuntimeError(f"FSDP's {collective} of {self.name} is over {actual} ranks; expected {ranks}")
        if (local, total) != (row := entries(slices), ranks * row):
            raise RuntimeError(
                f"FSDP's {collective} of {self.name} has {local} of {total} entries; expected {row} of {ranks * row} "
                f"({', '.join(slice_.name for slice_ in slices)}). A parameter that a micro-batch did not use, or "
                "that was frozen later, is missing from the flat buffer: freeze it from the start, or omit [sharding]"
            )


def entries(slices: Sequence[ParameterSlice]) -> int:
    """Return the number of entries of a row."""
    return sum(slice_.size for slice_ in slices)


def param_groups_of(model: nn.Module) -> list[ShardedParamGroup]:
    """Return the parameter groups of a model after `fully_shard`, each once; modules sharded together share one."""
    names = {id(p): plain_name(name) for name, p in model.named_parameters(remove_duplicate=False)}
    modules_by_state: dict[int, tuple[list[str], list[FSDPModule]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module_names, modules = modules_by_state.setdefault(id(module._get_fsdp_state()), ([], []))
            module_names.append(plain_name(f"{name}.").rstrip(".") or "the model's root")
            modules.append(module)
    groups: list[ShardedParamGroup] = []
    for module_names, modules in modules_by_state.values():
        if (group := fsdp_parameter_group(modules[0])) is not None:
            gathered = _row(group.fsdp_params, names)
            reduced = _row([p for p in group.fsdp_params if p.sharded_param.requires_grad], names)
            groups.append(ShardedParamGroup("+".join(module_names), len(groups), gathered, reduced, tuple(modules)))
    return groups


def _row(parameters: Sequence[Any], names: dict[int, str]) -> tuple[ParameterSlice, ...]:
    slices: list[ParameterSlice] = []
    start = 0
    for parameter in parameters:
        size, sharded = parameter.padded_sharded_param_size.numel(), parameter.sharded_param
        slices.append(ParameterSlice(names.get(id(sharded), "?"), start, size, sharded.ndim))
        start += size
    return tuple(slices)


@dataclass
class TrainPosition:
    """Position within a step.

    Attributes:
        micro_batch: Index of the micro-batch, from 0.
        last: Whether this is the last micro-batch of the step.
    """

    micro_batch: int = 0
    last: bool = True


class CollectiveHook:
    """Base of the replacements for FSDP2's collectives of one parameter group. They allocate buffers as FSDP2 does.

    The call of an all-gather writes the rows of all ranks into `output_tensor` (S * m,), bitwise equal on every rank.
    `input_tensor` (m,), the row of this rank, is a view of `output_tensor` and is overwritten. The call of a
    reduce-scatter writes this rank's row of the sum over ranks of `input_tensor` (S * m,) into `output_tensor` (m,).
    """

    __call__: Callable[..., Any]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


@dataclass(eq=False)
class CountedAllGather(CollectiveHook):
    """FSDP2's own all-gather, with its bytes counted."""

    rank_group: RankGroup
    ledger: ShardLedger

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False) -> Any:
        self.ledger.count_all_gather(self.rank_group, input_tensor.nbytes, WEIGHTS)
        return all_gather_into(output_tensor, input_tensor, group=group, async_op=async_op)


@dataclass(eq=False)
class CountedReduceScatter(CollectiveHook):
    """FSDP2's own reduce-scatter, with its bytes counted.

    On gloo a reduce-scatter moves as many bytes as an all-reduce. On a CPU, FP32 therefore uses an all-to-all and a
    local sum in rank order.
    """

    rank_group: RankGroup
    ledger: ShardLedger

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        if input_tensor.is_cpu and input_tensor.dtype == torch.float32 and op == dist.ReduceOp.SUM:
            self.ledger.count_all_to_all(self.rank_group, input_tensor.nbytes, GRADIENTS)
            parts = torch.empty_like(input_tensor)
            dist.all_to_all_single(parts, input_tensor, group=group)
            add_rows(parts.view(group.size(), -1), output_tensor)
            return None
        self.ledger.count_reduce_scatter(self.rank_group, input_tensor.nbytes, GRADIENTS)
        return reduce_scatter_into(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def add_rows(rows: Tensor, out: Tensor) -> None:
    """Write the FP32 sum of `rows` (k, ...) into `out` (...): in row order on a CPU, in a fixed order on a GPU."""
    if not rows.is_cpu:
        torch.sum(rows, 0, out=out)
        return
    out.copy_(rows[0])
    add_in_order_(out, rows[1:])


class WeightsVersion:
    """Version number of the weights. It invalidates caches and advances at the same points on all ranks."""

    def __init__(self) -> None:
        self._number = 0
        self._pending_change: Callable[[], bool] | None = None

    def now(self) -> int:
        """Return the version. This may wait for the device if a conditional change is pending."""
        changed, self._pending_change = self._pending_change, None
        if changed is not None and changed():
            self._number += 1
        return self._number

    def changed(self) -> None:
        """Record that the weights have changed."""
        self._number, self._pending_change = self._number + 1, None

    def changed_if(self, changed: Callable[[], bool]) -> None:
        """Record a change that took place only if `changed()` is true. `now` calls it at the next read."""
        if self._pending_change is None:
            self._pending_change = changed
        else:  # Two conditional changes cannot be told apart: assume a change.
            self.changed()


class WeightsCache:
    """Cache of a received message, valid for one version of the weights."""

    def __init__(self, version: WeightsVersion) -> None:
        self._version = version
        self._entry: tuple[int, Tensor] | None = None

    def get(self) -> Tensor | None:
        """Return the cached message, or None. A stale message is freed before another one is received."""
        if self._entry is not None and self._entry[0] == self._version.now():
            cached = self._entry[1]
            if cached.is_cuda:  # It may have been allocated on another stream than this all-gather's.
                cached.record_stream(torch.cuda.current_stream(cached.device))
            return cached
        self._entry = None
        return None

    def keep(self, received: Tensor) -> None:
        """Store a message received with the current weights."""
        self._entry = self._version.now(), received


class ResidualStore:
    """Residuals between steps: checkpoints, metrics and the final full exchange.

    Every rank stores an FP32 residual of all rows, (S, n) per parameter group. Their sum over ranks is the gradient
    that has not been applied yet.

    Args:
        groups: Reduce-scatter hooks with the interface of `sharding.tagc.TagcReduce`. FSDP2's own collectives and block
            codes have no residuals.
    """

    def __init__(self, groups: Sequence[Any] = ()) -> None:
        self._groups = [group for group in groups if group.residual.numel()]

    def states(self, residual: str, shards: Sequence[Shard]) -> list[State]:
        """Return the states for a checkpoint. Collective.

        Args:
            residual: "exact" saves the residual of each rank and requires the same degrees on loading; "mean" saves the
                sum over ranks with the owner of each shard, for any degrees; "drop" saves nothing.
            shards: Shards of this rank.
        """
        if residual == "drop" or not self._groups:
            return []
        if residual == "exact":
            return [self._exact()]
        sums = {name: row for group in self._groups for name, row in group.slices(group.decode_and_sum()).items()}
        return [self._by_parameter(sums, shards)]

    def described(self, residual: str) -> dict[str, dict[str, Any]]:
        """Return the description for a checkpoint's record; see `methods.interface.State.describe`."""
        if residual == "drop" or not self._groups:
            return {}
        record = {"per_replica": False, "on_migration": "gradient", "by_parameter": residual != "exact"}
        return {RESIDUAL: record | ({"row_layout": self._row_layout()} if residual == "exact" else {})}

    def sizes(self, residual: str) -> dict[str, int]:
        """Return the bytes in a checkpoint, by kind, in total over all ranks."""
        if residual == "drop" or not self._groups:
            return {}
        exponent = 2 if residual == "exact" else 1  # every rank saves all rows, or only its own row
        return {RESIDUAL: 4 * sum(len(g.residual) ** exponent * g.residual.shape[1] for g in self._groups)}

    def loading(self, reader: CheckpointReader, shards: Sequence[Shard]) -> list[State]:
        """Return, before a checkpoint is loaded, tensors by parameter that receive its pending residuals.

        Raises:
            ValueError: The checkpoint contains per-rank residuals that this run cannot load.
        """
        record = reader.saved["states"].get(RESIDUAL)
        for group in self._groups:
            group.residual.zero_()
        if record is not None and not record["by_parameter"]:
            if record["row_layout"] != self._row_layout():
                reason = "has another shard degree, or compresses other layers"
                raise ValueError(
                    "the checkpoint contains per-rank residuals of the shard axis (checkpoint.residual = 'exact'), but "
                    f"this run {reason if self._groups else 'has no [sharding] option with residuals'}; resume with "
                    "the configuration that saved it, and save with checkpoint.residual = 'mean', which any run can "
                    "load"
                )
            is_filled = not self._groups or reader.fill_of_this_shard([self._exact()])
            assert is_filled
            return []
        rows = {name: one for group in self._groups for name, one in group.slices().items()}
        return [self._by_parameter(rows, shards)] if self._groups else []

    def request_full_exchange(self) -> None:
        """Make the exchange of the next step complete, so that no residual remains after it."""
        for group in self._groups:
            group.request_full_exchange()

    def as_gradients(self, shards: Sequence[Shard]) -> None:
        """Store the residuals as the gradients of a step without a backward pass. Collective."""
        for sums in self.states("mean", shards):
            for shard in shards:
                if shard.name in sums.tensors:
                    store_gradient(shard, sums.tensors[shard.name].reshape(-1))
        for group in self._groups:
            group.mark_full_exchange()

    def after_optimizer_step(self, applied: Tensor) -> None:
        """Update the residuals after a step. `applied`, bool (), is false if the step was skipped."""
        for group in self._groups:
            group.after_optimizer_step(applied)

    def squares(self) -> Tensor | None:
        """Return the sum of squares of this rank's residuals, FP64 (), or None without residuals."""
        squares = [group.residual.norm(dtype=torch.float64).square() for group in self._groups]
        return sum(squares[1:], squares[0]) if squares else None

    def _exact(self) -> State:
        tensors = {group.name: group.residual for group in self._groups}
        return State(RESIDUAL, tensors, per_replica=False, on_migration="gradient", by_parameter=False)

    def _by_parameter(self, rows: dict[str, Tensor], shards: Sequence[Shard]) -> State:
        """Return a state of local shapes. A slice of a row is zero-padded after the parameter's last entry."""
        tensors = {s.name: rows[s.name][: s.size].view(s.local_shape) for s in shards if s.name in rows}
        return State(RESIDUAL, tensors, per_replica=False, on_migration="gradient")

    def _row_layout(self) -> dict[str, list[Any]]:
        """Return the number of ranks and the compressed parameters in order, by group, as JSON values."""
        return {group.name: [len(group.residual), *group.slices()] for group in self._groups}


class Sharding:
    """Collective hooks and their shared state for the parameter groups of a model; without hooks by default.

    Attributes:
        groups: Process groups of the hooks.
        ledger: Byte ledger of the shard axis.
        position: Training position, updated by the trainer.
        version: Version of the weights, updated by the optimizer.
        unsent: Residuals that hooks keep between steps.
    """

    def __init__(self, groups: ShardGroups | LevelGroups | None = None, traffic: TrafficLedger | None = None) -> None:
        self.groups, self.ledger = groups, ShardLedger(traffic or TrafficLedger())
        self.position, self.version, self.unsent = TrainPosition(), WeightsVersion(), ResidualStore()

    def before_micro_batch(self, micro_batch: int, last: bool) -> None:
        """Update the training position. Call it before every forward pass of training."""
        self.position.micro_batch, self.position.last = micro_batch, last

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the hooks' process groups."""
        if self.groups is not None:
            self.groups.set_timeout(timeout)

    def uncounted(self) -> AbstractContextManager[None]:
        """Return a context in which no bytes are counted, because a validation is not part of a step."""
        return self.ledger.uncounted()


def install(flat: ShardedParamGroup, gather: CollectiveHook, reduce: CollectiveHook) -> None:
    """Register the hooks of a parameter group. Modules of one group share them, so that no work is done twice."""
    module: Any = flat.modules[0]
    module.set_custom_all_gather(gather)
    module.set_custom_reduce_scatter(reduce)
    keep_unused_gradients(module)
