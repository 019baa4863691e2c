"""Keeps the ranks of a distributed step together: one that replayed it alone would wait in a collective forever.

Ranks may need different numbers of replays: one is clean, another is not. Whether a step communicates is seen in its
first replay, by the collectives that each process group counts; before each further one the ranks of those groups ask
each other whether anybody wants it, and those who don't run the step along. A step that communicates with nobody is
each rank's own business.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from nantrace.errors import ReplayError

_UNCOUNTED = -1
#: The model that was replayed last, and the groups over which its step communicated.
_last: tuple[weakref.ref[torch.nn.Module], tuple[Any, ...]] | None = None


class Ranks:
    """The processes that run this step together.

    Args:
        model: of the step.
        alike: replays that they run at the same time must be of the same kind.
    """

    def __init__(self, model: torch.nn.Module, alike: bool = False) -> None:
        self._model, self._alike = model, alike
        self._groups: tuple[Any, ...] = ()  # in the order in which all ranks made them

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """The room for the first run, which shows over which groups the step communicates.

        Raises:
            ReplayError: a group does not count its collectives, so that it cannot be told.
        """
        before = _counted()
        yield
        after = _counted()
        uncounted = [group for group, number in after.items() if number == _UNCOUNTED]
        if uncounted:
            raise ReplayError(
                f"The step runs on {torch.distributed.get_world_size()} ranks over the backend "
                f"{torch.distributed.get_backend(uncounted[0])!r}, which does not count its collectives: whether the "
                f"ranks need each other's replays cannot be told; replay the step over gloo or nccl, or in one process."
            )
        self._groups = tuple(group for group, number in after.items() if number != before.get(group, 0))
        global _last
        _last = (weakref.ref(self._model), self._groups)

    def go_on(self, what: str | None) -> bool:
        """Whether there is another replay: `what` this rank wants, None if it has done.

        Raises:
            ReplayError: the ranks want different ones, and they have to be alike.
        """
        said = _number(what or "") if self._alike else 0
        wanted, most, least = int(what is not None), said, said
        for group in self._groups:
            wanted, most, least = _largest(group, wanted, most, -least)
            least = -least
        if most != least and wanted:
            self._groups = ()  # each of them raises this
            raise ReplayError(
                f"The ranks of this step want different replays next (this one: {what or 'none'}), which would not "
                f"communicate alike: name what applies on every rank, with axes= and module= and smallest=False."
            )
        return bool(wanted)


def meet(model: torch.nn.Module, wants: bool, asked: str) -> bool:
    """Whether a rank wants more replays. All ranks come here whose steps communicated when they were last replayed.

    Args:
        model: of the step.
        wants: whether this rank does.
        asked: what it was started with; all were to be started alike.

    Raises:
        ReplayError: on every rank, if they were not.
    """
    groups = _last[1] if _last is not None and _last[0]() is model else ()
    said = _number(asked)
    wanted, most, least = int(wants), said, said
    for group in groups:
        wanted, most, least = _largest(group, wanted, most, -least)
        least = -least
    if most != least:
        raise ReplayError(
            f"The ranks of this step were started differently (this one: {asked or 'without options'}), and would wait "
            f"for each other: start every rank with the same options."
        )
    return bool(wanted)


def _counted() -> dict[Any, int]:
    """How many collectives each process group has begun; only groups of several ranks, in the order of their making."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return {}
    groups = list(distributed.distributed_c10d._world.pg_map)
    return {group: _count(group) for group in groups if group.size() > 1}


def _count(group: Any) -> int:
    try:
        return sum(int(backend._get_sequence_number_for_group()) for backend in _backends(group).values())
    except RuntimeError:  # not every backend has such a number
        return _UNCOUNTED


def _backends(group: Any) -> dict[torch.device, Any]:
    """A group may have a backend for each type of device."""
    return {device: group._get_backend(device) for device in group._device_types}


def _largest(group: Any, *numbers: int) -> list[int]:
    """Of each number the largest that a rank of the group has."""
    devices = {device.type for device in _backends(group)}
    tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu" if "cpu" in devices else sorted(devices)[0])
    with torch.no_grad():
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=group)
    return [int(number) for number in tensor.tolist()]


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
