"""Who looks at a step, and what is there to be seen: between exchange and clipping, and after the update."""

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from torch import Tensor


class Observer(Protocol):
    """names: of the parameters that it looks at."""

    @property
    def names(self) -> Collection[str]: ...

    def synchronised(self, gradient: Callable[[str], Tensor], applied: Tensor) -> None:
        """Between exchange and clipping, on every rank. A collective call.

        gradient: by a parameter's name FP32 (n,), in mean units, not to be written to; NaN at entries that the step
            exchanges nothing of. A collective call, too: every rank asks for the same ones in the same order.
        applied: see `methods.interface.StepInfo`.
        """


class ObservedState(NamedTuple):
    """Of a parameter after a step, FP32 (n,), not to be written to.

    moment: the first one, None where none is kept. residuals: of each replica of this process what it has not
    delivered; empty where methods deliver all.
    """

    moment: Tensor | None
    residuals: list[Tensor]
