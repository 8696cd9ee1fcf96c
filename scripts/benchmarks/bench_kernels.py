"""Times the passes of an optimizer step on a GPU, beside fused AdamW, dense AdamS and plain PyTorch.

    python -m scripts.benchmarks.bench_kernels  # both Llamas at 0.1 and 0.01, all in one run
    python -m scripts.benchmarks.bench_kernels --model llama-1.8b --sweep     # also other tiles, for tuning
    TRITON_INTERPRET=1 python -m scripts.benchmarks.bench_kernels --smoke     # whether the script itself runs, anywhere

Per kernel: milliseconds (median of --repeat, after warm-up), the bytes it cannot do without, and GB/s on them over what
a copy reaches on this machine; select is what packing takes longer with it. Writes results/bench_kernels/table.md and
bench.json. The step is that of one of 8 replicas, without its exchange. Memory is the peak over dense AdamS's, in
training steps from the first on.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.common.rates import Rates
from kernels.dense.triton_passes import Finite, TritonAdams
from kernels.scape import triton_passes as tiles
from kernels.scape.blocks import BlockLayout, Mask, entries_per_block
from kernels.scape.passes import ScapePasses, pack_all, squares_all, update_all
from kernels.scape.step import Plan, Step
from kernels.scape.torch_updates import torch_passes
from kernels.scape.triton_updates import triton_passes
from kernels.scape.updaters import Replicated
from kernels.scape.visits import Staleness
from torchtitan_scape.planner.scape_volumes import kernel_bytes
from torchtitan_scape.planner.volumes import Method

ROOT = Path(__file__).resolve().parents[2]
REPLICAS = 8
RATES = Rates(lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def llama(layers: int, width: int, kv_share: int, hidden: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Parameter shapes; the models of the SCAPE paper (Section V), untied embeddings."""
    kv = width // kv_share
    layer = [(width, width), (kv, width), (kv, width), (width, width)]
    layer += [(hidden, width), (width, hidden), (hidden, width), (width,), (width,)]
    return [(vocabulary, width), *(layer * layers), (width,), (vocabulary, width)]


MODELS = {
    "llama-500m": llama(16, 1536, 2, 4096, 32000),
    "llama-1.8b": llama(24, 2560, 4, 6912, 32000),
    "smoke": [(70, 40), (3, 1024), (40,)],
}


