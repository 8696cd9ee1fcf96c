"""Exchanges that run beside the backward pass of a step and the forward pass of the next one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_scape.core.parameters import Shard, contiguous_gradient, weak_hook
from torchtitan_scape.core.timing import PhaseTimer
from torchtitan_scape.methods.interface import Method, StepInfo
from torchtitan_scape.topology.chunks import Exchange
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.stages import HIGH_PRIORITY, CommStream
from torchtitan_scape.topology.torch_version import (
    call_before,
    fsdp_copy_in_streams,
    fsdp_parameter_group,
    fsdp_prefetched,
    is_compiled,
)

LARGEST_UNIT = 8  # a module with more than one part of so many of the entries is not waited for as a whole


class EarlyExchange(ABC):
    """A method whose gradients are exchanged in chunks that can start before all gradients are complete.

    Attributes:
        collectives: Communication with the other replicas.
        overlap: The `BackwardOverlap`, if chunks start during the backward pass.
        arriving: Receives the changes of the weights, if they may arrive during the next forward pass.

    Class attributes:
        sends_weights: True if the exchange ends with changes of the weights, which `arriving` can receive.
    """

    sends_weights: ClassVar[bool] = False

    collectives: ReplicaCollectives
    overlap: Any = None
    arriving: "ForwardOverlap | None" = None

    @abstractmethod
    def early_chunks(self) -> Sequence[Collection[int]]:
        """Return the numbers of the shards whose gradients each chunk contains, in the order of a backward pass."""

    @abstractmethod
    def begin_early(self, step: int) -> Collection[int]:
        """Prepare a step, and return the numbers of the chunks that it may start early; equal on all replicas.

        step: as `StepInfo.number`.
        """

    @abstractmethod
    def start_early(self, number: int, gradients: Sequence[Tensor | None]) -> Any:
        """Start the exchange of a chunk, and return an object with its `handle`. Collective.

        Neither gradients nor state change before `finish_early`.

        Args:
            gradients: Those that exist now, None for the others. Those of the chunk exist.
        """

    @abstractmethod
    def finish_early(self, sent: Any, info: StepInfo) -> None:
        """Store the result of an exchange after waiting for its handle, and update the method's state."""

    def cancel_early(self) -> None:
        """Forget the gradients of a step that is not taken. Called after the handles of its chunks were waited for."""


