"""Everything that depends on the release of PyTorch. Importing it raises ImportError if torch is too old."""

import functools
import inspect
import re
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

OLDEST, NEWEST = (2, 10), (2, 14)  # Releases in use without a warning; scripts/test_versions.sh runs the tests on each.


def release_of(version: str) -> tuple[int, int]:
    """Return major and minor number of a version. Builds of containers, such as 2.10.0a0+nv, count as the release."""
    match = re.match(r"(\d+)\.(\d+)", version)
    assert match is not None, version
    return int(match[1]), int(match[2])


def too_old(version: str) -> str:
    """Return the error message for a version before `OLDEST`, otherwise ""."""
    if release_of(version) >= OLDEST:
        return ""
    return f"torch {version} is installed; install torch {_named(OLDEST)} or later, see docs/getting_started/install.md"


def untested(version: str) -> str:
    """Return the warning for a version after `NEWEST`, otherwise ""."""
    if release_of(version) <= NEWEST:
        return ""
    return f"torch {version} is newer than {_named(NEWEST)}, the newest release that this project was tried with"


def _named(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


if _message := too_old(torch.__version__):
    raise ImportError(_message)
RELEASE = release_of(torch.__version__)

# 2.13 renamed both functions and warns about the old names.
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce_tensors(tensors: list[torch.Tensor], mean: bool, group: Any) -> Any:
    """Start an all-reduce of several tensors in place, as one call. Return the function that waits for it.

    `dist.all_reduce_coalesced` does the same without a mean, and warns that it will be removed.
    """
    options = dist.AllreduceCoalescedOptions()
    averages = mean and tensors[0].is_cuda  # gloo has no ReduceOp.AVG
    options.reduceOp = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
    work = group.allreduce_coalesced(tensors, options)

    def wait() -> None:
        work.wait()
        if mean and not averages:
            torch._foreach_div_(tensors, group.size())

    return wait


# 2.10 passes the mask of flex attention by position, and TorchTitan's module accepts it by name only.
FLEX_ON_PARTS = RELEASE >= (2, 11)

# Before 2.13 the stager of asynchronous checkpoints cannot be used for a second save.
STAGER_SAVES_ONCE = RELEASE < (2, 13)


def fsdp_parameter_group(module: Any) -> Any:
    """Return the parameter group of a module of FSDP2, None for a module without direct parameters.

    2.13 also has the list `_fsdp_param_groups`, which has one element unless a custom shard placement is used.
    """
    return module._get_fsdp_state()._fsdp_param_group


def fsdp_prefetched(module: Any) -> list[Any]:
    """Return the parameter groups that FSDP2 gathers ahead of their turn, with those of a module."""
    states = module._get_fsdp_state()._states_to_forward_prefetch
    return [group for state in states if (group := state._fsdp_param_group) is not None]


def fsdp_copy_in_streams(model: Any) -> list[Any]:
    """Return the CUDA streams on which FSDP2 reads the shards of a model's parameters before it gathers them.

    They wait for the stream of the forward pass only once, before its first module. None exists before the first pass.
    """
    contexts = [module._get_fsdp_state()._comm_ctx for module in model.modules() if isinstance(module, FSDPModule)]
    streams = [getattr(context, "all_gather_copy_in_stream", None) for context in contexts]
    return list({id(stream): stream for stream in streams if isinstance(stream, torch.cuda.Stream)}.values())


def is_compiled(module: Any) -> bool:
    """Return whether `torch.compile` made the module, or `Module.compile` was called on it."""
    return module._compiled_call_impl is not None or isinstance(module, OptimizedModule)


def call_before(module: Any, hook: Any) -> None:
    """Call `hook(module)` before the module runs, before all other hooks and outside of its compiled code.

    The module that `torch.compile(module)` has compiled may be called itself.
    """
    if isinstance(module, OptimizedModule):
        module._orig_mod.register_forward_pre_hook(
            lambda *_: None if torch.compiler.is_compiling() else hook(module), prepend=True
        )
    compiled = module._compiled_call_impl
    if compiled is None:
        module.register_forward_pre_hook(lambda module, _: hook(module), prepend=True)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        hook(module)
        return compiled(*args, **kwargs)

    module._compiled_call_impl = call


def fsdp_copies(module: Any) -> int:
    """Return the number of replicas over which FSDP2 itself all-reduces the gradients of a module; 1 without HSDP."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return max(getattr(group.mesh_info, "replicate_mesh_size", 1) if group else 1 for group in groups)


def keep_unused_gradients(module: Any) -> None:
    """Keep parameters that a micro-batch did not use in FSDP's flat buffer, as zeros, so that its size is constant.

    Before 2.13 this is not possible, and such a parameter ends the run with an error.
    """
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)


def distinguish_embeddings() -> None:
    """Let the gradients of DTensor embeddings of different sizes differ, as GPT-2's tokens and positions do.

    2.10 chooses the gradient's shape from a cache that ignores the number of rows, and takes that of the first one.
    """
    if RELEASE < (2, 11):
        propagator: Any = DTensor._op_dispatcher.sharding_propagator
        backward = torch.ops.aten.embedding_dense_backward.default
        propagator.op_to_schema_info[backward] = RuntimeSchemaInfo(static_argnum=2)


def permute_copies() -> None:
    """Let context parallelism permute copies of inputs, labels and positions for its load balancing.

    2.10 permutes the tensors themselves, one sample after the other. TorchTitan's positions are one row that all
    samples of a batch share, which is then permuted once per sample: from two samples on, positions are wrong.
    """
    if RELEASE < (2, 11):
        from torch.distributed.tensor.experimental._context_parallel import _attention

        module: Any = _attention
        divide = inspect.unwrap(module._context_parallel_buffers)

        @functools.wraps(divide)
        def divide_copies(mesh: Any, buffers: Any, *more: Any, **named: Any) -> Any:
            owned = [
                buffer.clone(memory_format=torch.contiguous_format) if isinstance(buffer, torch.Tensor) else buffer
                for buffer in buffers
            ]
            return divide(mesh, owned, *more, **named)

        module._context_parallel_buffers = divide_copies
