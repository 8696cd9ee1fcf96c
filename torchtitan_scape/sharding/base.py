"""The seam of the shard axis: FSDP2's parameter groups and their rows, who moves them, and the ledger of bytes.

FSDP2 gathers and reduces a parameter group as one flat, (S, m) of S ranks, rank-major: a row is what a rank keeps, the
padded local shards of the group's parameters end to end. It calls a stand-in for its all-gather before every forward
pass of a module and every backward pass of a resharded one, and one for its reduce-scatter after every backward pass,
of every micro-batch, on a stream of its own. A stand-in does all its work in the call and returns None, or a `Work`.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from topology.groups import LevelGroups, ShardGroups
from topology.primitives import all_gather_into, reduce_scatter_into
from topology.rank_group import RankGroup
from topology.shard_collectives import ShardLedger
from topology.traffic import TrafficLedger
from torchtitan_scape.core.parameters import plain_name
from torchtitan_scape.sharding.unsent import ResidualStore

# Kinds of bytes in the ledger.
WEIGHTS, GRADIENTS, UPDATE, INDEX = KINDS = ("weights", "gradients", "update", "index")


@dataclass(frozen=True)
class ParameterSlice:
    """A parameter's stretch of a row: `size` entries from `start` on, padding included. dims: of the parameter."""

    name: str
    start: int
    size: int
    dims: int


@dataclass(frozen=True)
class ShardedParamGroup:
    """One of FSDP2's parameter groups.

    name: of its modules, for messages. number: among the model's groups, in the order of the modules.
    gathered: the row that is gathered. reduced: the row that is reduced; what is not trained has no place in it.
    modules: any one of them takes the group's stand-ins.
    """

    name: str
    number: int
    gathered: tuple[ParameterSlice, ...]
    reduced: tuple[ParameterSlice, ...]
    modules: tuple[FSDPModule, ...]

    def check_gather(self, output: Tensor, own: Tensor, group: ProcessGroup, ranks: int) -> None:
        """Raises RuntimeError, on every rank, where FSDP2 gathers something else than this group's row."""
        self._check("all-gather", ranks, group, entries(self.gathered), own.numel(), output.numel())

    def check_reduce(self, output: Tensor, flat: Tensor, group: ProcessGroup, op: Any, ranks: int) -> None:
        """Raises RuntimeError, on every rank, where FSDP2 reduces something else than this group's flat by a sum."""
        if op != dist.ReduceOp.SUM:
            raise RuntimeError(f"FSDP's reduce-scatter of {self.name} has op {op}; what stands in for it sums")
        self._check("reduce-scatter", ranks, group, entries(self.reduced), output.numel(), flat.numel())

    def check_row(self, reduced: Tensor) -> None:
        """As `check_reduce`, of what FSDP2 over one rank hands its all-reduce hook."""
        self._check_sizes("reduce-scatter", 1, entries(self.reduced), reduced.numel(), reduced.numel())

    def _check(self, what: str, ranks: int, group: ProcessGroup, row: int, own: int, whole: int) -> None:
        if group.size() != ranks:
            raise RuntimeError(f"FSDP's {what} of {self.name} is over {group.size()} ranks, and {ranks} are expected")
        self._check_sizes(what, ranks, row, own, whole)

    def _check_sizes(self, what: str, ranks: int, row: int, own: int, whole: int) -> None:
        if (own, whole) != (row, ranks * row):
            segments = self.gathered if what == "all-gather" else self.reduced
            raise RuntimeError(
                f"FSDP's {what} of {self.name} has {own} of {whole} entries, and {row} of {ranks * row} are expected "
                f"({', '.join(segment.name for segment in segments)}); a parameter that a micro-batch did not use, or "
                "one frozen later, leaves the flat: freeze it from the start, or leave [sharding] out"
            )


def entries(segments: Sequence[ParameterSlice]) -> int:
    """Of a row."""
    return sum(segment.size for segment in segments)


