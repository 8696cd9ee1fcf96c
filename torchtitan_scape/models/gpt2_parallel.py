"""Parallelization of GPT-2: TorchTitan's `parallelize_llama` for biases, learned positions and a tied output layer."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan_scape.titan.config import TORCH_DTYPE_MAP, ActivationCheckpoint, JobConfig
from torchtitan_scape.titan.distributed import (
    ParallelDims,
    apply_ac,
    apply_cp_to_attention_module,
    maybe_enable_async_tp,
)
from torchtitan_scape.titan.models import SAVED_OPERATIONS as SAVED
from torchtitan_scape.titan.models import apply_compile, disable_fsdp_gradient_division
from torchtitan_scape.topology.torch_version import distinguish_embeddings

# Operations of linear layers without and with bias; TorchTitan handles only the first.
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def parallelize_gpt2(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """Apply tensor and context parallelism, activation checkpointing, torch.compile and FSDP2, in this order."""
    if parallel_dims.tp_enabled:
        mesh = parallel_dims.get_mesh("tp")
        _split_heads(model, mesh, loss_parallel=not job_config.parallelism.disable_loss_parallel)
        maybe_enable_async_tp(job_config, mesh)
    if parallel_dims.cp_enabled:
        attention = [block.get_submodule("attention.inner_attention") for block in _blocks(model)]
        apply_cp_to_attention_module(attention, parallel_dims.get_mesh("cp"), "sdpa")
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    recompute = job_config.activation_checkpoint
    if recompute.mode == "selective" and recompute.selective_ac_option == "op":
        _save_products(model, recompute)
    elif recompute.mode != "none":
        apply_ac(model, recompute, model_compile_enabled=compiled, base_folder=job_config.job.dump_folder)
    if compiled:
        apply_compile(model, job_config.compile)
    if parallel_dims.fsdp_enabled:
        axes = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        _shard(model, parallel_dims.get_mesh(axes), job_config)
    return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("layers").children())


def _split_heads(model: nn.Module, mesh: DeviceMesh, loss_parallel: bool) -> None:
    """Apply tensor and sequence parallelism: matrices by heads and by hidden units, both embeddings by rows.

    Logits stay sharded along the vocabulary for a parallel loss, and are gathered otherwise.
    """
    distinguish_embeddings()
    lookup = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    whole = {"input_layouts": (Shard(1), None), "desired_input_layouts": (Replicate(), None)}
    head: ParallelStyle
    if loss_parallel:
        head = PrepareModuleInput(**whole, use_local_output=False)
    else:
        head = PrepareModuleInputOutput(**whole, output_layouts=Shard(-1), desired_output_layouts=Replicate())
    outer = {"tok_embeddings": lookup, "pos_embeddings": lookup, "norm": SequenceParallel(), "output": head}
    parallelize_module(model, mesh, outer)
    for block in _blocks(model):
        gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan: dict[str, ParallelStyle] = {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
        plan |= {"attention": gather, "feed_forward": gather}
        plan |= {name: ColwiseParallel() for name in ("attention.wq", "attention.wk", "attention.wv")}
        plan |= {"feed_forward.w1": ColwiseParallel()}
        plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.wo", "feed_forward.w2")}
        parallelize_module(block, mesh, plan)


def _save_products(model: nn.Module, config: ActivationCheckpoint) -> None:
    """Apply TorchTitan's selective checkpointing by operation: save the listed ones, and every second matrix product.

    TorchTitan's own function counts only products without bias, and would recompute all products of GPT-2.
    """
    layers = model.get_submodule("layers")
    for number, block in list(layers.named_children()):
        names = config.per_op_sac_force_recompute_mm_shapes_by_fqns
        recomputed = {
            (module.in_features, module.out_features)
            for name, module in block.named_modules()
            if isinstance(module, nn.Linear) and any(part in f"layers.{number}.{name}" for part in names)
        }
        wrapped = checkpoint_wrapper(
            block,
            context_fn=_contexts(recomputed),
            preserve_rng_state=config.preserve_rng_state,
            determinism_check=config.determinism_check,
            early_stop=config.early_stop,
            debug=config.debug,
        )
        layers.register_module(number, wrapped)


def _contexts(recomputed: set[tuple[int, int]]) -> Callable[[], Any]:
    return lambda: create_selective_checkpoint_contexts(_policy(recomputed))


def _policy(recomputed: set[tuple[int, int]]) -> Callable[..., CheckpointPolicy]:
    """Return a checkpoint policy that always recomputes products of matrices with these (inputs, outputs)."""
    counts: defaultdict[bool, int] = defaultdict(int)  # Products in the forward pass, and in its recomputation.

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = operation in SAVED
        if operation in PRODUCTS:
            if tuple(args[-1].shape) in recomputed:
                return CheckpointPolicy.PREFER_RECOMPUTE
            counts[context.is_recompute] += 1
            save = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _shard(model: nn.Module, mesh: DeviceMesh, config: JobConfig) -> None:
    """Apply FSDP2 with one unit per block.

    Both embeddings and the final norm belong to the root unit, which stays gathered, because the token embedding is
    used at both ends.
    """
    training, reshard = config.training, config.parallelism.fsdp_reshard_after_forward
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
    )
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard != "never")
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard == "always")
    disable_fsdp_gradient_division(model)
