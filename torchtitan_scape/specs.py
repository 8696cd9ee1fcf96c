"""Registers our TrainSpecs: TorchTitan's models with our builders."""

from dataclasses import replace
from functools import partial

from torchtitan.models.llama3 import get_train_spec as llama3_train_spec
from torchtitan.models.llama3 import llama3_args
from torchtitan.protocols import train_spec

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data.datasets import build_dataloader, build_tokenizer
from torchtitan_scape.data.validator import build_validator
from torchtitan_scape.models.llama import LLAMA_ARGS, Llama
from torchtitan_scape.optimizer.build import build_optimizers
from torchtitan_scape.parallelize import parallelize
from torchtitan_scape.report.metrics import build_metrics_processor


def register(job_config: JobConfig, with_data: bool = True) -> None:
    """Registers "llama3", with TorchTitan's flavors and ours, in front of TorchTitan's own.

    Here the sections that TorchTitan does not hand to a builder are wired in: `build_optimizers_fn` gets the
    [optimizer] section alone. Without data, for a dry run, neither tokenizer nor data set is built.
    """
    simulated = job_config.topology.simulate_replicas
    spec = replace(
        llama3_train_spec(),
        model_cls=Llama,
        model_args={**llama3_args, **LLAMA_ARGS},
        parallelize_fn=parallelize,
        pipelining_fn=None,
        build_optimizers_fn=partial(build_optimizers, job_config=job_config),
        build_dataloader_fn=partial(build_dataloader, simulated=simulated) if with_data else None,
        build_tokenizer_fn=build_tokenizer if with_data else None,
        build_validator_fn=partial(build_validator, simulated=simulated),
        build_metrics_processor_fn=build_metrics_processor,
    )
    train_spec._extra_train_specs.pop("llama3", None)
    train_spec.register_train_spec("llama3", spec)
    known = spec.model_args
    if job_config.model.name != "llama3" or job_config.model.flavor not in known:
        raise ValueError(
            f"[model] name = {job_config.model.name!r}, flavor = {job_config.model.flavor!r}; "
            f"known are name 'llama3' with flavor {', '.join(known)}"
        )
