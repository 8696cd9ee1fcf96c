"""scripts/gpu_check.sh: its report from synthetic results, the end of its steps, and all parts on a CPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.common import RESULTS, ROOT, RunError, read, write
from scripts.gpu import check, losses, machine, method_steps, methods, timing
from scripts.gpu.correctness import OUTCOME, outcomes
from scripts.gpu.passes import draw
from scripts.gpu.processes import run_limited
from scripts.gpu.report import write_report
from scripts.gpu.training import LOGGED, TIMED, VALIDATED, measured, parse, timed
from tests import server
from torchtitan_scape.methods.registry import METHODS

H100 = {
    "device": "NVIDIA H100 80GB HBM3",
    "driver": "580.159.04",
    "runtime": "CUDA 13.0",
    "cores": 16,
    "system": "Linux 6.18",
    "nominal_bandwidth": 3.35e12,
    "versions": {"torch": "2.11.0", "triton": "3.6.0"},
}
COMMIT = 12 * "a"


def part(part: str, **results: Any) -> dict[str, Any]:
    common = {"status": "passed", "seconds": 12.3, "limit_seconds": 60, "begun": "now", "commit": COMMIT}
    steps = {name: {**common, "result": one} for name, one in results.items()}
    return {"command": f"scripts/gpu_check.sh {part}", "smoke": False, "machine": H100, "steps": steps}


def figures(ms: float, **more: Any) -> dict[str, Any]:
    spread = {"least_ms": 0.9 * ms, "most_ms": 1.1 * ms, "host_ms": 0.25, "ahead": True}
    rate = {"minimal_bytes": 28e9, "bytes_an_entry": 28.0, "bytes_a_second": 28e12 / ms, "share_of_copy": 0.875}
    return {"ms": ms, **spread, **rate, **more}


def test_the_report_contains_the_results(tmp_path: Path) -> None:
    """Including device, driver, versions, command and commit."""
    tests = {
        "processes": 10,
        "passed": 119,
        "skipped": 1,
        "failed": ["tests/gpu/x.py::test_a[b c]"],
        "seconds": 99,
    }
    parts = {"correctness": part("correctness", tests=tests, sanitizer={"note": "is not installed"})}
    passes = {"pack": figures(8.0), "pack + select": figures(10.0), "select": {"ms": 2.0}}
    setting = {"density": 0.05, "code": "int4", "passes": passes, "step": figures(20.0)}
    dense = {"fused AdamW": figures(25.0), "dense AdamS": figures(18.0, ahead=False)}
    speed = {"model": "llama_1_8b", "copy_bandwidth": 3e12, "dense": dense, "settings": [setting]}
    profile = {"launches": 155.0, "busy_ms": 30.5, "gaps_ms": 0.2, "longest_gap_ms": 0.01}
    clipped = figures(30.0, phases_ms={"clip": 2.5}, clip_factor=0.5)
    steps = {
        "model": "llama_1_8b",
        "shard": 8,
        "entries": 1000,
        "copy_bandwidth": 3e12,
        "baselines": ["fused AdamW", "AdamW, one kernel"],
        "methods": {
            "fused AdamW": figures(20.0, clipped=figures(40.0)),
            "AdamW, one kernel": figures(25.0, clipped=figures(25.0)),
            "radius": figures(30.0, clipped=clipped),
            "dense": {"failed": "out of memory"},
        },
        "profiles": {"radius": profile | {"ms_by_kernel": {f"kernel_{i}": 9.0 - i for i in range(7)}}},
    }
    parts["speed"] = part("speed", **{"passes-1.8b": speed, "methods-shard": steps})
    points = [{"step": 20.0 * i, "loss": 9.0 - i, "gib": 40.0, "tps": 100_000.0 + i, "mfu": 46.0} for i in (1, 2, 3, 4)]
    form = {"batch": 8, "sequence": 4096, "points": points, **measured(points)}
    bytes_sent = {"planned_bytes_per_step_and_rank": 5.0, "dense_bytes_per_step_and_rank": 400.0}
    runs = {
        "dense AdamS": {"training": [[10, 5.0], [20, 4.0]], "validation": [[20, 4.125]], "exit_code": 0},
        "cut off": {
            "training": [[10, 5.5]],
            "validation": [],
            "exit_code": 1,
            "error": "Traceback\nAcceleratorError\n",
        },
        "SCAPE": {"training": [], "validation": [], **bytes_sent},
    }
    forms = {f"throughput-{name}": form | {"form": name} for name in ("adamw", "scape")}
    parts["training"] = part("training", **forms)
    parts["losses"] = part("losses", quality={"replicas": 4, "runs": runs})
    whole = part("ranks", stages={"backend": "nccl", "stages": {"reduce": True, "gather": False}})
    whole["steps"]["lost-rank"] = {"status": "no time left", "commit": COMMIT, "result": None}
    write(tmp_path / "results.json", parts | {"ranks": whole})

    text = write_report(tmp_path).read_text()
    for said in (
        "# NVIDIA H100 80GB HBM3\n",
        "Driver 580.159.04, CUDA 13.0, 16 cores, Linux 6.18; torch 2.11.0, triton 3.6.0.",
        "`scripts/gpu_check.sh speed`",
        "| tests | passed | 12.3 | 60 | now | - | aaaaaaaaaaaa |",
        "119 passed, 1 failed, 1 skipped, 99 s.\n- failed: `tests/gpu/x.py::test_a[b c]`",
        "is not installed",
        "A copy on the device, read and written: passes-1.8b 3000 GB/s; methods-shard 3000 GB/s.",
        "| llama_1_8b | 0.05, int4 | 20.000 | 25.000 | 0.80 | 18.000 | 0.250 | 10.0 |",
        "| llama_1_8b | 0.05, int4 | pack | 8.000 | 7.200 to 8.800 | 0.250 | 28.00 | 3500 | 88 |",
        "| llama_1_8b | dense | dense AdamS | 18.000 (with the host's) |",
        "shard 1 of 8, 1,000 entries, one of 8 replicas; nothing is sent.\n\n| method | step, ms |",
        "| fused AdamW | 20.0 | 1.00 | 40.0 | 1.60 | 0.2 | - | - | - | - |",
        "| radius | 30.0 | 1.50 | 30.0 | 1.20 | 0.2 | - | 2.5 | - | - |",
        "| dense | failed: out of memory |",
        "| radius | 155 | 30.5 | 0.20 | 0.010 | `kernel_0` 9.00, `kernel_1` 8.00,",
        "| scape | 100,004 | 100,003 to 100,004 | 1.000 | 46.0 | 39.0 | 40.0 | 5.000 |",
        "| dense AdamS | 10 | 5.0000 | - | - | 20 | - | 0 |",
        "| cut off | 10 | 5.5000 | - | - | 10 | - | 1 |",
        "| SCAPE | - | - | - | - | - | 1.25 | - |",
        "cut off failed:\n\n```text\nTraceback\nAcceleratorError\n```",
        "stages, nccl, as expected: reduce yes, gather NO.",
        "| lost-rank | no time left | - | - | - | - | aaaaaaaaaaaa |",
    ):
        assert said in text, said
    assert "smoke" not in text


def test_the_report_of_the_methods_contains_failures_and_clocks(tmp_path: Path) -> None:
    row = {"layout": "2x2", "equal": True, "may wait": False, "seconds": 1.5}
    cases = [
        row | {"case": "dense", "waits": 0},
        row | {"case": "topk", "waits": 3},
        row | {"case": "diloco", "waits": 3, "may wait": True, "where": ["update.py:42"]},
        row | {"case": "demo", "waits": None, "equal": False},
    ]
    whole = part("methods", methods={"error": "", "backend": "nccl", "ranks": 4, "cases": cases})
    samples = [{"seconds": 0.0, "sm_mhz": 345.0, "most_sm_mhz": 1980.0}, {"seconds": 10.0, "sm_mhz": 1755.0}]
    whole["steps"]["methods"]["clocks"] = samples
    write(tmp_path / "results.json", {"methods": whole})
    text = write_report(tmp_path).read_text()
    for said in (
        "| methods | passed | 12.3 | 60 | now | 345 to 1755 of 1980 | aaaaaaaaaaaa |",
        "| 2x2 | dense | yes | 0 (at most 0) | - | 1.5 |",
        "| 2x2 | diloco | yes | 3 | update.py:42 | 1.5 |",
        "| 2x2 | demo | NO | - (at most 0) | - | 1.5 |",
    ):
        assert said in text, said
    assert [methods.verdict(case) for case in cases] == ["", "waits for the device", "", "different bits"]


def test_clocks_are_read_from_both_vendors() -> None:
    """Readings that a device does not have are absent."""
    assert machine.nvidia_clocks("1980, 2619, 1980, 45, 312.45\n") == {
        "sm_mhz": 1980.0,
        "memory_mhz": 2619.0,
        "most_sm_mhz": 1980.0,
        "celsius": 45.0,
        "watts": 312.45,
    }
    assert machine.nvidia_clocks("1980, [N/A], 1980, [Not Supported], 9\n") == {
        "sm_mhz": 1980.0,
        "most_sm_mhz": 1980.0,
        "watts": 9.0,
    }
    assert machine.nvidia_clocks("") == {} and machine.amd_clocks("no devices") == {}
    card = {
        "sclk clock speed:": "(800Mhz)",
        "mclk clock speed:": "1600Mhz",
        "Temperature (Sensor junction) (C)": "35.0",
        "Average Graphics Package Power (W)": "N/A",
    }
    assert machine.amd_clocks(json.dumps({"system": {}, "card0": card})) == {
        "sm_mhz": 800.0,
        "memory_mhz": 1600.0,
        "celsius": 35.0,
    }


def test_the_methods_step_has_every_method_and_option() -> None:
    cases = methods.CASES
    assert {case.method for case in cases.values()} == METHODS.keys()
    assert {name for name, entry in METHODS.items() if entry.supports_overlap} == {
        case.method for case in cases.values() if case.overlap
    }
    assert {"Muon", "AdamS", "AdamW"} == {case.optimizer for case in cases.values()}
    assert any(c.sharding for c in cases.values())
    own = {"parameters": "a", "output": "o", "finite": True}
    assert methods.agree([own] * 4, 1) and methods.agree([own, own | {"parameters": "b"}] * 2, 2)
    assert not methods.agree([own, own | {"parameters": "b"}] * 2, 1)
    assert not methods.agree([own, own, own, own | {"output": "p"}], 4)
    assert not methods.agree([own | {"finite": False}] * 4, 1)


def test_gaps_between_launches_exclude_device_work() -> None:
    """Two streams overlap; time in which the device is busy does not count."""
    kernels = [("spin_kernel", 0.0, 900.0), ("a", 1000.0, 1300.0), ("b", 1200.0, 1500.0), ("a", 1800.0, 2400.0)]
    found = method_steps.gaps(kernels)
    assert found["launches"] == 3 and found["busy_ms"] == pytest.approx(1.1)
    assert found["gaps_ms"] == pytest.approx(0.3) and found["longest_gap_ms"] == pytest.approx(0.3)
    assert found["ms_by_kernel"]["a"] == pytest.approx(0.9)
    assert method_steps.gaps([])["launches"] == 0


def test_rows_of_the_methods_step_can_be_selected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Each has its times with and without clipping; one whose package is missing is left out, one that fails is not."""
    drawn: list[float] = []

    def without_package(named: method_steps.Named, clips: bool) -> Any:
        raise ModuleNotFoundError("No module named 'dion'")

    def one(named: method_steps.Named, clips: bool) -> Any:
        return SimpleNamespace(step=lambda: drawn.append(float(named[0][1].grad.sum())))  # type: ignore[union-attr]

    rows = method_steps.GROUPS["muon"] | {"dion-muon": without_package, "one": one, "none": None}
    monkeypatch.setattr(method_steps, "GROUPS", {"muon": rows})
    monkeypatch.setattr(method_steps, "BASELINES", {"fused AdamW": method_steps.BASELINES["fused AdamW"]})
    path = tmp_path / "found.json"
    method_steps.method_steps(path, True, "llama_500m", "8", "muon", "torch-muon,dion-muon,one")
    found = read(path)
    assert [*found["methods"]] == [*found["profiles"]] == ["fused AdamW", "torch-muon", "one"]
    assert all(each["ms"] > 0 and each["clipped"]["ms"] > 0 for each in found["methods"].values())
    assert found["shard"] == 8 and found["baselines"] == ["fused AdamW"]
    assert "dion-muon: left out, No module named 'dion'" in capsys.readouterr().out
    assert len(set(drawn)) == len(drawn) >= 6, "gradients are drawn before every step"

    with pytest.raises(RunError, match="not timed: none"):
        method_steps.method_steps(path, True, "llama_500m", "1", "muon", "none")
    with pytest.raises(ValueError, match="muon has no row 'dense', only torch-muon, dense-muon"):
        method_steps.method_steps(path, True, "llama_500m", "1", "muon", "dense")


