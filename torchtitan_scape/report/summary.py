"""Summary of a run at its end."""

import json
import logging
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.config.resolved import FILE
from torchtitan_scape.core.files import write_whole
from torchtitan_scape.core.text import sent_text, shards_text, size_text
from torchtitan_scape.models.registry import workload_of
from torchtitan_scape.planner.configured import shard_axis_of
from torchtitan_scape.planner.run import CheckpointCost, PlannedRun, Saving, checkpoint_bytes
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.report.forecast import Forecast
from torchtitan_scape.report.memory import MemoryReport
from torchtitan_scape.sharding.base import UPDATE
from torchtitan_scape.sharding.cost import LevelsPlan
from torchtitan_scape.sharding.matrix_cost import matrix_stages
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.topology.machines import Links

logger = logging.getLogger(__name__)


class SummaryView(Protocol):
    """The trainer's attributes that the summary uses."""

    job_config: JobConfig
    layout: Layout
    device: torch.device
    gradient_accumulation_steps: int
    replica_optimizer: ReplicaOptimizer
    metrics_processor: Any
    forecast: Forecast | None
    memory: MemoryReport | None
    parallel_dims: Any
    dataloader: Any
    validator: Any
    step: int
    ntokens_seen: int
    steps_taken: int
    train_seconds: float
    simulated: int

    @property
    def described(self) -> str: ...


def summarize(trainer: SummaryView) -> None:
    """Log a summary on rank 0, and write it to summary.json in the dump folder. Collective."""
    trainer.replica_optimizer.finish_previous_step()
    figures, sent = _measured(trainer)
    if dist.get_rank() != 0:
        return
    folder = Path(trainer.job_config.job.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "summary.json", json.dumps(figures, indent=2) + "\n")
    simulated = f", {trainer.simulated} simulated replicas" if trainer.simulated > 1 else ""
    title = f"Summary of {trainer.step} steps ({figures['method']}, {figures['optimizer']}{simulated})"
    rows = _rows(trainer, figures, sent, folder)
    width = max(len(name) for name, _ in rows)
    logger.info("\n".join([title, *(f"  {name:{width}}  {value}" for name, value in rows)]))


def _measured(trainer: SummaryView) -> tuple[dict[str, Any], Any]:
    """Return the content of summary.json, and the bytes per step of the metrics. Collective."""
    replica_optimizer, metrics, steps = trainer.replica_optimizer, trainer.metrics_processor, trainer.steps_taken
    sent = metrics.bytes_per_step(steps, since={})
    local = [trainer.ntokens_seen, trainer.dataloader.empty_documents()]
    read = torch.tensor(local, dtype=torch.float64, device=replica_optimizer.grad_norm.device)
    # Values are summed once per simulated replica. Ranks with the same data-parallel index read the same tokens.
    copies = trainer.simulated * trainer.parallel_dims.non_data_parallel_size
    tokens_seen, empty = (replica_optimizer.collectives.sum_over_all(read) / copies).tolist()
    layout, training = trainer.layout, trainer.job_config.training
    # Those of the whole run divided by its steps differ if it was resumed with another global batch.
    batch = layout.replicate * layout.shard * trainer.gradient_accumulation_steps * training.local_batch_size
    shards, planned = _planned_on_shard_axis(trainer), _planned_on_replicate_axis(trainer)
    validates, calls = trainer.job_config.validation.enable, replica_optimizer.collectives.ledger.calls
    summary = {
        "method": trainer.job_config.sync.method,
        "optimizer": trainer.job_config.optimizer.name,
        "steps": trainer.step,
        "tokens": int(tokens_seen),
        "empty_documents": int(empty),
        "sequence": training.seq_len,
        "training_loss": metrics.last_loss,
        "validation_loss": trainer.validator.last_loss if validates else None,
        **{f"validation_{name}": value for name, value in (trainer.validator.figures if validates else {}).items()},
        "tokens_per_second": batch * training.seq_len * steps / trainer.train_seconds,
        "seconds_per_step": trainer.train_seconds / steps,
        "seconds_by_phase": metrics.mean_seconds(steps),
        "bytes_sent_per_step_and_rank": sent.replicas,
        "bytes_sent_per_rank": metrics.total_sent(),
        "shard_axis_bytes_per_step_and_rank": {" ".join(pair): value for pair, value in sent.shards.items()},
        "payload_parts": replica_optimizer.methods[0].payload_chunks(),
        "planned_bytes_per_step_and_rank": planned,
        "dense_bytes_per_step_and_rank": sent.dense,
        "planned_shard_axis_bytes_per_step_and_rank": {" ".join(pair): value for pair, value in shards.items()},
        "wait_seconds_per_step_by_rank": metrics.mean_waits(steps),
        "messages_per_step": {" ".join(entry): count / steps for entry, count in sorted(calls.items())},
        "skipped_steps": replica_optimizer.guard.skipped,
        "layout": trainer.described,
    }
    unsent = replica_optimizer.metrics().get("residual_norm")
    summary |= {} if unsent is None else {"residual_norm": unsent}
    summary["peak_memory_bytes"] = metrics.take_peak()
    if trainer.memory is not None:
        summary["predicted_memory_bytes"] = trainer.memory.kinds
    if trainer.forecast is not None:
        summary |= {"simulated_replicas": trainer.simulated, "predicted": trainer.forecast.figures()}
    return summary, sent


