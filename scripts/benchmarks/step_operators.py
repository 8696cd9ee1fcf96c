"""Operators, launches, collectives, bytes and temporary memory of an optimizer step, counted on meta tensors.

    python -m scripts.benchmarks.step_operators                    # writes results/step_operators; minutes on a CPU
    python -m scripts.benchmarks.step_operators --models llama_500m --replicas 4

Every method takes a step with an exchange, as one of N replicas on one level, with the Triton kernels of a GPU. Meta
tensors have shapes but no values, so that a model of any size fits. The first table has the exchange alone: clipping
and the optimizer are left out, except in scape and quantized_update, which contain the update. The second one has the
whole `ReplicaOptimizer.step`. The collectives are those of real ranks; they return at once.
"""

import sys
import weakref
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scripts.benchmarks.harness import Benchmark, main
from scripts.common import markdown, names, numbers
from torchtitan_scape import AdamS
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.core.patching import environment, replaced
from torchtitan_scape.core.workloads import LocalModel, get_workload
from torchtitan_scape.kernels.common import launching
from torchtitan_scape.methods.base import GradientMethod, LocalMethod
from torchtitan_scape.methods.interface import Method, MethodContext, StepInfo
from torchtitan_scape.methods.overlap import EarlyExchange
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.topology import collectives, stages
from torchtitan_scape.topology.collectives import OneReplica, ReplicaCollectives
from torchtitan_scape.topology.groups import ReplicaGroups
from torchtitan_scape.topology.layout import RankGroup
from torchtitan_scape.topology.stages import Handle

META = torch.device("meta")
WHOLE_REPLICAS = 8
# Options without a warm-up, by method. Local methods exchange in the step that is counted.
OPTIONS: dict[str, dict[str, Any]] = {
    "topk": {"start": 0},
    "powersgd": {"start": 0},
    "onebit_adam": {"warmup_steps": 1},
    "radius": {"start": 0, "interval": 1000},
    "sparta": {"warmup_steps": 0},
}
# Operators that compute no new values: views, and tensors that are not written.
_NO_WORK = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh"}
# Operators that do not read the tensor that they write.
_WRITE_ONLY = {"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"}
# Operators that touch only as many entries of their first argument as the index has.
_INDEXED = {"gather", "index_select", "scatter_", "scatter_add_", "index_add_", "scatter", "take"}


@dataclass
class StepCount:
    """The work of a step. Bytes are those of all inputs and outputs of every operator.

    Attributes:
        operators: operators on the device, without views.
        views: operators that only view a tensor.
        calls: functions and methods of torch that Python calls and that return tensors.
        triton: launches of Triton kernels.
        launches: of all kernels: a list of tensors that are not contiguous has one for each of them.
        collectives: calls of the communication library.
        bytes: bytes that operators and launches read and write.
        peak: largest sum of the temporary tensors that exist at once, in bytes.
        held: bytes of the method's states after the step, by kind.
    """

    operators: int = 0
    views: int = 0
    calls: int = 0
    triton: int = 0
    collectives: int = 0
    bytes: float = 0.0
    peak: int = 0
    launches: int = 0
    held: dict[str, int] = field(default_factory=dict)


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of the distinct entries of a tensor."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count


