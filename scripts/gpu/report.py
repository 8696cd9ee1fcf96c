"""What the check of a GPU has found, as tables; from what is stored, on any machine.

python -m scripts.gpu.report results/gpu/DEVICE    # writes report.md there, and losses.png where there is matplotlib
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from scripts.common import guarded, markdown, number, parser, read, write

# What was aimed at on an H100 or H200, of figures of this report.
TARGETS = {"AdamW": 1.0, "share": 0.85, "plain": 10.0, "host": 1.0, "mfu": 45.0, "tokens": 0.98}
Row = dict[str, Any]


def write_report(folder: Path) -> Path:
    """report.md of the parts that are there. Raises ValueError where none is."""
    found = {part: stored for part in SECTIONS if (stored := read(folder / f"{part}.json")) is not None}
    if not found:
        raise ValueError(f"{folder} has none of {', '.join(f'{part}.json' for part in SECTIONS)}")
    told = [_head(found)]
    for part, stored in found.items():
        results = {name: step["result"] for name, step in stored["steps"].items() if step.get("result")}
        told += [f"## {part.capitalize()}", f"`{stored['command']}`", markdown(step_rows(stored["steps"]))]
        told += SECTIONS[part](results)
    if curves := found.get("training", {}).get("steps", {}).get("quality", {}).get("result"):
        told += _plotted(curves, folder)
    path = folder / "report.md"
    write(path, "\n\n".join(text for text in told if text) + "\n")
    return path


def _head(found: dict[str, Any]) -> str:
    stored = next(iter(found.values()))
    machine = stored["machine"]
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
            "commit": step["commit"][:12] + step["commit"][40:] if "git" not in step["commit"] else step["commit"],
        }
        for name, step in steps.items()
    ]


# ------------------------------------------------------------------------------------------- correctness


def correctness(results: dict[str, Any]) -> list[str]:
    told = []
    if tests := results.get("tests"):
        failed = "".join(f"\n- failed: `{name}`" for name in tests["failed"])
        told.append(
            f"tests/gpu in {tests['processes']} processes: {tests['passed']} passed, {len(tests['failed'])} failed, "
            f"{tests['skipped']} skipped, {tests['seconds']:.0f} s.{failed}"
        )
    if sanitizer := results.get("sanitizer"):
        told.append(sanitizer.get("note", ""))
        told.append(markdown([{"test": row["test"], "said": row["said"]} for row in sanitizer.get("cases", ())]))
    return told


# ------------------------------------------------------------------------------------------------- speed


def pass_rows(results: dict[str, Any]) -> list[Row]:
    """Every pass beside the bytes that it must move; dense steps besides."""
    rows = []
    for result in (one for name, one in results.items() if name.startswith("passes")):
        groups = [("dense", result.get("dense", {}))]
        for setting in result["settings"]:
            passes = setting["passes"] | {"whole step": setting["step"]}
            groups.append((f"{setting['density']:g}, {setting['wire']}", passes))
        for setting, passes in groups:
            rows += [{"model": result["model"], "density, wire": setting} | timed(n, one) for n, one in passes.items()]
    return rows


def timed(name: str, figures: dict[str, Any]) -> Row:
    """ahead: a time in which the device had to wait for the host is marked."""
    spread = f"{figures['least_ms']:.3f} to {figures['most_ms']:.3f}" if "least_ms" in figures else "-"
    rate = figures.get("bytes_a_second")
    return {
        "pass": name,
        "ms": f"{figures['ms']:.3f}" + ("" if figures.get("ahead", True) else " (with the host's)"),
        "least to most": spread,
        "host, ms": number(figures.get("host_ms"), ".3f"),
        "bytes an entry": number(figures.get("bytes_an_entry"), ".2f"),
        "GB/s": number(rate, ".0f", 1e-9),
        "of a copy, %": number(figures.get("share_of_copy"), ".0f", 100),
    }


def comparison_rows(results: dict[str, Any]) -> list[Row]:
    """Whole steps beside fused AdamW's, dense AdamS' and the plain form's."""
    rows = []
    for result in (one for name, one in results.items() if name.startswith("passes")):
        dense = result.get("dense", {})
        for setting in result["settings"]:
            step, plain = setting["step"], setting["plain"]["ms"]
            adamw, adams = (dense[name]["ms"] for name in ("fused AdamW", "dense AdamS"))
            rows.append(
                {
                    "model": result["model"],
                    "density, wire": f"{setting['density']:g}, {setting['wire']}",
                    "step, ms": f"{step['ms']:.3f}",
                    "fused AdamW, ms": f"{adamw:.3f}",
                    f"against it (at most {TARGETS['AdamW']:g})": f"{step['ms'] / adamw:.2f}",
                    "dense AdamS, ms": f"{adams:.3f}",
                    "plain PyTorch, ms": f"{plain:.1f}",
                    f"against the step (at least {TARGETS['plain']:g})": f"{plain / step['ms']:.1f}",
                    f"host, ms (below {TARGETS['host']:g})": f"{step['host_ms']:.3f}",
                    "free running, ms": f"{step['free_running_ms']:.3f}",
                    "select, % of the step": f"{100 * setting['passes']['select']['ms'] / step['ms']:.1f}",
                }
            )
    return rows


