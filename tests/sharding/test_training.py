"""ZeRO++ in training: supported combinations, exact resuming, and the planned bytes."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.marks import slow
from tests.pool import Pool
from tests.training import METHODS, TWELVE, copy_checkpoint, train
from torchtitan_scape.sharding import build
from torchtitan_scape.sharding.options import ShardingOptions
from torchtitan_scape.topology.layout import plan_layout
from torchtitan_scape.topology.machines import get_machine

INT8 = ["--sharding.weights_code=int8", "--sharding.gradients_code=int8"]
# Two nodes of two ranks, a replica over all of them.
NODES = ["--topology.ranks_per_node=2", "--parallelism.data_parallel_shard_degree=4"]
ALL = ["--sharding.weights_code=int8", "--sharding.secondary", "--sharding.gradients_code=int8+int4"]


def train_raw(folder: str, arguments: list[str], **more: Any) -> dict[str, Any]:
    """Run `train` with raw messages instead of quantized ones."""
    with patch.object(build, "_code", lambda *_: None):
        return train(folder, arguments, **more)


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def test_resuming_equals_the_uninterrupted_run(pool4: Pool, tmp_path: Path) -> None:
    """The secondary copy and a skipped step; the bytes sent equal the planned ones."""
    keep = ["--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.no-last-save-model-only"]
    micro = ["--training.local_batch_size=1", "--training.global_batch_size=8"]
    arguments = [*METHODS["adamw"], *NODES, *ALL, *micro, *keep]
    arguments.append("--training.steps=4")
    whole = pool4(train, str(tmp_path / "whole"), arguments, nan_at=3)
    copy_checkpoint(tmp_path / "whole", tmp_path / "resumed", 2)
    resumed = pool4(train, str(tmp_path / "resumed"), arguments, nan_at=3)
    for a, b in zip(whole, resumed, strict=True):
        assert len(b["losses"]) == 2 and b["losses"] == a["losses"][2:]
        assert torch.equal(a["parameters"], b["parameters"])
    found = summary(tmp_path / "resumed")
    sent, planned = (found[f"{which}shard_axis_bytes_per_step_and_rank"] for which in ("", "planned_"))
    assert sent.keys() == planned.keys() == {f"{a} {b}" for a in ("node", "network") for b in ("weights", "gradients")}
    # The step after the skipped one reused the cached weights.
    planned["network weights"] *= 1 / 2
    assert sent == pytest.approx(planned)


@pytest.mark.slow
def test_tensor_parallelism_recomputation_and_bfloat16(pool4: Pool, tmp_path: Path) -> None:
    """Raw messages are bitwise equal to FSDP2's default."""
    tensor = ["--parallelism.tensor_parallel_degree=2", "--parallelism.data_parallel_shard_degree=2"]
    more = ["--training.mixed_precision_param=bfloat16", "--activation_checkpoint.mode=selective"]
    arguments = [*METHODS["adamw"], *tensor, *more, "--training.steps=3"]
    dense = pool4(train, str(tmp_path / "dense"), arguments)
    raw = pool4(train_raw, str(tmp_path / "raw"), [*arguments, *INT8])
    for one, other in zip(dense, raw, strict=True):
        assert one["losses"] == other["losses"] and torch.equal(one["parameters"], other["parameters"])


SIMULATED = "--topology.simulate_replicas=2"


@pytest.mark.parametrize("local", [False, slow(True)])
def test_muon_exchanges_sharded_matrices(local: bool, pool1: Pool, pool2: Pool, pool4: Pool, tmp_path: Path) -> None:
    """Gradient methods equal a rank that holds the whole model; local methods equal simulated replicas. The bytes sent
    within and between nodes equal the planned ones.
    """

    def run(name: str, pool: Pool, method: str, shard: int, *more: str) -> list[float]:
        degree = f"--parallelism.data_parallel_shard_degree={shard}"
        arguments = [*METHODS[method], "--optimizer.name=Muon", "--training.steps=3", degree, *more]
        return pool(train, str(tmp_path / name), arguments)[0]["losses"]

    nodes = "--topology.ranks_per_node=2"
    if local:
        alone = run("alone simulated", pool2, "sparta", 2, SIMULATED)
        assert run("alone", pool4, "sparta", 2, nodes) == pytest.approx(alone, rel=1e-3)
    else:
        whole = run("whole", pool1, "adams", 1, "--topology.simulate_replicas=4")
        assert run("four", pool4, "adams", 4, nodes) == pytest.approx(whole, rel=1e-3)
        assert run("simulated", pool2, "adams", 2, SIMULATED) == pytest.approx(whole, rel=1e-3)
    for name, levels in (("alone simulated", 1), ("alone", 1)) if local else (("four", 2), ("simulated", 1)):
        report = summary(tmp_path / name)
        sent, planned = (report[f"{which}shard_axis_bytes_per_step_and_rank"] for which in ("", "planned_"))
        assert sent == pytest.approx(planned, rel=0.02)  # FSDP2 prefetches one unused group after a validation.
        updates = {kind for kind in sent if kind.endswith("update")}
        assert len(updates) == levels and all(sent[kind] == planned[kind] for kind in updates)


