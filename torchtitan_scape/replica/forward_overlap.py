"""Overlap of arriving changes of the weights with the next forward pass."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.core.timing import PhaseTimer
from torchtitan_scape.methods.interface import Method
from torchtitan_scape.methods.overlap import EarlyExchange
from torchtitan_scape.topology.chunks import Exchange
from torchtitan_scape.topology.comm_stream import HIGH_PRIORITY, CommStream
from torchtitan_scape.topology.torch_version import (
    call_before,
    fsdp_copy_in_streams,
    fsdp_parameter_group,
    fsdp_prefetched,
    is_compiled,
)

LARGEST_UNIT = 8  # a module with more than one part of so many of the entries is not waited for as a whole


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
            if type(child).forward is nn.Module.forward:  # a list or a dict of modules
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
            wait = self._stream.record_event().wait
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
