"""Releases of PyTorch: the supported ones, and the errors for others."""

import importlib
from typing import Any
from unittest.mock import patch

import pytest
import torch

from torchtitan_scape.topology import torch_version
from torchtitan_scape.topology.torch_version import release_of, too_old, untested


@pytest.mark.parametrize(
    "version, release, old, new",
    [
        ("2.9.1+cu128", (2, 9), True, False),
        ("2.10.0+rocm7.1", (2, 10), False, False),
        ("2.10.0a0+b4e4ee81d3.nv25.12", (2, 10), False, False),  # a container's: a pre-release of 2.10 for packaging
        ("2.14.1", (2, 14), False, False),
        ("2.15.0", (2, 15), False, True),
        ("3.0.0.dev20270101", (3, 0), False, True),
    ],
)
def test_supported_releases(version: str, release: tuple[int, int], old: bool, new: bool) -> None:
    assert release_of(version) == release
    assert bool(too_old(version)) == old and bool(untested(version)) == new
    assert not old or too_old(version).startswith(f"torch {version} is installed; install torch 2.10 or later, see ")


def test_an_old_release_is_refused_at_import() -> None:
    spec = importlib.util.find_spec("torchtitan_scape.topology.torch_version")
    assert spec is not None and spec.loader is not None
    with patch.object(torch, "__version__", "2.9.0"), pytest.raises(ImportError, match=r"torch 2\.9\.0 is installed"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert release_of(torch.__version__) == torch_version.RELEASE


def test_context_parallelism_permutes_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.10 permuted the one row of positions that all samples share once per sample."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    def in_place(mesh: Any, buffers: list[Any]) -> list[Any]:
        for buffer in buffers:
            if isinstance(buffer, torch.Tensor):
                for i in range(len(buffer)):
                    buffer[i] = buffer[i][[2, 0, 1]]
        return buffers

    monkeypatch.setattr(torch_version, "RELEASE", (2, 10))
    monkeypatch.setattr(_attention, "_context_parallel_buffers", in_place)
    for _ in range(2):  # of two trainers in one process
        torch_version.permute_copies()
    positions = torch.arange(3).expand(2, 3)
    permuted, other = _attention._context_parallel_buffers(None, [positions, "mask"])  # type: ignore[list-item, arg-type]
    assert permuted.tolist() == [[2, 0, 1], [2, 0, 1]] and positions.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert other == "mask"
    monkeypatch.setattr(torch_version, "RELEASE", (2, 11))
    monkeypatch.setattr(_attention, "_context_parallel_buffers", in_place)
    torch_version.permute_copies()
    assert _attention._context_parallel_buffers is in_place
