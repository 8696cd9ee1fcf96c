"""Memory of a rank with pipeline parallelism."""

from collections.abc import Sequence
from dataclasses import replace

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.core.workloads import LocalModel, Workload
from torchtitan_scape.models.registry import micro_batches, stage_modules
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.topology.layout import Layout


def stage_memory(
    config: JobConfig, workload: Workload, method: PlannedRun, layout: Layout, shards: int
) -> tuple[LocalModel, dict[str, float]]:
    """Return the shards, and the estimated bytes by kind, of a rank of the stage that needs most memory.

    With 1F1B a stage keeps the activations of one micro-batch for itself and for every later stage. FSDP gathers the
    parameters of a stage once per local batch, and accumulates their gradients unsharded.
    """
    stages = []
    model, batches = workload.local(shards), micro_batches(config)
    for number, modules in enumerate(stage_modules(config, workload.layers)):
        part = model.select(_names_in(modules, model.names))
        kinds = method.device_memory(part, layout.replicate, len(layout.hierarchy(layout.replicate_group(0))) > 1)
        own = replace(workload, layers=sum(module.startswith("layers.") for module in modules))
        size, is_last = config.parallelism.pipeline_parallel_microbatch_size, number == layout.pipeline - 1
        is_1f1b = config.parallelism.pipeline_parallel_schedule.lower() == "1f1b"
        kept = min(batches, layout.pipeline - number) if is_1f1b else batches
        gathered = 6.0 * part.entries * shards / layout.tensor if shards > 1 else 0.0
        kinds["working copy"] = workload.working_bytes() + gathered
        kinds["activations"] = kept * own.activation_bytes(size, output=is_last)
        stages.append((part, kinds))
    return max(stages, key=lambda one: sum(one[1].values()))


def _names_in(modules: Sequence[str], names: Sequence[str]) -> set[str]:
    return {name for name in names if any(name.startswith(f"{module}.") for module in modules)}
