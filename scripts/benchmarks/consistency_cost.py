"""Times the consistency check against a training step, both in one run, on this machine.

    torchrun --nproc_per_node=2 -m scripts.benchmarks.consistency_cost --job.config_file train_configs/embedded.toml

Any recipe and the trainer's options may be given. Warm-up, then steps in turn with checks. The bound is one plain read
of the same memory (torch.sum over 64-bit words, chunks as the check reads them). Writes results/consistency/cost.json
and table.md.
"""

import statistics
import sys
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from scripts.common import RESULTS, guarded, markdown, write
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.core import consistency
from torchtitan_scape.core.text import size_text
from torchtitan_scape.titan.trainer import init_logger
from torchtitan_scape.trainer.trainer import ScapeTrainer

OUTPUT = RESULTS / "consistency"
WARM_UP, STEPS = 5, 25


def timed(work: Any) -> float:
    """Seconds, the device waited for at both ends."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


class CostTrainer(ScapeTrainer):
    """The trainer, which after each step checks as often as it is asked to, apart from the step."""

    def __init__(self, job_config: Any) -> None:
        self.interval, job_config.sync.consistency_interval = job_config.sync.consistency_interval, 0
        super().__init__(job_config)
        self.seconds: dict[str, list[float]] = {"step": [], "check": [], "read": []}

    def train_step(self, data_iterator: Any) -> None:
        step = timed(lambda: ScapeTrainer.train_step(self, data_iterator))
        if self.step <= WARM_UP:
            return
        dist.barrier()
        self.seconds["step"].append(step)
        self.seconds["check"].append(timed(lambda: self.replica_optimizer.check_consistency(self.step)))
        self.seconds["read"].append(timed(self.read))

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for one in self.optimizers.replicated_tensors() for _, tensor in one.parts]

    def read(self) -> None:
        words = [t.detach().reshape(-1).view(torch.uint8) for t in self.tensors()]
        for chunk in (c for w in words for c in w.split(consistency._CHUNK_BYTES) if c.numel() >= 8):
            chunk = chunk[: chunk.numel() // 8 * 8]
            (chunk if chunk.storage_offset() % 8 == 0 else chunk.clone()).view(torch.int64).sum()


def main() -> None:
    config = parse([*sys.argv[1:], f"--training.steps={WARM_UP + STEPS}", "--validation.no-enable"])
    config.metrics.log_freq = WARM_UP + STEPS
    init_logger()
    trainer = CostTrainer(config)
    with patch("time.sleep"):
        trainer.train()
    if dist.get_rank() == 0:
        report(trainer)
    trainer.close()
    dist.destroy_process_group()


def report(trainer: CostTrainer) -> None:
    config, bytes_read = trainer.job_config, sum(tensor.nbytes for tensor in trainer.tensors())
    median = {name: statistics.median(values) for name, values in trainer.seconds.items()}
    share = median["check"] / max(1, trainer.interval) / median["step"]
    figures = {
        "recipe": f"{config.model.name} {config.model.flavor}, {config.sync.method}, {trainer.layout.describe()}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in trainer.model_parts[0].parameters()),
        "bytes_read": bytes_read,
        "median_seconds": median,
        "interval": trainer.interval,
        "share_of_a_step": share,
        "seconds": trainer.seconds,
    }
    row = {
        "read by a check": size_text(bytes_read),
        "step, ms": f"{1e3 * median['step']:.1f}",
        "check, ms": f"{1e3 * median['check']:.2f}",
        "plain read of the same memory, ms": f"{1e3 * median['read']:.2f}",
        "interval": trainer.interval,
        "of a step, %": f"{100 * share:.4f}",
    }
    what = f"{figures['recipe']}; {figures['device']}, medians of {STEPS} steps and checks in one run."
    write(OUTPUT / "cost.json", figures)
    write(OUTPUT / "table.md", f"{what}\n\n{markdown([row])}\n")
    print(f"{what}\n\n{markdown([row])}")


if __name__ == "__main__":
    sys.exit(guarded(main))
