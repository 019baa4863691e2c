"""Whether a run may go on to the next stage: a promotion rule over the steps of its trace, as a value. Pure.

Each rule passes, fails with steps and numbers, or was not checked; what was not checked is never counted as passed. It
judges what was recorded: a run that passes may still be wrong where nobody looked.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from nantrace.diagnosis.gate import reference as comparison
from nantrace.diagnosis.gate.reference import Compared
from nantrace.diagnosis.gate.values import Bad, Found, Values
from nantrace.diagnosis.gate.window import RuleName, Thresholds, Window, lost, number, window_of
from nantrace.diagnosis.observation import numbered
from nantrace.diagnosis.verdict import plain
from nantrace.events import Trace

Status = Literal["passed", "failed", "not_checked"]
_BESIDE: tuple[RuleName, ...] = ("loss_distribution", "norm_distribution", "step_time")


@dataclass(frozen=True)
class Rule:
    """One rule and what became of it.

    Attributes:
        name: "updates", "losses", "skips", "step_time", ...
        status: "passed", "failed" or "not_checked".
        sentence: what was found, with numbers and steps; of a rule that was not checked, why.
        steps: the steps at which it failed; a rule on a whole distribution may name none.
        numbers: what was measured and allowed, by name.
    """

    name: RuleName
    status: Status
    sentence: str
    steps: tuple[int, ...] = ()
    numbers: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Gate:
    """What `nantrace.gate` gives. `str()` is the text.

    Attributes:
        rules: all that were asked, in a fixed order.
        strict: a rule that was not checked counts as a failure.
        trace, reference: paths, None for traces in memory and where there is no reference.
        steps: first and last step of the window.
        attempted, committed, skipped: updates in the window.
        warm_up: attempted updates before it that were left out.
        notes: what else is to be known of the trace.
    """

    rules: tuple[Rule, ...]
    strict: bool
    trace: str | None
    reference: str | None
    steps: tuple[int, int]
    attempted: int
    committed: int
    skipped: int
    warm_up: int
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if rule.status == "failed")

    @property
    def not_checked(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if rule.status == "not_checked")

    @property
    def passed(self) -> bool:
        """Whether no rule failed and, if the gate is strict, each was checked."""
        return not self.failed and not (self.strict and self.not_checked)

    def rule(self, name: str) -> Rule:
        """The rule of a name.

        Raises:
            KeyError: it was not asked.
        """
        return {rule.name: rule for rule in self.rules}[name]  # type: ignore[index]

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON types only; a nonfinite float becomes {"finite": false, "value": "nan" | "inf" | "-inf"}."""
        found = plain(self)
        assert isinstance(found, dict)
        return {"passed": self.passed, **found}

    def __str__(self) -> str:
        """What `nantrace gate` prints: whether the trace passed, and each rule with what was found."""
        # Named, not imported: a value loads rendering only when it is shown.
        shown: str = importlib.import_module("nantrace.render.gate").text(self)
        return shown

    def __repr__(self) -> str:
        return str(self)


