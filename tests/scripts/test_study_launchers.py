"""python -m scripts.studies.strong_scaling: what it takes, how it goes on after a stop, and each of its launchers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import methods
from scripts.common import EMBEDDED, ROOT
from scripts.emulated_cluster import Cluster, ClusterError
from scripts.studies.compare_methods import METHODS, method
from scripts.studies.scaling_emulated import Emulated
from scripts.studies.scaling_sweep import Cell, Plan
from tests import server
from tests.runtime.test_launch import SHORT
from tests.scripts.slurm.test_slurm import allocation, stand_ins
from topology.links import Link, Links, scalar_stages, stage_seconds
from topology.ring_bytes import LevelSize
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.dense.options import DenseOptions
from torchtitan_scape.methods.registry import METHODS as REGISTRY
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.methods.topk.options import TopkOptions
from torchtitan_scape.planner.run import PlannedRun


def scale(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return server.run(
        "scripts.studies.strong_scaling", *arguments, timeout=200, environment={**os.environ, **environment}
    )


def cells(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in (folder / "cells").glob("*.json")}


def test_methods_are_told_apart() -> None:
    assert methods.FAMILIES.keys() | {"dense", "scape"} == REGISTRY.keys()
    plan = Plan.parse("scape-0.01-bf16")
    assert plan.planned == PlannedRun(ScapeOptions(density=0.01, wire="bfloat16"))
    assert "--sync.scape.wire=bfloat16" in plan.options and "--sync.scape.density=0.01" in plan.options
    coded = Plan.parse("scape-0.047-int4")
    assert (coded.planned, coded.label) == (PlannedRun(ScapeOptions(density=0.047, wire="int4")), "SCAPE 0.047 int4")
    assert "--sync.scape.wire=float32" in Plan.parse("scape-0.1").options, "whatever the recipe has"
    assert Plan.parse("ddp-powersgd-4").rank == 4 and Plan.parse("hsdp").peer == "hsdp"
    powersgd = Plan.parse("powersgd-4")
    assert not powersgd.peer and {"--sync.powersgd.rank=4", "--sync.powersgd.start=0"} < set(powersgd.options)
    assert Plan.parse("diloco-30-e2m1").period == 30 and Plan.parse("radius-0.4").settles == 16
    assert "--sync.overlap" in Plan.parse("quantized-e2m1-overlap").options
    topk = Plan.parse("topk-0.015625-2bit")
    assert topk.planned == PlannedRun(TopkOptions(density=1 / 64, values="2bit"), "AdamW")
    adamw = Plan.parse("adamw")
    assert adamw.planned == PlannedRun(DenseOptions(), "AdamW") and "--optimizer.name=AdamW" in adamw.options
    for wrong in (
        "adam",
        "scape",
        "scape-2",
        "scape-0",
        "scape-0.1-fp8",
        "powersgd",
        "ddp-powersgd-x",
        "topk-2",
        "topk-0.1-overlap",
    ):
        with pytest.raises(ValueError, match=f"there is no method '{wrong}'; known are adamw"):
            Plan.parse(wrong)


def test_compared_methods_are_told_apart() -> None:
    """A recipe's own wire must not come with the name of another."""
    assert all(method(name)[0] for name in METHODS)
    label, options = method("scape-0.047-int4")
    assert label == "SCAPE 0.047 int4" and "--sync.scape.wire=int4" in options
    assert "--sync.scape.wire=float32" in method("scape-0.1-plain")[1]
    with pytest.raises(ValueError, match="there is no method 'sgd'; known are adamw, adams, muon, signsgd, scape-DEN"):
        method("sgd")


