"""The check for non-finite gradients, agreed over all ranks, before a step changes any state.

A NaN in a residual would stay there, so every write of a step depends on this flag. Requests to stop the run are part
of the same collective.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.core.plausibility import DamagedParametersError
from torchtitan_scape.kernels.backends import choose_backend, finite_check, norms
from torchtitan_scape.replica.norms import ABSURD, FACTOR, NormLimits, above_the_limit
from torchtitan_scape.replica.rates import RateComparison

logger = logging.getLogger(__name__)

_LARGEST_NORM = 2.0**56  # of a gradient that a method squares, encodes or transforms

_FAR_ABOVE = f"more than {ABSURD:,.0f} times the usual norm of a replica's gradient"
_DAMAGE = "the memory of a device may be damaged; start the run again from the last checkpoint"
_NORM_NOT_FINITE = "the norm of the synchronized gradient was not finite, although every gradient was"


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
        by_norms: Whether the norms of the gradients are needed afterwards, see `NormCheck`.
    """
    backend = choose_backend(kernels, shards[0].device, {shard.parameter.dtype for shard in shards})
    if by_norms:
        return NormCheck(norms(backend), _LARGEST_NORM / factor)
    return finite_check(backend, summable_below(factor))


class NormCheck:
    """Check of gradients by their norms, for methods that need them: the gradients are read once instead of twice.

    A norm in FP64 is finite if and only if all FP32 entries are. One that is not below the limit counts as not finite.
    The limit is so low that squares and the scales of codes fit into FP32.

    Attributes:
        norms: FP64 (n,), of each gradient of the last check, before it is scaled.
    """

    def __init__(self, norms_of: Callable[[list[Tensor]], Tensor], limit: float) -> None:
        self._norms_of, self._limit = norms_of, limit
        self.norms: Tensor  # set by the first check

    def __call__(self, gradients: list[Tensor]) -> Tensor:
        self.norms = self._norms_of(gradients)
        return self.norms < self._limit