def gate(
    trace: Trace,
    *,
    reference: Trace | None = None,
    updates: int = 100,
    warm_up: int = 0,
    loss_tolerance: float = 10.0,
    norm_tolerance: float = 25.0,
    time_tolerance: float = 10.0,
    quantile: float = 0.95,
    coverage: float = 100.0,
    fewest: int = 8,
    allow: Iterable[str] = (),
    explained_by: Iterable[str] = (),
    without: Iterable[str] = (),
    strict: bool = False,
) -> Gate:
    """Say whether a run keeps to the rule that lets it go on.

    After `warm_up` updates the trace must hold at least `updates` committed ones, with finite inputs, losses,
    gradients, parameters, buffers and optimizer state, and no skipped update without a reason on record
    (`tracer.note`). Beside a reference, its losses, gradient norms and seconds a step must be like those of it.

    Args:
        trace: the run. Of a skipped step neither the batch nor the loss nor the gradients count, only the skip.
        reference: a trace of a run that is known to be good. Losses and norms are compared over the updates that both
            hold, counted from the beginning of each run by the optimizers whose own state counts them, else from the
            beginning of each trace.
        updates: committed updates that are asked, each optimizer's own counted.
        warm_up: attempted updates at the beginning of the trace (and of the reference) that are left out.
        loss_tolerance, norm_tolerance: percent by which the median, and the upper quantile, may lie from that of the
            reference, to either side; of the spread between the two where that is the larger number.
        time_tolerance: percent by which the median step may take longer.
        quantile: the upper quantile.
        coverage: percent of the steps that must have been looked at for a rule on finite values to pass.
        fewest: values on each side that make a distribution.
        allow: names of tensors and losses that may be nonfinite, or globs on them: "batch.mask", "losses.perplexity".
        explained_by: kinds of notes that explain a skip; none given: every kind but "checkpoint". A note explains the
            step in whose row it stands, or that it names: `tracer.note("quarantine", step=17)`.
        without: names of rules that are not asked.
        strict: let the gate fail by a rule that could not be checked.

    Raises:
        NantraceError: the window is empty.
        TypeError: something else than traces was given, or a text where several are asked.
        ValueError: a threshold is out of range, there is no such rule, or a trace was narrowed.

    Example:
        >>> found = nantrace.gate(nantrace.load("run.h5"), reference=nantrace.load("good.h5"), warm_up=20)
        >>> found.passed, [rule.sentence for rule in found.failed]
    """
    thresholds = Thresholds(
        updates=updates,
        warm_up=warm_up,
        loss_tolerance=loss_tolerance,
        norm_tolerance=norm_tolerance,
        time_tolerance=time_tolerance,
        quantile=quantile,
        coverage=coverage,
        fewest=fewest,
        allow=_names("allow", allow),
        explained_by=_names("explained_by", explained_by),
        without=_names("without", without),
    )
    _refuse_wrong(trace, reference, thresholds)
    window = window_of(trace, thresholds)
    rules = [_updates(window, thresholds), *_finite_rules(trace, window, thresholds), _skips(window)]
    rules += _beside_reference(trace, window, reference, thresholds)
    return Gate(
        rules=tuple(rule for rule in rules if rule.name not in thresholds.without),
        strict=strict,
        trace=trace.path,
        reference=None if reference is None else reference.path,
        steps=(window.steps[0], window.steps[-1]),
        attempted=window.count("attempted"),
        committed=window.count("committed"),
        skipped=window.count("skipped"),
        warm_up=warm_up,
        notes=tuple(_notes(trace)),
    )


def _updates(window: Window, thresholds: Thresholds) -> Rule:
    asked = thresholds.updates
    if not window.has_ledger:
        return Rule("updates", "not_checked", "The trace has no ledger: nothing counts its updates.")
    committed, last = window.count("committed"), window.steps[-1]
    numbers: dict[str, float | None] = {"committed": committed, "asked": asked}
    if committed >= asked:
        return Rule("updates", "passed", f"{committed:,} committed; {asked:,} are asked.", (), numbers)
    sentence = f"{committed:,} committed by step {last}, where the trace ends; {asked:,} are asked."
    return Rule("updates", "failed", sentence, (last,), numbers)


def _finite_rules(trace: Trace, window: Window, thresholds: Thresholds) -> Iterator[Rule]:
    values = Values(trace, window, thresholds)
    yield _finite("inputs", values.inputs(), thresholds)
    yield _without_update(_finite("losses", values.losses(), thresholds), window)
    yield _finite("gradients", values.gradients(), thresholds)
    yield _finite("parameters", values.parameters(), thresholds)
    if values.may_have_buffers:
        yield _finite("buffers", values.buffers(), thresholds)
    yield _finite("optimizer_state", values.optimizer_state(), thresholds)


