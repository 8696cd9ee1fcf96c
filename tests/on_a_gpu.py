"""Simulation of a GPU on a CPU: tensors report another device, and operations that would wait for it raise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchtitan_scape.data.read_ahead import HostTensor

# Operations that read values or their number on the host, or copy from memory that is not pinned.
WAITS: set[Callable[..., Any]] = {
    Tensor.item,
    Tensor.tolist,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.cpu,
    Tensor.numpy,
    Tensor.nonzero,
    Tensor.masked_select,
    Tensor.unique,
    Tensor.bincount,
    torch.nonzero,
    torch.masked_select,
    torch.unique,
    torch.bincount,
    torch.equal,
    torch.tensor,
    torch.as_tensor,
}


class AsOnAGpu(TorchFunctionMode):
    """Raises an error that names the operation, if it would wait for a GPU."""

    asking = True  # True if it does

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.is_cpu.__get__:  # type: ignore[attr-defined]
            return not self.asking
        if self.asking:
            assert func not in WAITS, f"{func.__name__} waits for the device"
            if func in (torch._foreach_add, torch._foreach_add_):  # seen on an H100 with torch 2.11
                assert not isinstance(args[1], Tensor), f"{func.__name__} reads a single tensor on the host"
            if func in (Tensor.__getitem__, Tensor.__setitem__):
                places = [i for i in (args[1] if isinstance(args[1], tuple) else (args[1],)) if isinstance(i, Tensor)]
                assert all(i.dtype not in (torch.bool, torch.uint8) for i in places), "the host counts what is set"
                numbers = func == Tensor.__setitem__ and not isinstance(args[2], Tensor)
                assert not (places and numbers), "a number comes from the host"
        return func(*args, **kwargs or {})

    @contextmanager
    def host(self) -> Iterator[None]:
        """Allow operations on host tensors inside the block."""
        self.asking = False
        yield
        self.asking = True


class TrainingOnAGpu(AsOnAGpu):
    """The same for a whole training step on `DEVICE`.

    A tensor that is made without a device is on the host; only a `HostTensor` is copied to the device without a wait.
    """

    DEVICE = torch.device("cpu", 0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is None:
            return func(*args, **kwargs)
        to = [*args[1:], kwargs.get("device")] if func == Tensor.to else []
        if self.asking and any(isinstance(d, torch.device) and d == self.DEVICE for d in to):
            assert kwargs.get("non_blocking") or isinstance(args[0], HostTensor), (
                "a copy from memory that is not pinned waits for the device"
            )
        return super().__torch_function__(func, types, args, kwargs)


def waits_here(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Allow this method to wait for the device or to read host tensors."""
    function = getattr(owner, name)

    def call(self: Any, *args: Any) -> Any:
        mode = torch.overrides._get_current_function_mode()
        if not isinstance(mode, AsOnAGpu):
            return function(self, *args)
        with mode.host():
            return function(self, *args)

    monkeypatch.setattr(owner, name, call)
