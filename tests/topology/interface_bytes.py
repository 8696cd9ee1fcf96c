"""Bytes that the steps of some replicas send over an interface. Runs as a script, in a network namespace of its own.

Prints for every rank: the ledger's sent and input bytes, the input bytes that intercepted collectives received, and the
bytes that crossed the interface in the same steps (of all ranks together).
"""

import ctypes
import fcntl
import json
import multiprocessing
import socket
import struct
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from tests.toy import make_scape
from torchtitan_scape.kernels.common.offload import TripleBuffer
from torchtitan_scape.topology import collectives, groups, stages

STEPS, SHAPE = 6, (2048, 512)
NO_NAMESPACE = 77  # exit code without root and user namespaces


def isolate() -> None:
    """Enter a new network namespace, so that no other traffic is counted. Exit with `NO_NAMESPACE` if it is forbidden.

    The loopback of a new namespace is down; SIOCSIFFLAGS sets IFF_UP.
    """
    unshare, network, user = ctypes.CDLL(None).unshare, 0x40000000, 0x10000000  # CLONE_NEWNET, CLONE_NEWUSER
    if unshare(network) and unshare(user | network):
        sys.exit(NO_NAMESPACE)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, 0x8914, struct.pack("16sh14x", b"lo", 1))


def interface_bytes() -> int:
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def replica(rank: int, store: str, queue: Any, world: int, density: float, update: str, code: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    parameter = nn.Parameter(torch.zeros(SHAPE))
    more: dict[str, Any] = {"offload": ["state"]} if update == "sharded" else {}
    replicas = dist.group.WORLD
    with patch.object(TripleBuffer, "saves_memory", return_value=True):  # so small a state would stay on the device
        optimizer = make_scape(
            [parameter], lr=0.1, density=density, update=update, code=code, replicas=replicas, **more
        )
    assert (optimizer.method.passes.storage.window is not None) == bool(more)
    generator = torch.Generator().manual_seed(rank)

    def step() -> None:
        parameter.grad = torch.randn(SHAPE, generator=generator)
        optimizer.step()

    step()  # the first step is dense, and opens the connections
    step()
    optimizer.finish_previous_step()
    intercepted = 0

    def counting(original: Any, argument: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal intercepted
            intercepted += args[argument].nbytes
            return original(*args, **kwargs)

        return call

    dist.all_reduce = counting(dist.all_reduce, 0)
    dist.all_to_all_single = counting(dist.all_to_all_single, 1)
    for module in (groups, collectives, stages):
        module.all_gather_into = counting(module.all_gather_into, 1)
    ledger = optimizer.collectives.ledger
    before, given = ledger.sent_by_level(), sum(ledger.input_bytes.values())
    dist.barrier()
    start = interface_bytes()
    dist.barrier()
    for _ in range(STEPS):
        step()
    optimizer.finish_previous_step()
    dist.barrier()
    moved = interface_bytes() - start
    sent = sum(ledger.sent_by_level().values()) - sum(before.values())
    given = sum(ledger.input_bytes.values()) - given
    queue.put({"sent": sent, "given": given, "intercepted": intercepted, "interface": moved})
    dist.barrier()
    dist.destroy_process_group()


def in_namespace(rank: Callable[..., None], world: int, *arguments: Any) -> list[Any]:
    """Return the results of ranks in a network namespace of their own.

    rank: Function of the rank, the file of its store, the queue of its result, and the arguments.
    """
    isolate()
    context = multiprocessing.get_context("fork")  # safe: gloo has not been initialized yet
    queue: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = f"{folder}/store", queue, *arguments
        processes = [context.Process(target=rank, args=(number, *given)) for number in range(world)]
        for process in processes:
            process.start()
        results = [queue.get(timeout=100) for _ in processes]
        for process in processes:
            process.join()
    return results


def main() -> None:
    world, density, update, code = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4]
    print(json.dumps(in_namespace(replica, world, world, density, update, code)))


if __name__ == "__main__":
    main()
