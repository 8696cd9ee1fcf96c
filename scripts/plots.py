"""Shared by the plots of the scripts."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.common import RunError
from torchtitan_scape.core.command import import_advice

# Okabe and Ito's colors without yellow, which is hard to see on white.
COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP*X<>"
LINEAR = 5.0  # percent; an axis of gaps that are much larger is logarithmic above
GAP_TICKS = (-20, -15, -10, -8, -6, -4, -2, 0, 2, 4, 6, 10, 15, 20, 30, 40, 60, 100)


def look(i: int, dense: bool) -> dict[str, Any]:
    """Return the style of the i-th method's line; dense ones are dashed."""
    return {
        "color": COLORS[i % len(COLORS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": "--" if dense else "-",
    }


def figure(rows: int, columns: int, size: tuple[float, float], title: str = "", **options: Any) -> tuple[Any, Any]:
    """Return the figure, and its axes, with grids, by row and column."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise RunError(import_advice(error)) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **options)
    drawn.suptitle(title)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return drawn, axes


def log_above(axis: Any, limit: float) -> None:
    """Make the vertical axis linear up to `limit` and logarithmic above, with equal slopes at the limit."""
    import numpy

    def place(value: Any) -> Any:
        return numpy.where(value <= limit, value, limit * (1 + numpy.log(numpy.maximum(value, limit) / limit)))

    def value(place: Any) -> Any:
        return numpy.where(place <= limit, place, limit * numpy.exp(numpy.maximum(place, limit) / limit - 1))

    axis.set_yscale("function", functions=(place, value))


def gap_axis(axis: Any, low: float, high: float) -> None:
    """Set the limits and ticks of a vertical axis of gaps in percent from `low` to `high`."""
    axis.set_ylim(low - 1, high + 1 if high < LINEAR else 1.25 * high)
    axis.set_yticks([tick for tick in GAP_TICKS if low - 1 <= tick <= axis.get_ylim()[1]])
    axis.yaxis.set_major_formatter("{x:+.0f}")


def save(figure: Any, path: Path, legend: Iterable[Any] = ()) -> None:
    """Save a figure, with one legend below for the axes of `legend`, each label once."""
    import matplotlib.pyplot as plt

    entries: dict[str, Any] = {}
    for axis in legend:
        handles, labels = axis.get_legend_handles_labels()
        entries = dict(zip(labels, handles, strict=True)) | entries
    if entries:
        # In inches: the line with its gaps, and the letters of the longest label.
        columns = max(1, int(figure.get_figwidth() / (0.9 + 0.07 * max(map(len, entries)))))
        # A long legend must not shrink the axes.
        figure.set_figheight(figure.get_figheight() + 0.2 * max(0, -(-len(entries) // columns) - 4))
        for count in range(columns, 0, -1):  # letters differ in width: fewer columns until none is cut off
            place = {"loc": "outside lower center", "ncols": count, "fontsize": 9, "handlelength": 3}
            below = figure.legend(entries.values(), entries, **place)
            figure.draw_without_rendering()
            if count == 1 or below.get_window_extent().width <= figure.bbox.width:
                break
            below.remove()
    figure.savefig(path, dpi=130)
    plt.close(figure)
