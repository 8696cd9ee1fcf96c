"""Train with Hugging Face Accelerate, which distributes the data and runs mixed precision; `replicate` synchronizes.

    torchrun --nproc_per_node=2 -m scripts.examples.accelerate_loop --method topk

`Accelerator.prepare` wraps a model in DistributedDataParallel, so the model is not prepared. The rest of Accelerate
works on a plain model through its public interface, without hooks: `prepare` of the data loader, `accumulate`,
`autocast`, `backward` and `reduce`. That, and its size, is why this example uses Accelerate. Optimizer and scheduler
are not prepared either: a prepared scheduler steps once per process.

`max_norm` replaces `Accelerator.clip_grad_norm_`. `Accelerator.save_state` writes optimizers on the main process only,
but replicas differ: save on every rank with `torch.save`, as nanogpt_loop.py does.
"""

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchtitan_scape import AdamS, replicate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="dense", help="a name of the method registry")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per optimizer step")
    parser.add_argument("--mixed_precision", choices=("no", "bf16"), default="no")
    args = parser.parse_args()

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.accumulate,
    )
    x = torch.randn(1024, 32, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :10].argmax(1))
    loader = accelerator.prepare(DataLoader(data, batch_size=16, shuffle=True))  # gives each rank its own batches
    steps = args.epochs * -(-len(loader) // args.accumulate)

    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10)).to(accelerator.device)
    rates = AdamS if args.method == "scape" else torch.optim.AdamW
    replicas = dist.group.WORLD if accelerator.num_processes > 1 else None
    optimizer = replicate(
        model, rates(model.parameters(), lr=1e-2), args.method, replicas, max_norm=1.0, total_steps=steps
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    for epoch in range(args.epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model), accelerator.autocast():
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)  # divides by gradient_accumulation_steps
            if accelerator.sync_gradients:  # after the last micro-batch of a step
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        stats = optimizer.stats()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"epoch {epoch + 1} | loss {mean:.4f} | sent {stats['sent_bytes']:.0f} B/step and rank")
    accelerator.end_training()


if __name__ == "__main__":
    main()
