"""The steps of a trace: when one begins and ends, and what is read of it outside the modules.

Hears of backward, optimizers and scalers through `Lifecycle`, of forward through `CallRecorder`. Decides nothing about
what the numbers mean.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nantrace.capture.buffer import Buffer
from nantrace.capture.calls import CallRecorder
from nantrace.capture.conduct.scaling import scale_of, tensors_given
from nantrace.capture.current_batch import CurrentBatch
from nantrace.capture.gradients import GradientRecorder
from nantrace.capture.ledger.books import Books
from nantrace.capture.ledger.open_step import OpenStep, detached
from nantrace.capture.lifecycle import StepListener
from nantrace.capture.quiet import Quiet
from nantrace.capture.sample import Sample
from nantrace.capture.state import StateRecorder
from nantrace.capture.step_rows import StepRows
from nantrace.events import EVENT, Phase, Role

Ended = Callable[[npt.NDArray[np.void], dict[str, Any]], None]


class StepRecorder(StepListener):
    """Follows the steps.

    A step ends after the last update in it: the next forward, backward or repeated optimizer opens the next one. With a
    gradient scaler the update of the scale is the last.

    Args:
        buffer, state: where and how state is recorded.
        optimizers: known from the start; others are found when they step.
        batch: what the steps read, recorded when they begin; `take_batch` hands over another.
        scaled: a gradient scaler will be used.
        observes: whether tensors are observed; without, only the ledger is kept.
        sample: which steps are recorded in detail; of the others only the ledger is kept.
        listens: told whether modules are to be listened to from here on.
        begins: called when a step has been opened, before anything is read.
        reads: called with what a step reads, and whether it is handed over now; else with its first call.
        closed: called when the last update so far has happened, outside of backward; the step is still open.
        ended: called with the rows of a finished step and its row of the ledger.
        waiting: what is to be raised out of the user's optimizer or scaler, or None.
        spilled: takes rows of a step that grows without end, ahead of the rest; None keeps them all.
        failed: told when recording raised.
    """

    def __init__(
        self,
        buffer: Buffer,
        state: StateRecorder,
        *,
        optimizers: Sequence[torch.optim.Optimizer],
        batch: Any,
        scaled: bool,
        observes: bool,
        sample: Sample,
        listens: Callable[[bool], None],
        begins: Callable[[], None],
        reads: Callable[[Any, bool], None],
        closed: Callable[[], None],
        ended: Ended,
        waiting: Callable[[], Exception | None],
        spilled: Callable[[npt.NDArray[np.void]], None] | None,
        failed: Callable[[Exception], None],
    ) -> None:
        self.active = False
        self.step: OpenStep | None = None
        self._buffer = buffer
        self._state = state
        self._given = list(optimizers)
        # Since the last step ended: an optimizer of the model cleared its gradients; a backward began beside old ones.
        self._cleared = self._uncleared = False
        self._called = False  # from outside, since gradients were last cleared
        self._found: list[weakref.ref[torch.optim.Optimizer]] = []
        self._batch = CurrentBatch(batch, reads)
        self._scaled = scaled
        self._observes = observes
        self._sample = sample
        self._listens = listens
        self._scalers: set[int] = set()  # that stepped one of our optimizers
        self._begins = begins
        self._closed = closed
        self._ended = ended
        self._waiting = waiting
        self._rows = StepRows(buffer, spilled, state.is_on_host)
        self._failed = failed
        self._next = 0
        self._thread = threading.get_ident()
        self.gradients = GradientRecorder(buffer, failed)
        self.books = Books()
        self.calls = CallRecorder(buffer, self.gradients, self._call_from_outside, self._model_returned, failed)

    def open(self) -> OpenStep:
        """Begin a step and read what it starts from."""
        step = self.step = OpenStep(self._next, self._sample.takes(self._next))
        self._rows.begin(step)
        self._next += 1
        self._listens(step.detailed)
        self.calls.recording = step.detailed
        self.calls.model_called = False
        self.calls.forget_open_calls()
        self._begins()
        with Quiet():
            self.books.opened(step)
            if step.detailed:
                self._state.read_names()
                if self._observes:
                    self._observe_beginning()
            else:
                self.gradients.remove()
        return step

    def _observe_beginning(self) -> None:
        for entry in self._state.parameters.values():
            self.gradients.watch_parameter(entry.tensor, entry.owner, entry.name)
        if self._batch.value is not None:
            self._state.observe_batch(self._batch.value)
        self._state.observe_parameters(Phase.FORWARD)
        self._state.observe_buffers(Phase.FORWARD)
        for optimizer in self.known_optimizers():
            self._state.observe_optimizer(optimizer, Phase.FORWARD)

    def reached(self) -> OpenStep:
        """Something of a step happens that no module call surrounds; returns the step it belongs to."""
        if self.step is not None and self.step.closing:
            self.end()
        step = self.step or self.open()
        self._touch(step)
        return step

    def _touch(self, step: OpenStep) -> None:
        if not step.touched:
            step.touched = True
            with Quiet():
                self._batch.is_read(step)

    def take_batch(self, batch: Any) -> None:
        """What is about to be read: by the step that begins here, or by one that is in its midst as a further batch."""
        if self.step is not None and self.step.closing:
            self.end()
        self._batch.value = batch
        step = self.step
        if step is None or not step.touched:
            step = self.open() if step is None else self._opened_anew(step)
        elif self._reads_in(step) and batch is not None:
            with Quiet():
                self._state.observe_batch(batch)
        with Quiet():
            self._batch.hand_over(step)

    def _opened_anew(self, before: OpenStep) -> OpenStep:
        """Begin a step once more of which nothing has run: what it begins with is other than was read."""
        with Quiet():
            self._buffer.drain(before.number)
        self._next = before.number
        step = self.open()
        step.decisions[:0] = before.decisions
        return step

    def _call_from_outside(self) -> None:
        if threading.get_ident() == self._thread:  # no other thread begins or ends a step
            self._rows.spill_if_long(self.reached())
            self._called = True

    def so_far(self) -> tuple[npt.NDArray[np.void], dict[str, Any]]:
        """The rows of the open step and its row of the ledger, as if it ended here. Waits for the device."""
        assert self.step is not None
        with Quiet():
            rows = self._rows.of(self.step)
            return rows, {**self.step.row(len(rows), 0, ()), **self.books.row(self.step, ended=False)}

    def end(self) -> None:
        """Finish the open step: read what is left, fetch what devices hold, hand the rows over."""
        step, self.step = self.step, None
        if step is None:
            return
        with Quiet():
            if step.backwards and not step.gradients_seen:
                found = self._state.gradients()
                self.books.gradients(step, 0, [(name, gradient) for _, name, gradient in found])
                if self._reads_in(step):
                    self._state.observe_gradients(found, Phase.POST_BACKWARD)
            if self._reads_in(step) and not step.updated:
                self._state.observe_buffers(Phase.UPDATE)
            rows = self._rows.of(step)
            missed = self.gradients.never_came() if step.backwards else []
            cleared, uncleared = self._cleared and not step.backwards, self._uncleared
            left_out = step.left_out + (1 if step.left_out and self._called else 0)  # nothing cleared after the last
            self._cleared = self._uncleared = self._called = False
            self._batch.check(step, rows, self._buffer.sites)
            ledger = {
                **step.row(len(rows), len(missed), self._notes(missed)),
                **({"cleared": True} if cleared else {}),
                **({"left_out": left_out} if left_out and not step.backwards else {}),
                **({"uncleared": True} if uncleared else {}),
                **self.books.row(step, ended=True),
            }
        self._sample.ended(ledger)
        self._ended(rows, ledger)
        self._listen_ahead()

    def _reads_in(self, step: OpenStep) -> bool:
        return self._observes and step.detailed

    def _listen_ahead(self) -> None:
        """Where a call of a module that has not been called from outside before may begin a step in detail."""
        if self._sample.takes(self._next):
            self._listens(True)

    def note(self, kind: str, reason: str | None, facts: Mapping[str, Any]) -> None:
        """Put a decision on record."""
        with Quiet():
            self.books.note(self.step, kind, reason, facts)

    def end_with_notes(self) -> None:
        """What was put on record after the last step gets a row without events."""
        if self.step is None and self.books.has_notes():
            step = OpenStep(self._next)
            self._next += 1
            self.books.opened(step)
            with Quiet():
                row = {**step.row(0, 0, ()), **self.books.row(step, ended=True)}
            self._ended(np.zeros(0, EVENT), row)

    def backward_begins(self, roots: tuple[torch.Tensor, ...], accumulates: bool, nested: bool) -> None:
        if nested or not self.active:
            return
        step = self.reached()
        step.backwards += 1
        if accumulates and step.backwards == 1 and not self._cleared:
            self._uncleared = any(parameter.grad is not None for _, parameter in self._state.trained())
        name = "loss" if accumulates else "differentiated value"
        with Quiet():
            if accumulates:
                self.books.backward(step, roots)
            for index, root in enumerate(roots if self._reads_in(step) else ()):
                slot = name if len(roots) == 1 else f"{name}[{index}]"
                hook = self.gradients.hook_on(root) if root.requires_grad else None
                self._buffer.observe(None, Phase.LOSS, Role.LOSS, slot, root, 0, hook.stats if hook else None)

    def backward_ends(self, accumulates: bool, nested: bool, failed: bool) -> None:
        if self.active and not nested and not failed:
            self._tell_if_closed()  # optimizers may have stepped inside

    def gradients_cleared(self, optimizer: torch.optim.Optimizer) -> None:
        if self._concerned(optimizer):
            self._cleared = True
            if self.step is not None and not self.step.closing and self._called:
                self.step.left_out += 1  # a forward of which nothing was differentiated, if no backward follows
            self._called = False

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._concerned(optimizer):
            return
        if self.step is not None and id(optimizer) in self.step.optimizers:
            self.end()  # it has had its update: what comes now is the next step's
        step = self.step or self.open()
        self._touch(step)
        step.began[id(optimizer)] += 1
        first_sight = all(known is not optimizer for known in self.known_optimizers())
        with Quiet():
            self.books.updates.see(optimizer)
            if step.detailed:
                self.books.before_update(step, self._state.trained, optimizer)
            self._read_gradients(step, optimizer, Phase.OPTIMIZER)
            if first_sight:
                self._found.append(weakref.ref(optimizer))
                if self._reads_in(step):
                    self._state.observe_optimizer(optimizer, Phase.OPTIMIZER)
        step.optimizers.add(id(optimizer))

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        step = self.step
        if step is None or not self._concerned(optimizer):
            return
        step.ended[id(optimizer)] += 1
        with Quiet():
            self.books.after_update(step)
            if self._reads_in(step):
                self._state.observe_parameters(Phase.UPDATE, optimizer)
                if not step.updated:
                    self._state.observe_buffers(Phase.UPDATE)
                self._state.observe_optimizer(optimizer, Phase.UPDATE)
            found = getattr(optimizer, "found_inf", None)  # a fused kernel skips by it, whoever set it
            if isinstance(found, torch.Tensor) and found.numel() == 1:
                step.found_inf[id(optimizer)] = (detached(found),)
        step.updated = True
        if not self._scaled:
            step.close()
            self._tell_if_closed()

    def scaler_seen(self, scaler: torch.amp.GradScaler) -> None:
        self._scaled = self._scaled or scaler.is_enabled()

    def loss_scaled(self, scaler: torch.amp.GradScaler, given: Any, scaled: Any) -> None:
        if self.active:
            step = None if self.step is None or self.step.closing else self.step
            with Quiet():
                self.books.loss_scaled(step, scale_of(scaler), given, scaled)

    def gradients_unscaled(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        if self.step is not None and self._concerned(optimizer):
            self.step.unscaled.add(id(optimizer))

    def gradients_clipped(self, parameters: Any, max_norm: float, total_norm: torch.Tensor) -> None:
        if self.step is None or not self.active:
            return
        if any(id(parameter) in self._state.parameters for parameter in tensors_given(parameters)):
            with Quiet():
                self.books.clipped(self.step, max_norm, total_norm)

    def scheduler_stepped(self, scheduler: Any) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        if self.step is not None and optimizer is not None and self._concerned(optimizer):
            self.books.scheduled(self.step, scheduler)

    def scaler_stepped(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, found_inf: tuple[torch.Tensor, ...]
    ) -> None:
        step = self.step
        if step is None or not self._concerned(optimizer):
            return
        self._scalers.add(id(scaler))
        with Quiet():  # a copy: `scaler.update` adds what the other optimizers' gradients held to the first one's
            step.found_inf[id(optimizer)] = tuple(found.clone() for found in found_inf)
        if id(optimizer) not in step.optimizers:
            step.began[id(optimizer)] += 1
            step.optimizers.add(id(optimizer))
            with Quiet():
                self.books.updates.see(optimizer)
                self._read_gradients(step, optimizer, Phase.POST_BACKWARD)

    def scaler_updates(self, scaler: torch.amp.GradScaler) -> None:
        if self.step is not None and self._is_ours(scaler):
            self.step.scale_before = scale_of(scaler)

    def scaler_updated(self, scaler: torch.amp.GradScaler) -> None:
        if self.step is not None and self._is_ours(scaler):
            self.step.scale_after = scale_of(scaler)
            self.step.close()
            self._tell_if_closed()

    def _is_ours(self, scaler: torch.amp.GradScaler) -> bool:
        """Another model's scaler may be updated in the midst of our step."""
        return not self._scalers or id(scaler) in self._scalers

    def _model_returned(self, output: Any) -> None:
        if self.active and torch.is_grad_enabled() and isinstance(output, Mapping):
            with Quiet():
                self.books.losses = {
                    str(name): detached(value)
                    for name, value in output.items()
                    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()
                }

    def _tell_if_closed(self) -> None:
        if self.step is not None and self.step.closing and torch._C._current_graph_task_id() < 0:
            self._closed()
            self._listen_ahead()

    def recorder_failed(self, error: Exception) -> None:
        self._failed(error)

    def to_raise(self) -> Exception | None:
        return self._waiting()

    def _read_gradients(self, step: OpenStep, optimizer: torch.optim.Optimizer, phase: Phase) -> None:
        found = self._state.gradients(optimizer)
        self.books.gradients(step, id(optimizer), [(name, gradient) for _, name, gradient in found])
        begin = len(self._buffer.rows)
        if self._reads_in(step):
            self._state.observe_gradients(found, phase)
            step.gradient_rows[id(optimizer)] = (begin, len(self._buffer.rows))
        step.gradients_seen = True
        step.learning_rates += [group.get("lr") for group in optimizer.param_groups]

    def known_optimizers(self) -> list[torch.optim.Optimizer]:
        found = (reference() for reference in self._found)
        return [*self._given, *(optimizer for optimizer in found if optimizer is not None)]

    def _concerned(self, optimizer: torch.optim.Optimizer) -> bool:
        if not self.active:
            return False
        if any(given is optimizer for given in self._given) or self._state.concerns(optimizer):
            return True
        if self.step is None or self.step.detailed:
            return False
        self._state.read_names()  # parameters may have been replaced since the last step in detail
        return self._state.concerns(optimizer)

    def _notes(self, missed: list[tuple[str, Role, str, int]]) -> list[str]:
        counted = Counter((fqn, role.label, slot) for fqn, role, slot, _ in missed)
        notes = [
            f"no gradient came: {fqn or '(model)'} {slot} ({role}, {n})" for (fqn, role, slot), n in counted.items()
        ]
        closed = sorted(self.calls.unopened | self._state.unopened)
        if closed:
            notes.append(f"not looked into: {', '.join(closed)}")
        notes += [f"the fused kernel failed on {device}: {why}" for device, why in self._buffer.failures.items()]
        if self.calls.unread:
            notes.append(f"{self.calls.unread} tensors inside functorch transforms or torch.jit.trace were not read")
            self.calls.unread = 0
        return notes
