"""The embedded corpora as data of the harness's tasks."""

from typing import Any

from torchtitan_scape.data import speeches, standard_library

_CORPORA: dict[str, Any] = {"standard_library": standard_library, "speeches": speeches}


def held_out(corpus: str, **_: Any) -> dict[str, Any]:
    """{split: data set} of what no training on the corpus reads. The harness gives metadata besides."""
    return {"validation": _CORPORA[corpus].load_validation()}
