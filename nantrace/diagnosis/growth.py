"""Damage that grows before it is nonfinite: exploding updates, values that multiply block by block, huge weights.

Reads magnitudes of a module trace; the op or module that finally overflows is only the messenger of these.
"""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np

from nantrace.diagnosis.modules.seen import LARGEST, Seen
from nantrace.diagnosis.verdict import Origin, Verdict
from nantrace.events import Phase, Role, distinct

#: Largest parameter magnitude after one update over that before it, and after all updates so far over that before
#: the first: from these on an update counts as an explosion. Healthy training changes it by a few percent a step.
ONE_UPDATE, ALL_UPDATES = 10.0, 100.0
_BETWEEN_BLOCKS = 2.0
_NEAR_THE_END = 0.05  # of a dtype's range: another factor as between two blocks, or some, and it is used up
_FRACTION_OF_RANGE = {"float16": 0.15}


def exploded(seen: Seen, row: int) -> str | None:
    """The sentence that says how the parameters grew in the updates before `row`; None if they did not explode."""
    if seen.phase[row] == Phase.UPDATE:
        return None
    sizes = _parameter_sizes(seen, int(seen.step[row]))
    if len(sizes) < 2:
        return None
    largest = [size for size, _ in sizes]
    ratios = [after / before for before, after in pairwise(largest) if before > 0]
    total = max(largest) / largest[0] if largest[0] > 0 else 0.0
    if not ratios or (max(ratios) < ONE_UPDATE and total < ALL_UPDATES):
        return None
    size, name = max(sizes)
    return (
        f"The updates made the weights explode: the largest parameter magnitude was {largest[0]:.3g} before the first "
        f"step and {size:.3g} ({name}) after {len(sizes) - 1} update{'s' * (len(sizes) > 2)}, at most a factor "
        f"{max(ratios):.3g} in one."
    )


def _parameter_sizes(seen: Seen, step: int) -> list[tuple[float, str]]:
    """Largest finite parameter magnitude and its name: before the first step, then after each update before `step`."""
    steps = [int(s) for s in distinct(seen.step) if s < step]
    sizes = []
    latest: dict[str, float] = {}  # an optimizer writes its own parameters, not those of another
    before = seen.rows(steps[0], Role.PARAM, phases=[Phase.FORWARD]) if steps else np.array([], dtype=np.int64)
    for rows in [before] + [seen.rows(s, Role.PARAM, phases=[Phase.UPDATE]) for s in steps]:
        if rows.size:
            latest.update((seen.name(int(row)), seen.absmax(int(row))) for row in rows)
            sizes.append(max((size, name) for name, size in latest.items()))
    return sizes


def grew_by_block(seen: Seen, row: int) -> str | None:
    """A sentence when the output had been growing by a steady factor through the blocks before this one."""
    rows = _in_blocks_before(seen, row)
    sizes = [seen.absmax(r) for r in rows]
    if len(sizes) < 3 or min(sizes) <= 0:
        return None
    ratios = [after / before for before, after in pairwise(sizes)]
    if min(ratios) < _BETWEEN_BLOCKS or max(ratios) > 4 * min(ratios):
        return None
    middle = float(np.median(ratios))
    return (
        f"It is only the messenger: outputs grew by a factor of about {middle:.3g} a block, from {sizes[0]:.3g} in "
        f"{seen.site(rows[0]).module} to {sizes[-1]:.3g} in {seen.site(rows[-1]).module}."
    )


def one_block_before(seen: Seen, row: int) -> str | None:
    """How large the output of this layer's like in an earlier block was, and what that tells of the fault."""
    rows = _in_blocks_before(seen, row)
    if not rows:
        return None
    site, size = seen.site(rows[-1]), seen.absmax(rows[-1])
    told = f"For comparison, {site.module}, its like in an earlier block, put out values up to {size:.3g} in this step"
    limit = LARGEST.get(site.dtype)
    if limit is None:
        return f"{told}."
    if size < _NEAR_THE_END * limit:
        return f"{told}, far below the largest {site.dtype} value: they were not large there yet."
    return (
        f"{told}, {100 * size / limit:.0f} % of the largest {site.dtype} value: they were large there already, so look "
        "further up for where they grow."
    )


def _in_blocks_before(seen: Seen, row: int) -> list[int]:
    """Finite outputs before `row` of modules whose names differ from its own in numbers alone."""
    site = seen.site(row)
    if seen.role[row] != Role.OUTPUT or not site.module or not re.search(r"\d", site.module):
        return []
    pattern = _blockless(site.module)
    rows = [int(r) for r in seen.rows(int(seen.step[row]), Role.OUTPUT, phases=[site.phase]) if r < row]
    named = [r for r in rows if seen.site(r).slot == site.slot and seen.site(r).module != site.module]
    kind = seen.classes.get(site.module)
    named = [r for r in named if seen.classes.get(seen.site(r).module or "") == kind]
    return [r for r in named if _blockless(seen.site(r).module or "") == pattern and not seen.bad[r]]


def _blockless(module: str) -> str:
    return re.sub(r"\d+", "#", module)


def huge_parameters(seen: Seen, row: int) -> str | None:
    """A sentence when a parameter was huge before the step: the range of its dtype has no room for a product."""
    found = []
    for r in seen.rows(int(seen.step[row]), Role.PARAM, phases=[Phase.FORWARD]):
        dtype, size = seen.site(int(r)).dtype, seen.absmax(int(r))
        limit = LARGEST.get(dtype, 3.4e38) * _FRACTION_OF_RANGE.get(dtype, 1e-20)
        if size > min(limit, 1e10):
            found.append((size, seen.name(int(r)), dtype))
    if not found:
        return None
    size, name, dtype = max(found)
    others = f" ({len(found) - 1} more such)" if len(found) > 1 else ""
    return f"The parameter {name} was huge before the step: up to {size:.3g} in {dtype}{others}."


def zeroed_gradients(seen: Seen) -> Verdict | None:
    """Finite gradients that the optimizer saw as zeros: their norm overflowed, and clipping by it made 0 of them."""
    for step in distinct(seen.step):
        left = seen.rows(int(step), Role.GRAD, phases=[Phase.BACKWARD])
        taken = seen.rows(int(step), Role.GRAD, phases=[Phase.OPTIMIZER])
        if not left.size or not taken.size or any(seen.absmax(int(row)) for row in taken):
            continue
        size, row = max((seen.absmax(int(r)), int(r)) for r in left)
        dtype = seen.site(row).dtype
        elements = int(seen.trace.events["numel"][left].sum())
        if size == 0 or elements * size**2 < LARGEST.get(dtype, np.inf):
            continue
        origin = Origin(int(step), "post_backward", None, tensor=seen.name(row), kind="inf", dtype=dtype)
        evidence = (
            f"Every one of the {len(taken)} gradients was exactly 0 when the optimizer saw it, though backward left "
            f"finite values up to {size:.3g}.",
            f"The square of {size:.3g} does not fit {dtype}: a gradient norm overflows to inf, and clipping by it "
            "multiplies every gradient by 0. The norm itself is not in a module trace.",
        )
        advice = ("Compute the gradient norm in float64, or find what scales the loss up.",)
        return Verdict("contained", "gradients", "norm_overflow", origin, evidence, advice)
    return None
