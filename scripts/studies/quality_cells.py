"""The quality study's declared grid, the cells that it expands to, and where their results are stored."""

import dataclasses
import functools
import hashlib
import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.common import ROOT, read, write
from torchtitan_scape.config.recipes import flatten, load, split_names

GRID = ROOT / "scripts" / "studies" / "quality_grid.toml"
CURVE_POINTS = 60  # of a stored training curve
LOGS_PER_POINT = 4  # a logged loss is one step's; a stored point is the mean of so many
MOST_SEQUENCES = 32  # of a micro-batch
# Cells are stored under the names that options had when the first ones ran: by them they are found again.
_STORED_AS = {
    "sync.scape.staleness_scaling": "sync.scape.wait_scaling",
    "sync.scape.max_staleness": "sync.scape.max_wait",
    "sync.scape.wire": "sync.scape.wire_dtype",
}
_STORED_BESIDES = {"sync.scape.wait_by": "row_column"}  # the only rule that is left
# Options that came later: with these values a run is what it was without them.
_SINCE = {"sync.topk.divisor": "replicas"}
# Where output goes and what is logged does not change a result.
_WITHOUT_EFFECT = ("job.", "metrics.")
_STUDY_KEYS = {
    "recipe",
    "parameters",
    "lr_warmup",
    "density_warmup",
    "validations",
    "validation_tokens",
    "methods",
    "sets",
}
_METHODS_OF = "methods_of"  # another grid, beside this one, whose methods this one has, too
_SET_KEYS = {"name", "tokens_per_parameter", "steps", "batch", "replicas", "methods", "learning_rates", "seeds"}
_ALSO = "also."  # of a method: values of options that it is tuned in besides the learning rate
Options = dict[str, Any]


def digest(content: Any) -> str:
    """8 hexadecimal digits of what JSON makes of `content`."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def as_argument(key: str, value: Any) -> str:
    """An option as the trainer's command line takes it."""
    if isinstance(value, bool):
        section, _, name = key.rpartition(".")
        return f"--{key}" if value else f"--{section}.no-{name.replace('_', '-')}"
    if isinstance(value, list):
        value = ",".join(map(str, value))
    return f"--{key}={value}"


def as_stored(options: Options) -> Options:
    return {_STORED_AS.get(key, key): value for key, value in options.items()}


@functools.cache
def defaults(method: str) -> Options:
    """Those of the method's section that a simulation takes; none of a method without one."""
    # `bytes` is 0, for none, in all runs that do not set it.
    others = ("dense_names", "update", "values", "weights_dtype", "offload", "bytes")
    # Late: the trainer has to be imported before TorchTitan is.
    from torchtitan_scape.config.job_config import Sync

    section = getattr(Sync(), method, None)
    known = () if section is None else dataclasses.fields(section)
    return {f"sync.{method}.{f.name}": getattr(section, f.name) for f in known if f.name not in others}


@dataclass(frozen=True)
class Set:
    """A budget and what runs at it. `steps`, `batch` (tokens) and `replicas` are the same for all its cells.

    further: so many runs each method may have beyond `learning_rates`, to be tuned; see `Tuning`.
    """

    name: str
    steps: int
    batch: int
    replicas: int
    methods: tuple[str, ...]
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    options: Options = field(default_factory=dict)
    further: int = 0


@dataclass(frozen=True)
class Cell:
    """A run: one method, learning rate and seed of a set.

    overrides: what the trainer is told beyond the recipe. options: recipe and overrides together, without what has no
    effect on the result, by the names under which cells are stored; their digest is the cell's identity. setting:
    digest of what all methods of a set share, variant: of what the method sets. also: which of the values
    that the method is tuned in besides the learning rate; empty for its own.
    """

    of: Set
    method: str
    label: str
    learning_rate: float
    seed: int
    overrides: Options
    options: Options
    setting: str
    variant: str
    also: Options = field(default_factory=dict)

    @property
    def key(self) -> str:
        return digest(self.options)

    @property
    def tokens(self) -> int:
        return self.of.steps * self.of.batch

    @property
    def name(self) -> str:
        run = f"{self.of.steps}x{self.of.batch}-r{self.of.replicas}-lr{self.learning_rate:g}-s{self.seed}"
        return f"{self.method}-{run}-{self.key}"

    @property
    def title(self) -> str:
        run = f"lr {self.learning_rate:g}{described(self.also)}, seed {self.seed}, "
        run += f"{self.of.steps} x {self.of.batch} tokens"
        return f"{self.of.name}: {self.method}, {run}, {self.of.replicas} replicas"

    def head(self) -> dict[str, Any]:
        head: dict[str, Any] = {"set": self.of.name, "method": self.method, "label": self.label}
        head |= {name: getattr(self.of, name) for name in ("steps", "batch", "replicas")}
        head |= {"learning_rate": self.learning_rate, "seed": self.seed, "tuning_seed": self.of.seeds[0]}
        return head | {"setting": self.setting, "variant": self.variant, "options": self.options}


