"""The pictures that matplotlib draws: axes, words, marks that do not need colour, and how each looks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nantrace.diagnosis.diagnose import diagnose
from nantrace.diagnosis.verdict import Verdict
from nantrace.errors import NantraceError
from nantrace.events import Trace
from tests.render.drawn import all_nan, clean, empty, masked, one_event, overflow, wide

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")

from matplotlib.axes import Axes  # noqa: E402
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from nantrace.render import plot  # noqa: E402

BASELINES = Path(__file__).parent / "baselines"
TOLERANCE = 4.0  # mean difference of grey levels, of 255: what another font hinting makes is under 3
RECORDS = [
    ("as it is", "fault", "inf in block.1.ff.wo"),
    ("dtype=bfloat16", "clean", "loss 0.31"),
    ("compiled", "not_reproduced", ""),
    ("scale=1", "contained", "skipped"),
]


def _axes(width: float = 5.0, height: float = 3.2) -> Axes:
    figure = Figure(figsize=(width, height), dpi=50, layout="constrained")
    FigureCanvasAgg(figure)
    return figure.subplots()


def _ranges(trace: Trace, verdict: Verdict, ax: Axes) -> Axes:
    return plot.ranges(trace, verdict, ax=ax)


def _headroom(trace: Trace, verdict: Verdict, ax: Axes) -> Axes:
    return plot.headroom(trace, verdict, ax=ax)


def _ledger(trace: Trace, verdict: Verdict, ax: Axes) -> Axes:
    return plot.ledger(trace, ax=ax)


def _path(trace: Trace, verdict: Verdict, ax: Axes) -> Axes:
    return plot.path(trace, verdict, ax=ax)


def _matrix(trace: Trace, verdict: Verdict, ax: Axes) -> Axes:
    return plot.matrix(RECORDS, ax=ax)


PICTURES = {"ranges": _ranges, "headroom": _headroom, "ledger": _ledger, "path": _path, "matrix": _matrix}


def _drawn(name: str, trace: Trace) -> Axes:
    return PICTURES[name](trace, diagnose(trace), _axes())


def _grey(ax: Axes) -> Any:
    ax.figure.canvas.draw()  # type: ignore[union-attr]
    return np.asarray(ax.figure.canvas.buffer_rgba())[..., :3].mean(axis=2)  # type: ignore[union-attr]


def _legend(ax: Axes) -> list[str]:
    return [label for label in ax.get_legend_handles_labels()[1] if label]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_looks_as_it_did(name: str, update_snapshots: bool) -> None:
    from PIL import Image

    seen, path = _grey(_drawn(name, overflow())), BASELINES / f"{name}.png"
    if update_snapshots:
        BASELINES.mkdir(exist_ok=True)
        Image.fromarray(seen.astype(np.uint8)).quantize(16).save(path, optimize=True)
    wanted = np.asarray(Image.open(path).convert("L"), dtype=float)
    assert seen.shape == wanted.shape
    assert np.abs(seen - wanted).mean() < TOLERANCE


def test_the_tolerance_tells_pictures_apart() -> None:
    drawn = [_grey(_drawn(name, overflow())) for name in PICTURES]
    for number, one in enumerate(drawn):
        assert all(np.abs(one - other).mean() > 2 * TOLERANCE for other in drawn[number + 1 :])
    finite = _grey(_drawn("headroom", overflow())) - _grey(_drawn("headroom", clean()))
    assert np.abs(finite).mean() > TOLERANCE


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_takes_axes_gives_them_back_and_labels_both(name: str) -> None:
    ax = _axes()
    trace = overflow()
    assert PICTURES[name](trace, diagnose(trace), ax) is ax
    assert ax.get_xlabel() and ax.get_ylabel() and ax.get_title(loc="left")


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("make", [empty, one_event, all_nan, clean, masked, overflow], ids=lambda make: make.__name__)
def test_every_picture_can_be_drawn_of_small_and_odd_traces(name: str, make: Callable[[], Trace]) -> None:
    assert _grey(_drawn(name, make())).min() < 128


@pytest.mark.parametrize("name", ["ranges", "headroom", "path"])
def test_a_model_of_two_thousand_modules_gives_few_labels_and_says_what_was_joined(name: str) -> None:
    path = tuple({"module": f"layers.{n}.ln", "op": "aten.add", "phase": "forward"} for n in range(400))
    ax = PICTURES[name](wide(2000, born=0.3), Verdict("fault", path=path), _axes())
    assert len(ax.get_yticklabels()) <= 42 and len(ax.get_xticklabels()) <= 42
    assert any(word in ax.get_xlabel() for word in ("each cell is the worst", "consecutive events", "not shown"))


def test_kinds_of_marks_differ_in_shape_and_not_in_colour_alone() -> None:
    for ax in (_drawn("ranges", overflow()), _drawn("ledger", overflow())):
        shapes = [(line.get_marker(), str(line.get_linestyle())) for line in ax.lines if line.get_label()[0] != "_"]
        assert len(set(shapes)) == len(shapes)


def test_nonfinite_cells_are_hatched() -> None:
    ax = _drawn("headroom", overflow())
    hatched = [each for each in ax.collections if each.get_hatch()]
    assert len(hatched) == 1 and len(hatched[0].get_paths()) == 5
    assert _legend(ax) == ["birth", "nonfinite"]


def test_the_ledger_tells_committed_from_skipped_and_has_the_scale_apart() -> None:
    ax = _drawn("ledger", overflow())
    assert {"update committed", "update skipped", "loss not finite", "scale (right axis)"} <= set(_legend(ax))
    assert {"scale (right axis)", "update skipped"} & set(_legend(_drawn("ledger", clean()))) == set()


def test_a_name_is_text_and_no_formula() -> None:
    ax = _drawn("path", overflow(module="$\\frac$\x1b.x"))
    _grey(ax)
    assert any("\\x1b" in label.get_text() for label in ax.get_yticklabels())


def test_axes_that_are_given_keep_pyplot_out() -> None:
    code = """
import sys
from matplotlib.figure import Figure
from nantrace.diagnosis.verdict import Verdict
from nantrace.render import plot
from tests.render.drawn import overflow
for draw in (lambda ax: plot.ranges(overflow(), ax=ax), lambda ax: plot.headroom(overflow(), ax=ax),
             lambda ax: plot.ledger(overflow(), ax=ax), lambda ax: plot.path(overflow(), Verdict("clean"), ax=ax),
             lambda ax: plot.matrix([("a", "b", "c")], ax=ax)):
    figure = Figure()
    draw(figure.subplots())
    figure.canvas.draw()
assert "matplotlib.pyplot" not in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_without_axes_a_figure_is_made() -> None:
    from matplotlib import pyplot

    ax = plot.matrix(RECORDS)
    assert pyplot.get_fignums() == [ax.figure.number]  # type: ignore[union-attr]
    pyplot.close(ax.figure)  # type: ignore[arg-type]


def test_without_matplotlib_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NantraceError) as error:
        plot.ledger(clean())
    said = "pictures are drawn by matplotlib, which is not installed: pip install 'nantrace[plot]'"
    assert str(error.value) == said
