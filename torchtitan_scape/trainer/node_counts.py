"""Numbers of nodes with which a run of NNODES=MIN:MAX can train.

    python -m torchtitan_scape.trainer.node_counts MIN MAX RANKS_PER_NODE --job.config_file X.toml ...

The last line of the output has the usable numbers as JSON and the global batch size. The batch is the same for all of
them: fewer replicas accumulate more gradients. Without training.global_batch_size it is one local batch per
data-parallel rank of MAX nodes.
"""

import os
import sys

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.config.parsing import resolve
from torchtitan_scape.titan import DEVICE_TYPE
from torchtitan_scape.trainer.layout import checked_layout


def usable_counts(config: JobConfig, least: int, most: int, ranks_per_node: int) -> tuple[list[int], dict[int, str]]:
    """Return the usable numbers of nodes, and the reason why each of the others is not. Sets the global batch size.

    Raises:
        ValueError: Fewer than two are usable, or the run writes no checkpoints.
    """
    if not config.checkpoint.enable or config.checkpoint.load_only:
        raise ValueError(
            f"NNODES={least}:{most} restarts the run when nodes are lost or join; add --checkpoint.enable, without "
            "load_only"
        )
    training = config.training
    usable: list[int] = []
    refused: dict[int, str] = {}
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    for nodes in range(most, least - 1, -1):
        os.environ["WORLD_SIZE"] = str(nodes * ranks_per_node)
        try:
            layout = checked_layout(config, DEVICE_TYPE)
        except ValueError as error:
            refused[nodes] = str(error)
            continue
        if training.global_batch_size < 0:
            training.global_batch_size = training.local_batch_size * layout.replicate * layout.shard
        usable.insert(0, nodes)
    if len(usable) < 2:
        nodes, reason = next(iter(refused.items()))
        raise ValueError(f"NNODES={least}:{most}: {nodes} nodes of {ranks_per_node} ranks cannot be used: {reason}")
    return usable, refused


def main(arguments: list[str]) -> int:
    least, most, ranks = (int(argument) for argument in arguments[:3])
    try:
        config = resolve(arguments[3:]).config
        usable, refused = usable_counts(config, least, most, ranks)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    for nodes, reason in sorted(refused.items()):
        print(f"NNODES={least}:{most}: {nodes} nodes will not be used: {reason}", file=sys.stderr)
    batch = config.training.global_batch_size
    print(
        f"NNODES={least}:{most}: every step trains {batch} sequences, with {', '.join(map(str, usable))} nodes",
        file=sys.stderr,
    )
    print(usable, batch)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
