"""A module trace as columns: which rows are nonfinite, what they are called, which call of a module they belong to.

Knows the order of rows and the nesting of calls; gives no blame. Row numbers index `trace.events`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from nantrace.diagnosis.standstill import standstill
from nantrace.events import Columns, Phase, Role, Site, TensorStats, Trace, distinct
from nantrace.lineage import Operand
from nantrace.steps import Step, by_number, told

#: Largest finite magnitude of the floating dtypes that training uses.
LARGEST = {
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float32": 3.4028234663852886e38,
    "float64": 1.7976931348623157e308,
    "complex64": 3.4028234663852886e38,
    "complex128": 1.7976931348623157e308,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}

#: A plain integer: it is compared for every row, and a member of an enum takes long to look up before Python 3.12.
_RECOMPUTE = int(Phase.RECOMPUTE)
_FORWARD_ROLES = (Role.INPUT, Role.OUTPUT)
_NEVER_MASKS = (Role.LOSS, Role.GRAD, Role.GRAD_OUTPUT, Role.GRAD_INPUT)


@dataclass(frozen=True)
class Handed:
    """The nonfinite outputs of the calls of one scope, in order of time, and what became of each.

    Attributes:
        outputs: rows.
        last: the last row of the call that put it out.
        read, finite: first row of the next call that has inputs, and whether these were all finite.
        passed_nan, passed_infinite: it holds NaN, and so did an input of its call; the same for infinities.
    """

    outputs: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    read: npt.NDArray[np.int64]
    finite: npt.NDArray[np.bool_]
    passed_nan: npt.NDArray[np.bool_]
    passed_infinite: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Call:
    """One call of a module. Rows are in order of execution; `key` is negative for a recomputation.

    Attributes:
        key, parent: of this call and of the innermost call around it, which is None for a call from outside.
        module: FQN, or "<ClassName>" outside the model.
        first, last: the rows between which everything inside the call was seen.
        inputs, outputs, grad_outputs, grad_inputs: its rows by role.
    """

    key: int
    module: str
    first: int
    last: int
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    grad_outputs: tuple[int, ...] = ()
    grad_inputs: tuple[int, ...] = ()
    parent: int | None = None
    children: tuple[int, ...] = ()

    @property
    def foreign(self) -> bool:
        return self.module.startswith("<")


@dataclass(frozen=True)
class Seen:
    """Columns over `trace.events`, and the calls of each step when asked for."""

    trace: Trace
    role: npt.NDArray[np.int64]
    phase: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    call: npt.NDArray[np.int64]
    nan: npt.NDArray[np.bool_]
    positive: npt.NDArray[np.bool_]
    negative: npt.NDArray[np.bool_]
    parents: dict[int, tuple[int, ...]] = field(default_factory=dict)  # filled by `parents.parents`
    handed: dict[tuple[int, int | None], Handed] = field(default_factory=dict)  # filled by `parents`, by scope
    misread: list[frozenset[int]] = field(default_factory=list)  # filled by `parents.misread_marks`: one entry
    _calls: dict[int, dict[int, Call]] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: Trace) -> Seen:
        events = trace.events
        roles = np.array([int(site.role) for site in trace.sites] or [0], dtype=np.int64)
        phases = np.array([int(site.phase) for site in trace.sites] or [0], dtype=np.int64)
        site = events["site"].astype(np.int64)
        return cls(
            trace=trace,
            role=roles[site],
            phase=phases[site],
            step=events["step"].astype(np.int64),
            call=events["call"].astype(np.int64),
            nan=events["nan"] > 0,
            positive=events["posinf"] > 0,
            negative=events["neginf"] > 0,
        )

    @cached_property
    def infinite(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.positive | self.negative)

    @cached_property
    def bad(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.nan | self.infinite)

    @cached_property
    def mark(self) -> npt.NDArray[np.bool_]:
        """Rows whose only nonfinite value is -inf, as masks have it.

        No loss, gradient or updated state is a mask, nor is a single number that a module put out: a loss, a score.
        """
        written = (self.phase == Phase.UPDATE) & np.isin(self.role, [int(Role.PARAM), int(Role.STATE)])
        single = (self.role == Role.OUTPUT) & (self.trace.events["numel"] == 1)
        never = np.isin(self.role, [int(role) for role in _NEVER_MASKS]) | written | single
        return np.asarray(self.negative & ~self.nan & ~self.positive & ~never)

    @cached_property
    def standstill(self) -> tuple[int, ...]:
        """The last steps, if a gradient scaler skipped each of them over a loss that no scale makes finite."""
        return standstill(self.trace.steps)

    @cached_property
    def ledger(self) -> dict[int, Step]:
        """What the ledger says of each step that has rows, by its number."""
        return by_number(self.trace.steps, distinct(self.step).tolist())

    @cached_property
    def has_backward(self) -> bool:
        """Whether a loss or a gradient was seen in any step."""
        return bool(np.isin(self.role, [int(Role.LOSS), int(Role.GRAD), int(Role.GRAD_OUTPUT)]).any())

    @cached_property
    def checked(self) -> bool:
        """Whether a training step without backward was left out by a check in the loop, and nothing broke it off.

        Without an optimizer it may be inference, whose output is what it is for; an exception is no check.
        """
        if self.trace.raised is not None:
            return False
        if self.trace.meta.get("optimizers"):
            return True
        return any(step.get("attempted_total") or step.get("cleared") for step in told(self.trace.steps))

    @cached_property
    def classes(self) -> dict[str, str]:
        return {entry.fqn: entry.cls for entry in self.trace.modules}

    @cached_property
    def rows_of_name(self) -> dict[tuple[int, str], npt.NDArray[np.int64]]:
        """(role, tensor name) -> its rows, for parameters, gradients, buffers and optimizer state."""
        names: dict[tuple[int, str], list[int]] = {}
        for number, site in enumerate(self.trace.sites):
            if site.role in (Role.PARAM, Role.GRAD, Role.BUFFER, Role.STATE):
                names.setdefault((int(site.role), tensor_name(site)), []).append(number)
        order = np.argsort(self.trace.events["site"], kind="stable")
        # Where the rows of each site begin in that order, and behind the last.
        begins = np.searchsorted(self.trace.events["site"][order], np.arange(len(self.trace.sites) + 1))
        found = {}
        for key, sites in names.items():
            pieces = [order[begins[s] : begins[s + 1]] for s in sites]
            found[key] = np.sort(np.concatenate(pieces)) if len(pieces) > 1 else pieces[0]
        return found

    @cached_property
    def bad_state(self) -> list[tuple[int, str, npt.NDArray[np.int64]]]:
        """(first nonfinite row, name, rows) of each parameter and buffer that ever was nonfinite."""
        found = []
        for (role, name), rows in self.rows_of_name.items():
            if role in (Role.PARAM, Role.BUFFER) and self.bad[rows].any():
                found.append((int(rows[self.bad[rows]][0]), name, rows))
        return sorted(found, key=lambda entry: entry[0])

    def site(self, row: int) -> Site:
        return self.trace.sites[int(self.trace.events["site"][row])]

    def name(self, row: int) -> str:
        return tensor_name(self.site(row))

    def rows(self, step: int, *roles: Role, phases: Iterable[Phase] | None = None) -> npt.NDArray[np.int64]:
        """Rows of one step with one of these roles, in order."""
        first, last = self.bounds(step)
        chosen = np.isin(self.role[first:last], [int(role) for role in roles])
        if phases is not None:
            chosen &= np.isin(self.phase[first:last], [int(phase) for phase in phases])
        return first + np.flatnonzero(chosen)

    def bounds(self, step: int) -> tuple[int, int]:
        """First row of a step and first row after it; steps follow each other."""
        return int(np.searchsorted(self.step, step)), int(np.searchsorted(self.step, step, "right"))

    def before(self, row: int, role: Role, name: str) -> int | None:
        """The latest earlier row of the tensor of that role and name."""
        rows = self.rows_of_name.get((int(role), name))
        if rows is None:
            return None
        place = int(np.searchsorted(rows, row))
        return int(rows[place - 1]) if place else None

    def calls(self, step: int) -> dict[int, Call]:
        if step not in self._calls:
            self._calls[step] = _call_tree(self, step)
        return self._calls[step]

    def outermost(self, step: int) -> list[Call]:
        """The calls of a step that no other surrounds."""
        return [call for call in self.calls(step).values() if call.parent is None]

    def own_parameters(self, call: Call, step: int) -> list[int]:
        """The rows of the parameters of a call's module, as the step began."""
        rows = self.rows(step, Role.PARAM, phases=[Phase.FORWARD])
        return [int(row) for row in rows if self.site(int(row)).module == call.module]

    def call_of(self, row: int) -> Call | None:
        return self.calls(int(self.step[row])).get(self.key(row))

    def key(self, row: int) -> int:
        """Recomputed rows may carry the number of the call that they repeat."""
        number = int(self.call[row])
        return -number if int(self.phase[row]) == _RECOMPUTE else number

    def stats(self, row: int) -> TensorStats:
        event, site = self.trace.events[row], self.site(row)
        columns = int(event["columns"])
        return TensorStats(
            dtype=site.dtype,
            shape=site.shape,
            numel=int(event["numel"]),
            finite=int(event["finite"]),
            nan=int(event["nan"]),
            posinf=int(event["posinf"]),
            neginf=int(event["neginf"]),
            min=number(event["min"]),
            max=number(event["max"]),
            first_bad=int(event["first_bad"]) if columns & Columns.FIRST_BAD else None,
            absmin=number(event["absmin"]) if columns & Columns.ABSMIN else None,
            zero=int(event["zero"]) if columns & Columns.ZERO else None,
            subnormal=int(event["subnormal"]) if columns & Columns.SUBNORMAL else None,
            saturated=int(event["saturated"]) if columns & Columns.SATURATED else None,
        )

    def operand(self, row: int) -> Operand:
        stats, site = self.stats(row), self.site(row)
        named = site.role in (Role.PARAM, Role.BUFFER, Role.STATE, Role.GRAD)
        return Operand(
            name=f"gradient of {site.slot}" if site.role in (Role.GRAD_OUTPUT, Role.GRAD_INPUT) else site.slot,
            dtype=stats.dtype,
            shape=stats.shape,
            nan=stats.nan,
            posinf=stats.posinf,
            neginf=stats.neginf,
            min=stats.min,
            max=stats.max,
            absmin=stats.absmin,
            zero=stats.zero,
            tensor=tensor_name(site) if named else None,
        )

    def absmax(self, row: int) -> float:
        """Largest finite magnitude; 0 when there is none."""
        event = self.trace.events[row]
        low, high = float(event["min"]), float(event["max"])
        return 0.0 if math.isnan(low) or math.isnan(high) else max(abs(low), abs(high))


