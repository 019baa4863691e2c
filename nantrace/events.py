"""What was seen: phases, roles, sites, the row of an event, and the `Trace` value that holds them.

Knows no torch, no HDF5 and no opinion. A `Trace` is a plain value: capture builds it, store writes and reads it,
diagnosis judges it, render shows it.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nantrace.lineage import Lineage

if TYPE_CHECKING:
    import pandas


class _Labelled(enum.IntEnum):
    """An integer in the file, a lower-case word everywhere else."""

    @property
    def label(self) -> str:
        return self.name.lower()


class Phase(_Labelled):
    """When in the step a tensor was seen."""

    FORWARD = 0
    LOSS = 1  # outside the model, before backward
    BACKWARD = 2
    RECOMPUTE = 3  # activation checkpointing runs forward again inside backward
    POST_BACKWARD = 4  # between backward and the optimizer: unscale, clip, all-reduce
    OPTIMIZER = 5  # what the optimizer sees before it updates
    UPDATE = 6  # what an update left behind


class Role(_Labelled):
    """What a tensor is at its site."""

    INPUT = 0
    OUTPUT = 1
    GRAD_OUTPUT = 2  # gradient of the loss with respect to a module's output
    GRAD_INPUT = 3  # the same with respect to a module's input
    PARAM = 4
    GRAD = 5  # accumulated gradient of a parameter
    BUFFER = 6
    STATE = 7  # optimizer state
    LOSS = 8
    OP = 9  # output of one aten op


@dataclass(frozen=True)
class Site:
    """A place where a tensor is looked at.

    Attributes:
        module: FQN of the module; "" the model itself; "<ClassName>" a module outside the model; None no module.
        phase: when in the step.
        role: what the tensor is there.
        slot: which tensor of that role, for example "output[0].logits", "args[0]", "weight", "exp_avg" or "batch.wav".
        dtype: torch's name without the prefix: "float16".
        shape: sizes, in elements.
        op, node, where: for role `op`: the aten op, its autograd node, the user's source line; None otherwise.
    """

    module: str | None
    phase: Phase
    role: Role
    slot: str
    dtype: str
    shape: tuple[int, ...]
    op: str | None = None
    node: str | None = None
    where: str | None = None

    @property
    def tensor(self) -> str:
        """The full name of the tensor: "head.bias", "batch.wav", "block.1.ff.wo output[0]"."""
        if self.role in (Role.PARAM, Role.BUFFER):
            return f"{self.module}.{self.slot}" if self.module else self.slot
        if self.role in (Role.GRAD, Role.STATE) or self.module is None:
            return self.slot
        return f"{self.module or '(model)'} {self.slot}"


class Columns(enum.IntFlag):
    """Which optional columns of a row were measured, and where: on the host unless `KERNEL` or `PASSES` says else."""

    ABSMIN = 1
    ZERO = 2
    SUBNORMAL = 4
    SATURATED = 8
    FIRST_BAD = 16
    KERNEL = 32  # by the fused kernel on the tensor's device
    PASSES = 64  # by several passes on the tensor's device

    @classmethod
    def full(cls) -> Columns:
        return cls(31)


#: One row an event: the statistics of one tensor at one site in one step. `min`, `max` and `absmin` are NaN when no
#: finite (for absmin: no finite nonzero) element exists or the column was not measured; `first_bad` is -1 if there is
#: none; `zero`, `subnormal` and `saturated` stop at 2**32 - 1; `columns` is a `Columns` mask.
EVENT = np.dtype(
    [
        ("seq", "<u8"),  # from 1: the order of execution over the whole trace
        ("step", "<u4"),  # from 0
        ("site", "<u4"),  # row of the site table
        ("call", "<u4"),  # which call of a module this belongs to, from 1 within a trace; 0 none
        ("numel", "<u8"),
        ("finite", "<u8"),
        ("nan", "<u8"),
        ("posinf", "<u8"),
        ("neginf", "<u8"),
        ("min", "<f8"),
        ("max", "<f8"),
        ("absmin", "<f8"),
        ("first_bad", "<i8"),
        ("zero", "<u4"),
        ("subnormal", "<u4"),
        ("saturated", "<u4"),
        ("columns", "u1"),
    ]
)


def nonfinite_rows(events: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Which rows hold a NaN or an infinity."""
    return np.asarray((events["nan"] != 0) | (events["posinf"] != 0) | (events["neginf"] != 0))


