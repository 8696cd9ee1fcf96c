"""scripts/live_continuation: replicas are killed, the others go on without a restart, and new ones join them."""

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from scripts.live_continuation.kills import LiveRun, check, one_loss
from scripts.live_continuation.membership import Arrival, Coordinator, Membership, Quorum
from scripts.live_continuation.replica import HELD_OUT, MAX_NORM, RATE, held_out_loss, loss_of, new_model, read_text
from tests import server
from tests.marks import slow
from tests.pool import Pool
from torchtitan_scape import DilocoOptions, NolocoOptions, replicate
from torchtitan_scape.methods.options import MethodOptions


@pytest.mark.parametrize(
    ("method", "moment"), [("diloco", "exchange"), slow("diloco", "vote"), slow("noloco", "exchange")]
)
def test_the_others_lose_no_step_and_a_new_replica_joins(method: str, moment: str, tmp_path: Path) -> None:
    """Three processes, of which one is killed while it exchanges."""
    options = [f"--method={method}", "--inner_steps=2", "--batches=100000"]
    with LiveRun(tmp_path, 3, options, server.python()) as run:
        run.wait_for_batches(12)
        row = one_loss(run, moment, 1, random.Random(0))
        run.stop()
        run.wait()
        found = check(run)
    assert row["attempts that failed"] == 1 and row["replicas left"] == "2 of 3"
    # Of the replica that was killed after the inner steps of the round.
    assert found["steps of killed replicas lost"] == 2 and found["steps of others lost"] == 0
    (joined,) = run.of("receives")
    parameters = sum(p.numel() for p in new_model().parameters())
    # Weights, anchor, outer momentum and two inner moments in FP32; the counters.
    assert 0 <= joined["bytes"] - 20 * parameters < 1000
    ends = run.of("end")
    assert len(ends) == 3 and len({e["loss"] for e in ends}) == 1 and ends[0]["loss"] < 4.8


@pytest.mark.slow
def test_a_halted_replica_is_left_out_and_returns(tmp_path: Path) -> None:
    options = ["--inner_steps=2", "--batches=100000", "--patience=3"]
    with LiveRun(tmp_path, 3, options, server.python()) as run:
        run.wait_for_batches(12)
        pid = run.of("ready", "1.0")[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        halted = time.monotonic()
        run.wait_until(lambda: any(e["names"] == ["0.0", "2.0"] for e in run.of("exchanged")), "an exchange of two")
        os.kill(pid, signal.SIGCONT)
        run.wait_until(lambda: run.of("receives", "1.0", halted), "its return")
        run.stop()
        run.wait()
    assert len(run.of("end")) == 3 and len({e["loss"] for e in run.of("end")}) == 1


def plain_loop(options: MethodOptions, steps: int) -> float:
    """Train on the same batches with `replicate` on a fixed process group; return the loss on held-out text."""
    model, text = new_model(), read_text()
    adamw = torch.optim.AdamW(model.parameters(), lr=RATE)
    optimizer = replicate(model, adamw, options, dist.group.WORLD, max_norm=MAX_NORM)
    for step in range(steps):
        loss_of(model, text[:-HELD_OUT], step * dist.get_world_size() + dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with optimizer.shared_weights():
        return held_out_loss(model, text)


@pytest.mark.parametrize("options", [DilocoOptions(inner_steps=3), slow(NolocoOptions(inner_steps=3))])
def test_without_kills_it_is_the_method_of_the_product(options: MethodOptions, pool2: Pool, tmp_path: Path) -> None:
    arguments = [f"--method={options.method_name()}", "--inner_steps=3", "--batches=12"]
    with LiveRun(tmp_path, 2, arguments, server.python()) as run:
        run.wait()
    assert [e["loss"] for e in run.of("end")] == pool2(plain_loop, options, steps=6)


# ------------------------------------------------------------------------------------------ membership


def members(names: list[str], patience: float = 60.0) -> tuple[Coordinator, list[Membership]]:
    coordinator = Coordinator(names)
    return coordinator, [Membership(name, coordinator.ports, patience) for name in names]


def test_all_replicas_get_the_same_list_and_the_same_decision() -> None:
    _, each = members(["0", "1", "2"])
    arrivals = [Arrival(str(i), 0, True) for i in range(3)]
    with ThreadPoolExecutor(3) as threads:
        for number in range(3):
            quorums = list(threads.map(Membership.agree, each, arrivals))
            assert quorums == [quorums[0]] * 3
            assert quorums[0] is not None and (quorums[0].number, quorums[0].members) == (number, tuple(arrivals))
            ready = [number != 1 or i != 2 for i in range(3)]  # in the second quorum one replica has failed
            votes = threads.map(lambda one, own, n=number: one.vote(n, own, ["0", "1", "2"]), each, ready)
            assert list(votes) == [number != 1] * 3


def test_a_lost_replica_is_left_out_and_ends_the_vote() -> None:
    _, (first, second) = members(["0", "1"])
    arrivals = Arrival("0", 0, True), Arrival("1", 0, True)
    with ThreadPoolExecutor(2) as threads:
        quorum, _ = threads.map(Membership.agree, (first, second), arrivals)
        vote = threads.submit(first.vote, quorum.number, True, ["0", "1"])
        assert not vote.done()
        second.close()
        assert vote.result(timeout=5) is False
        after = first.agree(arrivals[0])
    assert after is not None and after.members == arrivals[:1] and after.number == 1


def test_a_silent_replica_is_left_out_after_a_while_and_may_return() -> None:
    _, (first, second) = members(["0", "1"], patience=0.2)
    own, late = Arrival("0", 4, True), Arrival("1", 3, True)
    assert first.agree(own) == Quorum(0, (own,))
    with ThreadPoolExecutor(1) as threads:
        returned = threads.submit(second.agree, late)
        with pytest.raises(TimeoutError):  # the first one may train for longer than its patience
            returned.result(timeout=0.5)
        assert first.agree(own) == returned.result(timeout=5) == Quorum(1, (own, late))
