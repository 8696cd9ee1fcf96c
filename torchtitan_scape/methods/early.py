"""Exchanges that run beside the backward pass of a step and the forward pass of the next one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from torchtitan_scape.methods.interface import StepInfo
from torchtitan_scape.topology.chunks import Exchange
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.comm_stream import Handle


class ChunkInFlight(NamedTuple):
    """A chunk whose exchange has started.

    Attributes:
        handle: The collective.
        finish: Stores the result after waiting for it, and updates the method's state.
    """

    handle: Handle
    finish: Callable[[StepInfo], None]


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
        overlap: `methods.overlap.BackwardOverlap`, if chunks start during the backward pass.
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
    def start_early(self, number: int, gradients: Sequence[Tensor | None]) -> ChunkInFlight:
        """Start the exchange of a chunk. Collective. Neither gradients nor state change before `finish`.

        Args:
            gradients: Those that exist now, None for the others. Those of the chunk exist.
        """

    def cancel_early(self) -> None:
        """Forget the gradients of a step that is not taken. Called after the handles of its chunks were waited for."""
