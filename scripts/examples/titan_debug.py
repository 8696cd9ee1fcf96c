"""Configurations for titan_trainer.py without a GPU or downloads: TorchTitan's debug model on Python's sources."""

# ruff: noqa: E402  TorchTitan looks up the device while it is imported.

import argparse
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import torch
from torch import _utils
from torch.distributed.fsdp import FSDPModule

import torchtitan_scape


class CpuDevice:
    """`torch.cpu` with the functions that TorchTitan expects of a device module, without memory statistics."""

    memory_stats = staticmethod(lambda *_: {})
    empty_cache = reset_peak_memory_stats = staticmethod(lambda *_: None)
    current_device = staticmethod(lambda: 0)
    get_device_name = staticmethod(lambda *_: "CPU")
    get_device_properties = staticmethod(lambda *_: SimpleNamespace(name="CPU", total_memory=1 << 40))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


if not torch.accelerator.is_available():  # TorchTitan then assumes CUDA
    _utils._get_available_device_type = lambda: "cpu"
    _utils._get_device_module = lambda _: CpuDevice()

from torchtitan.hf_datasets import DatasetConfig, text_datasets
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.train import main
from torchtitan.trainer import Trainer

from scripts.examples.titan_trainer import TitanTrainer, with_replicas


def python_text(path: str) -> datasets.Dataset:
    """Return the modules of Python's standard library in a folder as a data set."""
    return datasets.Dataset.from_list([{"text": file.read_text()} for file in sorted(Path(path).glob("*.py"))])


def sum_with_gloo(parallelize: Any, model: Any, **options: Any) -> Any:
    """Let FSDP2 sum gradients without a factor in the collective, which gloo does not support."""
    model = parallelize(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def native() -> Trainer.Config:
    """Return TorchTitan's own configuration, in which FSDP2 all-reduces the gradients over replicas (HSDP)."""
    config = llama3_debugmodel()
    if not torch.accelerator.is_available():  # FlexAttention has no backward pass on CPUs
        for _, _, parent, field in list(config.model_spec.model.traverse(FlexAttention.Config)):
            setattr(parent, field, ScaledDotProductAttention.Config())  # causal, but not separated by documents
        config.model_spec.parallelize_fn = partial(sum_with_gloo, config.model_spec.parallelize_fn)
    folder = str(Path(argparse.__file__).parent)
    text_datasets.DATASETS["python"] = DatasetConfig(folder, python_text, lambda sample: sample["text"])
    config.dataloader.dataset = "python"
    config.hf_assets_path = str(Path(torchtitan_scape.__file__).parent / "data" / "byte_tokenizer")
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 256, 20
    config.training.mixed_precision_param, config.training.disable_cuda_graphs = "float32", True
    config.parallelism.data_parallel_replicate_degree = 2
    config.activation_checkpoint, config.debug.seed = None, 42
    return config


def replicas() -> TitanTrainer.Config:
    """Return the same configuration with `replicate`."""
    return with_replicas(native())


if __name__ == "__main__":
    main()
