"""The cases that the default run has of a matrix."""

from itertools import product
from typing import Any

from tests.marks import covering


def default(cases: list[Any]) -> list[tuple[Any, ...]]:
    return [case.values for case in cases if not case.marks]


def test_the_default_run_has_each_value_once() -> None:
    axes: list[list[Any]] = [[1, 2, 3], ["block", "tensor"], [{}, {"code": "int4"}, {"offload": ["state"]}]]
    cases = covering(product(*axes))
    assert [case.values for case in cases] == list(product(*axes)), "none is lost"
    chosen = default(cases)
    assert len(chosen) == 3
    for position, values in enumerate(axes):
        assert all(any(case[position] == value for case in chosen) for value in values)


def test_values_alternate_when_an_axis_is_longer() -> None:
    counts = [sum(case[0] == value for case in default(covering(product((1, 2), range(6))))) for value in (1, 2)]
    assert counts == [3, 3]
