"""Train with the Trainer of Hugging Face transformers; `replicate` synchronizes.

    torchrun --nproc_per_node=2 -m scripts.examples.hf_trainer --method quantized

The subclass overrides methods that the Trainer's documentation offers for this. The Trainer wraps the model in
DistributedDataParallel on several processes. PyTorch's `noop_hook` turns off its all-reduce of the gradients; its
buckets stay in memory, which are as large as the gradients.

- `max_norm` is an argument of its own, and `max_grad_norm` must be 0: the Trainer clips before the step.
- `save_only_model` must be True: the Trainer saves the optimizer on one rank, but replicas differ. Such a run cannot be
  resumed; use another loop if it must be.
- `max_steps` is the length of the run.
"""

import argparse
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from torchtitan_scape import ReplicaOptimizer, replicate


class ReplicaTrainer(Trainer):
    """A Trainer whose optimizer synchronizes the replicas.

    Args:
        method, max_norm: see `torchtitan_scape.replicate`.
    """

    replicas: ReplicaOptimizer | None = None

    def __init__(self, *args: Any, method: Any = "dense", max_norm: float | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.method, self.max_norm, self.is_silent = method, max_norm, False
        if self.args.max_grad_norm or not self.args.save_only_model or self.args.max_steps <= 0:
            raise ValueError("set max_grad_norm=0, save_only_model=True and max_steps")

    def create_optimizer(self, model: Any = None) -> Any:
        if self.replicas is None:
            own = super().create_optimizer(model)
            world = dist.group.WORLD if dist.is_initialized() else None
            steps, norm = self.args.max_steps, self.max_norm
            self.replicas = replicate(self.model, own, self.method, world, max_norm=norm, total_steps=steps)
            self.optimizer = self.replicas
        return self.optimizer

    def training_step(self, model: Any, *args: Any, **options: Any) -> torch.Tensor:
        if isinstance(model, DistributedDataParallel) and not self.is_silent:
            model.register_comm_hook(None, noop_hook)
            self.is_silent = True
        return super().training_step(model, *args, **options)

    def shared_weights(self) -> AbstractContextManager[None]:
        return self.replicas.shared_weights() if self.replicas else nullcontext()

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        with self.shared_weights():
            return super().evaluate(*args, **options)

    def save_model(self, *args: Any, **options: Any) -> None:
        with self.shared_weights():
            super().save_model(*args, **options)

    def log(self, logs: dict[str, float], *args: Any) -> None:
        if "loss" in logs and self.replicas:
            logs |= self.replicas.stats()  # its grad_norm is that of the synchronized gradient
        super().log(logs, *args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="dense", help="a name of the method registry")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per optimizer step")
    parser.add_argument("--folder", default="outputs/hf_trainer")
    args = parser.parse_args()

    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    rows = [{"input_ids": row, "labels": row} for row in text[: len(text) // 64 * 64].view(-1, 64)]
    sizes = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        args.folder,
        max_steps=args.steps,
        learning_rate=3e-3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=args.accumulate,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=args.steps,
        save_only_model=True,
        max_grad_norm=0.0,
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_backend=None if torch.cuda.is_available() else "gloo",
    )
    torch.manual_seed(0)
    data = {"train_dataset": rows[:-32], "eval_dataset": rows[-32:]}
    ReplicaTrainer(GPT2LMHeadModel(sizes), arguments, **data, method=args.method, max_norm=1.0).train()


if __name__ == "__main__":
    main()
