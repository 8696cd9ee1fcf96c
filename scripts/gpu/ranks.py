"""Ranks of NCCL on one GPU: the comm streams and stages of one rank, and the loss of one of two.

NCCL refuses two ranks on one device of a host. With its own host name (NCCL_HOSTID) each rank appears to be on another
host, and ranks communicate through sockets of the loopback, so that no time here says anything about NCCL.
"""

import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scripts.common import ALONE, RunError, write
from scripts.faults.fault_runs import TINY, Launch, free_endpoint, seconds_until_gone, start_process
from scripts.gpu.machine import patience
from scripts.gpu.processes import python
from scripts.gpu.timing import find_device
from torchtitan_scape.kernels.backends import block_code
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.groups import ReplicaGroups
from torchtitan_scape.topology.layout import RankGroup
from torchtitan_scape.topology.stages import (
    all_gather_,
    all_reduce_,
    all_reduce_encoded,
    all_reduce_or_,
    reduce_scatter_,
)

STAGE_SECONDS = 30.0
BEGIN_SECONDS, GONE_SECONDS, END_SECONDS = 150.0, 15.0, 10.0  # of the lost rank


def own_host(rank: int) -> dict[str, str]:
    """Return the variables that make NCCL treat a rank as another host, reached through the loopback."""
    return {
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_MNNVL_ENABLE": "0",  # otherwise ranks of several hosts may look for each other over NVLink
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
    }


def start(timeout: timedelta) -> torch.device:
    """Create the process group; return this rank's device."""
    device = find_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    return device


def stages(result: Path, smoke: bool) -> None:
    """Run each stage of an exchange in a group of one rank, on both comm streams.

    The result must be the input, encoded and decoded if the stage has a code. Raises RunError if it is not.
    """
    os.environ |= ALONE | own_host(0)
    device = start(timedelta(seconds=patience(smoke) * STAGE_SECONDS))
    group = dist.new_group([0])
    levels = tuple(RankGroup(level, 1, 0, process_group=group) for level in ("node", "network"))
    endpoint = ReplicaCollectives(ReplicaGroups(group, None, levels=levels, comm_streams=(levels, levels)))
    code = block_code("triton" if device.type == "cuda" else "torch", "int4")
    found: dict[str, Any] = {"backend": dist.get_backend(), "ranks": 1, "stages": {}}

    def encoded(values: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(values)
        code.decode(code.encode(values.view(1, -1)), result.view(1, -1))
        return result

    x = torch.randn(1 << 20, device=device)
    once, bits = encoded(x), torch.randint(0, 256, (1 << 16,), dtype=torch.uint8, device=device)
    # The exchange, its input and its expected result.
    exchanges: dict[str, tuple[Callable[..., None], torch.Tensor, torch.Tensor]] = {
        "reduce": (lambda t, of: all_reduce_(t, of, 1.0), x, x),
        "reduce_coded": (lambda t, of: all_reduce_encoded(t, of, 1.0, code, torch.empty_like(t)), x, encoded(once)),
        "scatter": (lambda t, of: reduce_scatter_(t, of, 1.0), x, x),
        "scatter_coded": (lambda t, of: reduce_scatter_(t, of, 1.0, code, torch.empty_like(t)), x, once),
        "gather": (lambda t, of: all_gather_(t, t.clone(), of), x, x),
        "or": (all_reduce_or_, bits, bits),
    }
    for name, (exchange, given, expected) in exchanges.items():
        # Twice, once on each comm stream, before either is waited for.
        tensors = [given.clone() for _ in range(2)]
        handles = [endpoint._start(partial(exchange, t), device) for t in tensors]
        for handle in handles:
            handle.wait()
        good = found["stages"][name] = all(torch.equal(t, expected) for t in tensors)
        write(result, found)
        print(f"{name}: {'as expected' if good else 'WRONG'}", flush=True)
    dist.destroy_process_group()
    if wrong := [name for name, good in found["stages"].items() if not good]:
        raise RunError(f"not as expected: {'; '.join(wrong)}")


def lost(result: Path, smoke: bool) -> None:
    """Kill a rank of the trainer on two launchers without restarts. Raises RunError unless the other one names it."""

    def start_node(node: int, command: Sequence[str], environment: dict[str, str], log: Any) -> Any:
        return start_process(node, command, environment | own_host(node), log)

    found, more = dict[str, Any](ranks=2), patience(smoke)
    environment = {"NNODES": "2", "RDZV_ENDPOINT": free_endpoint(), "PYTHON": python()}
    environment["PET_LOCAL_ADDR"] = "127.0.0.1"  # the machine's own name may not resolve
    arguments = [*TINY, "--training.steps=100000", "--checkpoint.no-enable", "--lr_scheduler.decay_ratio=0.1"]
    with (
        tempfile.TemporaryDirectory() as folder,
        Launch(arguments, Path(folder), 2, 1, environment, start_node) as launch,
    ):
        launch.wait_until(lambda: max(launch.steps(), default=0) >= 3, more * BEGIN_SECONDS, "step 3")
        ranks = launch.ranks()
        found["step"] = max(launch.steps())
        os.kill(ranks[1], signal.SIGKILL)
        seconds = seconds_until_gone(list(ranks.values()), more * GONE_SECONDS)
        found["seconds until all ranks had ended"] = round(seconds, 2)
        write(result, found)
        found["exit codes"] = launch.wait(more * END_SECONDS)
        messages = [line for line in launch.output().splitlines() if line.startswith("error: ") or "lost" in line]
        found["lost rank named"] = any("rank 1" in line for line in messages)
        found["messages"] = messages[:6]
        write(result, found)
        print(f"gone after {found['seconds until all ranks had ended']} s: {messages[:2]}", flush=True)
    if not found["lost rank named"] or 0 in found["exit codes"]:
        raise RunError(f"exit codes {found['exit codes']}; messages: {found['messages']}")
