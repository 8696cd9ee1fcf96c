"""The methods of a study by budget, at their best learning rates, as the report and the figures compare them."""

import math
import statistics
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from scripts.study import costs
from scripts.study.grid import Grid, Options, RunSpec, describe_also, digest
from scripts.study.queue import Queue
from scripts.study.store import Store

Run = dict[str, Any]
BETA2 = 0.95  # of train_configs/study.toml


class _Stored(NamedTuple):
    """A stored run, and its declaration in the grid if there is one."""

    method: str
    options: Options
    run: Run
    spec: RunSpec | None


class Trial(NamedTuple):
    """A setting of a method's tuning: the learning rate, and the values of further tuned options."""

    also: str
    rate: float
    loss: float | None  # None: failed

    @property
    def text(self) -> str:
        return f"{self.rate:g}{self.also}"


_OF_METHOD = ("sync.", "optimizer.", "debug.seed", "launch.program")  # in which the runs of a budget may differ


@dataclass
class Entry:
    """A method at a budget.

    Attributes:
        best, trials: The best trial, and all that led to it.
        options: Those of the best trial.
        runs, losses: Runs at the best trial, and their final losses, by seed.
        shares: Bytes over dense FP32 bytes: of a step after the start, and in the mean over the run.
    """

    label: str
    method: str
    best: Trial
    trials: list[Trial]
    options: Options
    runs: dict[int, Run]
    losses: dict[int, float]
    shares: tuple[float, float]

    @property
    def first(self) -> Run:
        """The run of the lowest seed."""
        return next(iter(self.runs.values()))

    @property
    def optimizer(self) -> str:
        return str(self.options["optimizer.name"])

    @property
    def is_dense(self) -> bool:
        return self.options["sync.method"] == "dense"

    def option(self, name: str) -> Any:
        """Return an option of the method's own section."""
        return self.options.get(f"sync.{self.options['sync.method']}.{name}")

    @property
    def payload_code(self) -> Any:
        """The encoding of SCAPE's payload; None for other methods."""
        return self.option("code") if self.options["sync.method"] == "scape" else None

    @property
    def tuned(self) -> str:
        """The best trial, marked if its learning rate is the lowest or the highest that ran."""
        rates = [one.rate for one in self.trials if one.also in (self.best.also, "")]
        return self.best.text + (" (edge)" if self.best.rate in (min(rates), max(rates)) else "")

    def gaps(self, to: "Entry | None") -> list[float]:
        """Return final losses above those of another method in percent, for the seeds that both have."""
        others = to.losses if to else {}
        return [100 * (loss / others[seed] - 1) for seed, loss in self.losses.items() if seed in others]

    def curve(self) -> list[tuple[float, float]]:
        """Return (step, validation loss), the mean over the seeds."""
        curves = [run["validation"] for run in self.runs.values()]
        return [(points[0][0], statistics.mean(loss for _, loss in points)) for points in zip(*curves, strict=False)]


@dataclass
class Budget:
    """Runs that may be compared: one recipe, model, text, batch, number of steps and of replicas.

    Attributes:
        text: Name of the training text: the grid's, or the dataset's.
    """

    title: str
    parameters: int
    text: str
    steps: int
    batch: int
    replicas: int
    entries: list[Entry] = field(default_factory=list)

    def dense(self, optimizer: str) -> Entry | None:
        """Return dense training with an optimizer, with the recipe's b2."""
        found = (one for one in self.entries if one.is_dense and one.optimizer == optimizer)
        return next((one for one in found if one.options.get("optimizer.beta2", BETA2) == BETA2), None)

    @property
    def others(self) -> list[Entry]:
        return [one for one in self.entries if not one.is_dense]

    @property
    def scatter(self) -> float:
        """The sample standard deviation of dense AdamS's final losses in percent of their mean; 0 for one seed."""
        adams = self.dense("AdamS")
        losses = list(adams.losses.values()) if adams else []
        return 100 * statistics.stdev(losses) / statistics.mean(losses) if len(losses) > 1 else 0.0


