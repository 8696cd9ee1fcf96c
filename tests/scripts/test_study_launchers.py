"""The launchers of studies: what they refuse, how a study continues after a stop, and a run of each."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.common import EMBEDDED, ROOT
from scripts.emulated_cluster import Cluster, ClusterError
from scripts.study import emulated
from scripts.study.emulated import EmulatedSet
from scripts.study.grid import GRIDS, Grid
from scripts.study.launchers import predicted, process_command
from scripts.study.queue import Queue
from scripts.study.slurm import OFFLINE, SlurmSet, job_number, step_seconds, time_limit
from scripts.study.store import SETUP, Store
from scripts.study.timed import timing
from tests import server
from tests.scripts.slurm.jobs import allocation, program, stand_ins
from tests.scripts.study_stand_in import toml
from torchtitan_scape.config.checks import check_config
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.config.recipes import load
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.topology.machines import Link, Links, get_machine
from torchtitan_scape.topology.traffic import LevelSize, scalar_stages, stage_seconds


def declare(folder: Path, *sets: dict[str, Any]) -> Path:
    """Write a grid with the methods of network_bound.toml."""
    text = f'recipe = "{EMBEDDED}"\nmethods_of = "{GRIDS / "network_bound.toml"}"\n'
    text += '[report]\ntables = ["step_times", "shard_steps", "shard_losses"]\n[methods]\n'
    text += 'tagc = { label = "TAGC, 10 %", sync.method = "dense", optimizer.name = "AdamW", '
    text += 'sharding.gradients_code = "tagc", sharding.tagc.sparsity = 0.9 }\n'
    for one in sets:
        pairs = [f"{key} = {toml(value)}" for key, value in {"name": "all", **one}.items()]
        text += "[[sets]]\n" + "\n".join(pairs) + "\n"
    (folder / "grid.toml").write_text(text)
    return folder / "grid.toml"


def run(grid: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = ("run", str(grid), f"--output={grid.parent / 'out'}", f"--work={grid.parent / 'work'}", *arguments)
    return server.run("scripts.study", *given, timeout=200, environment={**os.environ, **environment})


def results(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the results by recipe and method, and size."""
    lines = [
        line
        for line in Store(folder / "out").own.values()
        if line["method"] not in (SETUP, "links", "passes", "shapes")
    ]
    return {(line["method"], line["options"]["launch.ranks"]): line["result"] for line in lines}


PREDICTED = {"launcher": "predicted", "methods": ["adams", "scape-0.01"], "sizes": [4, 8]}


def test_a_study_continues_where_it_stopped_and_a_failure_stops_nothing(tmp_path: Path) -> None:
    large = "train_configs/llama_500m.toml"
    grid = declare(tmp_path, PREDICTED | {"recipes": [large]}, PREDICTED | {"name": "shards", "launch": {"shard": 3}})
    first = run(grid)
    assert first.returncode == 1 and "4 runs done, 4 failed" in first.stdout, first.stdout + first.stderr
    store = Store(tmp_path / "out")
    failed = [line for line in store.own.values() if "error" in line["result"]]
    assert {line["set"] for line in failed} == {"shards"}
    assert all("3" in line["result"]["error"] for line in failed)

    runs = [line for line in store.own.values() if line["set"] == "all" and line["method"] != SETUP]
    changed = runs[0] | {"result": runs[0]["result"] | {"step_seconds": 123.0}}
    (tmp_path / "out" / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (changed, *runs[1:-1])))
    run(grid)
    again = Store(tmp_path / "out")
    assert again.result(changed["key"])["step_seconds"] == 123.0, "stored runs are not repeated"  # type: ignore[index]
    expected, found = runs[-1]["result"], again.result(runs[-1]["key"])
    assert found is not None and found["step_seconds"] == expected["step_seconds"]
    # Another bandwidth makes other runs.
    other = Grid(declare(tmp_path, PREDICTED | {"recipes": [large], "launch": {"network": 3.5}}))
    assert len(Queue(other, other.sets, again, 1, tmp_path).missing()) == 4


