"""Runs a step once under the op recorder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nantrace.capture.surroundings import eager_instead_of_compiled
from nantrace.flow.recorder import OpRecorder
from nantrace.lineage import Lineage


@dataclass(frozen=True)
class Recording:
    """One recorded run: its lineage, what the step returned, and what it raised, if it did.

    Attributes:
        failure: what went wrong in the recorder itself, which then stopped; None normally.
    """

    lineage: Lineage
    returned: Any = None
    error: Exception | None = None
    failure: Exception | None = None


def record(
    run: Callable[[], Any],
    model: torch.nn.Module,
    batch: Any = None,
    *,
    optimizer: Any = None,
    freeze: bool = False,
    neutral: frozenset[int] = frozenset(),
    within: Callable[[str | None, str], bool] | None = None,
) -> Recording:
    """Call `run()` once and record how nonfinite values flow through it.

    The step changes what it changes: restoring is the caller's business. Compiled code runs eagerly. An `Exception` of
    the step is caught and handed back; anything else (KeyboardInterrupt) passes through.

    Args:
        run: the step, a function without arguments.
        model, batch, optimizer, freeze, neutral, within: as for `OpRecorder`.
    """
    recorder = OpRecorder(model, batch, optimizer=optimizer, freeze=freeze, neutral=neutral, within=within)
    error: Exception | None = None
    with eager_instead_of_compiled():
        try:
            with recorder:
                recorder.returned = run()
        except Exception as raised:
            error = raised
    return Recording(recorder.lineage(), recorder.returned, error, recorder.failure)
