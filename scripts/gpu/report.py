"""Render the stored results of the GPU check as tables, on any machine.

python -m scripts.gpu.report results/gpu/DEVICE    # writes report.md there
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.common import markdown, number, read, run_command, write

RESULTS_FILE = "results.json"
# Goals on an H100 or H200.
TARGETS = {"AdamW": 1.0, "method": 1.5, "share": 0.85, "host": 1.0, "mfu": 45.0, "tokens": 0.98}
Row = dict[str, Any]


def write_report(folder: Path) -> Path:
    """Write report.md of the stored parts. Raises ValueError if there is none."""
    stored = read(folder / RESULTS_FILE) or {}
    found = {part: stored[part] for part in SECTIONS if part in stored}
    if not found:
        raise ValueError(f"{folder / RESULTS_FILE} has none of {', '.join(SECTIONS)}")
    texts = [_head(found)]
    for part, stored in found.items():
        results = {name: step["result"] for name, step in stored["steps"].items() if step.get("result")}
        texts += [f"## {part.capitalize()}", f"`{stored['command']}`", markdown(step_rows(stored["steps"]))]
        texts += SECTIONS[part](results)
    path = folder / "report.md"
    write(path, "\n\n".join(text for text in texts if text) + "\n")
    return path


def _head(found: dict[str, Any]) -> str:
    machine = next(iter(found.values()))["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    smoke = any(one["smoke"] for one in found.values())
    tiny = "\n\nA smoke test with tiny sizes: no figure here says anything of the device." if smoke else ""
    return (
        f"# {machine['device']}{tiny}\n\nDriver {machine['driver']}, {machine['runtime']}, {machine['cores']} cores, "
        f"{machine['system']}; {versions}."
    )


def step_rows(steps: dict[str, Any]) -> list[Row]:
    return [
        {
            "step": name,
            "ended": step["status"],
            "seconds": number(step.get("seconds")),
            "at most": number(step.get("limit_seconds"), ".0f"),
            "begun": step.get("begun", "-"),
            "SM clock, MHz": clock_range(step.get("clocks", ())),
            "commit": step["commit"],
        }
        for name, step in steps.items()
    ]


def clock_range(samples: Sequence[dict[str, float]]) -> str:
    """Return the lowest and the highest clock of the readings during a step, and the highest one of the device."""
    found = [sample["sm_mhz"] for sample in samples if "sm_mhz" in sample]
    most = max((sample["most_sm_mhz"] for sample in samples if "most_sm_mhz" in sample), default=None)
    if not found:
        return "-"
    return f"{min(found):.0f} to {max(found):.0f}" + (f" of {most:.0f}" if most else "")


def correctness(results: dict[str, Any]) -> Iterator[str]:
    if tests := results.get("tests"):
        failed = "".join(f"\n- failed: `{name}`" for name in tests["failed"])
        yield (
            f"tests/gpu in {tests['processes']} processes: {tests['passed']} passed, {len(tests['failed'])} failed, "
            f"{tests['skipped']} skipped, {tests['seconds']:.0f} s.{failed}"
        )
    if sanitizer := results.get("sanitizer"):
        yield sanitizer.get("note", "")
        yield markdown([{"test": row["test"], "said": row["said"]} for row in sanitizer.get("cases", ())])


# ------------------------------------------------------------------------------------------------- speed


def pass_rows(result: dict[str, Any]) -> list[Row]:
    """Return a row per pass, and per step of a dense optimizer."""
    groups = {"dense": result.get("dense", {})}
    for setting in result["settings"]:
        name = f"{setting['density']:g}, {setting['wire']}"
        groups[name] = setting["passes"] | {"whole step": setting["step"]}
    return [
        {"model": result["model"], "density, wire": setting} | timed(name, one)
        for setting, passes in groups.items()
        for name, one in passes.items()
    ]


def timed(name: str, figures: dict[str, Any]) -> Row:
    """Return the row of a pass. Times in which the device waited for the host are marked."""
    return {
        "pass": name,
        "ms": f"{figures['ms']:.3f}" + ("" if figures.get("ahead", True) else " (with the host's)"),
        "least to most": f"{figures['least_ms']:.3f} to {figures['most_ms']:.3f}" if "least_ms" in figures else "-",
        "host, ms": number(figures.get("host_ms"), ".3f"),
        "bytes an entry": number(figures.get("bytes_an_entry"), ".2f"),
        "GB/s": number(figures.get("bytes_a_second"), ".0f", 1e-9),
        "of a copy, %": number(figures.get("share_of_copy"), ".0f", 100),
    }


def comparison_rows(result: dict[str, Any]) -> list[Row]:
    """Return whole steps against fused AdamW and dense AdamS."""
    rows = []
    for setting in result["settings"]:
        step = setting["step"]
        adamw, adams = (result.get("dense", {})[name]["ms"] for name in ("fused AdamW", "dense AdamS"))
        rows.append(
            {
                "model": result["model"],
                "density, wire": f"{setting['density']:g}, {setting['wire']}",
                "step, ms": f"{step['ms']:.3f}",
                "fused AdamW, ms": f"{adamw:.3f}",
                f"against it (at most {TARGETS['AdamW']:g})": f"{step['ms'] / adamw:.2f}",
                "dense AdamS, ms": f"{adams:.3f}",
                f"host, ms (below {TARGETS['host']:g})": f"{step['host_ms']:.3f}",
                "select, % of the step": f"{100 * setting['passes']['select']['ms'] / step['ms']:.1f}",
            }
        )
    return rows


def speed(results: dict[str, Any]) -> Iterator[str]:
    rates = {name: one["copy_bandwidth"] for name, one in results.items() if "copy_bandwidth" in one}
    if rates:
        copies = "; ".join(f"{name} {rate / 1e9:.0f} GB/s" for name, rate in rates.items())
        yield f"A copy on the device, read and written: {copies}."
    passes = [one for name, one in results.items() if name.startswith("passes")]
    if rows := [row for result in passes for row in comparison_rows(result)]:
        yield "One of 8 replicas; its payload is encoded and decoded, and not sent."
        yield markdown(rows)
    if rows := [row for result in passes for row in pass_rows(result)]:
        yield (
            f"Streaming passes are meant to reach {100 * TARGETS['share']:.0f} % of a copy. Bytes are those that a "
            "pass must move; entries that are scattered in a tensor count as whole sectors of 32 bytes."
        )
        yield markdown(rows)
    if codes := results.get("codes"):
        rows = [{"code": code} | timed(n, one) for code, passes in codes["codes"].items() for n, one in passes.items()]
        yield f"Block codes of 128 entries with BF16 scales, {codes['entries']:,} entries."
        yield markdown(rows)
    if steps := results.get("methods"):
        yield (
            f"Whole steps of {steps['model']} with fused AdamW, one of 8 replicas; messages are not sent. Phases, ms: "
            "check for non-finite gradients, clipping, exchange and update."
        )
        yield markdown(method_rows(steps))
        if "launch_microseconds" in steps:
            yield f"The host needs {steps['launch_microseconds']:.1f} microseconds to launch a small Triton kernel."
        yield "Launches of such a step, as the profiler saw them, with the kernels that take longest:"
        yield markdown(launch_rows(steps["profiles"]))
    yield results.get("traffic", {}).get("note", "")
    if counted := results.get("traffic", {}).get("counted"):
        least = results["traffic"].get("least", {})
        yield "Bytes through device memory as the hardware counts them, and those that a pass must move:"
        yield markdown(traffic_rows(counted, least))


def method_rows(steps: dict[str, Any]) -> list[Row]:
    adamw, rows = steps["fused AdamW"]["ms"], []
    dense = {"fused AdamW alone": steps["fused AdamW"]}
    if "with clipping" in steps:
        dense["fused AdamW with `clip_grad_norm_`"] = steps["with clipping"]
    for name, one in {**dense, **steps["methods"]}.items():
        if "failed" in one:
            rows.append({"method": name, "step, ms": f"failed: {one['failed'][:80]}"})
            continue
        phases = one.get("phases_ms", {})
        rows.append(
            {
                "method": name,
                "step, ms": f"{one['ms']:.1f}" + ("" if one["ahead"] else " (with the host's)"),
                f"against fused AdamW (at most {TARGETS['method']:g})": f"{one['ms'] / adamw:.2f}",
                "host, ms": f"{one['host_ms']:.1f}",
            }
            | {key: number(phases.get(key), ".1f") for key in ("check", "clip", "exchange", "update")}
            | {"waits for the device at": ", ".join(one.get("waits", ())) or "-"}
        )
    return rows


def traffic_rows(counted: dict[str, Any], least: dict[str, float]) -> list[Row]:
    return [
        {
            "pass": name,
            "launches": str(one["launches"]),
            "read, GB": number(one["read"], ".2f", 1e-9),
            "written, GB": number(one["written"], ".2f", 1e-9),
            "of the least bytes": number(
                (one["read"] + one["written"]) / least[name] if name in least else None, ".2f"
            ),
        }
        for name, one in counted.items()
    ]


def launch_rows(profiles: dict[str, Any], kernels: int = 5) -> list[Row]:
    """Return launches, gaps and the kernels that take longest."""
    return [
        {
            "step": name,
            "launches": f"{found['launches']:.0f}",
            "busy, ms": f"{found['busy_ms']:.1f}",
            "gaps, ms": f"{found['gaps_ms']:.2f}",
            "longest gap, ms": f"{found['longest_gap_ms']:.3f}",
            "kernels, ms": ", ".join(
                f"`{kernel}` {ms:.2f}" for kernel, ms in [*found["ms_by_kernel"].items()][:kernels]
            )
            or "-",
        }
        for name, found in profiles.items()
    ]


# ---------------------------------------------------------------------------------------------- training


def throughput_rows(results: dict[str, Any]) -> list[Row]:
    found = {one["form"]: one for one in results.values() if "form" in one and "tokens_per_second" in one}
    rate = "tokens_per_second"
    adamw = found.get("adamw", {}).get(rate)
    return [
        {
            "optimizer": form,
            "tokens/s": f"{one[rate]:,.0f}",
            "least to most": f"{one['least']:,.0f} to {one['most']:,.0f}",
            f"against AdamW (at least {TARGETS['tokens']:g})": number(adamw and one[rate] / adamw, ".3f"),
            f"MFU, % (at least {TARGETS['mfu']:g})": f"{one['mfu_percent']:.1f}",
            "of causal attention, %": f"{one['mfu_causal_percent']:.1f}",
            "memory, GiB": f"{one['memory_gib']:.1f}",
            "last loss": f"{one['points'][-1]['loss']:.3f}",
        }
        for form, one in found.items()
    ]


def quality_rows(curves: dict[str, Any]) -> list[Row]:
    """Return losses at the last steps that all runs have reached: one run may be cut off before another."""
    begun = [run for run in curves["runs"].values() if run["training"]]
    trained, validated = (last_common([run[kind] for run in begun]) for kind in ("training", "validation"))
    rows = []
    for name, run in curves["runs"].items():
        sent, dense = (run.get(f"{kind}_bytes_per_step_and_rank") for kind in ("planned", "dense"))
        loss, validation = dict(run["training"]).get(trained), dict(run["validation"]).get(validated)
        rows.append(
            {
                "run": name,
                "step": number(trained if loss is not None else None, ".0f"),
                "training loss": number(loss, ".4f"),
                "step of validation": number(validated if validation is not None else None, ".0f"),
                "validation loss": number(validation, ".4f"),
                "steps in all": number(run["training"][-1][0], ".0f") if run["training"] else "-",
                "bytes of dense at the target, %": number(100 * sent / dense if dense else None, ".2f"),
            }
        )
    return rows


def last_common(curves: list[list[list[float]]]) -> float | None:
    """Return the last step that all (step, loss) curves contain."""
    steps = [{step for step, _ in curve} for curve in curves]
    return max(set.intersection(*steps), default=None) if steps else None


def training(results: dict[str, Any]) -> Iterator[str]:
    if rows := throughput_rows(results):
        one = next(one for one in results.values() if "form" in one)
        yield (
            f"{one['batch']} sequences of {one['sequence']} tokens a step, on one GPU: a replica alone codes nothing."
        )
        yield markdown(rows)


def losses(results: dict[str, Any]) -> Iterator[str]:
    if quality := results.get("quality"):
        yield f"{quality['replicas']} simulated replicas; all runs together on one GPU. Arguments of all runs:"
        yield f"`{' '.join(quality.get('arguments', ()))}`"
        yield markdown(quality_rows(quality))
        yield "Training loss by step:"
        yield markdown(curve_rows(quality))


def curve_rows(quality: dict[str, Any], points: int = 8) -> list[Row]:
    """Return the training losses at up to `points` steps that at least two runs have reached."""
    curves = {name: dict(run["training"]) for name, run in quality["runs"].items()}
    steps = sorted({step for curve in curves.values() for step in curve})
    steps = [step for step in steps if sum(step in curve for curve in curves.values()) > 1]
    kept = steps[:: max(1, -(-len(steps) // points))]
    return [
        {"run": name, **{f"{step:.0f}": number(curve.get(step), ".3f") for step in kept}}
        for name, curve in curves.items()
    ]


def ranks(results: dict[str, Any]) -> Iterator[str]:
    if alone := results.get("stages"):
        stages = ", ".join(f"{name} {'yes' if good else 'NO'}" for name, good in alone["stages"].items())
        yield f"One rank's comm streams and stages, {alone['backend']}, as expected: {stages}."
    if lost := results.get("lost-rank"):
        yield "One of two ranks killed: " + ", ".join(f"{key} {value}" for key, value in lost.items()) + "."


def methods(results: dict[str, Any]) -> Iterator[str]:
    if found := results.get("methods"):
        if found["error"]:
            yield f"Ranks on one device: {found['error']}."
        if found["cases"]:
            yield f"{found['ranks']} ranks on one device, {found['backend']}; waits of the steps after the first three:"
        rows = [
            {
                "layout": row["layout"],
                "case": row["case"],
                "replicas equal": "yes" if row["equal"] else "NO",
                "waits for the device": number(row["waits"], ".0f") + ("" if row["may wait"] else " (at most 0)"),
                "at": ", ".join(row.get("where", ())) or "-",
                "s": number(row["seconds"]),
            }
            for row in found["cases"]
        ]
        yield markdown(rows)


SECTIONS = {
    "correctness": correctness,
    "speed": speed,
    "training": training,
    "losses": losses,
    "ranks": ranks,
    "methods": methods,
}


if __name__ == "__main__":
    sys.exit(run_command(__doc__, lambda args: print(write_report(args.folder)), {"folder": dict(type=Path)}))