@pytest.mark.parametrize(
    "method, more, most",
    [
        pytest.param("scape", SIMULATED, 0.35, marks=pytest.mark.slow),  # Weights do not change between replicas.
        pytest.param("diloco", SIMULATED, 0.65, marks=pytest.mark.slow),  # Each replica has its own weights.
        ("scape", "--sync.scape.update=sharded --sync.scape.weights_dtype=bfloat16", 0.65),
    ],
)
def test_the_secondary_copy_follows_the_weights(
    method: str, more: str, most: float, pool2: Pool, tmp_path: Path
) -> None:
    """Raw messages give the default's bits, validation included; weights are sent between nodes once per weight change.

    With the default collectives the bytes sent equal the planned ones.
    """
    nodes = ["--topology.ranks_per_node=1", "--parallelism.data_parallel_shard_degree=2"]
    arguments = [*METHODS[method], *nodes, *more.split(), "--training.steps=3"]
    dense = pool2(train, str(tmp_path / "dense"), arguments)
    raw = pool2(train_raw, str(tmp_path / "raw"), [*arguments, *INT8, "--sharding.secondary"])
    for one, other in zip(dense, raw, strict=True):
        assert one["losses"] == other["losses"] and torch.equal(one["parameters"], other["parameters"])
    reports = [summary(tmp_path / name) for name in ("dense", "raw")]
    assert reports[0]["validation_loss"] == reports[1]["validation_loss"]
    sent = [one["shard_axis_bytes_per_step_and_rank"] for one in reports]
    # FSDP2 prefetches one unused group after a validation.
    assert sent[0] == pytest.approx(reports[0]["planned_shard_axis_bytes_per_step_and_rank"], rel=0.01)
    assert sent[1]["network weights"] < most * sent[0]["network weights"]


@pytest.mark.slow
def test_a_compiled_model(pool2: Pool, tmp_path: Path) -> None:
    """Hooks are outside the compiled region."""
    arguments = [*METHODS["adamw"], "--parallelism.data_parallel_shard_degree=2", "--training.steps=3", *INT8]
    plain = pool2(train, str(tmp_path / "plain"), arguments)
    compiled = pool2(train, str(tmp_path / "compiled"), [*arguments, "--compile.enable"], timeout=600)
    assert compiled[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-3)


@pytest.mark.parametrize(
    "options, world, per_node, message",
    [
        ({"weights_code": "int8"}, 1, 1, "one rank on the shard axis.*raise parallelism.data_parallel_shard_degree"),
        ({"secondary": True}, 2, 2, "secondary = True; it saves bytes between nodes.*1 node.* of 2 rank"),
        # A dry run, which has one process and therefore one node unless a key says otherwise.
        ({"secondary": True}, 4, 4, "start more than one node; .* unless topology.ranks_per_node or topology.machine"),
        (
            {"gradients_code": "int8+int4"},
            4,
            4,
            "set 'int8' or 'int4', or start more .* unless topology.ranks_per_node",
        ),
        ({"gradients_code": "int8+int4"}, 2, 2, "gradients_code = 'int8\\+int4'; two codes need two hops"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], world: int, per_node: int, message: str) -> None:
    layout = plan_layout(world, ranks_per_node=per_node, machine=get_machine("local"), replicate=1, shard=world)
    with pytest.raises(ValueError, match=message):
        ShardingOptions(**options).check(layout)


def test_a_shard_axis_inside_a_node_names_the_degree() -> None:
    layout = plan_layout(4, ranks_per_node=2, machine=get_machine("local"), replicate=2, shard=2)
    with pytest.raises(ValueError, match=r"1 node.* of 2 rank.*; raise parallelism.data_parallel_shard_degree"):
        ShardingOptions(secondary=True).check(layout)


def test_a_run_is_refused_at_its_start(pool2: Pool, tmp_path: Path) -> None:
    for good, text in pool2.outcomes(train, str(tmp_path), [*METHODS["adamw"], *INT8, TWELVE]):
        assert not good and "ValueError" in text and "one rank on the shard axis" in text.splitlines()[-1], text
