"""A study's grid: a TOML file that declares methods and sets of runs, and the runs that it expands to."""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.common import ROOT
from torchtitan_scape.config.job_config import Sync
from torchtitan_scape.config.recipes import flatten, load, split_names

GRIDS = ROOT / "scripts" / "study" / "grids"
LAUNCHERS = ("simulated", "local", "emulated", "slurm", "predicted")
CURVE_POINTS = 60  # points of a stored training curve
LOGS_PER_POINT = 4  # logged steps per stored point, which is their mean
MAX_MICRO_BATCH = 32  # sequences
# Options that do not change a result are not part of a run's identity.
_WITHOUT_EFFECT = ("job.", "metrics.")
# Fields of a method's section, some of one method, that a run's identity contains only where a grid or recipe sets
# them.
_NOT_SPELLED_OUT: tuple[str, ...] = ("update", "weights_dtype", "offload", "bytes", "whiten_every")
_NOT_SPELLED_OUT += ("topk.code", "sparseloco.code", "demo.code", "diloco.decay", "streaming_diloco.decay")
# Keys of a method that are not options of the trainer: those of its launch, which are part of a run's identity, among
# them `program`, a module that simulates replicas in the place of the trainer; tables, of which `also` has further
# options to tune, with their values; and others.
LAUNCH_KEYS = ("peer", "rank", "every_forward", "last_only", "start_from", "program")
_TABLES = ("also", "planned", "targets")
_METHOD_KEYS = (*LAUNCH_KEYS, *_TABLES, "label", "density_warmup", "settles", "period")
# Sections and keys that a method given as a recipe file may set.
_OF_A_METHOD = (
    "optimizer.",
    "sync.",
    "sharding.",
    "parallelism.",
    "compile.",
    "activation_checkpoint.",
    "training.mixed_precision",
)
_GRID_KEYS = {"title", "about", "recipe", "parameters", "lr_warmup", "density_warmup", "validations", "launcher"}
_GRID_KEYS |= {"validation_tokens", "methods_of", "shared", "report", "defaults", "methods", "sets"}
_OF_THE_GRID = ("lr_warmup", "validations", "validation_tokens")  # which a set may have too
_LISTS = ("methods", "learning_rates", "seeds", "sizes", "sequences")  # of a set
Options = dict[str, Any]


def digest(content: Any) -> str:
    """Return 8 hexadecimal digits of the SHA-256 of `content` as JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def as_arguments(key: str, value: Any) -> list[str]:
    """Return an option as arguments of the trainer."""
    if isinstance(value, bool):
        section, _, name = key.rpartition(".")
        return [f"--{key}" if value else f"--{section}.no-{name.replace('_', '-')}"]
    if isinstance(value, list) and not isinstance(value[0], str):
        return [f"--{key}={json.dumps(value)}"]
    return [f"--{key}={','.join(value) if isinstance(value, list) else value}"]


@functools.cache
def defaults(method: str) -> Options:
    """Return the default options of a method's section; {} if it has none."""
    section = getattr(Sync(), method, None)
    known = () if section is None else dataclasses.fields(section)
    spelled_out = (f.name for f in known if not {f.name, f"{method}.{f.name}"} & set(_NOT_SPELLED_OUT))
    return {f"sync.{method}.{name}": getattr(section, name) for name in spelled_out}


@dataclass(frozen=True)
class BudgetSet:
    """Runs that share a budget, a launcher and its settings.

    Attributes:
        steps, batch, replicas: Budget: tokens per step, simulated replicas. 0: as the recipe says.
        parameters: Of the recipe's model, by default the grid's; 0: not checked.
        learning_rates: Tried with the first seed; None: the recipe's.
        further: Runs that each method may have beyond `learning_rates`; see `Queue.tuning`.
        sizes: Numbers of ranks. sequences: global batches, in sequences; 0: the recipe's.
        lr_warmup, validations, validation_tokens: Share of the steps, number, tokens of each; by default the grid's.
        launch: Settings of the launcher.
    """

    name: str
    methods: tuple[str, ...]
    recipes: tuple[str, ...]
    launcher: str = "simulated"
    steps: int = 0
    batch: int = 0
    replicas: int = 0
    parameters: int = 0
    learning_rates: tuple[float | None, ...] = (None,)
    seeds: tuple[int | None, ...] = (None,)
    further: int = 0
    sizes: tuple[int, ...] = (1,)
    sequences: tuple[int, ...] = (0,)
    micro_batch: int = 0
    lr_warmup: float = 0.0
    validations: int = 0
    validation_tokens: int = 0
    options: Options = field(default_factory=dict)
    launch: Options = field(default_factory=dict)

    @property
    def tuned(self) -> bool:
        return self.learning_rates != (None,)


