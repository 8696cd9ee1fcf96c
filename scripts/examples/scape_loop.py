"""Train with SCAPE: AdamS with a sparse, delayed-mask exchange of the first moment.

    torchrun --nproc_per_node=2 -m scripts.examples.scape_loop --density 0.05

SCAPE needs `AdamS`, which keeps one moment: it exchanges this moment, not the gradient. The first steps are dense.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from torchtitan_scape import AdamS, NonFiniteGradientError, ScapeOptions, replicate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--density", type=float, default=0.05, help="share of the entries that a step exchanges")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 32)).to(device)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    rates = AdamS(groups, lr=1e-3, betas=(0.9, 0.95))
    options = ScapeOptions(density=args.density)
    optimizer = replicate(model, rates, options, dist.group.WORLD, max_norm=1.0, total_steps=args.steps)

    for step in range(1, args.steps + 1):
        generator = torch.Generator().manual_seed(step * world + rank)  # each replica has its own data
        x = torch.randn(16, 32, generator=generator).to(device)
        loss = F.mse_loss(model(x), x)
        loss.backward()
        try:
            optimizer.step()  # a step with a non-finite gradient on any replica is skipped on all of them
        except NonFiniteGradientError as error:  # raised on all ranks, after ten skipped steps in a row
            raise SystemExit(f"error: training diverged: {error}") from None
        optimizer.zero_grad()
        if step % 20 == 0 or step == args.steps:
            stats = optimizer.stats()
            if rank == 0:
                figures = " | ".join(f"{key} {value:.4g}" for key, value in stats.items())
                print(f"step {step} | loss {loss:.4f} | {figures}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
