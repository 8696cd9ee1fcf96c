"""Components of SCAPE on one replica: passes, exchange, masks, and the order of the shards."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_scape.core.bf16_weights import hold_in_bfloat16
from torchtitan_scape.core.parameters import Shard, StoredTensors, local, split
from torchtitan_scape.kernels.backends import choose_backend
from torchtitan_scape.kernels.common.launching import LatestResult
from torchtitan_scape.kernels.common.rates import Rates
from torchtitan_scape.methods.interface import Method, MethodContext
from torchtitan_scape.methods.scape.checks import (
    backend_for,
    check_one_device,
    check_weights,
    warn_of_density,
)
from torchtitan_scape.methods.scape.masks import DelayedMasks
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.methods.scape.passes import build_passes


class ScapeComponents(Method):
    """The objects that SCAPE's step, state and reports use.

    Attributes:
        ordered: The shards in the order of the state and of the payload, sparsified ones first.
        stored_tensors: Returns the parameters' stored tensors, in the order of `ordered`.
        attempted_steps: Number of attempted steps of the run.
        applied_steps: Number of applied steps, float64 (), on the device.
    """

    gradient_dtype = None
    holds_optimizer_state = True
    options: ScapeOptions

    def __init__(self, context: MethodContext, options: ScapeOptions) -> None:
        super().__init__(context, options)
        shards, replicas = list(context.shards), context.collectives
        check_one_device(shards)
        check_weights(shards, options.weights_dtype)
        self.bf16_weights = options.weights_dtype == "bfloat16"
        sparse, dense = split(shards, options.dense_names)
        self.ordered = sparse + dense
        numbers = {id(shard): number for number, shard in enumerate(shards)}
        self._order = [numbers[id(shard)] for shard in self.ordered]
        logs = replicas.is_writer and (not dist.is_initialized() or dist.get_rank() == 0)
        if logs:
            warn_of_density(sparse, options)
        device = local(shards[0].parameter).device
        backend = choose_backend(context.kernels, device, {s.parameter.dtype for s in shards})
        passes_backend = backend_for(options.selection, context.kernels, backend, logs)
        self.passes, self.payload_exchange = build_passes(sparse, dense, options, replicas, device, passes_backend)
        self.stored_tensors = StoredTensors(self.ordered)
        # Most tensors of the passes share their rates: one shard for each kind of rates, and the kind of each tensor.
        shards_of_passes = [self.shard_of(i) for i in range(len(self.passes.sizes))]
        self._rate_kinds = [(shard.group, shard.counted) for shard in shards_of_passes]
        self._shards_by_kind = dict(zip(self._rate_kinds, shards_of_passes, strict=True))
        self._latest_rates = LatestResult[list[Rates]]()
        self.masks = DelayedMasks(self.passes, replicas, device)
        self.attempted_steps = 0
        self._applied: Tensor | None = None  # the flag of the last step
        self.applied_steps = torch.zeros((), dtype=torch.float64, device=device)

    @classmethod
    def prepare_model(cls, model: nn.Module, options: ScapeOptions) -> None:
        if options.weights_dtype == "bfloat16":
            hold_in_bfloat16(model, scaled=options.update == "sharded")

    @property
    def last_applied(self) -> bool:
        """Whether the last step was applied. Waits for the device."""
        return self._applied is None or bool(self._applied)

    def shard_of(self, tensor: int) -> Shard:
        """Return the shard that contains a tensor of the passes."""
        return self.ordered[self.passes.updater.slices[tensor][0]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.context.optimizer.param_groups
