"""Whose backward made a gradient that a module trace shows.

The gradient of a tensor is one value, and it stands in one row for each module that put the tensor out or read it. With
several readers it is their sum, so that a finite gradient at a reader's output and a nonfinite one at its input do not
yet convict that reader.
"""

from __future__ import annotations

import re

from nantrace.diagnosis.modules.seen import LARGEST, Call, Seen
from nantrace.events import Phase, Role

_STATISTICS = ("numel", "finite", "nan", "posinf", "neginf", "min", "max")
_FLOW = (int(Role.GRAD_OUTPUT), int(Role.GRAD_INPUT))
#: Backward of these multiplies or selects: out of finite values it makes nonfinite ones by overflow alone.
_TAME = ("Linear", "Conv", "Dropout", "Identity", "Embedding", "ReLU", "Flatten")
#: PyTorch's own of these. Backward of a linear map adds up products of what the trace shows, and nothing else.
_LINEAR_MAP = re.compile(
    r"(NonDynamicallyQuantizable)?Linear|Conv(Transpose)?[123]d|Embedding|ReLU|Identity|Dropout[123]?d?|Flatten"
)

_LINEAR = re.compile(r"(NonDynamicallyQuantizable)?Linear|Conv(Transpose)?[123]d")


def same_gradient(seen: Seen, row: int) -> list[int]:
    """Rows of the gradient of the same tensor: they were written together, readers first, makers last."""
    first = last = row
    while first > 0 and _together(seen, first - 1, first):
        first -= 1
    while last + 1 < len(seen.bad) and _together(seen, last, last + 1):
        last += 1
    return list(range(first, last + 1))


def _together(seen: Seen, one: int, other: int) -> bool:
    roles = int(seen.role[one]), int(seen.role[other])
    if roles[0] not in _FLOW or roles[1] not in _FLOW or roles == (Role.GRAD_OUTPUT, Role.GRAD_INPUT):
        return False
    if seen.step[one] != seen.step[other] or seen.site(one).shape != seen.site(other).shape:
        return False
    events = seen.trace.events
    return all(_same(float(events[name][one]), float(events[name][other])) for name in _STATISTICS)


def _same(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)


def gradient_maker(seen: Seen, row: int) -> Call | None:
    """The call whose backward is the likeliest to have made this gradient; None for code outside every module.

    Of the tensor's readers: the only one, or the only one whose backward is not tame. Else the innermost call around
    all of them, whose own code may have read the tensor as well. Without readers, the code around its maker.
    """
    calls = seen.calls(int(seen.step[row]))
    group = same_gradient(seen, row)
    readers = [call for call in (seen.call_of(r) for r in group if seen.role[r] == Role.GRAD_INPUT) if call]
    if not readers:
        makers = [call for call in (seen.call_of(r) for r in group) if call]
        outermost = min(makers, key=lambda call: (call.first, -call.last)) if makers else None
        return calls.get(outermost.parent) if outermost is not None and outermost.parent is not None else None
    around = {call.key: _around(calls, call) for call in readers}
    innermost = [call for call in readers if not any(call.key in around[other.key] for other in readers)]
    wild = [call for call in innermost if not is_tame(seen, call)]
    if len(wild) == 1:
        return wild[0]
    if not wild and all(cannot_have_made(seen, call, row) for call in innermost):
        return _code_around(seen, innermost[0], row)
    if len(innermost) == 1 and len(readers) == 1:
        return innermost[0]
    shared = set.intersection(*(set(around[call.key]) for call in innermost))
    return next((calls[key] for key in around[innermost[0].key] if key in shared), None) or innermost[0]


def is_tame(seen: Seen, call: Call) -> bool:
    """Whether backward of this module can hardly make a nonfinite gradient out of finite ones."""
    cls = seen.classes.get(call.module, call.module)
    return any(part in cls for part in _TAME)


