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
    derivatives,
    fine,
    formulas,
    generative,
    geometry,
    given,
    graphs,
    guards,
    language,
    loops,
    marks,
    moments,
    objectives,
    optimizers,
    physics,
    places,
    policies,
    precision,
    recipes,
    recomputed,
    sequences,
    signals,
    slopes,
    supplied,
    transforms,
    unharmed,
)

_FIRST = (loops, guards, averages, optimizers, objectives, arithmetic, given)
_SECOND = (formulas, sequences, recipes, transforms, fine)
_AREAS = (signals, graphs, generative, policies, geometry, densities, physics, marks)
_TRAINING = (language, moments, precision, supplied, derivatives)
_ELSEWHERE = (recomputed, slopes, places, unharmed)

#: Every case, room by room.
CASES: tuple[Case, ...] = tuple(
    value
    for room in _FIRST + _SECOND + _AREAS + _TRAINING + _ELSEWHERE
    for value in vars(room).values()
    if isinstance(value, Case)
)
