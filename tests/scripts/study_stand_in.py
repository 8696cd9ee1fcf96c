"""A small study: its grid, and a stand-in for the trainer."""

import json
import sys
from pathlib import Path
from typing import Any

from scripts.study.__main__ import main
from scripts.study.grid import RunSpec
from scripts.study.store import Store

MODEL = """
recipe = "train_configs/study.toml"
parameters = 200720
lr_warmup = 0.05
validations = 4
validation_tokens = 81920
"""
HEAD = (
    MODEL
    + """
density_warmup = 0.1
[report]
tables = ["budgets"]
figures = ["frontier", "steps"]
gaps = ["AdamS"]
not_on_frontier = ["scape-0.1"]
[methods]
dense-adams = { label = "AdamS, dense", sync.method = "dense", optimizer.name = "AdamS" }
dense-adamw = { label = "AdamW, dense", sync.method = "dense", optimizer.name = "AdamW" }
"scape-0.1" = { label = "SCAPE 0.1", sync = { method = "scape", scape = { density = 0.1, staleness_scaling = false } } }
coded.label = "SCAPE int4, 48 of 1024"
coded.density_warmup = 0.05
coded.sync = { method = "scape", scape = { density = 0.046875, code = "int4" } }
few.sync = { method = "scape", scape = { density = 0.0125, code = "2bit" } }
slow = { sync = { method = "scape", scape.density = 0.01 }, density_warmup = 0.25 }
"""
)
SMALL = {
    "name": "small",
    "steps": 40,
    "batch": 1024,
    "replicas": 4,
    "methods": ["dense-adams", "scape-0.1"],
    "learning_rates": [1e-3, 2e-3, 4e-3],
    "seeds": [0, 1],
}
# Writes a trainer's outputs at once. The loss is lowest at a learning rate of 2e-3, and 10 % higher with SCAPE. It
# appends its name to the file CALLS; with FAILS in the environment it fails with SCAPE at 4e-3.
TRAINER = """
import json, os, sys
from pathlib import Path
given = dict(a.lstrip("-").split("=", 1) for a in sys.argv[1:] if "=" in a)
out, steps = Path(given["job.dump_folder"]), int(given["training.steps"])
scape, rate, seed = given["sync.method"] == "scape", float(given["optimizer.lr"]), int(given["debug.seed"])
with open(os.environ["CALLS"], "a") as calls:
    calls.write(out.name + "\\n")
print("Standard-library corpus: digest 0123456789ab\\nModel llama3 study size: 200,720 total parameters")
if os.environ.get("FAILS") and scape and rate == 4e-3:
    print("reading /nowhere/at/all\\n[rank 0] error: the gradient of /nowhere/at/all is not finite")
    sys.exit(2)
loss = (2 + 100 * abs(rate - 2e-3) + 0.01 * seed) * (1.1 if scape else 1)
points = [1, steps // 2, steps]
curves = {"training": [(s, loss + 1 / s) for s in points], "validation": [(s, loss + 1 - s / steps) for s in points]}
curves["network"] = [(s, 120.0 if scape else 1000.0) for s in points]
(out / "curves.json").write_text(json.dumps(curves))
summary = dict(steps=steps, validation_loss=loss, training_loss=loss, tokens=steps * 1024, seconds_per_step=0.1)
summary |= dict(bytes_sent_per_rank={"network": steps * (120.0 if scape else 1000.0)})
summary |= dict(dense_bytes_per_step_and_rank=1000.0, skipped_steps=0)
(out / "summary.json").write_text(json.dumps(summary))
"""


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def declare(path: Path, *sets: dict[str, Any]) -> Path:
    texts = ["[[sets]]\n" + "\n".join(f"{k} = {toml(v)}" for k, v in one.items() if v is not None) for one in sets]
    path.write_text(HEAD + "\n".join(texts))
    return path


class Study:
    """A study in its own folder, with the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.grid, self.output, self.calls = folder / "grid.toml", folder / "out", folder / "calls"
        (folder / "trainer.py").write_text(TRAINER)
        self.options = (str(self.grid), f"--output={self.output}")

    def command(self, spec: RunSpec, out: Path) -> list[str]:
        """Take the place of `launchers.process_command`."""
        trainer = self.grid.parent / "trainer.py"
        return [sys.executable, "-S", str(trainer), *spec.arguments, f"--job.dump_folder={out}"]

    def run(self, *sets: dict[str, Any], jobs: int = 2) -> int:
        declare(self.grid, *sets)
        return main(["run", *self.options, f"--jobs={jobs}", f"--work={self.grid.parent / 'work'}"])

    def report(self) -> str:
        assert main(["report", *self.options]) == 0
        return (self.output / "report.md").read_text()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return list(Store(self.output).own.values())

    def rewrite(self, lines: list[dict[str, Any]]) -> None:
        (self.output / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def ran(self) -> list[str]:
        """Return the names of the runs since the last call."""
        names = self.calls.read_text().split() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return names


def rows(text: str, head: str) -> dict[str, list[str]]:
    """Return a table's rows by their first field; `head` is in the table's first line."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| method") and head in line)
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        table.append([field.strip() for field in line.strip("|").split("|")])
    return {fields[0]: fields[1:] for fields in table}
