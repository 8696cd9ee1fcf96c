"""Short runs of the trainer for tests: arguments of methods and layouts, and training in a rank of a pool."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool

# A model on bytes with 0.2 million parameters: a step takes a tenth of the embedded model's time.
RECIPE = [
    "--job.config_file=train_configs/embedded.toml",
    "--model.flavor=study",
    "--model.hf_assets_path=./torchtitan_scape/data/byte_tokenizer",
    "--metrics.log_freq=1",
    "--training.local_batch_size=2",
    "--training.seq_len=64",
    "--validation.local_batch_size=2",
    "--validation.seq_len=64",
    "--validation.steps=2",
    "--lr_scheduler.warmup_steps=2",
    "--sync.scape.block_size=64",
    "--sync.scape.density_warmup_steps=3",
    "--sync.scape.code=float32",
]
# the recipe's own method
EMBEDDED = [
    "--model.flavor=embedded",
    "--model.hf_assets_path=./torchtitan_scape/data/tokenizer",
    "--sync.scape.block_size=1024",
]
METHODS = {
    "adamw": ["--sync.method=dense", "--optimizer.name=AdamW"],
    "adams": ["--sync.method=dense"],
    # so that parameters are DTensors also on a single rank
    "muon": ["--sync.method=dense", "--optimizer.name=Muon", "--training.mixed_precision_param=bfloat16"],
    "diloco-muon": ["--sync.method=diloco", "--sync.diloco.inner_steps=3", "--optimizer.name=Muon"],
    "scape": ["--sync.scape.density=0.1"],
    "embedded": [*EMBEDDED, "--sync.scape.density=0.1"],
    "scape-1": ["--sync.scape.density=1.0"],
    # k = round(0.0125 * 1000) is 12 in float64 and 13 if the density comes back rounded to FP32.
    "scape-odd": ["--sync.scape.density=0.0125", "--sync.scape.block_size=1000", "--sync.scape.code=int4"],
    "scape-int4": ["--sync.scape.density=0.1", "--sync.scape.code=int4", "--sync.scape.chunk_bytes=20000"],
    "scape-int8": [
        "--sync.scape.density=0.1",
        "--sync.scape.code=int8",
        "--sync.scape.chunk_bytes=100000",
    ],
    "scape-offload": ["--sync.scape.offload=state"],
    "scape-gather": ["--sync.scape.density=0.1", "--sync.scape.update=sharded"],
    "scape-gather-2bit": [
        "--sync.scape.density=0.1",
        "--sync.scape.update=sharded",
        "--sync.scape.code=2bit",
    ],
    "scape-gather-bf16": [
        "--sync.scape.density=0.1",
        "--sync.scape.update=sharded",
        "--sync.scape.code=int8",
        "--sync.scape.weights_dtype=bfloat16",
        "--sync.scape.offload=state",
    ],
    "topk": ["--sync.method=topk", "--sync.topk.density=0.05", "--sync.topk.block_size=64", "--optimizer.name=AdamW"],
    "topk-adams": ["--sync.method=topk", "--sync.topk.density=0.05", "--sync.topk.density_warmup_steps=3"],
    "demo": ["--sync.method=demo", "--sync.demo.k=8", "--sync.demo.code=sign", "--optimizer.name=SignSGD"],
    "powersgd-32": ["--sync.method=powersgd", "--sync.powersgd.start=2", "--sync.powersgd.rank=32"],
    "powersgd": ["--sync.method=powersgd", "--sync.powersgd.start=2"],
    "radius": [
        "--sync.method=radius",
        "--sync.radius.interval=3",
        "--sync.radius.start=2",
        "--optimizer.name=AdamW",
    ],
    "radius-adams": [
        "--sync.method=radius",
        "--sync.radius.interval=4",
        "--sync.radius.start=0",
    ],
    "quantized": ["--sync.method=quantized", "--optimizer.name=AdamW", "--sync.quantized.block=64"],
    "quantized-2bit": ["--sync.method=quantized", "--sync.quantized.code=2bit", "--optimizer.name=Muon"],
    "quantized-update": [
        "--sync.method=quantized_update",
        "--sync.quantized_update.whiten_every=3",
        "--sync.quantized_update.interval=2",
        "--optimizer.name=Muon",
    ],
    "onebit": ["--sync.method=onebit_adam", "--sync.onebit_adam.warmup_steps=3", "--optimizer.name=AdamW"],
    "diloco": ["--sync.method=diloco", "--sync.diloco.inner_steps=3", "--optimizer.name=AdamW"],
    # Fragments: two layers and the other parameters; an exchange is in flight after step 4.
    "streaming": [
        "--sync.method=streaming_diloco",
        "--sync.streaming_diloco.inner_steps=6",
        "--sync.streaming_diloco.fragments=3",
        "--sync.streaming_diloco.delay=2",
    ],
    "sparta": [
        "--sync.method=sparta",
        "--sync.sparta.interval=4",
        "--sync.sparta.warmup_steps=2",
        "--optimizer.name=AdamW",
    ],
    "sparta-muon": [
        "--sync.method=sparta",
        "--sync.sparta.warmup_steps=2",
        "--optimizer.name=Muon",
        "--topology.simulate_replicas=5",  # so many that the owner's error is a separate state
    ],
    "sparseloco": [
        "--sync.method=sparseloco",
        "--sync.sparseloco.inner_steps=3",
        "--sync.sparseloco.density=0.1",
        "--optimizer.name=AdamW",
    ],
    # The exchange of the first round is in flight after step 4, and used after step 6.
    "co2": ["--sync.method=co2", "--sync.co2.inner_steps=3", "--optimizer.name=AdamW"],
    "noloco": ["--sync.method=noloco", "--sync.noloco.inner_steps=3", "--optimizer.name=AdamW"],
    "scape-tensor": ["--sync.scape.density=0.1", "--sync.scape.selection=tensor", "--sync.scape.no-staleness-scaling"],
}
LAYOUTS = {
    "1x2": ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1"],
    "2x1": ["--parallelism.data_parallel_replicate_degree=1", "--parallelism.data_parallel_shard_degree=2"],
    # Four replicas on two nodes: the exchange has two levels.
    "nodes": [
        "--parallelism.data_parallel_replicate_degree=4",
        "--parallelism.data_parallel_shard_degree=1",
        "--topology.ranks_per_node=2",
    ],
    "2x2": ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=2"],
}
TWELVE = "--training.steps=12"


def train(
    folder: str, arguments: list[str], stop_after: int | None = None, nan_at: int | None = None, for_good: bool = False
) -> dict[str, Any]:
    """Run the trainer in this rank; return the metrics of every step, and the local parameters at the end.

    Args:
        nan_at: the step in which the last rank's gradient has a NaN, or the first such step with `for_good`.
    """
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.core.parameters import local
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    trainer = ScapeTrainer(parse([*RECIPE, f"--job.dump_folder={folder}", *arguments]))
    steps: list[tuple[int, float, float]] = []
    log = trainer.metrics_processor.log

    def keep(step: int, loss: float, max_loss: float, norm: float, extra_metrics: Any = None) -> None:
        steps.append((step, loss, norm))
        log(step, loss, max_loss, norm, extra_metrics)

    if stop_after is not None:
        trainer.should_continue_training = lambda: trainer.step < stop_after  # type: ignore[method-assign]
    step_optimizers = trainer.optimizers.step

    def step_with_nan(*args: Any, **kwargs: Any) -> None:
        hit = nan_at is not None and (trainer.step >= nan_at if for_good else trainer.step == nan_at)
        own = next(trainer.model_parts[0].parameters()).grad
        if hit and own is not None and dist.get_rank() == dist.get_world_size() - 1:  # None in `flush`
            local(own).view(-1)[0] = float("nan")
        step_optimizers(*args, **kwargs)

    with (
        patch("time.sleep"),
        patch.object(trainer.metrics_processor, "log", keep),
        patch.object(trainer.optimizers, "step", step_with_nan),
    ):
        trainer.train()
    parameters = torch.cat([local(p).detach().reshape(-1) for p in trainer.model_parts[0].parameters()])
    trainer.close()
    return {
        "losses": [loss for _, loss, _ in steps],
        "norms": [norm for *_, norm in steps],
        "parameters": parameters.clone(),
        "skipped": trainer.replica_optimizer.guard.skipped,
    }


def scalars(folder: Path, *tags: str) -> list[dict[int, float]]:
    """Return TensorBoard's values of a run by step, for each tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: list[dict[int, float]] = [{} for _ in tags]
    for events in sorted((folder / "tb").rglob("events*")):
        accumulator = EventAccumulator(str(events))
        accumulator.Reload()
        for tag, values in zip(tags, found, strict=True):
            values |= {event.step: event.value for event in accumulator.Scalars(tag)}
    return found


def copy_checkpoint(run: Path, other: Path, step: int) -> None:
    """Copy a checkpoint of a run into the folder of another one, which resumes from it."""
    name = Path("checkpoint", f"step-{step}")
    shutil.copytree(run / name, other / name)


def first_steps(steps: int, run: dict[str, Any]) -> dict[str, Any]:
    return {key: run[key][:steps] for key in ("losses", "norms")}


def pool_for(layout: str, request: pytest.FixtureRequest) -> Pool:
    return request.getfixturevalue("pool4" if layout in ("2x2", "nodes") else "pool2")