def test_other_optimizers_clip_only_if_asked() -> None:
    for clips in (False, True):
        named = [
            ("layers.0.wq.weight", torch.nn.Parameter(torch.ones(8, 8))),
            ("norm", torch.nn.Parameter(torch.ones(8))),
        ]
        optimizer = method_steps.GROUPS["muon"]["torch-muon"](named, clips)
        draw([parameter for _, parameter in named])
        optimizer.step()
        norm = torch.stack([parameter.grad.norm() for _, parameter in named]).norm()  # type: ignore[union-attr]
        assert bool(norm <= method_steps.BELOW) is clips


class FakeDevice:
    """A simulated host and device with times in milliseconds; a millisecond has 1e6 cycles."""

    def __init__(self) -> None:
        self.now = self.free = 0.0

    def launch(self, host: float, device: float) -> None:
        self.now += host
        self.free = max(self.free, self.now) + device

    def synchronize(self) -> None:
        self.now = max(self.now, self.free)

    def _sleep(self, cycles: int) -> None:
        self.launch(0.01, cycles / 1e6)

    def Event(self, enable_timing: bool) -> Any:
        event, at = SimpleNamespace(), [0.0]
        event.at = at
        event.record = lambda: at.__setitem__(0, max(self.free, self.now))
        event.query = lambda: self.now >= at[0]
        event.synchronize = lambda: setattr(self, "now", max(self.now, at[0]))
        event.elapsed_time = lambda other: other.at[0] - at[0]
        return event


