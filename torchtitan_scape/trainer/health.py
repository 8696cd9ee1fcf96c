"""Signs in the logged figures that a model no longer learns, although no gradient is NaN."""

import math

from torchtitan_scape.core.plausibility import DamagedParametersError

PATIENCE = 3  # logged steps in a row with such a sign, after which the run ends
_RANDOM, _LEARNED = 0.98, 0.8  # of ln(vocabulary): a loss of random output, and one of a model that has learned


class Health:
    """Judges the loss and the gradient norm of logged steps. Every rank must be given the same values.

    A model with random output has the loss ln(vocabulary). `alarm` is what is wrong at the last logged step, "" if
    nothing is. Meanwhile no checkpoint is written or deleted.
    """

    def __init__(self, vocabulary: int) -> None:
        self._random = math.log(vocabulary)
        self._lowest = math.inf
        self._in_a_row = 0
        self.alarm = ""

    def judge(self, step: int, loss: float, zero_gradient: bool, last: bool = False) -> str:
        """Return the new `alarm`.

        Raises DamagedParametersError if it has been there for `PATIENCE` logged steps, or is there at the last step.
        """
        self.alarm = ""
        if zero_gradient:
            self.alarm = f"the gradient norm is exactly 0 at step {step}"
        elif self._lowest < _LEARNED * self._random and _RANDOM * self._random <= loss < math.inf:
            self.alarm = (
                f"the loss was {self._lowest:.3g} and is {loss:.3g} at step {step}, that of a model with random output"
            )
        else:
            self._lowest = min(self._lowest, loss)
        self._in_a_row = self._in_a_row + 1 if self.alarm else 0
        if self._in_a_row >= PATIENCE or (last and self.alarm):
            raise DamagedParametersError(
                f"{self.alarm}, for {self._in_a_row} logged steps; a parameter may be damaged, or the learning rate is "
                "too high. Nothing was saved meanwhile: start the run again, or lower the rate if it comes back"
            )
        return self.alarm
