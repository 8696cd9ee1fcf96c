"""Use of the current CUDA stream and device, with fakes of PyTorch's functions."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.core.timing import PhaseTimer
from torchtitan_scape.kernels.dense.reference import finite
from torchtitan_scape.methods.overlap import BackwardOverlap, ForwardOverlap
from torchtitan_scape.replica.guard import FiniteGuard
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.in_process import SimulatedReplicas
from torchtitan_scape.topology.stages import Handle


def test_simulated_replicas_use_the_stream_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread uses the default stream, so that a replica would not wait for the work of another one."""
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the caller's")
    monkeypatch.setattr(torch.cuda, "set_stream", given.append)
    assert SimulatedReplicas(3).run(lambda replica: replica) == [0, 1, 2]
    assert given == ["the caller's"] * 3


class _FakeDevice:
    """Streams with a clock of their own each; work on a stream advances only its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = {1: 0.0, 2: 0.0}  # ms by stream
        self.current = 1
        clock = self.clock

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: Any) -> None:
                self.stream, self.at = stream.cuda_stream, clock[stream.cuda_stream]

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: "Event") -> float:
                assert self.stream == end.stream, "times of two streams cannot be subtracted"
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=self.current))

    def work(self, ms: float) -> None:
        self.clock[self.current] += ms


def test_phases_on_side_streams_are_measured_per_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP gathers on a stream of its own during the passes, whose time on the main stream it does not reduce."""
    device, timer = _FakeDevice(monkeypatch), PhaseTimer(torch.device("cuda"))
    timer.enabled = True
    with timer.phase("forward_backward"):
        device.work(10)
        device.current = 2
        with timer.phase("shard weights"):
            device.work(500)
            with timer.phase("coding"):
                device.work(3)
            device.work(1)
        device.current = 1
        device.work(20)
        with timer.phase("wait"):  # on the same stream: the outer phase does not count this time
            device.work(4)
        device.work(2)
        device.current = 2  # a phase ends on the stream on which it began
    assert timer.take() == pytest.approx(
        {"forward_backward": 0.032, "shard weights": 0.501, "coding": 3e-3, "wait": 4e-3}
    )
    device.current = 1
    with timer.phase("a"):
        device.current = 2
        with timer.phase("b"):
            device.work(7)
            device.current = 1
            device.work(5)
    assert timer.take() == pytest.approx({"a": 5e-3, "b": 7e-3})


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
    guard = FiniteGuard(["w"], finite, ReplicaCollectives(None), PhaseTimer(torch.device("cpu")), 10)
    assert guard.last_applied()
    for value, verdict in ((1.0, True), (float("nan"), False)):
        asked.clear()
        with SaysCuda():
            guard.check([torch.full((4,), value)])
            guard.conclude(torch.zeros(()))
        assert asked == [torch.device("cpu")]  # no wait in the same step
        assert guard.last_applied() == verdict and asked[1:] == ["waits"]
        assert guard.finish_previous_step() == verdict and guard.last_applied() == verdict


class Stream:
    """A fake that writes down for which streams, or for whose events, it waits."""

    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} after {other.name}")

    def record_event(self) -> Any:
        return SimpleNamespace(name=self.name)

    wait_event = wait_stream


def test_a_chunk_waits_for_the_streams_of_all_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 reduces the gradients of two root modules on two streams."""
    log: list[Any] = []
    streams = {name: Stream(log, name) for name in ("one root", "another root")}

    class Method(SimpleNamespace):
        collectives = ReplicaCollectives(None)

        def early_chunks(self) -> Any:
            return [{0, 1, 2}]

        def begin_early(self, step: int) -> Any:
            return [0]

        def start_early(self, number: int, gradients: Any) -> Any:
            log.append("chunk")

    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    overlap = BackwardOverlap(Method(), collect_shards([{"params": parameters}]))  # type: ignore[arg-type]
    overlap._device = torch.device("cuda")
    overlap.begin(1)
    for name, parameter in zip(("one root", "one root", "another root"), parameters, strict=True):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, name=name: streams[name])
        parameter.sum().backward()
    assert log == ["another root after one root", "chunk"]


def test_changes_of_weights_are_awaited_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may differ from the current device."""
    log: list[Any] = []
    device, model = torch.device("cuda", 1), torch.nn.Linear(2, 2)
    on_device = {device: Stream(log, "model"), None: Stream(log, "current device")}
    shards = collect_shards([{"params": list(model.parameters())}])
    overlap = ForwardOverlap(model, shards, PhaseTimer(torch.device("cpu")))
    overlap._device = device
    for name, fake in {
        "Stream": lambda device, priority: Stream(log, "changes"),
        "stream": nullcontext,
        "current_stream": lambda device=None: on_device[device],
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    overlap.start([0, 1], (Handle(), lambda: None))
    overlap.finish()
    assert log == ["changes after model", "model after changes"]
