"""The entries of a checkpoint: model, optimizer, method, random state and param groups, and their description.

Tensors have the parameters' names and global shapes, so that every shard degree can read them. A DTensor describes
whole rows of a tensor on a rank, but not its entries 1,000 to 5,000. Such a slice is stored as a few boxes: the end of
a row, whole rows, the beginning of a row. A checkpoint then has the whole tensor, however many ranks have written it.

State that differs between replicas has a leading dimension with one row per replica: as a plain tensor, DCP would take
the replicas' values for copies of one tensor and keep a single one. The record of a checkpoint describes its kinds of
state, see `methods.interface.State`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from torchtitan_scape.core.consistency import LARGEST, check_plausible, is_plausible
from torchtitan_scape.core.parameters import Shard, is_gathered_in_fp8, is_slice, local, plain_name, stored
from torchtitan_scape.methods.interface import State
from torchtitan_scape.optimizers.pytorch import create_state
from torchtitan_scape.optimizers.registry import FIRST
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.replica.simulation import mean_of_rows, rows_of

RESIDUALS = ("exact", "mean", "drop")  # values of `[checkpoint] residual`
RANDOM = "random"  # name of the random state in a checkpoint
WEIGHTS = "weights"  # first part of the names of weights that are stored besides their masters
PREFIX = "param_groups."
# Keys of param groups that select an implementation, or determine which state the optimizer has: a run keeps its own.
_OF_THIS_RUN = {"fused", "foreach", "capturable", "differentiable", "amsgrad"}
_aten = torch.ops.aten
# Operations that asynchronous saves apply to a tensor, and the conversion of an export. Each box gets them.
_BY_BOX = {getattr(_aten, name).default for name in ("detach", "clone", "_to_copy", "empty_like", "zeros_like")}


class FlatSlices(Tensor):
    """Boxes of a tensor of `shape`, with the methods that DCP calls on tensors which are distributed over ranks.

    It is a tensor because DCP's planners accept parts at an offset, and its stagers copies, of tensors alone. It
    supports no arithmetic.

    Args:
        shape: of the whole tensor.
        dtype: of the boxes.
        boxes: values by their offset in the whole tensor, with as many dimensions; see `flat_boxes`. Read and written
            in place.
    """

    boxes: dict[tuple[int, ...], Tensor]

    @staticmethod
    def __new__(
        cls: type["FlatSlices"], shape: Sequence[int], dtype: torch.dtype, boxes: Mapping[tuple[int, ...], Tensor]
    ) -> "FlatSlices":
        device = next((values.device for values in boxes.values()), torch.device("cpu"))
        made = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        made.boxes = dict(boxes)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, slices = kwargs or {}, args[0]
        if func in _BY_BOX:
            boxes = {offsets: func(values, *args[1:], **kwargs) for offsets, values in slices.boxes.items()}
            return FlatSlices(slices.shape, kwargs.get("dtype") or slices.dtype, boxes)
        if func is _aten.new_empty.default:  # The stager of threads fills it with copies of the attributes.
            return FlatSlices(args[1], kwargs.get("dtype") or slices.dtype, {})
        if (
            func is _aten.copy_.default
            and isinstance(args[1], FlatSlices)
            and args[1].boxes.keys() == slices.boxes.keys()
        ):
            for offsets, values in slices.boxes.items():
                values.copy_(args[1].boxes[offsets], *args[2:], **kwargs)
            return slices
        raise NotImplementedError(f"{func} of FlatSlices, which are for checkpoints only; use their boxes")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return FlatSlices, (tuple(self.shape), self.dtype, self.boxes)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FlatSlices(shape={tuple(self.shape)}, dtype={self.dtype}, boxes={self.boxes})"

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), values.shape) for offsets, values in self.boxes.items()]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties, shard = TensorProperties(dtype=self.dtype), WriteItemType.SHARD
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets), shard, tensor_data=TensorWriteData(chunk, properties, self.shape)
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.boxes[tuple(index.offset)]


def flat_boxes(
    shape: Sequence[int], start: int, values: Tensor, origin: Sequence[int] | None = None
) -> dict[tuple[int, ...], Tensor]:
    """Return entries [start, start + n) of a tensor of `shape` as boxes by offset, which are views of `values`.

    Args:
        values: (n,) entries, contiguous and of any shape.
        origin: added to all offsets: where a larger tensor has this one.
    """
    flat, done, boxes = values.detach().view(values.numel()), 0, {}
    for offsets, sizes in boxes_of(shape, start, start + flat.numel()):
        count = math.prod(sizes)
        if origin is not None:
            offsets = tuple(at + first for at, first in zip(offsets, origin, strict=True))
        boxes[offsets] = flat[done : done + count].view(sizes)
        done += count
    return boxes


def boxes_of(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, sizes) of the boxes that entries [start, stop) of a tensor of `shape` are, in their order."""
    inner = math.prod(shape[1:])
    while start < stop:
        row, first = divmod(start, inner)
        whole_rows = 0 if first else (stop - start) // inner
        if whole_rows:
            yield (row, *(0 for _ in shape[1:])), (whole_rows, *shape[1:])
            start += whole_rows * inner
            continue
        end = min(stop, (row + 1) * inner)
        for offsets, sizes in boxes_of(shape[1:], first, end - row * inner):
            yield (row, *offsets), (1, *sizes)
        start = end