def test_any_recipe_and_size_of_a_model_is_predicted(tmp_path: Path) -> None:
    """A step of more layers takes longer; recipes need not be those of the papers."""
    names, seconds = [], []
    for layers in (2, 24):
        one = {**PREDICTED, "name": f"layers-{layers}", "sizes": [4], "options": {"model.sizes.n_layers": layers}}
        grid = Grid(declare(tmp_path, one))
        (spec, *_) = grid.specs(grid.sets[0], "adams")
        machine = get_machine("vista")
        result = predicted(spec, machine, Links.from_machine(machine))
        names.append(spec.key)
        seconds.append(result["phases"]["compute"])
    assert names[0] != names[1] and seconds[1] > 3 * seconds[0]


def test_one_exchange_of_gradients_per_step_is_a_run_of_its_own() -> None:
    """FSDP2 without gradient synchronization on the first 19 micro-batches differs from FSDP2 in the launcher alone."""
    grid = Grid(GRIDS / "shard_axis.toml")
    (one,) = grid.choose(["tagc-20-last"])
    each, last = (grid.specs(one, method)[0] for method in ("dense", "dense-last"))
    assert each.key != last.key and each.overrides == last.overrides and last.about["last_only"]


EMULATED = {"launcher": "emulated", "methods": ["adams"], "sizes": [2], "sequences": [16], "launch": {"compute": "0.1"}}


@pytest.mark.parametrize(
    "declared, message",
    [
        (PREDICTED | {"methods": ["sgd"]}, "there is no method 'sgd'; known are adams"),
        (PREDICTED | {"recipe": "none.toml"}, "the recipe none.toml does not exist"),
        (EMULATED | {"methods": ["ddp", "adams-overlap"]}, "ddp, adams-overlap exchange during the backward pass"),
        (EMULATED | {"launch": {"compute": "fast"}}, "compute = 'fast'; give seconds, or real"),
        (EMULATED | {"launch": {"compute": "0.1", "slowdown": 7}}, "slowdown needs a factor above 1, compute"),
        (EMULATED | {"launch": {"ranks_per_node": 2}, "sizes": [3], "sequences": [15]}, "ranks_per_node = 2 does not"),
        (EMULATED | {"sizes": [3]}, "a global batch of 16 sequences is no multiple of 3 ranks"),
        (PREDICTED | {"launcher": "slurm", "launch": {"machine": "frontier"}}, "4 ranks, but a node of frontier has 8"),
    ],
)
def test_wrong_sets_are_refused_in_one_line(declared: dict[str, Any], message: str, tmp_path: Path) -> None:
    result = run(declare(tmp_path, declared))
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_trainer_accepts_all_runs_on_ranks() -> None:
    """All methods of the grids with a shard axis: one of their runs takes minutes."""
    grid = Grid(GRIDS / "shard_axis.toml")
    for spec in (spec for one in grid.sets for method in one.methods for spec in grid.specs(one, method)[:1]):
        config = parse(spec.arguments)
        check_config(config, "cpu")
        assert config.parallelism.data_parallel_shard_degree in (2, 4)
    grid = Grid(GRIDS / "network_bound.toml")
    (all_methods, _) = grid.sets
    specs = {spec.method: spec for method in all_methods.methods for spec in grid.specs(all_methods, method)}
    assert timing(specs["diloco-30-e2m1"]) == {"warm_up": 3, "period": 30, "steps": 33}
    assert timing(specs["radius-0.4"]) == {"warm_up": 16, "period": 1, "steps": 24}
    assert "--sync.scape.code=float32" in specs["scape-0.1"].arguments, "a recipe may have another code"
    assert "--sync.overlap" in specs["quantized-e2m1-overlap"].arguments


def test_local_runs_start_all_ranks_and_simulated_ones_a_process(tmp_path: Path) -> None:
    grid = Grid(declare(tmp_path, EMULATED | {"launcher": "local", "launch": {}}))
    command = process_command(grid.specs(grid.sets[0], "adams")[0], tmp_path)
    assert "--nproc_per_node=2" in command and f"--job.dump_folder={tmp_path}" in command
    simulated = Grid(GRIDS / "observations.toml")
    dense, switched = (simulated.specs(simulated.sets[0], name)[0] for name in ("adamw", "adamw-topk"))
    assert "WORLD_SIZE=1" in process_command(dense, tmp_path / "work" / dense.name)
    with pytest.raises(ValueError, match="has no checkpoint of adamw in set embedded; run adamw again first"):
        process_command(switched, tmp_path / "work" / switched.name)
    saved = tmp_path / "work" / dense.name / "checkpoint" / "step-100"
    saved.mkdir(parents=True)
    (saved / "state").touch()
    process_command(switched, tmp_path / "work" / switched.name)
    assert (tmp_path / "work" / switched.name / "checkpoint" / "step-100" / "state").exists()