def _finite(name: RuleName, found: Found, thresholds: Thresholds) -> Rule:
    steps = tuple(dict.fromkeys(each.step for each in found.bad))
    numbers: dict[str, float | None] = {"looked_at": found.looked, "asked": found.asked, "failing": len(steps)}
    if found.bad:
        return Rule(name, "failed", _nonfinite(found.bad, steps), steps, numbers)
    if not found.looked:
        return Rule(name, "not_checked", f"{found.unseen[:1].upper()}{found.unseen[1:]}.", (), numbers)
    if 100 * found.looked >= thresholds.coverage * found.asked:
        whole = found.looked == found.asked
        of = f"all {found.asked:,} steps" if whole else f"{found.looked:,} of {found.asked:,} steps, which suffices"
        return Rule(name, "passed", f"Finite in {of}.", (), numbers)
    sentence = (
        f"Finite in the {found.looked:,} of {found.asked:,} steps that were looked at; of the others nothing is known "
        f"(a coverage of {thresholds.coverage:g}% is asked)."
    )
    return Rule(name, "not_checked", sentence, (), numbers)


def _without_update(rule: Rule, window: Window) -> Rule:
    """The rule on losses, with what would explain a step that its user left out because of its loss."""
    rows = [row for row in window.rows if number(row) in rule.steps]
    idle = tuple(number(row) for row in rows if row.get("attempted") == 0 and not row.get("backwards"))
    if rule.status != "failed" or not idle:
        return rule
    how = f"No update was attempted in {numbered(idle)}: if that was decided, tracer.note(kind, reason) explains it."
    return dataclasses.replace(rule, sentence=f"{rule.sentence} {how}")


def _nonfinite(bad: tuple[Bad, ...], steps: tuple[int, ...]) -> str:
    first = bad[0]
    here = sum(each.step == first.step for each in bad) - 1
    others = f" and {here:,} more" if here else ""
    again = f"; nonfinite in {len(steps):,} steps, the last of them {steps[-1]}" if len(steps) > 1 else ""
    return f"Step {first.step}: {first.name} was {first.kind}{others}{again}."


def _skips(window: Window) -> Rule:
    rows = [row for row in window.rows if lost(row)]
    unexplained = [row for row in rows if number(row) not in window.explained]
    steps = tuple(number(row) for row in unexplained)
    total, explained = sum(map(lost, rows)), sum(map(lost, rows)) - sum(map(lost, unexplained))
    numbers: dict[str, float | None] = {"not_committed": total, "explained": explained}
    if unexplained:
        first = unexplained[0]
        names = [str(name) for name in first.get("skipped_by") or ()]
        by = f", by {names[0]}{' and others' if len(names) > 1 else ''}" if names else ""
        how = "was skipped" if first.get("skipped") else "was begun and not committed"
        sentence = (
            f"{total - explained:,} not committed, without a reason on record, at {numbered(steps)}: that of "
            f"step {steps[0]} {how}{by}."
        )
        return Rule("skips", "failed", sentence, steps, numbers)
    if not total and not any(row.get("scale_before") is not None for row in window.rows):
        sentence = "No gradient scaler was seen, so none could skip an update."
        return Rule("skips", "not_checked", sentence, (), numbers)
    sentence = f"{total:,} skipped, each with a reason on record." if total else "None was skipped."
    return Rule("skips", "passed", sentence, (), numbers)


def _beside_reference(trace: Trace, window: Window, reference: Trace | None, thresholds: Thresholds) -> Iterator[Rule]:
    if reference is None:
        for name in _BESIDE:
            yield Rule(name, "not_checked", "No reference was given.")
        return
    its = window_of(reference, thresholds)
    compared = comparison.losses(window, its, thresholds)
    yield _distribution("loss_distribution", compared, thresholds.loss_tolerance)
    compared = comparison.norms(window, its, thresholds)
    yield _distribution("norm_distribution", compared, thresholds.norm_tolerance)
    yield _step_time((trace, window), (reference, its), thresholds)


