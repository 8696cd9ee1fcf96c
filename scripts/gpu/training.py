"""The trainer on one GPU: tokens/s and MFU of Llama-500M, losses of a 50 M Llama with 4 simulated replicas.

Needs TorchTitan, but no network: the text for Llama-500M and the tokenizer are in the repository, and the text of the
losses is prepared on any machine with `python -m scripts.study.prepare_text --larger`. The tokenizer uses 4,096 of the
32,000 entries that Llama-500M embeds; the computation of a step is the same. Figures are read from the trainer's log.
"""

import re
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.common import ALONE, EMBEDDED, ROOT, RunError, read, write
from scripts.gpu.processes import python, run_together
from scripts.study.prepare_text import LARGER_PREPARED as TEXT
from torchtitan_scape.core.workloads import get_workload
from torchtitan_scape.data.manifest import MANIFEST

ERROR_PART = 4000  # characters that are stored of the start and of the end of a traceback
LOGGED = re.compile(
    r"\bstep: +(?P<step>\d+)  loss: +(?P<loss>[\d.naif]+).*?memory: +(?P<gib>[\d.]+)GiB.*?tps: (?P<tps>[\d,]+)"
    r".*?mfu: (?P<mfu>[\d.]+)%"
)
VALIDATED = re.compile(r"\bvalidate step: +(?P<step>\d+)  loss: +(?P<loss>[\d.naif]+)")
OWN_TEXT = ["--model.hf_assets_path=./torchtitan_scape/data/tokenizer", "--training.dataset=standard_library"]
PLAIN = ["--metrics.no-enable-tensorboard", "--checkpoint.no-enable", "--sample.characters=0"]
PLAIN += ["--sync.consistency_interval=0"]
SMOKE = ["--training.local_batch_size=1", "--training.seq_len=32", "--training.steps=3", "--metrics.log_freq=1"]
SMOKE += ["--lr_scheduler.warmup_steps=1"]
# A recipe of train_configs/methods, and options.
OFFLOADED = ("--sync.scape.weights_dtype=bfloat16", "--sync.scape.offload=state,master")
TIMED: dict[str, tuple[str, tuple[str, ...]]] = {
    "adamw": ("adamw", ()),
    "adams": ("adams", ()),
    "scape": ("scape", ()),
    "offload": ("scape", OFFLOADED),
}
BATCH, SEQUENCE, STEPS, EVERY = 8, 4096, 40, 10  # tokens/s include the time of writing a log line
REPLICAS = 4
MUON = ("--optimizer.name=Muon", "--optimizer.beta1=0.95")
SCAPE = ("--sync.method=scape", "--sync.scape.density=0.05", "--sync.scape.code=int4")
SPARTA = ("--sync.method=sparta", "--sync.sparta.interval=3", "--sync.sparta.code=1bit")
# 1.2 % of the dense bytes, and dense training with the same optimizer. On an H100, AdamW and SCAPE had higher
# losses at step 60 with twice these rates (docs/benchmarks/gpu.md).
COMPARED: dict[str, tuple[str, ...]] = {
    "dense Muon": ("--sync.method=dense", *MUON, "--optimizer.lr=0.016"),
    "SPARTA, Muon": (*SPARTA, *MUON, "--optimizer.lr=0.032"),
    "dense AdamW": ("--sync.method=dense", "--optimizer.name=AdamW", "--optimizer.lr=0.002"),
    "SCAPE": (*SCAPE, "--optimizer.name=AdamS", "--optimizer.lr=0.001"),
}
COMPARED_STEPS = 700  # of 65,536 tokens, by default
# Keys of the trainer's summary that `throughput` and `quality` store.
THROUGHPUT = ("seconds_by_phase", "peak_memory_bytes", "predicted_memory_bytes")
QUALITY = ("planned_bytes_per_step_and_rank", "dense_bytes_per_step_and_rank", "tokens_per_second", "skipped_steps")


def parse(text: str) -> dict[str, Any]:
    """Return the figures of a log's lines, the (step, loss) of validations, and the end of the log from its first
    traceback on, None without one; of a long one the middle is omitted.
    """
    points = [
        {key: float(value.replace(",", "")) for key, value in match.groupdict().items()}
        for match in LOGGED.finditer(text)
    ]
    start = text.find("Traceback (most recent call last)")
    error = None if start < 0 else text[start:]
    if error is not None and len(error) > 2 * ERROR_PART:  # the cause is named at the end of a traceback
        error = f"{error[:ERROR_PART]}\n...\n{error[-ERROR_PART:]}"
    return {
        "points": points,
        "validation": [[float(step), float(loss)] for step, loss in VALIDATED.findall(text)],
        "error": error,
    }


def train(arguments: dict[str, list[str]], steps: dict[str, int], note: Callable[[dict[str, Any]], None]) -> None:
    """Run the trainer with each of the arguments, without other ranks, all at the same time.

    `note` receives the figures of the logs, and the summaries, when they have changed. Raises RunError if a run failed,
    or if its log ends before the last step.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: Path(scratch, str(number)) for number, name in enumerate(arguments)}
        commands = {
            name: ([python(), "-m", "torchtitan_scape.train", *own, f"--job.dump_folder={folders[name]}"], ALONE)
            for name, own in arguments.items()
        }

        def note_with_summaries(found: dict[str, Any], codes: list[int | None]) -> None:
            summaries = {name: read(folder / "summary.json") or {} for name, folder in folders.items()}
            runs = zip(found.items(), codes, strict=True)
            note({name: one | {"summary": summaries[name], "exit_code": code} for (name, one), code in runs})

        for name, text in run_together(commands, parse, note_with_summaries).items():
            if [point["step"] for point in parse(text)["points"]][-1:] != [steps[name]]:
                raise RunError(f"the log of {name} ends before step {steps[name]}:\n{text[-3000:]}")


def timed(form: str, smoke: bool) -> list[str]:
    """Return the trainer's arguments."""
    recipe, options = TIMED[form]
    common = [*PLAIN, "--validation.no-enable", "--sync.scape.density_warmup_steps=0", *options]
    if smoke:
        return [f"--job.config_file={EMBEDDED},train_configs/methods/{recipe}.toml", *common, *SMOKE]
    parts = ("models/llama_500m", f"methods/{recipe}", "machines/one_gpu")
    return [
        f"--job.config_file={','.join(f'train_configs/{part}.toml' for part in parts)}",
        *OWN_TEXT,
        *common,
        *(f"--training.local_batch_size={BATCH}", f"--training.global_batch_size={BATCH}"),
        *(f"--training.seq_len={SEQUENCE}", f"--training.steps={STEPS}", f"--metrics.log_freq={EVERY}"),
        *("--lr_scheduler.warmup_steps=10", "--compile.enable", "--activation_checkpoint.mode=none"),
    ]


