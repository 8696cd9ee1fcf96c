"""TorchTitan's trainer, with the replicate axis handled by the optimizer."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtitan_scape.checkpoint.best import BestCheckpoint
from torchtitan_scape.checkpoint.metadata import RunMetadata
from torchtitan_scape.checkpoint.node_folders import check_private
from torchtitan_scape.checkpoint.state import GlobalLayout
from torchtitan_scape.checkpoint.storage import check_shared
from torchtitan_scape.config.checks import remarks
from torchtitan_scape.config.job_config import JobConfig, group_options, options_of
from torchtitan_scape.core.consistency import DamagedParametersError, ReplicasDifferError
from torchtitan_scape.core.workloads import local_shapes
from torchtitan_scape.data.manifest import tokenizer_entries
from torchtitan_scape.data.prepared import PreparedDataLoader
from torchtitan_scape.data.read_ahead import ReadAheadLoader, TokenSum
from torchtitan_scape.models.registry import workload_of
from torchtitan_scape.observe.observation import Observation
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.report.forecast import Forecast
from torchtitan_scape.report.memory import MemoryReport, check_memory
from torchtitan_scape.report.summary import summarize
from torchtitan_scape.runtime.device_settings import check_precision, check_queues
from torchtitan_scape.runtime.rank_comparison import check_ranks_agree, facts
from torchtitan_scape.runtime.shutdown import Shutdown
from torchtitan_scape.sharding.build import groups_for
from torchtitan_scape.titan import DEVICE_TYPE, patches
from torchtitan_scape.titan.distributed import ParallelDims, device_module, init_distributed, set_pg_timeouts
from torchtitan_scape.titan.trainer import Trainer
from torchtitan_scape.topology.groups import build_groups, build_level_groups
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.topology.torch_version import permute_copies
from torchtitan_scape.trainer.checkpointer import ReplicaCheckpointer
from torchtitan_scape.trainer.layout import checked_layout, is_dry_run
from torchtitan_scape.trainer.metrics import Health, ReplicaMetrics
from torchtitan_scape.trainer.optimizers import TitanOptimizers, schedule_text
from torchtitan_scape.trainer.parallelize import LossPerToken, ReplicaParallelDims
from torchtitan_scape.trainer.specs import register
from torchtitan_scape.trainer.validator import validated_data

logger = logging.getLogger(__name__)


class ScapeTrainer(Trainer):
    """TorchTitan's Trainer with a layout, clipping in the optimizer, phase times, checked resuming and a summary."""

    job_config: JobConfig
    optimizers: TitanOptimizers
    metrics_processor: ReplicaMetrics
    checkpointer: ReplicaCheckpointer
    dataloader: ReadAheadLoader
    layout: Layout
    step: int
    ntokens_seen: int
    shutdown: Shutdown | None = None  # None in tests, where a process builds several trainers
    before_first_step: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(self, job_config: JobConfig) -> None:
        if "LOCAL_RANK" not in os.environ:
            raise ValueError("LOCAL_RANK is not set; start the trainer with ./run_train.sh or torchrun")
        self.layout = checked_layout(job_config, DEVICE_TYPE)
        if self.layout.context > 1:
            permute_copies()
        self.simulated = job_config.topology.simulate_replicas
        if self.simulated > 1 and job_config.training.global_batch_size < 0:
            readers = self.layout.shard * self.simulated
            job_config.training.global_batch_size = job_config.training.local_batch_size * readers
        trains = not is_dry_run(job_config)
        register(job_config, with_data=trains, device_type=DEVICE_TYPE if trains else "")
        self._resolve_options(job_config)
        self._check_memory(job_config)
        with (
            ExitStack() as self._dry_run,
            patches.checkpoint_manager(ReplicaCheckpointer),
            patches.optional_lspci(),
            patches.pipeline_loss_is_visible(),
        ):
            super().__init__(job_config)
        if self.tokenizer is not None:
            self._check_vocabulary()
        if trains:
            self.dataloader.per_step = self.gradient_accumulation_steps
            # Before the checkpointer's groups: torch names this one by the number of groups that a rank belongs to.
            self._count_group = self._build_count_group()
            self._tokens = TokenSum(self.dataloader, self._count_group)
            self.checkpointer.total_steps = self._last_step()
        if job_config.checkpoint.enable:
            self._attach_checkpointer()
        self.replica_optimizer.timer.enabled = True
        self.observation: Observation | None = None
        if job_config.observe.enable:
            self.observation = Observation(job_config, self.replica_optimizer, self.metrics_processor.logger.log)
        if self.forecast is not None:
            self.metrics_processor.forecast = self.forecast.line()
        if job_config.validation.enable:
            self._attach_validator()
        self.health = Health(self.model_args.vocab_size)
        self.checkpointer.alarm = lambda: self.health.alarm
        self.train_seconds = 0.0
        self.steps_taken = self._micro_batches = 0

    @property
    def replica_optimizer(self) -> ReplicaOptimizer:
        return self.optimizers.replica

    def _check_memory(self, config: JobConfig) -> None:
        """Log the predicted memory, or check that of simulated replicas, and refuse a run that does not fit."""
        self.forecast: Forecast | None = None
        self.memory: MemoryReport | None = None
        if self.simulated > 1:
            check_memory(config, self.layout, DEVICE_TYPE, int(os.environ["LOCAL_RANK"]))
            self.forecast = Forecast.of(config, self.layout)
        else:
            self.memory = MemoryReport.of(config, self.layout, device_module)
            for line in self.memory.lines():
                logger.info(line)
            if self.memory.warning:
                logger.warning(self.memory.warning)
            if config.comm.mode != "fake_backend":
                self.memory.check()

    def _attach_validator(self) -> None:
        self.validator.shared_weights, self.validator.validated = self._shared_weights, self._validated
        readers = self.layout.replicate * self.layout.shard * self.simulated
        data = validated_data(self.job_config.validation, readers)
        self.best = BestCheckpoint(Path(self.job_config.job.dump_folder), data)
        self.checkpointer.best = self.best

    def _resolve_options(self, config: JobConfig) -> None:
        """Replace the method's options by those that are resolved for this model."""
        options, layout = options_of(config.sync), self.layout
        shapes = local_shapes(workload_of(config).shapes(), layout.shard * layout.context * layout.tensor)
        setattr(config.sync, config.sync.method, options.resolve(shapes, layout.replicate * self.simulated))

    def init_distributed(self) -> ParallelDims:
        config, layout = self.job_config, self.layout
        init_distributed(config.comm, base_folder=config.job.dump_folder)
        if config.comm.mode != "fake_backend":
            check_ranks_agree(facts(config), self.device)
            if config.checkpoint.enable and not config.checkpoint.load_only:
                folder, copies = Path(config.job.dump_folder, config.checkpoint.folder), config.checkpoint.copies
                check_private(folder, copies) if copies else check_shared(folder)
        logger.info(self.described)
        of_device = self._device_remarks()
        for line in (*remarks(config), *config.sharding.remarks(layout, config.validation.enable), *of_device):
            logger.warning(line)
        timeout, levels = timedelta(seconds=config.comm.init_timeout_seconds), config.sharding.levels
        inner = levels.inner(layout)  # the layout for FSDP
        parallel_dims = ReplicaParallelDims(
            dp_replicate=inner.replicate,
            dp_shard=inner.shard,
            cp=layout.context,
            tp=layout.tensor,
            pp=layout.pipeline,
            ep=1,
            etp=1,
            world_size=layout.world_size,
            groups=build_groups(layout, timeout, **group_options(config)),
            shard_groups=None if levels.active else groups_for(config.sharding, layout, timeout),
            level_groups=build_level_groups(layout, levels.weights, timeout) if levels.active else None,
        )
        # TorchTitan does not build a mesh for a single rank, but checkpoints need it.
        parallel_dims.build_mesh()
        if is_dry_run(config):
            # After the mesh, which needs real tensors. From here on tensors need no memory.
            self._dry_run.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        return parallel_dims

    def _build_count_group(self) -> dist.ProcessGroup | None:
        """Return the group on the host of the ranks that read data; None if there is only this rank."""
        if not self.parallel_dims.dp_enabled:
            return None
        ranks = dist.get_process_group_ranks(self.parallel_dims.get_mesh("batch").get_group())
        timeout = timedelta(seconds=self.job_config.comm.init_timeout_seconds)
        backend = "fake" if self.job_config.comm.mode == "fake_backend" else "gloo"
        return dist.new_group(ranks, timeout, backend, use_local_synchronization=True)

    def _device_remarks(self) -> list[str]:
        """Return warnings about this device. Raises ValueError if collectives could wait for each other on a GPU."""
        config, layout = self.job_config, self.layout
        if is_dry_run(config):
            return []
        if DEVICE_TYPE == "cpu":
            return check_precision(torch.backends.cpu.get_cpu_capability(), config.training.mixed_precision_param)
        if DEVICE_TYPE != "cuda":
            return []
        groups = group_options(config)
        exchange = groups["in_flight"] or groups["staged"]
        overlap = layout.shard > 1 or (layout.replicate > 1 and exchange)
        return check_queues(os.environ, torch.version.hip is not None, overlap)

    @property
    def described(self) -> str:
        text = self.layout.describe()
        return f"{text}, with {self.simulated} simulated replicas" if self.simulated > 1 else text

    def _check_vocabulary(self) -> None:
        entries, rows = tokenizer_entries(self.tokenizer), self.model_args.vocab_size
        if entries > rows:
            raise ValueError(
                f"the largest token of the tokenizer in {self.job_config.model.hf_assets_path} is {entries - 1}, but "
                f"the embedding of {self.job_config.model.title} has {rows} rows; use the tokenizer of the model"
            )

    def _attach_checkpointer(self) -> None:
        options = self.job_config.checkpoint
        mesh = self.parallel_dims._global_meshes["dense"]["dp_replicate", "fsdp", "tp"]
        record = run_record(self.layout, self.job_config, self.replica_optimizer)
        replicas = None
        if self.replica_optimizer.levels is not None:
            own = self.layout.coordinates(dist.get_rank())["replicate"]
            replicas = (1, 0) if self.replica_optimizer.collectives.replicas == 1 else (self.layout.replicate, own)
        layout = GlobalLayout(mesh, self.simulated, replicas)
        self.checkpointer.attach(record, layout, options.fallback, self.device, options.copies)

    # ------------------------------------------------------------------------------------------ training

    def batch_generator(self, data_iterable: Any) -> Iterator[Any]:
        return self._tokens.batches(self._timed_batches(super().batch_generator(data_iterable)))

    def _timed_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches with the time that it took to read them, because the loader returns them later."""
        for batch in batches:
            self.metrics_processor.data_loading_times[-1] = self.dataloader.seconds()
            yield batch

    def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
        if self._micro_batches == 0 and self.checkpointer.enable:
            self.checkpointer.restore_random()
        number = self._micro_batches % self.gradient_accumulation_steps
        self._micro_batches += 1
        last = number + 1 == self.gradient_accumulation_steps
        self.replica_optimizer.sharding.before_micro_batch(number, last)
        if last:
            self.replica_optimizer.prepare_last_backward()
        with self.replica_optimizer.timer.phase("forward_backward"):
            if isinstance(self.loss_fn, LossPerToken):
                loss = self._forward_backward_stage(self.loss_fn, **kwargs)
            else:
                loss = super().forward_backward_step(**kwargs)
        if last and self.step < self.job_config.training.steps:
            self._tokens.start()  # for the next step, while the device computes
        # The micro-batches of a simulated replica are consecutive.
        if self.simulated > 1 and self._micro_batches % (self.gradient_accumulation_steps // self.simulated) == 0:
            self.replica_optimizer.stash_replica_gradients()
        return loss

    def _forward_backward_stage(self, loss: LossPerToken, **kwargs: Any) -> torch.Tensor:
        """Run the schedule of a pipeline, with the loss divided by the global number of tokens before its gradient."""
        loss.tokens, kwargs["global_valid_tokens"] = kwargs["global_valid_tokens"], 1.0
        try:
            return super().forward_backward_step(**kwargs)
        finally:
            loss.tokens = 1.0

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Run TorchTitan's step, and what follows it."""
        if self.steps_taken == 0:
            self.before_first_step()
        flushes = self.step == self.job_config.training.steps and self.job_config.sync.flush_at_end
        if flushes or self.job_config.sharding.sparse:
            # A full exchange, and the backward pass of TAGC, change states that may still be copied for a checkpoint.
            self.checkpointer.maybe_wait_for_staging()
        if flushes:
            self.replica_optimizer.request_full_exchange()
        begin = time.perf_counter()
        if self.observation is not None:
            self.observation.before_step(self.step)
        if self.steps_taken == 0:
            self.metrics_processor.begin(self.step, {} if self.step == 1 else self.checkpointer.record.sent)
        self._tokens.start()
        self.metrics_processor.steps_since_log += 1
        with (
            patches.gradient_norm(lambda: self.replica_optimizer.grad_norm),
            patches.first_token_count(self._tokens.count, self.replica_optimizer.timer)
            if self._count_group is not None
            else nullcontext(),
        ):
            super().train_step(data_iterator)
        self._judge()
        if flushes and not self.replica_optimizer.guard.last_applied():
            self.replica_optimizer.flush()  # the step with the full exchange was skipped
        if self.observation is not None:
            self.observation.after_step()
        self.optimizers.zero_grad()  # their memory is free in checks, saves and validations
        interval, last = self.job_config.sync.consistency_interval, self.step == self.job_config.training.steps
        if (interval and self.step % interval == 0) or self.checkpointer.saves_at(self.step, last):
            self._check_replicas()
        self.train_seconds += time.perf_counter() - begin
        self.steps_taken += 1
        if self.steps_taken == 1:
            # As TorchTitan does for its own groups after the first step.
            timeout = timedelta(seconds=self.job_config.comm.train_timeout_seconds)
            self.replica_optimizer.collectives.groups.set_timeout(timeout)
            self.replica_optimizer.sharding.set_timeout(timeout)
            if self._count_group is not None:
                dist.distributed_c10d._set_pg_timeout(timeout, self._count_group)
            if self.step > 1:  # TorchTitan sets its timeouts after step 1, which a resumed run does not have
                set_pg_timeouts(timeout=timeout, parallel_dims=self.parallel_dims)
        if self.shutdown is not None:
            self.shutdown.after_step(self, first=self.steps_taken == 1)

    def _judge(self) -> None:
        """After a logged step: end the run if the model no longer learns. Collective."""
        metrics = self.metrics_processor
        if metrics.steps_since_log or metrics.last_loss is None:
            return
        last = self.step == self.job_config.training.steps
        if alarm := self.health.judge(self.step, metrics.last_loss, metrics.zero_gradient, last):
            logger.warning(f"{alarm}; no checkpoint is written or deleted until this changes")
            self.replica_optimizer.check_parameters(self.step)

    def should_continue_training(self) -> bool:
        """Return TorchTitan's decision, or raise StoppedEarly if the ranks agreed to stop, all at the same step."""
        if self.steps_taken == 0:
            self._limit_passes()
        more = super().should_continue_training()
        if more and self.shutdown is not None and self.replica_optimizer.guard.stop_agreed:
            self._check_replicas()
            self.shutdown.stop_here(self)
        return more

    def _last_step(self) -> int:
        """Return the last step of `training.steps` that is within `data.epochs` passes over prepared data."""
        steps, epochs = self.job_config.training.steps, self.job_config.data.epochs
        if not epochs:
            return steps
        assert isinstance(self.dataloader.loader, PreparedDataLoader)
        return min(steps, self.step + self.dataloader.loader.steps_left(epochs))

    def _limit_passes(self) -> None:
        """Reduce the steps of the run to `_last_step`. A run that had ended has loaded no position in the data."""
        last = self.step if self.checkpointer.had_ended else self._last_step()
        if last < self.job_config.training.steps:
            logger.info(f"[data] epochs = {self.job_config.data.epochs}: the run ends after step {last}")
            self.job_config.training.steps = last

    @contextmanager
    def _shared_weights(self) -> Iterator[None]:
        """Put the weights to validate and export into the model."""
        self.checkpointer.maybe_wait_for_staging()  # parameters may still be copied for a checkpoint
        with self.replica_optimizer.sharding.uncounted(), self.replica_optimizer.shared_weights():
            yield

    def _validated(self, step: int, loss: float) -> None:
        if dist.get_rank() == 0:
            self.best.note(step, loss, self.checkpointer.saved_at(step), begun=self.step - self.steps_taken)

    def _check_replicas(self) -> None:
        """Check the replicas, before every checkpoint and at the interval, and write what a resumed run needs."""
        self.metrics_processor.flush()
        if self.checkpointer.enable:
            self.checkpointer.record.sent = self.metrics_processor.total_sent()
        if self.observation is not None:
            self.observation.write()  # a run that resumes from the next checkpoint does not observe these steps again
        self.replica_optimizer.check_parameters(self.step)
        if self.job_config.sync.consistency_interval:
            self.replica_optimizer.check_consistency(self.step)

    def train(self) -> None:
        try:
            with patches.profiler_activities():
                super().train()
        except (DamagedParametersError, ReplicasDifferError):
            self.checkpointer.note_failure(self.step)
            raise
        if self.observation is not None:
            self.observation.write()
            self.replica_optimizer.observe(None)
        if self.steps_taken == 0:
            steps = self.job_config.training.steps
            logger.info(f"No step was taken: the run is at step {self.step}, and [training] steps = {steps}")
            return
        if self.job_config.validation.enable and self.validator.last_step != self.step:
            self.validator.validate(self.model_parts, self.step)
        self.summarize()

    def summarize(self) -> None:
        """Log and write the summary of the run. Collective."""
        summarize(self)


