"""Run a configuration of scripts.examples.titan_debug, and print the figures that its test checks as a line of JSON.

    torchrun --nproc_per_node=4 --local-ranks-filter=0 -m tests.scripts.titan_0_3 CONFIG [TorchTitan's options]

CONFIG is `native` or `replicas`. It needs an environment with TorchTitan 0.3.0.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scripts.examples import titan_debug  # before torchtitan

PACKAGES = ("torch", "torchtitan", "datasets")


class BytesBetweenReplicas(TorchDispatchMode):
    """Counts the bytes of the tensors in every collective between two ranks that hold the same shard.

    It sees the operators of PyTorch, whoever calls them: FSDP2 or `replicate`.

    Attributes:
        found: by operator.
    """

    def __init__(self, shards: int) -> None:
        super().__init__()
        self.shards, self.found = shards, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            leaves = tree_leaves((args, kwargs or {}))
            objects = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)]
            groups = [dist.ProcessGroup.unbox(one) for one in objects if "ProcessGroup" in str(one._type())]
            first, *others = dist.get_process_group_ranks(groups[0])
            if others == [first + self.shards]:
                self.found[func.__name__] += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        return func(*args, **(kwargs or {}))


def digest(parameters: Iterable[Any]) -> str:
    """Return a digest of this rank's shards."""
    found = hashlib.sha256()
    for parameter in parameters:
        found.update(parameter.to_local().detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


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
    with BytesBetweenReplicas(shards=2) as between:
        trainer.train()
    (model,) = trainer.model_parts
    digests = [digest(model.parameters())] * 2
    found: dict[str, Any] = {"versions": {package: version(package) for package in PACKAGES}, "losses": losses}
    found["bytes_per_step"] = {key: count / len(losses) for key, count in between.found.items()}
    if name == "replicas":
        (optimizer,) = trainer.optimizers
        found["stats"] = optimizer.stats()
        with optimizer.shared_weights():
            digests[1] = digest(model.parameters())
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, digests)
    found["weights"], found["shared_weights"] = zip(*every, strict=True)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