class GlobalLayout:
    """The position of this rank's local tensors in the global ones.

    Args:
        mesh: dimension "dp_replicate" first, then those over which parameters are sharded; None in a process without
            a process group.
        simulated: number of replicas in this process, 1 for a real one.
        replicas: (number of replicas, index of this rank's), for slices, where the mesh does not determine them.

    Attributes:
        replicas: number of real replicas.
        replica: index of this rank's replica.
        ways: number of ranks over which one replica is sharded.
    """

    def __init__(self, mesh: DeviceMesh | None, simulated: int, replicas: tuple[int, int] | None = None) -> None:
        self._mesh, self.simulated = mesh, simulated
        if replicas is None:
            axis: DeviceMesh | None = None if mesh is None else mesh["dp_replicate"]
            replicas = (1, 0) if axis is None else (axis.size(), axis.get_local_rank())
        self.replicas, self.replica = replicas
        self.ways = 1 if mesh is None else mesh.size() // self.replicas

    def whole(self, parameter: Tensor, values: Tensor) -> Any:
        """Return `values` (local shape) as a tensor for DCP that is sharded like the parameter."""
        if is_slice(parameter):
            return FlatSlices(parameter.whole, values.dtype, flat_boxes(parameter.whole, parameter.start, values))
        if not isinstance(parameter, DTensor):
            return values
        return _dtensor(values, parameter.device_mesh, parameter.placements, parameter.shape)

    def part(self, parameter: Tensor, values: Tensor, start: int) -> Any:
        """Return `values`, entries [start, start + n) of this rank's flat local tensor, as a part of the whole tensor.

        Ranks may save different parts under one name; of equal ones DCP writes one. All together must be the whole
        tensor.

        Args:
            parameter: a plain tensor, a DTensor without partial sums, or a slice, to which `start` is relative.
            values: (n,) or any contiguous shape. DCP reads and writes them in place.

        Returns:
            The result of `whole` if `values` are all entries, otherwise `FlatSlices`.
        """
        values, shape = own_storage(values), local(parameter).shape
        if values.numel() == shape.numel():
            return self.whole(parameter, values.view(shape))
        if is_slice(parameter):
            boxes = flat_boxes(parameter.whole, parameter.start + start, values)
            return FlatSlices(parameter.whole, values.dtype, boxes)
        origin = parameter.__create_chunk_list__()[0].offsets if isinstance(parameter, DTensor) else None
        return FlatSlices(parameter.shape, values.dtype, flat_boxes(shape, start, values, origin))

    def rows(self, parameter: Tensor, values: Tensor, count: int) -> Any:
        """Return `values` (rows of this rank, *local shape) as a tensor for DCP, (count, *global shape)."""
        if is_slice(parameter):
            first, size = self.replica * self.share_at_most(count), parameter.whole.numel()
            shape = (count, *parameter.whole)
            boxes: dict[tuple[int, ...], Tensor] = {}
            for i, row in enumerate(values):
                boxes |= flat_boxes(shape, (first + i) * size + parameter.start, row)
            return FlatSlices(shape, values.dtype, boxes)
        placements: list[Any] = []
        if isinstance(parameter, DTensor):
            placements = [_after_rows(p) for p in parameter.placements]
            if self.simulated > 1:  # a row of every replica, on each shard
                return _dtensor(values, parameter.device_mesh, placements, (count, *parameter.shape))
        if self.simulated > 1 or self._mesh is None:
            return values
        mesh = self._mesh[("dp_replicate", *self._sharded_dims(parameter))]
        return _dtensor(values, mesh, [Cut(0), *placements], (count, *parameter.shape))

    def _sharded_dims(self, parameter: Tensor) -> tuple[str, ...]:
        """Return the names of the mesh dimensions over which a parameter is sharded."""
        if not isinstance(parameter, DTensor):
            return ()
        assert self._mesh is not None and self._mesh.mesh_dim_names is not None
        # A mesh without names (`fully_shard(model)`) has all dimensions but the replicas'.
        return parameter.device_mesh.mesh_dim_names or self._mesh.mesh_dim_names[1:]

    def of_optimizer(self, state: dict[str, Any], slices: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return an optimizer's state (flat, "state.NAME.KIND") with slices as in `whole`. Memory is shared.

        Args:
            slices: the result of `slices_of`.
        """
        wrapped = dict(state)
        for key, values in state.items() if slices else ():
            parameter = slices.get(key.removeprefix("state.").rpartition(".")[0])
            if parameter is not None and isinstance(values, Tensor) and values.ndim and type(values) is not FlatSlices:
                wrapped[key] = self.whole(parameter, own_storage(values))
        return wrapped

    def share(self, count: int) -> int:
        """Return how many of `count` rows this rank reads: its own if replica counts are equal, else its part."""
        most = self.share_at_most(count)
        return count if self.simulated > 1 else max(0, min(most, count - self.replica * most))

    def share_at_most(self, count: int) -> int:
        """Return the largest `share` of all ranks."""
        return count if self.simulated > 1 else -(-count // self.replicas)


def slices_of(shards: Sequence[Shard]) -> dict[str, Tensor]:
    """Return the parameters that are slices, by name."""
    return {shard.name: shard.parameter for shard in shards if is_slice(shard.parameter)}


def _after_rows(placement: Any) -> Any:
    if not hasattr(placement, "dim"):
        return placement
    if hasattr(placement, "split_factor"):
        return type(placement)(placement.dim + 1, split_factor=placement.split_factor)
    return Cut(placement.dim + 1)


def _dtensor(values: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]) -> DTensor:
    """Return a DTensor of these values on their own device; `from_local` would move them to the mesh's."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    meta = TensorMeta(torch.Size(shape), tuple(strides), values.dtype)
    return DTensor(values.detach(), DTensorSpec(mesh, tuple(placements), meta), requires_grad=False)


def own_storage(values: Tensor) -> Tensor:
    """Return the same memory as a storage of its own that begins at `values`.

    Asynchronous saves copy whole storages, which may be flat buffers, and ignore the offset of a view in a DTensor
    (PyTorch 2.13).
    """
    return torch.from_dlpack(values.detach())


# ---------------------------------------------------------------------------------------- what DCP saves and loads


class ModelCheckpoint(Stateful):
    """The model for a checkpoint or an export: the weights that all replicas share, under all names of the model.

    Args:
        own: state of the model itself, with `state_dict` and `load_state_dict`. Loading goes into it.
    """

    def __init__(self, own: Any, optimizer: ReplicaOptimizer, layout: GlobalLayout) -> None:
        self.own, self._optimizer, self._layout = own, optimizer, layout

    def state_dict(self) -> dict[str, Any]:
        parameters = {shard.name: shard.parameter for shard in self._optimizer.shards()}
        # Wrappers that FSDP2 gathers in FP8 would be stored as such, and could be read with torchao alone.
        in_wrappers = {name: stored(one) for name, one in parameters.items() if is_gathered_in_fp8(one)}
        shared = in_wrappers | self._optimizer.saved_model()
        state: dict[str, Any] = dict(self.own.state_dict())
        others = {other: name for other, name in self._other_names.items() if other in state}
        state |= {name: self._layout.whole(parameters[name], own_storage(shared[name])) for name in shared}
        return state | {other: state[name] for other, name in others.items()}

    def load_targets(self) -> dict[str, Any]:
        """Return the tensors to read a checkpoint's model into: the model's own, or its FP32 masters.

        A tied parameter is read once, by its first name.
        """
        targets = {name: values for name, values in self.own.state_dict().items() if name not in self._other_names}
        slices = slices_of(self._optimizer.shards()).items()
        return targets | {name: self._layout.whole(parameter, parameter.detach()) for name, parameter in slices}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = self.own.state_dict()
        state_dict = state_dict | {other: state_dict[name] for other, name in self._other_names.items() if other in own}
        self.own.load_state_dict({k: v for k, v in state_dict.items() if not isinstance(v, FlatSlices)})
        self._optimizer.model_loaded()

    @cached_property
    def _other_names(self) -> dict[str, str]:
        """Each further name of a tied parameter, with its first name, that of the shard."""
        model = self._optimizer.model
        names = list(model.named_parameters(remove_duplicate=False)) if model is not None else []
        first = {id(parameter): plain_name(name) for name, parameter in reversed(names)}
        pairs = {plain_name(name): first[id(parameter)] for name, parameter in names}
        return {other: name for other, name in pairs.items() if other != name}


class OptimizerCheckpoint(Stateful):
    """State of the optimizer and the method for `dcp.save`. `migration.migrate` loads it.

    Args:
        residual: "exact", "mean" or "drop", as in `[checkpoint] residual`.
    """

    def __init__(self, optimizer: ReplicaOptimizer, layout: GlobalLayout, residual: str) -> None:
        self._optimizer, self._layout, self._residual = optimizer, layout, residual

    def state_dict(self) -> dict[str, Any]:
        optimizer, layout = self._optimizer, self._layout
        optimizer.refuse_inside_shared_weights("dcp.save")
        optimizer.finish_previous_step()
        parameters = {shard.name: shard.parameter for shard in optimizer.shards()}
        dense, saved = dense_state(optimizer), states(optimizer, self._residual)
        check_states(optimizer, saved, dense)
        entries = layout.of_optimizer(dense, slices_of(optimizer.shards()))
        entries |= group_values(optimizer.param_groups, optimizer.shards())
        for name, (parameter, bits) in saved_weights(optimizer).items():
            entries[f"{WEIGHTS}.{name}"] = layout.whole(parameter, own_storage(bits))
        for state in saved:
            for name, values in state.tensors.items():
                if state.packed:
                    values = state.entries(name, local(parameters[name]).shape)
                values, key = own_storage(values), f"{state.kind}.{name}"
                if not state.by_parameter:
                    entries[f"{key}.{optimizer.collectives.model_rank}"] = values
                elif state.per_replica:
                    entries[key] = layout.rows(parameters[name], values, layout.replicas * layout.simulated)
                elif state.starts is not None:
                    entries[key] = layout.part(parameters[name], values, state.starts[name])
                else:
                    entries[key] = layout.whole(parameters[name], values)
        return entries

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse a load by DCP alone, which knows neither the layout nor the method of the run that saved."""
        raise ValueError("dcp.load cannot load the optimizer's state; call torchtitan_scape.load_checkpoint")


class RandomState(Stateful):
    """The states of every rank's random number generators. `restore` applies the loaded states."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._name = device, f"rank{dist.get_rank()}"
        self._loaded: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Tensor]:
        states = {f"{self._name}.cpu": torch.get_rng_state()}
        if self._device.type != "cpu":
            states[f"{self._name}.device"] = torch.get_device_module(self._device).get_rng_state(self._device)
        return states

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        self._loaded = dict(state_dict)

    def restore(self) -> None:
        """Apply the loaded states, before the first forward pass: data loaders draw a number when they begin."""
        loaded, self._loaded = self._loaded, {}
        if loaded:
            torch.set_rng_state(loaded[f"{self._name}.cpu"])
        if loaded and self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(loaded[f"{self._name}.device"], self._device)


