"""Where training keeps values: loss, gradients, parameters, moments, buffers, what the step returned or raised.

Looks at them when the step's life says that they count, and notes what would excuse a nonfinite one: a gradient scaler
that skipped, or the step's own guard (it read a test of the value on the host and did not go on to an update). Whether
the excuse holds is for the diagnosis to say.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from nantrace.capture.lifecycle import StepListener, parameters_of
from nantrace.flow.externals import Externals
from nantrace.flow.links import fqn
from nantrace.flow.rounds import Rounds
from nantrace.flow.values import Scanner, planes, readable, tensors_in, unwrapped
from nantrace.lineage import Hyperparameter, Lineage, Sink

#: How many ops back a host read may lie for an exception to be taken as its consequence.
_JUST_BEFORE = 50


class Seen(Protocol):
    """What is nonfinite in a tensor: ids of who wrote the NaN elements, and of who wrote the infinite ones."""

    @property
    def nan_ids(self) -> frozenset[int]: ...
    @property
    def inf_ids(self) -> frozenset[int]: ...


class Looker(Protocol):
    """The recorder, as the sinks need it."""

    time: int

    def round_begins(self) -> None: ...
    def look(self, tensor: Tensor) -> Seen | None: ...
    def is_known_finite(self, tensor: Tensor) -> bool: ...
    def are_known_finite(self, tensors: Iterable[Tensor]) -> bool: ...
    def mark_finite(self, tensor: Tensor) -> None: ...
    def lineage(self) -> Lineage: ...
    def fail(self, error: Exception) -> None: ...
    def pausing(self) -> contextlib.AbstractContextManager[None]: ...
    def depth(self) -> int: ...


class Sinks(StepListener):
    """Listens to the step's life and fills `Lineage.sinks`, `growth` and `huge_params`."""

    def __init__(
        self, recorder: Looker, model: torch.nn.Module, rounds: Rounds, externals: Externals, freeze: bool
    ) -> None:
        self._recorder, self._model = recorder, model
        self._rounds, self._externals, self._freeze = rounds, externals, freeze
        self._lineage = recorder.lineage()
        self._scanner = Scanner()
        self._pending: list[Sink] = []  # sinks of this round, until it is known whether its update is skipped
        self._trains = False  # a backward pass or an update has begun
        self._put_out: list[Sink] = []  # outputs of the outermost calls before that
        self._known: set[int] = set()  # optimizers seen
        self._before: dict[int, float] = {}  # parameter norm when an optimizer began
        self._frozen: dict[int, list[Tensor]] = {}

    # ------------------------------------------------------------------------------------------------ the step's life
    def backward_begins(self, roots: tuple[Tensor, ...], accumulates: bool, nested: bool) -> None:
        self._trains = True
        if nested:
            return
        self._recorder.round_begins()
        with self._recorder.pausing():
            for root in roots:
                name = "loss" if accumulates else "differentiated value"
                sink = self._look("loss", name, unwrapped(root), pending=accumulates)
                if sink is not None and not accumulates:
                    sink.excuse = "soft"

    def backward_ends(self, accumulates: bool, nested: bool, failed: bool) -> None:
        if accumulates and not nested and not failed:
            self._rounds.backward_ended(self._recorder.time)
            self._lineage.backwards = self._rounds.backwards

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self._trains = True
        with self._recorder.pausing():
            self._see(optimizer)
            self._before[id(optimizer)] = self._norm(optimizer)
            if self._freeze:
                self._frozen[id(optimizer)] = [p.detach().clone() for p in parameters_of(optimizer)]
            if not _skips(optimizer):
                self._look_at_settings(optimizer)
                self._look_at_gradients(optimizer, pending=False)
        self._rounds.in_optimizer += 1
        self._rounds.optimizer_depth = self._recorder.depth()

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        rounds = self._rounds
        rounds.in_optimizer = max(0, rounds.in_optimizer - 1)
        with self._recorder.pausing():
            after = self._norm(optimizer)
            before = self._before.pop(id(optimizer), after)
            self._lineage.growth.append((rounds.iteration, before, after, self._recorder.time))
            for parameter, kept in zip(parameters_of(optimizer), self._frozen.pop(id(optimizer), ()), strict=False):
                parameter.detach().copy_(kept)
            if _skips(optimizer):
                return
            self._look_at_update(optimizer)
        rounds.updated(self._recorder.time)
        self._pending.clear()

    def scaler_stepped(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, found_inf: tuple[Tensor, ...]
    ) -> None:
        with self._recorder.pausing():
            self._see(optimizer)
            if not any(float(found) > 0 for found in found_inf):
                return
            self._look_at_gradients(optimizer, pending=True)
        for sink in self._pending:
            sink.excuse = "skip"
        self._pending.clear()
        self._rounds.skip()

    def recorder_failed(self, error: Exception) -> None:
        self._recorder.fail(error)

    # ------------------------------------------------------------------------------------------------ begin and end
    def look_at_parameters(self) -> None:
        """Before the step: which parameters are so large that their square, or a sum of squares, leaves the range?"""
        for name, parameter in self._model.named_parameters():
            if torch.nn.parameter.is_lazy(parameter):
                continue
            for plane in planes(parameter):
                low, high = self._scanner.extent(readable(plane))
                if not (math.isfinite(low) and math.isfinite(high)):
                    continue
                self._recorder.mark_finite(plane)
                largest = max(abs(low), abs(high))
                if largest > _huge(plane.dtype):
                    self._lineage.huge_params.append((fqn(name, self._model), largest))

    def model_ended(self, output: Any) -> None:
        """An outermost call of the model returned: in a step that trains nothing this is what counts."""
        if self._trains:
            return
        for path, tensor in tensors_in(output, "output"):
            sink = self._seen_in("returned", path, unwrapped(tensor))
            if sink is not None:
                sink.returned = tensor.numel() > 1
                self._put_out.append(sink)

    def close_pending(self) -> None:
        """A backward pass whose gradients no update used: was it given up by a guard?"""
        if self._rounds.last_backward > self._rounds.last_update:
            for sink in self._pending:
                self._note_guards(sink, self._rounds.last_backward)
            self._pending = [sink for sink in self._pending if not sink.guards]

    def exception(self, error: BaseException, raised: tuple[int, frozenset[int]] | None) -> None:
        """The step raised: over the bad inputs of an op, or over a test of values that it had just read."""
        if raised is None or not raised[1]:
            recent = [
                (time, frozenset(ids))
                for time, ids, _ in self._lineage.guard_reads
                if time >= self._recorder.time - _JUST_BEFORE
            ]
            raised = recent[-1] if recent else None
        if raised is not None:
            starts = tuple((id, "nan" if self._lineage.event(id).nan else "inf") for id in sorted(raised[1]))
            sink = Sink("exception", type(error).__name__, starts, self._rounds.iteration, raised[0])
            self._lineage.sinks.append(sink)

    def finish(self, returned: Any) -> None:
        """The step is over: what is left in the model, and in what the step returned?"""
        rounds = self._rounds
        self.close_pending()
        rounds.state = "end"
        for name, buffer in self._model.named_buffers():
            self._look("buffer", fqn(name, self._model), buffer)
        for name, parameter in self._model.named_parameters():
            if torch.nn.parameter.is_lazy(parameter):
                continue
            self._look("param", fqn(name, self._model), parameter)
            if parameter.grad is not None:
                self._left_behind(fqn(name, self._model), parameter.grad)
        for path, tensor in tensors_in(returned, "returned"):
            self._returned(path, unwrapped(tensor))
        if returned is None and not self._trains and rounds.last_update < 0:
            for sink in self._put_out:
                self._note_guards(sink, -1)
            self._lineage.sinks += self._put_out
        self._lineage.round_times[:] = rounds.round_times
        self._lineage.step_times[:] = rounds.step_times
        self._lineage.skipped_iterations[:] = rounds.skipped

    def _left_behind(self, name: str, gradient: Tensor) -> None:
        """A gradient that still lies in `.grad`."""
        sink = self._look("grad", name, gradient)
        if sink is None:
            return
        sink.left = True
        if self._rounds.last_was_skipped:
            sink.excuse = "skip"
        elif self._rounds.last_backward >= max(0, self._rounds.last_update):
            self._note_guards(sink, self._rounds.last_backward)

    def _returned(self, path: str, tensor: Tensor) -> None:
        """A returned value is what the step is judged by only if it trained nothing."""
        rounds = self._rounds
        sink = self._look("returned", path, tensor)
        if sink is None:
            return
        sink.returned = rounds.backwards > 0 or tensor.numel() > 1
        last = max(rounds.last_backward, rounds.last_update)
        if rounds.backwards:
            sink.excuse = "returned"
        elif rounds.last_update <= last:
            self._note_guards(sink, last)

    # ------------------------------------------------------------------------------------------------ looking
    def _look(self, kind: str, name: str, tensor: Tensor, pending: bool = False) -> Sink | None:
        sink = self._seen_in(kind, name, tensor)
        if sink is not None:
            self._lineage.sinks.append(sink)
        if sink is not None and pending:
            self._pending.append(sink)
        return sink

    def _seen_in(self, kind: str, name: str, tensor: Tensor) -> Sink | None:
        """What the tensor holds that is nonfinite, as a sink that nobody has noted yet."""
        if self._rounds.state != "end" and self._recorder.is_known_finite(tensor):
            return None
        seen = self._recorder.look(tensor)
        if seen is None:
            return None
        starts = tuple((id, "nan") for id in sorted(seen.nan_ids)) + tuple((id, "inf") for id in sorted(seen.inf_ids))
        return Sink(kind, name, starts, self._rounds.iteration, self._recorder.time)

    def _look_at_settings(self, optimizer: torch.optim.Optimizer) -> None:
        """Nonfinite learning rates and the like: as plain numbers no op shows by what name they came."""
        for group, settings in enumerate(optimizer.param_groups):
            for name, value in _numbers(settings):
                writers: frozenset[int] = frozenset()
                if isinstance(value, Tensor):
                    known = value.numel() != 1 or self._recorder.is_known_finite(value)
                    seen = None if known else self._recorder.look(value)
                    if seen is None:
                        continue
                    writers = seen.nan_ids | seen.inf_ids
                number = float(value)
                if not math.isfinite(number):
                    place = (self._rounds.iteration, self._recorder.time, tuple(sorted(writers)))
                    found = Hyperparameter(type(optimizer).__name__, name, group, number, *place)
                    self._lineage.hyperparameters.append(found)
            for name in _unit_betas(settings):
                beta = Hyperparameter(
                    type(optimizer).__name__, name, group, 1.0, self._rounds.iteration, self._recorder.time
                )
                self._lineage.unit_betas.append(beta)

    def _look_at_gradients(self, optimizer: torch.optim.Optimizer, pending: bool) -> None:
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        if self._recorder.are_known_finite(gradients):
            return
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                self._look("grad", self._externals.parameter_name(parameter), parameter.grad, pending)

    def _look_at_update(self, optimizer: torch.optim.Optimizer) -> None:
        if self._recorder.are_known_finite(_kept_by(optimizer)):  # as always, nearly: no name is needed
            return
        for parameter in parameters_of(optimizer):
            name = self._externals.parameter_name(parameter)
            self._look("param", name, parameter)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    self._look("state", f"optimizer.state.{name}.{key}", value)

    def _note_guards(self, sink: Sink, after: int) -> None:
        sink.guards = tuple((ids, raw) for time, ids, raw in self._lineage.guard_reads if time > after)

    def _see(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) not in self._known:
            self._known.add(id(optimizer))
            self._externals.add_moments(optimizer)

    def _norm(self, optimizer: torch.optim.Optimizer) -> float:
        """Largest 2-norm among the optimizer's parameters; in float64 where its own dtype cannot hold it."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters_of(optimizer):
            for plane in planes(parameter):
                plane = readable(plane)
                by_dtype.setdefault(plane.dtype, []).append(plane)
        return max((_largest_norm(group) for group in by_dtype.values()), default=0.0)


@functools.cache
def _huge(dtype: torch.dtype) -> float:
    """A magnitude whose square comes near the end of the dtype's range."""
    return math.sqrt(torch.finfo(dtype).max) * 1e-3


