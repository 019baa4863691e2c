"""The op pass: watches every op of a step and records how nonfinite values flow through it.

One `OpEvent` for each nonfinite output of an op, with the events that wrote the nonfinite elements it read. Inputs are
looked at before the op runs (in-place ops destroy the evidence), and only if their memory is not known to be finite.
What the values mean is the diagnosis's business.

It does not see: ops on other threads, ops inside compiled regions (`record` runs them eagerly), numpy, and kernels that
write without saying so, except batch norm's statistics and the inputs of custom ops, which are looked at again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nantrace.capture.lifecycle import Lifecycle
from nantrace.flow.births import is_datalike, keep, kind_of, operands, output_fields, scalars
from nantrace.flow.calls import Argument, Call
from nantrace.flow.context import Context, Whereabouts
from nantrace.flow.externals import External, Externals
from nantrace.flow.host import HostReads
from nantrace.flow.memory import Look, Memory, Unseen, neutralise
from nantrace.flow.ops import OpFacts
from nantrace.flow.rounds import Rounds
from nantrace.flow.sinks import Sinks
from nantrace.flow.values import FLOATS, PLAIN_FLOATS, QUANTIZED, Masks, masks, planes, readable, storage_key
from nantrace.lineage import Lineage, OpEvent

_PLAIN = (Tensor, torch.nn.Parameter)
_sequence_number = torch._C._autograd._get_sequence_nr
_running_backward = torch._C._current_graph_task_id


class OpRecorder(TorchDispatchMode):
    """Records the flow of nonfinite values through everything that runs inside it on this thread.

    Args:
        model: the model whose modules, parameters and buffers are named.
        batch: the step's data, in any nesting; named "batch.x[0]".
        optimizer: handed over, its state is named from the start; others are found when they first act.
        freeze: undo each optimizer update right after it ("what if the weights had stayed?").
        neutral: numbers of ops whose nonfinite outputs are made finite (NaN to 0, infinities to +-1e4).
        within: called with (module, phase); where it answers False, an op whose inputs are finite is not looked at.
            What is lost there: births are found only when somebody else reads or keeps the value, as external events
            of category "unobserved" that name the op, without operands or line.
        on_event: told about each nonfinite output of an op, in order of execution.

    Attributes:
        time: ops dispatched so far.
        returned: set it to what the step returned, if that is to count as a sink.
        failure: what went wrong in the recorder itself, which then stopped.

    Example:
        >>> with OpRecorder(model, batch, optimizer=optimizer) as recorder:
        ...     loss = model(batch).mean(); loss.backward(); optimizer.step()
        >>> recorder.lineage().sinks
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batch: Any = None,
        *,
        optimizer: Any = None,
        freeze: bool = False,
        neutral: frozenset[int] = frozenset(),
        within: Callable[[str | None, str], bool] | None = None,
        on_event: Callable[[OpEvent], None] | None = None,
    ) -> None:
        super().__init__()
        self.time = 0
        self.failure: Exception | None = None
        self.returned: Any = None
        self._result = Lineage()
        self._neutral, self._within, self._on_event = neutral, within, on_event
        self._paused = True
        self._facts: dict[Any, OpFacts] = {}
        self._memory, self._host = Memory(self._external), HostReads()
        self._raised: tuple[int, frozenset[int]] | None = None
        self._rounds = Rounds()
        self._externals = Externals(model, batch)
        self._places = Whereabouts(model, self._rounds, self._externals)
        self._sinks = Sinks(self, model, self._rounds, self._externals, freeze)
        self._lifecycle = Lifecycle(self._sinks)
        self._handles: list[Any] = []
        for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
            if each is not None:
                self._externals.add_moments(each)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled while recording; the guard against it would cost each op some microseconds."""
        return False

    # ------------------------------------------------------------------------------------------------ life
    def __enter__(self) -> OpRecorder:
        with torch.no_grad():
            self._sinks.look_at_parameters()
        self._lifecycle.__enter__()
        self._handles = self._places.watch_modules(self)
        self._places.begin()
        super().__enter__()
        self._paused = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._paused = True
        try:
            super().__exit__(kind, error, traceback)
        finally:
            for handle in self._handles:
                handle.remove()
            self._lifecycle.__exit__(kind, error, traceback)
        self._guarded(self._finish, error)

    def _finish(self, error: BaseException | None) -> None:
        with torch.no_grad():
            if error is not None:
                self._sinks.exception(error, self._raised)
            self._sinks.finish(self.returned)
        self._result.ops = self.time
        unread = sorted(self._memory.unread.items())
        self._result.notes += [f"{count} tensors were not read: {reason}" for reason, count in unread]
        self._places.forget()

    def lineage(self) -> Lineage:
        """Everything seen; complete once the recorder was left."""
        return self._result

    def fail(self, error: Exception) -> None:
        """The recorder itself failed: recording stops, the step goes on, and the lineage says so."""
        self._paused = True
        if self.failure is None:
            self.failure = error
            self._result.notes.append(f"recording stopped at op {self.time}: {type(error).__name__}: {error}")

    def _guarded(self, do: Callable[..., Any], *args: Any) -> None:
        try:
            do(*args)
        except Exception as error:
            self.fail(error)

    # ------------------------------------------------------------------------------------------------ for the sinks
    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """For the recorder's own work outside its handler."""
        paused, self._paused = self._paused, True
        try:
            with torch.no_grad(), torch._C._DisableTorchDispatch():
                yield
        finally:
            self._paused = paused or self.failure is not None

    def depth(self) -> int:
        """How many module calls are open."""
        return len(self._places.stack)

    def look(self, tensor: Tensor) -> Look | None:
        return self._memory.look(tensor)

    def is_known_finite(self, tensor: Tensor) -> bool:
        return self._memory.is_known_finite(tensor)

    def mark_finite(self, tensor: Tensor) -> None:
        self._memory.mark_finite(tensor)

    # ------------------------------------------------------------------------------------------------ handler
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        try:
            call = self._before(func, args, kwargs)
        except Exception as error:
            self.fail(error)
            return func(*args, **kwargs)
        if call is None:  # a view: hands memory on, reads and writes nothing
            return func(*args, **kwargs)
        try:
            out = func(*args, **kwargs)
        except Exception:
            self._raised = (self.time, call.read_ids())
            raise
        try:
            self._after(call, out)
        except Exception as error:
            self.fail(error)
        return out

    def _before(self, func: Any, args: Any, kwargs: Any) -> Call | None:
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = OpFacts(func)
        self.time += 1
        task = _running_backward()
        number: int = _sequence_number() - 1
        if number > self._places.links.last:
            self._places.link(facts.op, number, task, args, self.time)
        if facts.view:
            return None
        call = Call(facts, task, args, kwargs)
        for position, value in enumerate(args):
            if type(value) in _PLAIN:
                self._take(call, position, -1, value)
            elif value is not None:
                self._take_other(call, position, value)
        for name, value in kwargs.items():
            if value is not None:
                self._take_other(call, facts.position.get(name, -1), value)
        if facts.mutates:
            self._before_writing(call, number)
        return call

    def _take_other(self, call: Call, position: int, value: Any) -> None:
        if isinstance(value, Tensor):
            self._take(call, position, -1, value)
        elif isinstance(value, (float, complex)):
            if value - value != 0:
                call.nan_literal |= value != value
                call.inf_literal |= value == value
        elif isinstance(value, (list, tuple)):
            found = 0
            for index, item in enumerate(value):
                if isinstance(item, Tensor):
                    found += 1
                    self._take(call, position, index, item)
                elif isinstance(item, float):
                    self._take_other(call, position, item)
            if found and call.facts.listwise:
                call.list_length = max(call.list_length, found)

    def _take(self, call: Call, position: int, index: int, tensor: Tensor) -> None:
        """Note a tensor argument, and look at it if it is read and not known to be finite."""
        argument = Argument(position, index, tensor)
        call.arguments.append(argument)
        facts = call.facts
        if facts.mutates and position >= 0 and facts.writes[position]:
            call.written.append(argument)
        if tensor.dtype not in FLOATS or not (position < 0 or facts.reads[position]):
            return
        memory = self._memory
        key = storage_key(tensor)
        if key in memory.finite and key not in memory.tainted:
            call.skipped.append(argument)
            return
        look = memory.look(tensor)
        if look is not None:
            call.bad.append((argument, look))
        elif key is not None:
            memory.mark_finite(tensor)

    def _before_writing(self, call: Call, number: int) -> None:
        """Keep what an in-place op is about to overwrite, should its result turn out bad."""
        written = call.written
        into_view = any(a.tensor._is_view() for a in written if a.index < 0)
        self._places.links.wrote(call.facts.op, into_view and call.needs_grad(), number, self.time)
        rounds = self._rounds
        by_hand = rounds.state == "after_backward" and call.task < 0 and not rounds.in_optimizer
        by_hand = by_hand and not self._places.stack
        if by_hand and any(self._externals.is_state(storage_key(a.tensor)) for a in written):
            rounds.updated_by_hand(self.time)
        for argument in written:
            if call.reads(argument):
                for plane in planes(argument.tensor):
                    call.kept[id(argument.tensor)] = keep(plane, self._memory.scanner)

    # ------------------------------------------------------------------------------------------------ outputs
    def _after(self, call: Call, out: Any) -> None:
        if self._within is not None and not call.bad and not call.facts.host_read and self._leave(call, out):
            return
        memory = self._memory
        outputs = call.new_tensors(out)
        if self.time in self._neutral:
            for _, tensor in outputs:
                neutralise(tensor)
        bad: list[tuple[int, Tensor]] = []
        finite = False
        for index, tensor in outputs:
            if tensor.dtype in PLAIN_FLOATS and memory.wrote_plainly(tensor):
                finite = True
            elif tensor.dtype in FLOATS or tensor.dtype in QUANTIZED:
                for plane in planes(tensor, memory.unread):
                    if memory.wrote(plane):
                        finite = True
                    else:
                        bad.append((index, plane))
        unannounced = [] if call.facts.announces else self._written_unannounced(call)
        bad += [(argument.index, plane) for argument, plane in unannounced]
        if bad:
            self._check_assumptions(call, {id(argument.tensor) for argument, _ in unannounced})
        if self._host or call.bad:
            self._follow_host(call, outputs)
        if bad or call.bad:
            self._record(call, bad, len(outputs), finite)

    def _leave(self, call: Call, out: Any) -> bool:
        """Outside the region, finite inputs are taken to give finite outputs: note who wrote them, look at nothing."""
        assert self._within is not None
        place = self._places.find(call.task, call.needs_grad, call.arguments, call.facts)
        if self._within(place.module, place.phase):
            return False
        for _, tensor in call.new_tensors(out):
            self._memory.wrote_unseen(tensor, Unseen(call.facts.op, place.phase, place.module))
        return True

    def _written_unannounced(self, call: Call) -> list[tuple[Argument, Tensor]]:
        """Inputs holding nonfinite elements that nobody was seen writing: the kernel did, against its schema."""
        announced = {id(a.tensor) for a in call.written}
        others = [a for a in call.arguments if id(a.tensor) not in announced]
        return [(a, plane) for a in others for plane in self._memory.written_by_nobody(a.tensor)]

    def _check_assumptions(self, call: Call, unannounced: set[int]) -> None:
        """Before anything is called a birth: is what was taken for finite really finite?

        What the op overwrote, by its schema or against it (`unannounced`: ids of tensors), holds its result now and
        says nothing about what it read.
        """
        for argument in call.skipped:
            overwritten = id(argument.tensor) in call.kept or id(argument.tensor) in unannounced
            look = None if overwritten else self._memory.look(argument.tensor)
            if look is not None:
                call.bad.append((argument, look))

    def _follow_host(self, call: Call, outputs: list[tuple[int, Tensor]]) -> None:
        hit = self._host.hit(call)
        if hit and call.facts.host_read:
            self._result.guard_reads.append((self.time, tuple(sorted(hit)), bool(call.bad)))
        if hit:
            self._host.spread(outputs, hit)

    # ------------------------------------------------------------------------------------------------ events
    def _record(self, call: Call, bad: list[tuple[int, Tensor]], outputs: int, finite: bool) -> None:
        place = self._places.find(call.task, call.needs_grad, call.arguments, call.facts)
        self._note_readers(call, place, absorbed=finite and not bad and not call.facts.host_read)
        if call.facts.host_read:
            self._host.remember(call)
            return
        for index, plane in bad:
            self._event(call, place, index, plane, outputs)

    def _note_readers(self, call: Call, place: Context, absorbed: bool) -> None:
        reader = place.node_key or place.phase
        for id in call.read_ids():
            event = self._result.event(id)
            event.read_by_forward |= place.phase in ("forward", "loss", "recompute")
            if reader not in event.readers:
                event.readers += (reader,)
            if absorbed and call.facts.op not in event.absorbed_by:
                event.absorbed_by += (call.facts.op,)

    def _event(self, call: Call, place: Context, index: int, plane: Tensor, outputs: int) -> None:
        mine = [look for a, look in call.bad if not call.list_length or -1 in (a.index, index) or a.index == index]
        literal = self._host.behind_literal(call)
        looks = [*mine, literal] if literal is not None else mine
        nan_parents = frozenset().union(*(look.nan_ids for look in looks))
        inf_parents = frozenset().union(*(look.inf_ids for look in looks))
        found = masks(plane)
        kind = kind_of(call, found, nan_parents, inf_parents)
        born = kind in ("nan", "inf", "inserted")
        event = OpEvent(
            id=len(self._result.events) + 1,
            time=self.time,
            op=call.facts.op,
            kind=kind,
            iteration=self._rounds.iteration,
            **place.fields(),
            **output_fields(plane, found, self._externals.batch_size, described=born),
            nan_parents=tuple(sorted(nan_parents)),
            inf_parents=tuple(sorted(inf_parents)),
            outputs=outputs,
            inplace=call.facts.mutates,
            carries_grad=call.task >= 0 or call.needs_grad(),
        )
        if born:
            event.operands = operands(call, index, self._externals)
            event.scalars = scalars(call)
        self._result.events.append(event)
        self._memory.writers.write(plane, found.bad, event.id, every=found.count == plane.numel())
        if self._on_event is not None:
            self._on_event(event)

    def _external(self, plane: Tensor, found: Masks) -> int:
        """Nonfinite elements that nobody was seen writing become an event; returns its id."""
        external = self._externals.get(plane.untyped_storage()._cdata, _offset_of_first(plane, found))
        unseen = self._memory.who_wrote(plane)
        event = OpEvent(
            id=len(self._result.events) + 1,
            time=self.time,
            op=unseen.op if unseen else None,
            kind="external",
            phase=unseen.phase if unseen else None,
            module=unseen.module if unseen else None,
            node=None,
            where=None,
            iteration=self._rounds.iteration,
            category="unobserved" if unseen else external.category if external else "constant",
            tensor=external.name if external and not unseen else None,
            datalike=is_datalike(plane, found),
            **output_fields(*_whole(plane, found, external), self._externals.batch_size, described=True),
        )
        self._result.events.append(event)
        return event.id

    # ------------------------------------------------------------------------------------------------ modules
    def on_module_begins(self, module: torch.nn.Module, args: Any) -> None:
        """Global forward pre-hook."""
        if not self._paused and self._places.is_ours(threading.get_ident()):
            self._guarded(self._module_begins, module, args)

    def _module_begins(self, module: torch.nn.Module, args: Any) -> None:
        places, rounds = self._places, self._rounds
        task = _running_backward()
        if task < 0 and not rounds.in_optimizer:
            if rounds.state == "after_backward":
                self._sinks.close_pending()
            rounds.forward(self.time, outermost=not places.stack)
        if id(module) not in places.frames.names:
            self._externals.add_criterion(module)
        elif not places.stack:
            self._name_arguments(args)
        places.stack.append((module, task))

    def _name_arguments(self, args: Any) -> None:
        """What the step hands to the model is input, wherever the step had it from."""
        for index, value in enumerate(args):
            if isinstance(value, Tensor) and value.dtype in FLOATS and storage_key(value) not in self._memory.finite:
                self._externals.add("batch", f"args[{index}]", value, keep_first=True)

    def on_module_ends(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Global forward hook, called for a module that raised too (with output None)."""
        if not self._paused and self._places.is_ours(threading.get_ident()):
            self._guarded(self._module_ends, module, output)

    def _module_ends(self, module: torch.nn.Module, output: Any) -> None:
        task = self._places.leave(module)
        name = self._places.frames.names.get(id(module))
        if task is None or task >= 0 or name is None or self._within is not None:
            return
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor) and first.dtype in FLOATS and self.is_known_finite(first):
            with torch._C._DisableTorchDispatch():
                for plane in planes(first):
                    low, high = self._memory.scanner.extent(readable(plane))
                    self._result.magnitudes.append((self.time, name, max(abs(low), abs(high))))


def _whole(plane: Tensor, found: Masks, external: External | None) -> tuple[Tensor, Masks]:
    """The named tensor, whose index is asked for, in place of a view of it that holds all its bad elements."""
    if external is None:
        return plane, found
    all_found = masks(external.tensor)
    return (external.tensor, all_found) if all_found.count == found.count else (plane, found)


def _offset_of_first(plane: Tensor, found: Masks) -> int:
    """Where in its storage, counted in elements, the first nonfinite element of a view lies."""
    index: list[int] = found.bad.nonzero()[0].tolist()
    return int(plane.storage_offset()) + sum(i * stride for i, stride in zip(index, plane.stride(), strict=True))
