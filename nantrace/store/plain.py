"""JSON for what has no fixed columns: ledger lines, shapes, aliases, odd metadata. Knows no HDF5.

Strict JSON in ASCII on one line, as the format's specification in `nantrace.store.schema` words it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from nantrace.store.schema import escape, unescape

_SURROGATE = re.compile("[\ud800-\udfff]")
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


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
