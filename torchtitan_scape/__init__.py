"""Pretraining with sparse exchange between data-parallel replicas.

`Scape` and `AdamS` are ordinary optimizers; importing them does not import TorchTitan.
"""

import sys
from importlib.util import find_spec
from pathlib import Path


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

from torchtitan_scape.optimizer.adams import AdamS  # noqa: E402
from torchtitan_scape.sync.guard import NonFiniteGradientError  # noqa: E402
from torchtitan_scape.sync.scape.optimizer import Scape  # noqa: E402

__all__ = ["AdamS", "NonFiniteGradientError", "Scape"]
