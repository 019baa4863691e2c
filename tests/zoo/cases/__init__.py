"""Training steps that go nonfinite, or look as if they did, sorted into rooms by kind.

Each is written from the mechanism that a public report describes (`source`); answers were checked op by op on
torch 2.13 for CPU, where other builds may name an equivalent kernel.
"""

from __future__ import annotations

from tests.zoo.case import Case
from tests.zoo.cases import amp, attention, backward, evaluation, forward, half, harmless, loss, state, updates

_ROOMS = (forward, half, attention, state, loss, backward, amp, updates, evaluation, harmless)

#: Every case, room by room.
CASES: tuple[Case, ...] = tuple(value for room in _ROOMS for value in vars(room).values() if isinstance(value, Case))
