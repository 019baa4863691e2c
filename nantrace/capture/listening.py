"""Whom a tracer listens to, and when: modules, backward, optimizers, scalers; in all steps or in a sample of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from nantrace.capture.conduct.heard import Conduct
from nantrace.capture.hooks import Hooks
from nantrace.capture.lifecycle import Lifecycle
from nantrace.capture.sites import Watched
from nantrace.capture.steps import StepRecorder


class Listening:
    """Puts hooks and wrappers in place, takes those away that a step outside the sample does without.

    Args:
        steps: follows the steps, always.
        conduct: hears how steps are conducted: all of them, since what stands in one may go back to the one before.
        watched: the modules to hook.
        everywhere: also hear modules outside the model.
    """

    def __init__(self, steps: StepRecorder, conduct: Conduct, watched: Sequence[Watched], everywhere: bool) -> None:
        self._steps = steps
        self._conduct = conduct
        self._hooks = Hooks(steps.calls, watched, everywhere=everywhere)
        steps.calls.told = conduct.module_begins

    def begin(self, exits: contextlib.ExitStack) -> None:
        """Listen until `exits` are closed."""
        exits.callback(self._steps.gradients.remove)
        exits.callback(self._hooks.remove)
        self._hooks.listen()
        exits.enter_context(Lifecycle(self._steps))
        exits.enter_context(Lifecycle(self._conduct))  # told last: by then the step is open
        self._steps.active = self._steps.calls.active = self._steps.gradients.active = True

    def stop(self) -> None:
        """Let whatever is still in place do nothing."""
        self._steps.active = self._steps.calls.active = self._steps.gradients.active = False
        self._steps.calls.told = None

    def listen(self, in_detail: bool) -> None:
        """Hear the next steps in detail, or only what the ledger needs."""
        if in_detail:
            self._hooks.listen()
        else:
            self._hooks.leave(self._steps.calls.entrances)

    def facts(self) -> dict[str, Any]:
        """How the finished step was conducted."""
        return self._conduct.facts()
