"""The transport that NCCL or RCCL used, from its log with NCCL_DEBUG=INFO."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_NETWORK = re.compile(r"(?m)NCCL INFO (?:\[.*?\] )?Using network (.+?)\s*$")
_CHANNEL = re.compile(r"NCCL INFO Channel \d+(?:/\d+)? ?: .*?-> .*? via ([^\s\[]+(?: Libfabric[^\s\[]*)?)")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w;]+)")
_ADAPTERS = re.compile(r"NET/(?:IB|Socket) ?: Using (\[0\].*)")
_ADAPTER = re.compile(r"\[\d+\]([^\s:]+)(?::\d+/(\w+))?")
_VERSION = re.compile(r"(R?NCCL) version ?:? ?([\w.+-]+)")
_OFI = {"efa": "EFA", "cxi": "Slingshot"}


@dataclass(frozen=True)
class Transport:
    """Transport of a rank: "InfiniBand", "RoCE", "Slingshot", "EFA", "libfabric PROVIDER", "sockets", the name of
    another network plugin, or "" if the log names none; and the number of channels by path, such as "NET/IB/0/GDRDMA",
    "P2P/CUMEM" and "SHM/direct/direct".
    """

    kind: str
    adapters: tuple[str, ...] = ()
    paths: tuple[tuple[str, int], ...] = ()
    version: str = ""

    @property
    def uses_network(self) -> bool:
        """Whether a channel of this rank leaves the node."""
        return any(path.startswith("NET/") for path, _ in self.paths)

    @property
    def gpu_direct(self) -> bool:
        """Whether all channels over the network read and write GPU memory directly (GPUDirect RDMA)."""
        return all("GDRDMA" in path for path, _ in self.paths if path.startswith("NET/"))

    def __str__(self) -> str:
        inside = ", ".join(sorted({path.split("/")[0] for path, _ in self.paths if not path.startswith("NET/")}))
        direct = ", GPUDirect RDMA" if self.uses_network and self.gpu_direct else ""
        between = f"{self.kind} ({', '.join(self.adapters)}){direct}" if self.adapters else f"{self.kind}{direct}"
        used = between if self.uses_network else f"{between}, not used"
        return "; ".join(part for part in (used if self.kind else "", inside and f"{inside} in a node") if part)


def parse(log: str) -> Transport:
    """Return the transport in the log of a rank; that of the communicator that was created last."""
    networks, channels = _NETWORK.findall(log), _CHANNEL.findall(log)
    adapters = [_ADAPTER.findall(line) for line in _ADAPTERS.findall(log)]
    names = tuple(dict.fromkeys(name for pairs in adapters for name, _ in pairs))
    links = {link for pairs in adapters for _, link in pairs if link}
    version = _VERSION.search(log)
    kind = _kind(networks[-1] if networks else "", _PROVIDER.findall(log), links)
    paths = tuple(Counter(channels).most_common())
    return Transport(kind, names, paths, f"{version[1]} {version[2]}" if version else "")


def _kind(network: str, providers: list[str], links: set[str]) -> str:
    lower = network.lower()
    if lower.startswith("ib"):  # IB, and IBext_v8 of NVIDIA's plugin
        return "RoCE" if "RoCE" in links else "InfiniBand"
    if "socket" in lower:
        return "sockets"
    if "libfabric" in lower or "ofi" in lower:
        provider = providers[-1] if providers else ""
        return _OFI.get(provider, f"libfabric {provider}".strip())
    return network


def advice(transport: Transport, root: Path = Path("/")) -> str:
    """Return why the transport between nodes is slower than the adapters allow, and the fix; "" if unknown."""
    if not transport.uses_network:
        return ""
    slow = transport.kind == "sockets" or transport.kind.startswith("libfabric tcp")
    adapters = sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))
    if slow and any((root / "sys/class/cxi").glob("*")):
        return (
            "the node has Slingshot adapters, but TCP was used: load the site's module of aws-ofi-nccl (aws-ofi-rccl), "
            "and set NCCL_NET='AWS Libfabric', with which NCCL stops instead of using TCP"
        )
    if slow and any(name.startswith(("efa", "rdmap")) for name in adapters):
        return "the node has EFA adapters, but TCP was used: install aws-ofi-nccl, and put it on LD_LIBRARY_PATH"
    if slow and adapters:
        return (
            f"the node has {', '.join(adapters[:4])}, but TCP was used: unset NCCL_IB_DISABLE, install libibverbs (in "
            "a container too, with /dev/infiniband), and set NCCL_NET=IB, with which NCCL stops instead of using TCP"
        )
    if not slow and not transport.gpu_direct:
        return (
            "data pass through host memory: for GPUDirect RDMA load nvidia-peermem or use DMA-BUF, and check "
            "NCCL_NET_GDR_LEVEL"
        )
    return ""
