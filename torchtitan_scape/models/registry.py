"""The model families by `[model] name`, and a configured model as data for the planner."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.config.model_sizes import Model
from torchtitan_scape.config.parsing import resolve
from torchtitan_scape.core.workloads import Recomputation, Workload
from torchtitan_scape.models.gpt2 import GPT2, GPT2_ARGS
from torchtitan_scape.models.llama import LLAMA_ARGS, Llama
from torchtitan_scape.models.sizes import with_sizes
from torchtitan_scape.titan.models import BaseModelArgs, llama3_args


@dataclass(frozen=True)
class ModelFamily:
    """Class of a family's models, and its flavors by name."""

    model_cls: type[Any]
    flavors: Mapping[str, BaseModelArgs]


MODEL_FAMILIES = {
    "llama3": ModelFamily(Llama, {**llama3_args, **LLAMA_ARGS}),
    "gpt2": ModelFamily(GPT2, GPT2_ARGS),
}


_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {}  # by the model's arguments


def model_args(model: Model) -> BaseModelArgs:
    """Return the model's arguments: those of the flavor with the sizes of [model.sizes].

    Raises:
        ValueError: The name or the flavor is unknown, or the sizes make no model.
    """
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


def recipe_workload(arguments: Sequence[str], ranks: int) -> Workload:
    """Return the model and batch of a recipe, as `planned_recipe`."""
    return planned_recipe(arguments, ranks)[0]


def planned_recipe(arguments: Sequence[str], ranks: int) -> tuple[Workload, JobConfig]:
    """Return the model and batch of a recipe, and its configuration.

    Args:
        arguments: The trainer's command line.
        ranks: A recipe without a global batch has one micro-batch on each rank.

    Raises:
        ValueError: The recipe is not valid, or has no model.
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
    found = workload_of(config)
    if found.batch < 0:
        found = replace(found, batch=config.training.local_batch_size * ranks)
    return found, config