class FiniteGuard:
    """Checks gradients on all ranks, and raises an error after too many skipped steps in a row.

    On the device the flag gates the step's writes. The host reads it one step later, in `finish_previous_step`, so that
    it never waits for the device within a step.

    Args:
        names: of the gradients, for messages.
        finite: returns bool (n,): whether each gradient is finite.
        minimum_over_all: returns the smallest of each entry over all ranks, FP32.
        gather_objects: gathers an object from all ranks, for messages.
        rank: of this process.
        max_skipped_steps: the limit.
        limits: of the gradients' norms, for methods that need them; the check must then be a `NormCheck`.
        rates: compares the rates of all replicas in every check; None for one replica.

    Attributes:
        applied: bool () on the device: whether the step is applied, as far as known. The same tensor in each step.
        finite: bool () on the device: whether all gradients of the last check were finite.
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
        minimum_over_all: Callable[[Tensor], Tensor],
        gather_objects: Callable[[Any], list[Any]],
        rank: int,
        max_skipped_steps: int,
        limits: NormLimits | None = None,
        rates: RateComparison | None = None,
    ) -> None:
        self.names = list(names)
        self.rank = rank
        self.max_skipped_steps = max_skipped_steps
        self.limits, self._limits, self.rates = [] if limits is None else limits.each, limits, rates
        self.skipped = self.skipped_in_a_row = 0
        self.asked_to_stop: Callable[[], bool] = lambda: False
        self.stop_agreed = False
        self.extra_flags_all_true: list[bool] = []
        self.summed_over = ""
        self.finite = self.applied = torch.ones((), dtype=torch.bool, device="cpu")
        self._is_absurd, self._absurd_in_a_row = False, 0
        self._constants: list[Tensor] = []
        self._finite = finite
        self._minimum_over_all = minimum_over_all
        self._gather_objects = gather_objects
        self._each: Tensor | None = None
        self._outcome: Tensor | None = None  # smallest values over all ranks: flags, rates, factors of all replicas
        self._extra_flags = 0
        self._was_sent = False
        self._pending: tuple[Tensor, Any] | None = None
        self._was_applied = True

    def check(self, gradients: list[Tensor], extra_flags: Sequence[bool] = (), was_sent: bool = False) -> Tensor:
        """Return `applied`: whether every gradient of every rank is finite. Collective.

        Args:
            extra_flags: further flags to combine over ranks, see `extra_flags_all_true`; as many on all ranks.
            was_sent: whether the gradients were sent before this check. The step is then not applied if a norm is above
                its limit.
        """
        self._each = self._finite(gradients)
        finite = self._each.all()
        if not self._constants:  # both values are kept on the device, so that a step copies no flag from the host
            self._constants = [torch.zeros_like(finite), torch.ones_like(finite)]
            self.applied = torch.empty_like(finite)
        flags = [not self.asked_to_stop(), not self._is_absurd, *extra_flags]
        flags = torch.stack([finite, *(self._constants[flag] for flag in flags)])
        rates = [] if self.rates is None else [self.rates.checksums(finite.device)]
        norms = self.norms_by_replica(len(self.limits)) if self._limits is not None else ()
        factors = [] if self._limits is None else [self._limits.own_factors(norms)]
        self._outcome = self._minimum_over_all(torch.cat([flags.float(), *rates, *factors]))
        self._extra_flags, self._was_sent = len(extra_flags), was_sent
        self.finite = self._outcome[0] > 0.0
        self.applied.copy_(self.finite)
        if self._limits is not None and was_sent:
            self.applied.logical_and_(self._outcome[-self._limits.replicas :].amin() >= 1.0)
        return self.applied

    def limit_norms(self, rows: Sequence[list[Tensor]], multiply: Callable[[list[Tensor], Tensor], None]) -> None:
        """Scale the gradients of each replica down to its limit, in place, unless they were sent before the check."""
        if self._limits is None:
            return
        assert self._outcome is not None
        if not self._was_sent:
            self._limits.scale(rows, self._outcome[-self._limits.replicas :], multiply)
        for limit in self.limits:
            limit.update(self.finite)

    def conclude(self, norm: Tensor) -> None:
        """Take back `applied` if the norm of the synchronized gradient, FP32 (), is not finite: call it after a step.

        The method has left out its update by the same rule.
        """
        assert self._outcome is not None
        self.applied.logical_and_(norm.isfinite())
        is_absurd = self._constants[False] if self._limits is None else self._limits.is_absurd(norm)
        judged = torch.stack([is_absurd.to(norm.dtype), norm.detach()])
        outcome, self._outcome = torch.cat([self._outcome, judged]), None
        if not outcome.is_cuda:
            self._pending = (outcome, None)
            return
        on_host = torch.empty(len(outcome), dtype=outcome.dtype, pin_memory=True, device="cpu")
        on_host.copy_(outcome, non_blocking=True)
        # The event belongs to the stream of the copy, because the current device may be another one.
        self._pending = (on_host, torch.cuda.current_stream(outcome.device).record_event())

    def norms_by_replica(self, replicas: int) -> Sequence[Tensor]:
        """Return the norms of each replica's gradients in the last check, FP64 (n,), of a guard with a `NormCheck`."""
        assert isinstance(self._finite, NormCheck)
        return self._finite.norms.view(replicas, -1).unbind()

    def last_applied(self) -> bool:
        """Return whether the last step was applied. Waits for its norm, not for later work on the device."""
        if self._pending is not None:
            outcome, event = self._pending
            if event is not None:
                event.synchronize()
            self._was_applied = self._is_applied(outcome.tolist())
        return self._was_applied

    def _is_applied(self, outcome: list[float]) -> bool:
        was_too_large = self._was_sent and any(factor < 1.0 for factor in self._factors(outcome))
        return bool(outcome[0] and not was_too_large and math.isfinite(outcome[-1]))

    def _factors(self, outcome: list[float]) -> list[float]:
        """Return the factors of all replicas in the last check; [] without a limit."""
        return [] if self._limits is None else outcome[-2 - self._limits.replicas : -2]

    def finish_previous_step(self) -> bool | None:
        """Return whether the last checked step was applied; None if this was read before. Collective if it raises.

        Raises:
            NonFiniteGradientError: on every rank, after `max_skipped_steps` skipped steps in a row.
            DamagedParametersError: on every rank, after as many steps in a row whose gradients were finite and whose
                synchronized gradient was not, or was far too large.
            ValueError: on every rank, if the rates of the replicas differed.
        """
        if self._pending is None:
            return None
        outcome, event = self._pending
        self._pending = None
        if event is not None:
            event.synchronize()
        values = outcome.tolist()
        finite, may_go_on, usual_before, *others = values
        factors = self._factors(values)
        flags = others[: len(others) - 2 - len(factors)]
        self.stop_agreed, self._was_applied = not may_go_on, self._is_applied(values)
        self.extra_flags_all_true = [bool(flag) for flag in flags[: self._extra_flags]]
        if self.rates is not None:
            self.rates.check(flags[self._extra_flags :])
        if self._was_applied:
            self.skipped_in_a_row = 0
            if limited := above_the_limit(factors):
                logger.warning(f"{limited}, and was scaled down to {FACTOR:g} times it")
            self._judge(bool(values[-2]), values[-1], bool(usual_before))
            return True
        self.skipped += 1
        self.skipped_in_a_row += 1
        cause = "some rank's gradient was not finite"
        if finite:
            is_spike = self._was_sent and above_the_limit(factors)
            cause = f"{above_the_limit(factors)}, and its exchange had begun" if is_spike else _NORM_NOT_FINITE
        if self.skipped_in_a_row >= self.max_skipped_steps:
            self._give_up(cause if finite else "")
        logger.warning("skipped a step: %s (%d in a row)", cause, self.skipped_in_a_row)
        return False

    @property
    def alarm(self) -> str:
        """Why the present state should not replace that of an older checkpoint, "" if it may.

        A single skipped step is usual; its state is that of the step before.
        """
        if self._absurd_in_a_row:
            return f"the norm of the synchronized gradient was {_FAR_ABOVE}"
        return f"the last {self.skipped_in_a_row} steps were skipped" if self.skipped_in_a_row > 1 else ""

    def _judge(self, is_absurd: bool, norm: float, usual_before: bool) -> None:
        """Raise DamagedParametersError on every rank if some rank's norm is absurd for too long.

        Args:
            is_absurd: whether the norm of the step is, which other ranks learn of in the next check.
            usual_before: whether that of the step before was usual on all ranks.
        """
        self._is_absurd = is_absurd
        if is_absurd:
            logger.warning(
                f"the norm of the synchronized gradient is {norm:.3g}, {_FAR_ABOVE}; the run ends if this lasts"
            )
        self._absurd_in_a_row = 0 if usual_before else self._absurd_in_a_row + 1
        if self._absurd_in_a_row >= self.max_skipped_steps:
            raise DamagedParametersError(
                f"the norm of the synchronized gradient was {_FAR_ABOVE} for {self._absurd_in_a_row} steps: {_DAMAGE}"
            )

    def _give_up(self, cause: str) -> NoReturn:
        """Raise the error after too many skipped steps; `cause` is "" if a gradient was not finite."""
        steps = f"for {self.skipped_in_a_row} steps in a row (max_skipped_steps={self.max_skipped_steps})"
        if cause == _NORM_NOT_FINITE:
            raise DamagedParametersError(f"{cause}, {steps}: {_DAMAGE}")
        what = "the gradients were not finite, or too large to be summed"
        raise NonFiniteGradientError(
            f"{cause or what}, {steps}; "
            + ("" if cause else f"in the last one: {self._nonfinite_ranks()}. ")
            + f"{self._summed_ranks_note()}Parameters and state are those of the last good step. Lower the learning "
            f"rate, or look at the data of {self.summed_over or 'that rank'}."
        )

    def _summed_ranks_note(self) -> str:
        if not self.summed_over:
            return ""
        return f"A rank has a part of the sum over {self.summed_over}, any of which may have made it. "

    def _nonfinite_ranks(self) -> str:
        assert self._each is not None
        bad = [name for name, good in zip(self.names, self._each.tolist(), strict=True) if not good]
        found = [(rank, names) for rank, names in sorted(self._gather_objects((self.rank, bad))) if names]
        texts = [
            f"rank {rank}, parameter {names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            for rank, names in found
        ]
        return "; ".join(texts[:4]) + (f"; and {len(texts) - 4} more ranks" if len(texts) > 4 else "")


def guard_of(optimizer: Any, scale: float, kernels: str, max_skipped_steps: int) -> FiniteGuard:
    """Return the check of the gradients of all replicas of a `ReplicaOptimizer` that is being built. Collective.

    Args:
        scale: by which the gradients are multiplied afterwards.
    """
    shards, collectives, device = optimizer.shards(), optimizer.collectives, optimizer.grad_norm.device
    limits = None
    if optimizer.methods[0].limits_gradients:
        numbers = [endpoint.replica for endpoint in optimizer.replicas.endpoints]
        limits = NormLimits(numbers, collectives.replicas, scale, device)
    many = collectives.replicas * collectives.model_ranks > 1
    by_norms = bool(optimizer.weights or limits)
    return FiniteGuard(
        [shard.name + endpoint.label for endpoint in optimizer.replicas.endpoints for shard in shards],
        gradient_check(kernels, shards, scale * collectives.replicas, by_norms),
        optimizer.timer.timed("wait", collectives.minimum_over_all),
        collectives.gather_objects,
        dist.get_rank() if dist.is_initialized() else 0,
        max_skipped_steps,
        limits,
        RateComparison(lambda: optimizer.param_groups, collectives) if many else None,
    )