def test_a_coded_payload_of_one_part_is_predicted_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: its latency once, the masks hidden."""
    silent = {"by_phase": {"pack": 0.1}, "phases": {"optimizer": 0.2, "compute": 0.0}, "step_seconds": 0.3}
    links, levels = Links({"network": Link(1e-3, 1e7)}, "by hand"), [LevelSize("network", 4)]
    grid = Grid(
        declare(tmp_path, {"launcher": "emulated", "methods": ["scape-0.047-int4"], "sizes": [4], "sequences": [32]})
    )
    (spec,) = grid.specs(grid.sets[0], "scape-0.047-int4")
    shapes = [(100, 1000), (100,)]
    one = SimpleNamespace(per_node=1, real=True, links=lambda _: links, passes=lambda _: silent)
    model = LocalModel.of_shapes(shapes)
    monkeypatch.setattr(emulated, "workload_of", lambda config: SimpleNamespace(whole=lambda: model))
    measured = {"phases": {"compute": 1.0}, "payload_parts": 1}
    found = EmulatedSet.predicted(one, spec, measured)  # type: ignore[arg-type]
    payload, _ = ScapeOptions(density=0.047, code="int4").collective_calls(model, levels)
    stages = payload.stages(levels) + scalar_stages(levels)
    assert found is not None and found["exposed"] == pytest.approx(sum(stage_seconds(stages, links)))


def emulate(grid: Path) -> dict[str, Any]:
    """Run a grid of one run on an emulated cluster; return its result."""
    try:
        with Cluster(1):
            pass
    except ClusterError as error:
        pytest.skip(str(error))
    # Its ranks are in their own namespaces, which a fork of the test's server cannot enter.
    given = [str(grid), f"--output={grid.parent / 'out'}", f"--work={grid.parent / 'work'}"]
    command = [sys.executable, "-m", "scripts.study", "run", *given]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert subprocess.run([*command[:3], "report", *given[:2]], cwd=ROOT).returncode == 0
    (found,) = results(grid.parent).values()
    return found


@pytest.mark.slow
def test_an_emulated_run_is_measured_and_predicted(tmp_path: Path) -> None:
    launch = {"compute": "0.1", "rate": 200, "steps": 3, "warm_up": 2}
    found = emulate(declare(tmp_path, EMULATED | {"methods": ["scape-0.1"], "launch": launch}))
    assert len(found["steps"]) == 3 and min(found["steps"]) >= 0.1
    assert found["phases"]["compute"] == pytest.approx(0.1, rel=0.3)
    assert found["predicted"]["step_seconds"] > 0.1
    assert found["counted"]["network"] == pytest.approx(2 * found["sent"]["network"] / 2, rel=0.01)
    assert found["counted"]["network"] <= found["nic"]["network"] <= 1.05 * found["counted"]["network"]
    assert "SCAPE 0.1" in (tmp_path / "out" / "report.md").read_text()


SHARDED = {"launcher": "emulated", "sizes": [4], "micro_batch": 1, "launch": {"ranks_per_node": 2}}
SHORT = {"validation.steps": 1, "validation.local_batch_size": 1, "parallelism.data_parallel_shard_degree": 4}


@pytest.mark.slow
def test_a_run_with_a_shard_axis_is_measured(tmp_path: Path) -> None:
    launch = {"ranks_per_node": 2, "rate": 200, "steps": 2, "warm_up": 2}
    grid = declare(tmp_path, SHARDED | {"methods": ["published"], "sequences": [8], "options": SHORT, "launch": launch})
    published = (GRIDS / "shard_axis.toml").read_text().split("zeropp-published = ")[1].splitlines()[0]
    grid.write_text(grid.read_text().replace("[methods]\n", f"[methods]\npublished = {published}\n"))
    found = emulate(grid)
    assert found["nic"]["network"] == pytest.approx(sum(found["by_kind"]["network"].values()), rel=0.05)
    planned = sum(value for key, value in found["planned"].items() if key.startswith("network"))
    assert planned == pytest.approx(sum(found["by_kind"]["network"].values()), rel=0.02), "in both forward passes"
    assert found["by_phase"]["shard weights"] > 0 and found["phases"]["exposed"] > found["by_phase"]["shard weights"]


@pytest.mark.slow
def test_a_run_for_its_loss_with_a_shard_axis(tmp_path: Path) -> None:
    launch = {"ranks_per_node": 2, "measure": "loss"}
    budget = {"steps": 2, "seeds": [0], "sequences": [16], "micro_batch": 4}
    found = emulate(declare(tmp_path, SHARDED | {"methods": ["tagc"], "options": SHORT, "launch": launch} | budget))
    assert found["validation_loss"] > 0
    assert "TAGC, 10 %" in (tmp_path / "out" / "report.md").read_text()


def test_slurm_jobs_are_submitted_and_collected(tmp_path: Path) -> None:
    """sbatch runs the job at once. The first method fails; the next command submits it alone."""
    programs = stand_ins(tmp_path)
    sbatch = f'#!/bin/bash\necho "$@" >>{tmp_path}/submitted\n'
    # Each job has a number of its own, and so a port: ranks of a job that was ended may live a little longer.
    sbatch += f"export SLURM_JOB_ID=$((SLURM_JOB_ID + $(wc -l <{tmp_path}/submitted)))\n"
    sbatch += f'bash "${{@: -1}}" >{tmp_path}/log 2>&1\necho "--- Welcome to the machine ---"\necho 4711\n'
    for name, text in (("sbatch", sbatch), ("squeue", "#!/bin/bash\n")):
        program(programs / name, text)
    environment = {
        **allocation(ROOT),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHON": server.python(),
        "MODULES": "",
        "OMP_NUM_THREADS": "1",
    }
    one = {
        "launcher": "slurm",
        "sizes": [2],
        "sequences": [4],
        "options": {"training.seq_len": 32, "model.sizes.n_layers": 1},
    }
    launch = {"machine": "vista", "steps": 2, "warm_up": 2}
    late = one | {"name": "late", "methods": ["adams"], "launch": launch | {"timeout": 0.05}}
    grid = declare(tmp_path, late, one | {"methods": ["adamw", "scape-0.1"], "launch": launch})
    result = run(grid, "--poll=0.1", "--sbatch=-A project", **environment)
    assert result.returncode == 1 and "2 runs done, 1 failed" in result.stdout, result.stdout + result.stderr
    submitted = (tmp_path / "submitted").read_text()
    assert "-A project" in submitted and "--nodes=2" in submitted
    made = results(tmp_path)
    assert "exit code 124" in made["adams", 2]["error"], "it took longer than its share"
    assert len(made["scape-0.1", 2]["steps"]) == 2 and made["scape-0.1", 2]["tokens_per_step"] == 4 * 32
    job = tmp_path / "work" / "all" / "size-2.sh"
    assert json.loads(job.with_suffix(".json").read_text()) == {"jobs": ["4711"]}, "without the site's banner"
    text = job.read_text()
    assert "#SBATCH --partition=gh" in text and text.count("limited ") == 2
    # Two runs of 300 s and four short steps each, and 60 s at the end of each: 13 minutes.
    assert "#SBATCH --time=00:13:00" in text and "--requeue" not in text and "USR1" not in text
    assert '"synthetic": true' in text and "--training.dataset=standard_library" in text

    (tmp_path / "grid.toml").write_text(grid.read_text().replace('"timeout" = 0.05', '"timeout" = 100'))
    result = run(grid, "--poll=0.1", "--sbatch=--time=00:10:00", **environment)
    assert result.returncode == 0 and "3 runs done, 0 failed" in result.stdout, result.stdout + result.stderr
    assert "--time=00:10:00" in (tmp_path / "submitted").read_text().splitlines()[2]
    assert len((tmp_path / "submitted").read_text().splitlines()) == 3, "what has been measured is not submitted again"
    result = run(grid, "--sbatch", "-A 'project", **environment)
    assert result.returncode == 2 and result.stderr == 'error: --sbatch "-A \'project": No closing quotation\n'


def test_what_a_refusing_sbatch_prints_is_shown(tmp_path: Path) -> None:
    programs = stand_ins(tmp_path)
    refusal = '#!/bin/bash\necho "--> Submission error: no such allocation"\nexit 1\n'
    sbatch = program(programs / "sbatch", refusal)
    grid = declare(tmp_path, SLURM | {"methods": ["adams"], "launch": {"machine": "vista", "steps": 2, "warm_up": 2}})
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    result = run(grid, **path)
    assert result.returncode == 2
    assert result.stderr == "error: sbatch refused the job of 2 ranks: --> Submission error: no such allocation\n"
    sbatch.write_text("#!/bin/bash\necho Welcome\n")
    result = run(grid, **path)
    assert result.returncode == 2 and "sbatch printed no job number" in result.stderr and "Welcome" in result.stderr


def test_a_machine_without_a_job_file_uses_that_of_any_cluster(tmp_path: Path) -> None:
    sbatch = program(stand_ins(tmp_path) / "sbatch", "#!/bin/bash\nexit 1\n")
    launch = {"machine": "dgx-h100", "steps": 2, "warm_up": 2}
    grid = declare(tmp_path, SLURM | {"methods": ["adams"], "sizes": [16], "launch": launch})
    assert run(grid, PATH=f"{sbatch.parent}:{os.environ['PATH']}").returncode == 2
    text = (tmp_path / "work" / "all" / "size-16.sh").read_text()
    assert "#SBATCH --gpus-per-node=8\n" in text and "scripts/slurm/cluster.sbatch" in text


@pytest.mark.parametrize("output", ["4711\n", "4711;vista\n", "Welcome to 2026\n\n4711\n", "4711\nSee you\n"])
def test_a_job_number_has_a_line_of_its_own(output: str) -> None:
    assert job_number(output) == "4711"
    with pytest.raises(ValueError, match="printed no job number"):
        job_number("Welcome to 2026\n")


SLURM = {"launcher": "slurm", "sizes": [2], "sequences": [16], "launch": {"machine": "vista"}}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"methods": ["ddp"], "options": {"parallelism.data_parallel_shard_degree": 2}}, "DDP has no shards, but the"),
        ({"options": {"optimizer.weight_decay": -1}}, "weight_decay = -1"),
        ({"launch": {"machine": "vista", "timeout": 200000}}, "steps of "),
        ({"methods": ["none.toml"]}, "there is no method 'none.toml'; known are adams"),
    ],
)
def test_slurm_runs_are_checked_before_anything_is_queued(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    programs = stand_ins(tmp_path)
    program(programs / "sbatch", f"#!/bin/bash\ntouch {tmp_path}/submitted\n")
    grid = declare(tmp_path, SLURM | {"methods": ["scape-0.1", "adams"]} | changes)
    result = run(grid, PATH=f"{programs}:{os.environ['PATH']}")
    assert result.returncode == 2 and message in result.stderr, result.stdout + result.stderr
    assert sum(line.startswith("error: ") for line in result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "submitted").exists() and not (tmp_path / "out").exists()


def test_strong_scaling_has_the_configurations_of_the_paper() -> None:
    """SCAPE by the paper's exact rule, as in train_configs/methods; a cluster's runs start at one node."""
    grid = Grid(GRIDS / "strong_scaling.toml")
    sets = {one.name: one for one in grid.sets}
    vista, vista_muon, frontier = sets["vista"], sets["vista-muon"], sets["frontier"]
    frontier_muon, zeropp = sets["frontier-muon"], sets["frontier-zeropp"]
    eight = [
        "adams",
        "adams-sharded",
        *(f"scape-{d}{form}" for d in (0.1, 0.01) for form in ("", "-sharded", "-offload")),
    ]
    assert list(vista.methods[:8]) == list(frontier.methods[:8]) == eight
    for name in ("vista", "frontier"):
        paper, whole = sets[f"{name}-paper"], sets[name]
        assert list(paper.methods) == eight
        assert (paper.recipes, paper.sizes, paper.launch) == (whole.recipes, whole.sizes, whole.launch)
    assert min(vista.sizes) == 4 and min(frontier.sizes) == 8 and min(zeropp.sizes) == 16
    for density in ("0.1", "0.01"):
        rule = load(str(ROOT / f"train_configs/methods/scape_{density}.toml")).table["sync"]["scape"]
        for form in ("", "-sharded", "-offload"):
            declared = grid.methods[f"scape-{density}{form}"]
            assert {key: declared[f"sync.scape.{key}"] for key in rule} == rule
    machine = get_machine("vista")
    for spec in (spec for name in (*eight, "zeropp") for spec in grid.specs(vista, name)[-1:]):
        # A step of Llama-1.8B on 64 GH200: at least its compute of 0.65 to 0.95 s.
        found = step_seconds(spec, [*spec.arguments[1:], *OFFLINE], machine)
        assert 0.6 < found < 2.0 and spec.recipe_name == "llama_1_8b" and spec.size == 64
        assert spec.options["compile.enable"] is True
    for name in vista_muon.methods:
        spec = grid.specs(vista_muon, name)[-1]
        assert spec.options["optimizer.name"] == grid.specs(frontier_muon, name)[0].options["optimizer.name"] == "Muon"
        assert 0.6 < step_seconds(spec, [*spec.arguments[1:], *OFFLINE], machine) < 2.5
    spec = grid.specs(sets["h100"], "quantized_update-muon")[-1]
    assert spec.size == 128 and spec.options["parallelism.data_parallel_shard_degree"] == 8
    assert 0.2 < step_seconds(spec, [*spec.arguments[1:], *OFFLINE], get_machine("dgx-h100")) < 2.0
    spec = grid.specs(frontier, "levels+scape")[0]
    assert spec.size == 8 and spec.options["topology.machine"] == "frontier"
    (chosen,) = grid.choose(["vista"], ["adams"], [4, 8], {"compile.enable": False})
    assert chosen.sizes == (4, 8) and chosen.methods == ("adams",)
    assert all("--compile.no-enable" in spec.arguments for spec in grid.specs(chosen, "adams"))


def test_a_method_may_be_a_recipe_file() -> None:
    """It supplies what concerns the method: model, data, schedule and the layout of the model's files stay."""
    grid, file = Grid(GRIDS / "strong_scaling.toml"), "train_configs/llama_1_8b_frontier.toml"
    (frontier,) = grid.choose(["frontier"], [file], [16])
    spec = grid.specs(frontier, file)[0]  # Llama-500M
    assert spec.label == "llama_1_8b_frontier" and spec.options["sharding.levels.weights"] == 2
    assert spec.options["model.flavor"] == "500M" and spec.options["parallelism.data_parallel_shard_degree"] == 8
    assert spec.options["training.seq_len"] == 4096 and "/" not in spec.name
    (vista,) = grid.choose(["vista"], ["train_configs/methods/scape_0.01.toml"], [4])
    spec = grid.specs(vista, vista.methods[0])[0]
    assert spec.options["sync.scape.density"] == 0.01 and spec.options["sync.scape.clip_mode"] == "literal"


