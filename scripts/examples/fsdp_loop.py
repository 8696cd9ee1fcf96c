"""Shard a model within a node with FSDP2, and quantize the gradients that cross the network between nodes.

    torchrun --nproc_per_node=4 -m scripts.examples.fsdp_loop --shards 2

With 4 ranks and `--shards 2` there are 2 replicas of 2 shards each. On a cluster, `--shards` is the number of GPUs of a
node: FSDP2's all-gathers and reduce-scatters then stay inside a node, and `replicate` exchanges between nodes.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from torchtitan_scape import QuantizedOptions, replicate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=2, help="ranks that share one replica of the model")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per optimizer step")
    parser.add_argument("--overlap", action="store_true", help="start the exchange during the last backward pass")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world // args.shards, args.shards), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(0)  # the same seed on all shards of a replica
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 32)).to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["shard"])  # the shard dimension only: replicate() serves the other one
    fully_shard(model, mesh=mesh["shard"])

    optimizer = replicate(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),  # after fully_shard, on the sharded parameters
        QuantizedOptions(),
        mesh["replicate"],
        max_norm=1.0,
        total_steps=args.steps,
        overlap=args.overlap,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    for step in range(1, args.steps + 1):
        for micro in range(args.accumulate):
            # Every rank has its own data, those of one replica too: FSDP2 averages over the shard dimension.
            seed = (step * args.accumulate + micro) * world + rank
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)).to(device)
            loss = F.mse_loss(model(x), x)
            if micro == args.accumulate - 1:
                optimizer.prepare_last_backward()  # has no effect without overlap
            (loss / args.accumulate).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == args.steps:
            stats = optimizer.stats()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                sent, dense = stats["sent_bytes"], stats["dense_bytes"]
                print(
                    f"step {step} | loss {mean / world:.4f} | grad norm {stats['grad_norm']:.4f} | "
                    f"sent {sent:.0f} B/step and rank ({100 * sent / dense:.1f} % of dense FP32)",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