def test_host_time_is_separated_from_device_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five launches of 0.2 ms each, for which the host needs five milliseconds."""
    fake = FakeDevice()
    monkeypatch.setattr(timing.torch, "cuda", fake)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: fake.now / 1e3))
    monkeypatch.setattr(timing.Clock, "sweep", lambda self: fake.launch(0.01, 0.1))
    clock = timing.Clock(torch.device("cuda"), 5)

    def work() -> None:
        for _ in range(5):
            fake.launch(1.0, 0.2)

    found = clock(work, setup=lambda: fake.launch(3.0, 7.0))  # the setup is not part of either time
    assert found["ahead"] and found["ms"] == pytest.approx(1.0) and found["host_ms"] == pytest.approx(5.0)

    def waits() -> None:
        fake.launch(1.0, 0.2)
        fake.synchronize()
        fake.launch(1.0, 0.2)

    found = clock(waits)
    assert not found["ahead"] and found["ms"] > 1.3  # the device waits for the second launch, which is reported
    clock.bandwidth = 6e12
    once = clock.rates(work, 3e9, 10**9)
    assert once["bytes_a_second"] == pytest.approx(3e12) and once["share_of_copy"] == pytest.approx(0.5)


def test_output_of_pytest_and_the_trainer_is_parsed() -> None:
    text = """tests/gpu/test_gpu.py::test_a[gradients off-0.1] PASSED             [ 50%]
