"""Metrics of a SCAPE step for the log."""

import torch
from torch import Tensor

from torchtitan_scape.core.tensors import sum_of_squares
from torchtitan_scape.kernels.scape import reference
from torchtitan_scape.methods.scape.components import ScapeComponents


def metrics(scape: ScapeComponents, local: bool) -> dict[str, float]:
    """Return the metrics of the last step, see `ScapeMethod.metrics`. Collective unless `local`."""
    masks, passes, layout = scape.masks, scape.passes, scape.masks.layout
    in_use, previous = masks.moment_masks(scape.last_applied)
    sums = torch.zeros(4, dtype=torch.float64, device=scape.applied_steps.device)
    kept = passes.kept("state")
    for i, size in enumerate(layout.sizes):
        if not scape.shard_of(i).counted:
            continue
        used, before = (_unpacked(layout.bits(mask, i), size, sums.device) for mask in (in_use, previous))
        residual = kept[i].to(sums.device).masked_fill(used, 0.0)
        sums += torch.stack(
            [
                torch.tensor(float(size), dtype=torch.float64, device=sums.device),
                used.sum().double(),
                (used & before).sum().double(),
                sum_of_squares(residual),
            ]
        )
    entries, nnz, common, squares = scape.mean_over_replicas(sums, local).tolist()
    return {
        "density": nnz / entries if entries else 1.0,
        "nnz": nnz,
        "mask_overlap": common / nnz if nnz else 1.0,
        "residual_norm": squares**0.5,
    }


def _unpacked(bits: Tensor | None, count: int, device: torch.device) -> Tensor:
    if bits is None:
        return torch.ones(count, dtype=torch.bool, device=device)
    return reference.unpack_bits(bits, count)
