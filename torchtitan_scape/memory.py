"""What a rank's memory holds: predicted before anything is allocated, and the measured peak beside it."""

from dataclasses import dataclass
from typing import Any

from topology.cost import memory_bytes
from topology.layout import Layout
from torchtitan_scape.job_config import JobConfig
from torchtitan_scape.metrics import size_text
from torchtitan_scape.simulation import method_of, workload_of

# Of the model's shape and the recomputation chosen: not known as bytes of tensors are.
ESTIMATED = ("working copy", "activations")


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a rank by kind, and what its device has."""

    kinds: dict[str, float]
    capacity: float
    device: str

    @classmethod
    def of(cls, config: JobConfig, layout: Layout, device_module: Any) -> "MemoryReport":
        """The config's TrainSpec must be registered. A dry run takes the device of the machine's preset."""
        workload, method = workload_of(config), method_of(config)
        shards, block = layout.shard * layout.context * layout.tensor, config.sync.scape.block_size
        kinds = memory_bytes(method, workload, shards, layout.replicate, config.training.local_batch_size, block)
        if config.comm.mode == "fake_backend":
            preset = layout.machine.device
            return cls(kinds, preset.memory * 1e9, preset.name)
        properties = device_module.get_device_properties(device_module.current_device())
        sharers = layout.ranks_per_node if properties.name == "CPU" else 1
        return cls(kinds, properties.total_memory / sharers, properties.name)

    @property
    def tensors(self) -> float:
        """Bytes that are held from the first step to the last."""
        return sum(value for kind, value in self.kinds.items() if kind not in ESTIMATED)

    def check(self) -> None:
        """Raises ValueError where what is certain does not fit."""
        if self.tensors > self.capacity:
            raise ValueError(
                f"a rank needs {size_text(self.tensors)} without activations ({self._of(False)}), and {self.device} "
                f"has {size_text(self.capacity)} for it; raise parallelism.data_parallel_shard_degree, or take a "
                "smaller model"
            )

    def lines(self) -> list[str]:
        total = sum(self.kinds.values())
        fits = "fits" if total <= self.capacity else "may not fit"
        return [
            f"memory a rank, predicted: {size_text(total)} of {size_text(self.capacity)} ({self.device}): {fits}",
            f"  held              {size_text(self.tensors)}: {self._of(False)}",
            f"  estimated besides {size_text(total - self.tensors)}: {self._of(True)}",
        ]

    def _of(self, estimated: bool) -> str:
        chosen = {kind: value for kind, value in self.kinds.items() if (kind in ESTIMATED) == estimated}
        return ", ".join(f"{kind} {size_text(value)}" for kind, value in chosen.items())

    def line(self, peak: float) -> str:
        """Beside the measured peak, for the summary."""
        measured = "the process's, libraries included" if self.device == "CPU" else "allocated"
        predicted = f"{size_text(sum(self.kinds.values()))} predicted ({size_text(self.tensors)} of it held throughout)"
        return f"memory            {size_text(peak)} at most ({measured}), {predicted}"