@pytest.mark.parametrize(
    "options, seconds",
    [
        ("-A x", 0),
        ("--time=30", 1800),
        ("-t 90:30", 5430),
        ("-t1:00:05", 3605),
        ("--time 1-2", 93600),
        ("-t 1-0:30", 88200),
    ],
)
def test_the_time_of_sbatch_is_read(options: str, seconds: float) -> None:
    assert time_limit(options.split()) == seconds
    with pytest.raises(ValueError, match="write H:M:S"):
        time_limit(["--time=soon"])


def test_methods_that_exceed_a_job_are_divided_over_several() -> None:
    one = SimpleNamespace(limit=1000.0, shares={"a": 400.0, "b": 400.0, "c": 500.0})
    one.seconds = lambda specs: SlurmSet.seconds(one, specs)  # type: ignore[arg-type]
    specs = [SimpleNamespace(key=key) for key in "abc"]
    jobs = SlurmSet.jobs(one, specs)  # type: ignore[arg-type]
    assert [[spec.key for spec in job] for job in jobs] == [["a", "b"], ["c"]]


def test_a_program_that_exceeds_its_time_ends_with_its_steps(tmp_path: Path) -> None:
    """A step that outlives its srun is ended too; the next program starts afterwards."""
    programs = tmp_path / "bin"
    scripts = {
        "squeue": f"cat {tmp_path}/steps 2>/dev/null",
        "scancel": f'echo "$@" >>{tmp_path}/canceled; rm {tmp_path}/steps',
        "program": f"printf '7.batch\n7.3\n' >{tmp_path}/steps; trap '' TERM; sleep 60",
    }
    for name, text in scripts.items():
        program(programs / name, f"#!/bin/bash\n{text}\n")
    job = "source scripts/slurm/limit.sh; limited 1 program || echo code $?; limited 5 true && echo next"
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "GRACE": "1"}
    begin = time.monotonic()
    result = subprocess.run(["bash", "-c", job], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert result.stdout == "code 137\nnext\n", result.stdout + result.stderr
    assert "ended after 1 s, its share of the job's time (exit code 137)" in result.stderr
    assert (tmp_path / "canceled").read_text() == "--signal=KILL 7.3\n" and time.monotonic() - begin < 30
