"""Script with a network namespace of its own: bytes of FSDP2's collectives and of the hooks on the network interface.

Prints, for FSDP2's own collectives, for all of ZeRO++ and for TAGC on 2 nodes of 2 ranks, the bytes that all ranks
count as sent and the bytes that crossed the interface in the same period.
"""

import json
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from tests.sharding import toy
from tests.topology.interface_bytes import in_namespace, interface_bytes
from torchtitan_scape.sharding.options import ShardingOptions

WORLD, STEPS = 4, 2
VARIANTS = {
    "dense": ShardingOptions(),
    "all": ShardingOptions(weights_code="int8", secondary=True, gradients_code="int8+int4"),
    "tagc": ShardingOptions(gradients_code="tagc"),
}


class Wide(toy.Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(toy.WIDTH, 12_000)
        self.down = nn.Linear(12_000, toy.WIDTH, bias=False)


def rank(number: int, store: str, queue: Any) -> None:
    torch.set_num_threads(1)
    file = dist.FileStore(store, WORLD)
    dist.init_process_group("gloo", store=file, rank=number, world_size=WORLD, timeout=timedelta(seconds=60))
    found = {}
    for name, options in VARIANTS.items():
        with patch.object(toy, "Block", Wide):
            run = toy.train(toy.make(2, options), steps=1)  # Also opens the connections.
        before = sum(run.sent.values())
        dist.barrier()
        start = interface_bytes()
        dist.barrier()
        toy.train(run, steps=STEPS, first=2)
        dist.barrier()
        sent = torch.tensor(sum(run.sent.values()) - before, dtype=torch.float64)
        moved = interface_bytes() - start
        dist.all_reduce(sent)
        found[name] = {"counted": sent.item(), "interface": moved}
    queue.put(found)
    dist.barrier()


if __name__ == "__main__":
    print(json.dumps(in_namespace(rank, WORLD)[0]))