def cannot_have_made(seen: Seen, call: Call, row: int) -> bool:
    """Whether backward of `call` cannot have made the nonfinite gradient `row`: finite products far from overflow.

    The largest element of it is at most (elements of the gradient that arrived) * (its largest) * (the largest input
    or weight). Then other code read the same tensor.
    """
    cls = seen.classes.get(call.module, "")
    if call.children or not _LINEAR_MAP.fullmatch(cls) or not call.outputs:
        return False
    # A gradient that never arrived (the graph does not lead through this call) made nothing.
    arrived = [r for r in call.grad_outputs if r < row]
    read = [*call.inputs, *seen.own_parameters(call, int(seen.step[row]))]
    if any(seen.bad[r] for r in (*arrived, *read, *call.outputs)):
        return False
    largest = min(LARGEST.get(seen.site(r).dtype, 1e4) for r in (row, *arrived, *call.outputs))
    factor = max([1.0, *(seen.absmax(r) for r in read)])
    return all(seen.absmax(r) * int(seen.trace.events["numel"][r]) * factor < largest / 16 for r in arrived)


def weights_changed(seen: Seen, row: int) -> bool:
    """Whether a linear map put out what its input and its weights, as they were seen, cannot give: NaN or infinity.

    Products of finite values far from overflow hold neither: the weights were written after they were looked at, or a
    hook changed the output.
    """
    call = seen.call_of(row)
    if call is None or seen.role[row] != Role.OUTPUT or seen.phase[row] != Phase.FORWARD or not seen.bad[row]:
        return False
    if call.children or not _LINEAR.fullmatch(seen.classes.get(call.module, "")) or not call.inputs:
        return False
    own = seen.own_parameters(call, int(seen.step[row]))
    if not own or any(seen.bad[r] for r in (*call.inputs, *own)):
        return False
    if seen.infinite[row] and seen.absmax(row) > LARGEST.get(seen.site(row).dtype, 1e4) / 16:
        return False  # values near the end of the range stand beside the infinities: they left it
    largest = min(LARGEST.get(seen.site(r).dtype, 1e4) for r in (row, *call.inputs, *own))
    terms = max(int(seen.trace.events["numel"][r]) for r in (*call.inputs, *own))
    factors = [max(1.0, *(seen.absmax(r) for r in rows)) for rows in (call.inputs, own)]
    return factors[0] * factors[1] * terms < largest / 16


def made_elsewhere(seen: Seen, row: int) -> bool:
    """Whether a parameter's nonfinite gradient cannot come from the calls of the module that owns it."""
    site = seen.site(row)
    if seen.role[row] != Role.GRAD or seen.phase[row] != Phase.BACKWARD or site.module is None:
        return False
    if site.slot.rpartition(".")[2] not in ("weight", "bias"):  # weight_norm and its like keep others
        return False
    mine = [call for call in seen.calls(int(seen.step[row])).values() if call.module == site.module]
    return bool(mine) and all(cannot_have_made(seen, call, row) for call in mine)


def differentiated_before(seen: Seen, row: int) -> bool:
    """Whether the step asked for a gradient as a value (autograd.grad) before `row`."""
    return any(_is_value(seen, int(r)) for r in seen.rows(int(seen.step[row]), Role.LOSS) if r < row)


def asked_for(seen: Seen, row: int) -> list[int]:
    """Gradients before `row` that the step computed as values: a penalty, a force, an attack may be made of them."""
    step = int(seen.step[row])
    passes = [int(r) for r in seen.rows(step, Role.LOSS) if r < row]
    if not any(_is_value(seen, each) for each in passes):
        return []
    found = []
    for each, following in zip(passes, [*passes[1:], row], strict=True):
        if _is_value(seen, each):
            gradients = seen.rows(step, Role.GRAD_OUTPUT, Role.GRAD_INPUT)
            found += [int(r) for r in gradients if each < r < following]
    return found


def _is_value(seen: Seen, loss: int) -> bool:
    return seen.site(loss).slot.startswith("differentiated value")


def _code_around(seen: Seen, call: Call, row: int) -> Call | None:
    """The nearest call around that has code of its own; None where a gradient may have gone past all of them."""
    calls = seen.calls(int(seen.step[row]))
    if differentiated_before(seen, row):
        return None
    around = (calls[key] for key in _around(calls, call))
    return next((each for each in around if seen.classes.get(each.module) != "Sequential"), None)


def _around(calls: dict[int, Call], call: Call) -> list[int]:
    """Keys of the calls around one, innermost first."""
    keys = []
    while call.parent is not None:
        keys.append(call.parent)
        call = calls[call.parent]
    return keys
