"""Choice of the backend that runs the passes: Triton or PyTorch."""

import importlib.util
import math
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.kernels.codec.formats import BLOCK
from torchtitan_scape.kernels.codec.reference import BlockCode
from torchtitan_scape.kernels.common.tensors import in_dry_run
from torchtitan_scape.kernels.dense import reference as dense
from torchtitan_scape.kernels.scape.passes import ScapePasses
from torchtitan_scape.kernels.scape.torch_passes import TorchReplicated, TorchSharded
from torchtitan_scape.kernels.topk import reference as topk
from torchtitan_scape.kernels.topk.layout import MessageLayout

BACKENDS = ("auto", "triton", "torch")
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose_backend(backend: str, device: torch.device, dtypes: Iterable[torch.dtype] = ()) -> str:
    """Return "triton" or "torch".

    Args:
        backend: One of `BACKENDS`. "auto" selects Triton on a GPU and PyTorch on a CPU, and PyTorch for dtypes other
            than `TRITON_DTYPES`. A dry run with fake tensors always uses PyTorch.
        device: Device of the parameters.
        dtypes: Dtypes of the parameters.

    Raises:
        ValueError: An unknown backend, or "triton" where it cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"kernels is {backend!r}; it must be one of {', '.join(map(repr, BACKENDS))}")
    if in_dry_run():
        return "torch"
    installed = importlib.util.find_spec("triton") is not None
    # Triton reads the variable when it is first imported.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    others = sorted(str(dtype) for dtype in set(dtypes) - set(TRITON_DTYPES))
    if backend == "auto":
        return "triton" if device.type == "cuda" and installed and not others else "torch"
    if backend == "triton" and not installed:
        raise ValueError("kernels is 'triton', which is not installed; install triton, or choose 'auto' or 'torch'")
    if backend == "triton" and device.type != "cuda" and not interpreted:
        raise ValueError(
            f"kernels is 'triton', and the parameters are on {device.type!r}; Triton needs a GPU (or the slow "
            "TRITON_INTERPRET=1): choose 'auto' or 'torch'"
        )
    if backend == "triton" and others:
        raise ValueError(
            f"kernels is 'triton', and there are parameters of {others[0]}; the kernels take "
            f"{', '.join(map(str, TRITON_DTYPES))}: choose 'auto' or 'torch'"
        )
    return backend


def scape_passes(backend: str, *arguments: Any, **options: Any) -> ScapePasses:
    """Return the passes of a SCAPE step on "triton" or "torch". Arguments and options are those of `ScapePasses`."""
    replicated = options.get("owner") is None
    if backend == "triton":
        from torchtitan_scape.kernels.scape.triton_passes import TritonReplicated, TritonSharded

        return (TritonReplicated if replicated else TritonSharded)(*arguments, **options)
    return (TorchReplicated if replicated else TorchSharded)(*arguments, **options)


def finite_check(backend: str, limit: float = math.inf) -> Callable[[list[Tensor]], Tensor]:
    """Return a function that checks gradients, see `dense.reference.finite`.

    On "triton" a tensor also counts as infinite if its norm reaches the limit.
    """
    if backend == "triton":
        of = norms(backend)
        return lambda gradients: of(gradients) < limit
    return partial(dense.finite, limit=limit)


def norms(backend: str) -> Callable[[list[Tensor]], Tensor]:
    """Return a function that returns the norms of tensors, FP64 (n,)."""
    if backend == "triton":
        from torchtitan_scape.kernels.dense.triton_passes import Norms

        return Norms()
    return dense.norms


def scaling(backend: str) -> Callable[[list[Tensor], Tensor], None]:
    """Return a function that multiplies tensors, in place, by a factor on their device, FP32 ()."""
    if backend == "triton":
        from torchtitan_scape.kernels.dense.triton_passes import Scaling

        return Scaling()
    return dense.scale_


def elementwise_update(backend: str, rule: str) -> Any:
    """Return an object whose `step` is that of an elementwise optimizer; see `TorchUpdate`."""
    if backend == "triton":
        from torchtitan_scape.kernels.dense.triton_passes import TritonUpdate

        return TritonUpdate(rule)
    return dense.TorchUpdate(rule)


def muon_passes(backend: str) -> Any:
    """Return an object with the elementwise parts of Muon's step; see `TorchMuon`."""
    if backend == "triton":
        from torchtitan_scape.kernels.dense.triton_passes import TritonMuon

        return TritonMuon()
    return dense.TorchMuon()


def block_code(backend: str, name: str, block: int = BLOCK, scale: torch.dtype = torch.bfloat16) -> BlockCode:
    """Return a block code on "triton" or "torch", with the same bits; see `BlockCode`."""
    if backend == "triton":
        from torchtitan_scape.kernels.codec.triton_passes import TritonBlockCode

        return TritonBlockCode(name, block, scale)
    return BlockCode(name, block, scale)


def exchange_passes(backend: str, dtypes: Iterable[torch.dtype]) -> Any:
    """Return the module `kernels.exchange.triton_passes`; None if the exchange needs a buffer.

    That is the case on "torch", and for tensors of other dtypes than `TRITON_DTYPES`.
    """
    fits = backend == "triton" and set(dtypes) <= set(TRITON_DTYPES)
    return importlib.import_module(".exchange.triton_passes", __package__) if fits else None


def masked_payload(backend: str) -> Any:
    """Return the module `kernels.exchange.triton_masked` on "triton", else None: the payload is then a copy."""
    return importlib.import_module(".exchange.triton_masked", __package__) if backend == "triton" else None


def topk_passes(backend: str, layout: MessageLayout) -> Any:
    """Return the passes of top-k, `TorchTopk` or the same on "triton". Triton has none for tiles that are too large."""
    if backend == "triton":
        from torchtitan_scape.kernels.topk.triton_passes import TritonTopk, fits

        if all(map(fits, layout.grids)):
            return TritonTopk(layout)
    return topk.TorchTopk(layout)


def cosine_passes(backend: str, layout: MessageLayout, device: torch.device) -> Any:
    """Return DeMo's passes, `TorchCosine` or the same on "triton". Triton has none for tiles that are too large."""
    if backend == "triton":
        from torchtitan_scape.kernels.topk.triton_cosine import TritonCosine, fits

        if all(map(fits, layout.grids)):
            return TritonCosine(layout, device)
    return topk.TorchCosine(layout, device)


def tagc_passes(backend: str) -> Any:
    """Return the module with the functions of `kernels.tagc.reference` on "torch" or "triton"."""
    return importlib.import_module(f".tagc.{'triton_passes' if backend == 'triton' else 'reference'}", __package__)
