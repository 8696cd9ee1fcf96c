"""Errors of set-up that a restart would repeat, in one line."""

import linecache
import os
from collections.abc import Iterator
from types import TracebackType

import torch.distributed as dist

from torchtitan_scape.core.files import FULL

# The programming errors by which TorchTitan rejects a value.
_REJECTIONS = (AssertionError, AttributeError, IndexError, KeyError, TypeError)
_PASSING = (BrokenPipeError, ConnectionResetError, TimeoutError)  # They may not occur again.
_OWN = ("torchtitan_scape", "kernels", "topology", "scripts", "tests")
_COMPILER = ("torch._dynamo", "torch._inductor")
# Environment variables of folders that are not in the recipe, by a part of their usual paths.
_CACHES = {"huggingface": "HF_HOME", "torchinductor": "TORCHINDUCTOR_CACHE_DIR", "triton": "TRITON_CACHE_DIR"}

_WRITTEN = "job.dump_folder, HF_HOME, TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR or TMPDIR, to which a run writes"


def setup_error(error: BaseException) -> str | None:
    """Return the line that reports an error of set-up, or None if a restart may succeed.

    These are errors of the operating system, failed imports, errors of torch.compile, operations that a device does not
    support, and assertions and the like in TorchTitan, which are its checks of the configuration.
    """
    if not isinstance(error, Exception) or isinstance(error, dist.DistError):
        return None
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    for cause in _causes(error):
        if isinstance(cause, OSError) and not isinstance(cause, _PASSING):
            return _os_error(cause)
        if isinstance(cause, ImportError):
            return f"a module cannot be imported: {' '.join(str(cause).split())}; install it, or set PYTHONPATH"
    if type(error).__module__.startswith(_COMPILER):
        return f"torch.compile failed: {text}; set --compile.no-enable"
    if isinstance(error, NotImplementedError):
        return f"not supported by this version of PyTorch or on this device: {text}"
    if isinstance(error, _REJECTIONS) and (place := _place_in_torchtitan(error.__traceback__)):
        return f"TorchTitan rejects the configuration: {text}, in {place}"
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _os_error(error: OSError) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, ConnectionError):
        return f"{text or type(error).__name__}; without a network, set --training.dataset_path to a local copy"
    full = error.errno in FULL
    if error.filename is None:
        return f"{text}: free space in {_WRITTEN}" if full else text or type(error).__name__
    path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else str(error.filename)
    fix = "free space there, or choose another path" if full else "choose another path, or give this user access to it"
    for part, variable in _CACHES.items():
        if part in path:
            fix = f"set {variable} to a folder that this user can write to"
    return f"{path} cannot be used: {error.strerror}; {fix}"


def _place_in_torchtitan(traceback: TracebackType | None) -> str:
    """Return module and source line if TorchTitan raised the error, or called PyTorch wrongly; otherwise ""."""
    place = ""
    while traceback is not None:
        frame = traceback.tb_frame
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == "torchtitan":
            source = linecache.getline(frame.f_code.co_filename, traceback.tb_lineno).strip()
            place = f"{frame.f_globals['__name__']} ({source})"
        elif package in _OWN:
            place = ""
        traceback = traceback.tb_next
    return place
