"""Checkpoints of titan_trainer.py: TorchTitan 0.3.0's manager, with the state of every replica.

TorchTitan names the state by parameter, so that DCP would keep the state of one replica, and none of the method. The
entries of `checkpoint_states` have a row for each replica instead. A run resumes exactly with the same layout, and
other numbers of replicas or shards and other methods can load the checkpoint.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import LR_SCHEDULER, MODEL, OPTIMIZER
from torchtitan.tools.logging import logger

from torchtitan_scape import ReplicaOptimizer, checkpoint_states, load_checkpoint


class ReplicaCheckpoints(CheckpointManager):
    """Saves the weights that all replicas share, and the state of every replica."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def _parts(self, state_dict: dict[str, Any]) -> tuple[Any, ReplicaOptimizer, dict[str, Any]]:
        """Return the model, its optimizer, and the other states."""
        others = {key: state_dict[key] for key in self.states if key in state_dict and key != OPTIMIZER}
        return self.states[MODEL].model[0], self.states[OPTIMIZER].optimizers[0], others

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not (last_step and self.last_save_model_only):
            return super()._save(curr_step, last_step)
        with self.states[OPTIMIZER].optimizers[0].shared_weights():
            return super()._save(curr_step, last_step)

    def dcp_save(self, state_dict: dict[str, Any], *args: Any, **options: Any) -> Any:
        if OPTIMIZER in state_dict:  # not the last checkpoint, of the model alone
            model, optimizer, others = self._parts(state_dict)
            state_dict = checkpoint_states(model, optimizer) | others
        return super().dcp_save(state_dict, *args, **options)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, **options: Any) -> None:
        if OPTIMIZER not in state_dict:
            return super().dcp_load(state_dict, checkpoint_id, **options)
        model, optimizer, others = self._parts(state_dict)
        logger.info(load_checkpoint(checkpoint_id, model, optimizer))
        dcp.load(others, checkpoint_id=checkpoint_id)
        (scheduler,) = self.states[LR_SCHEDULER]
        for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate  # some methods do not load it
