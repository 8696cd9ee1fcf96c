"""With all examples, every access of a kernel is checked, and every sum and product of integers for overflow.

Otherwise the interpreter runs without its slowest parts: it patches Triton's language once instead of in each call of
a device function, and does not check for overflow.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels.accesses import checked_accesses
from tests.marks import ALL_EXAMPLES

if os.environ.get("TRITON_INTERPRET") == "1" and not ALL_EXAMPLES:  # else this process compiles kernels
    _scope: Any = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()  # with nothing to restore
    builder: Any = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


@pytest.fixture(autouse=ALL_EXAMPLES)
def accesses_are_checked() -> Iterator[None]:
    with checked_accesses():
        yield
