"""What a rank's memory holds: predicted before anything is allocated, and the measured peak beside it."""

from dataclasses import dataclass, field, replace
from typing import Any

from topology.groups import most_groups
from topology.layout import Layout
from torchtitan_scape.config.job_config import JobConfig, options_of
from torchtitan_scape.core.text import kinds_text, size_text
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.report.forecast import levels_of, method_of, shard_axis_of, workload_of
from torchtitan_scape.sharding.cost import shard_memory
from torchtitan_scape.titan import device

# Of the model's shape and the recomputation chosen: not known as bytes of tensors are.
ESTIMATED = ("working copy", "activations", "shard messages")


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a rank by kind, and what its device has.

    host: what is offloaded, by kind; host_capacity: bytes of host memory for it.
    against: a line that compares with SCAPE's plain form; empty for that one and for dense training.
    groups: of ranks, each with a communicator of its own, that the replicate axis makes. What the library keeps for one
        is not counted: it grows with channels and peers, which NCCL chooses (https://github.com/NVIDIA/nccl/issues/864).
    """

    kinds: dict[str, float]
    capacity: float
    device: str
    host: dict[str, float] = field(default_factory=dict)
    host_capacity: float = 0.0
    against: str = ""
    groups: int = 0

    @classmethod
    def of(cls, config: JobConfig, layout: Layout, device_module: Any) -> "MemoryReport":
        """The config's TrainSpec must be registered. A dry run takes the device of the machine's preset."""
        workload, method = workload_of(config), method_of(config)
        levels = levels_of(config, layout)
        shards = levels.spread if levels else layout.shard * layout.context * layout.tensor

        def kinds_of(method: PlannedRun) -> dict[str, float]:
            kinds = method.total_memory(workload, shards, layout.replicate, config.training.local_batch_size)
            return levels.memory(workload.shapes(), kinds) if levels else kinds

        model = workload.local(shards)
        plan, rows = shard_axis_of(config, layout, on_cpu=False)
        kinds = kinds_of(method) | ({} if levels else shard_memory(plan, rows, layout))
        host = method.host_memory(model, layout.replicate)
        preset, against = layout.machine.device, ""
        hierarchical = config.topology.exchange == "hierarchical"
        groups = most_groups(layout, hierarchical, options_of(config.sync).needs_comm_streams())
        plain = replace(method, options=method.options.without_memory_savings())
        if method != plain:
            saved = sum(kinds_of(plain).values()) - sum(kinds_of(method).values())
            than = "a replicated update with FP32 weights and nothing offloaded"
            against = f"{size_text(abs(saved))} {'less' if saved >= 0 else 'more'} than {than}"
            if moved := sum(method.host_link_traffic(model, layout.replicate)):
                seconds = moved / (preset.host_link * 1e9)
                against += (
                    f"; {size_text(moved)} to and from the host a step, {seconds:.3g} s at {preset.host_link:g} GB/s "
                    f"({layout.machine.name}, nominal), beside passes as far as these take time"
                )
        if config.comm.mode == "fake_backend":
            return cls(kinds, preset.memory * 1e9, preset.name, host, preset.host_memory * 1e9, against, groups)
        properties = device_module.get_device_properties(device_module.current_device())
        sharers = layout.ranks_per_node if properties.name == "CPU" else 1
        free = device.free_memory("cpu", 0, layout.ranks_per_node)
        return cls(kinds, properties.total_memory / sharers, properties.name, host, free, against, groups)

    @property
    def tensors(self) -> float:
        """Bytes that are held from the first step to the last."""
        return sum(value for kind, value in self.kinds.items() if kind not in ESTIMATED)

    def check(self) -> None:
        """Raises ValueError where what is certain does not fit."""
        # A CPU's memory is the host's.
        if self.tensors + (sum(self.host.values()) if self.device == "CPU" else 0) > self.capacity:
            raise ValueError(
                f"a rank needs {size_text(self.tensors)} without activations ({self._of(False)}), and {self.device} "
                f"has {size_text(self.capacity)} for it; raise parallelism.data_parallel_shard_degree, take a smaller "
                "model, or keep state in host memory (offload of SCAPE, host of local updates)"
            )
        if sum(self.host.values()) > self.host_capacity:
            raise ValueError(
                f"offload needs {size_text(sum(self.host.values()))} of host memory a rank "
                f"({kinds_text(self.host)}), and {size_text(self.host_capacity)} are free for it; offload less, raise "
                "parallelism.data_parallel_shard_degree, or put fewer ranks on a node"
            )

    def lines(self) -> list[str]:
        total = sum(self.kinds.values())
        fits = "fits" if total <= self.capacity else "may not fit"
        lines = [
            f"memory a rank, predicted: {size_text(total)} of {size_text(self.capacity)} ({self.device}): {fits}",
            f"  held              {size_text(self.tensors)}: {self._of(False)}",
            f"  estimated besides {size_text(total - self.tensors)}: {self._of(True)}",
        ]
        if self.host:
            of = f"{size_text(sum(self.host.values()))} of {size_text(self.host_capacity)}"
            lines.append(f"  in host memory    {of}: {kinds_text(self.host)}")
        if self.groups and self.device != "CPU":
            lines.append(
                f"  not counted       what communicators keep: FSDP's, and {self.groups} of the replicate axis"
            )
        return lines + ([f"  that is           {self.against}"] if self.against else [])

    def _of(self, estimated: bool) -> str:
        return kinds_text({kind: value for kind, value in self.kinds.items() if (kind in ESTIMATED) == estimated})

    def line(self, peak: float) -> str:
        """Beside the measured peak, for the summary."""
        measured = "the process's, libraries included" if self.device == "CPU" else "allocated"
        predicted = f"{size_text(sum(self.kinds.values()))} predicted ({size_text(self.tensors)} of it held throughout)"
        return f"memory            {size_text(peak)} at most ({measured}), {predicted}"
