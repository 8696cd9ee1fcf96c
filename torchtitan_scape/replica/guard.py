"""The check for non-finite gradients, agreed over all ranks, before a step changes any state.

A NaN in a residual would stay there, so every write of a step depends on this flag. Requests to stop the run are part
of the same collective.
"""

import logging
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_scape.core.consistency import DamagedParametersError, ranks_text
from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.core.timing import PhaseTimer
from torchtitan_scape.kernels.backends import choose_backend, finite_check, norms
from torchtitan_scape.methods.interface import Method
from torchtitan_scape.topology.collectives import OneReplica, ReplicaCollectives
from torchtitan_scape.topology.in_process import SimulatedReplicas

logger = logging.getLogger(__name__)

FACTOR = 4.0  # largest norm of a replica's gradient, in units of the usual one
ABSURD = 1e4  # a norm of the synchronized gradient that only damage explains, in units of a replica's usual one
_STEPS = 10  # over which the usual norm is averaged
_SPIKES = 2  # in a row; the next one is the usual norm
_LARGEST_NORM = 2.0**56  # of a gradient that a method squares, encodes or transforms

_FAR_ABOVE = f"more than {ABSURD:,.0f} times the usual norm of a replica's gradient"
_DAMAGE = "the memory of a device may be damaged; start the run again from the last checkpoint"
_NORM_NOT_FINITE = "the norm of the synchronized gradient was not finite, although every gradient was"


class NonFiniteGradientError(RuntimeError):
    """Too many steps in a row had NaN or Inf in some rank's gradient."""


# ---------------------------------------------------------------------------------------------- norms


class NormLimits:
    """Scales the gradient of a replica down if its norm is above `FACTOR` times its usual one.

    Error feedback keeps the part of a gradient that a code or a mask did not send. A single huge gradient would
    therefore dominate the exchanges of many steps, and the averages of a whitening basis those of hundreds. Clipping by
    the synchronized norm comes too late for these. Limits relative to a running norm are known from ZClip (Kumar et
    al., arXiv:2504.02507) and AdaGC (Wang et al., arXiv:2502.11034); this one is for spikes alone, and far above the
    usual variation. A change that lasts is followed within a few steps.

    A rank compares the norm of its own shards. All ranks of a replica use the smallest of their factors, so that the
    direction of the gradient stays, and so do equal copies of a parameter.

    Args:
        numbers: of the replicas of this process.
        replicas: number of all replicas.
        scale: by which gradients are multiplied after their check.

    Attributes:
        usual: FP64 (3,) on the device for each replica of this process: the usual norm, 0 before the first gradient;
            the number of averaged steps; and the number of the last steps in a row above the limit.
    """

    def __init__(self, numbers: Sequence[int], replicas: int, scale: float, device: torch.device) -> None:
        self.numbers, self.replicas, self._scale = list(numbers), replicas, scale
        self.usual = [torch.zeros(3, dtype=torch.float64, device=device) for _ in numbers]
        self._last: list[tuple[Tensor, Tensor]] = []  # norm and its limit in the last check

    def own_factors(self, norms: Sequence[Tensor]) -> Tensor:
        """Return the factors of this rank, FP32 (replicas,): 1 within the limit and for NaN.

        Those of other processes are infinity. The smallest of each over all ranks is the factor of the replica.

        Args:
            norms: FP64 (n,) for each replica of this process, of the gradient of each parameter.
        """
        self._last = []
        row = self.usual[0].new_full((self.replicas,), torch.inf, dtype=torch.float32)
        for number, usual, of_parameters in zip(self.numbers, self.usual, norms, strict=True):
            norm = torch.linalg.vector_norm(of_parameters)
            largest = torch.where(usual[0] > 0.0, FACTOR * usual[0], torch.inf)
            row[number].copy_(torch.where(norm > largest, largest / norm, 1.0).float())
            self._last.append((norm, largest))
        return row

    def update(self, finite: Tensor) -> None:
        """Update the usual norms by the last ones, those that are not 0, if all gradients are `finite`, bool ()."""
        for usual, (norm, limit) in zip(self.usual, self._last, strict=True):
            mean, steps, above = usual
            is_above, largest = norm > limit, torch.minimum(norm, limit)
            steps = torch.where(mean > 0.0, (steps + 1.0).clamp(max=_STEPS), 1.0)
            above = torch.where(is_above, above + 1.0, 0.0)
            weight = torch.where(is_above, 0.5, 1.0 / steps)
            mean = torch.where(above > _SPIKES, norm, mean + weight * (largest - mean))
            masked_copy_(usual, torch.stack([mean, steps, above]), finite & (norm > 0.0))

    def is_absurd(self, norm: Tensor) -> Tensor:
        """Return whether only damage explains the norm of the synchronized gradient, bool ()."""
        usual = torch.stack([each[0] for each in self.usual]).amax()
        return (usual > 0.0) & (norm > ABSURD * self._scale * usual)