def test_a_sweep_goes_on_where_it_stopped_and_a_failure_stops_nothing(tmp_path: Path) -> None:
    recipes = f"train_configs/llama_500m.toml,{EMBEDDED}"
    sweep = ("predicted", "--sizes=4,8", "--methods=adams,scape-0.01-int4")
    sweep += (f"--recipes={recipes}", f"--output={tmp_path}")
    first = scale(*sweep)
    assert first.returncode == 1 and "4 measured, 4 failed" in first.stdout
    made = cells(tmp_path)
    assert "the cost model knows no model of" in made["embedded-adams-4"]["error"]
    report = (tmp_path / "report.md").read_text()
    assert "the cost model knows no model of" in report and "SCAPE 0.01 int4" in report

    kept = tmp_path / "cells" / "llama_500m-adams-4.json"
    kept.write_text(json.dumps({**made["llama_500m-adams-4"], "step_seconds": 123.0}))
    (tmp_path / "cells" / "llama_500m-scape-0.01-int4-8.json").unlink()
    scale(*sweep)
    again = cells(tmp_path)
    assert again["llama_500m-adams-4"]["step_seconds"] == 123.0, "what is there is kept"
    assert again["llama_500m-scape-0.01-int4-8"] == made["llama_500m-scape-0.01-int4-8"]

    other = scale(*sweep, "--network=3.5")
    assert other.returncode == 2 and "holds a sweep with another --network" in other.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("predicted", "--methods=sgd"), "there is no method 'sgd'"),
        (("predicted", "--recipes=none.toml"), "the recipe none.toml does not exist"),
        (("emulated", "--methods=ddp,adams-overlap"), "ddp, adams-overlap: exchanged during a real backward pass"),
        (("emulated", "--compute=fast"), "--compute is 'fast'; give seconds, or real"),
        (("emulated", "--slowdown=7"), "--slowdown takes a factor above 1, --compute real and one size"),
        (("emulated", "--sizes=3", "--ranks-per-node=2"), "--ranks-per-node 2 does not divide"),
        (("slurm", "--machine=frontier", "--sizes=4"), "--sizes has 4, but a node of frontier has 8 ranks"),
    ],
)
def test_wrong_sweeps_are_refused_in_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = scale(*arguments, f"--output={tmp_path}/out")
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_coded_payload_of_one_part_is_predicted_as_one() -> None:
    """By hand: its latency once, the masks hidden."""
    silent = {"by_phase": {"pack": 0.1}, "phases": {"optimizer": 0.2, "compute": 0.0}, "step_seconds": 0.3}
    links, tiers = Links({"network": Link(1e-3, 1e7)}, "by hand"), [("network", 4)]
    cell = Cell(Path(EMBEDDED), Plan.parse("scape-0.047-int4"), 4)
    emulated = SimpleNamespace(args=SimpleNamespace(ranks_per_node=1, rest=[]), real=True, links=lambda _: links)
    emulated.passes, emulated.shapes = lambda *_: {cell.plan.name: silent}, lambda _: [(100, 1000), (100,)]
    found = Emulated.predicted(emulated, cell, {"phases": {"compute": 1.0}, "payload_parts": 1})  # type: ignore[arg-type]
    model, levels = LocalModel.of_shapes([(100, 1000), (100,)]), [LevelSize(*tier) for tier in tiers]
    payload, _ = ScapeOptions(density=0.047, wire="int4").cost().collective_calls(model, levels)
    stages = payload.stages(levels) + scalar_stages(tiers)
    assert found is not None and found["exposed"] == pytest.approx(sum(stage_seconds(stages, links)))


@pytest.mark.slow
def test_an_emulated_sweep_measures_and_predicts(tmp_path: Path) -> None:
    try:
        with Cluster(1):
            pass
    except ClusterError as error:
        pytest.skip(str(error))
    sweep = ("emulated", "--sizes=2", "--methods=scape-0.1", "--compute=0.1", "--rate=200", "--steps=3", "--warm-up=2")
    # Its ranks live in namespaces of their own, where no fork of a process outside can be.
    command = [sys.executable, "-m", "scripts.studies.strong_scaling", *sweep, f"--output={tmp_path}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    (cell,) = cells(tmp_path).values()
    assert len(cell["steps"]) == 3 and min(cell["steps"]) >= 0.1
    assert cell["phases"]["compute"] == pytest.approx(0.1, rel=0.3)
    assert cell["predicted"]["step_seconds"] > 0.1
    assert cell["counted"]["network"] == pytest.approx(2 * cell["sent"]["network"] / 2, rel=0.01)
    assert cell["counted"]["network"] <= cell["nic"]["network"] <= 1.05 * cell["counted"]["network"]
    assert "SCAPE 0.1" in (tmp_path / "report.md").read_text()


def test_a_slurm_sweep_submits_runs_and_collects(tmp_path: Path) -> None:
    """sbatch runs the job at once. The first method fails, the second is measured; the next sweep resubmits the first
    alone."""
    programs, out = stand_ins(tmp_path), tmp_path / "out"
    sbatch = f'#!/bin/bash\necho "$@" >>{tmp_path}/submitted\nbash "${{@: -1}}" >{tmp_path}/log 2>&1\necho 4711\n'
    for name, text in (("sbatch", sbatch), ("squeue", "#!/bin/bash\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {
        **allocation(ROOT),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHON": server.python(),
        "MODULES": "",
        "OMP_NUM_THREADS": "1",
    }
    sweep = ("slurm", "--machine=vista", "--sizes=2", f"--recipes={EMBEDDED}", "--methods=ddp-powersgd-1,scape-0.1")
    sweep += ("--batch=4", "--steps=2", "--warm-up=2", "--poll=0.1", "--sbatch=-A project", f"--output={out}")
    short = [option for option in SHORT if "validation" not in option and "batch" not in option]
    short = [option for option in short if not option.startswith("--training.steps")]
    # DDP takes no shards: that method alone is refused, by every rank of its run.
    shards = ("--parallelism.data_parallel_replicate_degree=1", "--parallelism.data_parallel_shard_degree=2")
    result = scale(*sweep, "--", *short, *shards, **environment)
    assert result.returncode == 1 and "1 measured, 1 failed" in result.stdout, result.stdout + result.stderr
    assert "-A project" in (tmp_path / "submitted").read_text()
    assert "--nodes=2" in (tmp_path / "submitted").read_text()
    made = cells(out)
    assert "exit code" in made["embedded-ddp-powersgd-1-2"]["error"]
    cell = made["embedded-scape-0.1-2"]
    assert len(cell["steps"]) == 2 and cell["tokens_per_step"] == 4 * 32
    job = (out / "jobs" / "size-2.sh").read_text()
    assert "#SBATCH --partition=gh" in job and job.count("vista.sbatch") == 2

    scale(*sweep, "--", *short, *shards, **environment)
    assert (out / "jobs" / "size-2.sh").read_text().count("vista.sbatch") == 1
