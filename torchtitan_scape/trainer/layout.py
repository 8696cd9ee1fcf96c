"""Layout of a run from its configuration and launcher, and numbers of nodes with which NNODES=MIN:MAX can train.

    python -m torchtitan_scape.trainer.layout MIN MAX RANKS_PER_NODE --job.config_file X.toml ...

The last line of the output has the usable numbers as JSON and the global batch size. The batch is the same for all of
them: fewer replicas accumulate more gradients. Without training.global_batch_size it is one local batch per
data-parallel rank of MAX nodes. With --training.global_batch_size=-1 it is -1: one per data-parallel rank of each.
"""

import os
import sys
from itertools import pairwise

from torchtitan_scape.config.checks import check_config, check_library_keys, import_custom
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.config.parsing import resolve
from torchtitan_scape.optimizers.registry import check_layout
from torchtitan_scape.titan import DEVICE_TYPE
from torchtitan_scape.titan.components import model_converters
from torchtitan_scape.titan.distributed import device_module
from torchtitan_scape.topology.layout import Layout, plan_layout, ranks_per_node_from_environment
from torchtitan_scape.topology.machines import Links, detect_machine, get_machine, with_measured_links

FOLLOWS = "--training.global_batch_size=-1"


def is_dry_run(config: JobConfig) -> bool:
    """Return whether the run builds everything without training: the fake backend with 0 steps."""
    return config.comm.mode == "fake_backend" and config.training.steps == 0


def checked_layout(config: JobConfig, device_type: str) -> Layout:
    """Check a configuration as far as that is possible without a process group, and return the run's layout.

    Imports what `experimental.custom_import` names. Raises ValueError if a value is not possible, alone, with others or
    with this layout.
    """
    import_custom(config)
    check_config(config, device_type)
    check_library_keys(config, device_type, model_converters)
    layout = layout_of(config)
    check_layout(config.optimizer.name, layout, config.sharding.levels.active)
    config.sharding.check(layout)
    return layout


def layout_of(config: JobConfig) -> Layout:
    """Return the layout that config and launcher select, without a process group. Raises ValueError for none."""
    fake = config.comm.mode == "fake_backend"
    name = "NGPU" if fake else "WORLD_SIZE"
    value = os.environ.get(name, "1")
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"{name} is {value!r}; it must be the number of ranks")
    world_size = int(value)
    machine_name: str = config.topology.machine
    if machine_name == "auto":
        machine_name = detect_machine(device_module.get_device_name())
    machine = get_machine(machine_name)
    if config.topology.links:
        machine = with_measured_links(machine, _measured_links(config.topology.links))
    ranks_per_node = config.topology.ranks_per_node
    if not ranks_per_node and not fake:  # a dry run is a single process, unlike the run that it describes
        ranks_per_node = ranks_per_node_from_environment(os.environ, world_size) or 0
    if not ranks_per_node:
        ranks_per_node = min(machine.ranks_per_node or world_size, world_size)
    parallelism = config.parallelism
    layout = plan_layout(
        world_size,
        ranks_per_node=ranks_per_node,
        machine=machine,
        replicate=parallelism.data_parallel_replicate_degree,
        shard=parallelism.data_parallel_shard_degree,
        context=parallelism.context_parallel_degree,
        tensor=parallelism.tensor_parallel_degree,
        pipeline=parallelism.pipeline_parallel_degree,
    )
    if (simulated := config.topology.simulate_replicas) > 1 and layout.replicate > 1:
        raise ValueError(
            f"[topology] simulate_replicas = {simulated} with {layout.replicate} real replicas (data_parallel_"
            f"replicate_degree = {parallelism.data_parallel_replicate_degree} on {world_size} ranks): they cannot be "
            "combined; set the degree to 1, and start one process, NGPU=1, or one group of shards"
        )
    _check_batch(config, layout)
    return layout


def _measured_links(path: str) -> Links:
    try:
        return Links.from_json(path)
    except ValueError as error:
        raise ValueError(f"[topology] links: {error}") from None


def _check_batch(config: JobConfig, layout: Layout) -> None:
    """Raise ValueError where TorchTitan would fail with an assertion without the numbers."""
    training, readers, simulated = config.training, layout.replicate * layout.shard, config.topology.simulate_replicas
    validation = config.validation
    micro = training.local_batch_size * readers * simulated
    if training.global_batch_size > 0 and training.global_batch_size % micro:
        raise ValueError(
            f"[training] global_batch_size = {training.global_batch_size} is not a multiple of local_batch_size "
            f"{training.local_batch_size} x {readers} data-parallel ranks"
            + (f" x {simulated} simulated replicas" if simulated > 1 else "")
            + f" = {micro}"
        )
    divisor = layout.tensor * 2 * layout.context
    for section, settings in (("training", training), *([("validation", validation)] if validation.enable else ())):
        if settings.seq_len % divisor:
            raise ValueError(
                f"[{section}] seq_len = {settings.seq_len} must be a multiple of {divisor} "
                "(tensor degree x 2 x context degree)"
            )


def usable_counts(
    config: JobConfig, least: int, most: int, ranks_per_node: int, follows: bool = False
) -> tuple[list[int], dict[int, str]]:
    """Return the usable numbers of nodes, and the reason why each of the others is not. Sets the global batch size,
    unless it `follows` the number of nodes.

    Raises ValueError if fewer than two are usable, if the run writes no checkpoints, or if their copies on other nodes
    do not cover the nodes that a single loss excludes.
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
        if training.global_batch_size < 0 and not follows:
            training.global_batch_size = training.local_batch_size * layout.replicate * layout.shard
        usable.insert(0, nodes)
    if len(usable) < 2:
        nodes, reason = next(iter(refused.items()))
        raise ValueError(f"NNODES={least}:{most}: {nodes} nodes of {ranks_per_node} ranks cannot be used: {reason}")
    copies = config.checkpoint.copies
    for fewer, more in pairwise(usable):
        if 0 < copies < more - fewer:
            raise ValueError(
                f"NNODES={least}:{most}, [checkpoint] copies = {copies}: when one of {more} nodes is lost, {fewer} "
                f"continue and {more - fewer - 1} wait, and a file may be on these alone; set copies = {more - fewer}, "
                "or a global_batch_size that the numbers between can use"
            )
    return usable, refused


def main(arguments: list[str]) -> int:
    least, most, ranks = (int(argument) for argument in arguments[:3])
    try:
        config = resolve(arguments[3:]).config
        usable, refused = usable_counts(config, least, most, ranks, FOLLOWS in arguments)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    for nodes, reason in sorted(refused.items()):
        print(f"NNODES={least}:{most}: {nodes} nodes will not be used: {reason}", file=sys.stderr)
    batch = config.training.global_batch_size
    each = f"{batch} sequences" if batch > 0 else "one local batch per data-parallel rank"
    print(f"NNODES={least}:{most}: every step trains {each}, with {', '.join(map(str, usable))} nodes", file=sys.stderr)
    print(usable, batch)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
