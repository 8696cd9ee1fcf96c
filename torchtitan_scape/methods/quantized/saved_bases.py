"""Pending gradients that were saved in the bases of `whitening`, in the model's own coordinates."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.methods.quantized.whitening import MatrixBasis


def saved_decoders(reader: Any, shards: Sequence[Shard]) -> dict[str, Callable[[Tensor], Tensor]] | None:
    """Read the bases of a checkpoint. Collective.

    Args:
        reader: A `methods.imported.CheckpointReader`.
        shards: All parameters of this rank.

    Returns:
        By parameter, a function of pending gradients (n,), FP32, that returns them without the basis. Parameters
        without a basis are missing. None if the bases are those of other shards.
    """
    rank = str(reader.model_rank)
    saved = reader.shapes_by_shard("basis.")
    with_a_basis = {name.removeprefix("basis.").rsplit(".", 2)[0] for name in saved}
    bases: dict[str, MatrixBasis] = {}
    wanted: dict[str, Tensor] = {}
    readable = reader.saved.get("shard") == reader.model_ranks
    for shard in (shard for shard in shards if shard.name in with_a_basis and len(shard.local_shape) == 2):
        basis = bases[shard.name] = MatrixBasis.of(
            (shard.local_shape[0], shard.local_shape[1]), torch.device("cpu"), owned=False
        )
        for name, size, side in zip(("left", "right"), basis.shape, (basis.left, basis.right), strict=True):
            if side.whitened:
                key = f"basis.{shard.name}.{name}.backward"
                shape = saved.get(key, {}).get(rank, (0, 0))  # (size, size) before bases had blocks
                readable = readable and shape[-2] == shape[-1] and math.prod(shape) == size * shape[-1] > 0
                wanted[f"{key}.{rank}"] = side.backward = torch.empty(shape, dtype=torch.float32, device="cpu")
    if not reader.all_agree(readable):
        return None
    reader.fill(wanted)
    return {name: partial(_decode, basis) for name, basis in bases.items()}


def _decode(basis: MatrixBasis, values: Tensor) -> Tensor:
    for side in (basis.left, basis.right):
        assert side.backward is not None
        side.backward = side.backward.to(values.device)
    return basis.decode(values).reshape(-1)