@dataclass(frozen=True)
class RunSpec:
    """One run: a method of a set with a recipe, a size, a learning rate and a seed.

    Attributes:
        overrides: Keys that the trainer receives in addition to the recipe.
        options: Recipe and overrides together, without keys that do not affect the result; their digest is `key`.
        about: Further declarations of the method.
        also: Values of the options that the method is tuned in besides the learning rate; {} for its own.
    """

    of: BudgetSet
    method: str
    recipe: str
    size: int
    sequences: int
    learning_rate: float | None
    seed: int | None
    overrides: Options
    options: Options
    about: Options
    also: Options

    @functools.cached_property
    def key(self) -> str:
        return digest(self.options)

    @property
    def label(self) -> str:
        return str(self.about.get("label", self.method))

    @property
    def steps(self) -> int:
        return int(self.options["training.steps"])

    @property
    def head(self) -> Options:
        """The first entries of a stored result, also of a failure."""
        head: Options = {"label": self.label}
        if self.of.batch:
            head |= {name: getattr(self.of, name) for name in ("steps", "batch", "replicas")}
            head |= {"learning_rate": self.learning_rate, "seed": self.seed, "tuning_seed": self.of.seeds[0]}
        return head

    @property
    def recipe_name(self) -> str:
        """Name of the first file, which is the model's; others add the machine."""
        return Path(split_names(self.recipe)[0]).stem

    @property
    def config_file(self) -> str:
        return _absolute(self.recipe)

    @property
    def name(self) -> str:
        rate = "" if self.learning_rate is None else f"-lr{self.learning_rate:g}"
        return f"{self.of.name}-{Path(self.method).name.removesuffix('.toml')}{rate}-{self.key}"

    @property
    def title(self) -> str:
        parts = [] if self.learning_rate is None else [f"lr {self.learning_rate:g}{describe_also(self.also)}"]
        parts += [] if self.seed is None else [f"seed {self.seed}"]
        parts += [f"{self.size} ranks"] if self.of.launcher != "simulated" else []
        parts += [self.recipe_name] if len(self.of.recipes) > 1 else []
        parts += [f"{self.sequences} sequences"] if len(self.of.sequences) > 1 else []
        parts += [f"{self.of.steps} x {self.of.batch} tokens"] if self.of.batch else []
        parts += [f"{self.of.replicas} replicas"] if self.of.replicas else []
        return f"{self.of.name}: {self.method}" + "".join(f", {part}" for part in parts)

    @property
    def arguments(self) -> list[str]:
        """The trainer's command line, without the folder of its output."""
        given = (argument for option in self.overrides.items() for argument in as_arguments(*option))
        return [f"--job.config_file={self.recipe}", *given]


