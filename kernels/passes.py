"""The passes of an optimizer step over all tensors of a model: what PyTorch and Triton both provide.

A step binds its tensors, then calls `pack`, has the payload averaged, asks for `squares`, and calls `update`. The
payload lies in a buffer of its own at the target density; while the mask is denser it lies in the gradients' own
storage (`compact` tells), so that nothing of the model's size is ever allocated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.blocks import BlockLayout, Mask


@dataclass(frozen=True)
class Rates:
    """One tensor's hyper-parameters in a step.

    scale: factor on the gradient, the number of replicas where these are summed.
    counted: whether the tensor counts in the norm over the model.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    scale: float = 1.0
    counted: bool = True


class ScapePasses:
    """State, payload and passes of SCAPE on this rank's shards; sparsified tensors first, then those sent whole.

    Args:
        layout: the sparsified tensors in blocks.
        whole_sizes: entries of the others.
        selection: "block" or "tensor".
        density: the target density, for which there is a payload buffer.
        replica: whose run to select in; None selects in all of them (a dry run, where nobody else does).
    """

    def __init__(
        self,
        layout: BlockLayout,
        whole_sizes: Sequence[int],
        selection: str,
        density: float,
        replica: int | None,
        device: torch.device,
    ) -> None:
        self.layout, self.selection, self.device = layout, selection, device
        self.sparsified = len(layout.sizes)
        self.sizes = (*layout.sizes, *whole_sizes)
        self.first_run, self.runs = (0, layout.replicas) if replica is None else (replica, 1)
        # Padded to blocks, or to 16 bytes, so that every tensor's state is aligned.
        padded = [blocks * layout.block_size for blocks in layout.blocks] + [-(-n // 4) * 4 for n in whole_sizes]
        self.state = torch.zeros(sum(padded), dtype=torch.float32, device=device)
        self.states = [s[:n] for s, n in zip(self.state.split(padded), self.sizes, strict=True)]
        entries = self.payload_entries(density) if density < 1.0 else 0
        self.payload, self.last = (torch.zeros(entries, dtype=torch.float32, device=device) for _ in range(2))
        self.compact = False
        self.release()

    def release(self) -> None:
        """Lets go of the step's tensors: a gradient that was kept would be there twice in the next backward pass."""
        self.parameters: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def payload_counts(self, density: float) -> list[int]:
        """Entries of each tensor in the payload at this density."""
        sparse = [self.layout.nnz(i, density, self.selection) for i in range(self.sparsified)]
        return [*sparse, *self.sizes[self.sparsified :]]

    def payload_entries(self, density: float) -> int:
        return sum(self.payload_counts(density))

    def bind(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        rates: list[Rates],
        in_use: Mask,
        previous: Mask,
    ) -> None:
        """The tensors of the step that follows, in the order of `sizes`; `update` lets go of them.

        parameters: local shards, any floating-point dtype; written by `update`.
        gradients: flat and contiguous; their storage is scratch space from here on.
        in_use, previous: A and P.
        """
        self.parameters, self.gradients, self.rates = parameters, gradients, rates
        self.in_use, self.previous = in_use, previous
        self.counts = self.payload_counts(in_use.density)
        self.compact = 0 < self.payload.numel() == sum(self.counts)

    def pack(self, applied: Tensor, next_density: float) -> Tensor | None:
        """mt into payload and residual; and this rank's part of the next mask.

        Args:
            applied: bool (); false leaves the state as it is, and payload and selection undefined.
            next_density: of the mask to select.

        Returns uint8 for the wire, one stretch of `layout.wire_bytes` a run; None where there is nothing to tell.
        """
        raise NotImplementedError

    def pieces(self) -> Any:
        """The payload where it is not compact, for an all-reduce in chunks."""
        raise NotImplementedError

    def squares(self) -> Tensor:
        """FP32 (): sum of squares of the synchronised gradient, from the averaged payload. Call it once a step."""
        raise NotImplementedError

    def update(self, clip: Tensor, clip_moment: bool, steps: Tensor, max_wait: float | None, applied: Tensor) -> None:
        """The AdamS step on A and weight decay everywhere, after `squares`.

        Args:
            clip: FP32 (), factor on the synchronised gradient.
            steps: float64 (), applied steps, this one included.
            max_wait: upper clamp of the waiting time; None for no scaling.
        """
        raise NotImplementedError

    def rotate(
        self, received: Tensor | None, density: float, in_use: Tensor, previous: Tensor, applied: Tensor
    ) -> None:
        """previous = in_use, in_use = the mask that the runs' `received` selections make; unless not `applied`.

        received: uint8, `layout.wire_bytes(density)` of every replica; None for a mask of all ones.
        """
        raise NotImplementedError
