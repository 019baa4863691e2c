"""JSON for what has no fixed columns: ledger lines, the lineage, odd metadata. Knows no HDF5.

Strict JSON in ASCII on one line, as the format's specification in `nantrace.store.schema` words it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from nantrace.lineage import Lineage, Operand, OpEvent, Sink
from nantrace.store.schema import escape, unescape

_SURROGATE = re.compile("[\ud800-\udfff]")
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_T = TypeVar("_T")


def to_json(value: Any) -> str:
    """One line of strict JSON. What JSON cannot say (a dtype, a device) becomes its `str`."""
    return json.dumps(_strict(value), allow_nan=False, separators=(",", ":"))


def from_json(text: str | bytes) -> Any:
    """The inverse, with tuples for lists; ValueError if it is not JSON."""
    try:
        return _loose(json.loads(text, parse_constant=_refuse))
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _strict(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int)):
        return value if value is None or isinstance(value, bool) else int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"finite": False, "value": repr(float(value))}
    if isinstance(value, str):
        return {"escaped": escape(value)} if _SURROGATE.search(value) else str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _strict(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_strict(item) for item in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a scalar of NumPy
        return _strict(value.item())
    return _strict(str(value))


def _loose(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_loose(item) for item in value)
    if not isinstance(value, dict):
        return value
    if value.keys() == {"finite", "value"} and value["finite"] is False and value["value"] in _NONFINITE:
        return _NONFINITE[value["value"]]
    if value.keys() == {"escaped"} and isinstance(value["escaped"], str):
        return unescape(value["escaped"])
    return {key: _loose(item) for key, item in value.items()}


def lineage_from_json(text: str | bytes) -> Lineage:
    """A lineage out of its line; unknown fields are ignored, missing ones take their default.

    Raises:
        ValueError: it is no lineage, or an event refers to one that does not exist.
    """
    fields = from_json(text)
    lineage = _build(Lineage, fields)
    for field in dataclasses.fields(Lineage):  # the lists of a Lineage are lists, all else is tuples
        value = getattr(lineage, field.name)
        if isinstance(field.default_factory, type):
            if not isinstance(value, (list, tuple)):
                raise ValueError(f"lineage field {field.name} is {value!r:.40}, not a list")
            setattr(lineage, field.name, list(value))
    lineage.events = [_event(event) for event in lineage.events]
    lineage.sinks = [_build(Sink, sink) for sink in lineage.sinks]
    _check_references(lineage)
    return lineage


def _event(fields: Any) -> OpEvent:
    event = _build(OpEvent, fields)
    event.operands = tuple(_build(Operand, operand) for operand in event.operands)
    event.forward_operands = tuple(_build(Operand, operand) for operand in event.forward_operands)
    return event


def _build(kind: type[_T], fields: Any) -> _T:
    if not isinstance(fields, dict):
        raise ValueError(f"{kind.__name__} is {fields!r:.40}, not an object")
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    try:
        return kind(**{key: value for key, value in fields.items() if key in known})
    except TypeError as error:
        raise ValueError(f"{kind.__name__} is not whole: {error}") from error


def _check_references(lineage: Lineage) -> None:
    ids = range(1, len(lineage.events) + 1)
    for position, event in zip(ids, lineage.events, strict=True):
        for id in (*event.nan_parents, *event.inf_parents):
            if id not in ids:
                raise ValueError(f"event {position} of the lineage has parent {id}, of {len(ids)} events")
        if event.id != position:
            raise ValueError(f"event {position} of the lineage has id {event.id}")
    for sink in lineage.sinks:
        for id, _ in sink.starts:
            if id not in ids:
                raise ValueError(f"sink {sink.name} of the lineage starts at event {id}, of {len(ids)} events")
