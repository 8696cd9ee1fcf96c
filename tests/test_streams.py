"""Use of the current CUDA stream and device, with fakes of PyTorch's functions."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernels.common import offload
from kernels.dense.reference import finite
from topology.in_process import SimulatedReplicas
from torchtitan_scape.replica.guard import FiniteGuard


def test_simulated_replicas_use_the_stream_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread uses the default stream, so that a replica would not wait for the work of another one."""
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the caller's")
    monkeypatch.setattr(torch.cuda, "set_stream", given.append)
    assert SimulatedReplicas(3).run(lambda replica: replica) == [0, 1, 2]
    assert given == ["the caller's"] * 2


class SaysCuda(TorchFunctionMode):
    """Makes tensors report that they are on a GPU; `pin_memory` has no effect."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        return func(*args, **kwargs)


def test_only_the_finite_flag_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an event of the gradients' device, which may differ from the current device."""
    asked: list[Any] = []
    event = SimpleNamespace(synchronize=lambda: asked.append("waits"))

    def current_stream(device: torch.device) -> Any:
        asked.append(device)
        return SimpleNamespace(record_event=lambda: event)

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    guard = FiniteGuard(["w"], finite, lambda flags: flags, lambda item: [item], 0, 10)
    assert guard.last_applied()
    for value, verdict in ((1.0, True), (float("nan"), False)):
        asked.clear()
        with SaysCuda():
            guard.check([torch.full((4,), value)])
        assert asked == [torch.device("cpu")]  # no wait in the same step
        assert guard.last_applied() == verdict and asked[1:] == ["waits"]
        assert guard.finish_previous_step() == verdict and guard.last_applied() == verdict


def test_pinned_memory_is_registered_for_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    errors = [0, 2]

    def register(*arguments: int) -> int:
        calls.append(arguments)
        return errors[len(calls) - 1]

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    host = torch.zeros(10)
    offload._pin(host)
    assert calls == [(host.data_ptr(), 40, 1)]  # cudaHostRegisterPortable
    with pytest.raises(ValueError, match=r"cannot be pinned \(CUDA error 2\)"):
        offload._pin(host)
