"""Exact match and F1 of two answers as defined for SQuAD (Rajpurkar et al. 2016, Section 6.1).

The harness imports them from `transformers.data.metrics.squad_metrics`, which transformers 5 has removed.
"""

import re
import string
import sys
from collections import Counter
from importlib.util import find_spec
from types import ModuleType

_PARENT, _NAME = "transformers.data.metrics", "squad_metrics"
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Return the text in lower case, without punctuation, articles and repeated spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def compute_exact(a_gold: str, a_pred: str) -> int:
    return int(normalize_answer(a_gold) == normalize_answer(a_pred))


def compute_f1(a_gold: str, a_pred: str) -> float:
    """Return the F1 of the common words; for an answer without words, whether both have none."""
    gold, prediction = normalize_answer(a_gold).split(), normalize_answer(a_pred).split()
    if not gold or not prediction:
        return float(gold == prediction)
    same = (Counter(gold) & Counter(prediction)).total()
    return 2 * same / (len(gold) + len(prediction))


def provide() -> None:
    """Register this module under the name that the harness imports, unless transformers has its own."""
    if _PARENT in sys.modules or find_spec(_PARENT):
        return
    parent = ModuleType(_PARENT)
    parent.squad_metrics = sys.modules[__name__]  # type: ignore[attr-defined]
    sys.modules[_PARENT] = parent
    sys.modules[f"{_PARENT}.{_NAME}"] = sys.modules[__name__]
