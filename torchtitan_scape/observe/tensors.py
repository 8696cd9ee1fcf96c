"""Selection of the observed tensors, and their assembly from shards."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from torchtitan_scape.core.parameters import Shard, is_slice, matching
from torchtitan_scape.core.workloads import layer_of

_LAYER = re.compile(r"(?<=layers\.)\d+")
_ALL = "layers.*."
# By [model] name: number of layers of the paper's model, and the tensors of its Figures 4 and 5.
PAPER: dict[str, tuple[int, tuple[str, ...]]] = {
    "gpt2": (
        24,
        (
            "layers.0.attention.wo.weight",
            "layers.10.feed_forward.w1.weight",
            "layers.2.attention.wq.weight+layers.2.attention.wk.weight+layers.2.attention.wv.weight",
        ),
    ),
    "llama3": (
        16,
        (
            "layers.0.feed_forward.w1.weight+layers.0.feed_forward.w3.weight",
            "layers.8.attention.wo.weight",
            "tok_embeddings.weight",
        ),
    ),
}


@dataclass(frozen=True)
class Observed:
    """One observed tensor: a parameter, or several parameters concatenated, with a short label."""

    label: str
    shards: tuple[Shard, ...]


def chosen(names: Sequence[str], shards: Sequence[Shard], family: str) -> list[Observed]:
    """Return the tensors that `names` select; by default those of the paper, in layers of the same relative depth.

    Each parameter that matches a pattern (with "*" as wildcard) is a separate tensor; those of patterns joined by "+"
    form one tensor. Raises ValueError if a pattern matches no parameter; the message lists the names.
    """
    tensors: dict[str, Observed] = {}
    for name in names or _of_paper(family, shards):
        matches = [_matching(pattern.strip(), shards) for pattern in name.split("+")]
        joined = tuple(shard for match in matches for shard in match)
        for one in [joined] if len(matches) > 1 else [(shard,) for shard in joined]:
            label = label_of([shard.name for shard in one])
            tensors.setdefault(label, Observed(label, one))
    return list(tensors.values())


def label_of(names: Sequence[str]) -> str:
    """Return a label such as `layers.0.feed_forward.w1+w3`: without "weight", and with the common prefix once."""
    parts = [name.removesuffix(".weight").split(".") for name in names]
    common = 0
    while len(parts) > 1 and all(len(p) > common + 1 and p[common] == parts[0][common] for p in parts):
        common += 1
    return ".".join([*parts[0][:common], "+".join(".".join(p[common:]) for p in parts)])


def _of_paper(family: str, shards: Sequence[Shard]) -> Iterator[str]:
    paper_layers, names = PAPER[family]
    layers = 1 + max(layer_of(shard.name) or 0 for shard in shards)
    for name in names:
        yield _LAYER.sub(lambda number: str(int(number[0]) * layers // paper_layers), name)


def _matching(pattern: str, shards: Sequence[Shard]) -> list[Shard]:
    found = matching(shards, pattern)
    if not found:
        raise ValueError(
            f"[observe] names: {pattern!r} matches no parameter; the parameters are "
            f"{', '.join(_name_patterns(shards))}, and * is a wildcard"
        )
    return found


def _name_patterns(shards: Sequence[Shard]) -> list[str]:
    """Return the parameter names, with those of all layers merged: `layers.{0-5}.attention.wq.weight`."""
    layers: dict[str, list[int]] = {}
    for shard in shards:
        number = layer_of(shard.name)
        layers.setdefault(_LAYER.sub("*", shard.name), []).append(-1 if number is None else number)
    spans = {pattern: f"layers.{{{min(n)}-{max(n)}}}." for pattern, n in layers.items()}
    return [pattern.replace(_ALL, spans[pattern]) for pattern in layers]


def whole(shard: Shard, values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Assemble a whole tensor, FP32 (entries,), from this rank's entries, laid out like its shard. Collective."""
    parameter = shard.parameter
    if is_slice(parameter):
        total = torch.zeros(parameter.whole.numel(), dtype=torch.float32, device=values.device)
        total[parameter.start : parameter.start + values.numel()] = values
        if group is not None:
            dist.all_reduce(total.view(torch.int32), group=group)  # The other ranks add zeros.
        return total
    if isinstance(parameter, DTensor):
        distributed = DTensor.from_local(
            values.view(shard.local_shape),
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return distributed.full_tensor().reshape(-1)
    return values
