"""Train a small character-level GPT on several replicas, with any synchronization method, in a plain PyTorch loop.

    torchrun --nproc_per_node=2 -m scripts.examples.nanogpt_loop --method sparta --steps 200 --folder outputs/nanogpt

It runs on CPUs (gloo) or GPUs (NCCL). Run the same command again to continue from the last checkpoint in `--folder`.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan_scape import AdamS, replicate

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 64, 4, 2, 64, 8


class GPTLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(GPTLayer() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(x) + self.positions.weight[: x.shape[1]]))


def batch(text: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, drawn by a seed, so that a resumed run sees the same data."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def newest(folder: Path, world: int) -> int:
    """Return the newest step that all ranks have saved, 0 if there is none."""
    complete = [path for path in folder.glob("step-*") if len(list(path.glob("rank-*.pt"))) == world]
    return max((int(path.name[5:]) for path in complete), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="dense", help="a name of the method registry")
    parser.add_argument("--steps", type=int, default=100, help="length of the run and of the learning-rate schedule")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per optimizer step")
    parser.add_argument("--bf16", action="store_true", help="BF16 autocast; parameters stay FP32")
    parser.add_argument("--folder", type=Path, help="save checkpoints here, and resume from the newest one")
    parser.add_argument("--save_every", type=int, default=50)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    train, held_out = text[:-5000].to(device), text[-5000:].to(device)

    torch.manual_seed(rank)  # replicas may start differently: replicate() broadcasts the weights of replica 0
    model = GPT(256).to(device)  # not wrapped in DistributedDataParallel
    rates = AdamS if args.method == "scape" else torch.optim.AdamW
    own = rates(model.parameters(), lr=3e-3)
    optimizer = replicate(model, own, args.method, dist.group.WORLD, max_norm=1.0, total_steps=args.steps)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    first = newest(args.folder, world) if args.folder else 0
    if first:  # each rank reads what it has saved itself: residuals and local weights differ between replicas
        saved = torch.load(args.folder / f"step-{first}" / f"rank-{rank}.pt", map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])

    for step in range(first + 1, args.steps + 1):
        for micro in range(args.accumulate):
            x, y = batch(train, (step * args.accumulate + micro) * world + rank)  # each replica has its own data
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            (loss / args.accumulate).backward()
        optimizer.step()  # synchronizes, clips by the synchronized norm, updates
        scheduler.step()
        optimizer.zero_grad()
        if step % args.save_every == 0 and args.folder:
            state = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}  # collective
            path = args.folder / f"step-{step}" / f"rank-{rank}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state | {"scheduler": scheduler.state_dict()}, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)  # an interrupted write leaves no incomplete .pt file
        if step % 10 == 0 or step == args.steps:
            stats = optimizer.stats()
            with torch.no_grad(), optimizer.shared_weights():  # the weights that all replicas share
                x, y = batch(held_out, seed=0)
                evaluation = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            if rank == 0:
                figures = "".join(f" | {key} {value:.4g}" for key, value in stats.items())
                print(f"step {step} | loss {loss:.4f} | evaluation {evaluation:.4f}{figures}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