def above_the_limit(factors: Sequence[float]) -> str:
    """Return which replica's gradient was above its limit by how much, from the factors of all; "" if none was."""
    above = [number for number, factor in enumerate(factors) if factor < 1.0]
    if not above:
        return ""
    times = FACTOR / max(factors[above[0]], 1e-38)
    more = f" (and {len(above) - 1} more)" if len(above) > 1 else ""
    return f"the gradient of replica {above[0]}{more} had {times:.3g} times its usual norm"


# ---------------------------------------------------------------------------------------------- rates

# Checksums are below it, so that they are exact in FP32. Subtracted from the values, so that no zero is the smallest.
_OFFSET = 1 << 23
_OF_SHARES = (
    ". An optimizer that estimates such a value needs another method, such as 'quantized': here every replica runs it "
    "on its share of the parameters"
)


class RateComparison:
    """Compares learning rates and the other numbers of the param groups, which schedulers may change in every step.

    Every rank sends a checksum and its negative, of which the smallest over all ranks is taken. Each pipeline stage has
    a pair of its own, because its param groups may be others.

    Args:
        groups: returns the param groups.
        is_divided: each replica updates a share of the parameters, so that estimates of the optimizer must be equal.
    """

    def __init__(
        self, groups: Callable[[], Sequence[dict[str, Any]]], collectives: ReplicaCollectives, is_divided: bool
    ) -> None:
        self._groups, self._collectives, self._is_divided = groups, collectives, is_divided
        stages, self._stage = collectives.gather_from_stages(None)
        self._stages = len(stages)
        self._compared = set(self._read())
        self._values: dict[tuple[str, int], Any] = {}
        self._checksums: Tensor | None = None

    def _read(self) -> dict[tuple[str, int], Any]:
        """Return the numbers in all groups by (key, group)."""
        numbered = enumerate(self._groups())
        return {(key, i): _number(v) for i, group in numbered for key, v in group.items() if _is_number(v)}

    def checksums(self, device: torch.device) -> Tensor:
        """Return the values to reduce in this step, FP32 (2 * stages,)."""
        values = {key: value for key, value in self._read().items() if key in self._compared}
        if self._checksums is None or values != self._values:
            self._checksums = torch.zeros(2 * self._stages, dtype=torch.float32, device=device)
            self._values = values
            checksum = zlib.crc32(repr(sorted(values.items())).encode()) % _OFFSET
            one, other = self._checksums.view(-1, 2)[self._stage]
            one.fill_(checksum - _OFFSET)  # in contrast to a copy from the host this does not wait for the device
            other.fill_(-checksum - _OFFSET)
        return self._checksums

    def after_step(self) -> None:
        """Compare no longer what the optimizer has changed in its step: its own estimates, in the param groups."""
        if not self._is_divided:
            now = self._read()
            self._compared -= {key for key, value in self._values.items() if now.get(key) != value}

    def check(self, smallest: Sequence[float]) -> None:
        """Raise ValueError on every rank if the rates of the last step differed. Collective then.

        Args:
            smallest: of each value of that step, over all ranks.
        """
        pairs = zip(smallest[::2], smallest[1::2], strict=True)
        if all(one + other == -2 * _OFFSET for one, other in pairs):
            return
        rank = dist.get_rank() if dist.is_initialized() else 0
        every = sorted(self._collectives.gather_objects((self._stage, rank, self._values, self._compared)))
        for stage in range(self._stages):
            (_, one, expected, _), *others = (each for each in every if each[0] == stage)
            # An estimate of the optimizer may have changed on some ranks only.
            keys = sorted(set.intersection(*(compared for each, *_, compared in every if each == stage)))
            for _, rank, values, _ in others:
                for key, i in keys:
                    own, wanted = values.get((key, i)), expected.get((key, i))
                    if own != wanted:
                        raise ValueError(
                            f"rank {rank} has {key}={own!r} in param group {i}, rank {one} has {wanted!r}; every "
                            "replica needs the same values in every step: give a scheduler that reads a loss the mean "
                            f"over all ranks{_OF_SHARES if self._is_divided else ''}"
                        )
            if stage == self._stage:
                self._compared = set(keys)


def _is_number(value: Any) -> bool:
    """Return whether a value of a param group is a number, or several, that the host has."""
    if isinstance(value, Tensor):
        return value.is_cpu and value.numel() == 1
    return isinstance(value, bool | int | float) or (isinstance(value, tuple) and all(map(_is_number, value)))


