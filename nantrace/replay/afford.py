"""Whether every op of a step can be watched at once: estimated from a replay that watched none. Pure.

One pass over every op narrows more than several replays of modules, so it is given up only where it would take long and
much longer than the step itself.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Seconds that a pass over every op may take, however short the step is.
MOST_SECONDS = 60.0
#: Or this many times the step: narrowing by modules takes about as many replays.
MOST_TIMES = 5.0
_SLOWER = 2.0  # of large tensors, which are read once more
_SECONDS_AN_OP = 25e-6
_OPS_A_NODE = 4  # forward, two in backward, and a share of the update


@dataclass(frozen=True)
class Cost:
    """What a replay without probes took.

    Attributes:
        seconds: of the step alone.
        nodes: autograd nodes that it made: ops of its forward that are differentiated.
    """

    seconds: float = 0.0
    nodes: int = 0

    @property
    def ops(self) -> int:
        """About how many ops it dispatched."""
        return _OPS_A_NODE * self.nodes

    @property
    def pass_seconds(self) -> float:
        """About how long a pass over every op takes."""
        return _SLOWER * self.seconds + _SECONDS_AN_OP * self.ops


def is_affordable(cost: Cost) -> bool:
    """Whether every op may be watched before anything is narrowed."""
    return cost.pass_seconds <= max(MOST_SECONDS, MOST_TIMES * cost.seconds)


def in_words(cost: Cost) -> str:
    """The estimate, and what it means for the search; a time is named only where it matters, as no two runs agree."""
    bound = max(MOST_SECONDS, MOST_TIMES * cost.seconds)
    ops = f"about {cost.ops:,} ops"
    if not is_affordable(cost):
        return f"{ops} would take some {cost.pass_seconds:.0f} s in one replay, more than the {bound:.0f} s allowed"
    if cost.pass_seconds < bound / 10:
        return f"{ops}, which takes seconds, so no part of the step had to be left out"
    return (
        f"{ops}, estimated to take {cost.pass_seconds:.0f} s; only beyond {bound:.0f} s are modules searched first and "
        "a part of the step left out"
    )