# ------------------------------------------------------------------------------------- the state of the optimizer


def has_dense_state(optimizer: ReplicaOptimizer) -> bool:
    """Return whether the wrapped optimizer's state is stored by parameter, as by PyTorch; else `states` contains it."""
    options = optimizer.options
    return not (optimizer.weights or options.holds_optimizer_state or options.divides_update)


def stores(optimizer: ReplicaOptimizer) -> list[Any]:
    """Return what has moments of its own: the replicas of this process, or their parts; empty if the optimizer has."""
    return optimizer.weights or [method.owned for method in optimizer.methods if method.owned is not None]


def dense_state(optimizer: ReplicaOptimizer, to_load: bool = False) -> dict[str, Any]:
    """Return the wrapped optimizer's state by name ("state.PARAMETER.exp_avg"); empty if `states` contains it.

    This makes an optimizer create its state if it has not taken a step yet; `to_load` as in `create_state`.

    Raises:
        ValueError: the optimizer has no state yet, and it does not start from zeros.
    """
    if not has_dense_state(optimizer):
        return {}
    if not optimizer.inner.state:
        create_state(optimizer.inner, to_load)
    of_parameter = {shard.name: optimizer.inner.state.get(shard.parameter, {}) for shard in optimizer.shards()}
    return {f"state.{name}.{key}": value for name, state in of_parameter.items() for key, value in state.items()}