def _number(value: Any) -> Any:
    """Return the value of `_is_number` as Python numbers."""
    if isinstance(value, tuple):
        return tuple(map(_number, value))
    return value.item() if isinstance(value, Tensor) else value


# ---------------------------------------------------------------------------------------------- check


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
        collectives: communication with all ranks.
        timer: receives the time of waiting for other ranks as "wait".
        limits: of the gradients' norms, for methods that need them; `finite` must then be a `NormCheck`.
        rates: compares the rates of all replicas in every check; None for one replica.

    Attributes:
        applied: bool () on the device: whether the step is applied, as far as known. The same tensor in each step.
        finite: bool () on the device: whether all gradients of the last check were finite.
        usual_norms: those of `limits`, one per replica of this process.
        asked_to_stop: whether this rank requests a stop; called at every check.
        extra_flags_all_true: of each extra flag of the check that `finish_previous_step` has read, whether it was true
            on every rank.
    """

    skipped = 0  # steps
    skipped_in_a_row = 0  # of them, the last ones without an applied step in between
    stop_agreed = False  # whether any rank requested a stop at the check that `finish_previous_step` has read
    summed_over = ""  # the ranks over which the checked gradients were summed; "" if they are this rank's own
    _is_absurd, _absurd_in_a_row = False, 0
    _each: Tensor | None = None
    _outcome: Tensor | None = None  # smallest values over all ranks: flags, rates, factors of all replicas
    _extra_flags, _was_sent, _was_applied = 0, False, True
    _pending: tuple[Tensor, Any] | None = None

    def __init__(
        self,
        names: Sequence[str],
        finite: Callable[[list[Tensor]], Tensor],
        collectives: ReplicaCollectives,
        timer: PhaseTimer,
        max_skipped_steps: int,
        limits: NormLimits | None = None,
        rates: RateComparison | None = None,
    ) -> None:
        self.names, self.max_skipped_steps = list(names), max_skipped_steps
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._finite, self._collectives, self._timer = finite, collectives, timer
        self._limits, self.rates, self.usual_norms = limits, rates, [] if limits is None else limits.usual
        self.asked_to_stop: Callable[[], bool] = lambda: False
        self.extra_flags_all_true: list[bool] = []
        self.finite = self.applied = torch.ones((), dtype=torch.bool, device="cpu")
        self._constants: list[Tensor] = []

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
        norms = self.norms_by_replica(len(self.usual_norms)) if self._limits is not None else ()
        factors = [] if self._limits is None else [self._limits.own_factors(norms)]
        outcome = torch.cat([flags.float(), *rates, *factors])
        with self._timer.phase("wait"):
            self._outcome = self._collectives.minimum_over_all(outcome)
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
        factors = self._outcome[-self._limits.replicas :]
        for number, gradients in zip(self._limits.numbers, rows, strict=True) if not self._was_sent else ():
            multiply(gradients, factors[number])
        self._limits.update(self.finite)

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
        note = f"A rank has a part of the sum over {self.summed_over}, any of which may have made it. "
        raise NonFiniteGradientError(
            f"{cause or what}, {steps}; "
            + ("" if cause else f"in the last one: {self._nonfinite_ranks()}. ")
            + (note if self.summed_over else "")
            + "Parameters and state are those of the last good step. Lower the learning rate, or look at the data of "
            f"{self.summed_over or 'that rank'}."
        )

    def _nonfinite_ranks(self) -> str:
        assert self._each is not None
        each = zip(self.names, self._each.tolist(), strict=True)
        own = self.rank, [f"parameter {name!r}" for name, good in each if not good]
        return ranks_text(self._collectives.gather_objects(own))


def guard_of(
    method: Method,
    shards: Sequence[Shard],
    replicas: OneReplica | SimulatedReplicas,
    groups: Callable[[], Sequence[dict[str, Any]]],
    timer: PhaseTimer,
    kernels: str,
    max_skipped_steps: int,
) -> FiniteGuard:
    """Return the check of the gradients of all replicas of a process. Collective.

    Args:
        method: of one of these replicas.
        groups: returns the param groups.
    """
    collectives, endpoints, scale = replicas.all, replicas.endpoints, method.context.gradient_scale
    limits, by_norms = None, method.limits_gradients or method.options.per_replica_weights
    if method.limits_gradients:
        numbers = [endpoint.replica for endpoint in endpoints]
        limits = NormLimits(numbers, collectives.replicas, scale, shards[0].device)
    many = collectives.replicas * collectives.model_ranks > 1
    return FiniteGuard(
        [shard.name + endpoint.label for endpoint in endpoints for shard in shards],
        gradient_check(kernels, shards, scale * collectives.replicas, by_norms),
        collectives,
        timer,
        max_skipped_steps,
        limits,
        RateComparison(groups, collectives, method.options.divides_update) if many else None,
    )