class Clock:
    """Median milliseconds of a call."""

    def __init__(self, device: torch.device, repeat: int) -> None:
        self.cuda, self.repeat = device.type == "cuda", repeat

    def __call__(self, work: Callable[[], Any]) -> float:
        for _ in range(min(3, self.repeat)):
            work()
        times = []
        for _ in range(self.repeat):
            if self.cuda:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                work()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
            else:
                begin = time.perf_counter()
                work()
                times.append(1e3 * (time.perf_counter() - begin))
        return sorted(times)[len(times) // 2]


def copy_bandwidth(clock: Clock, device: torch.device, gigabytes: float) -> float:
    """Bytes a second, read and written, of a device-to-device copy."""
    source = torch.rand(int(gigabytes * 2**28), device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (clock(lambda: target.copy_(source)) / 1e3)


def sizes_of(shapes: list[tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Entries of the sparsified tensors, and of those that are sent whole."""
    sparse = tuple(torch.Size(s).numel() for s in shapes if len(s) > 1)
    return sparse, tuple(torch.Size(s).numel() for s in shapes if len(s) == 1)


class Bench:
    """One model at one density: state, masks, gradients, and the passes over them."""

    def __init__(self, shapes: list[tuple[int, ...]], density: float, device: torch.device) -> None:
        sparse, whole = sizes_of(shapes)
        self.density, self.device = density, device
        self.layout = BlockLayout(sparse, 1024, REPLICAS)
        columns = tuple(s[1] for s in shapes if len(s) > 1)
        staleness = Staleness(columns, keeps=0.5)
        plan = Plan("block", density, REPLICAS // 2)
        self.passes = triton_passes(Replicated(self.layout, whole), plan, device, staleness=staleness)
        self.parameters = [torch.randn(n, device=device) for n in (*sparse, *whole)]
        self.gradients = [torch.randn(n, device=device) * 1e-3 for n in (*sparse, *whole)]
        self.applied = torch.ones((), dtype=torch.bool, device=device)
        self.steps = torch.full((), 100.0, dtype=torch.float64, device=device)
        self.clip = torch.full((), 0.5, device=device)
        self.in_use, self.previous = (self._mask(seed) for seed in (1, 2))
        self._finite = Finite()
        self._spare = [self.in_use.bits.clone(), self.previous.bits.clone()]
        self.bind(density)

    def bind(self, next_density: float) -> None:
        self.passes.bind(self.step_of(self.parameters, self.gradients, self.in_use, self.previous, next_density))

    def step_of(
        self, parameters: list[Tensor], gradients: list[Tensor], in_use: Mask, previous: Mask, next_density: float
    ) -> Step:
        rates = [RATES] * len(parameters)
        return Step(parameters, gradients, rates, in_use, previous, next_density, self.applied, self.steps, self.clip)

    def _mask(self, seed: int) -> Mask:
        """A mask as selection makes it, from random moments."""
        layout, device = self.layout, self.device
        bits = [torch.zeros(-(-layout.mask_bytes() // 4) * 4, dtype=torch.uint8, device=device) for _ in range(2)]
        bits = [b[: layout.mask_bytes()] for b in bits]
        every = triton_passes(Replicated(layout, ()), Plan("block", 1.0, None), device)  # selects in every run
        dense = Mask(bits[1], 1.0)
        torch.manual_seed(seed)
        moments = [torch.randn(n, device=device) for n in layout.sizes]
        every.bind(self.step_of([m.clone() for m in moments], moments, dense, dense, self.density))
        received = pack_all(every)
        every.rotate(received, self.density, bits[0], bits[1])
        return Mask(bits[0], self.density)

    def times(self, clock: Clock) -> dict[str, float]:
        p = self.passes
        self.bind(1.0)  # selects nothing
        found = {
            "finite": clock(lambda: self._finite(self.gradients)),
            "pack": clock(lambda: pack_all(p)),
            "squares": clock(lambda: squares_all(p)),
            "update": clock(lambda: update_all(p)),
            "pack + update": clock(self.pack_and_update),
        }
        self.bind(self.density)
        found["pack + select"] = clock(lambda: pack_all(p))
        found["whole step"] = clock(self.step)
        found["select"] = found["pack + select"] - found["pack"]
        self.bind(self.density)
        wire = pack_all(p)
        assert wire is not None
        received = wire.repeat(REPLICAS)
        found["rotate"] = clock(lambda: p.rotate(received, self.density, *self._spare))
        return found

    def pack_and_update(self) -> None:
        pack_all(self.passes)
        update_all(self.passes)

    def step(self) -> None:
        """All that a rank does in a step, its exchange left out; the received masks are its own, repeated."""
        p = self.passes
        self._finite(self.gradients)
        self.bind(self.density)
        wire = pack_all(p)
        squares_all(p)
        update_all(p)
        p.release()
        assert wire is not None
        p.rotate(wire.repeat(REPLICAS), self.density, *self._spare)

    def topk_time(self, clock: Clock) -> float:
        """torch.topk on the moments of the own run, block by block."""
        work: list[tuple[Tensor, int]] = []
        for i in range(self.passes.sparsified):
            start, end = self.layout.owned(i, self.passes.first_run)
            values = self.gradients[i][start:end].abs()
            if end - start >= 1024:
                blocks = values[: len(values) // 1024 * 1024].view(-1, 1024)
                work.append((blocks, entries_per_block(self.density, 1024)))
        return clock(lambda: [torch.topk(values, k, dim=-1) for values, k in work])


def plain_step(bench: Bench) -> Callable[[], None]:
    """The straightforward step in PyTorch: bool masks, boolean indexing, torch.topk, tensor by tensor."""
    states = [torch.zeros_like(p) for p in bench.parameters]
    masks = []
    for mask in (bench.in_use, bench.previous):
        own = [bench.layout.bits(mask, i) for i in range(bench.passes.sparsified)]
        shifts = torch.arange(8, device=bench.device)
        flat = [
            ((b.unsqueeze(1) >> shifts) & 1).bool().view(-1)[: len(p)]
            for b, p in zip(own, bench.parameters, strict=False)
        ]
        masks.append(flat + [torch.ones_like(p, dtype=torch.bool) for p in bench.parameters[len(own) :]])
    r, k = RATES, entries_per_block(bench.density, 1024)

    def step() -> None:
        if not all(bool(g.isfinite().all()) for g in bench.gradients):
            return
        squares, kept = 0.0, []
        for i, (g, s) in enumerate(zip(bench.gradients, states, strict=True)):
            used, held = masks[0][i], masks[1][i]
            mt = torch.where(held, r.beta1 * s, s) + (1 - r.beta1) * g
            start, end = bench.layout.owned(i, bench.passes.first_run) if i < bench.passes.sparsified else (0, 0)
            if end - start >= 1024:
                torch.topk(mt[start:end][: (end - start) // 1024 * 1024].abs().view(-1, 1024), k, dim=1)
            payload, last = mt[used], torch.where(held, s, 0.0)[used]
            states[i] = torch.where(used, 0.0, mt)
            gh = (payload - r.beta1 * last) / (1 - r.beta1)
            squares = squares + gh.square().sum()
            kept.append((gh, last))
        factor = (1.0 / (torch.sqrt(torch.as_tensor(squares)) + 1e-6)).clamp(max=1.0)
        for i, ((gh, last), p) in enumerate(zip(kept, bench.parameters, strict=True)):
            used, held = masks[0][i], masks[1][i]
            gh = gh * factor
            m = r.beta1 * last + (1 - r.beta1) * gh
            v = r.beta2 * last.square() + (1 - r.beta2) * gh.square()
            u = torch.zeros_like(p)
            u[used] = m / (v.sqrt() + r.eps)
            fresh = used & ~held
            u[fresh] *= (len(p) - used.sum()) / fresh.sum().clamp(min=1)
            states[i][used] = m
            p -= r.lr * (u + r.weight_decay * p)

    return step


def memory(shapes: list[tuple[int, ...]], density: float, device: torch.device) -> dict[str, float]:
    """Peak bytes of training steps with SCAPE over those with dense AdamS, from the first step on."""
    from torchtitan_scape import AdamS, Scape, ScapeOptions

    peaks = {}
    for name in ("adams", "scape", "scape warm-up"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        parameters = [torch.nn.Parameter(torch.randn(s, device=device)) for s in shapes]
        named = [(f"p{i}", p) for i, p in enumerate(parameters)]
        warmup = 4 if name == "scape warm-up" else 0
        options = ScapeOptions(density=density, density_warmup_steps=warmup)
        optimizer = AdamS(named, lr=1e-4) if name == "adams" else Scape(named, lr=1e-4, options=options)
        for _ in range(8):
            for p in parameters:
                p.grad = torch.randn_like(p)
            optimizer.step()
            optimizer.zero_grad()
        peaks[name] = torch.cuda.max_memory_allocated() - base
        del parameters, named, optimizer, p
    sparse, whole = sizes_of(shapes)
    layout = BlockLayout(sparse, 1024, 1)
    payload = sum(layout.nnz(i, density, "block") for i in range(len(sparse))) + sum(whole)
    return {
        "adams": peaks["adams"],
        "extra": peaks["scape"] - peaks["adams"],
        "extra in warm-up": peaks["scape warm-up"] - peaks["adams"],
        "two masks": 2 * layout.mask_bytes(),
        "payload and last moment": 8 * payload,
        "parameters": sum(torch.Size(s).numel() for s in shapes),
    }


def measure(name: str, density: float, clock: Clock, device: torch.device, bandwidth: float) -> dict[str, Any]:
    bench = Bench(MODELS[name], density, device)
    entries = sum(p.numel() for p in bench.parameters)
    times, least = bench.times(clock), kernel_bytes(Method("scape", density), MODELS[name], REPLICAS)
    result: dict[str, Any] = {
        "model": name,
        "density": density,
        "entries": entries,
        "ms": times,
        "minimal_bytes": least,
    }
    result["share_of_copy"] = {key: least[key] / (times[key] / 1e3) / bandwidth for key in least}
    result["topk_ms"] = bench.topk_time(clock)
    result["adams_ms"] = adams_time(bench, clock)
    leaves = [torch.nn.Parameter(p) for p in bench.parameters]
    for leaf, gradient in zip(leaves, bench.gradients, strict=True):
        leaf.grad = gradient
    adamw = torch.optim.AdamW(leaves, lr=RATES.lr, fused=True)
    result["adamw_ms"] = clock(adamw.step)
    del adamw
    result["plain_ms"] = clock(plain_step(bench))
    whole = [p.numel() for p in bench.parameters[bench.passes.sparsified :]]
    twin = torch_passes(Replicated(bench.layout, whole), bench.passes.plan, device)
    result["twin_ms"] = clock(lambda: _twin_step(twin, bench))
    return result


def adams_time(bench: Bench, clock: Clock) -> float:
    adams = TritonAdams()
    moments = [torch.zeros_like(p) for p in bench.parameters]
    steps = torch.full((len(moments),), 100.0, dtype=torch.float64, device=bench.device)
    rates = [RATES] * len(moments)
    return clock(lambda: adams.step(bench.parameters, bench.gradients, moments, rates, steps, bench.applied))


def _twin_step(twin: ScapePasses, bench: Bench) -> None:
    gradients = [g.clone() for g in bench.gradients]
    twin.bind(bench.step_of(bench.parameters, gradients, bench.in_use, bench.previous, bench.density))
    pack_all(twin)
    squares_all(twin)
    update_all(twin)
    twin.release()


def sweep(name: str, density: float, clock: Clock, device: torch.device) -> list[dict[str, Any]]:
    """pack + update with other tiles, and selection with other numbers of warps."""
    rows = []
    for tile in (1024, 2048, 4096, 8192):
        for per_warp in (256, 512, 1024):
            tiles.COMPACT_TILE, tiles.COMPACT_WARP = tile, per_warp
            bench = Bench(MODELS[name], density, device)
            bench.bind(1.0)
            rows.append({"tile": tile, "entries per warp": per_warp, "pack + update": clock(bench.pack_and_update)})
    tiles.COMPACT_TILE, tiles.COMPACT_WARP = 4096, 1024
    for tile in (1024, 2048):
        for per_warp in (256, 512, 1024):
            tiles.SELECT_TILE, tiles.SELECT_WARP = tile, per_warp
            bench = Bench(MODELS[name], density, device)
            rows.append({"select tile": tile, "entries per warp": per_warp, "select": bench.times(clock)["select"]})
    tiles.SELECT_TILE, tiles.SELECT_WARP = 1024, 1024
    return rows


def table(report: dict[str, Any]) -> str:
    lines = [
        f"`python -m scripts.benchmarks.bench_kernels` on {report['device']}, torch "
        f"{report['torch']}, Triton {report['triton']}.",
        f"A copy moves {report['copy_bandwidth'] / 1e9:.0f} GB/s, read and written.",
        "",
        "| model | density | kernel | ms | minimal bytes a parameter | of the copy's bandwidth, % |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in report["results"]:
        for kernel, least in r["minimal_bytes"].items():
            share = 100 * r["share_of_copy"][kernel]
            cells = (
                r["model"],
                r["density"],
                kernel,
                f"{r['ms'][kernel]:.3f}",
                f"{least / r['entries']:.2f}",
                f"{share:.0f}",
            )
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    names = ["pack + update", "whole step", "fused AdamW", "dense AdamS", "plain PyTorch", "the torch twin"]
    names += ["pack + update / AdamW", "plain / whole step", "select, % of step", "topk / select"]
    lines += ["", "| | " + " | ".join(f"{r['model']}, {r['density']}" for r in report["results"]) + " |"]
    lines.append("| --- |" + " --- |" * len(report["results"]))
    columns = []
    for r in report["results"]:
        ms = r["ms"]
        shown = [ms["pack + update"], ms["whole step"], r["adamw_ms"], r["adams_ms"], r["plain_ms"], r["twin_ms"]]
        shown += [ms["pack + update"] / r["adamw_ms"], r["plain_ms"] / ms["whole step"]]
        shown += [100 * ms["select"] / ms["whole step"], r["topk_ms"] / ms["select"]]
        columns.append([f"{value:.3g}" for value in shown])
    lines += [
        f"| {name} | " + " | ".join(row) + " |" for name, row in zip(names, zip(*columns, strict=True), strict=True)
    ]
    for m in report.get("memory", []):
        lines += ["", f"Memory, {m['model']} at {m['density']}, bytes a parameter over dense AdamS's peak: "]
        lines[-1] += ", ".join(
            f"{key} {m[key] / m['parameters']:.3f}"
            for key in m
            if key not in ("model", "density", "parameters", "adams")
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["llama-500m", "llama-1.8b"], action="append")
    parser.add_argument("--density", type=float, action="append")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--sweep", action="store_true", help="also other tiles")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model on whatever device there is; nothing is stored"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "results/bench_kernels")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.smoke:
        sys.exit("bench_kernels.py needs a GPU, and torch sees none; --smoke checks the script without one")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = ["smoke"] if arguments.smoke else arguments.model or ["llama-500m", "llama-1.8b"]
    clock = Clock(device, 1 if arguments.smoke else arguments.repeat)
    bandwidth = copy_bandwidth(clock, device, 0.001 if arguments.smoke else 4.0)
    import triton

    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu, interpreted",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_bandwidth": bandwidth,
        "results": [],
        "memory": [],
    }
    for name in models:
        for density in arguments.density or [0.1, 0.01]:
            print(f"{name} at {density}", file=sys.stderr, flush=True)
            report["results"].append(measure(name, density, clock, device, bandwidth))
            if device.type == "cuda":
                torch.cuda.empty_cache()
                report["memory"].append({"model": name, "density": density, **memory(MODELS[name], density, device)})
            if arguments.sweep:
                report.setdefault("sweep", []).append(sweep(name, density, clock, device))
    text = table(report)
    if not arguments.smoke:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "bench.json").write_text(json.dumps(report, indent=1) + "\n")
        (arguments.output / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
