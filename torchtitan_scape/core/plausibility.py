"""Check for damaged parameters and states: NaN, infinity, or values that no training produces.

A flipped exponent bit multiplies a weight by a power of two. The loss may then stay finite, near the logarithm of the
vocabulary, with zero gradients, so that neither the finite check nor the consistency check of methods with per-replica
weights finds it.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_scape.topology.collectives import ReplicaCollectives

LARGEST = 2.0**20  # absolute value that no parameter of a trained model reaches
_FACTOR = 10.0  # distance to the shared weights, relative to the tensor's largest entry


class DamagedParametersError(RuntimeError):
    """A parameter, or a state of the optimizer or the method, has values that no training produces."""

    exit_code = 3  # Exit code of the process: a restart from the last checkpoint helps.


def is_plausible(values: Tensor, shared: Tensor | None = None, largest: Tensor | float = LARGEST) -> Tensor:
    """Return bool () on the device: whether all values are finite and smaller than `largest`, also relative to
    `shared`.

    Those are the weights that all replicas share, if the replicas' weights differ. They may be on the host.
    """
    if values.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=values.device)
    plausible = _largest_magnitude(values) < largest  # false for NaN
    if shared is None:
        return plausible
    shared = shared.to(values.device).view(values.shape)
    largest_shared = _largest_magnitude(shared)
    drift = _largest_magnitude(values - shared)
    return plausible & (largest_shared < LARGEST) & (drift < torch.clamp(_FACTOR * largest_shared, min=1.0))


def _largest_magnitude(values: Tensor) -> Tensor:
    """Return the largest absolute value, FP32 (); NaN if there is one."""
    low, high = values.aminmax()
    return torch.maximum(-low, high).float()


def check_plausible(
    tensors: Iterable[tuple[str, Tensor]], collectives: ReplicaCollectives, step: int, what: str = "parameters"
) -> None:
    """Check the results of `is_plausible` of this process, with their descriptions. Collective; waits for the device.

    `what` is all of them, in the message. Raises DamagedParametersError on every rank, with ranks and parameters.
    """
    if collectives.is_fake:
        return
    names, flags = zip(*tensors, strict=True)
    plausible = torch.stack([flag.to(flags[0].device) for flag in flags])
    if not collectives.sum_over_all((~plausible).sum().float()).item():
        return
    damaged = [name for name, good in zip(names, plausible.tolist(), strict=True) if not good]
    rank = dist.get_rank() if dist.is_initialized() else 0
    raise DamagedParametersError(
        f"{what} are damaged at step {step}: {ranks_text(collectives.gather_objects((rank, damaged)))}. They are not "
        "finite, or too large for any training, although all gradients that were applied are finite: suspect the "
        "memory of that device. Start the run again from the last checkpoint"
    )


def ranks_text(of_ranks: list[tuple[int, list[str]]]) -> str:
    """Return the first tensors in (rank, names of its tensors), for a message."""
    texts = [
        f"rank {rank}, {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for rank, names in sorted(of_ranks)
        if names
    ]
    return "; ".join(texts[:4]) + (f"; and {len(texts) - 4} more ranks" if len(texts) > 4 else "")