def budgets_of(grid: Grid, store: Store) -> tuple[list[Budget], int]:
    """Return the budgets of a study, small ones first, and the number of declared runs that are missing.

    Runs are those of the grid, whichever study has them, and all others of this study.
    """
    queue = Queue(grid, [one for one in grid.sets if one.tuned], store, 1, store.path.parent)
    specs, groups = queue.runs(), dict[str, list[_Stored]]()
    for key, line in store.lines.items():
        if (key in specs or key in store.own) and "replicas" in line["result"]:
            spec, options = specs.get(key), line["options"]
            setting = {k: v for k, v in options.items() if not k.startswith(_OF_METHOD)}
            method = spec.method if spec else line["method"]
            groups.setdefault(digest(setting), []).append(_Stored(method, options, line["result"], spec))
    found = [(_budget(group, grid.report), _common(group)) for group in groups.values()]
    if len({one.parameters for one, _ in found if one.entries}) > 1:
        for one, _ in found:
            one.title = f"{one.parameters:,} parameters, {one.title}"
    titles = [one.title for one, _ in found]
    for one, common in found:
        others = [other for title, (_, other) in zip(titles, found, strict=True) if title == one.title]
        if len(others) > 1:
            own = {k: v for k, v in common.items() if any(other.get(k, v) != v for other in others)}
            one.title += f" ({', '.join(f'{k} = {v}' for k, v in own.items())})"
    budgets = [one for one, _ in found if one.entries]
    return sorted(budgets, key=lambda b: (b.steps * b.batch, -b.batch, b.replicas, b.title)), len(queue.missing())


def _budget(group: list[_Stored], report: dict[str, Any]) -> Budget:
    run = next((one.run for one in group if "error" not in one.run), group[0].run)
    steps, batch, replicas, parameters = run["steps"], run["batch"], run["replicas"], run.get("parameters", 1)
    title = f"{steps * batch / parameters:.3g} tokens per parameter: {steps:,} steps x {batch:,} tokens, "
    title += f"{replicas} replica{'s' if replicas > 1 else ''}"
    options, names = group[0].options, report.get("texts", {})
    text = options.get("training.dataset_path") or options.get("training.dataset", "")
    title += f", {names[text]}" if text in names else ""
    one = Budget(title, parameters, names.get(text, text), steps, batch, replicas)
    for method in dict.fromkeys(stored.method for stored in group):
        of_method = [stored for stored in group if stored.method == method]
        trials, settings = dict[Trial, list[_Stored]](), dict[str, list[_Stored]]()
        for stored in of_method:
            settings.setdefault(digest(stored.options | {"debug.seed": None}), []).append(stored)
        for same in settings.values():
            spec = next((stored.spec for stored in same if stored.spec), None)
            also = describe_also(spec.also if spec else _varied(same[0].options, of_method))
            seed = spec.of.seeds[0] if spec else same[0].run["tuning_seed"]
            for run in (stored.run for stored in same if stored.run["seed"] == seed):
                trials[Trial(also, run["learning_rate"], run.get("validation_loss"))] = same
        if done := [trial for trial in trials if trial.loss is not None]:
            best = min(done, key=lambda trial: (trial.loss, trial.rate))
            by_seed = sorted(trials[best], key=lambda stored: stored.run["seed"])
            runs = {stored.run["seed"]: stored.run for stored in by_seed if "error" not in stored.run}
            losses = {seed: run["validation_loss"] for seed, run in runs.items()}
            options = trials[best][0].options
            shares = costs.shares(options, runs[min(runs)])
            label = next((stored.spec.label for stored in of_method if stored.spec), of_method[0].run["label"])
            entry = Entry(label, method, best, sorted(trials, key=lambda t: t[:2]), options, runs, losses, shares)
            one.entries.append(entry)
    one.entries.sort(key=lambda entry: (not entry.is_dense, -entry.shares[0], len(entry.label), entry.label))
    return one


def _varied(options: Options, group: list[_Stored]) -> Options:
    """Return the options that differ within a group, without rate and seed: they name a run that no grid declares."""
    same = _common(group).keys() | {"optimizer.lr", "debug.seed"}
    return {key: value for key, value in options.items() if key not in same}


def _common(group: list[_Stored]) -> Options:
    """Return the options that have one value in all runs."""
    first = group[0].options
    return {key: value for key, value in first.items() if all(one.options.get(key) == value for one in group)}


def best_below(one: Budget, limit: float, report: dict[str, Any]) -> Entry | None:
    """Return the method of the least gap that sends at most `limit` of the dense bytes per step.

    A gap has its standard error added, with dense AdamS's scatter for all methods.
    """
    base = one.dense(report["gaps"][0])
    fits = [entry for entry in one.others if entry.shares[0] <= limit and entry.gaps(base)]
    fits = [entry for entry in fits if entry.method not in report.get("not_on_frontier", ())]
    key = [statistics.mean(entry.gaps(base)) + one.scatter / math.sqrt(len(entry.gaps(base))) for entry in fits]
    return min(zip(key, range(len(fits)), fits, strict=True), default=(0, 0, None))[2]


def relative(one: Budget, entry: Entry, machine: str) -> float:
    """Return the predicted seconds of a run over those of dense AdamW's."""
    dense = one.dense("AdamW")
    assert dense is not None
    own, base = (costs.run_seconds(e.options, e.first, machine) for e in (entry, dense))
    return own / base
