"""The comparison's figures: what a method costs in loss, over bytes and predicted seconds. comparison.py calls them."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.plots import COLOURS, MARKERS, figure, log_above, save
from scripts.studies.comparison_costs import MACHINES, MODEL
from scripts.studies.comparison_methods import Budget, Compared
from scripts.studies.comparison_report import relative

LINEAR = 5.0  # percent; the gap's axis is logarithmic above
TICKS = (-20, -15, -10, -8, -6, -4, -2, 0, 2, 4, 6, 10, 15, 20, 30, 40, 60, 100)
BYTES = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)  # ticks, percent
SECONDS = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1)
GAP = f"final validation loss above dense AdamW\n(%; logarithmic above {LINEAR:g})"
# Where a label may stand, in points from its mark: (right, up), the nearest first.
PLACES = [
    (x * reach, y * reach)
    for reach in (7, 13, 22, 34)
    for x, y in ((1, 0), (-1, 0), (0.8, 0.8), (-0.8, 0.8), (0.8, -0.8), (-0.8, -0.8), (0, 1), (0, -1))
]
Box = tuple[float, float, float, float]  # left, low, right, high, in pixels
SPAN = "span"  # lines that no label covers


def draw_bytes(found: Sequence[Budget], path: Path) -> None:
    """A panel a budget: gap over the share of dense bytes of a step; a thin line leads to that of the whole run."""
    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    drawn, grid = figure(rows, columns, (8.2 * columns, 0.6 + 6.2 * rows))
    size = found[0].others[0].first["parameters"]
    drawn.suptitle(f"What replicas send, and what it costs in loss: {size:,} parameters, 20 tokens each")
    axes, styles = list(grid.flat), looks(found)
    for axis, one in zip(axes, found, strict=False):
        panel(axis, one, styles, lambda method: 100 * method.shares[0], one.title)
        axis.set_xlabel("sent a step (% of dense FP32 bytes); to the bar: of the whole run, start included")
        for method in one.others:
            whole, gap = 100 * method.shares[1], statistics.mean(method.gaps(one.dense("AdamW")))
            style = styles[method.kind] | {"linewidth": 0.7, "alpha": 0.5, "zorder": 1}
            axis.plot([100 * method.shares[0], whole], [gap, gap], **style | {"marker": "", "gid": SPAN})
            axis.plot([whole], [gap], **style | {"marker": "|"})
        ticks(axis, BYTES, 0.7 * min(100 * method.shares[0] for method in one.others), 160)
    for axis in axes[len(found) :]:
        axis.set_axis_off()
    name_all(drawn, axes[: len(found)])
    save(drawn, path)


def draw_seconds(found: Sequence[Budget], path: Path) -> None:
    """A panel a machine, of the first budget: gap over the predicted time of the run, dense AdamW's being 1."""
    one = found[0]
    drawn, grid = figure(2, 2, (16.4, 13.0))
    drawn.suptitle(
        f"Loss of the small model ({one.title}), predicted step time of {MODEL} with {one.replicas} replicas"
    )
    axes = list(grid.flat)
    for axis, machine in zip(axes, MACHINES, strict=True):
        times = {method.label: relative(one, method, machine) for method in one.methods}
        panel(axis, one, looks([one]), lambda method, times=times: times[method.label], machine)  # type: ignore[misc]
        axis.set_xlabel("predicted seconds of the run over those of dense AdamW")
        ticks(axis, SECONDS, 0.93 * min(times.values()), 1.07 * max(times.values()))
    name_all(drawn, axes)
    save(drawn, path)


def looks(found: Sequence[Budget]) -> dict[str, dict[str, Any]]:
    """Of every kind of method: a marker of its own, and a colour."""
    kinds = sorted({method.kind for one in found for method in one.others})
    colours = COLOURS[1:]
    return {k: {"color": colours[i % len(colours)], "marker": MARKERS[i % len(MARKERS)]} for i, k in enumerate(kinds)}


