"""The recipes of train_configs/: checks, composition, and agreement with the papers."""

import itertools
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from torchtitan.config import ConfigManager

from tests.pool import Pool
from torchtitan_scape.config.checks import check_config
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.config.parsing import check_table
from torchtitan_scape.config.recipes import Recipe, load
from torchtitan_scape.config.resolved import values_of
from torchtitan_scape.methods import registry
from torchtitan_scape.sharding.options import ShardingOptions
from torchtitan_scape.trainer.layout import layout_of

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "train_configs"

# The papers' settings, copied from their text.
LLAMA = {
    "model.name": "llama3",
    "optimizer.lr": 3e-4,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.weight_decay": 0.1,
    "lr_scheduler.min_lr_factor": 0.1,  # to 3e-5
    "lr_scheduler.warmup_steps": 2000,
    "training.global_batch_size": 1024,
    "training.dataset": "slimpajama_6b",
    "sync.scape.density_warmup_steps": 2000,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama_500m": LLAMA | {"model.flavor": "500M", "training.seq_len": 4096},
    "llama_1_8b": LLAMA | {"model.flavor": "1.8B", "training.seq_len": 2048},
    "gpt_345m": {
        "model.name": "gpt2",
        "model.flavor": "345M",
        "optimizer.lr": 1.5e-4,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.999,
        "optimizer.weight_decay": 0.01,
        "lr_scheduler.min_lr_factor": 0.0666667,  # to 1e-5
        "lr_scheduler.warmup_steps": 5000,
        "training.global_batch_size": 512,
        "training.seq_len": 1024,
        "training.dataset": "openwebtext",
        "sync.scape.density_warmup_steps": 5000,
    },
}
MODELS["gpt_355m"] = MODELS["gpt_345m"] | {"training.steps": 500_000, "sync.radius.start": 80_000}
MODELS["gpt_2b"] = MODELS["gpt_345m"] | {
    "model.flavor": "2.0B",
    "training.steps": 300_000,
    "training.local_batch_size": 8,
    "sync.radius.start": 60_000,
    "lr_scheduler.warmup_steps": 3000,  # 1 % of the steps
}
# Batch and sequence of TAGC's code: 20 micro-batches on each of two ranks.
MODELS["gpt_124m"] = MODELS["gpt_345m"] | {
    "model.flavor": "124M",
    "training.local_batch_size": 6,
    "training.global_batch_size": 2 * 20 * 6,
    "training.seq_len": 512,
    "training.mixed_precision_param": "float32",
}
# configs/20B.yml of GPT-NeoX: 12 data-parallel ranks with 32 micro-batches of 4 sequences. 14 B tokens.
MODELS["neox_20b"] = {
    "model.flavor": "20B",
    "optimizer.lr": 0.97e-4,
    "optimizer.beta2": 0.95,
    "optimizer.weight_decay": 0.01,
    "lr_scheduler.min_lr_factor": 0.1,
    "training.global_batch_size": 12 * 32 * 4,
    "training.seq_len": 2048,
    "training.steps": round(14e9 / (1536 * 2048)),
}
MODELS["neox_10b"] = MODELS["neox_20b"] | {"model.flavor": "custom", "model.sizes.dim": 4608}
ALL: dict[str, Any] = {
    "lr_scheduler.decay_type": "cosine",
    "lr_scheduler.decay_ratio": None,  # from the end of the warm-up to the last step
    "training.max_norm": 1.0,
    "training.steps": 100_000,
    "sync.radius.start": -1,  # one fifth of the steps
    "training.dtype": "float32",
    "training.mixed_precision_param": "bfloat16",
    "training.mixed_precision_reduce": "float32",
    "data.border": "eos",
}
PAPER_RULE = {
    "optimizer.name": "AdamS",
    "sync.method": "scape",
    "sync.scape.code": "float32",
    "sync.scape.selection": "tensor",
    "sync.scape.staleness_scaling": False,
    "sync.scape.clip_mode": "literal",
    "sync.scape.update": "replicated",
}
METHODS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer.name": "AdamW", "sync.method": "dense"},
    "adams": {"optimizer.name": "AdamS", "sync.method": "dense"},
    "scape_0.1": PAPER_RULE | {"sync.scape.density": 0.1},
    "scape_0.01": PAPER_RULE | {"sync.scape.density": 0.01},
    "scape": {
        "optimizer.name": "AdamS",
        "sync.method": "scape",
        "sync.scape.density": 0.05,
        "sync.scape.code": "int4",
        "sync.scape.selection": "block",
        "sync.scape.staleness_scaling": True,
        "sync.scape.clip_mode": "moment",
    },
    "radius": {
        "optimizer.name": "AdamW",
        "sync.method": "radius",
        "sync.radius.density": 0.5,
        "sync.radius.interval": 200,
    },
    "sparta": {
        "optimizer.name": "AdamW",
        "sync.method": "sparta",
        "sync.sparta.interval": 3,
        "sync.sparta.code": "auto",
    },
}
METHODS |= {
    name: {"optimizer.name": optimizer, "sync.method": name, f"sync.{name}.{key}": value}
    for name, optimizer, key, value in (
        ("quantized", "AdamW", "code", "e2m1"),
        ("quantized_update", "Muon", "code", "2bit"),
        ("onebit_adam", "AdamW", "code", "1bit"),
        ("topk", "AdamW", "density", 0.01),
        ("tagc", "AdamW", "density", 0.0125),
        ("powersgd", "AdamW", "rank", 4),
        ("demo", "SignSGD", "code", "sign"),
        ("diloco", "AdamW", "inner_steps", 30),
        ("streaming_diloco", "AdamW", "inner_steps", 100),
        ("sparseloco", "AdamW", "density", 64 / 4096),
        ("co2", "AdamW", "inner_steps", 48),
        ("noloco", "AdamW", "inner_steps", 50),
    )
}
# Of the configuration for 8 replicas in facebookresearch/MuLoCo, 2x_4gpu_muloco.py; `decay` is of the job files there.
MULOCO = {"inner_steps": 30, "outer_lr": 0.9, "outer_momentum": 0.8, "code": "e2m1", "decay": 0.9}
INNER_MUON = {"name": "Muon", "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.00125}
for _name, _method in (("muloco", "diloco"), ("streaming_muloco", "streaming_diloco")):
    METHODS[_name] = {f"optimizer.{key}": value for key, value in INNER_MUON.items()} | {"sync.method": _method}
    METHODS[_name] |= {f"sync.{_method}.{key}": value for key, value in MULOCO.items()}
# Systems of the shard axis. A method for the replicas may follow.
SHARDING: dict[str, dict[str, Any]] = {
    "zeropp": {"sharding.weights_code": "int8", "sharding.secondary": True, "sharding.gradients_code": "int8+int4"},
    "levels": {"sharding.levels.weights": 2, "sharding.levels.gradients": 8, "sharding.gradients_code": "int4"},
    "tagc_sharding": {"sharding.gradients_code": "tagc", "sharding.tagc.sparsity": 0.9},
}
# (machine, shard degree, ranks, ranks per node, resulting replicas).
MACHINES = {
    "vista": ("vista", 1, 32, 1, 32),
    "frontier": ("frontier", 8, 64, 8, 8),
    "h100": ("dgx-h100", 8, 64, 8, 8),
    "h200": ("dgx-h200", 8, 64, 8, 8),
    "a100": ("dgx-a100", 8, 64, 8, 8),
    "one_gpu": ("auto", 1, 1, 1, 1),
}


def check(table: dict[str, Any]) -> None:
    check_table(JobConfig, table, "")


def built(recipe: Recipe) -> JobConfig:
    """Return TorchTitan's config without a command line, since its parser takes most of the time."""
    return ConfigManager(JobConfig)._dict_to_dataclass(JobConfig, recipe.table)


def given(*names: str) -> str:
    return ",".join(str(RECIPES / f"{name}.toml") for name in names)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(world: int, per_node: int) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_node))

    return start