def number(value: float) -> float | None:
    """A measured number, or None where the file says absent."""
    return None if math.isnan(value) else float(value)


def tensor_name(site: Site) -> str:
    """The tensor's name: of a gradient, that of its parameter."""
    if site.role is Role.GRAD and site.module and not site.slot.startswith(f"{site.module}."):
        return f"{site.module}.{site.slot}"
    return site.tensor


def _call_tree(seen: Seen, step: int) -> dict[int, Call]:
    """Nest the calls of one step by the time between their first input and their last output.

    A call without a tensor among its inputs has no first row of its own: it takes in the finished calls of its
    submodules that lie directly before it.
    """
    rows: dict[int, dict[int, list[int]]] = {}
    begin, end = seen.bounds(step)
    for row in begin + np.flatnonzero(seen.call[begin:end] > 0):
        roles = rows.setdefault(seen.key(int(row)), {})
        roles.setdefault(int(seen.role[row]), []).append(int(row))
    plain = []
    for key, roles in rows.items():
        forward = [row for role in _FORWARD_ROLES for row in roles.get(int(role), [])]
        every = forward or [row for some in roles.values() for row in some]
        module = seen.site(every[0]).module
        plain.append(
            Call(
                key,
                "" if module is None else module,
                min(every),
                max(every),
                inputs=tuple(roles.get(int(Role.INPUT), ())),
                outputs=tuple(roles.get(int(Role.OUTPUT), ())),
                grad_outputs=tuple(roles.get(int(Role.GRAD_OUTPUT), ())),
                grad_inputs=tuple(roles.get(int(Role.GRAD_INPUT), ())),
            )
        )
    return _nest(sorted(plain, key=lambda call: call.last))


def _nest(calls: list[Call]) -> dict[int, Call]:
    """`calls` in the order in which they ended."""
    parent: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    first = {call.key: call.first for call in calls}
    finished: list[Call] = []
    for call in calls:
        inside = []
        while finished and (first[finished[-1].key] >= call.first or _adopts(call, finished[-1])):
            inside.append(finished.pop())
        for child in inside:
            parent[child.key] = call.key
            first[call.key] = min(first[call.key], first[child.key])
        children[call.key] = [child.key for child in reversed(inside)]
        finished.append(call)
    return {
        call.key: Call(
            call.key,
            call.module,
            first[call.key],
            call.last,
            call.inputs,
            call.outputs,
            call.grad_outputs,
            call.grad_inputs,
            parent.get(call.key),
            tuple(children[call.key]),
        )
        for call in calls
    }


def _adopts(call: Call, child: Call) -> bool:
    if call.inputs or call.foreign or child.foreign:
        return False
    return child.module != call.module and (call.module == "" or child.module.startswith(f"{call.module}."))
