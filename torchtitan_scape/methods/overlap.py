"""Exchanges that run beside the backward pass of a step and the forward pass of the next one."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard, contiguous_gradient
from torchtitan_scape.methods.interface import Method, StepInfo
from torchtitan_scape.topology.chunks import Exchange
from torchtitan_scape.topology.collectives import ReplicaCollectives


class ArrivingWeights(Protocol):
    """Changes of the weights that arrive during the next forward pass, see `replica.forward_overlap`."""

    @property
    def is_ready(self) -> bool:
        """Whether modules wait for their weights already."""

    def start(self, numbers: Collection[int], exchange: Exchange) -> None:
        """Finish an exchange, which changes the weights of some shards, in the background."""


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
    arriving: ArrivingWeights | None = None

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
        self._order = list(range(len(self._required)))
        self._expected: list[int] = []  # the chunks of this step, in their order
        self._flags = max(method.collectives.gather_objects(len(self._order)))
        self.complete: list[bool] = []
        self.active = False
        for number, shard in enumerate(shards):
            shard.parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, number))

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
        self._gradients[number] = contiguous_gradient(self._shards[number]).float()
        self._start_complete()

    def _start_complete(self) -> None:
        for number in self._expected[len(self._in_flight) :]:
            if not self._is_complete(number):
                return
            self._in_flight.append(self._method.start_early(number, self._gradients))

    def _is_complete(self, number: int) -> bool:
        return all(self._gradients[tensor] is not None for tensor in self._required[number])

    def _forget(self) -> None:
        self._gradients, self._in_flight, self.active = [None] * len(self._shards), [], False
