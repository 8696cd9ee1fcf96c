"""Registration of the TrainSpecs: model families with this project's builders."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data.datasets import build_dataloader
from torchtitan_scape.data.read_ahead import ReadAheadLoader
from torchtitan_scape.models.gpt2 import GPT2StateDictAdapter, parallelize_gpt2
from torchtitan_scape.models.registry import MODEL_FAMILIES, model_args, stage_modules
from torchtitan_scape.titan.components import LossFunction, build_cross_entropy_loss
from torchtitan_scape.titan.distributed import ParallelDims
from torchtitan_scape.titan.models import (
    BaseModelArgs,
    TrainSpec,
    get_train_spec,
    llama3_train_spec,
    parallelize_llama,
    train_spec,
)
from torchtitan_scape.titan.tokenizer import build_tokenizer
from torchtitan_scape.topology.torch_version import FLEX_ON_PARTS
from torchtitan_scape.trainer.metrics import ReplicaMetrics
from torchtitan_scape.trainer.optimizers import build_optimizers, build_schedulers
from torchtitan_scape.trainer.parallelize import LossPerToken, build_pipeline, parallelize
from torchtitan_scape.trainer.validator import FixedValidator


def _llama(builders: dict[str, Any]) -> TrainSpec:
    """Return TorchTitan's Llama 3 spec with this project's model and builders."""
    return replace(
        llama3_train_spec(),
        parallelize_fn=partial(parallelize, family=parallelize_llama),
        pipelining_fn=build_pipeline,
        **builders,
    )


def _gpt2(builders: dict[str, Any]) -> TrainSpec:
    return TrainSpec(
        parallelize_fn=partial(parallelize, family=parallelize_gpt2),
        pipelining_fn=None,  # the output is the token embedding, which only the first stage would have
        state_dict_adapter=GPT2StateDictAdapter,
        **builders,
    )


# By `[model] name`: a function that returns a TrainSpec, given the builders that all families share.
FAMILIES: dict[str, Callable[[dict[str, Any]], TrainSpec]] = {"llama3": _llama, "gpt2": _gpt2}


def register(job_config: JobConfig, with_data: bool = True, device_type: str = "") -> None:
    """Register the TrainSpec of the config's model family; it takes precedence over TorchTitan's.

    The builders are bound to the config here, because TorchTitan passes only the [optimizer] section to
    `build_optimizers_fn`. A dry run has no data; with a `device_type`, models that cannot be trained there are refused.
    """
    name, flavor = job_config.model.name, job_config.model.flavor
    args = model_args(job_config.model)
    simulated = job_config.topology.simulate_replicas
    builders = {
        "model_cls": MODEL_FAMILIES[name].model_cls,
        "model_args": {flavor: args},
        "build_loss_fn": _build_loss,
        "build_optimizers_fn": partial(build_optimizers, job_config=job_config),
        "build_lr_schedulers_fn": build_schedulers,
        "build_dataloader_fn": partial(_build_dataloader, simulated=simulated) if with_data else None,
        "build_tokenizer_fn": build_tokenizer if with_data else None,
        "build_validator_fn": partial(FixedValidator, simulated=simulated),
        "build_metrics_processor_fn": ReplicaMetrics,
    }
    spec = FAMILIES[name](builders)
    _check_pipeline(job_config, spec, args)
    train_spec._extra_train_specs.pop(name, None)
    train_spec.register_train_spec(name, spec)
    attention = getattr(args, "attn_type", "sdpa")
    if device_type == "cpu" and attention != "sdpa":
        raise ValueError(
            f"[model] flavor = {flavor!r} on a CPU: its {attention} attention cannot be trained there; select another "
            "flavor, or run on GPUs"
        )
    context = job_config.parallelism.context_parallel_degree
    if context > 1 and attention == "flex" and not FLEX_ON_PARTS:
        raise ValueError(
            f"[model] flavor = {flavor!r} with parallelism.context_parallel_degree = {context}: context parallelism of "
            f"torch {torch.__version__} does not support TorchTitan's flex attention; install torch 2.11 or later, or "
            "select a flavor with sdpa attention"
        )


def _check_pipeline(config: JobConfig, spec: TrainSpec, args: Any) -> None:
    """Raise ValueError if the model cannot be divided into the configured number of stages."""
    degree = config.parallelism.pipeline_parallel_degree
    if degree > 1 and spec.pipelining_fn is None:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree = {degree} with [model] name = {config.model.name!r}: its output "
            "layer is the token embedding, which only the first stage would have; set it to 1, or use a Llama"
        )
    if degree > 1:
        stages = stage_modules(config, args.n_layers)
        bare = [number for number, names in enumerate(stages) if not any(name.startswith("layers.") for name in names)]
        if bare and config.optimizer.name == "Muon":
            raise ValueError(
                f"parallelism.pipeline_parallel_degree = {degree} with [optimizer] name = 'Muon': stage {bare[0]} has "
                "no layer, whose matrices Muon updates; reduce the degree, or set [optimizer] name = 'AdamW'"
            )


def _build_loss(job_config: JobConfig, parallel_dims: ParallelDims, **others: Any) -> LossFunction:
    loss: LossFunction = build_cross_entropy_loss(job_config, parallel_dims=parallel_dims, **others)
    return LossPerToken(loss) if parallel_dims.pp_enabled else loss


def _build_dataloader(**options: Any) -> ReadAheadLoader:
    return ReadAheadLoader(build_dataloader(**options))


def whole_model(config: JobConfig) -> tuple[TrainSpec, BaseModelArgs, nn.Module]:
    """Return the TrainSpec, the model's arguments, and the unsharded model on the meta device."""
    register(config, with_data=False)
    spec = get_train_spec(config.model.name)
    args = deepcopy(spec.model_args[config.model.flavor])
    args.update_from_config(config)
    with torch.device("meta"):
        return spec, args, spec.model_cls(args)
