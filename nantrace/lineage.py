"""The flow of nonfinite values through one replay, as a value: who wrote each, who read it, where it ended.

`flow` records it op by op, `diagnosis` follows it from sinks back to births, `store` keeps it as JSON. Knows no torch.

Every nonfinite tensor that an op puts out is one `OpEvent`, or several, if its elements came about in different ways.
Its parents are the events that wrote the nonfinite elements which the op read. A tensor that held nonfinite values
before the recorder saw anybody write them is an external event: the batch, a parameter, a buffer, an optimizer moment,
or a constant that the step itself held.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nantrace.errors import TraceFormatError

#: How an event came to be nonfinite. `nan`: NaN out, none in. `inf`: infinity out, all finite in. `inserted`: explained
#: by a nonfinite literal alone. `uninit`: memory nobody wrote. `external`: so before the step. `propagated`: the rest.
#: "In" is what reaches these elements of the output, as far as the op lets that be told.
Kind = Literal["nan", "inf", "inserted", "uninit", "external", "propagated"]
#: What an external event was before the step. `constant`: a tensor the step held. `unobserved`: an op outside the
#: recorded region wrote it. `received`: a collective filled it with what other processes had. `grad`: it lay in a
#: parameter's `.grad`.
Category = Literal["batch", "param", "buffer", "moment", "grad", "constant", "unobserved", "received"]
Excuse = Literal["skip", "guard", "soft", "returned"]
Round = Literal["iteration", "step"]


@dataclass(frozen=True)
class Operand:
    """One tensor argument of an op, as it was before the call."""

    name: str  # the argument's name in the op's schema, with an index inside a list: "mat1", "tensors[3]"
    dtype: str
    shape: tuple[int, ...]
    nan: int
    posinf: int
    neginf: int
    min: float | None
    max: float | None
    absmin: float | None = None
    zero: int | None = None
    tensor: str | None = None  # its name where it has one: "head.bias", "batch.wav"


@dataclass
class OpEvent:
    """One nonfinite output of one op (or one external tensor found nonfinite).

    `id` is its index in `Lineage.events` plus 1. `time` counts dispatched ops. `node_key` identifies one run of one
    autograd node. Parents are ids: of those who wrote the NaN elements read, and of those who wrote the infinities.
    """

    id: int
    time: int
    op: str | None
    kind: Kind
    phase: str | None
    module: str | None
    node: str | None
    where: str | None
    iteration: int
    dtype: str
    shape: tuple[int, ...] = ()
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    min: float | None = None
    max: float | None = None
    first_bad: int = -1
    samples: tuple[int, ...] = ()  # indices along dim 0 that hold a nonfinite element, if dim 0 is the batch
    nan_parents: tuple[int, ...] = ()
    inf_parents: tuple[int, ...] = ()
    beside: tuple[int, int, int] = (0, 0, 0)  # NaN, +inf, -inf in the same output that are another event's
    node_key: tuple[int, int, str] | None = None
    outputs: int = 1  # how many tensors the op put out
    inplace: bool = False
    carries_grad: bool = False
    read_by_forward: bool = False
    readers: tuple[Any, ...] = ()  # node keys or phases under which it was read
    absorbed_by: tuple[str, ...] = ()  # ops that read it and put out only finite values
    category: Category | None = None  # external events only
    tensor: str | None = None  # external events: the tensor's name
    datalike: bool = False  # external events: holds at least two different nonzero finite values
    operands: tuple[Operand, ...] = ()
    scalars: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # plain arguments by schema name
    forward_op: str | None = None  # backward events: the forward op whose node this is
    own_line: bool = False  # backward events: `where` is a line of the backward itself, not that of the forward op
    forward_operands: tuple[Operand, ...] = ()  # backward events: that op's inputs, where they were recorded


@dataclass
class Sink:
    """A place where training keeps a value, found nonfinite."""

    kind: str  # loss | grad | param | state | buffer | returned | exception
    name: str
    starts: tuple[tuple[int, str], ...]  # (event id, "nan" | "inf") of the elements it holds
    iteration: int
    time: int
    excuse: Excuse | None = None
    left: bool = False  # a gradient that only lies in .grad at the end of the step
    returned: bool = False
    guards: tuple[tuple[tuple[int, ...], bool], ...] = ()  # host reads after it: (event ids, a raw value was read)


@dataclass(frozen=True)
class Hyperparameter:
    """A number among an optimizer's settings that no update can use, as it was when an update began.

    `writers` are the events that wrote it, if it is a tensor.
    """

    optimizer: str  # class name
    name: str  # key in the parameter group, with an index inside a tuple: "lr", "betas[0]"
    group: int
    value: float
    iteration: int
    time: int
    writers: tuple[int, ...] = ()

    @property
    def place(self) -> str:
        """What a verdict calls it: "AdamW.param_groups[0].betas[1]"."""
        return f"{self.optimizer}.param_groups[{self.group}].{self.name}"


@dataclass
class Lineage:
    """Everything that one op pass saw. Owned by `flow`, judged by `diagnosis.blame`.

    Times are counts of dispatched ops; an iteration is a round that ends in an optimizer step or a skip, from 1.

    Attributes:
        events, sinks: the flow itself.
        growth: (iteration, parameter norm before, after, time) of every optimizer update; the norm is the largest
            2-norm among the optimizer's parameters.
        skipped_iterations: iterations in which a gradient scaler skipped an update.
        round_times: when the forward rounds began.
        step_times: when optimizer updates ended.
        guard_reads: (time, event ids, raw) of host reads of something computed from nonfinite values; raw: the
            nonfinite number itself was read, not a test of it.
        huge_params: (name, largest magnitude) of parameters so large before the step that a square would overflow.
        hyperparameters: nonfinite settings that optimizers were given.
        unit_betas: betas of exactly 1 that optimizers were given: the bias correction 1 - beta ** step is 0 then.
        round: what a reader knows an iteration as; "step" where each is a step of the trace that holds this.
        magnitudes: (time, module, largest magnitude) of module outputs in forward, in order.
        backwards: accumulating backward passes that ended.
        ops: dispatched ops.
        notes: what was not seen, or went wrong, in sentences.
    """

    events: list[OpEvent] = dataclasses.field(default_factory=list)
    sinks: list[Sink] = dataclasses.field(default_factory=list)
    growth: list[tuple[int, float, float, int]] = dataclasses.field(default_factory=list)
    skipped_iterations: list[int] = dataclasses.field(default_factory=list)
    round_times: list[int] = dataclasses.field(default_factory=list)
    step_times: list[int] = dataclasses.field(default_factory=list)
    guard_reads: list[tuple[int, tuple[int, ...], bool]] = dataclasses.field(default_factory=list)
    huge_params: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    hyperparameters: list[Hyperparameter] = dataclasses.field(default_factory=list)
    unit_betas: list[Hyperparameter] = dataclasses.field(default_factory=list)
    round: Round = "iteration"
    magnitudes: list[tuple[int, str, float]] = dataclasses.field(default_factory=list)
    backwards: int = 0
    ops: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)

    def event(self, id: int) -> OpEvent:
        return self.events[id - 1]

    def to_json(self) -> str:
        """Strict JSON (no NaN, no Infinity tokens): a nonfinite float is {"float": "nan" | "inf" | "-inf"}."""
        return json.dumps(_to_plain(self), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Lineage:
        """The value that `to_json` wrote. Fields it does not know are ignored, absent ones take their default.

        Raises:
            TraceFormatError: `text` is not JSON, or not a lineage.
        """
        try:
            plain = json.loads(text)
            if not isinstance(plain, dict):
                raise TypeError(f"a {type(plain).__name__} at the top")
            lineage: Lineage = _from_plain(cls, plain)
            return lineage
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TraceFormatError(f"the recorded lineage cannot be read: {error}; record the step again") from error


def _to_plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, complex):
        return {"complex": [_to_plain(value.real), _to_plain(value.imag)]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(v) for v in value]
    return str(value)


def _from_plain(kind: Any, plain: Any) -> Any:
    """Rebuild a value of the annotated type `kind`: JSON has lists only, the fields say which are tuples."""
    if isinstance(plain, dict) and plain.keys() == {"float"}:
        return float(plain["float"])
    if isinstance(plain, dict) and plain.keys() == {"complex"}:
        return complex(*(_from_plain(float, part) for part in plain["complex"]))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        names = [f.name for f in dataclasses.fields(kind) if f.name in plain]
        return kind(**{name: _from_plain(hints[name], plain[name]) for name in names})
    if isinstance(plain, list):
        return _from_list(kind, plain)
    if isinstance(plain, dict):
        return {k: _from_plain(Any, v) for k, v in plain.items()}
    return plain


def _from_list(kind: Any, plain: list[Any]) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return [_from_plain(args[0], item) for item in plain]
    if origin is tuple and args[-1] is Ellipsis:
        return tuple(_from_plain(args[0], item) for item in plain)
    if origin is tuple and len(args) == len(plain):
        return tuple(_from_plain(arg, item) for arg, item in zip(args, plain, strict=True))
    for arg in args:  # an optional field
        if typing.get_origin(arg) in (list, tuple):
            return _from_list(arg, plain)
    return tuple(_from_plain(Any, item) for item in plain)
