"""The embedded corpora as data of evaluation tasks."""

from typing import Any

from torchtitan_scape.data import speeches, standard_library

_CORPORA: dict[str, Any] = {"standard_library": standard_library, "speeches": speeches}


def held_out(corpus: str, **_: Any) -> dict[str, Any]:
    """Return {split: dataset} of the corpus's held-out documents. The harness passes metadata as further arguments."""
    return {"validation": _CORPORA[corpus].load_validation()}
