"""TorchTitan's checkpoint manager for unattended runs: it loads no damaged checkpoint and deletes no needed one.

A checkpoint is complete when its manifest exists, which is written last (see `checkpoint.storage`). Optimizer state of
another layout or method is migrated, see `checkpoint.migration`.
"""

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from torchtitan_scape.checkpoint import storage
from torchtitan_scape.checkpoint.best import BestCheckpoint
from torchtitan_scape.checkpoint.metadata import (
    RUN_METADATA,
    RunMetadata,
    forget_metadata,
    load_into,
    names_in,
    read_record,
)
from torchtitan_scape.checkpoint.migration import StateReader, migrate
from torchtitan_scape.checkpoint.node_folders import NodeFolders
from torchtitan_scape.checkpoint.state import (
    RANDOM,
    GlobalLayout,
    ModelCheckpoint,
    OptimizerCheckpoint,
    RandomState,
)
from torchtitan_scape.checkpoint.storage import call_on_rank_0
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.titan.components import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    AsyncMode,
    CheckpointManager,
    LRSchedulersContainer,
)
from torchtitan_scape.topology.torch_version import STAGER_SAVES_ONCE

logger = logging.getLogger(__name__)

_AXES = ("ranks", "replicate", "shard", "context", "tensor", "pipeline", "simulate_replicas")


class _Stager(DefaultStager):
    """PyTorch's stager. It copies on a stream of its own, which does not wait for the kernels that compute a state."""

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return super().stage(state_dict, **kwargs)