def states(optimizer: ReplicaOptimizer, residual: str) -> list[State]:
    """Return the method's state, after `finish_previous_step`. Collective.

    Tensors of per-replica states have a leading dimension: one row per replica of this process.

    Args:
        residual: "exact"; "mean" for the replicas' mean of everything that differs between them; or "drop" for that
            mean without pending updates.
    """
    each = optimizer.replicas.run(lambda i: optimizer.methods[i].checkpoint_states(residual))
    of_stores = [store.states() for store in stores(optimizer)] or [[] for _ in each]
    saved = rows_of([_kept([*one, *two], residual) for one, two in zip(each, of_stores, strict=True)])
    for i, state in enumerate(saved):
        if state.per_replica and residual != "exact":
            # On the host: the device has no room for another copy of all parameters.
            means = {name: mean_of_rows(rows, optimizer.collectives).cpu() for name, rows in state.tensors.items()}
            saved[i] = State(state.kind, means, per_replica=False, on_migration=state.on_migration)
    return [*saved, *usual_norms(optimizer), *optimizer.sharding.unsent.states(residual, optimizer.shards())]


def _kept(declared: Sequence[State], residual: str) -> list[State]:
    """Return the states that are saved besides the model."""
    dropped = residual == "drop"
    return [state for state in declared if not (state.is_in_model(residual) or (dropped and state.is_pending))]


