"""The op pass: watches every op of a step and records how nonfinite values flow through it.

One `OpEvent` for each nonfinite output of an op, with the events that wrote the nonfinite elements it read. Inputs are
looked at before the op runs (in-place ops destroy the evidence), and only if their memory is not known to be finite:
memory whose every write was seen and was finite is not looked at again, unless an output turns out bad, when that
assumption is checked before any birth is claimed. What the values mean is `diagnosis.blame`'s business.

It does not see: ops on other threads, ops inside compiled regions (`record` runs them eagerly), numpy, and kernels that
write without saying so, except batch norm's statistics and the inputs of custom ops, which are looked at again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nantrace.capture.lifecycle import Lifecycle
from nantrace.flow.context import Context, Whereabouts
from nantrace.flow.externals import Externals
from nantrace.flow.ops import OpFacts
from nantrace.flow.rounds import Rounds
from nantrace.flow.sinks import Sinks
from nantrace.flow.values import FLOATS, Masks, Scanner, Summary, dtype_name, masks, planes, storage_key, summarize
from nantrace.flow.writers import Writers
from nantrace.lineage import Kind, Lineage, Operand, OpEvent

_PLAIN = (Tensor, torch.nn.Parameter)
#: An argument that an in-place op overwrites is kept up to this many elements; of larger ones only the extent is.
_KEEP = 1 << 16
#: Operands described at a birth.
_DESCRIBED = 8


@dataclass(frozen=True)
class Look:
    """What is nonfinite in a tensor, and the ids of the events that wrote it."""

    nan: int
    posinf: int
    neginf: int
    nan_ids: frozenset[int]
    inf_ids: frozenset[int]

    @property
    def ids(self) -> frozenset[int]:
        return self.nan_ids | self.inf_ids


@dataclass(frozen=True)
class Argument:
    """A tensor argument: position in the schema (-1 unknown), index inside a list (-1 none)."""

    position: int
    index: int
    tensor: Tensor


class Call:
    """One dispatched op, between the look at its inputs and the look at its outputs."""

    __slots__ = (
        "args", "arguments", "bad", "facts", "inf_literal", "kept", "kwargs", "list_length", "nan_literal", "skipped",
        "task",
    )  # fmt: skip

    def __init__(self, facts: OpFacts, task: int, args: Any, kwargs: Any) -> None:
        self.facts, self.args, self.kwargs = facts, args, kwargs
        self.task = task  # id of the running backward pass, -1 outside
        self.arguments: list[Argument] = []
        self.bad: list[tuple[Argument, Look]] = []
        self.skipped: list[Argument] = []  # known finite, not looked at
        self.kept: dict[int, Summary | Tensor] = {}  # id(tensor) -> as it was before an in-place op
        self.nan_literal = self.inf_literal = False
        self.list_length = 0

    def written(self) -> list[Argument]:
        writes = self.facts.writes
        return [a for a in self.arguments if a.position >= 0 and writes[a.position]]

    def reads(self, argument: Argument) -> bool:
        return argument.position < 0 or self.facts.reads[argument.position]

    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(a.tensor.requires_grad for a in self.arguments)


@dataclass(frozen=True)
class SeenOp:
    """What `on_op` is told with each floating output of each op."""

    time: int
    op: str
    phase: str
    module: str | None
    node: str | None
    where: str | None
    output: int


class OpRecorder(TorchDispatchMode):
    """Records the flow of nonfinite values through everything that runs inside it on this thread.

    Args:
        model: the model whose modules, parameters and buffers are named.
        batch: the step's data, in any nesting; named "batch.x[0]".
        optimizer, scaler: handed over, their state is named from the start; others are found when they first act.
        freeze: undo each optimizer update right after it ("what if the weights had stayed?").
        neutral: numbers of ops whose nonfinite outputs are made finite (NaN to 0, infinities to +-1e4).
        within: called with (module, phase); where it answers False, an op whose inputs are finite is not looked at.
            What is lost there: births are found only when somebody else reads or keeps the value, as external events of
            category "unobserved" that name the op, without operands or line.
        on_op: told about each floating output of each op, for a trace of every op. Called under no dispatch mode.

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
        scaler: torch.amp.GradScaler | None = None,
        freeze: bool = False,
        neutral: frozenset[int] = frozenset(),
        within: Callable[[str | None, str], bool] | None = None,
        on_op: Callable[[SeenOp, Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self.time = 0
        self.failure: Exception | None = None
        self.returned: Any = None
        self._result = Lineage()
        self._neutral, self._within, self._on_op = neutral, within, on_op
        self._paused = True
        self._facts: dict[Any, OpFacts] = {}
        self._scanner, self._writers = Scanner(), Writers()
        self._finite: set[int] = set()  # storages whose every write was seen and was finite
        self._unseen: dict[
            int, tuple[str, str, str | None]
        ] = {}  # storages written outside `within`: op, phase, module
        self._aware: dict[int, tuple[torch.UntypedStorage, frozenset[int]]] = {}  # bools and ints made of bad values
        self._host_reads: list[Look] = []
        self._raised: tuple[int, frozenset[int]] | None = None
        self._unread: dict[str, int] = {}
        self._rounds = Rounds()
        self._externals = Externals(model, batch)
        self._places = Whereabouts(model, self._rounds, self._externals)
        self._sinks = Sinks(self, model, self._rounds, self._externals, freeze)
        self._lifecycle = Lifecycle(self._sinks)
        self._handles: list[Any] = []
        for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
            if each is not None:
                self._externals.add_moments(each)
        del scaler  # a scaler keeps no tensor that could be bad before the step

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
        self._result.notes += [f"{n} tensors were not read: {reason}" for reason, n in sorted(self._unread.items())]
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

    def _guarded(self, do: Callable[..., Any], *args: Any) -> Any:
        try:
            return do(*args)
        except Exception as error:
            self.fail(error)
            return None

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
            self._raised = (self.time, frozenset().union(*(look.ids for _, look in call.bad)))
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
        task = torch._C._current_graph_task_id()
        number: int = torch._C._autograd._get_sequence_nr() - 1
        if number > self._places.links.last:
            self._places.link(facts.op, number, task, args)
        if facts.view:
            return None
        call = Call(facts, task, args, kwargs)
        self._gather(call, args, kwargs)
        if facts.mutates:
            self._before_writing(call, number)
        return call

    def _gather(self, call: Call, args: Any, kwargs: Any) -> None:
        """Find the tensor arguments, and look at those that are read and not known to be finite."""
        for position, value in enumerate(args):
            if type(value) in _PLAIN:
                self._take(call, Argument(position, -1, value))
            elif value is not None:
                self._gather_other(call, position, value)
        if kwargs:
            position_of = call.facts.position
            for name, value in kwargs.items():
                if isinstance(value, Tensor):
                    self._take(call, Argument(position_of.get(name, -1), -1, value))
                elif value is not None:
                    self._gather_other(call, position_of.get(name, -1), value)

    def _gather_other(self, call: Call, position: int, value: Any) -> None:
        if isinstance(value, (float, complex)):
            if value - value != 0:
                call.nan_literal |= value != value
                call.inf_literal |= value == value
        elif isinstance(value, (list, tuple)):
            found = 0
            for index, item in enumerate(value):
                if isinstance(item, Tensor):
                    found += 1
                    self._take(call, Argument(position, index, item))
                elif isinstance(item, float):
                    self._gather_other(call, position, item)
            if found and call.facts.listwise:
                call.list_length = max(call.list_length, found)
        elif isinstance(value, Tensor):
            self._take(call, Argument(position, -1, value))

    def _take(self, call: Call, argument: Argument) -> None:
        call.arguments.append(argument)
        tensor = argument.tensor
        if tensor.dtype not in FLOATS or not call.reads(argument):
            return
        key = storage_key(tensor)
        if key is not None and key in self._finite and key not in self._writers:
            call.skipped.append(argument)
            return
        look = self.look(tensor)
        if look is not None:
            call.bad.append((argument, look))
        elif key is not None and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
            self._finite.add(key)

    def _before_writing(self, call: Call, number: int) -> None:
        """Keep what an in-place op is about to overwrite, should its result turn out bad."""
        written = call.written()
        into_view = any(a.index < 0 and a.tensor._is_view() for a in written)
        self._places.links.wrote(into_view and call.needs_grad(), number)
        rounds = self._rounds
        outside = call.task < 0 and not rounds.in_optimizer and not self._places.stack
        by_hand = outside and rounds.state == "after_backward"
        if by_hand and any(self._externals.is_state(storage_key(a.tensor)) for a in written):
            rounds.updated_by_hand(self.time)
        for argument in written:
            if call.reads(argument):
                for plane in planes(argument.tensor):
                    call.kept[id(argument.tensor)] = self._keep(plane)

    def _keep(self, plane: Tensor) -> Summary | Tensor:
        if plane.numel() <= _KEEP:
            return plane.detach().clone()
        low, high = self._scanner.extent(plane.detach())
        finite = low - low == 0 and high - high == 0
        return Summary(dtype_name(plane.dtype), tuple(plane.shape), 0, 0, 0, *((low, high) if finite else (None, None)))

    # ------------------------------------------------------------------------------------------------ outputs
    def _after(self, call: Call, out: Any) -> None:
        if self._within is not None and not call.bad and not call.facts.host_read and self._leave(call, out):
            return
        outputs = self._outputs(call, out)
        if self.time in self._neutral:
            for _, tensor in outputs:
                for plane in planes(tensor):
                    plane.detach().nan_to_num_(0.0, 1e4, -1e4)
        bad: list[tuple[int, Tensor]] = []
        finite = False
        for index, tensor in outputs:
            if tensor.dtype in FLOATS:
                for plane in planes(tensor, self._unread):
                    if self._check_written(plane):
                        finite = True
                    else:
                        bad.append((index, plane))
        if not call.facts.announces:
            bad += self._written_unannounced(call)
        if bad:
            self._check_assumptions(call)
        hit = self._hit(call) if self._aware or call.bad else frozenset()
        if hit:
            self._spread_awareness(call, outputs, hit)
        if bad or call.bad:
            self._record(call, bad, len(outputs), finite)
        if self._on_op is not None:
            self._tell(call, outputs)

    def _outputs(self, call: Call, out: Any) -> list[tuple[int, Tensor]]:
        """Tensors whose values are new: (list index or -1, tensor)."""
        if not call.facts.mutates and type(out) is Tensor and not call.facts.maybe_view:
            return [(-1, out)]
        written = call.written() if call.facts.mutates else []
        old = {id(a.tensor) for a in written}
        outputs = [(a.index, a.tensor) for a in written]
        for index, item in enumerate(out) if isinstance(out, (list, tuple)) else [(-1, out)]:
            inner = enumerate(item) if isinstance(item, (list, tuple)) else [(index if call.list_length else -1, item)]
            outputs += [(j, t) for j, t in inner if isinstance(t, Tensor) and id(t) not in old]
        if call.facts.maybe_view:
            memory = {storage_key(a.tensor) for a in call.arguments}
            outputs = [(j, t) for j, t in outputs if storage_key(t) not in memory]
        return outputs

    def _check_written(self, plane: Tensor) -> bool:
        """Whether a plane that was just written is finite; keeps the books on its storage."""
        storage = plane.untyped_storage()
        key = storage._cdata
        if self._unseen:
            self._unseen.pop(key, None)
        self._finite.add(key)
        if self._scanner.is_finite(plane):
            if key in self._writers and plane.numel() * plane.element_size() == storage.nbytes():
                self._writers.forget(key)
            return True
        return False

    def _written_unannounced(self, call: Call) -> list[tuple[int, Tensor]]:
        """Inputs holding nonfinite elements that nobody was seen writing: the kernel did, against its schema."""
        found = []
        announced = {id(a.tensor) for a in call.written()}
        for argument in call.arguments:
            if id(argument.tensor) in announced:
                continue
            for plane in planes(argument.tensor):
                if not self._scanner.is_finite(plane):
                    bad = masks(plane).bad
                    if 0 in self._writers.of(plane, bad):
                        found.append((argument.index, plane))
        return found

    def _check_assumptions(self, call: Call) -> None:
        """Before anything is called a birth: is what was taken for finite really finite?"""
        for argument in call.skipped:
            before = call.kept.get(id(argument.tensor))
            if before is None:
                look = self.look(argument.tensor)
                if look is not None:
                    call.bad.append((argument, look))

    def look(self, tensor: Tensor) -> Look | None:
        """What is nonfinite in it and who wrote that; None if nothing is. What nobody wrote gets an external event."""
        for plane in planes(tensor, self._unread):
            if self._scanner.is_finite(plane):
                continue
            found = masks(plane)
            nan_ids = self._writers.of(plane, found.nan_mask) if found.nan else frozenset()
            inf_ids = self._writers.of(plane, found.inf_mask) if found.posinf + found.neginf else frozenset()
            if 0 in nan_ids or 0 in inf_ids:
                event = self._external(plane, found)
                self._writers.adopt(plane, found.bad, event.id)
                nan_ids = frozenset(i or event.id for i in nan_ids)
                inf_ids = frozenset(i or event.id for i in inf_ids)
            return Look(found.nan, found.posinf, found.neginf, nan_ids, inf_ids)
        return None

    def is_known_finite(self, tensor: Tensor) -> bool:
        key = storage_key(tensor)
        return key is not None and key in self._finite and key not in self._writers

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """For the recorder's own work outside its handler."""
        paused, self._paused = self._paused, True
        try:
            with torch.no_grad(), torch._C._DisableTorchDispatch():
                yield
        finally:
            self._paused = paused

    def depth(self) -> int:
        """How many module calls are open."""
        return len(self._places.stack)

    def mark_finite(self, tensor: Tensor) -> None:
        """All of the tensor's memory was looked at and is finite."""
        key = storage_key(tensor)
        if key is not None:
            self._finite.add(key)

    # ------------------------------------------------------------------------------------------------ region
    def _leave(self, call: Call, out: Any) -> bool:
        """Outside the region, finite inputs are taken to give finite outputs: note who wrote them, look at nothing."""
        assert self._within is not None
        place = self._places.find(call.task, call.needs_grad, call.arguments, call.facts)
        if self._within(place.module, place.phase):
            return False
        for _, tensor in self._outputs(call, out):
            for plane in planes(tensor):
                key = plane.untyped_storage()._cdata
                self._finite.discard(key)
                self._unseen[key] = (call.facts.op, place.phase, place.module)
        return True

    # ------------------------------------------------------------------------------------------------ events
    def _record(self, call: Call, bad: list[tuple[int, Tensor]], outputs: int, finite: bool) -> None:
        place = self._places.find(call.task, call.needs_grad, call.arguments, call.facts)
        self._note_readers(call, place, absorbed=finite and not bad and not call.facts.host_read)
        if call.facts.host_read:
            self._host_reads += [look for _, look in call.bad]
            return
        for index, plane in bad:
            self._event(call, place, index, plane, outputs)

    def _note_readers(self, call: Call, place: Context, absorbed: bool) -> None:
        reader = place.node_key or place.phase
        for id in frozenset().union(*(look.ids for _, look in call.bad)):
            event = self._result.event(id)
            event.read_by_forward |= place.phase in ("forward", "loss", "recompute")
            if reader not in event.readers:
                event.readers += (reader,)
            if absorbed and call.facts.op not in event.absorbed_by:
                event.absorbed_by += (call.facts.op,)

    def _event(self, call: Call, place: Context, index: int, plane: Tensor, outputs: int) -> None:
        mine = [(a, look) for a, look in call.bad if not call.list_length or -1 in (a.index, index) or a.index == index]
        nan_parents = frozenset().union(*(look.nan_ids for _, look in mine))
        inf_parents = frozenset().union(*(look.inf_ids for _, look in mine))
        read = self._number_read_before(call)
        if read is not None:
            nan_parents, inf_parents = nan_parents | read.nan_ids, inf_parents | read.inf_ids
        found = masks(plane)
        kind = _kind(call, found, nan_parents, inf_parents)
        born = kind in ("nan", "inf", "inserted")
        event = OpEvent(
            id=len(self._result.events) + 1,
            time=self.time,
            op=call.facts.op,
            kind=kind,
            iteration=self._rounds.iteration,
            **place.fields(),
            **self._output_fields(plane, found, described=born),
            nan_parents=tuple(sorted(nan_parents)),
            inf_parents=tuple(sorted(inf_parents)),
            outputs=outputs,
            inplace=call.facts.mutates,
            carries_grad=call.task >= 0 or call.needs_grad(),
        )
        if born:
            event.operands = self._operands(call, index)
            event.scalars = _scalars(call)
        self._result.events.append(event)
        self._writers.write(plane, found.bad, event.id)

    def _number_read_before(self, call: Call) -> Look | None:
        """A nonfinite Python number that was read from a tensor before is that tensor's doing, not a literal."""
        for look in reversed(self._host_reads) if call.nan_literal or call.inf_literal else ():
            if (call.nan_literal and look.nan) or (call.inf_literal and look.posinf + look.neginf):
                return look
        return None

    def _output_fields(self, plane: Tensor, found: Masks, described: bool) -> dict[str, Any]:
        fields: dict[str, Any] = dict(dtype=dtype_name(plane.dtype), shape=tuple(plane.shape))
        fields |= dict(nan=found.nan, posinf=found.posinf, neginf=found.neginf)
        flat = found.bad.reshape(-1)
        fields["first_bad"] = int(flat.to(torch.uint8).argmax())
        if described:
            summary = summarize(plane, found)
            fields |= dict(min=summary.min, max=summary.max)
            if plane.dim() and plane.shape[0] == self._externals.batch_size:
                rows = found.bad.reshape(plane.shape[0], -1).any(1).nonzero().reshape(-1)
                fields["samples"] = tuple(rows[:64].tolist())
        return fields

    def _operands(self, call: Call, index: int) -> tuple[Operand, ...]:
        """Statistics of what was read, as it was before the op."""
        operands: list[Operand] = []
        for argument in call.arguments:
            other = call.list_length and argument.index >= 0 and index >= 0 and argument.index != index
            if other or not call.reads(argument) or len(operands) == _DESCRIBED:
                continue
            before = call.kept.get(id(argument.tensor), argument.tensor)
            for plane in (before,) if isinstance(before, Summary) else planes(before):
                summary = plane if isinstance(plane, Summary) else summarize(plane)
                external = self._externals.get(storage_key(argument.tensor))
                name = call.facts.arguments[argument.position] if argument.position >= 0 else "?"
                name = f"{name}[{argument.index}]" if argument.index >= 0 else name
                tensor = external.name if external else None
                operands.append(Operand(name=name, tensor=tensor, **vars(summary)))
        return tuple(operands)

    def _external(self, plane: Tensor, found: Masks) -> OpEvent:
        """Nonfinite elements that nobody was seen writing."""
        key = plane.untyped_storage()._cdata
        external, unseen = self._externals.get(key), self._unseen.get(key)
        event = OpEvent(
            id=len(self._result.events) + 1,
            time=self.time,
            op=unseen[0] if unseen else None,
            kind="external",
            phase=unseen[1] if unseen else None,
            module=unseen[2] if unseen else None,
            node=None,
            where=None,
            iteration=self._rounds.iteration,
            category="unobserved" if unseen else external.category if external else "constant",
            tensor=external.name if external and not unseen else None,
            datalike=_is_datalike(plane, found),
            **self._output_fields(plane, found, described=True),
        )
        self._result.events.append(event)
        return event

    # ------------------------------------------------------------------------------------------------ guards
    def _hit(self, call: Call) -> frozenset[int]:
        """Events whose values, or tests of whose values, this op read."""
        hit = frozenset().union(*(look.ids for _, look in call.bad))
        if self._aware:
            for argument in call.arguments:
                if argument.tensor.dtype not in FLOATS:
                    known = self._aware.get(storage_key(argument.tensor) or -1)
                    hit = hit | known[1] if known else hit
        return hit

    def _spread_awareness(self, call: Call, outputs: list[tuple[int, Tensor]], hit: frozenset[int]) -> None:
        if call.facts.host_read:
            self._result.guard_reads.append((self.time, tuple(sorted(hit)), bool(call.bad)))
        for _, tensor in outputs:
            key = storage_key(tensor) if tensor.dtype not in FLOATS else None
            if key is not None:
                self._aware[key] = (tensor.untyped_storage(), hit)

    def _tell(self, call: Call, outputs: list[tuple[int, Tensor]]) -> None:
        assert self._on_op is not None
        place = self._places.find(call.task, call.needs_grad, call.arguments, call.facts)
        for number, (_, tensor) in enumerate(outputs):
            if tensor.dtype in FLOATS:
                where = place.where
                op = call.facts.op
                self._on_op(SeenOp(self.time, op, place.phase, place.module, place.node, where, number), tensor)

    # ------------------------------------------------------------------------------------------------ modules
    def on_module_begins(self, module: torch.nn.Module, args: Any) -> None:
        """Global forward pre-hook."""
        if self._paused or not self._places.is_ours(threading.get_ident()):
            return
        self._guarded(self._module_begins, module, args)

    def _module_begins(self, module: torch.nn.Module, args: Any) -> None:
        places, rounds = self._places, self._rounds
        task = torch._C._current_graph_task_id()
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
            if isinstance(value, Tensor) and value.dtype in FLOATS and storage_key(value) not in self._finite:
                self._externals.add("batch", f"args[{index}]", value, keep_first=True)

    def on_module_ends(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Global forward hook, called for a module that raised too (with output None)."""
        if self._paused or not self._places.is_ours(threading.get_ident()):
            return
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
                    low, high = self._scanner.extent(_wide(plane))
                    self._result.magnitudes.append((self.time, name, max(abs(low), abs(high))))


def _wide(plane: Tensor) -> Tensor:
    from nantrace.flow.values import readable

    return readable(plane)


def _kind(call: Call, found: Masks, nan_parents: frozenset[int], inf_parents: frozenset[int]) -> Kind:
    """How the nonfinite output came about; see `nantrace.lineage.Kind`."""
    nan_in = bool(nan_parents) or call.nan_literal
    inf_in = bool(inf_parents) or call.inf_literal
    if call.facts.unwritten:
        return "uninit"
    if found.nan and not nan_in:
        return "nan"
    if not nan_in and not inf_in:
        return "inf"
    return "propagated" if nan_parents or inf_parents else "inserted"


def _scalars(call: Call) -> dict[str, Any]:
    """The plain arguments by schema name: numbers, flags, names, and lists of numbers."""
    named = dict(zip(call.facts.arguments, call.args, strict=False)) | call.kwargs
    return {name: value for name, value in named.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, (bool, int, float, str)) for item in value)
    return isinstance(value, (bool, int, float, complex, str))


def _is_datalike(plane: Tensor, found: Masks) -> bool:
    """Data, not a mark: at least two different nonzero finite values stand beside the nonfinite ones."""
    if plane.is_complex() or plane.element_size() == 1:
        return False
    values = plane.detach()[~found.bad & (plane.detach() != 0)]
    return values.numel() > 1 and bool((values != values[0]).any())
