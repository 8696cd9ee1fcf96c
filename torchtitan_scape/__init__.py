"""Pretraining with sparse exchange between data-parallel replicas.

`Scape` and `AdamS` are ordinary optimizers; importing them does not import TorchTitan. They are imported when they are
first asked for, so that the planner runs where torch is not installed.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_scape.methods.scape.options import ScapeOptions
    from torchtitan_scape.optimizers.adams import AdamS
    from torchtitan_scape.replica.guard import NonFiniteGradientError
    from torchtitan_scape.replica.scape import Scape

__all__ = ["AdamS", "NonFiniteGradientError", "Scape", "ScapeOptions"]

_PLACES = {
    "AdamS": "optimizers.adams",
    "NonFiniteGradientError": "replica.guard",
    "Scape": "replica.scape",
    "ScapeOptions": "methods.scape.options",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def _check_own_packages() -> None:
    """`kernels` and `topology` are common names: another package of that name must not stand in front."""
    root = Path(__file__).resolve().parent.parent
    for name in ("kernels", "topology"):
        spec = find_spec(name)
        found = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if found != root / name:
            message = (
                f"the package {name!r} that Python finds is {found or 'none'}, not {root / name}; run from "
                f"{root}, put it first on PYTHONPATH, or uninstall the other package"
            )
            # `python -m torchtitan_scape.train` is a user's command: it ends in a line, not in a traceback.
            raise SystemExit(f"error: {message}") if sys.argv[:1] == ["-m"] else ImportError(message)


_check_own_packages()
