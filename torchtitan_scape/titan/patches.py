"""All patches of TorchTitan, with their reasons. Each is active inside a `with` block.

The functions import TorchTitan themselves, because `device_lookup` must be active during its first import.
"""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from torchtitan_scape.core.patching import replaced
from torchtitan_scape.core.timing import PhaseTimer


@contextmanager
def device_lookup(device_type: str, module: Any) -> Iterator[None]:
    """Make PyTorch return `device_type` as the available device, and `module` as its module.

    Reason: TorchTitan looks the device up once, while it is imported, and assumes CUDA if there is no accelerator.
    """
    with (
        replaced(torch._utils, "_get_available_device_type", lambda: device_type),
        replaced(torch._utils, "_get_device_module", lambda _: module),
    ):
        yield


def checkpoint_manager(manager: type) -> AbstractContextManager[None]:
    """Make the trainer construct `manager` as its checkpoint manager.

    Reason: `Trainer.__init__` constructs the class by name. TorchTitan 0.3.0 takes it from the config.
    """
    import torchtitan.train

    return replaced(torchtitan.train, "CheckpointManager", manager)


def optional_lspci() -> AbstractContextManager[None]:
    """Make TorchTitan treat an `lspci` that cannot be run as a missing one.

    Reason: it looks up the GPU's name with `lspci`, and handles FileNotFoundError only. Where a folder of PATH is not
    readable, a missing program is a PermissionError.
    """
    from torchtitan.tools import utils

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return subprocess.run(*args, **kwargs)
        except OSError as error:
            raise FileNotFoundError(error.errno, error.strerror, "lspci") from error

    return replaced(utils, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))


def gradient_norm(norm: Callable[[], Any]) -> AbstractContextManager[None]:
    """Replace the trainer's gradient clipping by a function that returns `norm()`.

    Reason: the trainer clips before `optimizer.step()`, when gradients are still those of one replica. The optimizer
    clips the synchronized gradient itself, and writes its norm into the returned tensor.
    """
    from torchtitan.distributed import utils

    return replaced(utils, "clip_grad_norm_", lambda *args, **kwargs: norm())


def pipeline_loss_is_visible() -> AbstractContextManager[None]:
    """Make the trainer log no warning that only the ranks of the last pipeline stage see the loss.

    Reason: `ReplicaMetrics` sends the loss to all stages.
    """
    import torchtitan.train

    return replaced(torchtitan.train, "ensure_pp_loss_visible", lambda *args: None)


def profiler_activities() -> AbstractContextManager[None]:
    """Make PyTorch's profiler ignore an activity that is None.

    Reason: TorchTitan passes None for the GPU's activity if there is no GPU, and the profiler then raises TypeError.
    """
    profile = torch.profiler.profile

    def without_none(*, activities: Any = None, **options: Any) -> Any:
        known = None if activities is None else [one for one in activities if one is not None]
        return profile(activities=known, **options)

    return replaced(torch.profiler, "profile", without_none)


@contextmanager
def first_token_count(count: Callable[..., float], timer: PhaseTimer) -> Iterator[None]:
    """Replace the first `dist_sum` by `count`, timed as phase "wait". Later calls are unchanged.

    Reason: the first sum of a step counts its tokens, which `count` has started before. In this call ranks wait for the
    slowest data loader.
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
    """Make `Validator.__init__` build no data loader.

    Reason: the subclass reads other batches, and never uses the parent's loader.
    """
    from torchtitan.components import validate

    return replaced(validate, "build_text_validation_dataloader", lambda **_: None)