def check_states(optimizer: ReplicaOptimizer, saved: Sequence[State], moments: dict[str, Any]) -> None:
    """Check the states that a checkpoint is about to store. Collective; waits for the device.

    Pending gradients and first moments are compared with the usual norm of the gradients, if the method limits these.
    A flipped exponent bit in a residual has no visible effect before the next exchange, and would be saved.

    Args:
        moments: other tensors, by description.

    Raises:
        DamagedParametersError: on every rank, with ranks and states.
    """
    usual = [norm[0] for norm in optimizer.guard.usual_norms]
    usual_norm = torch.stack(usual).max() if usual else torch.zeros((), dtype=torch.float64, device="cpu")
    of_gradients = torch.where(usual_norm > 0.0, LARGEST * usual_norm, torch.inf)
    # A basis that divides by root mean squares enlarges values, by a thousand at most.
    largest = {"gradient": of_gradients, "pending": 1024.0 * of_gradients, "displacement": LARGEST, "model": LARGEST}
    named = [
        (f"{state.kind} of {name!r}", values, largest.get(state.on_migration, torch.inf))
        for state in saved
        for name, values in state.tensors.items()
    ]
    for name, tensor in moments.items():
        if isinstance(tensor, Tensor) and not is_traceable_wrapper_subclass(local(tensor)):
            named.append((name, local(tensor), of_gradients if name.endswith(f".{FIRST}") else torch.inf))
    checked = [(name, is_plausible(t, largest=most)) for name, t, most in named if t.is_floating_point()]
    nothing = ("", torch.ones((), dtype=torch.bool, device=optimizer.grad_norm.device))
    what = "states of the optimizer or the method"
    check_plausible([nothing, *checked], optimizer.collectives, optimizer.attempted_steps, what)


def usual_norms(optimizer: ReplicaOptimizer) -> list[State]:
    """Return the usual norms of the gradients of this process's replicas, if the method limits them."""
    of_replica = zip(optimizer.replicas.endpoints, optimizer.guard.usual_norms, strict=False)
    tensors = {f"replica_{endpoint.replica}": usual for endpoint, usual in of_replica}
    if not tensors:
        return []
    return [State("usual_norm", tensors, per_replica=False, on_migration="copy", by_parameter=False)]


def describe_states(optimizer: ReplicaOptimizer, residual: str) -> dict[str, dict[str, Any]]:
    """Return the description of each kind in `states`, for the checkpoint's record. No communication."""
    own = stores(optimizer)[0].states() if stores(optimizer) else []
    declared = _kept([*optimizer.methods[0].declared_states(), *own, *usual_norms(optimizer)], residual)
    exact = residual == "exact"
    described = {state.kind: state.describe() | {"per_replica": state.per_replica and exact} for state in declared}
    return described | optimizer.sharding.unsent.described(residual)


def saved_weights(optimizer: ReplicaOptimizer) -> dict[str, Any]:
    """Return, by name, (a parameter of the model, its bits), for weights that no other state determines exactly."""
    return optimizer.levels.bits() if optimizer.levels else {}


