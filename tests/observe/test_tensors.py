"""Selection of observed tensors, and their assembly from any shards."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.pool import Pool
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.core.parameters import Shard, SliceParameter, collect_shards
from torchtitan_scape.observe.figures import PAPER, chosen, label_of, whole
from torchtitan_scape.trainer.specs import FAMILIES, whole_model


def shards_of(recipe: str, *arguments: str) -> list[Shard]:
    model = whole_model(parse([f"--job.config_file=train_configs/{recipe}.toml", *arguments]))[2]
    return collect_shards(
        [{"params": list(model.parameters()), "param_names": [n for n, _ in model.named_parameters()]}]
    )


def test_the_papers_tensors_of_every_family() -> None:
    assert PAPER.keys() == FAMILIES.keys()
    llama = ["layers.0.feed_forward.w1+w3", "layers.8.attention.wo", "tok_embeddings"]
    gpt = ["layers.0.attention.wo", "layers.10.feed_forward.w1", "layers.2.attention.wq+wk+wv"]
    assert [one.label for one in chosen([], shards_of("llama_500m"), "llama3")] == llama
    assert [one.label for one in chosen([], shards_of("gpt_345m"), "gpt2")] == gpt
    # In a model of another depth, layers of the same relative depth: layer 3 of 6 corresponds to layer 8 of 16.
    assert [one.label for one in chosen([], shards_of("embedded"), "llama3")] == [
        "layers.0.feed_forward.w1+w3",
        "layers.3.attention.wo",
        "tok_embeddings",
    ]
    tiny = chosen([], shards_of("gpt_345m", "--model.flavor=tiny", "--training.seq_len=64"), "gpt2")
    assert [len(one.shards) for one in tiny] == [1, 1, 3]


def test_patterns() -> None:
    shards = shards_of("embedded")
    assert len(chosen(["*"], shards, "llama3")) == len(shards)
    found = chosen(["layers.*.attention.wo.weight", "output.weight", "output.*"], shards, "llama3")
    assert [one.label for one in found] == [*(f"layers.{i}.attention.wo" for i in range(6)), "output"]
    (joined,) = chosen(["output.weight + tok_embeddings.weight"], shards, "llama3")
    assert joined.label == "output+tok_embeddings" and len(joined.shards) == 2
    assert label_of(["layers.0.a.weight", "layers.1.a.weight"]) == "layers.0.a+1.a"
    message = (
        r"\[observe\] names: 'layers.6.\*' matches no parameter; the parameters are tok_embeddings.weight, "
        r"layers.\{0-5\}.attention.wq.weight, .*output.weight, and \* is a wildcard"
    )
    with pytest.raises(ValueError, match=message):
        chosen(["norm.weight", "layers.6.*"], shards, "llama3")


def gathered() -> list[bool]:
    """Return, on four ranks, whether tensors are assembled correctly, including NaN."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    assert Partial
    mesh, found = init_device_mesh("cpu", (2, 2)), []
    for shape, placements in (
        ((7, 6), (Shard(0), Shard(1))),
        ((7, 5), (Shard(0), Shard(0))),  # FSDP's uneven shards of tensor-parallel shards.
        ((3, 4), (Shard(0), Replicate())),
        ((1,), (Shard(0), Replicate())),  # Some ranks have empty shards.
    ):
        values = torch.arange(math.prod(shape), dtype=torch.float32).view(shape) - 3.5
        values.view(-1)[0] = torch.nan
        parameter = nn.Parameter(distribute_tensor(values, mesh, placements))
        (shard,) = collect_shards([{"params": [parameter], "param_names": ["p"]}])
        back = whole(shard, parameter.detach().to_local().reshape(-1), dist.group.WORLD)
        found.append(torch.equal(back.view(torch.int32), values.view(-1).view(torch.int32)))
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    values[1, 2] = torch.nan
    at = [0, 5, 5, 11, 24]  # One rank has an empty slice.
    rank = dist.get_rank()
    own = values.view(-1)[at[rank] : at[rank + 1]]
    piece: Any = SliceParameter(own.clone().view(1, -1), (4, 6), at[rank])
    (shard,) = collect_shards([{"params": [piece], "param_names": ["p"]}])
    back = whole(shard, own, dist.group.WORLD)
    return [*found, torch.equal(back.view(torch.int32), values.view(-1).view(torch.int32))]


def test_whole_tensors_are_assembled_from_shards(pool4: Pool) -> None:
    assert pool4(gathered) == [[True] * 5] * 4
