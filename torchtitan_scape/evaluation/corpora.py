"""The embedded corpora as data of evaluation tasks."""

from typing import Any

from torchtitan_scape.data.corpora import CORPORA


def held_out(corpus: str, **_: Any) -> dict[str, Any]:
    """Return {split: dataset} of the corpus's held-out documents. The harness passes metadata as further arguments."""
    return {"validation": CORPORA[corpus].data_set("validation")}
