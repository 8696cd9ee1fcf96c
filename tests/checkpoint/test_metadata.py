"""What differs between the run that saved and the one that resumes."""

from typing import Any

import pytest

from torchtitan_scape.checkpoint.metadata import RunMetadata


def compare(here: dict[str, Any], saved: dict[str, Any]) -> tuple[bool, dict[str, str]]:
    """Of records that have nothing else."""
    common = {"model": "llama3 study", "method": "scape", "optimizer": "AdamS"}
    metadata = object.__new__(RunMetadata)
    metadata.values, metadata._layout = common | here, set(here) - {"density"}
    return metadata.compare(common | saved, "folder")


def test_options_by_their_earlier_names_are_no_difference() -> None:
    here = {"wire": "bfloat16", "values": "float32"}
    assert compare(here, {"wire_dtype": "bfloat16", "values_dtype": "float32"}) == (True, {})
    same, different = compare(here, {"wire_dtype": "float32", "values_dtype": "float32"})
    assert not same and different == {"wire": "'float32' -> 'bfloat16'"}


@pytest.mark.parametrize(("wire", "same_layout"), [("float32", True), ("int4", False), (None, True)])
def test_another_density_moves_what_a_code_has_lost(wire: str | None, same_layout: bool) -> None:
    """A method without a wire keeps nothing of the kind."""
    known = {} if wire is None else {"wire": wire}
    assert compare({"density": 0.02, **known}, {"density": 0.01, **known})[0] == same_layout