def _distribution(name: RuleName, compared: Compared, tolerance: float) -> Rule:
    if compared.unseen:
        return Rule(name, "not_checked", f"{compared.unseen[:1].upper()}{compared.unseen[1:]}.")
    numbers: dict[str, float | None] = {"allowed_percent": tolerance}
    for key, each in zip(("median", "upper"), compared.deviations, strict=True):
        numbers.update({key: each.value, f"reference_{key}": each.reference, f"{key}_percent": each.percent})
    told = ", ".join(
        f"{each.name} {each.value:.4g} where the reference has {each.reference:.4g} ({each.percent:+.3g}%)"
        for each in compared.deviations
    )
    sentence = f"Over committed updates {compared.over}: {told}; {tolerance:g}% either way is allowed."
    apart = [each for each in compared.deviations if abs(each.percent) > tolerance]
    if not apart:
        return Rule(name, "passed", sentence, (), numbers)
    top = compared.largest
    if compared.beyond and top is not None:
        sentence += f" Beyond that at {numbered(compared.beyond)}; the largest is {top.value:.4g} at step {top.step}."
    return Rule(name, "failed", sentence, compared.beyond, numbers)


def _step_time(a: tuple[Trace, Window], reference: tuple[Trace, Window], thresholds: Thresholds) -> Rule:
    unseen, mine, its = comparison.seconds(a, reference, thresholds)
    if unseen:
        return Rule("step_time", "not_checked", f"{unseen[:1].upper()}{unseen[1:]}.")
    value, limit = float(np.median(mine)), float(np.median(its))
    percent = 100 * (value / limit - 1) if limit else math.inf
    devices = [str(trace.meta.get("device", "")) for trace, _ in (a, reference)]
    other = f" on {devices[1]}, not {devices[0]}" if devices[0] != devices[1] else ""
    sentence = (
        f"The median step took {value:.4g} s, that of the reference {limit:.4g} s{other} ({percent:+.3g}%); "
        f"{thresholds.time_tolerance:g}% more is allowed."
    )
    slow = percent > thresholds.time_tolerance
    numbers: dict[str, float | None] = {
        "median": value,
        "reference_median": limit,
        "percent": percent,
        "allowed_percent": thresholds.time_tolerance,
    }
    return Rule("step_time", "failed" if slow else "passed", sentence, (), numbers)


def _notes(trace: Trace) -> Iterator[str]:
    if trace.raised is not None:
        at = "" if trace.raised.step is None else f" in step {trace.raised.step}"
        yield f"The traced block was ended by {trace.raised.error}{at}."
    if not trace.complete:
        yield "The trace is incomplete: its writer did not close it, so later steps may be missing."


def _names(what: str, given: Iterable[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise TypeError(f"gate got {what}={given!r}: pass several texts, such as {what}=[{given!r}].")
    return tuple(given)


def _refuse_wrong(trace: Trace, reference: Trace | None, thresholds: Thresholds) -> None:
    for given in (trace, *(() if reference is None else (reference,))):
        if not isinstance(given, Trace):
            kind = type(given).__name__
            raise TypeError(f"gate got a {kind}: pass a Trace (nantrace.load(path), tracer.trace).")
        if given.narrowed is not None:
            raise ValueError(f"gate got a trace narrowed by {', '.join(given.narrowed.by)}: pass the whole trace.")
    for name, low, high in (
        ("updates", 1, math.inf),
        ("warm_up", 0, math.inf),
        ("loss_tolerance", 0, math.inf),
        ("norm_tolerance", 0, math.inf),
        ("time_tolerance", 0, math.inf),
        ("quantile", 0.5, 1),
        ("coverage", 0, 100),
        ("fewest", 1, math.inf),
    ):
        value = getattr(thresholds, name)
        if not low <= value <= high:
            upper = "" if high == math.inf else f" and at most {high:g}"
            raise ValueError(f"gate got {name}={value!r}: it has to be at least {low:g}{upper}.")
    unknown = [name for name in thresholds.without if name not in get_args(RuleName)]
    if unknown:
        raise ValueError(f"gate got without={unknown[0]!r}: the rules are {', '.join(get_args(RuleName))}.")