class StepCounter(TorchDispatchMode):
    """Counts the operators on one device type, and the memory of the tensors that they create."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.count, self._device, self._live = StepCount(), device, 0
        self._seen: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = self._tensors((args, kwargs))
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" and given:
            return True  # a flag that is read on the host: the step is applied
        result = func(*args, **kwargs)
        made = self._tensors(result)
        if not (given or made):
            return result
        for tensor in made:
            self._own(tensor, given)
        if func.is_view:
            self.count.views += 1
        elif name not in _NO_WORK:
            self.count.operators += 1
            lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
            separate = name.startswith("_foreach") and any(not t.is_contiguous() for a in lists for t in a)
            self.count.launches += len(lists[0]) if separate else 1
            self.count.bytes += self._moved(func, name, args, kwargs, result)
        return result

    def launched(self, *tensors: Any) -> None:
        """Count a launch of a Triton kernel with these arguments."""
        self.count.triton += 1
        self.count.launches += 1
        # Messages are given as words and as scales; unused arguments are another argument once more.
        distinct = {
            (each.untyped_storage()._cdata, each.storage_offset() * each.element_size(), each.nbytes): each
            for each in self._tensors(tensors)
        }
        self.count.bytes += sum(map(tensor_bytes, distinct.values()))

    def _moved(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> float:
        schema = func._schema
        named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        indexed = named.get("index") if name in _INDEXED else None
        total = 0 if schema.is_mutable else sum(map(tensor_bytes, self._tensors(result)))
        for argument in schema.arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            only_writes = name in _WRITE_ONLY or argument.name == "out" or name.endswith("_out")
            for tensor in self._tensors(named.get(argument.name)):
                nbytes = tensor_bytes(tensor)
                if indexed is not None and argument.name == "self":
                    nbytes = min(nbytes, indexed.numel() * tensor.element_size())
                total += nbytes * (2 if writes and not only_writes else 1)
        return total

    def _own(self, tensor: Tensor, given: list[Tensor]) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen or any(storage._cdata == g.untyped_storage()._cdata for g in given):
            return
        nbytes = storage.nbytes()
        self._seen[storage] = None
        self._live += nbytes
        self.count.peak = max(self.count.peak, self._live)
        weakref.finalize(storage, self._free, nbytes)

    def _free(self, nbytes: int) -> None:
        self._live -= nbytes

    def _tensors(self, tree: Any) -> list[Tensor]:
        return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.device.type == self._device]


class CallCounter(TorchFunctionMode):
    """Counts the functions of torch that Python calls, into the count of a `StepCounter`."""

    def __init__(self, counter: StepCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_attribute = getattr(func, "__name__", "") == "__get__"
        if not is_attribute and any(isinstance(one, Tensor) for one in tree_leaves(result)):
            self._counter.count.calls += 1
        return result


class OneOfManyRanks(ReplicaCollectives):
    """The collectives of one of N ranks, on one level or on nodes of `per_node` ranks; see `as_one_rank`."""

    def __init__(self, replicas: int, per_node: int = 1) -> None:
        super().__init__(ReplicaGroups(None, None), level=RankGroup("network", replicas, 0))
        if per_node > 1:
            self.levels = RankGroup("node", per_node, 0), RankGroup("network", replicas // per_node, 0)

    def reduces_together(self, device: torch.device) -> bool:
        return len(self.levels) == 1

    def minimum_over_all(self, values: Tensor) -> Tensor:
        return values

    def sum_over_owners(self, value: Tensor) -> Tensor:
        return value

    def _start(self, exchange: Callable[[tuple[RankGroup, ...]], None], device: torch.device) -> Handle:
        exchange(self.levels)
        return Handle()


@contextmanager
def as_one_rank(counter: StepCounter) -> Iterator[None]:
    """Replace the communication library by functions that count their calls, and Triton's launches likewise."""

    def collective(*_: Any, async_op: bool = False, **__: Any) -> Any:
        counter.count.collectives += 1
        return SimpleNamespace(wait=lambda: None)

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, moved: float = 0, **constants: Any) -> None:
        if 0 not in grid:
            counter.launched(*arguments)
            counter.count.bytes += moved

    library = SimpleNamespace(
        **dict.fromkeys(("all_reduce", "all_to_all_single", "all_gather_into_tensor", "broadcast"), collective),
        is_initialized=lambda: False,
        get_process_group_ranks=lambda _: range(1 << 16),
        ProcessGroup=object,
    )
    with ExitStack() as stack:
        for module in (stages, collectives):
            stack.enter_context(replaced(module, "dist", library))
            for name in ("all_gather_into", "reduce_scatter_into"):
                stack.enter_context(replaced(module, name, collective))
        stack.enter_context(replaced(collectives, "all_reduce_tensors", lambda *_: collective().wait))
        stack.enter_context(replaced(launching, "launch", launch))
        yield


@contextmanager
def triton_everywhere() -> Iterator[None]:
    """Choose the Triton backend for tensors that are not on a GPU. Launches must be replaced."""
    import torchtitan_scape.kernels.codec.triton_passes
    import torchtitan_scape.kernels.dense.triton_passes
    import torchtitan_scape.kernels.exchange.triton_passes
    import torchtitan_scape.kernels.scape.triton_passes
    import torchtitan_scape.kernels.tagc.triton_passes  # noqa: F401  # compiled functions, not those of the interpreter

    with environment(TRITON_INTERPRET="1"):
        yield


