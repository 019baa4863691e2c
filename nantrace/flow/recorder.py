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
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nantrace.capture.lifecycle import Lifecycle
from nantrace.flow.births import keep
from nantrace.flow.calls import Argument, Call
from nantrace.flow.chronicle import Chronicle
from nantrace.flow.context import Whereabouts
from nantrace.flow.externals import Externals
from nantrace.flow.memory import Look, Unseen, neutralise
from nantrace.flow.ops import OpFacts, facts_of
from nantrace.flow.rounds import Rounds
from nantrace.flow.sinks import Sinks
from nantrace.flow.values import FLOATS, INTEGERS, QUANTIZED, planes, readable, storage_key
from nantrace.lineage import Lineage, OpEvent

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
        self._neutral, self._within = neutral, within
        self._selective = within is not None or bool(neutral)
        self._paused = True
        self._facts: dict[int, OpFacts] = {}  # by id of the op
        self._raised: tuple[int, frozenset[int]] | None = None
        self._rounds = Rounds()
        self._externals = Externals(model, batch)
        self._places = Whereabouts(model, self._rounds, self._externals)
        self._sinks = Sinks(self, model, self._rounds, self._externals, freeze)
        self._chronicle = Chronicle(self, self._places, self._rounds, self._externals, on_event)
        self._memory, self._host = self._chronicle.memory, self._chronicle.host
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
            self._chronicle.between.finish()
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

    def take_batch(self, batch: Any) -> None:
        """What the step reads from here on, in any nesting."""
        with self.pausing():
            self._externals.take_batch(batch)

    def depth(self) -> int:
        """How many module calls are open."""
        return len(self._places.stack)

    def round_begins(self) -> None:
        """A backward begins; the step that it belongs to is open."""
        self._rounds.begin()
        self._chronicle.between.begin()
        self._chronicle.between.flush()

    def look(self, tensor: Tensor) -> Look | None:
        return self._memory.look(tensor)

    def is_known_finite(self, tensor: Tensor) -> bool:
        return self._memory.is_known_finite(tensor)

    def are_known_finite(self, tensors: Iterable[Tensor]) -> bool:
        return self._memory.are_known_finite(tensors)

    def mark_finite(self, tensor: Tensor) -> None:
        self._memory.mark_finite(tensor)

    # ------------------------------------------------------------------------------------------------ handler
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        try:
            facts = self._facts.get(id(func)) or self._learn(func)  # hashing an op itself runs Python code
            call = self._before(facts, args, kwargs)
        except Exception as error:
            self.fail(error)
            return func(*args, **kwargs)
        if facts.view:  # hands memory on, reads and writes nothing
            return func(*args, **kwargs)
        try:
            out = func(*args, **kwargs)
        except Exception:
            call = call or Call(facts, args, kwargs)
            self._raised = (self.time, self._host.hit(call))
            raise
        try:
            if self._externals.rows.size:
                self._externals.rows.follow(facts, args, out)
            loud = self._selective or (call is not None and call.bad)
            if loud or not self._is_quiet(facts.makes, out):
                self._after(call or Call(facts, args, kwargs), out)
        except Exception as error:
            self.fail(error)
        return out

    def _learn(self, func: Any) -> OpFacts:
        facts = self._facts[id(func)] = facts_of(func)
        return facts

    def _before(self, facts: OpFacts, args: Any, kwargs: Any) -> Call | None:
        """Look at what the op is about to read; None if all of that is finite and the op overwrites nothing."""
        self.time += 1
        number: int = _sequence_number() - 1
        if number > self._places.links.last:
            self._places.link(facts.op, number, _running_backward(), args, self.time)
        if facts.view:
            return None
        memory = self._memory
        filled = memory.unseen and facts.op == "aten.copy_"
        self._chronicle.filling = memory.who_wrote(args[0]) if filled else None
        finite = memory.are_finite(args, facts.reads) and (
            not kwargs or memory.are_finite(kwargs.values(), repeat(True))
        )
        if finite and not facts.touches:
            return None
        call = Call(facts, args, kwargs)
        if not finite:
            call.bad = self._look_at_inputs(call)
        if facts.mutates:
            self._before_writing(call, number)
        if facts.collective:
            self._chronicle.hand_over(call, call.received())
        return call

    def _look_at_inputs(self, call: Call) -> list[tuple[Argument, Look]]:
        """Look at every tensor that is read and not known to be finite."""
        memory, bad = self._memory, []
        for argument in call.arguments:
            tensor = argument.tensor
            if tensor.dtype not in FLOATS or not call.reads(argument) or memory.is_known_finite(tensor):
                continue
            look = memory.look(tensor)
            if look is None:
                memory.mark_finite(tensor)
            else:
                bad.append((argument, look))
        return bad

    def _before_writing(self, call: Call, number: int) -> None:
        """Keep what an in-place op is about to overwrite, should its result turn out bad."""
        facts, places, rounds = call.facts, self._places, self._rounds
        into_view = call.needs_grad() and call.writes_into_view()
        places.links.wrote(facts.op, into_view, number, self.time)
        by_hand = rounds.state == "after_backward" and not rounds.in_optimizer and not places.stack and call.task < 0
        if by_hand and any(self._externals.is_state(storage_key(a.tensor)) for a in call.written):
            rounds.updated_by_hand(self.time)
        if not facts.writes_self:
            call.kept = keep([a.tensor for a in call.written if call.reads(a)], self._memory.scanner)
        elif facts.reads[0]:
            call.kept = keep(call.args[:1], self._memory.scanner)

    # ------------------------------------------------------------------------------------------------ outputs
    def _is_quiet(self, makes: str | None, out: Any) -> bool:
        """Whether all that an op put out is plain and finite, and nobody is to be told of it: so it is of almost every
        op, and the long way would find nothing. In doubt, not."""
        if makes == "tensor":
            return self._memory.wrote_plainly(out) or self._is_integer(out)
        if makes == "tensors":
            return all(each is None or self._memory.wrote_plainly(each) or self._is_integer(each) for each in out)
        return makes == "number" and not self._host

    def _is_integer(self, tensor: Any) -> bool:
        """Whether it can hold nothing nonfinite, and no test of something nonfinite either."""
        return isinstance(tensor, Tensor) and tensor.dtype in INTEGERS and not self._host

    def _after(self, call: Call, out: Any) -> None:
        """Look at what the op put out, and record it if something nonfinite is around."""
        if call.facts.collective:  # it may not be there yet: whoever reads it will look
            self._chronicle.hand_over(call, [tensor for _, tensor in call.new_tensors(out)])
            return
        if self._within is not None and not call.bad and not call.facts.host_read and self._leave(call, out):
            return
        outputs = call.new_tensors(out)
        if self.time in self._neutral:
            for _, tensor in outputs:
                neutralise(tensor)
        bad, finite = self._look_at_outputs(outputs)
        unannounced = [] if call.facts.announces else self._written_unannounced(call)
        bad += [(argument.index, plane) for argument, plane in unannounced]
        if bad:
            self._check_assumptions(call, {id(argument.tensor) for argument, _ in unannounced})
        if self._host or call.bad:
            self._follow_host(call, outputs)
        if bad or call.bad:
            self._chronicle.record(call, bad, len(outputs), finite)

    def _look_at_outputs(self, outputs: list[tuple[int, Tensor]]) -> tuple[list[tuple[int, Tensor]], bool]:
        """Planes that are not finite, each with its index; and whether any is."""
        memory, finite = self._memory, False
        bad: list[tuple[int, Tensor]] = []
        for index, tensor in outputs:
            if memory.wrote_plainly(tensor):
                finite = True
            elif tensor.dtype in FLOATS or tensor.dtype in QUANTIZED:
                for plane in planes(tensor, memory.unread):
                    if memory.wrote(plane):
                        finite = True
                    else:
                        bad.append((index, plane))
        return bad, finite

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
        found = {id(argument.tensor) for argument, _ in call.bad}
        assumed = [a for a in call.arguments if call.reads(a) and self._memory.is_known_finite(a.tensor)]
        for argument in assumed:
            overwritten = id(argument.tensor) in call.kept or id(argument.tensor) in unannounced
            look = None if overwritten or id(argument.tensor) in found else self._memory.look(argument.tensor)
            if look is not None:
                call.bad = [*call.bad, (argument, look)]

    def _follow_host(self, call: Call, outputs: list[tuple[int, Tensor]]) -> None:
        hit = self._host.hit(call)
        if hit and call.facts.host_read:
            self._result.guard_reads.append((self.time, tuple(sorted(hit)), bool(call.bad)))
        if hit:
            self._host.spread(outputs, hit)

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
            if rounds.over:
                self._externals.read_batch()
            rounds.forward(self.time, outermost=not places.stack)
            self._chronicle.between.begin()
        if id(module) not in places.frames.names:
            self._externals.add_criterion(module)
        elif not places.stack:
            self._name_arguments(args)
        places.stack.append((module, task))

    def _name_arguments(self, args: Any) -> None:
        """What the step hands to the model is input, wherever the step had it from."""
        self._externals.read_arguments(args)
        for index, value in enumerate(args):
            if isinstance(value, Tensor) and value.dtype in FLOATS and storage_key(value) not in self._memory.finite:
                self._externals.add("batch", f"args[{index}]", value, keep_first=True)

    def on_module_ends(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Global forward hook, called for a module that raised too (with output None)."""
        if not self._paused and self._places.is_ours(threading.get_ident()):
            self._guarded(self._module_ends, module, output)

    def _module_ends(self, module: torch.nn.Module, output: Any) -> None:
        self._chronicle.between.flush()
        task = self._places.leave(module)
        name = self._places.frames.names.get(id(module))
        if task is None or task >= 0 or name is None or self._within is not None:
            return
        if not self._places.stack:
            with torch.no_grad(), torch._C._DisableTorchDispatch():
                self._sinks.model_ended(output)
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor) and first.dtype in FLOATS and self.is_known_finite(first):
            with torch._C._DisableTorchDispatch():
                for plane in planes(first):
                    low, high = self._memory.scanner.extent(readable(plane))
                    self._result.magnitudes.append((self.time, name, max(abs(low), abs(high))))
