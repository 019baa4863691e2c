"""The answer, as a value: `Verdict` and `Origin`. The names here are a contract with notebooks and outside tools."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
        inputs: statistics of what the op or module read, before it ran.
        output: statistics of what it put out.
        first_bad: index of the first nonfinite element, one integer a dimension.
        samples: batch indices concerned, if dim 0 is the batch.
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

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON types only; a nonfinite float becomes {"finite": false, "value": "nan" | "inf" | "-inf"}."""
        found = plain(self)
        assert isinstance(found, dict)
        return found


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
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    if hasattr(value, "item"):
        return plain(value.item())
    return str(value)
