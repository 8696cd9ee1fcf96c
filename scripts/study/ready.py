"""Checks of a run before its job is queued, and the time that it needs."""

from scripts.study.grid import RunSpec
from scripts.study.peers import PEERS
from topology.layout import Layout
from topology.links import Links
from topology.machines import Machine
from torchtitan_scape.config.checks import check_config, import_custom
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.config.library_checks import check_library_keys
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.core.patching import environment
from torchtitan_scape.models.registry import workload_of
from torchtitan_scape.optimizers.registry import check_layout
from torchtitan_scape.planner.step import predict
from torchtitan_scape.report.forecast import levels_of, method_of, shard_axis_of
from torchtitan_scape.sharding.levels_build import check_levels
from torchtitan_scape.titan.components import model_converters
from torchtitan_scape.trainer.layout import layout_of
from torchtitan_scape.trainer.specs import register

DEVICE = "cuda"  # of the nodes; this process may run on a login node without a GPU


def step_seconds(spec: RunSpec, arguments: list[str], machine: Machine) -> float:
    """Return the step time of a run that the planner predicts from the links of its machine.

    Args:
        arguments: The trainer's command line.
        machine: Where the recipe leaves it to the device's name.

    Raises:
        ValueError: The trainer would refuse the run before its first step.
    """
    try:
        config, layout = _checked(spec, arguments, machine)
        plan, _ = shard_axis_of(config, layout, on_cpu=False)
        found = predict(
            method_of(config),
            workload_of(config),
            layout,
            Links.from_machine(layout.machine),
            batch=config.training.global_batch_size,
            micro_batch=config.training.local_batch_size,
            sharding=plan,
            levels=levels_of(config, layout),
        )
    except ValueError as error:
        raise ValueError(f"{spec.title}: {error}") from None
    return found.step


def _checked(spec: RunSpec, arguments: list[str], machine: Machine) -> tuple[JobConfig, Layout]:
    config = parse([f"--job.config_file={spec.config_file}", *arguments])
    import_custom(config)
    check_config(config, DEVICE)
    check_library_keys(config, DEVICE, model_converters)
    config.topology.ranks_per_node = config.topology.ranks_per_node or machine.ranks_per_node
    if config.topology.machine == "auto":
        config.topology.machine = machine.name
    with environment(WORLD_SIZE=str(spec.size)):
        layout = layout_of(config)
    check_layout(config.optimizer.name, layout, config.sharding.levels.active)
    if config.sharding.levels.active:
        check_levels(config.sharding, layout)
    else:
        config.sharding.check(layout)
    register(config, with_data=False)
    peer = str(spec.about.get("peer", ""))
    if peer and peer not in PEERS:
        raise ValueError(f"there is no peer {peer!r}; known are {', '.join(PEERS)}")
    shards = layout.shard * layout.context
    if peer.startswith("ddp") and shards > 1:
        raise ValueError(f"DDP has no shards, but the shard degree is {shards}; set data_parallel_shard_degree = 1")
    if peer == "distributed-optimizer" and shards == 1:
        raise ValueError("the distributed optimizer shards over all ranks; set data_parallel_shard_degree = -1")
    return config, layout
