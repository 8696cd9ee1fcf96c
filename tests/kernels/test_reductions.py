"""Triton 3.6 reduces an axis over the wrong threads if its lanes in a warp are not contiguous (fixed in 3.7)."""

import json
import re
from itertools import product

import pytest
import torch
import triton

from scripts.benchmarks import compile_kernels

BLOCKS = (64, 128, 384, 512, 1024)
REDUCTION = re.compile(
    r'"tt\.(?:reduce|scan)"\(.*?axis = (\d+) : i32.*?(?:\n.*?)*?\}\)\s*:\s*\(tensor<[^#]*?, (#.*?)>\) ->'
)


def lanes(encoding: str, layouts: dict[str, str]) -> list[list[int]] | None:
    """Return the bases of the lanes of a linear layout, or of a slice of one; None for any other layout."""
    encoding = layouts.get(encoding.strip(), encoding.strip())
    if sliced := re.match(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>$", encoding):
        parent, axis = lanes(sliced[2], layouts), int(sliced[1])
        return None if parent is None else [base[:axis] + base[axis + 1 :] for base in parent]
    if not encoding.startswith("#ttg.linear"):
        return None
    found = re.search(r"lane = (\[\[.*?\]\]|\[\])", encoding)
    assert found
    return json.loads(found[1])


def separate_lanes(text: str) -> list[str]:
    """Return the reductions in TTGIR whose lanes along the axis are not contiguous."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", text, re.M))
    wrong = []
    for reduction in REDUCTION.finditer(text):
        bases, axis = lanes(reduction[2], layouts), int(reduction[1])
        used = [i for i, base in enumerate(bases or ()) if base[axis]]
        if used and used[-1] - used[0] + 1 != len(used):
            wrong.append(f"axis {axis} of {reduction[2]}")
    return wrong


def test_separate_lanes_are_found() -> None:
    text = """#linear = #ttg.linear<{register = [], lane = [[0, 4], [1, 0], [0, 8]], warp = [], block = []}>
%0 = "tt.reduce"(%1) <{axis = 1 : i32}> ({
}) : (tensor<2x16xi32, #linear>) -> tensor<2xi32, #ttg.slice<{dim = 1, parent = #linear}>>
"""
    assert separate_lanes(text) == ["axis 1 of #linear"]
    assert separate_lanes(text.replace("[1, 0], [0, 8]", "[0, 8], [1, 0]")) == []


@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6), reason="this Triton reduces every layout correctly"
)
def test_no_kernel_reduces_lanes_that_are_separate_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(quick: bool) -> None:
        for block in BLOCKS:
            compile_kernels._scape_step(block=block, density=0.1, in_use=0.1)
        for block, name in product((64, 128, 512, 1024), ("1bit", "2bit", "int4")):
            compile_kernels._codec_step(name, block, torch.float32)

    monkeypatch.setattr(compile_kernels, "_take_steps", steps)
    target = compile_kernels.TARGETS["cuda:90"]
    for launch in compile_kernels.launches(False):
        compiled = compile_kernels.compiled(launch, target)
        assert not separate_lanes(compiled.asm["ttgir"]), (launch.kernel.fn.__name__, launch.constants)
