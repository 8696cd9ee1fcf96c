"""The model families by `[model] name`, a configured model as data for the planner, and its division into stages."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchtitan_scape.config.job_config import CUSTOM, JobConfig, Model
from torchtitan_scape.config.parsing import resolve
from torchtitan_scape.core.workloads import Recomputation, Workload
from torchtitan_scape.models.gpt2 import GPT2, GPT2_ARGS, GPT2Args
from torchtitan_scape.models.llama import LLAMA_ARGS, Llama
from torchtitan_scape.titan.distributed import generate_llm_fqn_per_model_part
from torchtitan_scape.titan.models import BaseModelArgs, TransformerModelArgs, llama3_args

_DEGREE = "parallelism.pipeline_parallel_degree"
_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {}  # by the model's arguments
# Keys that the flavor "custom" needs; the others have defaults.
_NEEDED = ("dim", "n_layers", "n_heads", "vocab_size")


def with_sizes(args: BaseModelArgs, model: Model) -> BaseModelArgs:
    """Return the arguments of the flavor with the sizes that [model.sizes] sets.

    Raises ValueError if the family has no such size, sizes do not divide each other, or "custom" needs more.
    """
    given = model.sizes.given()
    if model.flavor == CUSTOM and (missing := [key for key in _NEEDED if key not in given]):
        raise ValueError(f"[model] flavor = 'custom' needs [model.sizes] {', '.join(missing)}; set them to the model's")
    if not given:
        return args
    if isinstance(args, GPT2Args):
        _refuse(given, ("n_kv_heads", "ffn_dim", "rope_theta"), model)
        if positions := given.pop("positions", 0):
            given["max_seq_len"] = positions
        _check_divides("n_heads", given.get("n_heads", args.n_heads), "dim", given.get("dim", args.dim), model)
        return replace(args, **given)
    assert isinstance(args, TransformerModelArgs)
    _refuse(given, ("positions",), model)
    ffn = given.pop("ffn_dim", 0)
    sized = replace(args, **given)
    _check_divides("n_heads", sized.n_heads, "dim", sized.dim, model)
    if sized.n_kv_heads is not None:
        _check_divides("n_kv_heads", sized.n_kv_heads, "n_heads", sized.n_heads, model)
    if sized.dim // sized.n_heads % 2:
        raise ValueError(
            f"[model.sizes] dim = {sized.dim} with n_heads = {sized.n_heads}: a head has {sized.dim // sized.n_heads} "
            "entries, and rotary positions need an even number; set n_heads so that dim / n_heads is even"
        )
    # TorchTitan takes 8/3 of dim, times a factor, and rounds up to a multiple. This rounds up to `ffn` itself.
    return replace(sized, multiple_of=ffn, ffn_dim_multiplier=ffn / int(8 * sized.dim / 3)) if ffn else sized


def _refuse(given: Mapping[str, Any], keys: tuple[str, ...], model: Model) -> None:
    for key in keys:
        if key in given:
            raise ValueError(f"[model.sizes] {key} = {given[key]:g}: {model.name!r} has no such size; delete the key")


def _check_divides(key: str, value: int, of: str, whole: int, model: Model) -> None:
    if whole % value:
        largest = max(n for n in range(1, min(value, whole) + 1) if whole % n == 0)
        raise ValueError(
            f"[model.sizes] {key} = {value} is no divisor of {of} = {whole} ({model.title}); set {key} = {largest}, "
            f"or another {of}"
        )


@dataclass(frozen=True)
class ModelFamily:
    """Class of a family's models, and its flavors by name."""

    model_cls: type[Any]
    flavors: Mapping[str, BaseModelArgs]


MODEL_FAMILIES = {
    "llama3": ModelFamily(Llama, {**llama3_args, **LLAMA_ARGS}),
    "gpt2": ModelFamily(GPT2, GPT2_ARGS),
}


def model_args(model: Model) -> BaseModelArgs:
    """Return the arguments of the flavor with the sizes of [model.sizes], or raise ValueError for no model."""
    if model.name not in MODEL_FAMILIES:
        raise ValueError(f"[model] name = {model.name!r}; known are {', '.join(map(repr, MODEL_FAMILIES))}")
    flavors = MODEL_FAMILIES[model.name].flavors
    if model.flavor not in flavors:
        raise ValueError(f"[model] flavor = {model.flavor!r}; known for {model.name!r} are {', '.join(flavors)}")
    return with_sizes(deepcopy(flavors[model.flavor]), model)


