"""Observer interface: access to gradients between exchange and clipping, and to state after the update."""

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from torch import Tensor


class Observer(Protocol):
    """Receiver of synchronized gradients.

    Attributes:
        names: Names of the observed parameters.
    """

    @property
    def names(self) -> Collection[str]: ...

    def synchronized(self, gradient: Callable[[str], Tensor], applied: Tensor) -> None:
        """Observe gradients between exchange and clipping, on every rank. Collective.

        Args:
            gradient: Returns the gradient of a parameter by name, FP32 (n,), in mean units and read-only; NaN at
                entries that the step does not exchange. Collective: every rank requests the same names in the same
                order.
            applied: See `methods.interface.StepInfo`.
        """


class ObservedState(NamedTuple):
    """State of a parameter after a step, FP32 (n,), read-only: its first moment, if there is one, and the residual of
    each replica of this process, if there is error feedback.
    """

    moment: Tensor | None
    residuals: list[Tensor]
