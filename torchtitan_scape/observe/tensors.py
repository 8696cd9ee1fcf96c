"""Which tensors are observed, and how one of them is put together from its shards."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from torchtitan_scape.core.parameters import Shard, is_slice
from torchtitan_scape.core.workloads import layer_of

_LAYER = re.compile(r"(?<=layers\.)\d+")
_ALL = "layers.*."
# By [model] name: layers of the paper's model, and the tensors of its Figures 4 and 5.
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
    """What counts as one tensor: a parameter, or several joined. label: their names, in short."""

    label: str
    shards: tuple[Shard, ...]


def chosen(names: Sequence[str], shards: Sequence[Shard], family: str) -> list[Observed]:
    """The tensors that `names` ask for; without any the paper's, in layers of the same depth.

    names: patterns of parameters' names, "*" for anything; each parameter is a tensor of its own, those of patterns
        with + between them are one together. family: as in `[model] name`.

    Raises ValueError for a pattern that matches nothing, with the names that there are.
    """
    found: dict[str, Observed] = {}
    for name in names or _of_paper(family, shards):
        matches = [_matching(pattern.strip(), shards) for pattern in name.split("+")]
        joined = tuple(shard for some in matches for shard in some)
        for one in [joined] if len(matches) > 1 else [(shard,) for shard in joined]:
            label = label_of([shard.name for shard in one])
            found.setdefault(label, Observed(label, one))
    return list(found.values())


def label_of(names: Sequence[str]) -> str:
    """`layers.0.feed_forward.w1+w3`: without "weight", and what is common but once."""
    parts = [name.removesuffix(".weight").split(".") for name in names]
    common = 0
    while len(parts) > 1 and all(len(p) > common + 1 and p[common] == parts[0][common] for p in parts):
        common += 1
    return ".".join([*parts[0][:common], "+".join(".".join(p[common:]) for p in parts)])


def _of_paper(family: str, shards: Sequence[Shard]) -> Iterator[str]:
    theirs, names = PAPER[family]
    layers = 1 + max(layer_of(shard.name) or 0 for shard in shards)
    for name in names:
        yield _LAYER.sub(lambda number: str(int(number[0]) * layers // theirs), name)


def _matching(pattern: str, shards: Sequence[Shard]) -> list[Shard]:
    found = [shard for shard in shards if fnmatchcase(shard.name, pattern)]
    if not found:
        raise ValueError(
            f"[observe] names: {pattern!r} matches no parameter; there are {', '.join(_forms(shards))}, and * stands "
            "for anything"
        )
    return found


def _forms(shards: Sequence[Shard]) -> list[str]:
    """The names, those of all layers as one: `layers.{0-5}.attention.wq.weight`."""
    layers: dict[str, list[int]] = {}
    for shard in shards:
        number = layer_of(shard.name)
        layers.setdefault(_LAYER.sub("*", shard.name), []).append(-1 if number is None else number)
    spans = {form: f"layers.{{{min(n)}-{max(n)}}}." for form, n in layers.items()}
    return [form.replace(_ALL, spans[form]) for form in layers]


def whole(shard: Shard, values: Tensor, group: ProcessGroup | None) -> Tensor:
    """FP32 (entries,), of which this rank has `values` (n,) as it has the parameter. A collective call.

    group: the ranks that hold one replica together. Bits stay what they are.
    """
    parameter = shard.parameter
    if is_slice(parameter):
        found = torch.zeros(parameter.whole.numel(), dtype=torch.float32, device=values.device)
        found[parameter.start : parameter.start + values.numel()] = values
        if group is not None:
            dist.all_reduce(found.view(torch.int32), group=group)  # all others add zeros
        return found
    if isinstance(parameter, DTensor):
        made = DTensor.from_local(
            values.view(shard.local_shape),
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return made.full_tensor().reshape(-1)
    return values
