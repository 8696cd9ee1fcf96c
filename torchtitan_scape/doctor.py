"""Check of a cluster or a machine before a run: one table, and exit code 1 if something must be corrected.

torchtitan-scape doctor
torchrun --nproc_per_node=8 -m torchtitan_scape.doctor --dump-folder /scratch/run --output links.json
srun --ntasks-per-node=8 python -m torchtitan_scape.doctor

It checks packages and versions, devices, the transport of NCCL, the shared folder, clocks, the bandwidth of every pair
of nodes, the matrix products of every device, and measures the links, for the planner and the trainer.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_scape.checkpoint.storage import hosts_without, not_shared_text
from torchtitan_scape.core.command import import_advice, one_line, parser_of
from torchtitan_scape.core.device_check import check_device
from torchtitan_scape.core.files import write_whole
from torchtitan_scape.core.text import first_text
from torchtitan_scape.planner import measurement
from torchtitan_scape.runtime import nccl_log
from torchtitan_scape.runtime.rank_comparison import check_ranks_agree, code_versions
from torchtitan_scape.topology.groups import gather_lists
from torchtitan_scape.topology.layout import Layout

# Shares of the 90th percentile of pairs, and of the fastest device. One slow node is in two of three pairs of three
# nodes, so the median is no reference.
SLOW_PAIR, SLOW_DEVICE = {"cuda": 0.5, "cpu": 0.25}, {"cuda": 0.85, "cpu": 0.5}
MAX_CLOCK_SECONDS = 1.0
TIMEOUT = timedelta(seconds=180)
MODULES = ("torchtitan_scape.titan", "triton", "datasets", "tokenizers")
MAX_NAMED = 4


@dataclass(frozen=True)
class Finding:
    """The result of a check, a line of the table. `failed`: the exit code is 1. `advice`: one line per finding."""

    check: str
    result: str
    advice: tuple[str, ...] = ()
    failed: bool = False

    def __str__(self) -> str:
        state = "FAILED" if self.failed else "note" if self.advice else "ok"
        return "\n".join([f"{self.check:<12}{state:<8}{self.result}", *(f"{'':<20}-> {line}" for line in self.advice)])


class Doctor:
    """The checks. Every method is a collective call and returns an equal row on all ranks."""

    def __init__(self, options: argparse.Namespace, layout: Layout, device: torch.device, log: Path | None) -> None:
        self.options, self.layout, self.device, self.log = options, layout, device, log
        self.world = dist.get_world_size()
        self.on_host = None if device.type == "cpu" else dist.new_group(backend="gloo")
        self.hosts: list[str] = self._gathered(os.uname().nodename)
        per_node = layout.ranks_per_node
        self.nodes = [range(begin, min(begin + per_node, self.world)) for begin in range(0, self.world, per_node)]

    def _gathered(self, value: Any) -> list[Any]:
        return gather_lists(self.on_host or dist.group.WORLD, [value])

    def _by_host(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Return each different text once, with the ranks and hosts that have it."""
        lines = []
        for text in dict.fromkeys(filter(None, texts)):
            ranks = [rank for rank, own in enumerate(texts) if own == text]
            hosts = list(dict.fromkeys(self.hosts[rank] for rank in ranks))
            lines.append(f"{first_text(hosts, MAX_NAMED)} ({len(ranks)} of {self.world} ranks): {text}")
        return tuple(lines)

    def rows(self) -> list[Finding]:
        checks = [self.packages, self.devices, self.transport, self.folder, self.clocks, self.pairs, self.products]
        return [_guarded(check) for check in [*checks, self.links]]

    def packages(self) -> Finding:
        missing = []
        for name in MODULES:
            try:
                import_module(name)
            except (ImportError, RuntimeError) as error:
                missing.append(import_advice(error) if isinstance(error, ImportError) else one_line(error))
        versions = {key.removeprefix("code: "): text for key, text in code_versions().items()}
        result = ", ".join(f"{key} {text}" for key, text in versions.items() if " " not in key)
        if advice := self._by_host(self._gathered("; ".join(dict.fromkeys(missing)))):
            return Finding("packages", result, advice, failed=True)
        check_ranks_agree(code_versions(), self.device)
        return Finding("packages", result)

    def devices(self) -> Finding:
        on_gpu, error = self.device.type == "cuda", ""
        name = torch.cuda.get_device_name(self.device) if on_gpu else "CPU"
        if not on_gpu:
            try:
                check_device(self.layout.machine.name)
            except ValueError as refused:
                error = str(refused)
        names, errors = self._gathered(name), list(self._by_host(self._gathered(error)))
        if len(set(names)) > 1:
            errors += [f"the devices differ; a step waits for the slowest: {' | '.join(self._by_host(names))}"]
        if on_gpu:
            uuids = self._gathered(str(torch.cuda.get_device_properties(self.device).uuid))
            used = Counter(zip(self.hosts, uuids, strict=True))
            for (host, _), ranks in used.items():
                if ranks > 1:
                    errors.append(f"{ranks} ranks on {host} use one GPU; start one rank for each GPU, see LOCAL_RANK")
        for node in self.nodes:
            if len(hosts := {self.hosts[rank] for rank in node}) > 1:
                errors.append(f"ranks {node[0]} to {node[-1]} run on {', '.join(sorted(hosts))}; set --ranks-per-node")
        kinds = ", ".join(f"{count} x {one}" for one, count in Counter(names).items())
        result = f"{self.world} rank(s) on {len(self.nodes)} node(s): {kinds}"
        unused = torch.cuda.device_count() - 1 if on_gpu and self.world == 1 else 0
        note = (f"{unused} more GPUs are not checked; use torchrun --nproc_per_node={unused + 1}",) if unused else ()
        return Finding("devices", result, tuple(errors) or note, failed=bool(errors))

    def transport(self) -> Finding:
        if self.device.type == "cpu":
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "that of the host's name")
            return Finding("transport", f"gloo over TCP, interface: {interface}")
        dist.all_reduce(torch.ones(1 << 20, dtype=torch.float32, device=self.device))
        torch.cuda.synchronize(self.device)
        own = nccl_log.parse(self.log.read_text(errors="replace")) if self.log and self.log.exists() else None
        if own is None or not (own.kind or own.paths):
            own = nccl_log.Transport("" if self.world > 1 else "one rank", version="NCCL")
        transports = self._gathered(own)
        used = Counter(map(str, transports)).most_common(1)[0][0] or "unknown"
        advice = list(self._by_host(self._gathered(nccl_log.advice(own))))
        kinds = self._by_host([one.kind if one.uses_network else "" for one in transports])
        failed = len(kinds) > 1 or any("TCP was used" in line for line in advice)
        if len(kinds) > 1:
            advice.insert(0, f"the nodes use different networks: {' | '.join(kinds)}; compare their drivers and NCCL_*")
        return Finding("transport", f"{own.version}: {used}", tuple(advice), failed)

    def folder(self) -> Finding:
        hosts = hosts_without(self.options.dump_folder)
        advice = (not_shared_text(self.options.dump_folder, hosts),) if hosts else ()
        seen = "not shared" if hosts else "seen and writable on all nodes"
        return Finding("folder", f"{Path(self.options.dump_folder).absolute()}: {seen}", advice, failed=bool(hosts))

    def clocks(self) -> Finding:
        offsets = measurement.clock_offsets(self.on_host)
        first = {self.hosts[node[0]]: offsets[node[0]] for node in self.nodes}
        advice = tuple(
            f"{host} is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} {self.hosts[0]}; synchronize it "
            "by NTP (chronyd)"
            for host, seconds in first.items()
            if abs(seconds) > MAX_CLOCK_SECONDS
        )
        return Finding("clocks", f"at most {1e3 * max(map(abs, offsets)):.0f} ms apart", advice, failed=bool(advice))

    def pairs(self) -> Finding:
        if len(self.nodes) == 1:
            return Finding("node pairs", "one node")
        rates = measurement.pair_bandwidths(self.nodes, self.device)
        names = [self.hosts[node[0]] for node in self.nodes]
        if len(set(names)) < len(names):  # several nodes of --ranks-per-node on a host
            names = [f"{name} (rank {node[0]})" for name, node in zip(names, self.nodes, strict=True)]
        usual = sorted(rates.values())[math.ceil(0.9 * (len(rates) - 1))]
        (one, other), least = min(rates.items(), key=lambda item: item[1])
        result = f"{len(rates)} pairs, GB/s in one direction: usual {usual / 1e9:.3g}"
        result += f", least {least / 1e9:.3g} ({names[one]} and {names[other]})"
        slow = [pair for pair, rate in rates.items() if rate < SLOW_PAIR[self.device.type] * usual]
        advice = slow_pair_advice(slow, rates, names)
        return Finding("node pairs", result, advice, failed=bool(slow))

    def products(self) -> Finding:
        rates = measurement.product_rates(self.device)
        most, limit = max(rates), SLOW_DEVICE[self.device.type]
        least = min(range(self.world), key=rates.__getitem__)
        named = f"{self.hosts[least]} rank {least}"
        result = f"TFLOP/s of a device: most {most / 1e12:.3g}, least {rates[least] / 1e12:.3g} ({named})"
        on_gpu = self.device.type == "cuda"
        fix = "nvidia-smi -q -d PERFORMANCE or rocm-smi shows throttling and power limits, and who else uses it"
        fix = fix if on_gpu else "look for other programs, and for fewer cores than ranks"
        advice = tuple(
            f"{self.hosts[rank]} rank {rank} computes at {rate / most:.0%} of the fastest; {fix}"
            for rank, rate in enumerate(rates)
            if rate < limit * most
        )
        return Finding("products", result, advice, failed=on_gpu and bool(advice))

    def links(self) -> Finding:
        if self.world == 1:
            output = self.options.output
            advice = (f"{output} was not written: start two ranks or more with torchrun",) if output else ()
            return Finding("links", "one rank", advice, failed=bool(advice))
        sizes = measurement.sizes_of(self.options)
        result = measurement.measure(self.layout, self.device, sizes, TIMEOUT)
        if self.options.output and dist.get_rank() == 0:
            self.options.output.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.options.output, json.dumps(result, indent=1) + "\n")
        levels = [
            f"{name} {link['bandwidth'] / 1e9:.3g} GB/s a rank, {1e6 * link['latency']:.0f} us, "
            f"residual {link['residual']:.0%}"
            for name, link in result["levels"].items()
        ]
        text = f"{'; '.join(levels)}; memory {result['memory_bandwidth'] / 1e9:.3g} GB/s"
        return Finding("links", text, tuple(measurement.residual_advice(result).values()))


