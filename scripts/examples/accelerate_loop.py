"""Hugging Face Accelerate for devices, data and precision; `replicate` for the replicas.

    torchrun --nproc_per_node=2 -m scripts.examples.accelerate_loop --method quantized

`accelerator.prepare` wraps a model in DistributedDataParallel, which all-reduces the gradients. So only the data loader
is prepared; the model and the optimizer stay as they are. This uses no private function: Accelerate allows its parts to
be used one by one. Lightning Fabric couples model, optimizer and strategy in `setup`, so that a strategy of one's own
would be needed there.
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scripts.examples.model import GPT, arguments, text
from torchtitan_scape import AdamS, replicate


def main() -> None:
    options = arguments(__doc__.splitlines()[0], method="quantized")
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    rows = text()[: 64 * 8 * 1024].view(-1, 64)
    loader = accelerator.prepare(DataLoader(TensorDataset(rows), batch_size=8, shuffle=False, drop_last=True))

    torch.manual_seed(0)
    model = GPT().to(accelerator.device)
    kind = AdamS if options.method == "scape" else torch.optim.AdamW
    inner = kind(model.parameters(), lr=4e-3)
    optimizer = replicate(model, inner, options.method, dist.group.WORLD, max_norm=1.0, total_steps=options.steps)
    batches = iter(loader)
    for _ in range(options.steps):
        (batch,) = next(batches)
        tokens = batch.long()
        with accelerator.autocast():
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    stats = optimizer.stats()
    accelerator.print(f"loss {loss.item():.4f}, sent {stats['sent_bytes'] / 1e3:.1f} kB/step")
    accelerator.end_training()  # destroys the process group


if __name__ == "__main__":
    main()
