"""The synchronized gradient of the current step by parameter, for an observer."""

import torch
from torch import Tensor

from torchtitan_scape.core.observer import Observer
from torchtitan_scape.kernels.scape import reference, reference_owner
from torchtitan_scape.kernels.scape.passes import ScapePasses
from torchtitan_scape.kernels.scape.step import PayloadChunk
from torchtitan_scape.kernels.scape.updaters import ShardedUpdate
from torchtitan_scape.methods.scape.components import ScapeComponents
from torchtitan_scape.methods.scape.exchange import source_of


class GradientRecorder:
    """Collects the synchronized gradient gh of the observed parameters: on mask A, NaN outside it."""

    def __init__(self, scape: ScapeComponents, observer: Observer) -> None:
        self._scape, self._observer = scape, observer
        self._found: dict[str, Tensor] = {}

    def add(self, chunk: PayloadChunk) -> None:
        """Collect the gradients of a chunk. Call it after the mean was received, before the norm is computed."""
        scape, updater = self._scape, self._scape.passes.updater
        for tensor in range(chunk.first, chunk.end):
            number, start, end = updater.slices[tensor]
            shard = scape.ordered[number]
            if shard.name not in self._observer.names:
                continue
            # Zeros in the slices of other owners, because `_assembled` sums the bits over replicas.
            zeros = torch.zeros(shard.size, dtype=torch.float32, device=shard.device)
            found = self._found.setdefault(shard.name, zeros)
            if not isinstance(updater, ShardedUpdate) or updater.owns(tensor):
                found[start:end] = gradient_on_mask(scape.passes, tensor)

    def finish(self) -> None:
        """Pass the gradients to the observer after the last chunk. Collective."""
        self._observer.synchronized(self._assembled, self._scape.passes.step.applied)
        self._found = {}

    def _assembled(self, name: str) -> Tensor:
        found = self._found[name]
        if isinstance(self._scape.passes.updater, ShardedUpdate):
            self._scape.collectives.sum_over_replicas(found.view(torch.int32))
        return found


def gradient_on_mask(passes: ScapePasses, tensor: int) -> Tensor:
    """Return gh = (b - b1 q) / (1 - b1) of a tensor, FP32 (n,), NaN outside mask A.

    b is the received mean, q the previous first moment on A, b1 is beta1 (SCAPE paper, Algorithm 1).
    """
    step, sparse, beta1 = passes.step, tensor < passes.sparsified, passes.step.rates[tensor].beta1
    used, held = (passes.layout.bits(mask, tensor) if sparse else None for mask in (step.in_use, step.previous))
    size, count = passes.sizes[tensor], passes.counts[tensor]
    indices = None if used is None else reference.mask_indices(used, size, count)
    payload = _payload(passes, tensor)
    if isinstance(passes.updater, ShardedUpdate):
        common = passes.updater.share_of(passes.updater.common, tensor)
        _, released = reference_owner.last_moment(common, indices, held)
        reference_owner.synchronized_gradient_(payload, released, beta1)
    else:
        if passes.compact:
            start = passes.payload_layout.positions[tensor]
            last = passes.moment_on_mask[start : start + count]
        else:
            state = passes.kept("state")[tensor].to(payload.device)
            last = state if indices is None else state.index_select(0, indices)
        reference.synchronized_gradient_(payload, last, beta1)
    if indices is None:
        return payload
    return torch.full((size,), torch.nan, dtype=torch.float32, device=payload.device).scatter_(0, indices, payload)


def _payload(passes: ScapePasses, tensor: int) -> Tensor:
    """Return a copy of the received mean on mask A, FP32 (entries of A,)."""
    count = passes.counts[tensor]
    if passes.compact:
        return passes.payload[passes.payload_layout.positions[tensor] :][:count].clone()
    chunk = torch.empty(count, dtype=torch.float32, device=passes.device)
    if count:
        source_of(passes).fill(chunk, sum(passes.counts[:tensor]))
    return chunk