def panel(
    axis: Any, one: Budget, styles: dict[str, dict[str, Any]], x: Callable[[Compared], float], title: str
) -> None:
    """Marks, hollow where one seed ran; small dots are seeds. Dense training is a line."""
    adamw, low, high = one.dense("AdamW"), 0.0, 0.0
    lines: list[float] = []
    for method in one.methods:
        gaps = method.gaps(adamw)
        if not gaps:
            continue
        gap = statistics.mean(gaps)
        low, high = min(low, *gaps), max(high, *gaps)
        if method.is_dense:
            axis.axhline(gap, color="#000000", linewidth=1, linestyle="-" if method is adamw else "--", gid=SPAN)
            note = {
                "textcoords": "offset points",
                "xytext": (3, 2),
                "fontsize": 8,
                "xycoords": ("axes fraction", "data"),
            }
            beside = sum(abs(gap - other) < 0.5 for other in lines)  # two may be equal, or nearly so
            axis.annotate(method.label, (0.3 * beside, gap), **note)
            lines.append(gap)
            continue
        style = styles[method.kind]
        axis.plot([x(method)] * len(gaps), gaps, ".", color=style["color"], markersize=4, alpha=0.7)
        face = "white" if len(gaps) == 1 else style["color"]
        axis.plot([x(method)], [gap], gid=method.label, markersize=8, markeredgewidth=2, markerfacecolor=face, **style)
    log_above(axis, LINEAR)
    axis.set_ylim(low - 1, high + 1 if high < LINEAR else 1.25 * high)
    axis.set_yticks([tick for tick in TICKS if low - 1 <= tick <= axis.get_ylim()[1]])
    axis.yaxis.set_major_formatter("{x:+.0f}")
    axis.set_title(title, fontsize=10)
    axis.set_ylabel(GAP)
    axis.grid(alpha=0.3)


def ticks(axis: Any, at: Sequence[float], low: float, high: float) -> None:
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    axis.set_xticks([tick for tick in at if low <= tick <= high])
    axis.minorticks_off()
    axis.xaxis.set_major_formatter("{x:g}")


def name_all(drawn: Any, axes: Sequence[Any]) -> None:
    """A label at every mark, where it covers as little as may be of marks and of labels before it."""
    drawn.draw_without_rendering()
    for axis in axes:
        lines = [line for line in axis.get_lines() if line.get_gid()]
        marks = {line.get_gid(): line for line in lines if line.get_gid() != SPAN}
        at = {label: (line.get_xdata()[0], line.get_ydata()[0]) for label, line in marks.items()}
        pixels = {label: axis.transData.transform(place) for label, place in at.items()}
        taken: list[Box] = [(x - 7, y - 7, x + 7, y + 7) for x, y in pixels.values()]
        spans = [line.get_window_extent() for line in lines if line.get_gid() == SPAN]
        spans += [note.get_window_extent() for note in axis.texts]
        taken += [(span.x0, span.y0 - 3, span.x1, span.y1 + 3) for span in spans]
        frame, point = axis.get_window_extent(), drawn.dpi / 72
        for label in sorted(at, key=lambda label: pixels[label][1]):
            note = axis.annotate(label, at[label], xytext=(0, 0), textcoords="offset points", fontsize=8)
            note.set_color(marks[label].get_color())
            box = note.get_window_extent()
            best, place = None, PLACES[0]
            for right, up in PLACES:
                x, y = pixels[label][0] + right * point, pixels[label][1] + up * point
                left = x if right > 0 else x - box.width if right < 0 else x - box.width / 2
                low = y if up > 0 else y - box.height if up < 0 else y - box.height / 2
                tried = (left, low, left + box.width, low + box.height)
                outside = tried[0] < frame.x0 or tried[1] < frame.y0 or tried[2] > frame.x1 or tried[3] > frame.y1
                cost = sum(common(tried, other) for other in taken) + 1e6 * outside + 2 * (abs(right) + abs(up))
                if best is None or cost < best[0]:
                    best, place = (cost, tried), (right, up)
            assert best is not None
            taken.append(best[1])
            note.set_position(place)
            note.set_ha("left" if place[0] > 0 else "right" if place[0] < 0 else "center")
            note.set_va("bottom" if place[1] > 0 else "top" if place[1] < 0 else "center")
            if max(map(abs, place)) > 10:
                thin = {"color": marks[label].get_color(), "linewidth": 0.5, "alpha": 0.6}
                axis.annotate(
                    "", at[label], xytext=place, textcoords="offset points", arrowprops={"arrowstyle": "-"} | thin
                )


def common(one: Box, other: Box) -> float:
    """Square pixels that both cover."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)