class ReplicaCheckpointer(CheckpointManager):
    """Replaces TorchTitan's CheckpointManager in the trainer. Call `attach` after construction."""

    record: RunMetadata
    folder: str
    stager: Any
    _layout: GlobalLayout
    best: BestCheckpoint | None = None  # Has the checkpoint with the lowest validation loss, which is never deleted.
    total_steps = 0  # of the run
    had_ended = False  # whether the loaded checkpoint is the model alone, with which the run had ended
    # What is wrong with the model at the last logged step, "" if nothing is.
    alarm: Callable[[], str] = staticmethod(str)
    _fallback: bool
    _optimizers: ReplicaOptimizer
    _being_written = -1  # Step of the last save of this run, complete or not.
    # Steps of damaged checkpoints, or newer than `checkpoint.load_step`. They do not count for `keep_latest_k`.
    _not_counted: set[int]
    _saving_group: dist.ProcessGroup | None
    _nodes: NodeFolders | None = None  # None if all nodes share the folder
    _publisher: ThreadPoolExecutor

    def attach(
        self, record: RunMetadata, layout: GlobalLayout, fallback: bool, device: torch.device, copies: int = 0
    ) -> None:
        """Set the values that TorchTitan's constructor does not receive.

        Args:
            fallback: load the newest intact checkpoint if newer ones are damaged.
            device: the device of the random state.
            copies: number of other nodes that keep a node's files; 0 if all nodes share the folder.
        """
        self.record, self._layout, self._fallback, self._not_counted = record, layout, fallback, set()
        self._optimizers = self.states[OPTIMIZER].replica
        self.states[RUN_METADATA], self.states[RANDOM] = record, RandomState(device)
        # On GPUs the timeout of the default group is meant for steps, and writing may take longer.
        self._saving_group = None if device.type == "cpu" else dist.new_group(backend="gloo")
        if copies:
            self._nodes, self._publisher = NodeFolders(copies), ThreadPoolExecutor(1, "publisher")
        self.states[OPTIMIZER] = OptimizerCheckpoint(self._optimizers, layout, record.values["residual"])
        self.states[MODEL] = ModelCheckpoint(self.states[MODEL], self._optimizers, layout)

    # ------------------------------------------------------------------------------------------- saving

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save a checkpoint if this step is due, like the parent.

        Raises:
            ValueError: It cannot be written. Raised on every rank; older checkpoints remain intact.
        """
        if not self._should_save(curr_step, last_step):
            return
        if (reason := self._unsafe()) and not last_step:
            logger.warning(f"no checkpoint is written or deleted at step {curr_step}: {reason}")
            return
        if self._earlier_failed() and not last_step:
            self.save_to_resume(curr_step)  # synchronously, so that a failure is known at once
        else:
            self._guarded(lambda: CheckpointManager.save(self, curr_step, last_step))
        if last_step:
            self._purge_stale_checkpoints()

    def _unsafe(self) -> str:
        """Return why the state of this step should not replace that of an older checkpoint, "" if it may."""
        self._optimizers.finish_previous_step()
        return self._optimizers.guard.alarm or self.alarm()

    def save_to_resume(self, step: int) -> None:
        """Write the full state of `step` synchronously, unless it already exists. Collective."""
        if not self.enable or self.load_only:
            return
        path = self._create_checkpoint_id(step)
        self._earlier_failed()
        if call_on_rank_0(
            lambda: step not in self._not_counted and self._is_complete(path) and RUN_METADATA in names_in(path)
        ):
            return
        state = self._flattened_model_states_sd()
        self._guarded(lambda: self.dcp_save(state, checkpoint_id=path, async_mode=AsyncMode.DISABLED))
        logger.info(f"Saved {path}")

    def restore_random(self) -> None:
        """Restore the random state. Call it before the first forward pass."""
        self.states[RANDOM].restore()

    def _earlier_failed(self) -> bool:
        """Wait for the asynchronous save in progress; log an error and return True if it failed."""
        try:
            self._guarded(self._async_wait)
        except ValueError as error:
            logger.error(f"{error}; a later step will be saved instead")
            return True
        return False

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save with checksums and a manifest. The arguments are those of the parent."""
        self._being_written = int(checkpoint_id.rpartition("-")[2])
        self._not_counted.discard(self._being_written)
        writer = storage.CheckedWriter(checkpoint_id, shared=self._nodes is None)
        if self._nodes is not None:
            self._nodes.begin(checkpoint_id)
        options: dict[str, Any] = {"storage_writer": writer, "checkpoint_id": checkpoint_id}
        if async_mode == AsyncMode.DISABLED:
            saved = dcp.save(state_dict, process_group=self._saving_group, **options)
            if self._nodes is not None:
                self._nodes.publish(checkpoint_id)
            return saved
        options["process_group"] = self.pg
        # The values are on the host by then. DCP's loader for a GPU would create a context on the node's first one, as
        # the current device of its thread or process, on every rank.
        writer.per_thread_copy_ahead = 0
        if self.stager is not None and STAGER_SAVES_ONCE:
            self.stager.close()
            self.stager = None
        if self.stager is None:
            pinned = async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM
            self.stager = _Stager(StagingOptions(pinned, pinned, pinned, pinned))
        options["async_stager"] = self.stager
        if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
        response = dcp.async_save(state_dict, **options)
        if self._nodes is None:
            return response
        if isinstance(response, AsyncSaveResponse):
            response.upload_completion = self._publish_after(response.upload_completion, checkpoint_id)
            return response
        return self._publish_after(response, checkpoint_id)

    def _publish_after(self, written: Future[Any], path: str) -> Future[None]:
        """Copy the files to other nodes in the background, once they are written."""
        nodes = self._nodes
        assert nodes is not None

        def publish() -> None:
            written.result()
            nodes.publish(path)

        return self._publisher.submit(publish)

    def _guarded(self, write: Callable[[], Any]) -> None:
        """Run a save. After an I/O error remove the incomplete folder and raise the same ValueError on every rank.

        Other errors, such as a lost peer, propagate. The incomplete folder then has no manifest and is never loaded.
        """
        try:
            write()
        except (OSError, CheckpointException) as error:
            path = self._create_checkpoint_id(self._being_written)
            if self.best is not None and dist.get_rank() == 0 and not self._is_complete(path):
                self.best.retract(self._being_written)
            if (cause := storage.first_os_error(error)) is None:
                raise
            self.save_future = None
            text = storage.failure_text(error, path)
            if self._keeps_files and not self._is_complete(path):
                with suppress(OSError):
                    storage.remove(path)
            with suppress(OSError):  # the folder may not be readable either
                intact = self._complete_steps()
                newest = f"the last good checkpoint is step-{intact[-1]}" if intact else "there is no other checkpoint"
                text = f"{text}; {newest}"
            raise ValueError(text) from cause

    def note_failure(self, step: int) -> None:
        """Record a step at which damage was found."""
        if self.enable and not self.load_only and self._keeps_files:
            with suppress(OSError):
                storage.note_failed_step(self.folder, step)

    def close(self) -> None:
        """Wait for an asynchronous save in progress, so that a failure is reported."""
        if getattr(self, "enable", False) and hasattr(self, "record") and getattr(self, "save_future", None):
            self._guarded(self._async_wait)
        super().close()

    def _complete_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints in the folder, ascending, without `_not_counted`."""
        steps = (step for step in storage.steps_in(self.folder) if step not in self._not_counted)
        return [step for step in steps if self._is_complete(self._create_checkpoint_id(step))]

    def _is_complete(self, path: str) -> bool:
        """Return whether all files exist, or, with folders of single nodes, did when the checkpoint was finished."""
        return storage.is_complete(path) if self._nodes is None else storage.is_finished(path)

    @property
    def _keeps_files(self) -> bool:
        """Whether this rank deletes checkpoints: rank 0, or the first rank of each node with a folder of its own."""
        return dist.get_rank() == 0 if self._nodes is None else self._nodes.leads

    def saves_at(self, step: int, last_step: bool = False) -> bool:
        """Return whether `save` would write this step."""
        return self._should_save(step, last_step)

    def saved_at(self, step: int) -> bool:
        """Return whether the last save of this run was that of `step`: `save` may have refused a later one."""
        return step == self._being_written

    def newest_step(self) -> int:
        """Return the step of the newest complete checkpoint; -1 if there is none or checkpoints are disabled."""
        return self._find_load_step() if self.enable else -1

    def _find_load_step(self, folder: str = "") -> int:
        """Return the step of the newest complete checkpoint; -1 if there is none."""
        return super()._find_load_step(folder) if folder else (self._complete_steps() or [-1])[-1]

    def _purge_stale_checkpoints(self) -> None:
        """Delete checkpoints older than the newest `keep_latest_k` complete ones, except the best one."""
        if self.keep_latest_k <= 0 or self._optimizers.guard.skipped_in_a_row:
            return
        if self._nodes is not None:
            stale = call_on_rank_0(self._stale_checkpoints)  # rank 0 alone has the validation losses
        else:
            stale = self._stale_checkpoints() if self._keeps_files else []
        for path in stale if self._keeps_files else ():
            self.purge_queue.put(path)

    def _stale_checkpoints(self) -> list[str]:
        try:
            complete, existing = self._complete_steps(), storage.steps_in(self.folder)
        except OSError as error:  # for example of a network file system; the save itself succeeded
            logger.warning(f"no older checkpoint is deleted: {self.folder} cannot be listed ({error.strerror})")
            return []
        if len(complete) < self.keep_latest_k:
            return []
        spared = (self._being_written, None if self.best is None else self.best.checkpoint_step(complete))
        oldest = complete[-self.keep_latest_k]
        return [self._create_checkpoint_id(step) for step in existing if step < oldest and step not in spared]

    # ------------------------------------------------------------------------------------------ loading

    def load(self, step: int = -1) -> bool:
        """Load the newest complete checkpoint, or that of `step`, or `initial_load_path`. Collective.

        Returns:
            True if a checkpoint was loaded.

        Raises:
            ValueError: The requested checkpoint does not exist or is damaged, with the reason.
        """
        if not self.enable:
            return False
        path = self._choose(step)
        if path is None:
            return self._load_initial()
        if self.initial_load_path:
            logger.info(f"checkpoint.initial_load_path is not used, because the run continues from {path}")
        if step == -1 and self._is_final(path):
            self._load_model(path)
            self.states["train_state"].step = self.total_steps
            self.had_ended = True
            return True
        if path == self._create_checkpoint_id(0):  # a seed checkpoint contains the model only
            self._load_model(path)
        else:
            self._load_run(path)
        return True

    def _is_final(self, path: str) -> bool:
        """Return whether a checkpoint has only the model, because the run had ended with it."""
        ended = path == self._create_checkpoint_id(self.total_steps)
        return ended and not {OPTIMIZER, RUN_METADATA} & names_in(path)

    def _choose(self, step: int) -> str | None:
        """Return the verified folder to resume from, or None if there is none."""
        if self._nodes is not None:
            self._from_nodes(self._nodes.exchange_manifests, self.folder)
        existing: list[int] = call_on_rank_0(lambda: storage.steps_in(self.folder))
        steps: list[int] = call_on_rank_0(
            lambda: [s for s in existing if storage.is_finished(self._create_checkpoint_id(s))]
        )
        if step != -1:
            return self._path_of_step(step, steps)
        for unfinished in (s for s in existing if s not in steps and s > max(steps, default=-1)):
            logger.warning(
                f"{self._create_checkpoint_id(unfinished)} has no manifest: it is incomplete and will not be loaded"
            )
        left_out, failed = call_on_rank_0(lambda: storage.newest_to_leave_out(self.folder, steps))
        if left_out:
            logger.warning(
                f"the run failed {left_out + 1} times at step {failed}: the state of "
                f"{self._create_checkpoint_id(steps[-left_out])} may be damaged; loading an older checkpoint"
            )
            self._not_counted |= set(steps[-left_out:])
        for candidate in reversed(steps[: len(steps) - left_out]):
            path = self._create_checkpoint_id(candidate)
            if (damage := self._damage(path)) is None:
                return path
            if not self._fallback:
                raise ValueError(
                    f"{path} is damaged: {damage}; delete it, or set checkpoint.fallback = true to load the newest "
                    "intact one before it"
                )
            logger.warning(f"{path} is damaged: {damage}; loading an older checkpoint")
            self._not_counted.add(candidate)
        if steps:
            raise ValueError(f"all checkpoints in {self.folder} are damaged; start in another --job.dump_folder")
        return None

    def _damage(self, path: str) -> str | None:
        """Return why a checkpoint cannot be loaded, or None if it can. Collective."""
        return storage.first_damage(path) if self._nodes is None else self._from_nodes(self._nodes.restore, path)

    def _from_nodes(self, work: Callable[[str], Any], path: str) -> Any:
        """Return `work(path)`. Raises ValueError on every rank if a node cannot be written."""
        try:
            return work(path)
        except OSError as error:
            raise ValueError(storage.failure_text(error, path)) from error

    def _path_of_step(self, step: int, steps: list[int]) -> str:
        path = self._create_checkpoint_id(step)
        if step not in steps:
            known = f"finished are {', '.join(f'step-{s}' for s in steps)}" if steps else "there is none"
            raise ValueError(f"checkpoint.load_step = {step}, but there is no finished {path}; {known}")
        if (damage := self._damage(path)) is not None:
            raise ValueError(f"{path} is damaged: {damage}; select another step with --checkpoint.load_step")
        if later := [s for s in steps if s > step]:
            logger.warning(
                f"checkpoint.load_step = {step}: a start without it loads the newest checkpoint, step-{later[-1]} now; "
                f"delete those after step-{step} if the run is to continue from here"
            )
        self._not_counted |= set(later)
        return path

    def _load_initial(self) -> bool:
        """Load `initial_load_path`, if it is set."""
        path = self.initial_load_path
        if not path:
            return False
        is_folder, finished = call_on_rank_0(lambda: (os.path.isfile(f"{path}/.metadata"), storage.is_finished(path)))
        if not is_folder:
            raise ValueError(f"checkpoint.initial_load_path = {path!r} is not a checkpoint folder")
        if not finished:
            logger.warning(f"{path} has no manifest: its integrity cannot be checked")
        elif (damage := storage.first_damage(path)) is not None:
            raise ValueError(f"checkpoint.initial_load_path = {path!r} is damaged: {damage}")
        if not self.initial_load_model_only:
            self._load_run(path)
            return True
        self._load_model(path)
        return True

    def _load_model(self, path: str) -> None:
        logger.info(f"Loading only the model from {path}")
        model = self.states[MODEL].load_targets()
        load_into(path, model)
        self.states[MODEL].load_state_dict(model)

    def _load_run(self, path: str) -> None:
        """Load the complete state of a run."""
        begin = time.monotonic()
        names = names_in(path)
        if not {OPTIMIZER, RUN_METADATA} & set(names):  # an optimizer without state still has the metadata
            raise ValueError(
                f"{path} contains only the model, so that training cannot continue from it; select an earlier step "
                "with --checkpoint.load_step, or start a new run in another --job.dump_folder. (To resume from the "
                "last checkpoint of a run, set checkpoint.last_save_model_only = false in that run)"
            )
        if RUN_METADATA not in names:
            raise ValueError(
                f"{path} was not saved by this version of the project; load its model with checkpoint.initial_load_path"
            )
        saved = read_record(path)
        same_layout, different = self.record.compare(saved, path)
        excluded = set(self.exclude_from_loading)
        elsewhere = (RUN_METADATA, RANDOM, DATALOADER, OPTIMIZER)
        states = {key: state for key, state in self._states_to_load(False).items() if key not in elsewhere}
        random = {f"{RANDOM}.{key}" for key in self.states[RANDOM].state_dict()}
        if RANDOM not in excluded and not different.keys() & set(_AXES) and random <= names:
            states[RANDOM] = self.states[RANDOM]
        if MODEL not in excluded:
            states |= self.states[MODEL].load_targets()
        load_into(path, states)
        if MODEL not in excluded:
            self.states[MODEL].load_state_dict(states)
        messages = []
        if OPTIMIZER not in excluded:
            reader = StateReader(path, saved, self._optimizers, self._layout)
            messages.append(migrate(self._optimizers, reader, same_layout))
            if same_layout and MODEL not in excluded:
                reader.fill_weights()
            elif self._optimizers.levels is not None:
                self._optimizers.levels.masters_loaded()  # the migration may have loaded weights into the masters
        trainer: Any = self.states["train_state"]
        ranks, mine = (values["replicate"] * values["shard"] for values in (saved, self.record.values))
        trainer.ntokens_seen = trainer.ntokens_seen * ranks // mine  # each rank's includes its simulated replicas
        if DATALOADER not in excluded:
            messages += self._load_data(path, saved)
        self.record.sent = saved.get("bytes_sent")
        forget_metadata()
        self._set_learning_rates("lr" in different)
        listed = ", ".join(f"{key} {change}" for key, change in different.items() if key != "ranks")
        changes = f"; differs from the run that saved it: {listed}" if listed else ""
        result = "; ".join(messages) or "without its optimizer"
        logger.info(f"Resumed from {path} in {time.monotonic() - begin:.2f} s: {result}{changes}")

    def _load_data(self, path: str, saved: dict[str, Any]) -> list[str]:
        """Load the data position, and return messages for the log."""
        loader: Any = self.states[DATALOADER]
        if loader is None:
            return []
        readers, mine = (values["replicas"] * values["shard"] for values in (saved, self.record.values))
        old: dict[str, Any] = loader.saved_state(readers)
        if not {f"{DATALOADER}.{key}" for key in old} <= names_in(path):
            raise ValueError(
                f"{path} has no position in data of this run's kind (prepared, or text); use the data of the run that "
                "saved it, or start at the beginning of the new data with "
                "--checkpoint.exclude_from_loading=dataloader"
            )
        if readers == mine:
            load_into(path, {DATALOADER: loader})
            return []
        load_into(path, {DATALOADER: old})
        return [loader.load_resharded([old])]

    def _set_learning_rates(self, changed: bool) -> None:
        """Recompute the learning rates at the schedule's position, from this run's base if it has `changed`.

        Other values of param groups are not loaded: those of this run's configuration apply.
        """
        values, groups = self.record.values, self._optimizers.inner.param_groups
        schedulers: LRSchedulersContainer = self.states[LR_SCHEDULER]
        for scheduler in schedulers.schedulers:
            if changed or len(scheduler.base_lrs) != len(groups):
                scheduler.base_lrs = [values["lr"]] * len(groups)
            for group, base, factor in zip(
                scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
            ):
                group["lr"] = base * factor(scheduler.last_epoch)
            scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
