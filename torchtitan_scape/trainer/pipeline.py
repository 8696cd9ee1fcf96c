"""Pipeline parallelism: TorchTitan's stages and schedules, with the gradients of a run without stages."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.titan.distributed import ParallelDims
from torchtitan_scape.titan.pipelining import LossFunction, pipeline_llm


class LossPerToken:
    """A loss that is summed over tokens, divided by `tokens`.

    A schedule computes the loss and its gradient, and TorchTitan 0.2.2 divides only the logged loss by the global
    number of tokens. The trainer therefore sets `tokens` for each step. It is 1 in a validation, which divides itself.
    """

    def __init__(self, summed: LossFunction) -> None:
        self._summed = summed
        self.tokens: Tensor | float = 1.0

    def __call__(self, predictions: Tensor, labels: Tensor) -> Tensor:
        return self._summed(predictions, labels) / self.tokens


def build_pipeline(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig, device: torch.device, *others: Any
) -> tuple[Any, list[nn.Module], bool, bool]:
    """Build this rank's stage and its schedule for TorchTitan's TrainSpec. The configuration was checked before.

    TorchTitan seeds every stage differently, and initializes the stage next. On a CPU each rank draws the whole model
    (see `models.initial`), so all stages must draw the same one. On GPUs a stage draws its own parameters in place.
    """
    built: tuple[Any, list[nn.Module], bool, bool] = pipeline_llm(model, parallel_dims, job_config, device, *others)
    if device.type == "cpu" and job_config.comm.mode != "fake_backend":
        state = torch.get_rng_state()
        dist.broadcast(state, group=parallel_dims.get_mesh("pp").get_group(), group_src=0)
        torch.set_rng_state(state)
    return built


def from_last_stage(parallel_dims: ParallelDims, values: list[float], device: torch.device) -> list[float]:
    """Return the values of the rank of the last stage, which has the loss. Collective over the stages."""
    mesh = parallel_dims.get_optional_mesh("pp")
    if mesh is None:
        return values
    sent = torch.tensor(values, dtype=torch.float64, device=device)
    dist.broadcast(sent, group=mesh.get_group(), group_src=mesh.size() - 1)
    found: list[float] = sent.tolist()
    return found