def _largest_norm(group: list[Tensor]) -> float:
    largest = torch.stack(torch._foreach_norm(group)).max().item()
    if math.isfinite(largest):
        return largest
    norms = [torch.linalg.vector_norm(plane, dtype=torch.float64) for plane in group]
    return torch.stack(norms).max().item()


def _numbers(settings: dict[str, Any]) -> Iterator[tuple[str, float | Tensor]]:
    """The floating-point settings of a parameter group, with an index inside a tuple: "betas[0]"."""
    for name, value in settings.items():
        if name == "params":
            continue
        several = isinstance(value, (tuple, list))
        for index, item in enumerate(value if several else (value,)):
            if isinstance(item, float) or (isinstance(item, Tensor) and item.is_floating_point()):
                yield f"{name}[{index}]" if several else name, item


def _unit_betas(settings: dict[str, Any]) -> Iterator[str]:
    """The betas of a parameter group that are exactly 1, as plain numbers: a tensor may lie on a device."""
    betas = settings.get("betas")
    for index, beta in enumerate(betas if isinstance(betas, (tuple, list)) else ()):
        if isinstance(beta, (int, float)) and beta == 1:
            yield f"betas[{index}]"


def _kept_by(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """What an optimizer keeps from step to step: its parameters, and the tensors of its state."""
    yield from parameters_of(optimizer)
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, Tensor):
                yield value


def _skips(optimizer: torch.optim.Optimizer) -> bool:
    """A fused optimizer is told by its scaler that its kernel will leave everything as it is."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and float(found) > 0