class BackwardOverlap:
    """Starts a method's chunks as the last backward pass of a step completes their gradients.

    A gradient is complete when the post-accumulate hook of its parameter runs. Autograd runs the hook, or FSDP2 after
    its reduce-scatter, which accumulates on the shard itself.

    All replicas must start the chunks in the same order, whatever the order of their gradients. A chunk therefore waits
    for all chunks before it. `start_remaining` starts the others before any other collective, including those of
    parameters without a gradient. Chunks that were incomplete on some rank are moved to the end of the next step's
    order, so that an unused parameter delays only its own chunk.

    Until `finish`, gradients and the method's state do not change: the check for non-finite gradients comes first.

    Order of calls in a step: `begin`, the backward pass, `start_remaining`, `finish`.

    Attributes:
        active: True from `begin` to `finish` or `cancel`.
        complete: After `start_remaining`, whether the backward pass completed each chunk. As many flags on all ranks:
            ranks with fewer chunks, as with uneven shards, add True.
    """

    def __init__(self, method: EarlyExchange, shards: Sequence[Shard]) -> None:
        self._method, self._shards = method, shards
        self._required = method.early_chunks()
        self._gradients: list[Tensor | None] = [None] * len(shards)
        self._in_flight: list[Any] = []
        self._device = shards[0].device
        self._stream: Any = None  # on a GPU that of the last completed gradient
        self._order = list(range(len(self._required)))
        self._expected: list[int] = []  # the chunks of this step, in their order
        self._flags = max(method.collectives.gather_objects(len(self._order)))
        self.complete: list[bool] = []
        self.active = False
        for number, shard in enumerate(shards):
            shard.parameter.register_post_accumulate_grad_hook(weak_hook(self._on_gradient, number))

    @classmethod
    def of(cls, methods: Sequence[Method], shards: Sequence[Shard]) -> "BackwardOverlap | None":
        """Return the overlap for the replicas of this process.

        Args:
            methods: One method per replica of this process.

        Returns:
            None if the method cannot start chunks early, if there is no other replica, or if the process simulates
            several replicas, which share one backward pass.
        """
        first = methods[0]
        if isinstance(first, EarlyExchange) and len(methods) == 1 and first.collectives.replicas > 1:
            first.overlap = cls(first, shards)
            return first.overlap
        return None

    def begin(self, step: int, complete_everywhere: Sequence[bool] = ()) -> None:
        """Expect the last backward pass of a step, unless none of its chunks may start early.

        Args:
            step: Number of the step, see `StepInfo.number`.
            complete_everywhere: Of each flag of `complete` in the previous step, whether it was true on all ranks.

        Raises:
            ValueError: another one is expected already.
        """
        if self.active:
            raise ValueError(
                "prepare_last_backward() was called again before step(); call it once per step, before the backward "
                "pass of the last micro-batch. If that pass failed and is repeated, call zero_grad() first"
            )
        expected = self._method.begin_early(step)
        if len(complete_everywhere) == self._flags:
            self._order = sorted(range(len(self._order)), key=lambda number: not complete_everywhere[number])
        self._expected = [number for number in self._order if number in expected]
        self._in_flight, self.active = [], bool(self._expected)

    def cancel(self) -> bool:
        """Discard the exchange of a backward pass that failed. Collective.

        The other replicas cancel as well, but may have started more chunks. All chunks are therefore exchanged, and
        their results are dropped.

        Returns:
            True if an exchange was active.
        """
        if not self.active:
            return False
        self._start_all()
        for sent in self._in_flight:
            sent.handle.wait()
        self._method.cancel_early()
        self._forget()
        return True

    def start_remaining(self) -> list[Tensor]:
        """Start the chunks that the backward pass did not start. Collective.

        Returns:
            The gradients, FP32 (n,) per shard.
        """
        complete = [self._is_complete(number) for number in range(len(self._required))]
        self.complete = complete + [True] * (self._flags - len(complete))
        return self._start_all()

    @torch.no_grad()
    def _start_all(self) -> list[Tensor]:
        for number, shard in enumerate(self._shards):
            if self._gradients[number] is None:
                self._gradients[number] = contiguous_gradient(shard).float()
        self._start_complete()
        return [gradient for gradient in self._gradients if gradient is not None]

    def finish(self, info: StepInfo) -> list[Tensor]:
        """Wait for all chunks and return the result of the method's `synchronize`."""
        gradients = self._start_all()
        for sent in self._in_flight:
            sent.handle.wait()
            self._method.finish_early(sent, info)
        self._forget()
        self.complete = []
        return gradients

    @torch.no_grad()
    def _on_gradient(self, number: int, parameter: Tensor) -> None:
        """Handle a parameter's completed gradient."""
        if not self.active:
            return
        if self._gradients[number] is not None:
            raise ValueError(
                f"after prepare_last_backward(), the gradient of {self._shards[number].name!r} was completed twice; "
                "call it before the last backward pass of a step only, or leave overlap out if FSDP2 has a module that "
                "is used twice ([sync] overlap = false in a recipe)"
            )
        if self._device.type == "cuda":  # a chunk may have gradients of several streams: FSDP2 has one per root module
            last, self._stream = self._stream, torch.cuda.current_stream(self._device)
            if last is not None and last != self._stream:
                self._stream.wait_stream(last)
        self._gradients[number] = contiguous_gradient(self._shards[number]).float()
        self._start_complete()

    def _start_complete(self) -> None:
        for number in self._expected[len(self._in_flight) :]:
            if not self._is_complete(number):
                return
            with torch._C._DisableAutocast():  # the backward pass may be inside of it
                self._in_flight.append(self._method.start_early(number, self._gradients))

    def _is_complete(self, number: int) -> bool:
        return all(self._gradients[tensor] is not None for tensor in self._required[number])

    def _forget(self) -> None:
        self._gradients, self._in_flight, self.active = [None] * len(self._shards), [], False