def count_step(
    name: str,
    model: LocalModel,
    replicas: int,
    backend: str = "triton",
    per_node: int = 1,
    early: bool = False,
    muon: bool = False,
    full: bool = False,
    **options: Any,
) -> StepCount:
    """Return the counts of a step in the steady state, by one of N replicas on parameters without values.

    Args:
        early: The exchange starts before the check for non-finite gradients, all chunks at once.
        muon: The optimizer is Muon instead of AdamS.
        full: The exchange is a full one, as in the last step of a run.
    """
    counter, entry = StepCounter(), METHODS[name]
    tensors = [nn.Parameter(torch.empty(shape, device=META)) for shape in model.shapes]
    named = list(zip(model.names, tensors, strict=True))
    with torch.no_grad(), as_one_rank(counter), triton_everywhere():
        optimizer: torch.optim.Optimizer
        optimizer = Muon(named) if muon else AdamS(named, lr=1e-2, kernels=backend, allocate_state=name != "scape")
        shards, ranks = collect_shards(optimizer.param_groups), OneOfManyRanks(replicas, per_node)
        # As in the trainer, which divides the loss by the tokens of all replicas.
        context = MethodContext(
            shards, ranks, optimizer, gradient_scale=float(replicas), total_steps=1000, kernels=backend, max_norm=1.0
        )
        with StepCounter():  # counters of steps are read
            method = entry.method(context, entry.options(**{**OPTIONS.get(name, {}), **options}))
        applied = torch.ones((), dtype=torch.bool, device=META)
        inner = getattr(method.options, "inner_steps", 1)
        number = 2 * inner if isinstance(method, LocalMethod) else 4
        # The first masks of SCAPE are all ones; Radius prepares its masks in the first step after a refresh. Results of
        # local updates may arrive in a later round.
        holds_state = method.options.holds_optimizer_state
        is_prepared = holds_state or name == "radius" or getattr(method.options, "whiten_every", 0)
        for before in range(inner, number) if isinstance(method, LocalMethod) else (1, 2, 3) if is_prepared else ():
            _take(method, model, StepInfo(before, applied), StepCounter())
        if full:
            method.request_full_exchange()
        counter.count = StepCount()
        _take(method, model, StepInfo(number, applied), counter, early)
        if holds_state:  # the kernels of SCAPE receive addresses of tensors, and lists of tiles
            counter.count.bytes = sum(method.options.pass_bytes(model, replicas).values())
        else:
            counter.count.held = {s.kind: sum(t.nbytes for t in s.tensors.values()) for s in method.states()}
    return counter.count


def count_whole_step(
    name: str, model: LocalModel, replicas: int, max_norm: float | None = 1.0, **options: Any
) -> StepCount:
    """Return the counts of a `ReplicaOptimizer.step` in the steady state, with AdamW (scape: AdamS).

    The check for non-finite gradients, the norm, the exchange and the update are all contained.
    """
    counter, entry = StepCounter(), METHODS[name]
    named = [(n, nn.Parameter(torch.empty(s, device=META))) for n, s in zip(model.names, model.shapes, strict=True)]
    # Whether a state or loaded weights are a copy of others cannot be read.
    with as_one_rank(counter), triton_everywhere(), replaced(torch, "equal", lambda *_: False):
        with StepCounter():  # counters of steps are read
            optimizer = _whole_optimizer(name, named, replicas, max_norm, {**OPTIONS.get(name, {}), **options})
        inner = getattr(entry.options(**OPTIONS.get(name, {})), "inner_steps", 1)
        for _ in range(2 * inner if inner > 1 else 4):
            for _, parameter in named:
                parameter.grad = torch.empty_like(parameter)
            method = optimizer.methods[0]
            if hasattr(method, "_mask_counts") and hasattr(method, "_selected"):  # of Radius, read from the device
                method._mask_counts = method._selected
            counter.count = StepCount()
            with counter, CallCounter(counter):
                optimizer.step()
    if method.options.holds_optimizer_state:  # as in `count_step`
        counter.count.bytes = sum(method.options.pass_bytes(model, replicas).values())
    return counter.count


def _whole_optimizer(
    name: str,
    named: list[tuple[str, nn.Parameter]],
    replicas: int,
    max_norm: float | None,
    options: dict[str, Any],
) -> ReplicaOptimizer:
    """Return an optimizer on parameters without values, which takes every step as applied."""
    inner: torch.optim.Optimizer
    if METHODS[name].options.holds_optimizer_state:
        inner = AdamS(named, allocate_state=False, kernels="triton")
    else:  # `fused` refuses this device; both have counters of steps on that of the parameters
        inner = torch.optim.AdamW(named, capturable=True)
        for _, p in named:
            moments = {kind: torch.empty_like(p) for kind in ("exp_avg", "exp_avg_sq")}
            inner.state[p] = {"step": torch.zeros((), device=META), **moments}
    ranks = OneReplica(OneOfManyRanks(replicas))
    more: dict[str, Any] = {"max_norm": max_norm, "reduction": "sum", "total_steps": 1000, "kernels": "triton"}
    optimizer = ReplicaOptimizer(inner, METHODS[name].options(**options), ranks, **more)
    optimizer.guard.finish_previous_step = lambda: True  # type: ignore[method-assign]
    optimizer.guard.last_applied = lambda: True  # type: ignore[method-assign]
    return optimizer


