"""The check for non-finite gradients, agreed over all ranks, before a step changes any state.

A NaN in a residual would stay there, so every write of a step depends on this flag. Requests to stop the run are part
of the same collective.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.kernels.backends import choose_backend, finite_check

logger = logging.getLogger(__name__)


class NonFiniteGradientError(RuntimeError):
    """Too many steps in a row had NaN or Inf in some rank's gradient."""


def summable_below(factor: float) -> float:
    """Return the power of two below which values times `factor` fit into FP32; infinity if `factor` is 1 or less.

    Values are multiplied by the gradient scale and summed over replicas, in which a finite gradient can overflow.
    """
    return 2.0 ** (128 - math.ceil(math.log2(factor))) if factor > 1.0 else math.inf


def gradient_check(
    kernels: str, shards: Sequence[Shard], factor: float, by_norms: bool
) -> Callable[[list[Tensor]], Tensor]:
    """Return a function of gradients that returns whether each is finite, also if multiplied by `factor`: bool (n,).

    Args:
        kernels: "auto", "triton" or "torch".
        by_norms: Whether the gradients are clipped by their norms afterwards, see `NormCheck`.
    """
    backend = choose_backend(kernels, shards[0].device, {shard.parameter.dtype for shard in shards})
    limit = summable_below(factor)
    return NormCheck(limit) if by_norms else finite_check(backend, limit)


class NormCheck:
    """Check of gradients by their norms, for methods that clip by them: the gradients are read once instead of twice.

    A norm in FP64 is finite if and only if all FP32 entries are. One that is not below the limit counts as not finite.

    Attributes:
        norms: FP64 (n,), of each gradient of the last check, before it is scaled.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.norms: Tensor  # set by the first check

    def __call__(self, gradients: list[Tensor]) -> Tensor:
        self.norms = torch.stack(torch._foreach_norm(gradients, 2, torch.float64))
        return self.norms < self._limit


class FiniteGuard:
    """Checks gradients on all ranks, and raises an error after too many skipped steps in a row.

    On the device the flag gates the step's writes. The host reads it one step later, in `finish_previous_step`, so that
    it never waits for the device within a step.

    Args:
        names: of the gradients, for messages.
        finite: returns bool (n,): whether each gradient is finite.
        all_true: combines flags over all ranks.
        gather_objects: gathers an object from all ranks, for messages.
        rank: of this process.
        max_skipped_steps: the limit.

    Attributes:
        applied: bool () on the device: the flag of the last check. The same tensor after every check.
        skipped: number of skipped steps.
        skipped_in_a_row: of them, the last ones without an applied step in between.
        asked_to_stop: whether this rank requests a stop; called at every check.
        stop_agreed: whether any rank requested one at the last check that `finish_previous_step` has read.
        extra_flags_all_true: of each extra flag of that check, whether it was true on every rank.
        summed_over: description of the ranks over which the checked gradients were summed; "" if they are this rank's
            own.
    """

    def __init__(
        self,
        names: Sequence[str],
        finite: Callable[[list[Tensor]], Tensor],
        all_true: Callable[[Tensor], Tensor],
        gather_objects: Callable[[Any], list[Any]],
        rank: int,
        max_skipped_steps: int,
    ) -> None:
        self.names = list(names)
        self.rank = rank
        self.max_skipped_steps = max_skipped_steps
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.asked_to_stop: Callable[[], bool] = lambda: False
        self.stop_agreed = False
        self.extra_flags_all_true: list[bool] = []
        self.summed_over = ""
        self._may_go_on: list[Tensor] = []
        self._finite = finite
        self._all_true = all_true
        self._gather_objects = gather_objects
        self._each: Tensor | None = None
        self.applied: Tensor | None = None
        self._pending: tuple[Tensor, Any] | None = None
        self._was_applied = True

    def check(self, gradients: list[Tensor], extra_flags: Sequence[bool] = ()) -> Tensor:
        """Return `applied`: whether every gradient of every rank is finite. Collective.

        Args:
            extra_flags: further flags to combine over ranks, see `extra_flags_all_true`; as many on all ranks.
        """
        self._each = self._finite(gradients)
        finite = self._each.all()
        if not self._may_go_on:  # both values are kept on the device, so that a step copies nothing from the host
            self._may_go_on = [torch.ones_like(finite), torch.zeros_like(finite)]
        asked = [self._may_go_on[no] for no in (self.asked_to_stop(), *(not flag for flag in extra_flags))]
        flags = self._all_true(torch.stack([finite, *asked]))
        if self.applied is None:
            self.applied = torch.empty_like(flags[0])
        self.applied.copy_(flags[0])
        if not self.applied.is_cuda:
            self._pending = (flags, None)
        else:
            on_host = torch.empty(len(flags), dtype=torch.bool, pin_memory=True, device="cpu")
            on_host.copy_(flags, non_blocking=True)
            # The event belongs to the stream of the copy, because the current device may be another one.
            self._pending = (on_host, torch.cuda.current_stream(flags.device).record_event())
        return self.applied

    def norms_by_replica(self, replicas: int) -> Sequence[Tensor | None]:
        """Return the norms of each replica's gradients in the last check, FP64 (n,); None if it computed none."""
        if not isinstance(self._finite, NormCheck):
            return [None] * replicas
        return self._finite.norms.view(replicas, -1).unbind()

    def last_applied(self) -> bool:
        """Return whether the last step was applied. Waits for its check, not for later work on the device."""
        if self._pending is not None:
            flags, event = self._pending
            if event is not None:
                event.synchronize()
            self._was_applied = bool(flags[0])
        return self._was_applied

    def finish_previous_step(self) -> bool | None:
        """Return whether the last checked step was applied; None if this was read before. Collective if it raises.

        Raises:
            NonFiniteGradientError: on every rank, after `max_skipped_steps` skipped steps in a row.
        """
        if self._pending is None:
            return None
        flags, event = self._pending
        self._pending = None
        if event is not None:
            event.synchronize()
        applied, may_go_on, *self.extra_flags_all_true = flags.tolist()
        self.stop_agreed, self._was_applied = not may_go_on, applied
        if applied:
            self.skipped_in_a_row = 0
            return True
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.max_skipped_steps:
            raise NonFiniteGradientError(
                f"the gradients were not finite, or too large to be summed, for {self.skipped_in_a_row} steps in a row "
                f"(max_skipped_steps={self.max_skipped_steps}); in the last one: {self._culprits()}. "
                f"{self._summed_ranks_note()}"
                "Parameters and state are those of the last good step. Lower the learning rate, or look at "
                f"the data of {self.summed_over or 'that rank'}."
            )
        logger.warning("skipped a step: some rank's gradient was not finite (%d in a row)", self.skipped_in_a_row)
        return False

    def _summed_ranks_note(self) -> str:
        if not self.summed_over:
            return ""
        return f"A rank has a part of the sum over {self.summed_over}, any of which may have made it. "

    def _culprits(self) -> str:
        assert self._each is not None
        bad = [name for name, good in zip(self.names, self._each.tolist(), strict=True) if not good]
        found = [(rank, names) for rank, names in sorted(self._gather_objects((self.rank, bad))) if names]
        texts = [
            f"rank {rank}, parameter {names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            for rank, names in found
        ]
        return "; ".join(texts[:4]) + (f"; and {len(texts) - 4} more ranks" if len(texts) > 4 else "")