def test_every_recipe_part_is_listed_here() -> None:
    for folder, known in (("models", {*MODELS, "common"}), ("methods", {*METHODS, *SHARDING}), ("machines", MACHINES)):
        assert {path.stem for path in (RECIPES / folder).glob("*.toml")} == set(known)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_composed_recipes_match_the_papers(model: str, machine: str, ranks: Any) -> None:
    preset, shard, world, per_node, replicas = MACHINES[machine]
    ranks(world, per_node)
    for method, expected in METHODS.items():
        recipe = load(given(f"models/{model}", f"methods/{method}", f"machines/{machine}"), check)
        config = built(recipe)
        values = dict(values_of(config))
        wanted = ALL | MODELS[model] | expected | {"topology.machine": preset}
        assert {key: values[key] for key in wanted} == wanted, method
        check_config(config, "cpu")
        if model == "gpt_124m":  # 40 micro-batches of two ranks cannot be divided among more
            config.training.global_batch_size = -1
        layout = layout_of(config)
        assert (layout.replicate, layout.shard) == (replicas, shard)


def test_the_last_of_several_methods_or_machines_wins() -> None:
    """A later file can therefore replace the method or the machine of a recipe, but not all options of MuLoCo."""
    sections = ("sync.diloco", "sync.streaming_diloco")
    kept = {
        "optimizer.beta2",
        "optimizer.weight_decay",
        *(f"{one}.{key}" for one in sections for key in (*MULOCO, "delay", "mix")),
    }

    def read(*names: str) -> dict[str, Any]:
        values = dict(values_of(built(load(given(*names)))))
        own = f"sync.{values['sync.method']}."
        others = {key for key in values if key.startswith("sync.") and key.count(".") > 1 and not key.startswith(own)}
        return {key: value for key, value in values.items() if key not in others}

    for kind, names in (("methods", METHODS), ("machines", MACHINES)):
        for first, last in itertools.permutations(names, 2):
            both, alone = read(f"{kind}/{first}", f"{kind}/{last}"), read(f"{kind}/{last}")
            different = {key for key in alone if both[key] != alone[key]}
            assert different <= (kept if "muloco" in first else set()), (first, last)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_passes_the_checks(path: Path, ranks: Any) -> None:
    config = built(load(str(path), check))
    ranks(*((1, 1) if config.parallelism.data_parallel_shard_degree == 1 else (8, 8)))
    check_config(config, "cpu")
    layout_of(config)