def speed(results: dict[str, Any]) -> list[str]:
    rates = {name: one["copy_bandwidth"] for name, one in results.items() if "copy_bandwidth" in one}
    copies = "; ".join(f"{name} {rate / 1e9:.0f} GB/s" for name, rate in rates.items())
    told = [f"A copy on the device, read and written: {copies}." if copies else ""]
    if rows := comparison_rows(results):
        told += [
            "One of 8 replicas; what it sends is coded and decoded, and goes nowhere. Free running: calls that follow "
            "each other, the host's time or the device's, whichever is longer.",
            markdown(rows),
        ]
    if rows := pass_rows(results):
        told += [f"Streaming passes are meant to reach {100 * TARGETS['share']:.0f} % of a copy.", markdown(rows)]
    if codes := results.get("codes"):
        table = [{"code": code} | timed(n, one) for code, passes in codes["codes"].items() for n, one in passes.items()]
        told += [f"Block codes of 128 entries with BF16 scales, {codes['entries']:,} entries.", markdown(table)]
    if launches := results.get("launches"):
        told += launch_text(launches)
    return told


def launch_text(launches: dict[str, Any]) -> list[str]:
    kinds = [name for name in ("scape", "fused AdamW") if name in launches]
    keys = {"launches": ".0f", "busy_ms": ".3f", "gaps_ms": ".3f", "longest_gap_ms": ".3f"}
    rows = [{"step": kind} | {key: format(launches[kind][key], form) for key, form in keys.items()} for kind in kinds]
    told = [f"Launches of a step, {launches['model']}, as the profiler saw them:", markdown(rows)]
    kernels = [{"kernel": f"`{name}`", "ms": f"{ms:.3f}"} for name, ms in launches["scape"]["ms_by_kernel"].items()]
    told.append(markdown(kernels))
    memory = [
        {
            "density": f"{row['density']:g}",
            "warm-up steps": row["warm-up steps"],
            "more than dense AdamS, MB": number(row["more_bytes"], ".1f", 1e-6),
            "masks and buffers, planned, MB": number(row["planned_bytes"], ".1f", 1e-6),
        }
        for row in launches.get("memory", ())
    ]
    return [*told, "Peak memory of steps:" if memory else "", markdown(memory)]


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
    """At the last steps that all of them came to: a run may have been cut off before another."""
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
    """The last step that is in all (step, loss) curves."""
    steps = [{step for step, _ in curve} for curve in curves]
    return max(set.intersection(*steps), default=None) if steps else None


def training(results: dict[str, Any]) -> list[str]:
    told = []
    if rows := throughput_rows(results):
        one = next(one for one in results.values() if "form" in one)
        told += [
            f"{one['batch']} sequences of {one['sequence']} tokens a step, on one GPU: a replica alone codes nothing."
        ]
        told.append(markdown(rows))
    if quality := results.get("quality"):
        told += [f"{quality['replicas']} simulated replicas:", markdown(quality_rows(quality))]
    return told


def ranks(results: dict[str, Any]) -> list[str]:
    told = ranks_text(results["ranks"]) if "ranks" in results else []
    if lost := results.get("lost-rank"):
        told.append("One of two ranks killed: " + ", ".join(f"{key} {value}" for key, value in lost.items()) + ".")
    return told


def ranks_text(ranks: dict[str, Any]) -> list[str]:
    told, several, alone = [], ranks.get("several"), ranks.get("lanes")
    if ranks["error"]:
        told.append(f"Several ranks on one device: {ranks['error']}.")
    if several:
        rows = [
            {"layout": row["layout"], "case": row["case"], "replicas equal": "yes" if row["equal"] else "NO"}
            for row in several["cases"]
        ]
        told += [f"{several['ranks']} ranks on one device, {several['backend']}:", markdown(rows)]
    if alone:
        stages = ", ".join(f"{name} {'yes' if good else 'NO'}" for name, good in alone["stages"].items())
        told.append(f"One rank's lanes and stages, {alone['backend']}, as expected: {stages}.")
    return told


SECTIONS = {"correctness": correctness, "speed": speed, "training": training, "ranks": ranks}


def _plotted(curves: dict[str, Any], folder: Path) -> list[str]:
    if importlib.util.find_spec("matplotlib") is None:
        return [
            "Losses are not plotted: matplotlib is not installed. `python -m scripts.gpu.report` plots them elsewhere."
        ]
    from scripts.plots import figure, look, save

    drawn, axes = figure(1, 1, (7, 4.5))
    for i, (name, run) in enumerate(curves["runs"].items()):
        style = look(i, dense="dense" in name) | {"marker": ""}
        axes[0][0].plot(*zip(*run["training"], strict=True), label=name, **style) if run["training"] else None
    axes[0][0].set_xlabel("step")
    axes[0][0].set_ylabel("training loss")
    save(drawn, folder / "losses.png", legend=[axes[0][0]])
    return ["![losses](losses.png)"]


def main() -> int:
    own = parser(__doc__)
    own.add_argument("folder", type=Path)
    args = own.parse_args()
    return guarded(lambda: print(write_report(args.folder)))


if __name__ == "__main__":
    sys.exit(main())