def distinct(values: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
    """The values that occur, in order.

    `np.unique` would load NumPy's masked arrays to ask whether `values` is one, which takes longer than a small trace.
    """
    ordered = np.sort(values)
    first = np.ones(len(ordered), bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


@dataclass(frozen=True)
class TensorStats:
    """Statistics of one tensor; extended columns are None when they were not measured.

    Attributes:
        numel, finite, nan, posinf, neginf: exact counts of elements (complex: nonfinite if either part is).
        min, max: over the finite elements (complex: over both parts); None if there is none.
        first_bad: flat index (row-major) of the first nonfinite element, -1 if there is none.
        absmin: smallest nonzero finite magnitude; None if there is none.
        zero, subnormal, saturated: counts of elements that are 0, subnormal, or of the dtype's largest magnitude.
        observed: False when the values could not be read (meta or fake tensors, freed storage); `why` says the reason.
    """

    dtype: str
    shape: tuple[int, ...]
    numel: int
    finite: int
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    min: float | None = None
    max: float | None = None
    first_bad: int | None = None
    absmin: float | None = None
    zero: int | None = None
    subnormal: int | None = None
    saturated: int | None = None
    observed: bool = True
    why: str | None = None

    @property
    def nonfinite(self) -> int:
        return self.nan + self.posinf + self.neginf

    @property
    def absmax(self) -> float | None:
        """Largest finite magnitude."""
        if self.min is None or self.max is None:
            return None
        return max(abs(self.min), abs(self.max))


@dataclass(frozen=True)
class ModuleEntry:
    """One module of the traced model: its name, its class, and other names under which the same object is reached."""

    fqn: str
    cls: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Narrowed:
    """What a trace was narrowed by, in order ("module 'block.1.*'", "nonfinite"), and the steps it covered."""

    by: tuple[str, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True)
class Raised:
    """The exception that ended a traced block: its type, one line of its message, and the step it broke off or None."""

    error: str
    message: str = ""
    step: int | None = None

    @property
    def said(self) -> str:
        """The type with its message, as the last line of a traceback has them."""
        return f"{self.error}: {self.message}" if self.message else self.error


@dataclass(frozen=True)
class Trace:
    """One or more traced steps, as a value.

    `events` goes into `pandas.DataFrame` as it is; `to_frame` has names for ids. `module`, `phase`, `step` and
    `nonfinite` give a trace with fewer rows and can be chained: `trace.step(3).phase("backward").nonfinite()`.

    Attributes:
        events: structured array of dtype `EVENT`, in order of execution.
        sites: the site table; `events["site"]` indexes it.
        modules: the model's modules, parents before children.
        steps: one mapping a step (the ledger); absent keys were not recorded. Of a long run a sequence that makes them
            when asked (`nantrace.steps.Steps`).
            Of each step: "step", "first_seq", "events", "seconds", the updates "attempted", "committed" and "skipped";
            unless only its numbers were kept, "unobserved" and "backwards"; of a step without a backward "cleared"
            (True when an optimizer of the model cleared its gradients in it) and "left_out" (how often that happened
            after a forward in it, as a check in the loop does that leaves a backward out); of others "uncleared"
            (True when the first backward found gradients in `.grad` that nothing had cleared in that step).
            Loss and rates: "loss", "losses" (by name), "lr", "schedulers".
            Loss scale: "scale_before", "scale_after", "skipped_by" (parameters whose gradients made the scaler skip).
            Updates so far: "attempted_total", "committed_total", "skipped_total", "totals_from", "optimizers" (each, if
            there are several).
            Gradients without the scale: "gradient_norm", "gradient_norms" (by top-level module), "gradient_read" (where
            and after what), "gradient_norm_without" (parameters left out), "clip", "gradient_norm_before_clipping";
            of a sampled step "weights" (of each parameter the norm of its gradient and the relative size of its
            update).
            Batch and decisions: "batch_id", "batch_check" (what was odd in the batch of a step that failed),
            "decisions" and "checkpoint" (both by `tracer.note`), "notes" (on what could not be recorded).
            "conduct": what was called around autocast and scaler, facts for `nantrace.diagnosis.recipe`.
            What was kept: "nonfinite" (events with a NaN or an infinity), "contained" (True where these did no harm),
            "not_kept" (events that were dropped), "detailed" (False: the ledger alone).
        meta: what holds for the whole trace: versions, device, options, notes on coverage.
        lineage: the flow of nonfinite values, when ops were recorded.
        complete: False when the writer did not close the file.
        raised: the exception that ended the traced block early, None if none did.
        path: where the trace was loaded from, as given by the caller.
        narrowed: None for a whole trace. A narrowed one keeps the sites, modules, `seq` and (but for `step`) the ledger
            of the whole.
    """

    events: npt.NDArray[np.void]
    sites: tuple[Site, ...]
    modules: tuple[ModuleEntry, ...] = ()
    steps: Sequence[Mapping[str, Any]] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    lineage: Lineage | None = None
    complete: bool = True
    path: str | None = None
    raised: Raised | None = None
    narrowed: Narrowed | None = None

    def __len__(self) -> int:
        return len(self.events)

    def _repr_html_(self) -> str:
        """What a notebook shows: what the trace covers, and its modules, open at the first nonfinite event."""
        # Named, not imported: a value never loads rendering, only a cell that shows it does.
        shown: str = importlib.import_module("nantrace.render.html").trace_cell(self)
        return shown

    def site(self, event: np.void) -> Site:
        """The site of one row of `events`."""
        return self.sites[int(event["site"])]

    def module(self, *patterns: str) -> Trace:
        """Only events of modules of which a name matches one of the globs.

        Args:
            patterns: globs on FQNs: "block.1.*" what is inside block.1, "block.1" itself, "" the model itself,
                "<*" modules outside the model.

        Raises:
            ValueError: a pattern matches no module of the trace.
        """
        from nantrace.narrowing import by_module

        return by_module(self, patterns)

    def phase(self, *phases: str | Phase) -> Trace:
        """Only events of these phases: "forward", "loss", "backward", ...

        Raises:
            ValueError: there is no such phase.
        """
        from nantrace.narrowing import by_phase

        return by_phase(self, phases)

    def step(self, number: int) -> Trace:
        """Only events, and the ledger, of one step; without the lineage, which is one for all steps.

        Raises:
            ValueError: the trace does not cover that step.
        """
        from nantrace.narrowing import by_step

        return by_step(self, number)

    def nonfinite(self) -> Trace:
        """Only events with a NaN or an infinity."""
        from nantrace.narrowing import nonfinite

        return nonfinite(self)

    def to_frame(self) -> pandas.DataFrame:
        """The events with the names of their sites, one row an event.

        Returns:
            `seq`, `step`; `module`, `phase`, `role`, `slot`, `dtype`, `shape` ("[8, 3]"), `op`, `node`, `where` as
            categories; the call, the counts, `min`, `max` and the extended statistics. What was not measured or is
            not there is missing (NaN, NA), also a module that is None; module "" is the model itself.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        from nantrace.frame import to_frame

        return to_frame(self)
