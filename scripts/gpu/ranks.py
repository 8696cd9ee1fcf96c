"""Several ranks on one GPU: SCAPE on NCCL, and the loss of a rank.

    python -m scripts.gpu.ranks exchange --result FILE    # four ranks, flat and 2 x 2; or one rank's streams and stages
    python -m scripts.gpu.ranks lost --result FILE        # SIGKILL of one of two ranks of the trainer
    python -m scripts.gpu.ranks exchange --smoke --result FILE    # both parts of it, gloo on a CPU

NCCL refuses two ranks on one device of a host. With its own host name (NCCL_HOSTID) each rank appears to be on another
host, and ranks communicate through sockets of the loopback, so that no time here says anything about NCCL. After each
case parameters and masks of all replicas must be equal bit for bit. If NCCL does not start, all stages of an exchange
run in a group of one rank instead.
"""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kernels import block_code
from scripts.common import ROOT, RunError, read, write
from scripts.faults.fault_runs import TINY, Launch, free_endpoint, seconds_until_gone
from scripts.gpu.machine import patience, python, run_step
from topology.groups import ReplicaGroups, build_groups
from topology.layout import plan_layout
from topology.machines import get_machine
from topology.process_groups import ProcessGroupCollectives
from topology.rank_group import RankGroup
from topology.stages import (
    all_gather_,
    all_reduce_,
    all_reduce_encoded,
    all_reduce_or_,
    reduce_scatter_,
    reduce_scatter_encoded,
)
from torchtitan_scape import Scape, ScapeOptions

RANKS = 4
STEPS = 4  # two of the density warm-up, two at the target
SECONDS, STREAMS_SECONDS = 150.0, 30.0  # until all ranks have ended
BEGIN_SECONDS, GONE_SECONDS, END_SECONDS = 75.0, 15.0, 10.0  # of the lost rank
SHAPES = ((1000, 512), (77, 33), (512, 96), (1, 1), (640,), (7,))
LAYOUTS = {"flat": (1, False), "2x2": (2, True)}  # ranks per node; whether exchanges go level by level
OPTIONS: dict[str, dict[str, Any]] = {
    "FP32": {},
    "coded wire": {"wire": "int4"},
    "in parts": {"chunk_bytes": 65536},
    "gather": {"update": "sharded"},
    "coded gather": {"update": "sharded", "wire": "int4", "values": "int8"},
    "BF16 gather": {"update": "sharded", "wire": "bfloat16", "values": "bfloat16"},
}


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


# ------------------------------------------------------------------------------------------- inside a rank


def start(args: argparse.Namespace, seconds: float) -> tuple[torch.device, timedelta]:
    """Create the process group; return this rank's device and the timeout."""
    on_gpu, timeout = torch.cuda.is_available(), timedelta(seconds=patience(args.smoke) * seconds)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
    return torch.device("cuda", 0) if on_gpu else torch.device("cpu"), timeout


