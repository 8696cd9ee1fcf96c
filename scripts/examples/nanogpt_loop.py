"""A training loop of one's own with any method; every rank is a replica.

    torchrun --nproc_per_node=2 -m scripts.examples.nanogpt_loop --method sparta --checkpoint outputs/example

Compared with a DDP loop: no DistributedDataParallel around the model, `replicate` around the optimizer, no
`clip_grad_norm_` before the step, and evaluation inside `shared_weights()`.
"""

import math
import os
from pathlib import Path

import torch
import torch.distributed as dist

from scripts.examples.model import GPT, arguments, loss_at, text
from torchtitan_scape import AdamS, replicate

MICRO_BATCHES = 2


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    data, end = text(), 0.9  # the last tenth is for validation
    train, valid = data[: int(end * len(data))], data[int(end * len(data)) :]

    torch.manual_seed(0)
    model = GPT().to(device)
    kind = AdamS if options.method == "scape" else torch.optim.AdamW
    optimizer = replicate(
        model,
        kind(model.parameters(), lr=4e-3),
        options.method,
        dist.group.WORLD,
        max_norm=1.0,
        total_steps=options.steps,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.1 + 0.45 * (1 + math.cos(math.pi * step / options.steps))
    )

    # Replicas differ, so every rank saves its own state.
    path = Path(options.checkpoint or ".", f"rank{rank}.pt")
    first = 1
    if options.checkpoint and path.exists():
        saved = torch.load(path, map_location=device, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        first = saved["step"] + 1

    for step in range(first, options.steps + 1):
        for micro in range(MICRO_BATCHES):
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                loss = loss_at(model, train, seed=10_000 * step + 100 * micro + rank)
            (loss / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 10 == 0:
            stats = optimizer.stats()  # collective: on all ranks
            if rank == 0:
                sent = f"{stats['sent_bytes'] / 1e3:.1f} kB/step (dense {stats['dense_bytes'] / 1e3:.1f} kB)"
                print(f"step {step} loss {loss.item():.4f} grad norm {stats['grad_norm']:.3f} sent {sent}", flush=True)
        if options.checkpoint and step % options.interval == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            torch.save({"step": step, **{key: one.state_dict() for key, one in states.items()}}, path)
        if step == options.stop:
            dist.destroy_process_group()
            return

    model.eval()
    with torch.no_grad(), optimizer.shared_weights():  # the same weights on every rank
        loss = torch.stack([loss_at(model, valid, seed) for seed in range(8)]).mean()
    if rank == 0:
        print(f"validation loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
