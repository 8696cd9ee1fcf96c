"""What a SCAPE run saves of its state, and how it is taken back."""

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels.scape.gather_passes import GatherPasses
from torchtitan_scape.sync.shards import Shard, local, stored

if TYPE_CHECKING:
    from torchtitan_scape.sync.scape.optimizer import Scape

# What states were saved with that do not say.
_OLDER = {"form": "local", "values_dtype": "float32", "weights_dtype": "float32"}


def describe(shards: Sequence[Shard], sparsified: int) -> dict[str, Any]:
    """The model as state is laid out over it, for comparison."""
    listed = [(s.name, s.size, s.columns, s.group) for s in shards]
    return {"parameters": zlib.crc32(repr(listed).encode()), "sparsified": sparsified}


def saved_state(scape: "Scape") -> dict[str, Any]:
    """Of this replica, behind `settle`: what steps to come depend on, the parameters left out."""
    passes, masks, guard = scape.passes, scape.masks, scape.guard
    passes.finish()
    state = {
        "fingerprint": {**scape.fingerprint, "replica": scape.collectives.replica},
        "moment_residual": passes.state,
        "rounding_errors": passes.errors_by_tensor(),
        "visit_rates": passes.visits.rates if passes.visits else torch.zeros(0),
        "in_use": masks.in_use.bits,
        "in_use_density": masks.in_use.density,
        "previous": masks.previous.bits,
        "previous_density": masks.previous.density,
        "applied_steps": scape.applied_steps,
        "attempted_steps": scape.attempted_steps,
        "skipped": guard.skipped,
        "skipped_in_a_row": guard.skipped_in_a_row,
    }
    if passes.masters:
        state["master"] = passes.master
    if isinstance(passes, GatherPasses):
        state["common"] = passes.common
        if scape.narrow:
            # A checkpoint's FP32 values are scaled: divided again they would be rounded twice.
            state |= {"scales": passes.scales, "weights": _weights(scape.ordered)}
    return state


def checked(scape: "Scape", state_dict: dict[str, Any]) -> dict[str, Any]:
    """The part of `state_dict` that `saved_state` made. Raises ValueError where it is another run's."""
    if "scape" not in state_dict:
        raise ValueError(
            "the state has no 'scape' entry; save what Scape.state_dict() returns, each rank its own (helpers that "
            "gather optimizer state by parameter drop the residuals and masks)"
        )
    saved: dict[str, Any] = state_dict["scape"]
    mine = {**scape.fingerprint, "replica": scape.collectives.replica}
    theirs = _OLDER | saved["fingerprint"]
    for key, value in mine.items():
        if theirs.get(key) != value:
            raise ValueError(
                f"the saved state has {key}={theirs.get(key)!r}, this run has {value!r}; "
                "SCAPE resumes on the same layout and options only"
            )
    if "visit_rates" not in saved:
        raise ValueError("the saved state has no visit_rates: it is of an older version, which cannot be resumed")
    return saved


def restore(scape: "Scape", saved: dict[str, Any]) -> None:
    """Takes back what `checked` returned."""
    passes, masks, guard = scape.passes, scape.masks, scape.guard
    passes.finish()
    passes.state.copy_(saved["moment_residual"])
    passes.put_errors(saved["rounding_errors"])
    if passes.visits:
        passes.visits.rates.copy_(saved["visit_rates"])
    if passes.masters:
        passes.master.copy_(saved["master"])
    if isinstance(passes, GatherPasses):
        passes.common.copy_(saved["common"])
        if scape.narrow:
            passes.load_scales(saved["scales"])
            sizes = [shard.size for shard in scape.ordered]
            for shard, weight in zip(scape.ordered, saved["weights"].split(sizes), strict=True):
                stored(shard.parameter).copy_(weight.view(local(shard.parameter).shape))
    for mask, key in ((masks.in_use, "in_use"), (masks.previous, "previous")):
        mask.bits.copy_(saved[key])
        mask.density = saved[f"{key}_density"]
    scape.applied_steps.copy_(saved["applied_steps"])
    scape.attempted_steps = saved["attempted_steps"]
    guard.skipped, guard.skipped_in_a_row = saved["skipped"], saved["skipped_in_a_row"]


def _weights(shards: Sequence[Shard]) -> Tensor:
    """What BF16 keeps of this rank's parameters, one behind the other."""
    return torch.cat([stored(shard.parameter).view(-1) for shard in shards])