def digest(tensors: list[torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def train(groups: ReplicaGroups, device: torch.device, options: dict[str, Any]) -> tuple[Scape, list[torch.Tensor]]:
    """Take some steps on random gradients, which differ between ranks."""
    generator = torch.Generator(device=device).manual_seed(dist.get_rank())
    parameters = [
        torch.nn.Parameter(torch.randn(shape, generator=generator, device=device))  # replica 0's are broadcast
        for shape in SHAPES
    ]
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    section = ScapeOptions(density=0.1, density_warmup_steps=2, **options)
    optimizer = Scape(named, lr=1e-2, options=section, replicas=groups)
    for _ in range(STEPS):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator, device=device)
        optimizer.step()
    optimizer.finish_previous_step()
    return optimizer, [p.detach() for p in parameters]


def run_cases(args: argparse.Namespace) -> None:
    """Run all cases on this rank; rank 0 writes the result."""
    device, timeout = start(args, SECONDS)
    found: dict[str, Any] = {"backend": dist.get_backend(), "ranks": RANKS, "cases": []}
    groups = {}
    for name, (per_node, hierarchical) in LAYOUTS.items():
        layout = plan_layout(RANKS, ranks_per_node=per_node, machine=get_machine("local"), replicate=RANKS, shard=1)
        groups[name] = build_groups(layout, timeout, hierarchical=hierarchical)
    for name, options in OPTIONS.items():
        for layout_name, own_groups in groups.items():
            begin = time.monotonic()
            optimizer, parameters = train(own_groups, device, options)
            finite = all(bool(p.isfinite().all()) for p in parameters)
            own = [digest(parameters), digest([optimizer.method.masks.in_use.bits]), finite]
            every: list[Any] = [None] * RANKS
            dist.all_gather_object(every, own)
            row = {"layout": layout_name, "case": name, "equal": all(one == every[0] for one in every) and finite}
            levels = sorted({level for _, level, _ in optimizer.collectives.ledger.sent})
            found["cases"].append(row | {"levels": levels, "seconds": round(time.monotonic() - begin, 2)})
            if dist.get_rank() == 0:
                write(args.result, found)
                print(f"{layout_name}, {name}: {'equal' if row['equal'] else 'DIFFERENT'}", flush=True)
    dist.destroy_process_group()


def run_stages(args: argparse.Namespace) -> None:
    """Run each stage of an exchange in a group of one rank, on both comm streams.

    The result must be the input, encoded and decoded if the stage has a code.
    """
    device, _ = start(args, STREAMS_SECONDS)
    group = dist.new_group([0])
    levels = tuple(RankGroup(level, 1, 0, process_group=group) for level in ("node", "network"))
    endpoint = ProcessGroupCollectives(ReplicaGroups(group, None, levels=levels, comm_streams=(levels, levels)))
    code = block_code("triton" if device.type == "cuda" else "torch", "int4")
    found: dict[str, Any] = {"backend": dist.get_backend(), "ranks": 1, "stages": {}}

    def encoded(values: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(values)
        code.decode(code.encode(values.view(1, -1)), result.view(1, -1))
        return result

    x = torch.randn(1 << 20, device=device)
    once, bits = encoded(x), torch.randint(0, 256, (1 << 16,), dtype=torch.uint8, device=device)
    stages: dict[str, tuple[Any, torch.Tensor, torch.Tensor]] = {
        "reduce": (lambda t, groups: all_reduce_(t, groups, 1.0), x, x),
        "reduce_coded": (
            lambda t, groups: all_reduce_encoded(t, groups, 1.0, code, torch.empty_like(t)),
            x,
            encoded(once),
        ),
        "scatter": (lambda t, groups: reduce_scatter_(t, groups, 1.0), x, x),
        "scatter_coded": (
            lambda t, groups: reduce_scatter_encoded(t, groups, 1.0, code, torch.empty_like(t)),
            x,
            once,
        ),
        "gather": (lambda t, groups: all_gather_(t, t.clone(), groups), x, x),
        "or": (all_reduce_or_, bits, bits),
    }
    for name, (exchange, given, expected) in stages.items():
        # Twice, once on each comm stream, before either is waited for.
        tensors = [given.clone() for _ in range(2)]
        handles = [endpoint._start(lambda groups, t=t, e=exchange: e(t, groups), device) for t in tensors]  # type: ignore[misc]
        for handle in handles:
            handle.wait()
        found["stages"][name] = all(torch.equal(t, expected) for t in tensors)
        write(args.result, found)
        print(f"{name}: {'as expected' if found['stages'][name] else 'WRONG'}", flush=True)
    dist.destroy_process_group()


# -------------------------------------------------------------------------------------------- of all ranks


def run_ranks(
    work: str, ranks: int, result: Path, seconds: float, smoke: bool, module: str = "scripts.gpu.ranks"
) -> str:
    """Run the work on all ranks; return the error, "" if there is none. A failed rank ends the others."""
    seconds *= patience(smoke)
    port, deadline = free_endpoint().partition(":")[2], time.monotonic() + seconds
    command = [python(), "-m", module, work, f"--result={result}", *(["--smoke"] if smoke else [])]
    common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    running = [
        subprocess.Popen(command, cwd=ROOT, env={**common, "RANK": str(rank), **own_host(rank)})
        for rank in range(ranks)
    ]
    try:
        while (codes := {process.poll() for process in running}) != {0}:
            if codes - {0, None}:
                return f"a rank ended with exit code {next(iter(codes - {0, None}))}; its output is in the log"
            if time.monotonic() > deadline:
                return f"not done within {seconds:g} s"
            time.sleep(0.2)
        return ""
    finally:
        for process in running:
            process.kill()
            process.wait()


def exchange(args: argparse.Namespace) -> None:
    """Run the cases on several ranks, and the stages on one if that fails. Raises RunError if anything is wrong."""
    found: dict[str, Any] = {}
    part = args.result.with_suffix(".part-result")
    found["error"] = run_ranks("cases", RANKS, part, SECONDS, args.smoke)
    found["several"] = read(part)
    write(args.result, found)
    wrong = [f"{row['layout']}, {row['case']}" for row in (found["several"] or {}).get("cases", []) if not row["equal"]]
    if found["error"]:
        print(f"{RANKS} ranks on one device: {found['error']}; one rank's streams instead", flush=True)
    if found["error"] or args.smoke:
        part.unlink(missing_ok=True)
        found["streams_error"] = run_ranks("stages", 1, part, STREAMS_SECONDS, args.smoke)
        found["streams"] = read(part)
        write(args.result, found)
        wrong += [name for name, good in (found["streams"] or {}).get("stages", {}).items() if not good]
    errors = [error for error in (found["error"], found.get("streams_error")) if error]
    if wrong:
        errors.append(f"not as expected: {'; '.join(wrong)}")
    if errors:
        raise RunError("; ".join(errors))


# ----------------------------------------------------------------------------------------------- lost rank


def start_node(node: int, command: Sequence[str], environment: dict[str, str], log: Any) -> "subprocess.Popen[Any]":
    env = {**os.environ, **environment, **own_host(node)}
    return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def lost(args: argparse.Namespace) -> None:
    """Kill a rank of the trainer on two launchers without restarts. Raises RunError unless the other one names it."""
    found, more = dict[str, Any](ranks=2), patience(args.smoke)
    environment = {"NNODES": "2", "RDZV_ENDPOINT": free_endpoint(), "PYTHON": python()}
    environment["PET_LOCAL_ADDR"] = "127.0.0.1"  # the machine's own name may not resolve
    arguments = [*TINY, "--training.steps=100000", "--checkpoint.no-enable", "--lr_scheduler.decay_ratio=0.1"]
    with (
        tempfile.TemporaryDirectory() as folder,
        Launch(arguments, Path(folder), 2, 1, environment, start_node) as launch,
    ):
        launch.wait_for_training(1, more * BEGIN_SECONDS)
        launch.wait_until(lambda: max(launch.steps(), default=0) >= 3, more * BEGIN_SECONDS, "step 3")
        ranks = launch.ranks()
        found["step"] = max(launch.steps())
        os.kill(ranks[1], signal.SIGKILL)
        seconds = seconds_until_gone(list(ranks.values()), more * GONE_SECONDS)
        found["seconds until all ranks had ended"] = round(seconds, 2)
        write(args.result, found)
        found["exit codes"] = launch.wait(more * END_SECONDS)
        messages = [line for line in launch.output().splitlines() if line.startswith("error: ") or "lost" in line]
        found["lost rank named"] = any("rank 1" in line for line in messages)
        found["messages"] = messages[:6]
        write(args.result, found)
        print(f"gone after {found['seconds until all ranks had ended']} s: {messages[:2]}", flush=True)
    if not found["lost rank named"] or 0 in found["exit codes"]:
        raise RunError(f"exit codes {found['exit codes']}; messages: {found['messages']}")


WORK = {"exchange": exchange, "lost": lost, "cases": run_cases, "stages": run_stages}

if __name__ == "__main__":
    sys.exit(run_step(__doc__, lambda args: WORK[args.work](args), work_=dict(choices=[*WORK])))
