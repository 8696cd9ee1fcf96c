"""SCAPE on NCCL: four ranks on one GPU, flat and 2 x 2; where NCCL will not have that, one rank's lanes and stages.

    python -m scripts.gpu.ranks --result FILE
    python -m scripts.gpu.ranks --smoke --result FILE    # gloo on a CPU, both of it

NCCL refuses two ranks on one device of a host. With a host's name of its own (NCCL_HOSTID) each rank believes itself
on another one, and they talk through sockets of the loopback: slowly, so that no time here says anything of NCCL.
After every case parameters and masks of all replicas are compared, bit for bit.
"""

import argparse
import hashlib
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kernels import block_code
from scripts.common import ROOT, RunError, guarded, parser, read, write
from scripts.gpu.machine import patience
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
STEPS = 4  # two on the density's way down, two at the target
SECONDS, LANES_SECONDS = 150.0, 30.0  # to the end of all ranks: one that hangs shall not take the other's time
SHAPES = ((1000, 512), (77, 33), (512, 96), (1, 1), (640,), (7,))
# Layout: ranks a node, and whether exchanges go level by level.
LAYOUTS = {"flat": (1, False), "2x2": (2, True)}
OPTIONS: dict[str, dict[str, Any]] = {
    "FP32": {},
    "coded wire": {"wire": "int4"},
    "in parts": {"chunk_bytes": 65536},
    "gather": {"update": "sharded"},
    "coded gather": {"update": "sharded", "wire": "int4", "values": "int8"},
    "BF16 gather": {"update": "sharded", "wire": "bfloat16", "values": "bfloat16"},
}


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Of a rank that believes itself on a host of its own."""
    own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**os.environ, **own, **nccl_alone(rank)}


def nccl_alone(rank: int) -> dict[str, str]:
    """What makes NCCL take a rank for one of another host, reached through the loopback."""
    return {
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_MNNVL_ENABLE": "0",  # else ranks of several hosts may look for each other over NVLink
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


# ------------------------------------------------------------------------------------------------ of a rank


def digest(tensors: list[torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def train(groups: ReplicaGroups, device: torch.device, options: dict[str, Any]) -> tuple[Scape, list[torch.Tensor]]:
    """Some steps on random gradients, another replica's on every rank."""
    generator = torch.Generator(device=device).manual_seed(dist.get_rank())
    parameters = [
        torch.nn.Parameter(torch.randn(shape, generator=generator, device=device))  # replica 0's count
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


def rank_main(args: argparse.Namespace) -> None:
    """All cases on this rank; rank 0 writes what was found."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    timeout = timedelta(seconds=patience(args.smoke) * SECONDS)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
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


def lanes_main(args: argparse.Namespace) -> None:
    """Every stage of an exchange in a group of one rank, through the lanes' streams: what comes back is what went in,
    or what its code leaves of it."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", timeout=timedelta(seconds=patience(args.smoke) * LANES_SECONDS)
    )
    group = dist.new_group([0])
    levels = tuple(RankGroup(level, 1, 0, process_group=group) for level in ("node", "network"))
    endpoint = ProcessGroupCollectives(ReplicaGroups(group, None, levels=levels, comm_streams=(levels, levels)))
    code = block_code("triton" if on_gpu else "torch", "int4")
    found: dict[str, Any] = {"backend": dist.get_backend(), "ranks": 1, "stages": {}}
    x = torch.randn(1 << 20, device=device)
    coded = torch.empty_like(x)
    code.decode(code.encode(x.view(1, -1)), coded.view(1, -1))
    twice = torch.empty_like(x)
    code.decode(code.encode(coded.view(1, -1)), twice.view(1, -1))
    bits = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8, device=device)
    for name, exchange, given, expected in (
        ("reduce", lambda t, groups: all_reduce_(t, groups, 1.0), x, x),
        ("reduce_coded", lambda t, groups: all_reduce_encoded(t, groups, 1.0, code, torch.empty_like(t)), x, twice),
        ("scatter", lambda t, groups: reduce_scatter_(t, groups, 1.0), x, x),
        (
            "scatter_coded",
            lambda t, groups: reduce_scatter_encoded(t, groups, 1.0, code, torch.empty_like(t)),
            x,
            coded,
        ),
        ("gather", lambda t, groups: all_gather_(t, t.clone(), groups), x, x),
        ("unite", all_reduce_or_, bits, bits),
    ):
        # Twice, one in each lane, before either is waited for.
        tensors = [given.clone() for _ in range(2)]
        handles = [endpoint._start(lambda groups, t=t, e=exchange: e(t, groups), device) for t in tensors]  # type: ignore[misc]
        for handle in handles:
            handle.wait()
        found["stages"][name] = all(torch.equal(t, expected) for t in tensors)
        write(args.result, found)
        print(f"{name}: {'as expected' if found['stages'][name] else 'WRONG'}", flush=True)
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------- of all ranks


def together(role: str, ranks: int, result: Path, seconds: float, smoke: bool) -> str:
    """Runs them; "" or what went wrong. One that fails ends all."""
    seconds *= patience(smoke)
    port, deadline = free_port(), time.monotonic() + seconds
    command = [os.environ.get("PYTHON", sys.executable), "-m", "scripts.gpu.ranks", f"--role={role}"]
    command += [f"--result={result}", *(["--smoke"] if smoke else [])]
    running = [subprocess.Popen(command, cwd=ROOT, env=environment(rank, ranks, port)) for rank in range(ranks)]
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


def run(args: argparse.Namespace) -> None:
    parts = {"ranks": args.result.with_suffix(".ranks"), "lanes": args.result.with_suffix(".lanes")}
    found: dict[str, Any] = {}
    found["error"] = together("rank", RANKS, parts["ranks"], SECONDS, args.smoke)
    found["several"] = read(parts["ranks"])
    write(args.result, found)
    wrong = [f"{row['layout']}, {row['case']}" for row in (found["several"] or {}).get("cases", []) if not row["equal"]]
    if found["error"]:
        print(f"{RANKS} ranks on one device: {found['error']}; one rank's lanes instead", flush=True)
    if found["error"] or args.smoke:
        found["lanes_error"] = together("lanes", 1, parts["lanes"], LANES_SECONDS, args.smoke)
        found["lanes"] = read(parts["lanes"])
        write(args.result, found)
        wrong += [name for name, good in (found["lanes"] or {}).get("stages", {}).items() if not good]
    errors = [error for error in (found["error"], found.get("lanes_error")) if error]
    if wrong:
        errors.append(f"not as expected: {'; '.join(wrong)}")
    if errors:
        raise RunError("; ".join(errors))


def main() -> int:
    own = parser(__doc__)
    own.add_argument("--result", type=Path, required=True)
    own.add_argument("--role", choices=["all", "rank", "lanes"], default="all", help=argparse.SUPPRESS)
    own.add_argument("--smoke", action="store_true", help="one rank's lanes besides, on whatever device there is")
    args = own.parse_args()
    work = {"all": run, "rank": rank_main, "lanes": lanes_main}[args.role]
    return guarded(lambda: work(args))


if __name__ == "__main__":
    sys.exit(main())