# ------------------------------------------------------------------------------------------------- param groups
#
# Values of param groups have the names that PyTorch gives them, "param_groups.NAME.KEY", where NAME is a parameter of
# the group. Schedulers compute a rate from the present one, so a resumed run needs these besides the scheduler's.


def group_values(param_groups: Sequence[dict[str, Any]], shards: Sequence[Shard]) -> dict[str, Any]:
    """Return the plain values of all param groups, each under the name of its group's first parameter."""
    first = {shard.group: shard.name for shard in reversed(shards)}
    return {
        f"{PREFIX}{first[index]}.{key}": value
        for index, group in enumerate(param_groups)
        if index in first
        for key, value in _plain_values(group).items()
    }


def restore_groups(optimizer: torch.optim.Optimizer, shards: Sequence[Shard], saved: dict[str, Any], by: str) -> str:
    """Load saved values into the param groups of an optimizer.

    A group receives the values of the saved groups whose first parameter it contains, or of all if there is none. An
    optimizer of another class receives the numbers that both have, except `weight_decay`, which it may apply in another
    way.

    Args:
        saved: values by their name in the checkpoint.
        by: name of the optimizer class that saved.

    Returns:
        A line about the values that were restored and those that were not.
    """
    by_parameter: dict[str, dict[str, Any]] = {}
    for name, value in saved.items():
        parameter, _, key = name.removeprefix(PREFIX).rpartition(".")
        by_parameter.setdefault(parameter, {})[key] = value
    kept, this_class = dict[str, str](), type(optimizer).__name__
    for index, group in enumerate(optimizer.param_groups):
        names = [shard.name for shard in shards if shard.group == index]
        sources = [_plain_values(by_parameter[name]) for name in names if name in by_parameter]
        sources = sources or [_plain_values(source) for source in by_parameter.values()]
        present = _plain_values(group)
        for key in sorted(present.keys() | {key for source in sources for key in source}):
            values = [source[key] for source in sources if key in source]
            if reason := _reason_to_keep(key, values, present, by == this_class):
                kept[key] = reason
            elif values and values[0] != present.get(key, ...):
                _assign(group, key, values[0])
    numbers = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    rates = ", ".join(dict.fromkeys("None" if lr is None else f"{float(lr):.4g}" for lr in numbers))
    if not saved:
        return f"param groups are this run's (lr {rates}), as the checkpoint has none"
    reasons = ", ".join(f"{key} ({reason})" for key, reason in sorted(kept.items()))
    return f"param groups as they were saved (lr {rates})" + (f", except {reasons}" if reasons else "")


def _reason_to_keep(key: str, values: Sequence[Any], present: dict[str, Any], same_class: bool) -> str:
    """Return why a group keeps its own value of `key`, or has none; "" if it receives the saved one."""
    if not values:
        return "not in the checkpoint"
    if any(value != values[0] for value in values):
        return "saved param groups differ in it"
    if key in present and present[key] == values[0]:
        return ""
    if key in _OF_THIS_RUN:
        return f"{values[0]} in the checkpoint"
    if key == "weight_decay" and not same_class:
        return f"{values[0]} in the checkpoint, of another optimizer"
    # `initial_lr` belongs to schedulers, and those that are built after the load read it.
    if same_class or key == "initial_lr" or (key in present and _is_number(present[key]) and _is_number(values[0])):
        return ""
    return "of another optimizer"


def _plain_values(group: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a group that are numbers, text, None or tuples of these; tensors of one entry as numbers."""
    values = {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
    return {key: value for key, value in values.items() if value is not ...}


def _plain(value: Any) -> Any:
    """Return a plain value, tensors as numbers and lists as tuples; `...` if it is none."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else ...
    if isinstance(value, tuple | list):
        parts = tuple(_plain(part) for part in value)
        return ... if ... in parts else parts
    return value if isinstance(value, bool | int | float | str | None) else ...


def _is_number(value: Any) -> bool:
    return all(isinstance(one, int | float) and not isinstance(one, bool) for one in tree_leaves(value))


def _assign(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a value; one that is a tensor, as the `lr` of a captured graph, is changed in place."""
    tensors = [one for one in tree_leaves(group.get(key)) if isinstance(one, Tensor)]
    if not tensors:
        group[key] = value
    for tensor, number in zip(tensors, tree_leaves(value), strict=False):
        tensor.fill_(number)
