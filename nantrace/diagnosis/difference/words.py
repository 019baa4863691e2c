"""A difference of two traces in words: indented paragraphs, which `render` fits to a terminal. Knows no width."""

from __future__ import annotations

from collections.abc import Iterator

from nantrace.diagnosis.causes.wording import counts, plural
from nantrace.diagnosis.difference.compare import Difference, Side, SiteDifference
from nantrace.diagnosis.difference.tolerance import relative
from nantrace.diagnosis.modules.words import index
from nantrace.events import TensorStats

#: An indent in columns, and a text without line ends; an empty text is a gap.
Paragraph = tuple[int, str]

_ROWS = 5  # further differences of a kind that are listed
_KINDS = 4  # kinds of events without a counterpart that are listed
LIMITS = (
    "Compared are the statistics of each tensor (counts, first position, minimum, maximum), not its elements: "
    "what agrees here may still differ."
)


def paragraphs(difference: Difference) -> Iterator[Paragraph]:
    """What there is to say, most important first."""
    if difference.modules is not None and not difference.modules[2]:
        yield 0, _unrelated(*difference.modules)
    yield from (_side("A", difference.a), _side("B", difference.b))
    if difference.steps is not None:
        yield 0, f"Step {difference.steps[0]} of A is compared with step {difference.steps[1]} of B."
    if difference.a.scales or difference.b.scales:
        yield 0, _without_scale(difference)
    yield 0, ""
    yield from _first("FIRST DIFFERENCE IN NONFINITE VALUES", difference.nonfinite)
    yield from _first(f"FIRST RANGES APART{_before(difference)}", difference.ranges)
    yield from _first("FIRST DIFFERENCE IN SHAPE", difference.shapes)
    yield 0, _summary(difference)
    for letter, side in (("A", difference.a), ("B", difference.b)):
        if side.only:
            yield 0, _missing(letter, side)
    if difference.common:
        yield 0, LIMITS


def _unrelated(in_a: int, in_b: int, both: int) -> str:
    return (
        f"No module has the same name in both ({in_a:,} in A, {in_b:,} in B, {both} in common): these are traces of "
        "different models, or one of them is wrapped; what follows compares what stands outside of those modules."
    )


def as_text(difference: Difference) -> str:
    """One line a paragraph; what a terminal would obey or hide in a name is escaped."""
    return "\n".join(" " * indent + _printable(text) for indent, text in paragraphs(difference))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _side(letter: str, side: Side) -> Paragraph:
    facts = side.facts
    said = [f"torch {facts['torch']}" if "torch" in facts else "", str(facts.get("device", ""))]
    said += [str(facts.get("user_mode", "")), f"rank {facts['rank']}" if "rank" in facts else ""]
    said.append(plural(side.events, "event"))
    return 0, f"{letter}  {side.path or 'a trace in memory'}   {', '.join(part for part in said if part)}"


def _without_scale(difference: Difference) -> str:
    sides = (("A", difference.a.scales), ("B", difference.b.scales))
    said = [f"{_scales(*scales)} in {letter}" for letter, scales in sides if scales]
    return f"Gradients and loss are compared without the loss scale ({', '.join(said)})."


def _scales(least: float, largest: float) -> str:
    return f"{least:,.15g}" if least == largest else f"{least:,.15g} to {largest:,.15g}"


def _first(title: str, found: tuple[SiteDifference, ...]) -> Iterator[Paragraph]:
    if not found:
        return
    first = found[0]
    yield 0, f"{title}   {_place(first)}"
    yield 4, f"A: {_stats(first.a)}; event {first.seq_a}"
    yield 4, f"B: {_stats(first.b)}; event {first.seq_b}"
    if first.kind == "range":
        yield 4, _error(first)
    for other in found[1 : _ROWS + 1]:
        yield 4, f"then {_place(other)}: {_change(other)}"
    yield 0, ""


def _before(difference: Difference) -> str:
    bad, apart = difference.nonfinite[:1], difference.ranges[:1]
    return ", EARLIER" if bad and apart and apart[0].seq_a < bad[0].seq_a else ""