def throughput(result: Path, smoke: bool, form: str) -> None:
    arguments = timed(form, smoke)
    batch, sequence, steps = (1, 32, 3) if smoke else (BATCH, SEQUENCE, STEPS)
    found: dict[str, Any] = {"form": form, "arguments": arguments, "batch": batch, "sequence": sequence}

    def note(runs: dict[str, Any]) -> None:
        points, summary = runs[form]["points"], runs[form]["summary"]
        found.update(measured(points), points=points, **{key: summary.get(key) for key in THROUGHPUT})
        write(result, found)
        if points:
            last = "step {step:.0f}: loss {loss:.3f}, {tps:,.0f} tokens/s, MFU {mfu:.1f} %"
            print(last.format(**points[-1]), flush=True)

    train({form: arguments}, {form: steps}, note)


def measured(points: list[dict[str, float]]) -> dict[str, Any]:
    """Return tokens/s after compilation and autotuning.

    mfu is TorchTitan's, which counts attention as not causal; mfu_causal counts causal attention.
    """
    warm = points[2:]  # without the first step and those up to the next line
    if not warm:
        return {}
    rates, mfu = [point["tps"] for point in warm], statistics.median(point["mfu"] for point in warm)
    model = get_workload("llama_500m")
    causal = model.flops_per_token()
    return {
        "tokens_per_second": statistics.median(rates),
        "least": min(rates),
        "most": max(rates),
        "mfu_percent": mfu,
        "mfu_causal_percent": mfu * causal / (causal + 6.0 * model.layers * model.width * model.sequence),
        "memory_gib": max(point["gib"] for point in points),
    }


def compared(smoke: bool) -> list[str]:
    """Return the trainer's arguments that all runs have in common."""
    common = [f"--job.config_file={EMBEDDED}", *PLAIN]
    if smoke:
        return [*common, "--topology.simulate_replicas=2", "--validation.steps=1", "--validation.seq_len=32"]
    common += [f"--topology.simulate_replicas={REPLICAS}", "--training.local_batch_size=32", "--training.seq_len=512"]
    common += ["--metrics.log_freq=20", "--model.flavor=50M", "--training.mixed_precision_param=bfloat16"]
    for section in ("training", "validation"):
        common += [f"--{section}.dataset=prepared", f"--{section}.dataset_path={TEXT.relative_to(ROOT)}"]
    common += ["--validation.seq_len=512", "--validation.local_batch_size=32", "--validation.steps=-1"]
    return [*common, "--compile.enable"]


def length(smoke: bool, steps: int) -> list[str]:
    """Return the trainer's arguments that depend on the number of steps."""
    if smoke:
        return [*SMOKE, "--sync.scape.density_warmup_steps=2", "--validation.freq=3"]
    start = steps // 20
    found = [f"--training.steps={steps}", f"--lr_scheduler.warmup_steps={start}", f"--validation.freq={steps // 4}"]
    return [*found, f"--sync.scape.density_warmup_steps={start}"]


def quality(result: Path, smoke: bool, steps: str = str(COMPARED_STEPS)) -> None:
    """Compare methods after this number of steps, or two numbers: with Muon, and with AdamW or AdamS.

    All runs share the GPU and begin at the same time, because the host limits a run of a small model. Raises RunError
    if a run failed.
    """
    common, (muon, adam) = compared(smoke), ([int(number) for number in steps.split(",")] * 2)[:2]
    numbers = {name: 3 if smoke else muon if MUON[0] in options else adam for name, options in COMPARED.items()}
    own = {name: [*options, *length(smoke, numbers[name])] for name, options in COMPARED.items()}
    found: dict[str, Any] = {"arguments": common, "replicas": 2 if smoke else REPLICAS, "runs": {}}
    if not smoke:
        found["text"] = read(TEXT / MANIFEST)
        found["text"]["source"].pop("path", None)  # differs between machines

    def note(runs: dict[str, Any]) -> None:
        for name, run in runs.items():
            points, summary = run["points"], run["summary"]
            found["runs"][name] = {
                "options": own[name],
                "steps": numbers[name],
                "training": [[point["step"], point["loss"]] for point in points],
                "validation": run["validation"],
                "tokens_per_second_by_step": [[point["step"], point["tps"]] for point in points],
                **{key: run[key] for key in ("exit_code", "error")},
                **{key: summary.get(key) for key in QUALITY},
            }
        write(result, found)
        last = {name: run["training"][-1] for name, run in found["runs"].items() if run["training"]}
        print(", ".join(f"{name}: step {step:.0f}, loss {loss:.3f}" for name, (step, loss) in last.items()), flush=True)

    train({name: [*common, *own[name]] for name in COMPARED}, numbers, note)