class Grid:
    """A declared grid. Raises ValueError with the place of an error."""

    def __init__(self, path: Path) -> None:
        try:
            declared = tomllib.loads(path.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            known = ", ".join(sorted(file.stem for file in GRIDS.glob("*.toml")))
            raise ValueError(f"the grid {path} cannot be read: {error}; stored grids are {known}") from None
        _check_keys(str(path), declared, _GRID_KEYS, {"recipe", "sets"})
        self.path, self.declared = path, declared
        self.parameters = int(declared.get("parameters", 0))
        self.report: dict[str, Any] = declared.get("report", {})
        self.shared = list(declared.get("shared", []))
        self.methods: dict[str, Options] = {}
        if "methods_of" in declared:
            self.methods |= Grid(path.parent / declared["methods_of"]).methods
        for name, table in declared.get("methods", {}).items():
            tables = {key: table.pop(key) for key in _TABLES if key in table}
            self.methods[name] = flatten(table) | tables
        self.sets = [self._set(table) for table in declared["sets"]]
        names = [one.name for one in self.sets]
        if len(set(names)) != len(names):
            raise ValueError(f"{path}: two sets have one name; the names are {', '.join(names)}")

    def _set(self, table: dict[str, Any]) -> BudgetSet:
        """Return a set: its table over the grid's defaults; options and settings of the launcher are merged."""
        common = self.declared.get("defaults", {})
        merged = {key: flatten(common.get(key, {})) | flatten(table.get(key, {})) for key in ("options", "launch")}
        table = common | table | merged
        where = f"set {table.get('name', '?')!r}"
        known = {f.name for f in dataclasses.fields(BudgetSet)} | {"tokens_per_parameter", "recipe"}
        _check_keys(where, table, known, {"name", "methods"})
        if "steps" in table and "tokens_per_parameter" in table:
            raise ValueError(f"{where}: give either steps or tokens_per_parameter")
        recipes = table.get("recipes") or [table.get("recipe", self.declared["recipe"])]
        for recipe in recipes:
            if not all((ROOT / name).is_file() for name in split_names(recipe)):  # an absolute path stays one
                raise ValueError(f"{where}: the recipe {recipe} does not exist; recipes are in train_configs/")
        batch, replicas = table.get("batch", 0), table.get("replicas", 0)
        sequence = read_recipe(recipes[0])["training.seq_len"]
        if batch % (sequence * max(1, replicas)) or batch < 0:
            unit = f"a sequence ({sequence}) x {replicas} replicas"
            raise ValueError(f"{where}: a batch of {batch} tokens is no multiple of {unit}")
        for name in table["methods"]:
            self._check_method(where, name)
        launcher = table.get("launcher", self.declared.get("launcher", "simulated"))
        if launcher not in LAUNCHERS:
            raise ValueError(f"{where}: launcher = {launcher!r}; known are {', '.join(LAUNCHERS)}")
        lists = {key: tuple(table[key]) for key in _LISTS if key in table}
        for key, values in lists.items():
            if not 0 < len(values) == len(set(values)):
                raise ValueError(f"{where}: {key} = {table[key]}; give one or more, each once")
        own = {key: self.declared[key] for key in _OF_THE_GRID if key in self.declared}
        own |= {"parameters": self.parameters}
        given = own | table | lists | {"recipes": tuple(recipes), "launcher": launcher}
        tokens, parameters = given.pop("tokens_per_parameter", 0), given["parameters"]
        if not isinstance(parameters, int) or parameters < bool(tokens):
            raise ValueError(f"{where}: parameters = {parameters!r}; give the number of the model's parameters")
        if tokens:
            given["steps"] = max(1, round(tokens * parameters / batch))
        given.pop("recipe", None)
        return BudgetSet(**given)

    def _check_method(self, where: str, name: str) -> None:
        if not ((ROOT / name).is_file() if is_file(name) else name in self.methods):
            known = f"{', '.join(self.methods)}, and recipe files by path"
            raise ValueError(f"{where}: there is no method {name!r}; known are {known}")

    def choose(
        self,
        names: Sequence[str],
        methods: Sequence[str] = (),
        sizes: Sequence[int] = (),
        options: Options | None = None,
    ) -> list[BudgetSet]:
        """Return the sets with those names, or all sets, with other methods, sizes or options if given.

        Raises ValueError for an unknown name, and for sizes that are not positive.
        """
        for name in names:
            if name not in [one.name for one in self.sets]:
                raise ValueError(f"there is no set {name!r}; known are {', '.join(one.name for one in self.sets)}")
        for name in methods:
            self._check_method("--methods", name)
        if min(sizes, default=1) < 1:
            raise ValueError(f"--sizes {','.join(map(str, sizes))}: give numbers of ranks, 1 or more")
        given = {"methods": methods, "sizes": sizes}
        changed: Options = {key: tuple(dict.fromkeys(values)) for key, values in given.items() if values}
        chosen = [one for one in self.sets if not names or one.name in names]
        return [dataclasses.replace(one, **changed, options=one.options | (options or {})) for one in chosen]

    def method(self, name: str, recipe: str) -> Options:
        """Return the declaration of a method: a table of the grid, or the keys that a file adds to `recipe`."""
        if not is_file(name):
            return self.methods[name]
        return {"label": Path(name).stem} | method_of_file(name, recipe)

    def also(self, method: str) -> list[Options]:
        """Return the options that the method is tuned in besides the learning rate, one value at a time."""
        declared = flatten(self.methods.get(method, {}).get("also", {}))
        return [{option: value} for option, values in declared.items() for value in values]

    def specs(self, one: BudgetSet, method: str) -> list[RunSpec]:
        """Return the runs of a method of a set that is not tuned: every recipe, size, batch and seed."""
        axes = itertools.product(one.recipes, one.sequences, one.sizes, one.seeds)
        return [self.spec(one, method, None, seed, recipe=r, sequences=s, size=n) for r, s, n, seed in axes]

    def spec(
        self,
        one: BudgetSet,
        method: str,
        learning_rate: float | None,
        seed: int | None,
        also: Options | None = None,
        *,
        recipe: str = "",
        sequences: int = 0,
        size: int = 0,
    ) -> RunSpec:
        """Return a run; recipe, batch and size are the first of the set by default."""
        recipe, sequences, size = recipe or one.recipes[0], sequences or one.sequences[0], size or one.sizes[0]
        base, declared = read_recipe(recipe), self.method(method, recipe)
        about = {k: v for k, v in declared.items() if k in _METHOD_KEYS}
        own = {k: v for k, v in declared.items() if k not in about} | (also or {})
        shared = self._budget(one, base) if one.batch else _ranks(one, base, size, sequences)
        shared |= one.options
        kind = str((base | shared | own)["sync.method"])
        section, spelled_out = f"sync.{kind}.", defaults(kind)  # a changed default makes another run
        if one.batch and f"{section}density_warmup_steps" in spelled_out:
            share = declared.get("density_warmup", self.declared.get("density_warmup", 0.0))
            own = {f"{section}density_warmup_steps": round(share * one.steps), **own}
        overrides = shared | own
        overrides |= {} if learning_rate is None else {"optimizer.lr": learning_rate}
        overrides |= {} if seed is None else {"debug.seed": seed}

        def counts(key: str) -> bool:
            elsewhere = key.startswith("sync.") and key.count(".") > 1 and not key.startswith(section)
            return not elsewhere and not key.startswith(_WITHOUT_EFFECT)

        known = spelled_out | base | overrides
        if one.launcher != "simulated":
            known |= {f"launch.{k}": v for k, v in {"launcher": one.launcher, "ranks": size, **one.launch}.items()}
        known |= {f"launch.{name}": about[name] for name in LAUNCH_KEYS if name in about}
        options = {key: value for key, value in sorted(known.items()) if counts(key)}
        axes = (recipe, size, sequences, learning_rate, seed)
        return RunSpec(one, method, *axes, overrides, options, about, also or {})

    def _budget(self, one: BudgetSet, base: Options) -> Options:
        """Return the options of a set's budget, the same for all its methods."""
        sequence, replicas = base["training.seq_len"], max(1, one.replicas)
        sequences = one.batch // sequence
        validated = max(1, one.validation_tokens // sequence // replicas)
        return {
            "training.steps": one.steps,
            "training.global_batch_size": sequences,
            "training.local_batch_size": largest_divisor(sequences // replicas, MAX_MICRO_BATCH),
            "lr_scheduler.warmup_steps": max(1, round(one.lr_warmup * one.steps)),
            "validation.freq": -(-one.steps // one.validations),
            "validation.local_batch_size": (at_a_time := largest_divisor(validated, MAX_MICRO_BATCH)),
            "validation.steps": validated // at_a_time,
            "metrics.log_freq": max(1, one.steps // (CURVE_POINTS * LOGS_PER_POINT)),
            **({"topology.simulate_replicas": one.replicas} if one.replicas else {}),
        }


def _ranks(one: BudgetSet, base: Options, size: int, sequences: int) -> Options:
    """Return the batch options of a run on several ranks: a fixed global batch in the largest micro-batches."""
    shared: Options = {"training.steps": one.steps} if one.steps else {}
    sequences = sequences or int(base.get("training.global_batch_size", 0))
    if not sequences:
        return shared
    if sequences % size:
        unit = f"{size} ranks; set sequences"
        raise ValueError(f"set {one.name!r}: a global batch of {sequences} sequences is no multiple of {unit}")
    each = sequences // size
    micro = largest_divisor(each, one.micro_batch or int(base["training.local_batch_size"]))
    return shared | {"training.local_batch_size": micro, "training.global_batch_size": sequences}


def is_file(method: str) -> bool:
    """Return whether a method's name is the path of a recipe."""
    return method.endswith(".toml")


@functools.cache
def method_of_file(path: str, recipe: str) -> Options:
    """Return the options of a recipe that concern the method: not the model, the data or the schedule, and no value of
    a file that `recipe` contains as well."""
    common = set(map(os.path.realpath, load(_absolute(recipe)).files))
    found = load(str(ROOT / path))
    flat = {key: value for key, value in flatten(found.table).items() if key.startswith(_OF_A_METHOD)}
    return {key: value for key, value in flat.items() if os.path.realpath(found.origins[key]) not in common}


def _absolute(recipe: str) -> str:
    return ",".join(str(ROOT / name) for name in split_names(recipe))


@functools.cache
def read_recipe(recipe: str) -> Options:
    """Return the options of a recipe's files."""
    return flatten(load(_absolute(recipe)).table)


def describe_also(also: Options) -> str:
    """Return {"sync.diloco.outer_lr": 0.4} as ", outer_lr 0.4"; "" for {}."""
    texts = {key.rpartition(".")[2]: f"{value:g}" if isinstance(value, float) else value for key, value in also.items()}
    return "".join(f", {name} {text}" for name, text in texts.items())


def largest_divisor(count: int, limit: int) -> int:
    """Return the largest divisor of `count` that is at most `limit`."""
    return max(n for n in range(1, limit + 1) if count % n == 0)


def _check_keys(where: str, table: dict[str, Any], known: set[str], needed: set[str]) -> None:
    for key in table:
        if key not in known:
            raise ValueError(f"{where}: there is no key {key!r}; known are {', '.join(sorted(known))}")
    if lacking := sorted(needed - set(table)):
        raise ValueError(f"{where} lacks {', '.join(lacking)}")
