"""Host memory that is registered with the CUDA driver, and its limits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan_scape.kernels.common import offload
from torchtitan_scape.kernels.common.offload import _free_in_cgroups, host_tensors, register


class Runtime:
    """Stand-in for the CUDA runtime: it registers memory, or refuses with an error."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.registered, self.calls = error, dict[int, int](), list[str]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 1 and not any(a < address + size and address < a + n for a, n in self.registered.items())
        if not self.error:
            self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        self.calls.append("unregister")
        del self.registered[address]


def test_host_memory_is_registered_at_its_exact_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one block, until its owner is collected, after copies that are in flight have ended."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    owner = nn.Module()
    tensors = host_tensors([(33, 5), (), (0, 4), (1000,)], torch.device("cuda"), owner)
    assert [t.shape for t in tensors] == [(33, 5), (), (0, 4), (1000,)] and not any(t.any() for t in tensors)
    assert list(runtime.registered.values()) == [4 * (176 + 16 + 1008)]
    assert all(t.data_ptr() % 64 == tensors[0].data_ptr() % 64 for t in tensors if t.numel())
    values, other = torch.zeros(8), nn.Module()
    assert register(values, other, lambda: runtime.calls.append("finish"))
    del other
    assert runtime.calls == ["finish", "unregister"] and len(runtime.registered) == 1
    del owner
    assert not runtime.registered
    host_tensors([(4,)], torch.device("cpu"), nn.Module())
    assert not runtime.registered


def test_memory_that_cannot_be_registered_stays_pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(2))
    cleared: list[Any] = []
    monkeypatch.setattr(offload.torch, "ones", lambda *_, **options: cleared.append(options["device"]))
    with pytest.warns(UserWarning, match=r"0\.00 GB of host memory cannot be pinned \(CUDA error 2\).*ulimit -l"):
        (values,) = host_tensors([(5,)], torch.device("cuda"), nn.Module())
    assert values.tolist() == [0.0] * 5 and cleared == ["cuda"]


def test_memory_limits_of_control_groups(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/job_1/step_0\n")
    job = tmp_path / "sys" / "job_1"
    (job / "step_0").mkdir(parents=True)
    for folder, limit, used in ((job, "5000", "1000"), (job / "step_0", "max", "800")):
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(used + "\n")
        (folder / "memory.stat").write_text("anon 500\ninactive_file 300\n")
    assert list(_free_in_cgroups(tmp_path / "own", tmp_path / "sys")) == [4300]
    assert list(_free_in_cgroups(tmp_path / "none", tmp_path / "sys")) == []
