"""Measured times of the optimizer's passes in the planner, read from files like those of a GPU run."""

import json
from pathlib import Path
from typing import Any

import pytest

from torchtitan_scape.core.workloads import get_workload
from torchtitan_scape.methods.options import DenseOptions
from torchtitan_scape.methods.quantized.options import QuantizedOptions
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.planner import step
from torchtitan_scape.planner.candidates import _predict, make_request
from torchtitan_scape.planner.plan import main
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.planner.step import Assumptions, Prediction, for_device
from torchtitan_scape.topology.layout import plan_layout
from torchtitan_scape.topology.machines import Links, get_machine

MODEL = get_workload("llama_1_8b")
N, LOCAL = MODEL.parameters, MODEL.local(1)
ADAMS, ADAMW = (PlannedRun(DenseOptions(), optimizer) for optimizer in ("AdamS", "AdamW"))
VISTA = get_machine("vista")


def stored(device: str = "NVIDIA H100 80GB HBM3", nominal: float = 2e12, **changes: Any) -> dict[str, Any]:
    """results.json: AdamW moves 2.8 TB/s, AdamS 2 TB/s, SCAPE packs at 1 TB/s and does the rest at 0.5 TB/s."""
    settings = []
    for density, code in ((0.1, "float32"), (0.05, "int4")):
        least = ScapeOptions(density=density, code=code).pass_bytes(LOCAL, 8)  # type: ignore[arg-type]
        pack, coding, total = least["pack"], least.get("coding", 0.0), sum(least.values())
        carry = {"ms": 3.0, "minimal_bytes": coding / 2}
        packing = {"ms": pack / 1e9, "minimal_bytes": pack}
        if coding:
            packing = {key: value + carry[key] for key, value in packing.items()}
        step = {"ms": pack / 1e9 + (total - pack) / 5e8, "minimal_bytes": total}
        passes = {"pack + select": packing} | ({"carry": carry} if coding else {})
        settings.append({"density": density, "code": code, "entries": N, "passes": passes, "step": step})
    dense = {"fused AdamW": {"bytes_a_second": 2.8e12}, "dense AdamS": {"bytes_a_second": 2e12}}
    result = {"model": "llama_1_8b", "copy_bandwidth": 1.6e12, "dense": dense, "settings": settings}
    machine = {"device": device, "runtime": "CUDA 13.0", "nominal_bandwidth": nominal}
    steps = {"passes-1.8b": {"status": "passed", "result": result}, "codes": {"status": "cut off", "result": None}}
    return {"speed": {"smoke": False, "machine": machine, "steps": steps} | changes}


def written(folder: Path, content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(autouse=True)
def nothing_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ignore the measurements of the repository."""
    monkeypatch.setattr(step, "STORED", tmp_path / "results" / "gpu")
    return tmp_path / "results" / "gpu"


def predicted(method: PlannedRun, folder: Path) -> Prediction:
    passes = for_device(VISTA.device, Links.from_machine(VISTA), folder)
    case = make_request("vista", 64, "llama_1_8b", assumptions=Assumptions(passes=passes))
    layout = plan_layout(case.ranks, ranks_per_node=1, machine=VISTA, replicate=-1, shard=1)
    return _predict(case, layout, method, 1)


def test_measured_pass_times_are_used(tmp_path: Path) -> None:
    """On the measured device: the times of the passes, independent of nominal bandwidth."""
    written(tmp_path, stored("NVIDIA GH200 480GB"))
    _, copied = DenseOptions().memory_traffic(LOCAL, 64)
    assert predicted(ADAMS, tmp_path).optimizer == pytest.approx((36 * N + copied) / 2e12)
    assert predicted(ADAMW, tmp_path).optimizer == pytest.approx((44 * N + copied) / 2.8e12)
    for density, code in ((0.1, "float32"), (0.05, "int4"), (0.04, "2bit")):
        options = ScapeOptions(density=density, code=code)  # type: ignore[arg-type]
        method, least = PlannedRun(options), options.pass_bytes(LOCAL, 64)
        seconds = least["pack"] / 1e12 + (sum(least.values()) - least["pack"]) / 5e11
        assert predicted(method, tmp_path).optimizer == pytest.approx(seconds, rel=1e-3)
    # Passes without a measurement use the rate of AdamS.
    read = sum(QuantizedOptions().memory_traffic(LOCAL, 64))
    assert predicted(PlannedRun(QuantizedOptions()), tmp_path).optimizer == pytest.approx((read + 36 * N) / 2e12)


def test_rates_of_another_device_are_scaled(tmp_path: Path) -> None:
    """By nominal memory bandwidth, 4 to 2 TB/s, or by the doctor's measurement, 0.8 to 1.6 TB/s of a copy."""
    written(tmp_path, stored())
    links = Links.from_machine(VISTA)
    found = for_device(VISTA.device, links, tmp_path)
    assert found is not None and found.of(ADAMS) == (pytest.approx(4e12), pytest.approx(4e12))
    assert "measured on NVIDIA H100 80GB HBM3 (" in found.describe() and "times 2.00 for the memory" in found.scaled
    own = for_device(VISTA.device, Links(links.levels, "measured", memory_bandwidth=0.8e12), tmp_path)
    assert own is not None and own.of(ADAMS)[1] == pytest.approx(1e12) and "measured" in own.scaled


def test_measurements_of_the_same_device_have_precedence(nothing_stored: Path) -> None:
    links = Links.from_machine(VISTA)
    assert for_device(VISTA.device, links) is None
    written(nothing_stored / "nvidia-h100", stored())
    written(nothing_stored / "nvidia-gh200", stored("NVIDIA GH200 480GB"))
    found = for_device(VISTA.device, links)
    assert found is not None and found.factor == 1.0 and "GH200" in found.device
    assert found.source == "results/gpu/nvidia-gh200/results.json"
    assert for_device(get_machine("frontier").device, links) is None
    assert for_device(get_machine("local").device, links) is None


@pytest.mark.parametrize("content", ["[]", {}, {"smoke": True}, {"steps": {}}, "no JSON"])
def test_files_without_measurements_are_ignored(tmp_path: Path, content: Any, capsys: pytest.CaptureFixture) -> None:
    path = written(tmp_path, stored(**content) if isinstance(content, dict) and content else content)
    assert for_device(VISTA.device, Links.from_machine(VISTA)) is None
    assert main(["--nodes", "4", "--kernels", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "run scripts/gpu_check.sh speed" in said.err


def test_the_planner_states_which_measurement_it_used(nothing_stored: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["--nodes", "64"]) == 0
    said = capsys.readouterr().out
    assert (
        "Assumed:" in said and "memory bandwidth in the optimizer 70 % of nominal" in said and "measured on" not in said
    )
    written(nothing_stored / "nvidia-h100", stored())
    assert main(["--nodes", "64"]) == 0
    said = capsys.readouterr().out
    assert "The optimizer's passes: measured on NVIDIA H100 80GB HBM3 (results/gpu/nvidia-h100/results.json)" in said
    assert "memory bandwidth in the optimizer" not in said
    assert main(["--nodes", "64", "--json", "--kernels", str(nothing_stored)]) == 0
    assert json.loads(capsys.readouterr().out)["assumptions"]["passes"]["device"] == "NVIDIA H100 80GB HBM3"
