"""What `[observe]` costs: CPU seconds of what it does against those of a step, in one run of the embedded recipe.

    python -m scripts.benchmarks.observe_cost [options of the trainer]

One process plays two replicas. CPU time of the process, so that what else runs on the machine is not in it; the
paper's tensors, dense AdamW, which has the shadow residual besides. A step without observation is the median of those
outside of windows. Over a run: the default windows and histograms in 100,000 steps. Besides, the figures alone per
million entries, on one core, from a tensor of 2^22. Writes results/observe_cost/table.md and cost.json.
"""

import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from scripts.common import ALONE, EMBEDDED, RESULTS, command_of, guarded, markdown, ms, parser, versions, write
from torchtitan_scape.config.job_config import Observe
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.observe import figures
from torchtitan_scape.trainer.trainer import ScapeTrainer

STEPS, WINDOW, HISTOGRAMS = 26, (6, 10), (19, 22)
RUN = 100_000  # steps of the papers' runs
LOOKS = ("before_step", "synchronised", "after_step")


def timed(seconds: dict[int, float], step_of: Callable[[], int], work: Callable[..., Any]) -> Callable[..., Any]:
    """`work`, whose CPU seconds are added to those of the present step."""

    def call(*args: Any) -> Any:
        begin = time.process_time()
        try:
            return work(*args)
        finally:
            seconds[step_of()] += time.process_time() - begin

    return call


def measure(folder: str, rest: list[str]) -> dict[str, Any]:
    """By kind of step, CPU seconds of the observation in the mean; and of a step without, the median."""
    options = [
        *(f"--job.config_file={EMBEDDED}", f"--job.dump_folder={folder}", f"--training.steps={STEPS}"),
        *("--sync.method=dense", "--optimizer.name=AdamW", "--topology.simulate_replicas=2"),
        *("--validation.no-enable", "--sample.characters=0", "--metrics.log_freq=1000"),
        *("--observe.enable", f"--observe.windows=[{list(WINDOW)}]", "--observe.histograms", *map(str, HISTOGRAMS)),
    ]
    trainer = ScapeTrainer(parse([*options, *rest]))
    observation = trainer.observation
    assert observation is not None
    looks: dict[int, float] = defaultdict(float)
    steps: dict[int, float] = defaultdict(float)
    for name in LOOKS:
        setattr(observation, name, timed(looks, lambda: trainer.step, getattr(observation, name)))
    train_step = timed(steps, lambda: trainer.step, trainer.train_step)
    with patch.object(trainer, "train_step", train_step), patch("time.sleep"):
        trainer.train()
    within = range(WINDOW[0], sum(WINDOW))
    plain = [steps[step] for step in range(3, STEPS + 1) if step not in within and step not in HISTOGRAMS]
    found = {
        "step": statistics.median(plain),
        "outside": statistics.fmean(looks[s] for s in range(3, STEPS) if s not in within and s not in HISTOGRAMS),
        "first": looks[within[0]],
        "window": statistics.fmean(looks[step] for step in within[1:]),
        "histogram": statistics.fmean(looks[step] for step in HISTOGRAMS),
        "entries": sum(shard.entries for one in observation.tensors for shard in one.shards),
    }
    defaults = Observe()
    lookup = sum(count - 1 for _, count in defaults.windows) * found["window"] + len(defaults.windows) * found["first"]
    total = lookup + len(defaults.histograms) * found["histogram"] + RUN * found["outside"]
    trainer.close()
    return found | {"share": total / (RUN * found["step"])}


def alone(entries: int = 1 << 22) -> dict[str, float]:
    """CPU seconds of the figures of one tensor, per million entries."""
    gradient, moment = torch.randn(2, entries, generator=torch.Generator().manual_seed(0)) * 1e-4
    shadow, before = figures.ShadowResidual(gradient), figures.largest(gradient, 0.1)
    parts: dict[str, Callable[[], Any]] = {
        "histograms and moments": lambda: figures.distribution(gradient),
        "the largest moments and their overlap": lambda: figures.overlap(before, figures.largest(moment, 0.1)),
        "shadow residual and norms": lambda: (
            shadow.add(gradient, 0.1),
            [figures.norm(values) for values in (gradient, shadow.sent, shadow.kept)],
        ),
    }
    found = {}
    for name, work in parts.items():
        work()
        begin = time.process_time()
        work()
        found[name] = (time.process_time() - begin) / entries * 1e6
    return found


def report(found: dict[str, Any], command: str) -> str:
    step = found["step"]
    kinds = {
        "window": "a step in a window",
        "first": "the first one of a window",
        "histogram": "a step with histograms",
    }
    rows = [
        {"": text, "ms": ms(found[kind]), "of a step": f"{100 * found[kind] / step:.2f} %"}
        for kind, text in kinds.items()
    ]
    rows.append({"": "a step that is not looked at", "ms": f"{1e3 * found['outside']:.4f}", "of a step": "0.00 %"})
    rows.append({"": f"mean over {RUN:,} steps", "ms": f"{1e3 * found['share'] * step:.4f}", "of a step": ""})
    rows[-1]["of a step"] = f"{100 * found['share']:.4f} %"
    alone = [{"per million entries, one core": name, "ms": ms(seconds)} for name, seconds in found["alone"].items()]
    return f"""# What [observe] costs

Made by `{command}`: a step takes {ms(step)} ms of one core; {found["entries"]:,} of 2.2 M entries are looked at.

{markdown(rows)}

{markdown(alone)}
"""


def run(output: Path, rest: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ |= ALONE
    with tempfile.TemporaryDirectory() as folder:
        found = {"alone": alone(), **measure(folder, rest)}
    command = command_of("scripts.benchmarks.observe_cost")
    write(output / "cost.json", {"command": command, "versions": versions(), **found})
    write(output / "table.md", report(found, command))
    print(report(found, command))


def main() -> int:
    own = parser(__doc__, epilog="Further --section.key=value arguments go to the trainer.")
    own.add_argument("--output", type=Path, default=RESULTS / "observe_cost")
    args, rest = own.parse_known_args()
    return guarded(lambda: run(args.output, rest))


if __name__ == "__main__":
    sys.exit(main())