@pytest.mark.parametrize(
    "recipe, model, method",
    [
        ("radius_355m", "gpt_355m", METHODS["radius"]),
        ("radius_2b", "gpt_2b", METHODS["radius"] | {"sync.radius.density": 0.4}),
        ("tagc_124m", "gpt_124m", SHARDING["tagc_sharding"]),
        ("neox_20b_frontier", "neox_20b", SHARDING["levels"]),
        ("neox_10b_frontier", "neox_10b", SHARDING["levels"]),
    ],
)
def test_recipes_of_papers_are_a_model_with_a_method(recipe: str, model: str, method: dict[str, Any]) -> None:
    values = dict(values_of(built(load(given(recipe), check))))
    wanted = ALL | MODELS[model] | method
    assert {key: values[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    "recipe, world, per_node, parameters, layout",
    [
        ("radius_2b", 64, 8, 2_019_640_320, (64, 1)),
        ("tagc_124m", 2, 1, 124_475_904, (1, 2)),
        ("neox_20b_frontier", 384, 8, 20_551_587_840, (48, 8)),
        ("neox_10b_frontier", 384, 8, 10_147_686_912, (48, 8)),
        ("llama_1_8b_zeropp", 4, 2, 1_831_201_280, (1, 4)),
        ("llama_1_8b_frontier", 64, 8, 1_831_201_280, (8, 8)),
    ],
)
def test_recipes_of_papers_have_their_layout_and_fit(
    recipe: str, world: int, per_node: int, parameters: int, layout: tuple[int, int], ranks: Any
) -> None:
    """Sizes, degrees, and for machines with a preset the memory, as a dry run states them."""
    from torchtitan_scape.models.registry import workload_of
    from torchtitan_scape.report.memory import MemoryReport

    ranks(world, per_node)
    config = built(load(given(recipe), check))
    check_config(config, "cuda")
    found = layout_of(config)
    assert (found.replicate, found.shard) == layout and workload_of(config).parameters == parameters
    levels = config.sharding.levels
    levels.check(found) if levels.active else config.sharding.check(found)
    config.comm.mode = "fake_backend"
    report = MemoryReport.of(config, found, None)
    assert config.topology.machine == "auto" or report.lines()[0].endswith(": fits")


# -------------------------------------------------------------------------------------- methods and sharding


def test_every_method_and_sharding_system_has_a_file() -> None:
    assert {expected["sync.method"] for expected in METHODS.values()} == set(registry.METHODS)
    kinds = set()
    for name in SHARDING:
        sharding = built(load(given(f"methods/{name}"), check)).sharding
        kinds.add("levels" if sharding.levels.active else "tagc" if sharding.sparse else "")
        assert sharding.active
    sections = {field.name for field in fields(ShardingOptions) if is_dataclass(field.type)}
    assert kinds == {"", *sections}, "the options of [sharding] itself, and each of its subsections"


@pytest.mark.parametrize("name", SHARDING)
def test_sharding_systems_combine_with_methods(name: str) -> None:
    """The method that follows is the method between replicas; the shard axis stays as it is."""
    for method, expected in METHODS.items():
        values = dict(values_of(built(load(given(f"methods/{name}", f"methods/{method}"), check))))
        wanted = SHARDING[name] | expected
        assert {key: values[key] for key in wanted} == wanted


INITIAL = ["--optimizer.lr=1e-12"]
SHORT = ["--training.steps=3", "--validation.no-enable", "--metrics.no-enable-tensorboard", "--sync.flush_at_end"]


def train_each(folder: str, files: dict[str, list[str]]) -> dict[str, tuple[list[float], bool]]:
    """Train three steps with each file; return the losses, and whether all parameters are finite.

    "initial" is AdamW with a learning rate near zero. Every step has other data, whose losses differ by more than three
    steps change them, so that losses are compared with those of the initial weights on the same data.
    """
    from tests.training import train

    found = {}
    for name, more in files.items():
        recipe = f"--job.config_file={given('embedded', 'methods/adamw' if name == 'initial' else f'methods/{name}')}"
        result = train(f"{folder}/{name}", [*SHORT, recipe, *more])
        found[name] = result["losses"], bool(result["parameters"].isfinite().all())
    return found


def test_every_method_file_trains(pool2: Pool, tmp_path: Path) -> None:
    """Two replicas; the last step exchanges all that a round of local steps would exchange later.

    1-bit Adam has a warm-up of two steps: 15 % of three steps would freeze the squares of one gradient.
    """
    more = {"onebit_adam": ["--sync.onebit_adam.warmup_steps=2"], "initial": INITIAL}
    results = pool2(
        train_each, str(tmp_path), {name: more.get(name, []) for name in [*METHODS, "initial"]}, timeout=600
    )
    for name in METHODS:
        check_losses(*results[0][name], results[0]["initial"][0])
        assert results[1][name][0] == results[0][name][0], name


def check_losses(losses: list[float], finite: bool, initial: list[float]) -> None:
    """Check that two steps reduced the loss of the third step's data. Top-k's falls by 0.05.

    The first losses differ by the rounding of weights that ZeRO++ gathers in int8.
    """
    assert losses[0] == pytest.approx(initial[0], rel=1e-3) and len(losses) == 3
    assert losses[2] < initial[2] - 0.02 and finite, (losses, initial)


def test_every_sharding_file_trains(pool4: Pool, tmp_path: Path) -> None:
    """Two nodes of two ranks. The file of three levels is for nodes of eight ranks."""
    of_two = ["--sharding.levels.gradients=2", "--parallelism.data_parallel_shard_degree=2"]
    nodes = ["--topology.ranks_per_node=2"]
    more = {name: [*nodes, *(of_two if name == "levels" else [])] for name in SHARDING}
    for result in pool4(train_each, str(tmp_path), more | {"initial": [*nodes, *INITIAL]}, timeout=600):
        for name in SHARDING:
            check_losses(*result[name], result["initial"][0])
