"""Runs of small models that are saved after step 6 and resumed, with their states after loading and at the end."""

import functools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from tests.logs import logged
from tests.pool import Pool
from tests.training import LAYOUTS, RECIPE

SAVING = [
    "--training.steps=20",
    "--validation.no-enable",
    "--metrics.no-enable-tensorboard",
    "--checkpoint.enable",
    "--checkpoint.interval=6",
    "--checkpoint.no-last-save-model-only",
]
ALONE = ["--parallelism.data_parallel_replicate_degree=1", "--parallelism.data_parallel_shard_degree=1"]
MORE = {
    "4x1": ["--parallelism.data_parallel_replicate_degree=4", "--parallelism.data_parallel_shard_degree=1"],
    "3x1": ["--parallelism.data_parallel_replicate_degree=3", "--parallelism.data_parallel_shard_degree=1"],
    "3 shards": ["--parallelism.data_parallel_replicate_degree=1", "--parallelism.data_parallel_shard_degree=3"],
    "tensor": [*LAYOUTS["1x2"], "--parallelism.tensor_parallel_degree=2"],
    # One group of two shards that simulates three replicas.
    "3 simulated": [*LAYOUTS["2x1"], "--topology.simulate_replicas=3"],
    # One process simulates all replicas.
    "3 alone": [*ALONE, "--topology.simulate_replicas=3"],
    "6 alone": [*ALONE, "--topology.simulate_replicas=6"],
    "6 simulated": [*LAYOUTS["2x1"], "--topology.simulate_replicas=6"],
}
WHERE = LAYOUTS | MORE


def run(folder: str, arguments: list[str], steps: int, look: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Train until `steps`.

    Returns:
        The results of `look` on the trainer after loading (if there is a checkpoint) and at the end, the last loss, and
        the log lines about the checkpoint.
    """
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    trainer = ScapeTrainer(parse([*RECIPE, f"--job.dump_folder={folder}", *SAVING, *arguments]))
    trainer.should_continue_training = lambda: trainer.step < steps  # type: ignore[method-assign]
    load = trainer.checkpointer.load
    found: dict[str, Any] = {}

    def load_and_look(step: int = -1) -> bool:
        if loaded := load(step):
            found["loaded"] = look(trainer)
        return loaded

    with (
        patch.object(trainer.checkpointer, "load", load_and_look),
        logged() as lines,
        patch("time.sleep"),
    ):
        trainer.train()
    trainer.replica_optimizer.finish_previous_step()
    found["loss"], found["after"] = trainer.metrics_processor.last_loss, look(trainer)
    found["resume_lines"] = [line for line in lines if line.startswith("Resumed from")]
    trainer.close()
    return found


def whole(values: Tensor, parameter: Tensor) -> Tensor:
    """Return the full tensor of local values that are sharded like the parameter. Collective."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return values
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(values, mesh, placements, shape=parameter.shape, stride=parameter.stride()).full_tensor()


def largest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the largest relative L2 difference over all parameters."""
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).norm() / a[k].norm().clamp(min=1e-30)) for k in a)


def pool_of(layout: str, request: pytest.FixtureRequest) -> Pool:
    name = {
        "3 alone": "pool1",
        "6 alone": "pool1",
        "3x1": "pool3",
        "3 shards": "pool3",
        "4x1": "pool4",
        "2x2": "pool4",
        "nodes": "pool4",
        "tensor": "pool4",
    }.get(layout, "pool2")
    return request.getfixturevalue(name)


def first_halves(
    request: pytest.FixtureRequest,
    folders: pytest.TempPathFactory,
    work: Callable[..., Any],
    methods: Mapping[str, list[str]],
) -> Callable[[str, str, Path], list[Any]]:
    """Return a function that runs `work` until step 6 once per layout and method, and copies the checkpoint into a
    folder. It returns the results of all ranks."""

    @functools.cache
    def make(layout: str, method: str) -> tuple[Path, list[Any]]:
        folder = folders.mktemp(f"{method}-{layout.replace(' ', '-')}")
        return folder, pool_of(layout, request)(work, str(folder), [*methods[method], *WHERE[layout]], 6)

    def copy(layout: str, method: str, folder: Path) -> list[Any]:
        made, results = make(layout, method)
        shutil.copytree(made / "checkpoint", folder / "checkpoint")
        return results

    return copy
