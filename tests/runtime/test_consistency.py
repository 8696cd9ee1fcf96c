"""Consistency check and straggler report in real processes."""

import json
import re
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.marks import slow
from tests.pool import Pool
from tests.training import LAYOUTS, METHODS, RECIPE
from torchtitan_scape.core.timing import PhaseTimer
from torchtitan_scape.trainer.metrics import delay_text, slowest_rank

STEPS = ["--training.steps=5", "--validation.no-enable", "--metrics.no-enable-tensorboard"]
SAVES = ["--checkpoint.enable", "--checkpoint.interval=2"]


def train(
    folder: str, arguments: list[str], flip: tuple[int, int, str] | None = None, late: tuple[int, str] | None = None
) -> dict[str, Any]:
    """Run the trainer on this rank. Return its error, its log lines about waits, and the parameters.

    Args:
        flip: (step after which a bit of the named tensor flips, rank, kind of the replicated tensor).
        late: (rank that is 0.3 s late in every step, in "forward" or in "data").
    """
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.core.parameters import local
    from torchtitan_scape.trainer import metrics
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    trainer = ScapeTrainer(parse([*RECIPE, f"--job.dump_folder={folder}", *arguments]))
    optimizers, lines, rank = trainer.replica_optimizer, list[str](), dist.get_rank()
    step_optimizers, batches = optimizers.step, trainer.batch_generator

    def step_and_flip(*args: Any, **kwargs: Any) -> None:
        step_optimizers(*args, **kwargs)
        if flip and (trainer.step, rank) == flip[:2]:
            optimizers.finish_previous_step()
            part = next(
                t
                for s in optimizers.replicated_tensors()
                for kind, t in s.parts
                if kind == (flip[2] or None) and t.numel()
            )
            part.detach().view(-1).view(torch.uint8)[1] ^= 4

    def wait(*args: Any) -> None:
        threading.Event().wait(0.3)

    def late_batches(*args: Any) -> Any:
        for batch in batches(*args):
            wait()
            yield batch

    if late and rank == late[0]:
        if late[1] == "data":
            trainer.batch_generator = late_batches  # type: ignore[method-assign]
        else:
            trainer.model_parts[0].register_forward_pre_hook(wait)
    error = ""
    with (
        patch("time.sleep"),
        patch.object(optimizers, "step", step_and_flip),
        patch.object(metrics.logger, "info", lambda line, *_: lines.append(line)),
    ):
        try:
            trainer.train()
        except RuntimeError as raised:
            error = f"{type(raised).__name__}: {raised}"
    parameters = torch.cat([local(p).detach().reshape(-1) * 1.0 for p in trainer.model_parts[0].parameters()])
    trainer.close()
    return {"error": error, "lines": [line for line in lines if line.startswith("sync: ")], "parameters": parameters}


def test_a_flipped_bit_stops_all_ranks_before_a_checkpoint(pool2: Pool, pool4: Pool, tmp_path: Path) -> None:
    """With two replicas of two shards, and a dense baseline. The named rank is one of those that hold the shard."""
    for pool, name, layout, part in ((pool4, "scape-gather-bf16", "2x2", "mask"), (pool2, "adamw", "1x2", "exp_avg")):
        folder = tmp_path / name
        arguments = [*METHODS[name], *LAYOUTS[layout], *STEPS, *SAVES]
        results = pool(train, str(folder), arguments, flip=(4, 1, part))
        (error,) = {result["error"] for result in results}
        ranks = "ranks 1 and 3" if pool.world == 4 else "ranks 0 and 1"
        assert error.startswith(f"ReplicasDifferError: step 4: {ranks} differ in {part} of '")
        assert "the last one is valid" in error and "\n" not in error
        assert sorted(path.name for path in (folder / "checkpoint").glob("step-*")) == ["step-2"]


def test_four_replicas_outvote_one(pool4: Pool, tmp_path: Path) -> None:
    """With repair the run continues and equals an undisturbed one; without it the run stops. Always at the next
    check.
    """
    arguments = [*LAYOUTS["nodes"], *STEPS, "--sync.consistency_interval=2"]
    scape = [*METHODS["scape"], *arguments, "--sync.on_inconsistency=repair"]
    whole, repaired = (
        pool4(train, str(tmp_path / f"{flip}"), scape, flip=flip) for flip in (None, (4, 2, "previous mask"))
    )
    for result in repaired:
        assert not result["error"] and torch.equal(result["parameters"], whole[0]["parameters"])
    stopped = pool4(train, str(tmp_path / "stopped"), [*METHODS["adams"], *arguments], flip=(3, 2, ""))
    (error,) = {result["error"] for result in stopped}
    assert re.match(r"ReplicasDifferError: step 4: rank 2's '\S+' differs from ranks 0, 1 and 3: ", error)


@pytest.mark.parametrize("where", ["forward", slow("data")])
def test_the_rank_that_the_others_wait_for_is_named(where: str, pool2: Pool, tmp_path: Path) -> None:
    arguments = [*METHODS["scape"], *LAYOUTS["1x2"], *STEPS, "--metrics.log_freq=2"]
    results = pool2(train, str(tmp_path), arguments, late=(1, where))
    for result in results:
        first, last = result["lines"][0], result["lines"][-1]
        assert first != last and first.startswith("sync: step 1 | lr 0.001 | sent/step: ")  # warm-up of two steps
        found = re.search(r"rank 1 delays the others by (\d+) ms", last)
        assert found and float(found[1]) > 100, last
    waits = json.loads((tmp_path / "summary.json").read_text())["wait_seconds_per_step_by_rank"]
    assert len(waits) == 2 and waits[0] - waits[1] > 0.1


def test_time_in_a_nested_phase_counts_once() -> None:
    timer, now = PhaseTimer(torch.device("cpu")), 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    waits = timer.timed("wait", spend)
    with patch("time.perf_counter", lambda: now):
        with timer.phase("outer"):
            spend(99.0)  # Not enabled yet.
        timer.enabled = True
        with timer.phase("outer"):
            spend(1.0)
            waits(10.0)
            with pytest.raises(ZeroDivisionError), timer.phase("inner"):
                spend(2.0)
                waits(20.0)
                raise ZeroDivisionError
            spend(3.0)
        waits(40.0)
    assert timer.take() == {"outer": 4.0, "wait": 70.0, "inner": 2.0}
    assert timer.take() == {}


def test_slow_ranks_in_the_log() -> None:
    assert delay_text([0.002, 0.003], 1.0, ["a", "a"]) == ""
    assert slowest_rank([0.002, 0.003], 1.0) == -1
    few = [0.118, 0.117, 0.0004, 0.119]
    assert delay_text(few, 0.5, ["a"] * 4) == "rank 2 delays the others by 118 ms" and slowest_rank(few, 0.5) == 2
    assert delay_text(few, 0.5, list("dbca")) == "rank 2 on c delays the others by 118 ms"
    # Two slow ranks.
    two = delay_text([0.001, 0.2, 0.002, 0.3], 0.5, ["a"] * 4)
    assert two == "slow ranks wait least: rank 0 1 ms, rank 2 2 ms, rank 1 200 ms; median 200 ms"
