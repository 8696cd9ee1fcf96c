"""Memory of a rank: predicted before allocation, and compared with the measured peak."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan_scape.config.job_config import JobConfig, group_options
from torchtitan_scape.core.text import kinds_text, size_text
from torchtitan_scape.core.workloads import LocalModel, Workload
from torchtitan_scape.models.registry import micro_batches, stage_modules, workload_of
from torchtitan_scape.planner.configured import method_of, shard_axis_of
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.titan import device
from torchtitan_scape.topology.groups import most_groups
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.topology.machines import memory_warning

logger = logging.getLogger(__name__)

# Kinds that depend on the model's shape and on recomputation, and can only be estimated.
ESTIMATED = ("working copy", "activations", "shard messages", "chunks in flight")


@dataclass(frozen=True)
class MemoryReport:
    """Predicted bytes of a rank by kind, and the capacity of its device.

    Attributes:
        kinds: Bytes of device memory by kind.
        capacity: Bytes of device memory.
        device: Name of the device.
        host: Bytes of offloaded state by kind.
        host_capacity: Bytes of host memory available for it.
        groups: Communicators of the replicate axis. Their buffers are not counted: they grow with channels and peers,
            which NCCL chooses (https://github.com/NVIDIA/nccl/issues/864).
        warning: What is wrong if the device is not that of the named machine, or "".
    """

    kinds: dict[str, float]
    capacity: float
    device: str
    host: dict[str, float] = field(default_factory=dict)
    host_capacity: float = 0.0
    groups: int = 0
    warning: str = ""

    @classmethod
    def of(cls, config: JobConfig, layout: Layout, device_module: Any) -> "MemoryReport":
        """Return the report of a configuration, whose TrainSpec must be registered. A dry run uses the machine preset's
        device.
        """
        workload, method = workload_of(config), method_of(config)
        shard_axis, rows = shard_axis_of(config, layout)
        shards = shard_axis.shards(layout)
        if layout.pipeline > 1:
            model, kinds = stage_memory(config, workload, method, layout, shards)
        else:
            model, several = workload.local(shards), len(layout.replica_tiers) > 1
            kinds = method.total_memory(workload, shards, layout.replicate, config.training.local_batch_size, several)
        kinds = shard_axis.memory(kinds, rows, layout)
        host = method.options.host_memory(model, layout.replicate)
        preset, groups = layout.machine.device, most_groups(layout, **group_options(config))
        if config.comm.mode == "fake_backend":
            return cls(kinds, preset.memory * 1e9, preset.name, host, preset.host_memory * 1e9, groups)
        properties = device_module.get_device_properties(device_module.current_device())
        sharers = layout.ranks_per_node if properties.name == "CPU" else 1
        free = device.free_memory("cpu", 0, layout.ranks_per_node)
        named = config.topology.machine != "auto" and properties.name != "CPU"
        warning = memory_warning(layout.machine, properties.name, properties.total_memory) if named else ""
        return cls(kinds, properties.total_memory / sharers, properties.name, host, free, groups, warning)

    @property
    def tensors(self) -> float:
        """Bytes allocated throughout training."""
        return sum(value for kind, value in self.kinds.items() if kind not in ESTIMATED)

    def check(self) -> None:
        """Check that the memory fits.

        Raises:
            ValueError: Persistent tensors exceed the device memory, or offloaded state exceeds the host memory.
        """
        # On a CPU, device and host memory are the same.
        if self.tensors + (sum(self.host.values()) if self.device == "CPU" else 0) > self.capacity:
            raise ValueError(
                f"a rank needs {size_text(self.tensors)} without activations ({self._of(False)}), and {self.device} "
                f"has {size_text(self.capacity)}; raise parallelism.data_parallel_shard_degree, use a smaller model, "
                "or keep state in host memory (offload of SCAPE, host of local updates)"
            )
        if sum(self.host.values()) > self.host_capacity:
            raise ValueError(
                f"offload needs {size_text(sum(self.host.values()))} of host memory per rank "
                f"({kinds_text(self.host)}), and {size_text(self.host_capacity)} are free; offload less, raise "
                "parallelism.data_parallel_shard_degree, or use fewer ranks per node"
            )

    def lines(self) -> list[str]:
        total = sum(self.kinds.values())
        fits = "fits" if total <= self.capacity else "may not fit"
        lines = [
            f"memory per rank, predicted: {size_text(total)} of {size_text(self.capacity)} ({self.device}): {fits}",
            f"  persistent        {size_text(self.tensors)}: {self._of(False)}",
            f"  estimated         {size_text(total - self.tensors)}: {self._of(True)}",
        ]
        if self.host:
            usage = f"{size_text(sum(self.host.values()))} of {size_text(self.host_capacity)}"
            lines.append(f"  in host memory    {usage}: {kinds_text(self.host)}")
        if self.groups and self.device != "CPU":
            lines.append(
                f"  not counted       buffers of communicators: FSDP's, and {self.groups} of the replicate axis"
            )
        return lines

    def _of(self, estimated: bool) -> str:
        return kinds_text({kind: value for kind, value in self.kinds.items() if (kind in ESTIMATED) == estimated})

    def compared_with(self, peak: float) -> str:
        """Return the measured peak beside the prediction, for the summary."""
        measured = "process, libraries included" if self.device == "CPU" else "allocated"
        predicted = f"{size_text(sum(self.kinds.values()))} predicted ({size_text(self.tensors)} of it persistent)"
        return f"{size_text(peak)} peak ({measured}), {predicted}"


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
        kinds = method.device_memory(part, layout.replicate, len(layout.replica_tiers) > 1)
        own = replace(workload, layers=sum(module.startswith("layers.") for module in modules))
        size, is_last = config.parallelism.pipeline_parallel_microbatch_size, number == layout.pipeline - 1
        is_1f1b = config.parallelism.pipeline_parallel_schedule.lower() == "1f1b"
        kept = min(batches, layout.pipeline - number) if is_1f1b else batches
        gathered = (workload.entry_bytes + 4.0) * part.entries * shards / layout.tensor if shards > 1 else 0.0
        kinds["working copy"] = workload.working_bytes(shards) + gathered
        kinds["activations"] = kept * own.activation_bytes(size, output=is_last)
        stages.append((part, kinds))
    return max(stages, key=lambda one: sum(one[1].values()))


def _names_in(modules: Sequence[str], names: Sequence[str]) -> set[str]:
    return {name for name in names if any(name.startswith(f"{module}.") for module in modules)}


def check_memory(config: JobConfig, layout: Layout, device_type: str, rank: int) -> None:
    """Log and check the memory that simulated replicas need.

    Activations and FSDP's gathered weights are estimated, and only logged: they are those of one replica.

    Raises:
        ValueError: The memory exceeds the free memory; the message contains a fix.
    """
    simulated, method = config.topology.simulate_replicas, method_of(config)
    workload = workload_of(config)
    shards = layout.shard * layout.context * layout.tensor
    model = workload.local(shards)
    estimated = workload.working_bytes(shards) + workload.activation_bytes(config.training.local_batch_size)

    def needed(replicas: int) -> dict[str, float]:
        return method.simulated_memory(model, replicas)

    kinds, free = needed(simulated), device.free_memory(device_type, rank, layout.ranks_per_node)
    total = sum(kinds.values())
    message = (
        f"{simulated} simulated replicas need {size_text(total)} per rank without activations "
        f"({kinds_text(kinds)}); {size_text(free)} are free"
    )
    logger.info(f"{message}; activations and working copy need about {size_text(estimated)} more")
    if total > free and config.comm.mode != "fake_backend":
        fits = next((n for n in range(simulated - 1, 1, -1) if sum(needed(n).values()) <= free), None)
        advice = "use a smaller model or more shards" + (f", or at most {fits} replicas" if fits else "")
        raise ValueError(f"[topology] simulate_replicas = {simulated}: {message}; {advice}")
