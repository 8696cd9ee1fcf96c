"""FSDP2 shards within a node, and a method of this project between nodes.

    torchrun --nproc_per_node=4 -m scripts.examples.fsdp_loop --method quantized

Two nodes of two ranks are assumed. FSDP2 gets the one-dimensional "shard" mesh, `replicate` the "replicate" mesh.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from scripts.examples.model import GPT, arguments, loss_at, text
from torchtitan_scape import AdamS, replicate


def main() -> None:
    options = arguments(__doc__.splitlines()[0], method="quantized")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    device = "cuda" if cuda else "cpu"
    nodes = dist.get_world_size() // 2
    mesh = init_device_mesh(device, (nodes, 2), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(0)
    model = GPT().to(device)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["shard"])
    # Build the optimizer after fully_shard: it must contain the sharded parameters.
    kind = AdamS if options.method == "scape" else torch.optim.AdamW
    inner = kind(model.parameters(), lr=4e-3)
    optimizer = replicate(model, inner, options.method, mesh["replicate"], max_norm=1.0, total_steps=options.steps)
    data, rank = text(), dist.get_rank()
    for step in range(1, options.steps + 1):
        loss = loss_at(model, data, seed=1_000 * step + rank)  # every rank has a batch of its own
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = optimizer.stats()
    if rank == 0:
        print(f"loss {loss.item():.4f}, sent {stats['sent_bytes'] / 1e3:.1f} kB/step between nodes", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