def _rows(trainer: SummaryView, figures: dict[str, Any], sent: Any, folder: Path) -> list[tuple[str, str]]:
    """Return the rows (name, value) of the log."""
    unsent = figures.get("residual_norm")
    validation = trainer.validator.figures if trainer.job_config.validation.enable else {}
    return [
        ("layout", figures["layout"]),
        ("tokens", f"{figures['tokens']:,}, {figures['tokens_per_second']:,.0f} per second"),
        ("empty documents", f"{figures['empty_documents']:,} skipped"),
        ("training loss", f"{_loss_text(figures['training_loss'])} (last logged step)"),
        ("validation loss", f"{_loss_text(figures['validation_loss'])}{_figures_text(validation)}"),
        ("sent per step and rank", sent_text(sent.replicas, sent.dense)),
        *([("on the shard axis", shards_text(sent.shards))] if sent.shards else ()),
        *(trainer.forecast.rows() if trainer.forecast else ()),
        *([("memory", trainer.memory.compared_with(figures["peak_memory_bytes"]))] if trainer.memory else ()),
        *([("pending updates", f"norm {unsent:.3g}")] if unsent is not None else ()),
        ("skipped steps", str(figures["skipped_steps"])),
        ("written to", str(folder / "summary.json")),
        *_to_export(trainer.job_config, folder),
    ]


def report_dry_run(trainer: SummaryView, saving: Saving | None) -> None:
    """Log the planned bytes per step of a dry run, and of its checkpoints if it writes any."""
    sent, dense = trainer.replica_optimizer.planned_bytes(), trainer.replica_optimizer.dense_bytes()
    logger.info("Dry run: everything was built, no step was taken")
    logger.info(
        f"Payload and masks per step and rank on the replicate axis: {size_text(sent)} sent, "
        f"dense {size_text(dense)}" + (f", {dense / sent:.1f} x" if sent else "")
    )
    if shards := _planned_on_shard_axis(trainer):
        logger.info(f"Weights, gradients and updates per step and rank on the shard axis: {shards_text(shards)}")
    for name, value in trainer.forecast.rows() if trainer.forecast else ():
        logger.info(f"{name}: {value}")
    if saving:
        logger.info(_checkpoint_cost(trainer, saving).describe())


def _checkpoint_cost(trainer: SummaryView, saving: Saving) -> CheckpointCost:
    """Return the predicted cost of a checkpoint."""
    layout, optimizer, config = trainer.layout, trainer.replica_optimizer, trainer.job_config
    run, model = PlannedRun(optimizer.options, config.optimizer.name), workload_of(config).whole()
    shards = layout.shard * layout.context
    kinds = checkpoint_bytes(run, model, optimizer.collectives.replicas, saving.residual, shards)
    kinds |= optimizer.sharding.unsent.sizes(saving.residual)
    return CheckpointCost(kinds, layout.world_size, layout.machine, Links.from_machine(layout.machine), saving)


def _planned_on_replicate_axis(trainer: SummaryView) -> float:
    """Return the planned bytes per step and rank: of rank 0, or with a pipeline the mean over ranks. Collective."""
    planned, collectives = trainer.replica_optimizer.planned_bytes(), trainer.replica_optimizer.collectives
    if trainer.layout.pipeline == 1:
        return planned
    device = trainer.replica_optimizer.grad_norm.device
    total = collectives.sum_over_all(torch.tensor(planned, dtype=torch.float64, device=device))
    return float(total) / trainer.layout.world_size


def _planned_on_shard_axis(trainer: SummaryView) -> dict[tuple[str, str], float]:
    """Return the planned bytes per step and rank, by level and kind.

    With a pipeline it is the mean over stages, which gather their weights once per local batch; nothing is planned if
    FSDP gathers them again for every micro-batch.
    """
    on_cpu = trainer.device.type == "cpu" and trainer.job_config.comm.mode != "fake_backend"
    plan, rows = shard_axis_of(trainer.job_config, trainer.layout, on_cpu)
    if (stages := trainer.layout.pipeline) > 1:
        if trainer.job_config.parallelism.fsdp_reshard_after_forward == "always":
            return {}
        rows = tuple(replace(row, gathers=1) for row in rows)
    micro_batches = trainer.gradient_accumulation_steps // trainer.simulated
    sent = plan.sent(rows, trainer.layout, micro_batches)
    if isinstance(plan, LevelsPlan):
        return sent
    optimizer, model = trainer.job_config.optimizer.name, workload_of(trainer.job_config).whole()
    for stage in matrix_stages(optimizer, model, trainer.layout):
        sent[stage.level, UPDATE] = stage.sent
    return {pair: value / stages for pair, value in sent.items()}


def _to_export(config: JobConfig, folder: Path) -> list[tuple[str, str]]:
    """Return a row with the export command, if there is a checkpoint."""
    if not config.checkpoint.enable or config.checkpoint.load_only:
        return []
    arguments = ["--config", str(folder / FILE), "--checkpoint", "latest", "--output", str(folder / "export")]
    return [("export with", f"python -m torchtitan_scape.export {shlex.join(arguments)}")]


def _figures_text(figures: dict[str, float]) -> str:
    return "".join(f", {name.replace('_', ' ')} {value:.4f}" for name, value in figures.items())


def _loss_text(loss: float | None) -> str:
    return "not measured" if loss is None else f"{loss:.4f}"
