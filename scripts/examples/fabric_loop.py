"""Train with Lightning Fabric, which distributes the data and runs mixed precision; `replicate` synchronizes.

    torchrun --nproc_per_node=2 -m scripts.examples.fabric_loop --method quantized

Fabric's strategy `ddp` starts the processes, assigns the devices and gives each rank its own batches. Only its
`setup_module` wraps the model in DistributedDataParallel, so the strategy below leaves this out. `fabric.setup_module`
then applies the precision alone.

The optimizer is not passed to `fabric.setup`: there is nothing to distribute, and `replicate` keeps all its methods.
`max_norm` replaces `fabric.clip_gradients`, and `no_backward_sync` is not needed. `fabric.save` writes the state of
rank 0 only, but replicas differ: save on every rank with `torch.save`, as nanogpt_loop.py does.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchtitan_scape import AdamS, replicate


class ReplicaStrategy(DDPStrategy):
    """`DDPStrategy` without DistributedDataParallel: every process trains a replica of the model."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="dense", help="a name of the method registry")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per optimizer step")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true")
    args = parser.parse_args()

    world, devices = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])  # set by torchrun
    fabric = Fabric(
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        strategy=ReplicaStrategy(),
        devices=devices,
        num_nodes=world // devices,
        precision=args.precision,
    )
    fabric.launch()  # creates the process group
    x = torch.randn(1024, 32, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :10].argmax(1))
    loader: Any = fabric.setup_dataloaders(DataLoader(data, batch_size=16, shuffle=True))  # own batches for each rank
    steps = args.epochs * (len(loader) // args.accumulate)

    model = fabric.setup_module(nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10)))
    plain = model.module  # without Fabric's precision wrapper
    rates = AdamS if args.method == "scape" else torch.optim.AdamW
    optimizer = replicate(
        plain, rates(plain.parameters(), lr=1e-2), args.method, dist.group.WORLD, max_norm=1.0, total_steps=steps
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        for micro, (inputs, targets) in enumerate(loader, 1):
            loss = F.cross_entropy(model(inputs), targets)
            fabric.backward(loss / args.accumulate)
            if micro % args.accumulate == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        stats = optimizer.stats()
        with torch.no_grad(), optimizer.shared_weights():  # the weights that all replicas share
            evaluation = F.cross_entropy(plain(x[:256].to(fabric.device)), data.tensors[1][:256].to(fabric.device))
            lowest, highest = (fabric.all_reduce(evaluation, reduce_op=op) for op in ("min", "max"))
        mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
        fabric.print(
            f"epoch {epoch + 1} | loss {mean:.4f} | evaluation {lowest:.6f} to {highest:.6f} over the replicas | "
            f"sent {stats['sent_bytes']:.0f} of {stats['dense_bytes']:.0f} B/step and rank"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
