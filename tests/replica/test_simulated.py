"""Training with simulated replicas: equality with gloo ranks up to FP32 rounding, and bitwise resuming."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.marks import slow
from tests.pool import Pool
from tests.training import LAYOUTS, METHODS, copy_checkpoint, scalars, train

ALONE = ["--parallelism.data_parallel_replicate_degree=1", "--parallelism.data_parallel_shard_degree=1"]


def simulate(replicas: int) -> str:
    return f"--topology.simulate_replicas={replicas}"


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(
    "method, more",
    [
        slow("adams", []),
        ("scape", ["--training.local_batch_size=1", "--training.global_batch_size=4"]),
        slow("scape-int8", []),
        slow("topk", []),
        slow("powersgd", []),
        slow("radius-adams", []),
        slow("quantized", []),
        slow("onebit", []),
        slow("quantized-update", []),
        slow("diloco-muon", []),
        slow("demo", ["--sync.demo.code=float32"]),
        ("sparta", ["--sync.sparta.code=float32"]),
        slow("streaming", ["--sync.streaming_diloco.code=float32"]),
        ("co2", []),
        slow("noloco", []),
    ],
)
def test_simulated_replicas_equal_a_run_of_two_ranks(
    method: str, more: list[str], pool1: Pool, pool2: Pool, tmp_path: Path
) -> None:
    arguments = [*METHODS[method], *more, "--training.steps=6"]
    real = pool2(train, str(tmp_path / "real"), [*arguments, *LAYOUTS["1x2"]])[0]
    one = pool1(train, str(tmp_path / "one"), [*arguments, *ALONE, simulate(2)])[0]
    assert one["losses"] == pytest.approx(real["losses"], rel=1e-5)
    assert one["norms"] == pytest.approx(real["norms"], rel=1e-4)
    assert (one["parameters"] - real["parameters"]).norm() <= 1e-4 * real["parameters"].norm()
    ours, theirs = summary(tmp_path / "one"), summary(tmp_path / "real")
    assert ours["validation_loss"] == pytest.approx(theirs["validation_loss"], rel=1e-5)
    assert ours["tokens"] == theirs["tokens"]
    # The real ranks share a node, the simulated ones are on two nodes.
    assert ours["bytes_sent_per_step_and_rank"]["network"] == theirs["bytes_sent_per_step_and_rank"]["node"]
    for key in ("dense_bytes_per_step_and_rank", "planned_bytes_per_step_and_rank"):
        assert ours[key] == theirs[key]
    # The cost model pads the payload's chunks by another rule.
    predicted = ours["predicted"]["run"]["bytes_sent_per_step_and_rank"]["network"]
    assert predicted == pytest.approx(ours["planned_bytes_per_step_and_rank"], rel=1e-4)


def train_with_empty_documents(*arguments: Any) -> None:
    from torchtitan_scape.data.loader import TextDataLoader

    with patch.object(TextDataLoader, "empty_documents", lambda self: 3):
        train(*arguments)


def test_throughput_after_a_resume_with_another_batch(pool1: Pool, tmp_path: Path) -> None:
    """The throughput was that of the mean batch of all steps, and empty documents counted once more per replica."""
    arguments = [*METHODS["adams"], *ALONE, simulate(2), "--training.steps=4", "--metrics.log_freq=4"]
    arguments += ["--checkpoint.enable", "--checkpoint.interval=2", "--validation.no-enable"]
    for batch, stop in ((4, 2), (8, None)):
        pool1(train_with_empty_documents, str(tmp_path), [*arguments, f"--training.global_batch_size={batch}"], stop)
        found = summary(tmp_path)
        assert found["tokens_per_second"] * found["seconds_per_step"] == pytest.approx(batch * 64)
        assert found["empty_documents"] == 6
    assert found["tokens"] == 2 * (4 + 8) * 64
    rates, seconds = scalars(tmp_path, "throughput(tps)", "time_metrics/end_to_end(s)")
    assert {step: rates[step] * seconds[step] for step in rates} == pytest.approx({1: 4 * 64, 4: 8 * 64}, rel=0.05)


@pytest.mark.parametrize("method", [slow("scape"), slow("diloco")])
def test_a_group_of_shards_can_simulate_replicas(method: str, pool2: Pool, pool4: Pool, tmp_path: Path) -> None:
    steps = [*METHODS[method], "--training.steps=5"]
    real = pool4(train, str(tmp_path / "real"), [*steps, *LAYOUTS["2x2"]])
    simulated = pool2(train, str(tmp_path / "simulated"), [*steps, *LAYOUTS["2x1"], simulate(2)])
    for rank in range(2):  # the first two of the real ranks hold the first replica's shards
        assert simulated[rank]["losses"] == pytest.approx(real[rank]["losses"], rel=1e-5)
        difference = (simulated[rank]["parameters"] - real[rank]["parameters"]).norm()
        assert difference <= 1e-4 * real[rank]["parameters"].norm()
    ours, theirs = summary(tmp_path / "simulated"), summary(tmp_path / "real")
    assert ours["tokens"] == theirs["tokens"]
    assert ours["validation_loss"] == pytest.approx(theirs["validation_loss"], rel=1e-5)
    assert sum(ours["bytes_sent_per_step_and_rank"].values()) == sum(theirs["bytes_sent_per_step_and_rank"].values())


def test_resuming_equals_the_uninterrupted_run(pool1: Pool, tmp_path: Path) -> None:
    """Bitwise, with two micro-batches per replica."""
    keep = ["--checkpoint.enable", "--checkpoint.interval=4", "--checkpoint.no-last-save-model-only"]
    batch = ["--training.local_batch_size=1", "--training.global_batch_size=4"]
    arguments = [*METHODS["scape-int8"], *ALONE, *keep, *batch, "--training.steps=8"]
    (whole,) = pool1(train, str(tmp_path / "whole"), [*arguments, simulate(2)])
    copy_checkpoint(tmp_path / "whole", tmp_path / "resumed", 4)
    (resumed,) = pool1(train, str(tmp_path / "resumed"), [*arguments, simulate(2)])
    assert len(resumed["losses"]) == 4 and resumed["losses"] == whole["losses"][4:]
    assert resumed["norms"] == whole["norms"][4:]
    assert torch.equal(whole["parameters"], resumed["parameters"])


def test_simulated_replicas_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 2,229,888 parameters needs 8 x 8 bytes for state and gradients of eight replicas, and 4 for itself."""
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.report.memory import check_memory
    from torchtitan_scape.titan import device
    from torchtitan_scape.trainer.layout import layout_of
    from torchtitan_scape.trainer.specs import register

    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    config = parse(["--job.config_file=train_configs/embedded.toml", simulate(8)])
    register(config, with_data=False)
    check_memory(config, layout_of(config), "cpu", 0)
    monkeypatch.setattr(device, "free_memory", lambda *_: 100_000_000)
    with pytest.raises(
        ValueError, match=r"simulate_replicas = 8: .*state 71\.36 MB.* 100\.00 MB are free; .* or at most 4 replicas"
    ):
        check_memory(config, layout_of(config), "cpu", 0)
    config.sync.method = "dense"
    check_memory(config, layout_of(config), "cpu", 0)  # one state and one gradient


def test_data_that_end_within_a_step_cancel_it() -> None:
    """As on ranks, where the step is canceled: the batches of the other replicas are not used in another step."""
    from torchtitan_scape.data.read_ahead import SimulatedDataLoader

    loader: Any = SimulatedDataLoader([[0, 1, 2, 3], [10, 11, 12]], each=2)  # type: ignore[list-item]
    assert list(loader) == [0, 1, 10, 11, 2, 3, 12]
