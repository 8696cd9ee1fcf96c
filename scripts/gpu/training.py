"""The trainer on one GPU: tokens/s and MFU of Llama-500M.

Needs TorchTitan, but no network: text and tokenizer are in the repository. The tokenizer uses 4,096 of the 32,000
entries that Llama-500M embeds; the computation of a step is the same. Figures are read from the trainer's log.
"""

import re
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.common import ALONE, EMBEDDED, RunError, read, write
from scripts.gpu.processes import python, run_together
from torchtitan_scape.core.workloads import get_workload

ERROR_PART = 4000  # characters that are stored of the start and of the end of a traceback
LOGGED = re.compile(
    r"\bstep: +(?P<step>\d+)  loss: +(?P<loss>[\d.naif]+).*?memory: +(?P<gib>[\d.]+)GiB.*?tps: (?P<tps>[\d,]+)"
    r".*?mfu: (?P<mfu>[\d.]+)%"
)
VALIDATED = re.compile(r"\bvalidate step: +(?P<step>\d+)  loss: +(?P<loss>[\d.naif]+)")
OWN_TEXT = ["--model.hf_assets_path=./torchtitan_scape/data/tokenizer", "--training.dataset=standard_library"]
PLAIN = ["--metrics.no-enable-tensorboard", "--checkpoint.no-enable"]
PLAIN += ["--sync.consistency_interval=0"]
SMOKE = ["--training.local_batch_size=1", "--training.seq_len=32", "--training.steps=3", "--metrics.log_freq=1"]
SMOKE += ["--lr_scheduler.warmup_steps=1"]
# A recipe of train_configs/methods, and options. A replica alone sends nothing, and codes nothing; Muon and
# `quantized_update` are compared with two simulated replicas.
OFFLOADED = ("--sync.scape.update=sharded", "--sync.scape.weights_dtype=bfloat16", "--sync.scape.offload=state")
TWO = ("--topology.simulate_replicas=2", "--optimizer.beta1=0.95")
TIMED: dict[str, tuple[str, tuple[str, ...]]] = {
    "adamw": ("adamw", ()),
    "adams": ("adams", ()),
    "scape": ("scape", ()),
    "muon": ("adamw", ("--optimizer.name=Muon", *TWO)),
    "quantized_update": ("quantized_update", TWO),
    "offload": ("scape", OFFLOADED),
}
BATCH, SEQUENCE, STEPS, EVERY = 16, 4096, 20, 5  # tokens/s include the time of writing a log line
# Keys of the trainer's summary that `throughput` stores.
THROUGHPUT = ("seconds_by_phase", "peak_memory_bytes", "predicted_memory_bytes")


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
    replicas = 2 if TWO[0] in options else 1
    common = [*PLAIN, "--validation.no-enable", "--sync.scape.density_warmup_steps=0", *options]
    if smoke:
        return [f"--job.config_file={EMBEDDED},train_configs/methods/{recipe}.toml", *common, *SMOKE]
    parts = ("models/llama_500m", f"methods/{recipe}", "machines/one_gpu")
    return [
        f"--job.config_file={','.join(f'train_configs/{part}.toml' for part in parts)}",
        *OWN_TEXT,
        *common,
        *(f"--training.local_batch_size={BATCH // replicas}", f"--training.global_batch_size={BATCH}"),
        *(f"--training.seq_len={SEQUENCE}", f"--training.steps={STEPS}", f"--metrics.log_freq={EVERY}"),
        *("--lr_scheduler.warmup_steps=5", "--compile.enable", "--activation_checkpoint.mode=none"),
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