def _take(method: Method, model: LocalModel, info: StepInfo, counter: StepCounter, early: bool = False) -> None:
    gradients = [torch.empty(n, device=META) for n in model.sizes]
    if hasattr(method, "_mask_counts") and hasattr(method, "_selected"):  # of Radius, read from the device
        method._mask_counts = method._selected
    with counter:
        if early:  # as `BackwardOverlap` does
            assert isinstance(method, EarlyExchange)
            started = [method.start_early(number, gradients) for number in method.begin_early(info.number)]
            finish = lambda info: [method.finish_early(sent, info) for sent in started] and gradients  # noqa: E731
            method.overlap = SimpleNamespace(active=True, finish=finish)
        if isinstance(method, LocalMethod):
            method.exchange(info)
        elif isinstance(method, GradientMethod):
            # A step of 1-bit Adam synchronizes the momenta themselves.
            synchronize = getattr(method, "synchronize_momenta", method.synchronize)
            synchronize(gradients, info)
            method.after_optimizer_step(info)
        else:  # it updates the parameters
            method.finish_previous_step(True)
            method.step(gradients, info)


def measure(args: Namespace, _: list[str]) -> dict[str, Any]:
    rows = []
    for workload, method, replicas in product(args.models, args.methods, args.replicas):
        model = get_workload(workload).local(1)
        count = count_step(method, model, replicas)
        entry = {"model": workload, "parameters": model.entries, "method": method, "replicas": replicas}
        entry |= {key: getattr(count, key) for key in ("operators", "triton", "collectives", "bytes", "peak")}
        print(entry, flush=True)
        rows.append(entry)
    whole = []
    for workload, method in product(args.models, args.methods):
        model = get_workload(workload).local(1)
        entry = {"model": workload, "parameters": model.entries, "method": method, "replicas": WHOLE_REPLICAS}
        whole.append(entry | asdict(count_whole_step(method, model, WHOLE_REPLICAS)))
        print(whole[-1], flush=True)
    return {"rows": rows, "whole": whole}


def table(facts: Mapping[str, Any]) -> str:
    """Return table.md of the stored counts."""
    tables = defaultdict(list)
    for row in facts["rows"]:
        tables[f"### {row['model']}: {row['parameters']:,} parameters"].append(
            {"method": row["method"], "replicas": row["replicas"]}
            | {"operators": f"{row['operators']:,}", "Triton launches": f"{row['triton']:,}"}
            | {"collectives": f"{row['collectives']:,}"}
            | {"bytes a parameter": f"{row['bytes'] / row['parameters']:.1f}"}
            | {"temporary, bytes a parameter": f"{row['peak'] / row['parameters']:.2f}"}
        )
    body = "\n\n".join(f"{title}\n\n{markdown(rows)}" for title, rows in tables.items())
    whole = [
        {"model": row["model"], "method": row["method"]}
        | {"Triton launches": f"{row['triton']:,}", "operators": f"{row['operators']:,}", "views": f"{row['views']:,}"}
        | {"calls from Python": f"{row['calls']:,}", "collectives": f"{row['collectives']:,}"}
        | {"bytes a parameter": f"{row['bytes'] / row['parameters']:.1f}"}
        | {"temporary, bytes a parameter": f"{row['peak'] / row['parameters']:.2f}"}
        for row in facts["whole"]
    ]
    return f"""## Operators of an optimizer step

`python -m scripts.benchmarks.step_operators`, on meta tensors: nothing is computed and nothing is timed. A step with an
exchange in the steady state, one of N replicas, one rank per node. The optimizer and clipping are not counted, except
in `scape` and `quantized_update`, which contain the update.

An operator is one call below autograd that is no view; one with a list of tensors counts once. Bytes are those of all
inputs and outputs of operators and Triton launches, each once. Launches on addresses of tensors, and on tensors that
they read and write, state the bytes that they move in addition. The bytes of `scape` are the closed form of its passes.
Temporary is the largest sum of tensors that exist at once and are created in the step.

{body}

## Whole optimizer steps

The first of {WHOLE_REPLICAS} replicas: check for non-finite gradients, exchange, norm, clipping and update by AdamW, or
by the method (`scape`). Views create no new values. Calls from Python are those of torch's functions that return
tensors.

{markdown(whole)}
"""


BENCHMARKS = {
    "all": Benchmark(
        measure,
        table,
        arguments={
            "--models": dict(type=names, default=["llama_1_8b"], help="workloads"),
            "--methods": dict(type=names, default=[*METHODS], help="methods"),
            "--replicas": dict(type=numbers, default=[4, 16, 64], help="numbers of replicas"),
        },
    )
}

if __name__ == "__main__":
    sys.exit(main("scripts.benchmarks.step_operators", __doc__, BENCHMARKS))
