"""Memory report: predicted bytes against the actual tensors, and refusal of configurations that cannot fit."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from tests.pool import Pool
from tests.training import EMBEDDED, LAYOUTS, METHODS, RECIPE
from torchtitan_scape.report.memory import MemoryReport


def held(folder: str, arguments: list[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the predicted bytes by kind, and those of the tensors of a trainer before its first step."""
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.core.parameters import stored
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    trainer = ScapeTrainer(parse([*RECIPE, *EMBEDDED, f"--job.dump_folder={folder}", *arguments]))
    optimizers = trainer.replica_optimizer
    found = {"parameters": sum(stored(p).nbytes for p in trainer.model_parts[0].parameters())}
    scape = optimizers.methods[0] if optimizers.options.holds_optimizer_state else None
    if scape is not None:
        passes, masks = scape.passes, scape.masks
        found["state"] = passes.storage.flat.nbytes
        selection = masks.layout.wire_bytes(passes.density, passes.selection)  # made in a step
        found["masks"] = masks.in_use.bits.nbytes + masks.previous.bits.nbytes + selection
        found["payload"] = passes.payload.nbytes + passes.moment_on_mask.nbytes + 2 * passes.code_residual.nbytes
        visits = passes.visits
        tables = [t for t in vars(visits).values() if isinstance(t, torch.Tensor)] if visits else []
        found["rates of visits"] = sum(t.nbytes for t in tables)
        if (owner := passes.owner) is not None:
            found |= {"owned moments": owner.common.nbytes, "owned master": owner.master.nbytes}
        if passes.storage.window is not None:
            found["offload buffers"] = sum(b.nbytes for b in passes.storage.window.buffers)
    assert trainer.memory is not None
    kinds, host = trainer.memory.kinds, trainer.memory.host
    assert bool(host) == (scape is not None and passes.storage.window is not None) and not kinds.keys() & host.keys()
    kinds = kinds | host
    trainer.close()
    return kinds, found


@pytest.mark.parametrize(
    "method, layout",
    [
        ("adams", "2x1"),
        ("scape-int8", "1x2"),
        ("scape-gather", "1x2"),
        ("scape-gather-bf16", "1x2"),
        ("scape-offload", "1x2"),
    ],
)
def test_predicted_bytes_are_those_of_the_tensors(method: str, layout: str, pool2: Pool, tmp_path: Path) -> None:
    for kinds, found in pool2(held, str(tmp_path), [*METHODS[method], *LAYOUTS[layout]]):
        for kind, value in found.items():
            if value:  # Blocks, rows and shards are padded.
                assert value == pytest.approx(kinds[kind], rel=0.02), kind
            else:
                assert not kinds.get(kind), kind


def test_a_model_that_cannot_fit_is_refused() -> None:
    report = MemoryReport({"parameters": 6e9, "state": 3e9, "activations": 5e9}, 10e9, "a test")
    report.check()
    with pytest.raises(
        ValueError, match=r"offload needs 7.00 GB of host memory per rank \(state 7.00 GB\), and 6.00 GB"
    ):
        replace(report, host={"state": 7e9}, host_capacity=6e9).check()
    assert "14.00 GB of 10.00 GB (a test): may not fit" in report.lines()[0]
    with pytest.raises(ValueError, match=r"needs 9.00 GB without activations.*raise parallelism"):
        replace(report, capacity=8e9).check()


def test_a_dry_run_uses_the_machine_preset() -> None:
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.trainer.layout import layout_of
    from torchtitan_scape.trainer.specs import register

    arguments = ["--job.config_file=train_configs/llama_1_8b.toml", "--comm.mode=fake_backend"]
    with patch.dict(os.environ, {"NGPU": "64"}):
        config = parse([*arguments, "--topology.machine=vista", "--sync.scape.density=0.01"])
        register(config, with_data=False)
        report = MemoryReport.of(config, layout_of(config), None)
    n = 4 * 1_831_201_280
    assert report.device == "GH200" and report.capacity == pytest.approx(94.88 * 2**30)
    # The replica group, and its ring in two communication streams; no chunk is in flight during a flag.
    assert "  not counted       buffers of communicators: FSDP's, and 3 of the replicate axis" in report.lines()
    assert not any("not counted" in line for line in replace(report, device="CPU").lines())
    # In addition to dense AdamS: two masks, this rank's selection, and twice the payload.
    over = report.tensors - 3 * n
    assert over <= n / 16 + 2 * report.kinds["payload"] + report.kinds["rates of visits"]


def test_the_largest_stage_of_a_pipeline_is_predicted() -> None:
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.models.registry import workload_of
    from torchtitan_scape.planner.configured import method_of
    from torchtitan_scape.report.memory import stage_memory
    from torchtitan_scape.trainer.layout import layout_of
    from torchtitan_scape.trainer.specs import register

    arguments = [*RECIPE, "--sync.method=dense", "--parallelism.pipeline_parallel_degree=2", "--comm.mode=fake_backend"]
    with patch.dict(os.environ, {"NGPU": "4"}):
        config = parse([*arguments, "--training.local_batch_size=8"])
        register(config, with_data=False)
        layout, workload = layout_of(config), workload_of(config)
        part, kinds = stage_memory(config, workload, method_of(config), layout, 1)
        report = MemoryReport.of(config, layout, None)
    embedding = 260 * 80  # as many entries as the output, and the stages have one layer each
    layer = (workload.parameters - 2 * embedding - 80) // 2
    # The activations of two micro-batches on the first stage, or of one with its logits on the last one.
    own = replace(workload, layers=1)
    activations = [2 * own.activation_bytes(1, output=False), own.activation_bytes(1)]
    entries = [embedding + layer, embedding + layer + 80]
    totals = [12 * n + kept for n, kept in zip(entries, activations, strict=True)]  # parameters, gradients, moment
    largest = totals.index(max(totals))
    assert part.entries == entries[largest]
    assert kinds["activations"] == activations[largest]
    assert kinds["parameters"] == kinds["state"] == 4 * part.entries
    assert report.kinds == kinds


@pytest.mark.parametrize(
    "machine, device, memory, warns",
    [
        ("vista", "NVIDIA GH200 480GB", 94.88 * 2**30, False),
        ("vista", "NVIDIA GH200 144G HBM3e", 140e9, True),
        ("dgx-h100", "NVIDIA H100 80GB HBM3", 85017493504, False),  # of results/gpu
        ("dgx-h100", "NVIDIA H200", 150109880320, True),
        ("dgx-h200", "NVIDIA H200", 150109880320, False),
        ("auto", "NVIDIA H200", 150109880320, False),
        ("frontier", "AMD Instinct MI250X", 63.98 * 2**30, False),
        ("frontier", "CPU", 16e9, False),
    ],
)
def test_a_device_that_is_not_the_machines_causes_a_warning(
    machine: str, device: str, memory: float, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.trainer.layout import layout_of
    from torchtitan_scape.trainer.specs import register

    monkeypatch.setenv("NGPU", "8")
    config = parse([*RECIPE, *EMBEDDED, "--comm.mode=fake_backend", "--topology.machine=dgx-h100"])
    register(config, with_data=False)
    config.topology.machine = "dgx-h100" if machine == "auto" else machine
    layout = layout_of(config)
    config.topology.machine, config.comm.mode = machine, "default"
    properties = SimpleNamespace(name=device, total_memory=memory)
    module = SimpleNamespace(get_device_properties=lambda _: properties, current_device=lambda: 0)
    report = MemoryReport.of(config, layout, module)
    assert (f"this {device} has {memory / 1e9:.1f} GB" in report.warning) is warns and bool(report.warning) is warns