class Grid:
    """The declared grid. Raises ValueError, naming the place, for what cannot be run."""

    def __init__(self, path: Path) -> None:
        try:
            declared = tomllib.loads(path.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"the grid {path} cannot be read: {error}") from None
        _check_keys(str(path), declared, _STUDY_KEYS | {_METHODS_OF}, _STUDY_KEYS - {"methods"})
        self.recipe = str(declared["recipe"])
        found = [ROOT / name for name in split_names(self.recipe)]  # an absolute path stays one
        if not all(file.is_file() for file in found):
            raise ValueError(f"{path}: the recipe {self.recipe} does not exist; recipes are in train_configs/")
        self.base = flatten(load(",".join(map(str, found))).table)
        self.sequence = int(self.base["training.seq_len"])
        self.parameters = int(declared["parameters"])
        self.lr_warmup, self.density_warmup = float(declared["lr_warmup"]), float(declared["density_warmup"])
        self.validations, self.validation_tokens = int(declared["validations"]), int(declared["validation_tokens"])
        own = {name: flatten(table) for name, table in declared.get("methods", {}).items()}
        others = Grid(path.parent / declared[_METHODS_OF]).methods if _METHODS_OF in declared else {}
        self.methods: dict[str, Options] = others | own
        self.sets = [self._set(table) for table in declared["sets"]]
        names = [one.name for one in self.sets]
        if len(set(names)) != len(names):
            raise ValueError(f"{path}: two sets have one name; the names are {', '.join(names)}")

    def _set(self, table: dict[str, Any]) -> Set:
        where = f"set {table.get('name', '?')!r}"
        needed = _SET_KEYS - {"tokens_per_parameter", "steps"}
        _check_keys(where, table, _SET_KEYS | {"options", "further"}, needed)
        if ("steps" in table) == ("tokens_per_parameter" in table):
            raise ValueError(f"{where}: give either steps or tokens_per_parameter")
        batch, replicas = int(table["batch"]), int(table["replicas"])
        if batch < 1 or batch % (self.sequence * max(1, replicas)):
            unit = f"a sequence ({self.sequence}) x {replicas} replicas"
            raise ValueError(f"{where}: a batch of {batch} tokens is no multiple of {unit}")
        for name in table["methods"]:
            if name not in self.methods:
                raise ValueError(f"{where}: there is no method {name!r}; known are {', '.join(self.methods)}")
        for key in ("methods", "learning_rates", "seeds"):
            if not table[key] or len(set(table[key])) != len(table[key]):
                raise ValueError(f"{where}: {key} = {table[key]}; give one or more, each once")
        tokens = table.get("tokens_per_parameter", 0) * self.parameters
        steps = int(table.get("steps") or max(1, round(tokens / batch)))
        rates, seeds = tuple(map(float, table["learning_rates"])), tuple(map(int, table["seeds"]))
        options = flatten(table.get("options", {}))
        further = int(table.get("further", 0))
        return Set(table["name"], steps, batch, replicas, tuple(table["methods"]), rates, seeds, options, further)

    def choose(self, names: Sequence[str]) -> list[Set]:
        """The sets of those names, all without any. Raises ValueError for an unknown one."""
        for name in names:
            if name not in [one.name for one in self.sets]:
                raise ValueError(f"there is no set {name!r}; known are {', '.join(one.name for one in self.sets)}")
        return [one for one in self.sets if not names or one.name in names]

    def also(self, method: str) -> list[Options]:
        """What the method is tuned in besides the learning rate, one value of one option at a time."""
        declared = {k.removeprefix(_ALSO): v for k, v in self.methods[method].items() if k.startswith(_ALSO)}
        return [{option: value} for option, values in declared.items() for value in values]

    def cell(self, one: Set, method: str, learning_rate: float, seed: int, also: Options | None = None) -> Cell:
        apart = ("label", "density_warmup")
        own = {k: v for k, v in self.methods[method].items() if k not in apart and not k.startswith(_ALSO)}
        own |= also or {}
        sequences = one.batch // self.sequence
        each = sequences // max(1, one.replicas)
        validated = max(1, self.validation_tokens // self.sequence // max(1, one.replicas))
        shared: Options = {
            "training.steps": one.steps,
            "training.global_batch_size": sequences,
            "training.local_batch_size": micro_batch(each),
            "lr_scheduler.warmup_steps": max(1, round(self.lr_warmup * one.steps)),
            "validation.freq": -(-one.steps // self.validations),
            "validation.local_batch_size": micro_batch(validated),
            "validation.steps": validated // micro_batch(validated),
            "metrics.log_freq": max(1, one.steps // (CURVE_POINTS * LOGS_PER_POINT)),
            **({"topology.simulate_replicas": one.replicas} if one.replicas else {}),  # 0: as the recipe says
            **one.options,
        }
        kind = str((self.base | shared | own)["sync.method"])
        section, spelled_out = f"sync.{kind}.", defaults(kind)  # a changed default makes another cell
        if f"{section}density_warmup_steps" in spelled_out:
            share = self.methods[method].get("density_warmup", self.density_warmup)
            own = {f"{section}density_warmup_steps": round(share * one.steps), **own}
        overrides = shared | own | {"optimizer.lr": learning_rate, "debug.seed": seed}

        def counts(key: str) -> bool:
            elsewhere = key.startswith("sync.") and key.count(".") > 1 and not key.startswith(section)
            return not elsewhere and not key.startswith(_WITHOUT_EFFECT)

        known = _STORED_BESIDES | as_stored(spelled_out | self.base | overrides)
        options = {k: v for k, v in sorted(known.items()) if counts(k) and (k, v) not in _SINCE.items()}
        varied = ("sync.", "optimizer.name", "optimizer.lr", "debug.seed", *_WITHOUT_EFFECT)
        common = {k: v for k, v in (self.base | shared).items() if not k.startswith(varied)}
        label = str(self.methods[method].get("label", method))
        variant = digest(as_stored(own))
        return Cell(one, method, label, learning_rate, seed, overrides, options, digest(common), variant, also or {})


class Store:
    """OUTPUT/cells: one JSON a cell, found by its identity whatever the method was called when it ran.

    shared: outputs of other studies, whose cells are read and never written.
    """

    def __init__(self, folder: Path, shared: Sequence[Path] = ()) -> None:
        self.folder = folder / "cells"
        self._paths = _paths(self.folder)
        found = {key: path for other in shared for key, path in _paths(other / "cells").items()} | self._paths
        self._contents = {key: read(path) for key, path in found.items()}

    @property
    def failed(self) -> set[str]:
        """Identities of the cells whose run failed."""
        return {key for key, found in self._contents.items() if isinstance(found, dict) and "error" in found}

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """A finished cell. None where it has not run, failed, or cannot be read."""
        content = self._contents.get(cell.key)
        return content if isinstance(content, dict) and "error" not in content else None

    def loss(self, cell: Cell) -> float | None:
        content = self.read(cell)
        return None if content is None else content["validation_loss"]

    def keep(self, cell: Cell, content: dict[str, Any]) -> None:
        path = self._paths.setdefault(cell.key, self.folder / f"{cell.name}.json")
        self._contents[cell.key] = {**cell.head(), **content}
        write(path, self._contents[cell.key])


def _paths(folder: Path) -> dict[str, Path]:
    return {path.stem.rpartition("-")[2]: path for path in sorted(folder.glob("*.json"))}


def described(also: Options) -> str:
    """For titles: {"sync.diloco.outer_lr": 0.4} as ", outer_lr 0.4"; empty for none."""
    return "".join(f", {option.rpartition('.')[2]} {value:g}" for option, value in also.items())


def _check_keys(where: str, table: dict[str, Any], known: set[str], needed: set[str]) -> None:
    for key in table:
        if key not in known:
            raise ValueError(f"{where}: there is no key {key!r}; known are {', '.join(sorted(known))}")
    if lacking := sorted(needed - set(table)):
        raise ValueError(f"{where} lacks {', '.join(lacking)}")


def micro_batch(sequences: int) -> int:
    """The largest number of sequences at a time that divides `sequences`."""
    return max(n for n in range(1, MOST_SEQUENCES + 1) if sequences % n == 0)


def best_learning_rate(losses: dict[float, float | None]) -> float | None:
    """The learning rate of the lowest loss; None where no run ended. The lower one of two equal ones."""
    finite = {rate: loss for rate, loss in losses.items() if loss is not None and math.isfinite(loss)}
    return min(sorted(finite), key=lambda rate: finite[rate]) if finite else None
