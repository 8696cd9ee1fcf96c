"""The transport in logs of NCCL and RCCL, in the format of their releases."""

from pathlib import Path

import pytest

from torchtitan_scape.runtime.nccl_log import Transport, advice, parse

START = "node0:71:71 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.5<0>\n"
INSIDE = "node0:71:90 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"
INFINIBAND = (
    f"{START}node0:71:71 [0] NCCL INFO NCCL version 2.27.5+cuda12.9\n"
    "node0:71:90 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.5<0>\n"
    "node0:71:90 [0] NCCL INFO Initialized NET plugin IB\n"
    "node0:71:90 [0] NCCL INFO Using network IB\n"
    f"{INSIDE}"
    "node0:71:95 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA\n"
    "node0:71:95 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA\n"
)
ROCE = INFINIBAND.replace(":1/IB", ":1/RoCE").replace("/GDRDMA", "").replace("network IB", "network IBext_v8")
SLINGSHOT = (
    f"{START}nid1:51404:52019 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.14.0\n"
    "nid1:51404:52019 [0] NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)\n"
    "nid1:51404:52019 [0] NCCL INFO Using network AWS Libfabric\n"
    "nid1:51404:52019 [0] NCCL INFO Channel 00/0 : 4[0] -> 0[0] [receive] via NET/AWS Libfabric/1/GDRDMA\n"
)
EFA = SLINGSHOT.replace("is cxi", "is efa").replace("AWS Libfabric", "Libfabric")
SOCKETS = (
    f"{START}node0:71:71 [0] NCCL INFO Failed to open libibverbs.so[.1]\n"
    "node0:71:90 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0> [1]ib0:10.1.0.5<0>\n"
    "node0:71:90 [0] NCCL INFO Using network Socket\n"
    "node0:71:95 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0\n"
)
ONE_NODE = f"{START}node0:71:90 [0] NCCL INFO [0] Using network Socket\n{INSIDE}"
TCP = SLINGSHOT.replace("is cxi", "is tcp;ofi_rxm").replace("/GDRDMA", "")


@pytest.mark.parametrize(
    "log, text",
    [
        (INFINIBAND, "InfiniBand (mlx5_0, mlx5_1), GPUDirect RDMA; P2P in a node"),
        (ROCE, "RoCE (mlx5_0, mlx5_1); P2P in a node"),
        (SLINGSHOT, "Slingshot, GPUDirect RDMA"),
        (EFA, "EFA, GPUDirect RDMA"),
        (SOCKETS, "sockets (eth0, ib0)"),
        (TCP, "libfabric tcp;ofi_rxm"),
        (ONE_NODE, "sockets, not used; P2P in a node"),
        ("", ""),
    ],
)
def test_the_transport_of_a_log(log: str, text: str) -> None:
    assert str(parse(log)) == text


def test_the_version_and_the_channels() -> None:
    found = parse(INFINIBAND)
    assert found.version == "NCCL 2.27.5+cuda12.9"
    assert dict(found.paths) == {"NET/IB/0/GDRDMA": 2, "P2P/CUMEM/read": 1}


@pytest.mark.parametrize(
    "log, adapters, fix",
    [
        (SOCKETS, ["infiniband/mlx5_0"], "the node has mlx5_0, but TCP was used: unset NCCL_IB_DISABLE"),
        (SOCKETS, ["cxi/cxi0", "infiniband/mlx5_0"], "Slingshot adapters, but TCP was used: load the site's module"),
        (TCP, ["cxi/cxi0"], "Slingshot adapters, but TCP was used"),
        (SOCKETS, ["infiniband/rdmap16s27"], "EFA adapters, but TCP was used: install aws-ofi-nccl"),
        (ROCE, ["infiniband/mlx5_0"], "data pass through host memory"),
        (SOCKETS, [], ""),
        (INFINIBAND, ["infiniband/mlx5_0"], ""),
        (ONE_NODE, ["infiniband/mlx5_0"], ""),
    ],
)
def test_advice_depends_on_the_adapters_of_the_node(log: str, adapters: list[str], fix: str, tmp_path: Path) -> None:
    for name in adapters:
        (tmp_path / "sys/class" / name).mkdir(parents=True)
    text = advice(parse(log), tmp_path)
    assert fix in text and bool(fix) == bool(text)


def test_an_unknown_network_keeps_its_name() -> None:
    assert parse("a:1:1 [0] NCCL INFO Using network Other Fabric\n") == Transport("Other Fabric")
