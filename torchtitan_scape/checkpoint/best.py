"""best.json in the dump folder: the step with the lowest validation loss, and the checkpoint with the lowest."""

import json
import logging
import math
from pathlib import Path
from typing import Any

from torchtitan_scape.core.files import parse_json, write_whole

logger = logging.getLogger(__name__)

FILE = "best.json"


def read(folder: Path) -> dict[str, Any]:
    """Return the contents of this dump folder's file, see `BestCheckpoint`. Raises ValueError if there is none."""
    try:
        found: dict[str, Any] = parse_json((folder / FILE).read_bytes())
        return {"checkpoint_step": found["checkpoint_step"], "losses": found["losses"]}
    except (OSError, ValueError, TypeError, KeyError):
        raise ValueError(f"{folder / FILE} is missing or cannot be read: no validation was noted there") from None


class BestCheckpoint:
    """What validations of a run have found so far. Rank 0 keeps it.

    The file has `step` and `validation_loss`, of all validations; `checkpoint_step` and `checkpoint_loss`, of those
    whose step was saved, null where none was; `validation`, what was validated on; and `losses`, a row of step, loss
    and whether it was saved for each. A resumed run forgets what lay beyond the step it goes on from.

    Args:
        folder: the dump folder.
        validation: what losses have to have in common to be compared.
    """

    def __init__(self, folder: Path, validation: dict[str, Any]) -> None:
        self.path, self.validation = folder / FILE, validation
        self._losses: list[list[Any]] = self._read()
        self._noted = False

    def _read(self) -> list[list[Any]]:
        try:
            found = parse_json(self.path.read_bytes())
            losses = [[int(step), float(loss), bool(saved)] for step, loss, saved in found["losses"]]
            return losses if found["validation"] == self.validation else []
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError):
            logger.warning(f"{self.path} cannot be read, and begins anew")
            return []

    def checkpoint_step(self) -> int | None:
        """The step of the checkpoint with the lowest loss."""
        saved = [(loss, step) for step, loss, saved in self._losses if saved]
        return min(saved)[1] if saved else None

    def validations_since_best(self) -> int:
        """Return the number of validations after the one with the lowest loss."""
        rows = sorted(self._losses)
        best = min(range(len(rows)), key=lambda i: rows[i][1], default=0)
        return max(0, len(rows) - 1 - best)

    def note(self, step: int, loss: float, saved: bool, begun: int) -> None:
        """Adds a validation, and writes the file, as a whole or not at all.

        Args:
            saved: a checkpoint of this step has been written, or is being.
            begun: the step that this run has gone on from, 0 for none: its checkpoint is there.
        """
        if not self._noted:
            self._losses = [[at, of, saved or at == begun] for at, of, saved in self._losses if at <= begun]
            self._noted = True
        self._losses = [row for row in self._losses if row[0] != step]  # told again: it was saved after all
        if math.isfinite(loss):
            self._losses.append([step, loss, saved])
        if not self._losses:
            return
        best_step, best_loss, _ = min(self._losses, key=lambda row: row[1])
        kept = self.checkpoint_step()
        found = {
            "step": best_step,
            "validation_loss": best_loss,
            "checkpoint_step": kept,
            "checkpoint_loss": next((row[1] for row in self._losses if row[0] == kept), None),
            "validation": self.validation,
            "losses": self._losses,
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(found, indent=1) + "\n")
        except OSError as error:  # no reason to end a run
            logger.warning(f"{self.path} cannot be written ({error.strerror})")
