"""Check of every access of interpreted kernels: its address must lie in the storage of a live tensor.

A GPU reports an access outside of all allocations, at best; here each tensor has an allocation of its own.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder

from torchtitan_scape.core.patching import replaced
from torchtitan_scape.kernels.common import launching


class AccessError(AssertionError):
    """A kernel accessed memory outside of all tensors."""


@contextmanager
def checked_accesses() -> Iterator[None]:
    """Raise AccessError in a kernel that accesses memory outside of all tensors. Launches run one at a time."""
    lock, launch = threading.RLock(), launching.launch
    starts, ends = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    update = InterpreterBuilder.create_atomic_rmw

    def check(what: str, addresses: Any, mask: Any, nbytes: int) -> None:
        active = np.broadcast_to(mask, addresses.shape).astype(bool)
        at = addresses.astype(np.uint64)[active]
        number = np.searchsorted(starts, at, side="right").astype(np.int64) - 1
        outside = (number < 0) | (at + np.uint64(nbytes) > ends[np.maximum(number, 0)])
        if outside.any():
            raise AccessError(f"{what} of {int(outside.sum())} of {at.size} entries outside of all tensors")

    def checked_load(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        nbytes = pointers.get_element_ty().primitive_bitwidth // 8
        check("load", pointers.data, mask.data, max(1, nbytes))
        return load(builder, pointers, mask, *rest)

    def checked_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check("store", pointers.data, mask.data, value.data.dtype.itemsize)
        return store(builder, pointers, value, mask, *rest)

    def checked_update(builder: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check("atomic operation", pointers.data, mask.data, value.data.dtype.itemsize)
        return update(builder, operation, pointers, value, mask, *rest)

    def checked_launch(kernel: Any, *arguments: Any, **constants: Any) -> None:
        nonlocal starts, ends
        with lock:
            storages = {s.data_ptr(): s.nbytes() for s in map(torch.Tensor.untyped_storage, live_tensors())}
            starts = np.array(sorted(storages), np.uint64)
            ends = starts + np.array([storages[int(start)] for start in starts], np.uint64)
            launch(kernel, *arguments, **constants)

    with ExitStack() as stack:
        stack.enter_context(replaced(launching, "launch", checked_launch))
        stack.enter_context(replaced(InterpreterBuilder, "create_masked_load", checked_load))
        stack.enter_context(replaced(InterpreterBuilder, "create_masked_store", checked_store))
        stack.enter_context(replaced(InterpreterBuilder, "create_atomic_rmw", checked_update))
        yield


def live_tensors() -> list[torch.Tensor]:
    """Return all tensors with values that Python knows."""
    return [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta]
