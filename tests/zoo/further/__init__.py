"""More training steps with known answers, from training code as people write it: loops, guards, several optimizers.

Their answers were written down before any of them was run under the recorder. They check that the rules hold beyond the
cases from which the rules were learnt.
"""

from __future__ import annotations

from tests.zoo.case import Case
from tests.zoo.further import (
    arithmetic,
    averages,
    densities,
    fine,
    formulas,
    generative,
    geometry,
    given,
    graphs,
    guards,
    loops,
    marks,
    objectives,
    optimizers,
    physics,
    policies,
    recipes,
    sequences,
    signals,
    transforms,
)

_FIRST = (loops, guards, averages, optimizers, objectives, arithmetic, given)
_SECOND = (formulas, sequences, recipes, transforms, fine)
_AREAS = (signals, graphs, generative, policies, geometry, densities, physics, marks)

#: Every case, room by room.
CASES: tuple[Case, ...] = tuple(
    value for room in _FIRST + _SECOND + _AREAS for value in vars(room).values() if isinstance(value, Case)
)
