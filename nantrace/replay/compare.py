"""How two runs of one step differ, judged by their ends alone. Pure.

A difference *matters* when it cannot come from the order in which a kernel adds: other data, another kind of loss,
other ends nonfinite, another exception. Other bits of the same numbers do not, and are told all the same.
"""

from __future__ import annotations

import math

from nantrace.replay.ends import End, Ends

#: Losses further apart than this, relative to the larger, are not the same sum in another order.
_ROUNDING = 0.02
_KINDS = ("nan", "inf", "-inf")


def alike(one: Ends, other: Ends) -> bool:
    """The same ends went nonfinite, and the same type of exception was raised, if any."""
    return one.places() == other.places() and one.raised == other.raised


def difference(one: Ends, other: Ends) -> str:
    """What differs and matters, as the end of a sentence; "" if nothing does."""
    if one.raised != other.raised:
        return f"the first raised {one.raised or 'nothing'}, the second {other.raised or 'nothing'}"
    return _of_calls(one, other) or _of_losses(one, other) or _of_places(one, other)


def finer(one: Ends, other: Ends) -> str:
    """What differs in bits only, as the end of a sentence; "" if nothing does."""
    for a, b in zip(one.losses, other.losses, strict=False):
        if a != b:
            return f"the loss was {number(a)}, then {number(b)}"
    counts = {(end.place, end.name): end for end in one.nonfinite}
    for end in other.nonfinite:
        before = counts.get((end.place, end.name))
        if before is not None and (before.nan, before.inf) != (end.nan, end.inf):
            return f"{end} held {_counted(before)}, then {_counted(end)}"
    gradients = dict(other.gradients)
    changed = [name for name, bits in one.gradients if gradients.get(name, bits) != bits]
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return f"the gradient of {changed[0]}{more} had other bits"
    streams = [name for (name, bits), (_, now) in zip(one.random, other.random, strict=False) if bits != now]
    return f"{streams[0]} was drawn from otherwise" if streams else ""


def number(bits: str) -> str:
    """A loss as it was kept, for people."""
    return repr(float.fromhex(bits)) if "0x" in bits else bits


def _of_calls(one: Ends, other: Ends) -> str:
    """Of two runs that were both listened to: a run whose calls nobody heard says nothing about them."""
    if one.inputs is None or other.inputs is None:
        return ""
    for call, pair in enumerate(zip(one.inputs, other.inputs, strict=False), 1):
        if pair[0] != pair[1]:
            return f"the model was called with other values{f' in its call {call}' if call > 1 else ''}"
    if len(one.inputs) != len(other.inputs):
        return f"the model was called {len(one.inputs)} times, then {len(other.inputs)}"
    return ""


def _of_losses(one: Ends, other: Ends) -> str:
    for a, b in zip(one.losses, other.losses, strict=False):
        if a != b and (a in _KINDS or b in _KINDS or not _near(a, b)):
            return f"the loss was {number(a)}, then {number(b)}"
    if len(one.losses) != len(other.losses):
        return f"{len(one.losses)} backward passes, then {len(other.losses)}"
    return ""


def _near(a: str, b: str) -> bool:
    """Two finite losses; those of several elements are digests, of which nothing can be said."""
    if "0x" not in a or "0x" not in b:
        return True
    return math.isclose(float.fromhex(a), float.fromhex(b), rel_tol=_ROUNDING, abs_tol=1e-30)


def _of_places(one: Ends, other: Ends) -> str:
    then = {(end.place, end.name, end.iteration): end for end in one.nonfinite}
    now = {(end.place, end.name, end.iteration): end for end in other.nonfinite}
    only = [end for key, end in then.items() if key not in now]
    if only:
        return f"{only[0]} was nonfinite only in the first"
    new = [end for key, end in now.items() if key not in then]
    if new:
        return f"{new[0]} was nonfinite only in the second"
    for key, end in then.items():
        if _kind(end) != _kind(now[key]):
            return f"{end} held {_counted(end)}, then {_counted(now[key])}"
    return ""


def _kind(end: End) -> tuple[bool, bool]:
    return end.nan > 0, end.inf > 0


def _counted(end: End) -> str:
    return " and ".join(f"{count:,} {word}" for count, word in ((end.nan, "NaN"), (end.inf, "infinite")) if count)
