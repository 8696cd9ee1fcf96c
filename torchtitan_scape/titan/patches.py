"""Every change of TorchTitan, and of what it asks of PyTorch, with its reason. Each holds inside a `with` block.

TorchTitan is imported inside the functions: `device_lookup` has to come before its first import.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from torchtitan_scape.core.patching import replaced
from torchtitan_scape.core.timing import PhaseTimer


@contextmanager
def device_lookup(device_type: str, module: Any) -> Iterator[None]:
    """PyTorch names `device_type` as the available device and `module` as its module.

    Reason: TorchTitan asks once, while it is imported, and assumes CUDA where PyTorch finds no accelerator.
    """
    with (
        replaced(torch._utils, "_get_available_device_type", lambda: device_type),
        replaced(torch._utils, "_get_device_module", lambda _: module),
    ):
        yield


def checkpoint_manager(manager: type) -> AbstractContextManager[None]:
    """The trainer constructs `manager` as its checkpoint manager.

    Reason: `Trainer.__init__` constructs the class by name. TorchTitan 0.3.0 takes it from the config.
    """
    import torchtitan.train

    return replaced(torchtitan.train, "CheckpointManager", manager)


def gradient_norm(norm: Callable[[], Any]) -> AbstractContextManager[None]:
    """The trainer clips no gradients and takes `norm()` as their norm.

    Reason: it clips before `optimizer.step()`, where gradients are those of one replica. The optimizer clips the
    gradient of the step and knows the norm after it.
    """
    from torchtitan.distributed import utils

    return replaced(utils, "clip_grad_norm_", lambda *args, **kwargs: norm())


@contextmanager
def first_token_count(count: Callable[..., float], timer: PhaseTimer) -> Iterator[None]:
    """The first `dist_sum` inside is `count`, timed as phase "wait"; later calls are TorchTitan's.

    Reason: the first sum of a step counts its tokens. It also carries the end-of-data flags, which need no collective
    of their own then, and ranks wait in it for the slowest data loader.
    """
    from torchtitan.distributed import utils

    original, calls = utils.dist_sum, 0

    def dist_sum(*args: Any, **kwargs: Any) -> float:
        nonlocal calls
        calls += 1
        if calls > 1:
            return float(original(*args, **kwargs))
        with timer.phase("wait"):
            return count(*args, **kwargs)

    with replaced(utils, "dist_sum", dist_sum):
        yield


def no_validation_loader() -> AbstractContextManager[None]:
    """`Validator.__init__` builds no data loader.

    Reason: it builds one in any case, of other batches than those that the subclass reads.
    """
    from torchtitan.components import validate

    return replaced(validate, "build_text_validation_dataloader", lambda **_: None)
