"""Render the stored results of the GPU check as tables, on any machine. Goals are those of an H100 or H200.

python -m scripts.gpu.report results/gpu/DEVICE    # writes report.md there
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.common import markdown, number, read, run_command, write
from torchtitan_scape.core.options import with_present_keys

RESULTS_FILE = "results.json"
LOSSES = {"training": "step", "validation": "step of validation"}  # and the column of its last step
Row = dict[str, Any]


def write_report(folder: Path) -> Path:
    """Write report.md of the stored parts. Raises ValueError if there is none."""
    stored = read(folder / RESULTS_FILE) or {}
    found = {part: stored[part] for part in SECTIONS if part in stored}
    if not found:
        raise ValueError(f"{folder / RESULTS_FILE} has none of {', '.join(SECTIONS)}")
    machine = next(iter(found.values()))["machine"]
    texts = [f"# {machine['device']}"]
    if any(one["smoke"] for one in found.values()):
        texts.append("A smoke test with tiny sizes: no figure here says anything of the device.")
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    texts.append(
        f"Driver {machine['driver']}, {machine['runtime']}, {machine['cores']} cores, {machine['system']}; {versions}."
    )
    for part, one in found.items():
        texts += [f"## {part.capitalize()}", f"`{one['command']}`", markdown(step_rows(one["steps"]))]
        texts += SECTIONS[part]({name: step["result"] for name, step in one["steps"].items() if step.get("result")})
    path = folder / "report.md"
    write(path, "\n\n".join(text for text in texts if text) + "\n")
    return path


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
    most = max((sample.get("most_sm_mhz", 0.0) for sample in samples), default=0.0)
    return f"{min(found):.0f} to {max(found):.0f}" + (f" of {most:.0f}" if most else "") if found else "-"


def joined(texts: Sequence[str]) -> str:
    return ", ".join(texts) or "-"


def correctness(results: dict[str, Any]) -> Iterator[str]:
    if tests := results.get("tests"):
        failed = "".join(f"\n- failed: `{name}`" for name in tests["failed"])
        yield (
            f"tests/gpu in {tests['processes']} processes: {tests['passed']} passed, {len(tests['failed'])} failed, "
            f"{tests['skipped']} skipped, {tests['seconds']:.0f} s.{failed}"
        )
    for found in (results[name] for name in ("sanitizer", "races") if name in results):
        yield found.get("note", "")
        keys = ("tool", "test", "said")
        yield markdown([{key: row[key] for key in keys if key in row} for row in found.get("cases", ())])


# ------------------------------------------------------------------------------------------------- speed


def milliseconds(figures: Mapping[str, Any], form: str) -> str:
    """Return the time of a pass, with a mark if the device waited for the host."""
    return format(figures["ms"], form) + ("" if figures.get("ahead", True) else " (with the host's)")


def pass_rows(first: Row, passes: dict[str, Any]) -> list[Row]:
    """Return a row per pass, each with the fields of `first`."""
    return [
        first
        | {
            "pass": name,
            "ms": milliseconds(figures, ".3f"),
            "least to most": f"{figures['least_ms']:.3f} to {figures['most_ms']:.3f}" if "least_ms" in figures else "-",
            "host, ms": number(figures.get("host_ms"), ".3f"),
            "bytes an entry": number(figures.get("bytes_an_entry"), ".2f"),
            "GB/s": number(figures.get("bytes_a_second"), ".0f", 1e-9),
            "of a copy, %": number(figures.get("share_of_copy"), ".0f", 100),
        }
        for name, figures in passes.items()
    ]


def speed(results: dict[str, Any]) -> Iterator[str]:
    rates = {name: one["copy_bandwidth"] / 1e9 for name, one in results.items() if "copy_bandwidth" in one}
    if copies := [f"{name} {rate:.0f} GB/s" for name, rate in rates.items()]:
        yield f"A copy on the device, read and written: {'; '.join(copies)}."
    compared, rows = [], []
    for result in (one for name, one in results.items() if name.startswith("passes")):
        rows += pass_rows({"model": result["model"], "density, code": "dense"}, result["dense"])
        for setting in (with_present_keys(one, "sync.scape") for one in result["settings"]):
            first = {"model": result["model"], "density, code": f"{setting['density']:g}, {setting['code']}"}
            rows += pass_rows(first, setting["passes"] | {"whole step": setting["step"]})
            compared.append(first | step_against_dense(setting, result["dense"]))
    if compared:
        yield "One of 8 replicas; its payload is encoded and decoded, and not sent."
        yield markdown(compared)
    if rows:
        yield (
            "Streaming passes are meant to reach 85 % of a copy. Bytes are those that a "
            "pass must move; entries that are scattered in a tensor count as whole sectors of 32 bytes."
        )
        yield markdown(rows)
    if codes := results.get("codes"):
        yield f"Block codes of 128 entries with BF16 scales, {codes['entries']:,} entries."
        yield markdown([row for code, passes in codes["codes"].items() for row in pass_rows({"code": code}, passes)])
    if tried := results.get("tiles"):
        yield f"Milliseconds with tiles of several sizes, {tried['entries']:,} entries in large matrices:"
        yield markdown(tile_rows(tried["tiles"]))
    for steps in (one for name, one in results.items() if name.startswith("methods")):
        yield (
            f"Steps of {steps['model']}, shard 1 of {steps['shard']}, {steps['entries']:,} entries, one of 8 replicas; "
            "nothing is sent."
        )
        yield markdown(method_rows(steps))
        yield "Launches of such a step, as the profiler saw them, with the kernels that take longest:"
        yield markdown(launch_rows(steps["profiles"]))
    traffic = results.get("traffic", {})
    yield traffic.get("note", "")
    if counted := traffic.get("counted"):
        yield (
            "Bytes through device memory as the hardware counts them, and those that a pass must move. Shares of the "
            "device's limits and waits for each issued instruction are of the longest kernel of a pass:"
        )
        yield markdown(traffic_rows(counted, traffic.get("least", {})))


def step_against_dense(setting: dict[str, Any], dense: dict[str, Any]) -> Row:
    step, adamw, adams = setting["step"], dense["fused AdamW"]["ms"], dense["dense AdamS"]["ms"]
    return {
        "step, ms": f"{step['ms']:.3f}",
        "fused AdamW, ms": f"{adamw:.3f}",
        "against it (at most 1)": f"{step['ms'] / adamw:.2f}",
        "dense AdamS, ms": f"{adams:.3f}",
        "host, ms (below 1)": f"{step['host_ms']:.3f}",
        "select, % of the step": f"{100 * setting['passes']['select']['ms'] / step['ms']:.1f}",
    }


def method_rows(steps: dict[str, Any]) -> list[Row]:
    found = steps["methods"]
    adamw = [found[name] for name in steps["baselines"] if "ms" in found.get(name, {})]
    rows = []
    for name, one in found.items():
        if "failed" in one:
            rows.append({"method": name, "step, ms": f"failed: {one['failed'][:80]}"})
            continue
        row, clipped = {"method": name}, one["clipped"]
        for kind, figures, others in (("step", one, adamw), ("clipped", clipped, [each["clipped"] for each in adamw])):
            row[f"{kind}, ms"] = milliseconds(figures, ".1f")
            factor = figures["ms"] / min(each["ms"] for each in others) if others else None
            row[f"{kind}, against the fastest AdamW"] = number(factor, ".2f")
        times = {"host, ms": one["host_ms"]} | clipped.get("phases_ms", {})
        rows.append(row | {key: number(times.get(key)) for key in ("host, ms", "check", "clip", "exchange", "update")})
    return rows


def launch_rows(profiles: dict[str, Any]) -> list[Row]:
    """Return launches, gaps and the five kernels that take longest."""
    return [
        {
            "step": name,
            "launches": f"{found['launches']:.0f}",
            "busy, ms": f"{found['busy_ms']:.1f}",
            "gaps, ms": f"{found['gaps_ms']:.2f}",
            "longest gap, ms": f"{found['longest_gap_ms']:.3f}",
            "kernels, ms": joined([f"`{kernel}` {ms:.2f}" for kernel, ms in found["ms_by_kernel"].items()][:5]),
        }
        for name, found in profiles.items()
    ]


def tile_rows(tried: list[dict[str, Any]]) -> list[Row]:
    """Return the times of each pass and tile, in columns by density."""
    rows: dict[tuple[Any, ...], Row] = {}
    for one in (with_present_keys(each, "sync.scape") for each in tried):
        key = one["pass"], one["tile"], one["per warp"]
        row = rows.setdefault(key, {"pass": key[0], "entries of a tile": key[1], "of a warp": key[2]})
        row[f"{one['density']:g}, {one['code']}"] = number(one["ms"], ".3f")
    return list(rows.values())


def traffic_rows(counted: dict[str, Any], least: dict[str, float]) -> list[Row]:
    rows = []
    for name, one in counted.items():
        factor = (one["read"] + one["written"]) / least[name] if name in least else None
        row = {"pass": name, "launches": one["launches"], "read, GB": number(one["read"], ".2f", 1e-9)}
        row |= {"written, GB": number(one["written"], ".2f", 1e-9), "of the least bytes": number(factor, ".2f")}
        row |= {f"{key}, %": number(value, ".0f") for key, value in one.get("shares", {}).items()}
        most = sorted(one.get("stalls", {}).items(), key=lambda stall: -stall[1])[:4]
        row["waits of a warp, cycles"] = joined([f"{name} {cycles:.1f}" for name, cycles in most])
        rows.append(row)
    return rows


# ---------------------------------------------------------------------------------------------- training


def training(results: dict[str, Any]) -> Iterator[str]:
    found = {one["form"]: one for one in results.values() if "tokens_per_second" in one}
    if not found:
        return
    one, adamw = next(iter(found.values())), found.get("adamw", {}).get("tokens_per_second")
    yield f"{one['batch']} sequences of {one['sequence']} tokens a step, on one GPU: a replica alone codes nothing."
    yield markdown(
        [
            {
                "optimizer": form,
                "tokens/s": f"{one['tokens_per_second']:,.0f}",
                "least to most": f"{one['least']:,.0f} to {one['most']:,.0f}",
                "against AdamW (at least 0.98)": number(adamw and one["tokens_per_second"] / adamw, ".3f"),
                "MFU, % (at least 45)": f"{one['mfu_percent']:.1f}",
                "of causal attention, %": f"{one['mfu_causal_percent']:.1f}",
                "memory, GiB": f"{one['memory_gib']:.1f}",
                "last loss": f"{one['points'][-1]['loss']:.3f}",
            }
            for form, one in found.items()
        ]
    )


def losses(results: dict[str, Any]) -> Iterator[str]:
    for step in results.values():
        yield f"{step['replicas']} simulated replicas; these runs together on one GPU. Arguments of all of them:"
        yield f"`{' '.join(step.get('arguments', ()))}`"
        yield markdown(loss_rows(step["runs"]))
        yield markdown(
            [{"run": name, "options": f"`{' '.join(run.get('options', ()))}`"} for name, run in step["runs"].items()]
        )
        yield "Training loss by step:"
        yield markdown(curve_rows(step["runs"]))
        for name, run in step["runs"].items():
            if error := run.get("error"):
                yield f"{name} failed:\n\n```text\n{error.strip()}\n```"
        if "messages" in step:
            said = "\n".join(step["messages"]) or "none"
            yield f"Messages of the kernel about the GPU, afterwards:\n\n```text\n{said}\n```"


def loss_rows(runs: dict[str, Any]) -> list[Row]:
    """Return losses at the last steps that all runs have reached: one run may be cut off before another."""
    last = {kind: last_common([run[kind] for run in runs.values() if run["training"]]) for kind in LOSSES}
    rows = []
    for name, run in runs.items():
        row = {"run": name}
        for kind, step_name in LOSSES.items():
            loss = dict(run[kind]).get(last[kind])
            row |= {step_name: number(None if loss is None else last[kind], ".0f"), f"{kind} loss": number(loss, ".4f")}
        sent, dense = (run.get(f"{kind}_bytes_per_step_and_rank") for kind in ("planned", "dense"))
        row["steps in all"] = number(run["training"][-1][0], ".0f") if run["training"] else "-"
        row["bytes of dense at the target, %"] = number(100 * sent / dense if dense else None, ".2f")
        row["exit code"] = number(run.get("exit_code"), ".0f")
        rows.append(row)
    return rows


def last_common(curves: list[list[list[float]]]) -> float | None:
    """Return the last step that all (step, loss) curves contain."""
    steps = [{step for step, _ in curve} for curve in curves]
    return max(set.intersection(*steps), default=None) if steps else None


def curve_rows(runs: dict[str, Any]) -> list[Row]:
    """Return the training losses at up to eight steps that at least two runs have reached."""
    curves = {name: dict(run["training"]) for name, run in runs.items()}
    reached = Counter(step for curve in curves.values() for step in curve)
    steps = sorted(step for step, count in reached.items() if count > 1)
    kept = steps[:: max(1, -(-len(steps) // 8))]
    return [
        {"run": name, **{f"{step:.0f}": number(curve.get(step), ".3f") for step in kept}}
        for name, curve in curves.items()
    ]


# ------------------------------------------------------------------------------------------------- ranks


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
        yield markdown(
            [
                {
                    "layout": row["layout"],
                    "case": row["case"],
                    "replicas equal": "yes" if row["equal"] else "NO",
                    "waits for the device": number(row["waits"], ".0f") + ("" if row["may wait"] else " (at most 0)"),
                    "at": joined(row.get("where", ())),
                    "s": number(row["seconds"]),
                }
                for row in found["cases"]
            ]
        )


SECTIONS = {one.__name__: one for one in (correctness, speed, training, losses, ranks, methods)}


if __name__ == "__main__":
    sys.exit(run_command(__doc__, lambda args: print(write_report(args.folder)), {"folder": dict(type=Path)}))
