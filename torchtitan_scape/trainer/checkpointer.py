"""TorchTitan's checkpoint manager for runs that are left alone: nothing damaged is loaded, nothing good is deleted.

A checkpoint is whole once its manifest is there, which is written last (see `storage`). Optimizer state that another
layout or method has saved is taken by the rule in `optimizer.loading`.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.torch_version import TorchVersion

from torchtitan_scape.checkpoint.failures import failure_text
from torchtitan_scape.checkpoint.folder import as_rank_0_sees, first_damage, names_in, read_record, steps_in
from torchtitan_scape.checkpoint.loading import load
from torchtitan_scape.checkpoint.metadata import RUN_METADATA, RunMetadata
from torchtitan_scape.checkpoint.parts import RANDOM, RESIDUALS, RandomState, sizes_line
from torchtitan_scape.checkpoint.reader import (
    GlobalLayout,
    ModelCheckpoint,
    OptimizerCheckpoint,
    StateReader,
    load_into,
)
from torchtitan_scape.checkpoint.slices import SlicePlanner
from torchtitan_scape.checkpoint.state import load_counters, sizes
from torchtitan_scape.checkpoint.storage import CheckedWriter, is_complete, is_finished, remove
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

logger = logging.getLogger(__name__)

_STAGES_ONCE = TorchVersion(torch.__version__) < (2, 13)  # its stager clears what it needs for another save
_AXES = ("ranks", "replicate", "shard", "context", "tensor", "simulate_replicas")


class ReplicaCheckpointer(CheckpointManager):
    """The manager that the trainer gets in the place of TorchTitan's; `attach` completes it."""

    record: RunMetadata
    folder: str
    stager: Any
    _frame: GlobalLayout
    # The step of the checkpoint with the lowest validation loss, which is never deleted.
    spared: Callable[[], int | None] = staticmethod(lambda: None)
    _fallback: bool
    _optimizers: ReplicaOptimizer
    _being_written = ""
    # Steps whose folders are damaged, or newer than the one that was asked for: no reason to delete older ones.
    _not_counted: set[int]
    _saving_group: dist.ProcessGroup | None

    def attach(self, record: RunMetadata, frame: GlobalLayout, fallback: bool, device: torch.device) -> None:
        """Adds what TorchTitan's constructor does not hand on.

        fallback: of several checkpoints, take the newest that is whole, where newer ones are damaged.
        """
        self.record, self._frame, self._fallback, self._not_counted = record, frame, fallback, set()
        self._optimizers = self.states[OPTIMIZER].replica
        self.states[RUN_METADATA], self.states[RANDOM] = record, RandomState(device)
        # On GPUs the default group's timeout is for steps: a rank may write for longer than that.
        self._saving_group = None if device.type == "cpu" else dist.new_group(backend="gloo")
        self.states[OPTIMIZER] = OptimizerCheckpoint(self._optimizers, frame, record.values["residual"])
        self.states[MODEL] = ModelCheckpoint(self.states[MODEL], self._optimizers, frame)
        if len({sum(sizes(self._optimizers, choice).values()) for choice in RESIDUALS}) > 1:
            logger.info(sizes_line(self._optimizers, record.values["residual"]))

    # ------------------------------------------------------------------------------------------- saving

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """As TorchTitan's. Raises ValueError, on every rank, where it cannot be written; older ones stay whole."""
        if not self._should_save(curr_step, last_step):
            return
        if self._earlier_failed() and not last_step:
            self.save_to_resume(curr_step)  # now, and for sure
        else:
            self._guarded(lambda: CheckpointManager.save(self, curr_step, last_step))
        if last_step:
            self._purge_stale_checkpoints()

    def save_to_resume(self, step: int) -> None:
        """Writes the full state of `step` now, synchronously, unless it is written already. A collective call."""
        if not self.enable or self.load_only:
            return
        path = self._create_checkpoint_id(step)
        self._earlier_failed()
        if as_rank_0_sees(
            lambda: step not in self._not_counted and is_complete(path) and RUN_METADATA in names_in(path)
        ):
            return
        state = self._flattened_model_states_sd()
        self._guarded(lambda: self.dcp_save(state, checkpoint_id=path, async_mode=AsyncMode.DISABLED))
        logger.info(f"Saved {path}")

    def restore_random(self) -> None:
        """To be called before the first forward pass."""
        self.states[RANDOM].restore()

    def _earlier_failed(self) -> bool:
        """Waits for the save that is being written beside training; whether it failed, which is said."""
        try:
            self._guarded(self._async_wait)
        except ValueError as error:
            logger.error(f"{error}; a later step is saved instead")
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
        """As TorchTitan's, with checksums and a manifest."""
        self._being_written = checkpoint_id
        self._not_counted.discard(int(checkpoint_id.rpartition("-")[2]))
        writer = CheckedWriter(checkpoint_id)
        options: dict[str, Any] = {"storage_writer": writer, "checkpoint_id": checkpoint_id, "planner": SlicePlanner()}
        if async_mode == AsyncMode.DISABLED:
            return dcp.save(state_dict, process_group=self._saving_group, **options)
        options["process_group"] = self.pg
        if self.stager is not None and _STAGES_ONCE:
            self.stager.close()
            self.stager = None
        if self.stager is None:
            pinned = async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM
            self.stager = DefaultStager(StagingOptions(pinned, pinned, pinned, pinned))
        options["async_stager"] = self.stager
        if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
        return dcp.async_save(state_dict, **options)

    def _guarded(self, write: Callable[[], Any]) -> None:
        """Runs a save. A disk that does not take it leaves nothing behind, and one message on every rank.

        Other errors, such as a lost peer, pass: what was written of it has no manifest, and no start will use it.
        """
        try:
            write()
        except (OSError, CheckpointException) as error:
            causes = (
                [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
            )
            if not any(isinstance(cause, OSError) for cause in causes):
                raise
            path, self.save_future = self._being_written, None
            text = failure_text(error, path)
            if dist.get_rank() == 0 and not is_complete(path):
                with suppress(OSError):
                    remove(path)
            good = self._whole_steps()
            kept = f"the last good checkpoint is step-{good[-1]}" if good else "there is no other checkpoint"
            raise ValueError(f"{text}; {kept}") from error

    def close(self) -> None:
        """Waits for a save that is still being written, so that it is told if it failed."""
        if (
            getattr(self, "enable", False)
            and getattr(self, "save_future", None) is not None
            and hasattr(self, "record")
        ):
            self._guarded(self._async_wait)
        super().close()

    def _whole_steps(self) -> list[int]:
        """Steps of the whole checkpoints in the folder, ascending, but those that do not count."""
        steps = (step for step in steps_in(self.folder) if step not in self._not_counted)
        return [step for step in steps if is_complete(self._create_checkpoint_id(step))]

    def saves_at(self, step: int, last_step: bool = False) -> bool:
        """Whether `save` would write this step."""
        return self._should_save(step, last_step)

    def newest_step(self) -> int:
        """The newest whole checkpoint's step; -1 for none, and where checkpoints are off."""
        return self._find_load_step() if self.enable else -1

    def _find_load_step(self, folder: str = "") -> int:
        """The newest whole checkpoint's step; -1 for none."""
        return super()._find_load_step(folder) if folder else (self._whole_steps() or [-1])[-1]

    def _purge_stale_checkpoints(self) -> None:
        """Deletes what is older than the newest `keep_latest_k` whole checkpoints, and is not the best."""
        if self.keep_latest_k <= 0 or dist.get_rank() != 0:
            return
        try:
            kept, there = self._whole_steps()[-self.keep_latest_k :], steps_in(self.folder)
        except OSError as error:  # of a network file system, say: the save itself went well
            logger.warning(f"no older checkpoint is deleted: {self.folder} cannot be listed ({error.strerror})")
            return
        spared = self.spared()
        for step in there if len(kept) == self.keep_latest_k else ():
            path = self._create_checkpoint_id(step)
            if step < kept[0] and step != spared and path != self._being_written:
                self.purge_queue.put(path)

    # ------------------------------------------------------------------------------------------ loading

    def load(self, step: int = -1) -> bool:
        """Loads the newest whole checkpoint, or that of `step`, or `initial_load_path`. A collective call.

        Raises ValueError where there is none to be had that was asked for, with the reason.
        """
        if not self.enable:
            return False
        path = self._choose(step)
        if path is None:
            return self._load_initial()
        if path == self._create_checkpoint_id(0):  # a seed, with which another run has begun
            self._load_model(path)
        else:
            self._load_run(path)
        return True

    def _choose(self, step: int) -> str | None:
        """The folder to resume from, verified; None for none."""
        there: list[int] = as_rank_0_sees(lambda: steps_in(self.folder))
        steps: list[int] = as_rank_0_sees(lambda: [s for s in there if is_finished(self._create_checkpoint_id(s))])
        if step != -1:
            return self._named(step, steps)
        for unfinished in (s for s in there if s not in steps and s > max(steps, default=-1)):
            logger.warning(
                f"{self._create_checkpoint_id(unfinished)} has no manifest: it was not written to its end, and is "
                "not used"
            )
        for candidate in reversed(steps):
            path = self._create_checkpoint_id(candidate)
            if (damage := first_damage(path)) is None:
                return path
            if not self._fallback:
                raise ValueError(
                    f"{path} is damaged: {damage}; delete it, or set checkpoint.fallback = true to take the newest "
                    "whole one before it"
                )
            logger.warning(f"{path} is damaged: {damage}; an older checkpoint is taken")
            self._not_counted.add(candidate)
        if steps:
            raise ValueError(f"all checkpoints in {self.folder} are damaged; start in another --job.dump_folder")
        return None

    def _named(self, step: int, steps: list[int]) -> str:
        path = self._create_checkpoint_id(step)
        if step not in steps:
            there = f"finished are {', '.join(f'step-{s}' for s in steps)}" if steps else "there is none"
            raise ValueError(f"checkpoint.load_step = {step}, but there is no finished {path}; {there}")
        if (damage := first_damage(path)) is not None:
            raise ValueError(f"{path} is damaged: {damage}; name another with --checkpoint.load_step")
        self._not_counted |= {later for later in steps if later > step}
        return path

    def _load_initial(self) -> bool:
        """The start from `initial_load_path`, where no run is resumed."""
        path = self.initial_load_path
        if not path:
            return False
        is_folder, finished = as_rank_0_sees(lambda: (os.path.isfile(f"{path}/.metadata"), is_finished(path)))
        if not is_folder:
            raise ValueError(f"checkpoint.initial_load_path = {path!r} is no checkpoint folder")
        if not finished:
            logger.warning(f"{path} has no manifest: whether it is whole cannot be told")
        elif (damage := first_damage(path)) is not None:
            raise ValueError(f"checkpoint.initial_load_path = {path!r} is damaged: {damage}")
        if not self.initial_load_model_only:
            self._load_run(path)
            return True
        self._load_model(path)
        return True

    def _load_model(self, path: str) -> None:
        logger.info(f"Loading the model alone from {path}")
        model = self.states[MODEL].room()
        load_into(path, model)
        self.states[MODEL].load_state_dict(model)

    def _load_run(self, path: str) -> None:
        """Everything that a run needs to go on."""
        begin = time.monotonic()
        names = names_in(path)
        if not {OPTIMIZER, RUN_METADATA} & set(names):  # without moments, and nothing kept, there is a record alone
            raise ValueError(
                f"{path} holds the model alone, so training cannot go on from it; name an earlier step with "
                "--checkpoint.load_step, or start a new run in another --job.dump_folder. (A run whose last checkpoint "
                "shall be resumed from needs checkpoint.last_save_model_only = false)"
            )
        if RUN_METADATA not in names:
            raise ValueError(
                f"{path} was not saved by this version of this project; start from its model with "
                "checkpoint.initial_load_path"
            )
        saved = read_record(path)
        same_layout, different = self.record.compare(saved, path)
        excluded = set(self.exclude_from_loading)
        states = {
            k: v
            for k, v in self._states_to_load(False).items()
            if k not in (RUN_METADATA, RANDOM, DATALOADER, OPTIMIZER)
        }
        random = {f"{RANDOM}.{key}" for key in self.states[RANDOM].state_dict()}
        if RANDOM not in excluded and not different.keys() & set(_AXES) and random <= names:
            states[RANDOM] = self.states[RANDOM]
        if MODEL not in excluded:
            states |= self.states[MODEL].room()
        load_into(path, states)
        if MODEL not in excluded:
            self.states[MODEL].load_state_dict(states)
        messages = []
        if OPTIMIZER not in excluded:
            reader = StateReader(path, saved, self._optimizers, self._frame)
            messages.append(load(self._optimizers, reader, same_layout, self.states["train_state"].step))
            if same_layout and MODEL not in excluded:
                reader.fill_weights()
            elif self._optimizers.levels is not None:
                self._optimizers.levels.masters_loaded()  # parameters of another method's own have gone into masters
        if DATALOADER not in excluded:
            messages += self._load_data(path, saved)
        load_counters(self._optimizers, saved["counters"])
        self._keep_configured_rates(different.keys() & {"lr", "betas", "eps", "weight_decay"})
        listed = ", ".join(f"{key} {change}" for key, change in different.items() if key != "ranks")
        changes = f"; differs from the run that saved: {listed}" if listed else ""
        what = "; ".join(messages) or "without its optimizer"
        logger.info(f"Resumed from {path} in {time.monotonic() - begin:.2f} s: {what}{changes}")

    def _load_data(self, path: str, saved: dict[str, Any]) -> list[str]:
        """The position in the data; returns what there is to say of it."""
        loader: Any = self.states[DATALOADER]
        if loader is None:
            return []
        readers, mine = (values["replicas"] * values["shard"] for values in (saved, self.record.values))
        old: dict[str, Any] = loader.saved_state(readers)
        if not {f"{DATALOADER}.{key}" for key in old} <= names_in(path):
            raise ValueError(
                f"{path} has no position in data of this run's kind (prepared, or text); give it the data of the run "
                "that saved, or begin with the new ones with --checkpoint.exclude_from_loading=dataloader"
            )
        if readers == mine:
            load_into(path, {DATALOADER: loader})
            return []
        load_into(path, {DATALOADER: old})
        trainer: Any = self.states["train_state"]
        trainer.ntokens_seen = trainer.ntokens_seen * readers // mine  # every rank counts its own tokens
        return [loader.load_old([old])]

    def _keep_configured_rates(self, changed: set[str]) -> None:
        """Rates of this run's configuration, where they differ from the saved ones, which loading has brought back."""
        values = self.record.values
        for group in self._optimizers.inner.param_groups:
            for key in (changed - {"lr"}) & group.keys():
                group[key] = tuple(values[key]) if key == "betas" else values[key]
            for key in group.keys() & {"fused", "foreach"}:  # AdamW's implementation is this run's, too
                group[key] = self._optimizers.inner.defaults[key]
        schedulers: LRSchedulersContainer = self.states[LR_SCHEDULER]
        for scheduler in schedulers.schedulers:
            if "lr" in changed:
                scheduler.base_lrs = [values["lr"]] * len(scheduler.base_lrs)
            # The optimizer's rate follows from the schedule's position.
            for group, base, factor in zip(
                scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
            ):
                group["lr"] = base * factor(scheduler.last_epoch)
            scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