def flat_groups(model: nn.Module) -> list[ShardedParamGroup]:
    """The parameter groups of a model after `fully_shard`, each once: modules that were sharded together share one."""
    names = {id(p): plain_name(name) for name, p in model.named_parameters(remove_duplicate=False)}
    found: dict[int, tuple[Any, list[str], list[FSDPModule]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            _, titles, modules = found.setdefault(id(state), (state, [], []))
            titles.append(plain_name(f"{name}.").rstrip(".") or "the model's root")
            modules.append(module)
    groups: list[ShardedParamGroup] = []
    for state, titles, modules in found.values():
        # None for a module without parameters of its own. torch 2.13 has a list besides, of one where no shard
        # placement of one's own is used.
        if (group := state._fsdp_param_group) is not None:
            gathered = _row(group.fsdp_params, names)
            reduced = _row([p for p in group.fsdp_params if p.sharded_param.requires_grad], names)
            groups.append(ShardedParamGroup("+".join(titles), len(groups), gathered, reduced, tuple(modules)))
    return groups


def _row(parameters: Sequence[Any], names: dict[int, str]) -> tuple[ParameterSlice, ...]:
    segments: list[ParameterSlice] = []
    start = 0
    for one in parameters:
        size, own = one.padded_sharded_param_size.numel(), one.sharded_param
        segments.append(ParameterSlice(names.get(id(own), "?"), start, size, own.ndim))
        start += size
    return tuple(segments)


@dataclass
class TrainPosition:
    """Where the run is: by it keys are made that a resumed run repeats, and some send with the last micro-batch alone.

    step: from 1 on. micro_batch: of the step, from 0 on. last: whether it is the step's last one.
    """

    seed: int = 0
    step: int = 0
    micro_batch: int = 0
    last: bool = True

    def key(self, *others: int) -> int:
        """62 bits of the moment and of what tells keys of it apart, with a one in front."""
        numbers = (self.seed, self.step, self.micro_batch, *others)
        digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2 | 1 << 62


class AllGatherHook(Protocol):
    """What stands in for FSDP2's all-gather of one group."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False) -> Any:
        """output (S * m,) becomes the rows of all ranks, the own one, `input` (m,), which lies in it, included.

        All ranks must come to the same bits.
        """


class ReduceScatterHook(Protocol):
    """What stands in for FSDP2's reduce-scatter of one group."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """output (m,) becomes this rank's row of the sum over ranks of `input` (S * m,)."""


class Allocates:
    """Buffers as FSDP2's own collectives have them."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedAllGather(Allocates):
    """FSDP2's own all-gather, counted."""

    def __init__(self, rank_group: RankGroup, ledger: ShardLedger) -> None:
        self._rank_group, self._ledger = rank_group, ledger

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False) -> Any:
        self._ledger.count_all_gather(self._rank_group, input_tensor.nbytes, WEIGHTS)
        return all_gather_into(output_tensor, input_tensor, group=group, async_op=async_op)


class CountedReduceScatter(Allocates):
    """FSDP2's own reduce-scatter, counted.

    gloo's moves as many bytes as an all-reduce: on a CPU parts are exchanged, and FP32 is added in rank order.
    """

    def __init__(self, rank_group: RankGroup, ledger: ShardLedger) -> None:
        self._rank_group, self._ledger = rank_group, ledger

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        if input_tensor.is_cpu and input_tensor.dtype == torch.float32 and op == dist.ReduceOp.SUM:
            self._ledger.count_all_to_all(self._rank_group, input_tensor.nbytes, GRADIENTS)
            parts = torch.empty_like(input_tensor)
            dist.all_to_all_single(parts, input_tensor, group=group)
            add_rows(parts.view(group.size(), -1), output_tensor)
            return None
        self._ledger.count_reduce_scatter(self._rank_group, input_tensor.nbytes, GRADIENTS)
        return reduce_scatter_into(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def add_rows(rows: Tensor, out: Tensor) -> None:
    """out (n,) becomes the sum of rows (k, n), in their order, in FP32."""
    out.copy_(rows[0])
    for row in rows[1:]:
        out += row


class WeightsVersion:
    """Which weights there are: what is kept of another version is stale. The same on all ranks, at the same place."""

    def __init__(self) -> None:
        self._number = 0
        self._in_doubt: Callable[[], bool] | None = None

    def now(self) -> int:
        """May wait for the device, where it is in doubt."""
        changed, self._in_doubt = self._in_doubt, None
        if changed is not None and changed():
            self._number += 1
        return self._number

    def changed(self) -> None:
        self._number, self._in_doubt = self._number + 1, None

    def changed_if(self, changed: Callable[[], bool]) -> None:
        """`changed` is asked when somebody wants to know."""
        if self._in_doubt is None:
            self._in_doubt = changed
        else:  # two doubts are not kept apart
            self.changed()


class WeightsCache:
    """What was received, for as long as the weights are of the version that it was received of."""

    def __init__(self, version: WeightsVersion) -> None:
        self._version = version
        self._kept: tuple[int, Tensor] | None = None

    def get(self) -> Tensor | None:
        """None where there is none; what is stale is let go of, before there is another."""
        if self._kept is not None and self._kept[0] == self._version.now():
            kept = self._kept[1]
            if kept.is_cuda:  # it may be of another stream than this gather
                kept.record_stream(torch.cuda.current_stream(kept.device))
            return kept
        self._kept = None
        return None

    def keep(self, received: Tensor) -> None:
        self._kept = self._version.now(), received


class Sharding:
    """What is installed on a model's parameter groups; on none by default.

    groups: of processes. moment, version: what the trainer and the optimizer keep up to date. ledger: of bytes.
    unsent: what stand-ins keep between steps.
    """

    def __init__(
        self, groups: ShardGroups | LevelGroups | None = None, ledger: ShardLedger | None = None, seed: int = 0
    ) -> None:
        self.groups, self.ledger = groups, ledger or ShardLedger(TrafficLedger())
        self.moment, self.version, self.unsent = TrainPosition(seed), WeightsVersion(), ResidualStore()

    def before_micro_batch(self, step: int, micro_batch: int, last: bool) -> None:
        """To be called before every forward pass of training."""
        self.moment.step, self.moment.micro_batch, self.moment.last = step, micro_batch, last

    def set_timeout(self, timeout: timedelta) -> None:
        """Of its process groups."""
        if self.groups is not None:
            self.groups.set_timeout(timeout)

    def uncounted(self) -> AbstractContextManager[None]:
        """Inside, bytes do not count: a validation is no part of a step."""
        return self.ledger.uncounted()


def install(flat: ShardedParamGroup, gather: AllGatherHook, reduce: ReduceScatterHook) -> None:
    """Hands a group its stand-ins. Modules of one group share them, so that nothing is done twice."""
    module: Any = flat.modules[0]
    module.set_custom_all_gather(gather)
    module.set_custom_reduce_scatter(reduce)
    if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13
        # What a micro-batch did not use stays in the flat, as zeros: its size is that of the table.
        module.set_reduce_scatter_unused_params(True, recurse=False)
