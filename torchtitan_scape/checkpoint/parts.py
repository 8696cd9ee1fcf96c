"""The random state in a checkpoint, and the line about its size."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan_scape.checkpoint.state import RESIDUALS, sizes
from torchtitan_scape.core.text import size_text
from torchtitan_scape.replica.optimizer import ReplicaOptimizer

RANDOM = "random"  # name of the random state in a checkpoint


class RandomState(Stateful):
    """The states of every rank's random number generators. `restore` applies the loaded states."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._name = device, f"rank{dist.get_rank()}"
        self._loaded: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Tensor]:
        found = {f"{self._name}.cpu": torch.get_rng_state()}
        if self._device.type != "cpu":
            module = torch.get_device_module(self._device)
            found[f"{self._name}.device"] = module.get_rng_state(self._device)
        return found

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        self._loaded = dict(state_dict)

    def restore(self) -> None:
        """Apply the loaded states, before the first forward pass: data loaders draw a number when they begin."""
        loaded, self._loaded = self._loaded, {}
        if loaded:
            torch.set_rng_state(loaded[f"{self._name}.cpu"])
        if loaded and self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(loaded[f"{self._name}.device"], self._device)


def sizes_line(optimizers: ReplicaOptimizer, residual: str) -> str | None:
    """Return the size of a checkpoint, and its size with other values of `residual`, as one line for the log.

    Kinds of state below a thousandth of the parameters are not named. None if the value changes nothing. Collective.
    """
    stages, _ = optimizers.collectives.gather_from_stages(sum(shard.entries for shard in optimizers.shards()))
    model = 4 * sum(stages)
    found = {choice: {"parameters": model} | sizes(optimizers, choice) for choice in RESIDUALS}
    totals = {choice: sum(kinds.values()) for choice, kinds in found.items()}
    if len(set(totals.values())) == 1:
        return None
    large = {kind: size for kind, size in found[residual].items() if 1000 * size > model}
    return (
        f'A checkpoint takes {size_text(totals[residual])} with residual = "{residual}" '
        f"({', '.join(f'{name} {size_text(size)}' for name, size in large.items())}); it would take "
        + ", ".join(f'{size_text(totals[choice])} with "{choice}"' for choice in RESIDUALS if choice != residual)
        + f", and dense AdamW's {size_text(3 * model)}"
    )