def _place(found: SiteDifference) -> str:
    words = [f"step {found.step}"] if found.step else []
    words.append(found.phase)
    if found.module is not None:
        words.append(found.module or "(model)")
    words.append(found.slot if found.role in found.slot else f"{found.role} {found.slot}")
    if found.op:
        words.append(found.op)
    if found.call > 1:
        words.append(f"call {found.call}")
    if found.occurrence > 1:
        words.append(f"row {found.occurrence} of this kind")
    return "   ".join(words)


def _stats(stats: TensorStats) -> str:
    said = f"{stats.dtype} {list(stats.shape)}"
    if stats.nonfinite:
        where = index(stats)
        position = f", first at {list(where)}" if where else ""
        said += f", {counts(stats.nan, stats.posinf, stats.neginf)} of {stats.numel:,} elements{position}"
    else:
        said += ", all finite" if stats.numel else ", empty"
    return f"{said}, {_span(stats)}" if stats.min is not None else said


def _span(stats: TensorStats) -> str:
    if stats.min == stats.max:
        return f"all {_number(stats.min)}"
    return f"{_number(stats.min)} to {_number(stats.max)}"


def _number(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.6g}"


def _error(found: SiteDifference) -> str:
    allowed = f"{found.allowed:.3g} is allowed"
    if found.relative is None:
        return f"An end of the range moved by {found.error:.3g}, where A is near zero; {allowed}."
    return f"An end of the range moved by {found.error:.3g}, {found.relative:.2%} of A's largest magnitude; {allowed}."


def _change(found: SiteDifference) -> str:
    if found.kind == "nonfinite":
        return " against ".join(counts(s.nan, s.posinf, s.neginf) if s.nonfinite else "finite" for s in _both(found))
    if found.kind == "shape":
        return " against ".join(str(list(stats.shape)) for stats in _both(found))
    return " against ".join(map(_span, _both(found)))


def _both(found: SiteDifference) -> tuple[TensorStats, TensorStats]:
    return found.a, found.b


def _summary(difference: Difference) -> str:
    if not difference.common:
        return "No common site: these are traces of different models, or of different steps."
    counted = difference.counts
    named = (("nonfinite", "nonfinite values"), ("range", "range"), ("shape", "shape"))
    said = [f"{counted[kind]:,} in {word}" for kind, word in named if counted[kind]]
    common = f"{difference.common:,} common site{'s' * (difference.common != 1)}"
    found = f"Of {common} differ {', '.join(said)}" if said else f"No difference in {common}"
    facts = (
        ("nonfinite_alike", "nonfinite alike"),
        ("position_unknown", "of these without a position to compare"),
        ("dtype", "in another dtype"),
        ("unreadable", "unreadable on a side"),
    )
    also = [f"{counted[kind]:,} {word}" for kind, word in facts if counted[kind]]
    return f"{found}{'; ' if also else ''}{', '.join(also)}. {_allowed(difference)}"


def _allowed(difference: Difference) -> str:
    given = (("rtol", difference.rtol), ("atol", difference.atol))
    said = [f"{name} {value:g}" for name, value in given if value is not None]
    if said:
        return f"Ranges may move by what was given: {', '.join(said)}."
    if difference.dtype is None:
        return "Ranges are compared exactly: no dtype here rounds."
    share = f"{relative(difference.dtype):.2g} of a tensor's largest magnitude"
    return f"Ranges may move by {share}, half of the digits of {difference.dtype}, and near zero by a few roundings."


def _missing(letter: str, side: Side) -> str:
    kinds = [f"{count:,} {kind}" for kind, count in list(side.only_by.items())[:_KINDS]]
    more = ", ..." if len(side.only_by) > _KINDS else ""
    bad = f", {side.only_nonfinite:,} of them nonfinite" if side.only_nonfinite else ""
    return f"Only in {letter}: {plural(side.only, 'event')}{bad} ({', '.join(kinds)}{more}), first {side.first_only}."
