"""Who a tracer talks to: what says whether a step is at fault, what is told of steps, what records ops."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from nantrace.events import Site, Trace
from nantrace.lineage import Lineage

if TYPE_CHECKING:
    from nantrace.capture.tracer import Tracer


class Judgement(NamedTuple):
    """What somebody with an opinion says of a step: a sentence or None, whether it is at fault, or contained harm."""

    sentence: str | None
    fault: bool
    contained: bool = False


class StepObserver(Protocol):
    """Is told of steps: to keep their state before they run, to store what became of them.

    Attributes:
        path: the file that it writes, or None.
    """

    path: str | None

    def block_begins(self) -> None:
        """Before anything is placed or written. What it raises is raised to the user, and the block not entered."""

    def step_begins(self, tracer: Tracer) -> None:
        """Nothing of the step has run yet, nor been read. Comes again if the step begins anew before anything ran."""

    def step_reads(self, batch: Any, handed_over: bool) -> None:
        """What the step reads: handed over at this moment, or, if it was not, as the step makes its first call.

        In the midst of a step it is a further batch: gradients are accumulated.
        """

    def step_closes(self) -> None:
        """The last update so far has happened. Comes again if another follows."""

    def step_ended(self, trace: Trace, verdict: Judgement | None) -> None:
        """`trace` holds this step alone; `verdict` is None when nothing in it was nonfinite."""


class OpRecorder(Protocol):
    """Records ops from the time the first step has begun until before the last ends."""

    def begin(self, observe: Callable[[Site, tuple[Any, ...]], None]) -> None:
        """Start, and hand a row to `observe` for each nonfinite output of an op."""

    def end(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def take_batch(self, batch: Any) -> None:
        """Name the tensors of what is read from here on."""

    def lineage(self) -> Lineage:
        """The flow of nonfinite values; asked once, after the end."""