def slow_pair_advice(
    slow: Sequence[tuple[int, int]], rates: dict[tuple[int, int], float], names: Sequence[str]
) -> tuple[str, ...]:
    """Return a line for each node that is slow with most of the others, and for each other slow pair."""
    in_slow = Counter(node for pair in slow for node in pair)
    in_all = Counter(node for pair in rates for node in pair)
    nodes = [node for node in in_slow if in_all[node] > 1 and in_slow[node] > in_all[node] / 2]
    lines = [
        f"{names[node]} is slow with {in_slow[node]} of {in_all[node]} nodes: check its adapters (link speed, errors, "
        "jobs of others), or leave it out of the job"
        for node in nodes
    ]
    lines += [
        f"{names[one]} and {names[other]} exchange {rates[one, other] / 1e9:.3g} GB/s: check the switches and cables "
        "between them"
        for one, other in slow
        if one not in nodes and other not in nodes
    ]
    return tuple(lines)


def _guarded(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except (ValueError, OSError, RuntimeError) as error:
        return Finding(check.__name__, "not completed", (one_line(error)[:400],), failed=True)


def set_environment(environment: Any = os.environ) -> None:
    """Set the variables of torch.distributed for ranks that srun started, or for a single process."""
    if "RANK" in environment:
        return
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    if int(environment.get("SLURM_NTASKS", 1)) > 1 and "SLURM_STEP_NODELIST" in environment:
        environment |= {name: environment[slurm] for name, slurm in names.items()}
        shown = ["scontrol", "show", "hostnames", environment["SLURM_STEP_NODELIST"]]
        port = 20000 + int(environment.get("SLURM_JOB_ID", 0)) % 20000
        if "MASTER_ADDR" not in environment:
            environment["MASTER_ADDR"] = subprocess.run(shown, capture_output=True, text=True).stdout.split()[0]
        environment.setdefault("MASTER_PORT", str(port))
    else:
        environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def _connect(device: torch.device) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    if os.environ["WORLD_SIZE"] == "1":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, timeout=TIMEOUT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run under a launcher, as a single process, or in a process group that exists already."""
    parser = parser_of("torchtitan_scape.doctor", __doc__)
    parser.add_argument("--dump-folder", default="outputs", help="folder to check, as job.dump_folder (outputs)")
    parser.add_argument("--output", type=Path, help="JSON file for the links (none)")
    measurement.add_layout_options(parser)
    own, folder = not dist.is_initialized(), Path(tempfile.mkdtemp(prefix="scape-doctor-"))
    log = folder / "nccl.log" if own else None
    try:
        options = parser.parse_args(arguments)
        if own:
            set_environment()
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)}
        device = measurement.own_device()
        if own:
            _connect(device)
        rows = Doctor(options, measurement.layout_of(options, device), device, log).rows()
    except (ValueError, OSError, RuntimeError) as error:
        print(f"doctor: {one_line(error)}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if own and dist.is_initialized():
            dist.destroy_process_group()
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(map(str, rows)), flush=True)
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
