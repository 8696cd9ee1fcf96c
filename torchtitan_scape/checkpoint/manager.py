"""TorchTitan's checkpoint manager, for state that differs from replica to replica."""

from torchtitan.components.checkpoint import AsyncMode, CheckpointManager


class ReplicaCheckpointer(CheckpointManager):
    """The manager that the trainer gets in the place of TorchTitan's."""

    def save_to_resume(self, step: int) -> None:
        """Writes the full state of `step` now, synchronously, unless it is written already. A collective call."""
        if not self.enable or self.load_only:
            return
        self._async_wait()
        self.dcp_save(
            self._flattened_model_states_sd(),
            checkpoint_id=self._create_checkpoint_id(step),
            async_mode=AsyncMode.DISABLED,
        )
