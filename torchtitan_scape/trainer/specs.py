"""Registers our TrainSpecs: families of models, with our builders."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data.datasets import build_dataloader
from torchtitan_scape.models.gpt2 import GPT2, GPT2_ARGS
from torchtitan_scape.models.gpt2_adapter import GPT2StateDictAdapter
from torchtitan_scape.models.gpt2_parallel import parallelize_gpt2
from torchtitan_scape.models.llama import LLAMA_ARGS, Llama
from torchtitan_scape.titan.components import build_cross_entropy_loss, build_lr_schedulers
from torchtitan_scape.titan.models import (
    BaseModelArgs,
    TrainSpec,
    get_train_spec,
    llama3_args,
    llama3_train_spec,
    parallelize_llama,
    train_spec,
)
from torchtitan_scape.titan.tokenizer import build_tokenizer
from torchtitan_scape.trainer.metrics import build_metrics_processor
from torchtitan_scape.trainer.optimizers import build_optimizers
from torchtitan_scape.trainer.parallelize import parallelize
from torchtitan_scape.trainer.validator import build_validator


def _llama(builders: dict[str, Any]) -> TrainSpec:
    """TorchTitan's own, with its flavors and ours."""
    return replace(
        llama3_train_spec(),
        model_cls=Llama,
        model_args={**llama3_args, **LLAMA_ARGS},
        parallelize_fn=partial(parallelize, family=parallelize_llama),
        **builders,
    )


def _gpt2(builders: dict[str, Any]) -> TrainSpec:
    return TrainSpec(
        model_cls=GPT2,
        model_args=GPT2_ARGS,
        parallelize_fn=partial(parallelize, family=parallelize_gpt2),
        build_lr_schedulers_fn=build_lr_schedulers,
        build_loss_fn=build_cross_entropy_loss,
        state_dict_adapter=GPT2StateDictAdapter,
        **builders,
    )


# By `[model] name`: a TrainSpec of what all families share.
FAMILIES: dict[str, Callable[[dict[str, Any]], TrainSpec]] = {"llama3": _llama, "gpt2": _gpt2}


def register(job_config: JobConfig, with_data: bool = True) -> None:
    """Registers the config's family, in front of TorchTitan's own.

    Here the sections that TorchTitan does not hand to a builder are wired in: `build_optimizers_fn` gets the
    [optimizer] section alone. Without data, for a dry run, neither tokenizer nor data set is built.

    Raises ValueError for a name or a flavor that is not known.
    """
    name, flavor = job_config.model.name, job_config.model.flavor
    if name not in FAMILIES:
        raise ValueError(f"[model] name = {name!r}; known are {', '.join(map(repr, FAMILIES))}")
    simulated = job_config.topology.simulate_replicas
    builders = {
        "pipelining_fn": None,
        "build_optimizers_fn": partial(build_optimizers, job_config=job_config),
        "build_dataloader_fn": partial(build_dataloader, simulated=simulated) if with_data else None,
        "build_tokenizer_fn": build_tokenizer if with_data else None,
        "build_validator_fn": partial(build_validator, simulated=simulated),
        "build_metrics_processor_fn": build_metrics_processor,
    }
    spec = FAMILIES[name](builders)
    train_spec._extra_train_specs.pop(name, None)
    train_spec.register_train_spec(name, spec)
    if flavor not in spec.model_args:
        raise ValueError(f"[model] flavor = {flavor!r}; known of {name!r} are {', '.join(spec.model_args)}")


def whole_model(config: JobConfig) -> tuple[TrainSpec, BaseModelArgs, nn.Module]:
    """The recipe's family, its model's arguments, and the model, whole and without memory. Raises ValueError."""
    register(config, with_data=False)
    spec = get_train_spec(config.model.name)
    args = deepcopy(spec.model_args[config.model.flavor])
    args.update_from_config(config)
    with torch.device("meta"):
        return spec, args, spec.model_cls(args)