class _Arrival(NamedTuple):
    """An exchange in flight.

    Attributes:
        numbers: the shards whose weights it changes.
        wait: lets the current stream wait for it, or on a CPU the thread. A later call has no effect on a CPU.
        exchange: keeps its tensors in memory, whose stream may reuse it only after it has waited.
    """

    numbers: frozenset[int]
    wait: Callable[[], Any]
    exchange: Exchange


class ForwardOverlap:
    """Lets a model's modules wait for the changes of their own weights, which arrive during its forward pass.

    The changes of all weights are sent at the end of a step, on every replica in the same order, and added in the
    background, on a CPU by a thread. Pre-hooks of the modules wait only, so that replicas may run them in different
    orders. FSDP2 gathers the weights of a module after its hook, because the hook comes first.

    A hook waits for all weights inside a module, if that is a small part of the model. Larger modules, such as the
    model itself, wait for their direct parameters, and the modules inside have hooks of their own. A module may use
    weights of another one without calling it. The model itself waits for the weights of all modules with a hook that
    some forward pass did not call; before the first forward pass nothing may be in flight. Without gradients, as in an
    evaluation, it waits for all weights. After its forward pass the model waits for all that is left.

    A module compiled by `torch.compile` waits before its compiled code, and so does a compiled model, for all weights.
    If a model is compiled later, every hook is a graph break.

    Args:
        model: the model.
        shards: all trainable parameters.
        timer: receives the time of waiting as "exchange".
    """

    def __init__(self, model: nn.Module, shards: Sequence[Shard], timer: PhaseTimer) -> None:
        self._model, self._timer, self._device = model, timer, shards[0].device
        self._parameters = [shard.parameter for shard in shards]
        self._numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._entries = [shard.size for shard in shards]
        self._in_flight: list[_Arrival] = []
        self._comm_stream = CommStream()
        self._stream: Any = None  # on a GPU the stream of the changes
        self._copy_in_streams: list[Any] = []
        self._called: set[nn.Module] = set()
        self.is_ready = is_compiled(model)
        self._needed: dict[nn.Module, set[int]] = {}  # the shards that a module with a hook waits for
        if not self.is_ready:
            self._assign(model, model)
            model.register_forward_hook(self._after_model)
        everywhere = set().union(*self._needed.values())
        self._needed.setdefault(model, set()).update(set(range(len(shards))) - everywhere)
        for module in self._needed:
            call_before(module, self._before_module)
        for module in model.modules():
            module.register_state_dict_pre_hook(self._before_access)
            module.register_load_state_dict_pre_hook(self._before_access)

    @classmethod
    def of(cls, method: Method, model: nn.Module | None, shards: Sequence[Shard]) -> "ForwardOverlap | None":
        """Return the overlap of a method whose exchange ends with changes of the weights; None without a model."""
        if model is None or not (isinstance(method, EarlyExchange) and method.sends_weights):
            return None
        overlap = method.arriving = cls(model, shards, method.context.timer)
        return overlap

    def __deepcopy__(self, memo: Any) -> "ForwardOverlap":
        """Return the object itself: the hooks of a copied model, whose weights no exchange changes, do nothing."""
        return self

    def __reduce__(self) -> NoReturn:
        raise ValueError(
            "the model has hooks of this process, because overlap with 'quantized_update' changes its weights during "
            "the forward pass; save model.state_dict() in place of the model"
        )

    # --------------------------------------------------------------------------------------------- set-up

    def _assign(self, module: nn.Module, owner: nn.Module) -> None:
        """Decide for a large module and all modules inside which ones wait for which shards.

        owner: the innermost module around the direct parameters that is called itself.
        """
        self._needed.setdefault(owner, set()).update(self._inside(module, recurse=False))
        for child in module.children():
            numbers = self._inside(child)
            if not numbers:
                continue
            is_large = LARGEST_UNIT * sum(self._entries[i] for i in numbers) > sum(self._entries)
            # Lists and dicts of modules have no `forward` of their own, and neither have compiled modules.
            if type(child).forward is nn.Module.forward and not is_compiled(child):
                self._assign(child, owner)
            elif is_large and any(True for _ in child.children()) and not is_compiled(child):
                self._assign(child, child)
            else:
                self._needed.setdefault(child, set()).update(numbers)

    def _inside(self, module: nn.Module, recurse: bool = True) -> set[int]:
        numbers = (self._numbers.get(id(parameter)) for parameter in module.parameters(recurse))
        return {number for number in numbers if number is not None}

    def _add_fsdp_groups(self) -> None:
        """Let modules wait for all weights that FSDP2 gathers before them."""
        above = {inner: module for module in self._needed for inner in module.modules()}  # outer modules come first
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                for group in filter(None, (fsdp_parameter_group(module), *fsdp_prefetched(module))):
                    gathered = (self._numbers.get(id(parameter.sharded_param)) for parameter in group.fsdp_params)
                    self._needed[above[module]].update(number for number in gathered if number is not None)

    # ------------------------------------------------------------------------------------------ in a step

    def start(self, numbers: Collection[int], exchange: Exchange) -> None:
        """Finish an exchange, which changes the weights of some shards, in the background.

        Call it in the same order on all replicas, after `is_ready`.
        """

        def finish() -> None:
            handle, store = exchange
            handle.wait()
            store()

        if self._device.type != "cuda":
            wait = self._comm_stream.start(finish, self._device).wait
        else:  # not by the hook: FSDP2 gathers the weights on a stream of its own, beside the forward pass
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device, priority=HIGH_PRIORITY)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                finish()
            done = self._stream.record_event()
            wait = lambda: torch.cuda.current_stream(self._device).wait_event(done)  # noqa: E731
        self._in_flight.append(_Arrival(frozenset(numbers), wait, exchange))

    def finish(self) -> None:
        """Wait for all changes in flight."""
        self._wait(range(len(self._entries)))

    def _wait(self, numbers: Collection[int]) -> None:
        awaited: list[_Arrival] = []
        others: list[_Arrival] = []
        for arrival in self._in_flight:
            (others if arrival.numbers.isdisjoint(numbers) else awaited).append(arrival)
        if not awaited:
            return
        with self._timer.phase("exchange"):
            for arrival in awaited:
                arrival.wait()
            for stream in self._copy_in_streams:
                with torch.cuda.stream(stream):
                    for arrival in awaited:
                        arrival.wait()
        # Autograd then refuses a backward pass that has stored one of these weights before.
        changed = set().union(*(arrival.numbers for arrival in awaited))
        torch.autograd.graph.increment_version([self._parameters[number] for number in changed])
        self._in_flight = others

    @torch.compiler.disable
    def _before_module(self, module: nn.Module) -> None:
        if module not in self._needed:
            return
        if module is self._model:
            self._called.clear()
            if not self.is_ready:
                self._add_fsdp_groups()
            if not torch.is_grad_enabled():  # an evaluation may use the weights in another way
                self.finish()
        self._called.add(module)
        if self._in_flight:
            self._wait(self._needed[module])

    @torch.compiler.disable
    def _after_model(self, model: nn.Module, *_: Any) -> None:
        if model is not self._model:
            return
        for module, numbers in self._needed.items():
            if module not in self._called:
                self._needed[self._model] |= numbers
        if not self.is_ready:
            self.is_ready, self._copy_in_streams = True, fsdp_copy_in_streams(self._model)
        self.finish()

    def _before_access(self, *_: Any) -> None:
        self.finish()