tests/gpu/test_gpu.py::test_b FAILED                                    [ 75%]
tests/gpu/test_gpu.py::test_c SKIPPED (only a GPU can show it)          [100%]
FAILED tests/gpu/test_gpu.py::test_b - assert 0"""
    found = outcomes(OUTCOME.findall(text))
    assert (found["passed"], found["skipped"], found["failed"]) == (1, 1, ["tests/gpu/test_gpu.py::test_b"])
    line = "[titan] - root - INFO - step: 20  loss:  8.63301  grad_norm:  1.2  memory: 40.65GiB(51.1%)  tps: 129,061  "
    match = LOGGED.search(line + "tflops: 400.10  mfu: 41.90%")
    assert match is not None
    assert match.groupdict() == dict(step="20", loss="8.63301", gib="40.65", tps="129,061", mfu="41.90")
    validated = VALIDATED.search("validate step: 300  loss:  4.1250  memory")
    assert validated is not None and validated["loss"] == "4.1250" and not LOGGED.search("validate step: 3  loss:  4.1")
    first = 'Traceback (most recent call last):\n  File "a.py"\nRuntimeError: CUDA error: unspecified launch failure\n'
    assert parse("step 3\n" + first + first.replace("launch failure", "other"))["error"].startswith(first)
    assert parse("step 3\n")["error"] is None
    long = parse(first.replace("\nRuntime", 300 * "\n  another frame of the call" + "\nRuntime"))["error"]
    assert long.startswith(first[:20]) and long.endswith("unspecified launch failure\n") and len(long) < 8100


def test_the_trainer_accepts_the_timed_and_compared_runs() -> None:
    """Check the full-size runs, which are not started on a CPU."""
    from torchtitan_scape.config.checks import check_config
    from torchtitan_scape.config.parsing import parse as parse_arguments

    repeated = [*losses.common(False), *losses.REPEATED, *losses.length(False, losses.REPEATED_STEPS)]
    for arguments in (
        [timed(form, False) for form in TIMED] + [losses.arguments(False, name) for name in losses.RUNS] + [repeated]
    ):
        config = parse_arguments(arguments)
        check_config(config, "cpu")
        assert not config.checkpoint.enable and config.sync.consistency_interval == 0
    assert config.model.flavor == "50M" and config.topology.simulate_replicas == 4


def test_stored_results_come_from_a_gpu() -> None:
    for path in (RESULTS / "gpu").glob("*/*.json"):
        for part in read(path).values():
            assert not part["smoke"] and part["machine"]["device"] != "CPU", path


def test_a_hanging_case_keeps_its_output_and_leaves_no_process() -> None:
    output, code = run_limited(["sh", "-c", "echo begun; sleep 600 & echo $!; wait"], 0.5)
    assert code == -1 and output.startswith("begun\n") and output.endswith("not done within 0.5 s")
    with pytest.raises(ProcessLookupError):
        for _ in range(50):  # killed processes need a moment to end
            os.kill(int(output.split()[1]), 0)
            time.sleep(0.1)
    assert run_limited(["sh", "-c", "echo $SAID; exit 9"], 60.0, SAID="done") == ("done\n", 9)


STEPS_OF_ALL_KINDS = {
    "good": "write(result, {'note': 'fine'})",
    "bad": "write(result, {'note': 'half'}); raise SystemExit(3)",
    "endless": "write(result, {'note': 'begun'}); time.sleep(600)",
    "last": "print('it goes on'); write(result, {'note': 'fine'})",
}


def test_a_failing_or_hanging_step_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    head = "import time, json\ndef write(path, found): open(path, 'w').write(json.dumps(found))\n"
    for name, code in STEPS_OF_ALL_KINDS.items():
        (tmp_path / f"step_{name}.py").write_text(f"{head}def run(result, smoke):\n    {code}\n")
    steps = {name: (0.2 if name == "endless" else 3.0, f"step_{name}:run") for name in STEPS_OF_ALL_KINDS}
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(check, "PARTS", {"correctness": steps})
    monkeypatch.setattr(check, "POLL", 0.05)
    monkeypatch.setattr(check, "PART_SECONDS", 4.0)
    monkeypatch.setattr(check, "machine", lambda: H100 | {"device": "CPU"})
    monkeypatch.setattr("sys.argv", ["check", "correctness", "--smoke", f"--output={tmp_path / 'out'}"])
    assert check.main() == 1
    stored = read(tmp_path / "out" / "cpu" / "results.json")["correctness"]
    ends = {name: (step["status"], (step["result"] or {}).get("note")) for name, step in stored["steps"].items()}
    assert ends == {
        "good": ("passed", "fine"),
        "bad": ("failed", "half"),
        "endless": ("cut off", "begun"),
        "last": ("passed", "fine"),
    }
    assert "it goes on" in (tmp_path / "out" / "cpu" / "correctness.log").read_text()
    assert "A smoke test with tiny sizes" in (tmp_path / "out" / "cpu" / "report.md").read_text()
    assert "correctness 4/4: last, at most" in capsys.readouterr().out

    monkeypatch.setattr(check, "PART_SECONDS", 0.0)
    monkeypatch.setattr("sys.argv", ["check", "correctness", "--smoke", "--only=last", f"--output={tmp_path / 'out'}"])
    assert check.main() == 1
    steps = read(tmp_path / "out" / "cpu" / "results.json")["correctness"]["steps"]
    assert steps["last"]["status"] == "no time left" and steps["bad"]["status"] == "failed"

    monkeypatch.setattr("sys.argv", ["check", "correctness", f"--output={tmp_path / 'other'}"])
    assert check.main() == 2 and "torch sees no GPU" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    monkeypatch.setattr("sys.argv", ["check", "correctness", "--smoke", "--only=good,nothing"])
    assert check.main() == 2 and "correctness has no such step, only good" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "only", "forked"),
    [
        # Triton's interpreter needs new processes.
        ("correctness", "", ""),
        ("speed", "passes-500m,methods,methods-muon,traffic,codes", ""),
        ("training", "", "PYTHON"),
        ("losses", "", "PYTHON"),
        ("ranks", "stages", "PYTHON"),
        ("ranks", "lost-rank", "PYTHON_EXEC"),  # only ranks: the test looks for its launchers
        ("methods", "", "PYTHON"),
    ],
    ids=["correctness", "speed", "training", "losses", "ranks", "lost rank", "methods"],
)
def test_every_part_of_the_gpu_check_runs_on_a_cpu(part: str, only: str, forked: str, tmp_path: Path) -> None:
    command = [str(ROOT / "scripts" / "gpu_check.sh"), part, "--smoke", f"--output={tmp_path}", f"--only={only}"]
    environment = {**os.environ, "PYTHON": sys.executable} | ({forked: server.python()} if forked else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    stored = read(tmp_path / "cpu" / "results.json")[part]
    assert all(step["status"] == "passed" and step["result"] for step in stored["steps"].values())
    assert f"## {part.capitalize()}" in (tmp_path / "cpu" / "report.md").read_text()
