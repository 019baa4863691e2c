"""The answer, as a value: `Verdict` and `Origin`. The names here are a contract with notebooks and outside tools."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, get_args

Status = Literal["fault", "contained", "expected", "clean", "not_reproduced", "inconclusive"]
Stage = Literal["input", "state", "forward", "loss", "backward", "gradients", "optimizer", "update"]


@dataclass(frozen=True)
class Origin:
    """Where a nonfinite value was born.

    Attributes:
        step: number of the step (of the iteration within a replayed step), from 0.
        phase: phase of the op or tensor.
        module: FQN; "" the model itself; "<ClassName>" a module outside the model; None outside any module.
        op: the op ("aten.addmm"), or None where the trace holds no ops.
        node: autograd node of a backward op ("SqrtBackward0").
        tensor: name of the bad input, parameter, buffer or moment ("batch.wav"), or the site's tensor.
        kind: "nan", "inf" or "naninf".
        dtype: of the nonfinite tensor.
        where: "model.py:41 in forward", the user's own line; for a backward op its forward line.
        own_line: `where` is a line that ran in backward: of a custom function's own, or of a hook.
        inputs: statistics of what the op or module read, before it ran.
        output: statistics of what it put out.
        first_bad: index of the first nonfinite element, one integer a dimension.
        samples: batch indices concerned, if dim 0 is the batch.
        round: "step" where ops were recorded step by step; None: `step` counts iterations for an op, else steps.
    """

    step: int = 0
    phase: str | None = None
    module: str | None = None
    op: str | None = None
    node: str | None = None
    tensor: str | None = None
    kind: str | None = None
    dtype: str | None = None
    where: str | None = None
    inputs: tuple[Any, ...] = ()
    output: Any = None
    first_bad: tuple[int, ...] | None = None
    samples: tuple[int, ...] | None = None
    round: str | None = None
    own_line: bool = False


@dataclass(frozen=True)
class Verdict:
    """What happened, where it began, why, and what to check next.

    Attributes:
        status: "fault", "contained", "expected", "clean", "not_reproduced" or "inconclusive".
        stage: the part of the step that is to blame, or None.
        cause: short identifier of the cause, or None.
        origin: where it began, or None.
        evidence: sentences that prove it, with numbers.
        advice: the next controlled checks, at most three.
        also: other places worth naming.
        path: mappings that lead from the origin to the sink it reached, in order.
        replays: how many times the step was replayed.
        region: what is left under suspicion if it is not one op.
    """

    status: Status
    stage: Stage | None = None
    cause: str | None = None
    origin: Origin | None = None
    evidence: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    also: tuple[Origin, ...] = ()
    path: tuple[Mapping[str, Any], ...] = ()
    replays: int = 0
    region: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        """What a notebook shows: the verdict with its evidence and advice."""
        # Named, not imported: judging never loads rendering, only a cell that shows it does.
        shown: str = importlib.import_module("nantrace.render.html").cell(None, self)
        return shown

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON types only; a nonfinite float becomes {"finite": false, "value": "nan" | "inf" | "-inf"}."""
        found = plain(self)
        assert isinstance(found, dict)
        return found

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Verdict:
        """The verdict that `to_dict` worded. Fields it does not know are ignored, absent ones take their default.

        Raises:
            ValueError: it has no status that a verdict can have, or a field of another kind.
        """
        if given.get("status") not in get_args(Status) or given.get("stage") not in (None, *get_args(Stage)):
            raise ValueError(f"no verdict has status {given.get('status')!r} and stage {given.get('stage')!r}")
        try:
            known = _known(cls, given)
            known["origin"] = None if known.get("origin") is None else _origin(known["origin"])
            known["also"] = tuple(_origin(each) for each in known.get("also", ()))
            return cls(**_with_tuples(known))
        except (TypeError, AttributeError) as error:
            raise ValueError(f"a field of the verdict is of another kind ({error})") from error


def _known(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    return {f.name: given[f.name] for f in dataclasses.fields(kind) if f.name in given}


def _origin(given: Mapping[str, Any]) -> Origin:
    from nantrace.events import TensorStats
    from nantrace.lineage import Operand

    known = _known(Origin, given)
    output = known.get("output")
    known["output"] = TensorStats(**_known(TensorStats, output)) if isinstance(output, Mapping) else output
    known["inputs"] = tuple(_operand(Operand, each) for each in known.get("inputs", ()))
    return Origin(**_with_tuples(known))


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists only."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _operand(kind: Any, given: Any) -> Any:
    return kind(**_known(kind, given)) if isinstance(given, Mapping) and "name" in given else given


def plain(value: Any) -> Any:
    """A value as strict JSON types, as `Verdict.to_dict` words it; dataclasses become mappings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else {"finite": False, "value": repr(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (Sequence, Set)) and not isinstance(value, bytes):
        return [plain(v) for v in value]
    if hasattr(value, "item"):
        return plain(value.item())
    return str(value)