def run_record(layout: Layout, config: JobConfig, optimizer: ReplicaOptimizer) -> RunMetadata:
    """Return the record that the checkpoints of a run contain."""
    simulated, levels, training = config.topology.simulate_replicas, config.sharding.levels, config.training
    one_micro_batch = training.local_batch_size * layout.replicate * layout.shard * simulated
    facts = {
        "ranks": layout.world_size,
        "replicate": layout.replicate,
        "shard": layout.shard,
        "context": layout.context,
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "simulate_replicas": simulated,
        "replicas": layout.replicate * simulated,
        "model": config.model.title,
        "optimizer": config.optimizer.name,
        "lr": config.optimizer.lr,
        "betas": [config.optimizer.beta1, config.optimizer.beta2],
        "eps": config.optimizer.eps,
        "weight_decay": config.optimizer.weight_decay,
        "decay_exclude": config.optimizer.decay_exclude,
        "schedule": schedule_text(config),
        "seq_len": training.seq_len,
        "global_batch_size": training.global_batch_size if training.global_batch_size > 0 else one_micro_batch,
        "max_norm": training.max_norm,
        "mixed_precision_param": training.mixed_precision_param,
        "converters": config.model.converters,
        "border": config.data.border,
        "sharding": asdict(config.sharding),
        # Levels over which weights, masters and states are sharded; 0 without three-level partitioning.
        "levels_weights": levels.weights,
        "levels_block": config.sharding.cut_block if levels.active else 0,
        # These determine the ranks of each replica.
        "exchange": config.topology.exchange,
        "ranks_per_node": layout.ranks_per_node,
    }
    return RunMetadata(optimizer, config.checkpoint.residual, facts)
