"""More training steps with known answers, from training code as people write it: loops, guards, several optimizers.

Their answers were written down before any of them was run under the recorder. They check that the rules hold beyond the
cases from which the rules were learnt.
"""

from __future__ import annotations

from tests.zoo.case import Case
from tests.zoo.further import arithmetic, averages, given, guards, loops, objectives, optimizers

_ROOMS = (loops, guards, averages, optimizers, objectives, arithmetic, given)

#: Every case, room by room.
CASES: tuple[Case, ...] = tuple(value for room in _ROOMS for value in vars(room).values() if isinstance(value, Case))
