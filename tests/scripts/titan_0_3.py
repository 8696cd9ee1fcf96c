"""Run scripts.examples.titan_trainer as a rank, and print what its test checks, as one JSON line per rank.

    torchrun --nproc_per_node=4 -m tests.scripts.titan_0_3 CONFIG [TorchTitan's options]

CONFIG is a function of scripts.examples.titan_debug. It runs in an environment with TorchTitan 0.3.0.
"""

import hashlib
import json
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scripts.examples import titan_debug  # before torchtitan


class BytesBetweenReplicas(TorchDispatchMode):
    """Adds the bytes of the tensors of each collective operator between two ranks of different replicas."""

    def __init__(self, shards: int) -> None:
        super().__init__()
        self.shards, self.found = shards, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            leaves = tree_leaves((args, kwargs or {}))
            for group in (
                dist.ProcessGroup.unbox(x)
                for x in leaves
                if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())
            ):
                first, *others = dist.get_process_group_ranks(group)
                if [rank - first for rank in others] == [self.shards]:
                    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
                    self.found[func.__name__] += sum(x.nbytes for x in tensors)
        return func(*args, **(kwargs or {}))


def main() -> None:
    from torchtitan.config import ConfigManager
    from torchtitan.observability import structured_logger
    from torchtitan.tools.logging import init_logger

    init_logger()
    name, *options = sys.argv[1:]
    config = ConfigManager().parse_args([f"--module={titan_debug.__name__}", f"--config={name}", *options])
    structured_logger.init_structured_logger(source="training", output_dir=config.dump_folder, enable=False)
    trainer = config.build()
    losses: list[float] = []
    log = trainer.metrics_processor.log

    def record(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
        losses.append(loss)
        log(step, loss, *args, **kwargs)

    trainer.metrics_processor.log = record
    between = BytesBetweenReplicas(shards=2)
    with between:
        trainer.train()
    digest = hashlib.sha256()
    for parameter in trainer.model_parts[0].parameters():
        digest.update(parameter.to_local().detach().contiguous().numpy().tobytes())
    found = {"rank": dist.get_rank(), "losses": losses, "weights": digest.hexdigest()[:16]}
    found["collectives"] = {name: count / len(losses) for name, count in between.found.items()}
    if name == "replicas":
        found["stats"] = trainer.optimizers.optimizers[0].stats()
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, found)
    if dist.get_rank() == 0:
        print("RESULT", json.dumps(everything))
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
