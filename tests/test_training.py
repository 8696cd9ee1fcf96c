"""The trainer end to end: a few steps of the embedded recipe in real processes, and bitwise resuming."""

import errno
import functools
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

from tests.marks import slow
from tests.pool import Pool, attempts
from tests.training import LAYOUTS, METHODS, TWELVE, copy_checkpoint, first_steps, pool_for, train
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.titan.components import MetricsProcessor
from torchtitan_scape.trainer import metrics
from torchtitan_scape.trainer.metrics import ReplicaMetrics, name_write_errors


@pytest.fixture(scope="session")
def run_of_12(
    pool2: Pool, pool4: Pool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[Path, list[dict[str, Any]]]]:
    """Return a function of method and layout that returns folder and results of a run of 12 steps, cached."""

    @functools.cache
    def run(method: str, layout: str) -> tuple[Path, list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp(f"{method}-{layout}")
        pool = pool4 if layout in ("2x2", "nodes") else pool2
        return folder, pool(train, str(folder), [*METHODS[method], *LAYOUTS[layout], TWELVE])

    return run


@pytest.mark.parametrize(
    "method, layout",
    [
        ("embedded", "1x2"),
        ("adams", "1x2"),
        ("topk-adams", "nodes"),
        *(("scape", layout) for layout in ("1x2", "2x1")),
        slow("scape", "2x2"),
        slow("powersgd", "2x1"),
        *(slow("adamw", layout) for layout in ("1x2", "2x1", "2x2")),
        *(slow(method, "nodes") for method in ("scape", "scape-gather-2bit", "radius-adams")),
        slow("scape-gather-bf16", "2x2"),
    ],
)
def test_the_loss_decreases(method: str, layout: str, run_of_12: Any) -> None:
    folder, results = run_of_12(method, layout)
    losses = results[0]["losses"]
    # With 80 outputs the initial loss is farther from that of a uniform distribution.
    entries, near = (4096, 0.1) if method == "embedded" else (260, 0.15)
    assert losses[0] == pytest.approx(math.log(entries), rel=near)
    assert losses[-1] < losses[0] - 0.4
    for other in results[1:]:
        assert other["losses"] == losses and other["norms"] == results[0]["norms"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 12 and summary["validation_loss"] < losses[0]
    assert summary["tokens"] == 12 * 2 * 64 * len(results)
    if layout == "1x2":
        assert torch.equal(results[0]["parameters"], results[1]["parameters"])
        assert set(summary["bytes_sent_per_step_and_rank"]) == {"node"}


def test_layouts_have_equal_first_norms_and_density_one_is_dense(pool2: Pool, run_of_12: Any, tmp_path: Path) -> None:
    """Gradients of replicas are summed, not averaged twice: first norms agree between layouts. Property 1."""
    run = {(m, where): first_steps(4, run_of_12(m, where)[1][0]) for m, where in (("adams", "1x2"), ("scape", "2x1"))}
    for m, where in (("adams", "2x1"), ("scape-1", "1x2"), ("scape-1", "2x1")):
        arguments = [*METHODS[m], *LAYOUTS[where], TWELVE]
        run[m, where] = pool2(train, str(tmp_path / f"{m}{where}"), arguments, stop_after=4)[0]
    dense = run["adams", "1x2"]
    for other in run.values():
        assert other["losses"][0] == pytest.approx(dense["losses"][0], rel=1e-5)
        assert other["norms"][0] == pytest.approx(dense["norms"][0], rel=1e-4)
    for key in (("adams", "2x1"), ("scape-1", "1x2"), ("scape-1", "2x1")):
        assert run[key]["losses"] == pytest.approx(dense["losses"], rel=1e-4)
        assert run[key]["norms"] == pytest.approx(dense["norms"], rel=1e-3)


@pytest.mark.parametrize("method", [slow("adams"), "scape"])
def test_gradient_accumulation_needs_one_exchange(method: str, pool2: Pool, run_of_12: Any, tmp_path: Path) -> None:
    whole = first_steps(4, run_of_12(method, "1x2")[1][0])
    # The same documents in the same order, in micro-batches of 1 instead of 2.
    micro = ["--training.local_batch_size=1", "--training.global_batch_size=4"]
    parts = pool2(train, str(tmp_path), [*METHODS[method], *LAYOUTS["1x2"], TWELVE, *micro], stop_after=4)[0]
    assert parts["losses"] == pytest.approx(whole["losses"], rel=1e-4)
    messages = json.loads((tmp_path / "summary.json").read_text())["messages_per_step"]
    if method == "scape":
        assert messages["replicate node payload"] == 1 and messages["replicate node mask"] == 1


@pytest.mark.parametrize("name, shard", [slow("adams", 1), ("scape-1", 2)])
def test_tensor_parallelism_gives_the_same_gradients(
    name: str, shard: int, pool4: Pool, run_of_12: Any, tmp_path: Path
) -> None:
    """Norm layers, which every tensor-parallel rank holds, count once in the gradient norm."""
    plain = first_steps(4, run_of_12("adams", "1x2")[1][0])
    degrees = {"tensor_parallel": 2, "data_parallel_shard": shard, "data_parallel_replicate": 2 // shard}
    layout = [f"--parallelism.{axis}_degree={degree}" for axis, degree in degrees.items()]
    for result in pool4(train, str(tmp_path), [*METHODS[name], *layout, TWELVE], stop_after=4):
        assert result["losses"] == pytest.approx(plain["losses"], rel=1e-4)
        assert result["norms"] == pytest.approx(plain["norms"], rel=1e-3)


@pytest.mark.slow
def test_local_updates_are_equal_in_other_layouts(pool2: Pool, pool4: Pool, tmp_path: Path) -> None:
    """Tensor parallelism, FSDP2 shards and micro-batches give the same steps of the replicas and the anchor."""
    tensor = ["--parallelism.tensor_parallel_degree=2", *LAYOUTS["1x2"]]
    micro = ["--training.local_batch_size=1", "--training.global_batch_size=4", *LAYOUTS["1x2"]]
    plain = pool2(train, str(tmp_path / "plain"), [*METHODS["diloco"], *LAYOUTS["1x2"], TWELVE], stop_after=5)[0]
    for name, pool, more in (("tensor", pool4, tensor), ("micro", pool2, micro)):
        found = pool(train, str(tmp_path / name), [*METHODS["diloco"], *more, TWELVE], stop_after=5)[0]
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-4)
        assert found["norms"] == pytest.approx(plain["norms"], rel=1e-3)


def test_mixed_precision_and_activation_checkpointing_are_supported(pool2: Pool, tmp_path: Path) -> None:
    arguments = [
        *METHODS["scape"],
        "--training.steps=10",
        "--training.mixed_precision_param=bfloat16",
        "--activation_checkpoint.mode=selective",
    ]
    results = pool2(train, str(tmp_path), arguments)
    assert results[0]["losses"][-1] < results[0]["losses"][0] - 0.4
    assert torch.equal(results[0]["parameters"], results[1]["parameters"])


@pytest.mark.parametrize(
    "method, layout, nan_at",
    [
        # In the default run, states of each kind and shards; tests/checkpoint/test_own_loop.py resumes every method.
        slow("adamw", "2x2", 4),
        ("scape", "2x2", None),
        *(slow(m, "2x2", None) for m in ("adams", "scape-offload", "scape-gather")),
        # the shards of 2x2, without replicas
        *(slow(m, "2x1", None) for m in ("adamw", "adams", "scape-offload")),
        slow("scape", "2x1", None),
        slow("scape-gather", "2x1", None),
        slow("adamw", "1x2", None),
        slow("adams", "1x2", 4),
        slow("topk", "2x2", 4),
        slow("topk-adams", "1x2", None),
        slow("powersgd", "1x2", 4),
        slow("powersgd", "2x2", None),
        slow("radius", "1x2", 4),  # between two refreshes
        slow("radius-adams", "2x2", None),  # right after one
        slow("quantized", "nodes", 4),
        ("quantized-update", "1x2", 4),  # the skipped step is the one that changes the bases
        slow("quantized-update", "2x2", None),
        slow("onebit", "2x2", 3),  # the skipped step is the last one that updates the variance
        ("diloco", "1x2", 3),  # within a round, with a skipped exchange
        slow("muon", "1x2", 4),
        slow("demo", "2x2", 4),
        slow("diloco-muon", "2x2", None),
        slow("diloco-muon", "1x2", None),
        slow("streaming", "2x2", None),
        slow("streaming", "1x2", None),
        slow("sparta", "2x2", 4),
        slow("sparta-muon", "2x1", None),  # inside a round, with matrices sharded by rows
        slow("sparseloco", "2x2", 4),  # inside a round
        ("co2", "1x2", 4),  # inside a round, with the last one in flight
        slow("co2", "2x2", 4),
        slow("noloco", "nodes", 3),  # inside a round, with a skipped exchange and pairs of nodes
        slow("noloco", "2x2", None),
        slow("scape", "1x2", 4),
        slow("scape-offload", "1x2", None),
        slow("scape-gather-2bit", "1x2", None),
        slow("scape-odd", "1x2", None),
        slow("scape-tensor", "1x2", None),
        slow("scape-int4", "nodes", 4),
        ("scape-gather-bf16", "1x2", 4),
    ],
)
def test_resuming_equals_the_uninterrupted_run(
    method: str, layout: str, nan_at: int | None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Property 8: bitwise equal losses and parameters, with a mask exchange in flight when saving.

    Also directly after a step that was skipped because of one rank's NaN. With a sharded update, other states are
    offloaded than before.
    """
    pool = pool_for(layout, request)
    arguments = [
        *METHODS[method],
        *LAYOUTS[layout],
        "--training.steps=6",
        "--validation.no-enable",
        "--metrics.no-enable-tensorboard",
        "--checkpoint.enable",
        "--checkpoint.interval=4",
        "--checkpoint.no-last-save-model-only",
    ]
    whole = pool(train, str(tmp_path / "whole"), arguments, nan_at=nan_at)
    for result in whole:
        assert result["skipped"] == (0 if nan_at is None else 1) and all(map(math.isfinite, result["losses"]))
        skipped = [number for number, norm in enumerate(result["norms"], 1) if math.isnan(norm)]
        assert skipped == ([] if nan_at is None else [nan_at])
        has_own_weights = "diloco" in method or method in ("streaming", "co2")
        assert layout != "1x2" or has_own_weights or torch.equal(result["parameters"], whole[0]["parameters"])
    # Of the entire run: one that stopped there would write the same.
    copy_checkpoint(tmp_path / "whole", tmp_path / "resumed", 4)
    other = ["--sync.scape.offload=state"] if "gather" in method else []
    resumed = pool(train, str(tmp_path / "resumed"), [*arguments, *other])
    for a, b in zip(whole, resumed, strict=True):
        assert len(b["losses"]) == 2 and b["losses"] == a["losses"][4:]
        assert b["norms"] == a["norms"][4:]
        assert torch.equal(a["parameters"], b["parameters"])


def test_tensorboard_contains_the_metrics(run_of_12: Any, tmp_path: Path) -> None:
    """Also once each if the run is started twice within a minute, which is the end of the folder's name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = (run_of_12("embedded", "1x2")[0] / "tb").rglob("events*")
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    tags = set(accumulator.Tags()["scalars"])
    expected = {"loss_metrics/global_avg_loss", "grad_norm", "validation_metrics/loss", "step_time/pack(s)"}
    expected |= {"validation_metrics/perplexity"}
    names = ("density", "nnz", "mask_overlap", "residual_norm", "skipped_steps", "clip_factor")
    expected |= {f"sync/{name}" for name in names}
    expected |= {"sync/bytes_sent/node", "sync/bytes_sent/dense_equivalent"}
    assert expected <= tags
    density = [event.value for event in accumulator.Scalars("sync/density")]
    assert density[0] == 1.0 and density[-1] == pytest.approx(0.1, abs=2e-3)
    for start in ("1", "2"):
        shutil.copy(events, tmp_path / f"{events.name}.{start}")
    twice = EventAccumulator(str(tmp_path))
    twice.Reload()
    assert [event.step for event in twice.Scalars("sync/density")] == list(range(1, 13))


def test_peak_memory_includes_validations(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchTitan resets the device's peak after every validation."""
    peak = [7]
    monkeypatch.setattr(MetricsProcessor, "log_validation", lambda *_: peak.__setitem__(0, 5))
    monkeypatch.setattr(metrics, "device_type", "cuda")
    monkeypatch.setattr(
        metrics.device_module, "memory_stats", lambda: {"active_bytes.all.peak": peak[0]}, raising=False
    )
    processor = object.__new__(ReplicaMetrics)
    processor._peak = 0.0
    processor.log_validation(1.0, 1)
    assert processor.take_peak() == 7


def test_the_throughput_excludes_the_start() -> None:
    """TorchTitan's clock starts when the metrics are built, before the checkpoint is loaded."""
    processor = object.__new__(ReplicaMetrics)
    processor.logger, processor.time_last_log = None, 0.0  # type: ignore[assignment]
    before = time.perf_counter()
    processor.begin(1, {})
    assert processor.time_last_log >= before


def test_wandb_that_is_not_installed_is_refused() -> None:
    """TorchTitan logs an error at startup, and trains without the metrics."""
    config: Any = JobConfig()
    config.metrics.enable_wandb = True
    with (
        patch("torchtitan_scape.trainer.metrics.find_spec", return_value=None),
        pytest.raises(ValueError, match=r"\[metrics\] enable_wandb = true needs the package wandb: pip install wandb"),
    ):
        ReplicaMetrics(config, None)  # type: ignore[arg-type]


def test_a_full_disk_under_tensorboard_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard's thread printed a traceback, and its error was raised later, without a path."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    writer = SummaryWriter(str(tmp_path))
    name_write_errors(writer)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RecordWriter, "write", full)
    expected = re.escape(f"TensorBoard's file in {tmp_path} cannot be written: No space left on device; free space")
    with pytest.raises(ValueError, match=expected):
        for step in range(2):  # Flushing waits for the thread, whose error may only be known afterwards.
            writer.add_scalar("loss", 1.0, step)
            writer.flush()
    assert "Traceback" not in capfd.readouterr().err


def test_invalid_data_raise_an_error_on_every_rank(pool2: Pool, tmp_path: Path) -> None:
    empty = str(tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    cases = [
        (["--training.dataset=text_files", "--training.dataset_path=/nowhere"], "/nowhere"),
        (["--training.dataset=text_files", f"--training.dataset_path={empty}"], empty),
        (["--training.dataset=wikipedia"], "wikipedia"),
        (["--validation.dataset=wikipedia"], "wikipedia"),
        (["--validation.steps=0"], "steps"),
        ([f"--model.hf_assets_path={empty}"], empty),
        (["--model.flavor=7B"], "7B"),
    ]
    for outcomes in pool2(attempts, train, *((str(tmp_path / "out"), arguments) for arguments, _ in cases)):
        for (good, text), (arguments, message) in zip(outcomes, cases, strict=True):
            assert not good and "ValueError" in text and message in text.splitlines()[-1], (arguments, text)


def train_counting_gradients(folder: str) -> list[int]:
    """Return the number of gradients after each step."""
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    take_step, left = ScapeTrainer.train_step, list[int]()

    def step(self: ScapeTrainer, batches: Any) -> None:
        take_step(self, batches)
        left.append(sum(p.grad is not None for p in self.model_parts[0].parameters()))

    with patch.object(ScapeTrainer, "train_step", step):
        train(folder, [*METHODS["sparta"], *LAYOUTS["1x2"], "--training.steps=2"])
    return left


def test_gradients_are_freed_after_a_step(pool2: Pool, tmp_path: Path) -> None:
    """They were kept during a validation, which copies the weights."""
    assert pool2(train_counting_gradients, str(tmp_path)) == [[0, 0], [0, 0]]


def train_counting_chunks(folder: str, arguments: list[str]) -> dict[str, Any]:
    """Run `train`; also return the number of chunks that every backward pass has started."""
    from torchtitan_scape.methods.overlap import BackwardOverlap

    rest, begun = BackwardOverlap.start_remaining, list[int]()

    def counted(overlap: BackwardOverlap) -> list[torch.Tensor]:
        begun.append(len(overlap._in_flight))
        return rest(overlap)

    with patch.object(BackwardOverlap, "start_remaining", counted):
        return {**train(folder, arguments, nan_at=3), "begun": begun}


@pytest.mark.parametrize(("method", "early"), [("quantized", 4), ("quantized-update", 3)])
def test_training_with_overlap_does_not_change_a_bit(method: str, early: int, pool4: Pool, tmp_path: Path) -> None:
    """Two micro-batches with FSDP shards and a NaN: losses, norms and parameters are bitwise equal.

    early: Steps that start the exchange in the backward pass. The fourth one changes the bases.
    """
    batch = ["--training.local_batch_size=1", "--training.global_batch_size=8", "--training.steps=4"]
    arguments = [*METHODS[method], *LAYOUTS["2x2"], *batch]
    after, during = (
        pool4(train_counting_chunks, str(tmp_path / str(len(more))), [*arguments, *more])
        for more in ([], ["--sync.overlap"])
    )
    for one, other in zip(after, during, strict=True):
        assert one["losses"] == other["losses"] and one["norms"][:2] == other["norms"][:2]
        assert one["begun"] == [] and len(other["begun"]) == early and min(other["begun"]) > 0
        assert one["skipped"] == other["skipped"] == 1 and torch.equal(one["parameters"], other["parameters"])


@pytest.mark.parametrize("method, layout", [("scape", "1x2"), slow("adamw", "2x1"), slow("scape-gather-bf16", "2x2")])
def test_observing_does_not_change_a_bit(
    method: str, layout: str, run_of_12: Any, request: Any, tmp_path: Path
) -> None:
    """Losses, norms and parameters are bitwise equal, and the full gradient is observed once."""
    from torchtitan_scape.observe.record import FILE, read

    folder, plain = run_of_12(method, layout)
    observed = ["--observe.enable", "--observe.windows=[[1,3],[5,8]]", "--observe.histograms=2,4"]
    arguments = [*METHODS[method], *LAYOUTS[layout], TWELVE, *observed, "--observe.names=*"]
    seen = pool_for(layout, request)(train, str(tmp_path), arguments)
    for one, other in zip(plain, seen, strict=True):
        assert one["losses"] == other["losses"] and one["norms"] == other["norms"]
        assert torch.equal(one["parameters"], other["parameters"])
    assert not (folder / FILE).exists()
    rows, histograms = read(tmp_path / FILE)
    for step in (1, 2, 3, *range(5, 13)):
        norm = math.hypot(*(row.gradient for row in rows if row.step == step))
        assert norm == pytest.approx(seen[0]["norms"][step - 1], rel=1e-5)
    entries = sum(figures["entries"] for step, _, figures in histograms if step == 4)
    assert entries == 200_720 or (method.startswith("scape") and 0.05 * 200_720 < entries < 0.3 * 200_720)
    assert {step for step, *_ in histograms} == {2, 4}