def workload_of(config: JobConfig) -> Workload:
    """Return the configured model and batch for the cost model. Nothing is allocated."""
    args: Any = model_args(config.model)
    args.update_from_config(config)
    parameters = _parameter_shapes(config.model.name, args)
    workload = Workload(
        name=config.model.title,
        layers=args.n_layers,
        width=args.dim,
        heads=args.n_heads,
        kv_heads=parameters["layers.0.attention.wk.weight"][0] * args.n_heads // args.dim,
        ffn=parameters["layers.0.feed_forward.w2.weight"][1],
        vocab=args.vocab_size,
        sequence=config.training.seq_len,
        batch=config.training.global_batch_size,
        positions=parameters.get("pos_embeddings.weight", (0,))[0],
        recomputation=_recomputation(config),
        entry_bytes=4.0 if config.training.mixed_precision_param == "float32" else 2.0,
    )
    assert dict(zip(workload.names(), workload.shapes(), strict=True)) == parameters
    return workload


def _recomputation(config: JobConfig) -> Recomputation:
    chosen, compiled = config.activation_checkpoint, config.compile.components if config.compile.enable else []
    return Recomputation(
        chosen.mode, chosen.selective_ac_option, chosen.memory_budget, "model" in compiled, "loss" in compiled
    )


def _parameter_shapes(name: str, args: BaseModelArgs) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters by name. Only the last model's shapes are cached."""
    key = f"{name} {args}"
    if key not in _SHAPES:
        with torch.device("meta"):
            built = MODEL_FAMILIES[name].model_cls(args)
        _SHAPES.clear()
        _SHAPES[key] = {parameter: tuple(p.shape) for parameter, p in built.named_parameters()}
    return _SHAPES[key]


def planned_recipe(arguments: Sequence[str], ranks: int) -> tuple[Workload, JobConfig]:
    """Return the model and batch of a recipe, and its configuration, from the trainer's command line.

    A recipe without a global batch has one micro-batch on each of the ranks.
    """
    resolved = resolve(list(arguments))
    if "model.flavor" not in resolved.origins:
        files = ",".join(resolved.files)
        raise ValueError(f"{files} has no [model] flavor; add a model: train_configs/models/llama_500m.toml,{files}")
    config = resolved.config
    if (degree := config.parallelism.pipeline_parallel_degree) > 1:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree = {degree}: the planner has no cost of a pipeline; set it to 1 for "
            "the plan"
        )
    workload = workload_of(config)
    if workload.batch < 0:
        workload = replace(workload, batch=config.training.local_batch_size * ranks)
    return workload, config


def stage_modules(config: JobConfig, layers: int) -> list[list[str]]:
    """Return the names of the modules of every stage, in their order. Raises ValueError if they do not fit."""
    parallelism, stages = config.parallelism, config.parallelism.pipeline_parallel_degree
    first, last = (
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    )
    each, given = parallelism.pipeline_parallel_layers_per_stage, parallelism.module_fqns_per_model_part
    if each is not None and (each < 1 or -(-(layers + first + last) // each) != stages):
        raise ValueError(
            f"parallelism.pipeline_parallel_layers_per_stage = {each} does not divide {layers} layers into {stages} "
            f"stages, one per rank; omit it, or change {_DEGREE}"
        )
    if given is None:
        try:
            return generate_llm_fqn_per_model_part(stages, layers, first, last)
        except ValueError as error:
            raise ValueError(
                f"{_DEGREE} = {stages} with {layers} layers, of which the embedding counts as {first} and the output "
                f"as {last}: {error}"
            ) from None
    expected = ["tok_embeddings", *(f"layers.{i}" for i in range(layers)), "norm", "output"]
    if len(given) != stages or not all(given) or [name for names in given for name in names] != expected:
        raise ValueError(
            f"parallelism.module_fqns_per_model_part has {len(given)} lists; it must have {stages} ({_DEGREE}), none "
            f"empty, which contain all modules once, in the order of the model: {', '.join(expected[:2])}, ..., "
            f"{', '.join(expected[-3:])}"
        )
    return given


def micro_batches(config: JobConfig) -> int:
    """Return the number of micro-batches into which a schedule divides a local batch."""
    return config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
