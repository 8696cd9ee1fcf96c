"""Machine presets: ranks per node, the device of a rank, and the links between ranks, innermost first.

Numbers are nominal and come from the named sources. Measurements on the machine itself are more accurate.
"""

from dataclasses import dataclass

GIB = 2**30 / 1e9  # GB
ASSUMED_STORAGE = 10.0  # GB/s of a shared file system, where no figure is known
MEMORY_TOLERANCE = 0.03  # drivers keep different parts of a device's memory for themselves
MEMORY_EFFICIENCY = 0.7  # share of the nominal memory bandwidth that an optimizer's passes reach, if not measured


@dataclass(frozen=True)
class Level:
    """Kind of link between ranks.

    Attributes:
        name: "gcd_pair", "node" or "network".
        ranks: Ranks in one unit of this level; 0 for any number.
        bandwidth: GB/s (1e9 bytes) that one rank sends, in one direction.
        latency: Microseconds for a small message.
    """

    name: str
    ranks: int
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Device:
    """Device of one rank.

    Attributes:
        name: Name of the device.
        memory: GB (1e9 bytes) of device memory, as the device reports it.
        memory_bandwidth: GB/s, nominal, reads and writes together.
        peak: TFLOP/s of dense BF16 matrix products, nominal.
        source: Origin of the numbers.
        host_memory: GB of host memory per rank.
        host_link: GB/s between host and device, in one direction, nominal.
        runtime: "CUDA" or "ROCm"; "" for a CPU.
    """

    name: str
    memory: float
    memory_bandwidth: float
    peak: float
    source: str
    host_memory: float
    host_link: float
    runtime: str = "CUDA"


_A100 = Device(
    "A100 80GB",
    79.25 * GIB,
    2000.0,
    312.0,
    "NVIDIA A100 data sheet, 80 GB SXM model (2,039 GB/s, rounded down), PCIe 4.0; an eighth of a DGX's 2 TB; memory "
    "as PyTorch reports it (levihsu/OOTDiffusion, issue 235, 2025-03)",
    host_memory=250.0,
    host_link=31.5,
)
ASSUMED_CORE = Device(
    "one core", 8.0, 10.0, 0.05, "assumed: a core of a laptop, its share of the memory", 8.0, 10.0, ""
)


@dataclass(frozen=True)
class Machine:
    """A kind of node and its links.

    Attributes:
        name: Name of the preset.
        ranks_per_node: Ranks per node; 0 if the launcher determines it.
        levels: Links, innermost first.
        source: Origin of the numbers.
        device: Device of a rank.
        measured: Origin of measured links, see `topology.links.with_measured_links`; "" if they are nominal.
        storage: GB/s that all nodes together write to the shared file system, at its peak; 0 if it is not known.
    """

    name: str
    ranks_per_node: int
    levels: tuple[Level, ...]
    source: str
    device: Device = ASSUMED_CORE
    measured: str = ""
    storage: float = 0.0


MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            "vista",
            ranks_per_node=1,
            levels=(Level("node", 1, 450.0, 2.0), Level("network", 0, 50.0, 5.0)),
            source="SCAPE paper, Section V-A: one GH200 a node, NDR 400 Gb/s InfiniBand; NVLink-C2C 900 GB/s both "
            "ways. Latencies are assumed",
            device=Device(
                "GH200",
                94.88 * GIB,
                4000.0,
                989.0,
                "NVIDIA GH200 data sheet, 96 GB HBM3 model, which are GiB: nvidia-smi lists 97,871 MiB and PyTorch "
                "94.88 GiB (Lightning-AI/litgpt, issue 1892, 2024-12); dense BF16 of its H100 part; 116 GB of host "
                "memory (TACC, Vista User Guide, table 2, 2026-11); NVLink-C2C 900 GB/s both ways (Cornell Virtual "
                "Workshop on Vista)",
                host_memory=116.0,
                host_link=450.0,
            ),
        ),
        Machine(
            "frontier",
            ranks_per_node=8,
            levels=(
                Level("gcd_pair", 2, 200.0, 2.0),
                Level("node", 8, 50.0, 3.0),
                Level("network", 0, 12.5, 5.0),
            ),
            source="Low-bandwidth partitioning paper, Table II and Section IV: 200 GB/s between the GCDs of a GPU, "
            "Infinity Fabric 50 GB/s between GPUs of a node, four 200 Gb/s Slingshot-11 NICs for eight GCDs. "
            "Latencies are assumed. Orion's capacity tier writes 4.6 TB/s at its peak (OLCF, 2021-05)",
            storage=4600.0,
            device=Device(
                "MI250X GCD",
                64 * GIB,
                1600.0,
                191.5,
                "AMD MI250X data sheet, half of 128 GB (GiB), 3.2 TB/s and 383 TFLOP/s: a GCD is half a package; "
                "Frontier User Guide: 512 GB a node, 36 GB/s each way between CPU and GCD",
                host_memory=64.0,
                host_link=36.0,
                runtime="ROCm",
            ),
        ),
        Machine(
            "dgx-a100",
            ranks_per_node=8,
            levels=(Level("node", 8, 300.0, 2.0), Level("network", 0, 25.0, 5.0)),
            source="Low-bandwidth partitioning paper, Table I: NVLink 600 GB/s both ways, eight 200 Gb/s HDR ports a "
            "node. Latencies are assumed",
            device=_A100,
        ),
        Machine(
            "dgx-h100",
            ranks_per_node=8,
            levels=(Level("node", 8, 450.0, 2.0), Level("network", 0, 50.0, 5.0)),
            source="NVIDIA DGX H100 data sheet: NVLink 900 GB/s both ways, eight 400 Gb/s ConnectX-7 ports a node. "
            "Latencies are assumed",
            device=Device(
                "H100 80GB",
                85.0,
                3350.0,
                989.0,
                "NVIDIA H100 data sheet, SXM model: 3.35 TB/s, dense BF16, PCIe 5.0; an eighth of a DGX's 2 TB; memory "
                "as in results/gpu",
                host_memory=250.0,
                host_link=63.0,
            ),
        ),
        Machine(
            "dgx-h200",
            ranks_per_node=8,
            levels=(Level("node", 8, 450.0, 2.0), Level("network", 0, 50.0, 5.0)),
            source="NVIDIA DGX H200 data sheet: NVLink 900 GB/s both ways, eight 400 Gb/s ConnectX-7 ports a node. "
            "Latencies are assumed",
            device=Device(
                "H200",
                150.1,
                4800.0,
                989.0,
                "NVIDIA H200 data sheet, SXM model: 4.8 TB/s, dense BF16, PCIe 5.0; an eighth of a DGX's 2 TB; memory "
                "as in results/gpu",
                host_memory=250.0,
                host_link=63.0,
            ),
        ),
        Machine(
            "ethernet-10g",
            ranks_per_node=1,
            levels=(Level("node", 1, 300.0, 2.0), Level("network", 0, 1.25, 40.0)),
            source="assumed: one GPU a node, 10 Gb/s Ethernet through one switch, TCP at line rate, 40 us for a small "
            "message",
            device=_A100,
        ),
        Machine(
            "local",
            ranks_per_node=0,
            levels=(Level("node", 0, 10.0, 10.0), Level("network", 0, 1.0, 50.0)),
            source="assumed: one host, processes over memory or loopback",
        ),
    )
}


def get_machine(name: str) -> Machine:
    """Return the preset of that name. Raises ValueError, which lists all names, if there is none."""
    if name not in MACHINES:
        raise ValueError(f"there is no machine preset {name!r}; known are {', '.join(MACHINES)}")
    return MACHINES[name]


def memory_warning(machine: Machine, device: str, memory: float) -> str:
    """Return a warning if a device, with so many bytes of memory, is not that of the machine; "" otherwise."""
    found, expected = memory / 1e9, machine.device.memory
    if abs(found - expected) <= MEMORY_TOLERANCE * expected:
        return ""
    return (
        f'[topology] machine = "{machine.name}" has {machine.device.name} with {expected:.1f} GB of memory, and this '
        f"{device} has {found:.1f} GB: predictions for {machine.name} do not hold here; set another machine, or "
        '"auto"'
    )


def detect_machine(device_name: str) -> str:
    """Return the name of the preset for the name of an accelerator; "local" if no preset matches."""
    parts = {"GH200": "vista", "MI250X": "frontier", "A100": "dgx-a100", "H100": "dgx-h100", "H200": "dgx-h200"}
    return next((name for part, name in parts.items() if part in device_name), "local")
