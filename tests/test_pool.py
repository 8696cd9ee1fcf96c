"""The pool reports the rank that failed first, whatever its failure causes on the others."""

import os
import re
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankError


def all_reduce() -> None:
    dist.all_reduce(torch.ones(1))


def raise_in_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the density is negative")
    all_reduce()


def kill_rank_1() -> None:
    all_reduce()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce()


def exit_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    all_reduce()


def abort_rank_1() -> None:
    """As an exception does that leaves a thread of gloo."""
    if dist.get_rank() == 1:
        os.abort()
    all_reduce()


def raise_after(*seconds: float) -> None:
    time.sleep(seconds[dist.get_rank()])
    raise ValueError(f"after {seconds[dist.get_rank()]} s")


def die_after_a_failure() -> None:
    """Rank 0 raises; rank 1 is killed half a second later."""
    if dist.get_rank() == 0:
        raise ValueError("the density is negative")
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def hang_in_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)


def unequal_collectives() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)
    all_reduce()


def large_result() -> torch.Tensor:
    """More than the buffer of a connection holds."""
    return torch.full((1 << 18,), float(dist.get_rank()))


def failure_of(call: Callable[[], object]) -> str:
    with pytest.raises(RankError) as raised:
        call()
    return str(raised.value)


def test_results_are_in_rank_order(pool3: Pool) -> None:
    assert [float(result[0]) for result in pool3(large_result)] == [0.0, 1.0, 2.0]


def test_a_rank_that_raises_is_reported_before_the_ranks_that_wait_for_it() -> None:
    begin = time.monotonic()
    text = failure_of(lambda: Pool(3, grace=1.0)(raise_in_rank_1))
    assert time.monotonic() - begin < 30  # gloo gives up after 60 s
    assert re.match(r"rank 1: Traceback(.|\n)*raise_in_rank_1(.|\n)*ValueError: the density is negative\n", text)
    later = text.splitlines()[-2:]
    for rank, line in zip((0, 2), later, strict=True):
        assert re.match(rf"rank {rank}: \[failed .* s later\] no answer within 1 s after the first failure", line)


def test_a_killed_rank_is_reported_before_the_errors_that_its_death_causes() -> None:
    text = failure_of(lambda: Pool(2)(kill_rank_1))
    first, second = text.splitlines()
    assert first == "rank 1: the process died (SIGKILL)"
    assert re.match(r"rank 0: \[failed .* s later\] .*[Cc]onnection (closed|reset) by peer", second)


def test_a_rank_that_exits_is_reported_with_its_exit_code() -> None:
    assert failure_of(lambda: Pool(2)(exit_rank_1)).startswith("rank 1: the process died (exit code 7)\n")


def test_a_rank_that_crashes_is_reported_with_its_signal_and_stack(pool2: Pool) -> None:
    text = failure_of(lambda: pool2(abort_rank_1))
    assert text.startswith("rank 1: the process died (SIGABRT); its stacks:\n") and "in abort_rank_1" in text


@pytest.mark.parametrize("seconds", [(0.6, 0.0), (0.0, 0.6), (0.05, 0.0)])
def test_of_two_failures_the_first_in_time_is_reported(seconds: tuple[float, float], pool2: Pool) -> None:
    first = seconds.index(0.0)
    text = failure_of(lambda: pool2(raise_after, *seconds))
    assert text.startswith(f"rank {first}: Traceback") and "ValueError: after 0.0 s" in text
    assert re.search(rf"\nrank {1 - first}: \[failed 0\.\d+ s later\] ValueError: after {max(seconds)} s$", text)


def test_a_death_after_a_failure_is_reported_after_it(pool2: Pool) -> None:
    text = failure_of(lambda: pool2(die_after_a_failure))
    assert text.startswith("rank 0: Traceback")
    assert re.search(r"\nrank 1: \[failed .* s later\] the process died \(SIGKILL\)$", text)


def test_a_rank_that_hangs_is_reported_with_its_stack(pool2: Pool) -> None:
    text = failure_of(lambda: pool2(hang_in_rank_1, timeout=3))
    assert text.startswith("rank 1: no answer within 3 s; its stacks:\n") and "in hang_in_rank_1" in text
    assert "rank 0" not in text


def test_the_stacks_of_all_ranks_that_hang_are_reported(pool2: Pool) -> None:
    text = failure_of(lambda: pool2(unequal_collectives, timeout=3))
    both = re.match(r"rank 0: no answer within 3 s(.|\n)*\nrank 1: no answer within 3 s", text)
    assert both and "in all_reduce" in text and text.count("in unequal_collectives") == 2


def test_outcomes_has_one_entry_for_each_rank() -> None:
    outcomes = Pool(3, grace=1.0).outcomes(raise_in_rank_1)
    assert [good for good, _ in outcomes] == [False, False, False]
    assert "the density is negative" in outcomes[1][1] and "no answer" in outcomes[0][1]


def test_a_result_that_cannot_be_pickled_is_a_failure_of_its_rank(pool2: Pool) -> None:
    assert "pickle" in failure_of(lambda: pool2(unpicklable))


def unpicklable() -> object:
    return lambda: None
