"""The order between streams that clean, write and fetch rows, checked on a machine that only keeps its clocks.

Each stream has a vector clock: what it runs comes after all that it was told to wait for, and after all that the host
had seen done.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nantrace.stats import rows as rows_room
from nantrace.stats.rows import Block, Rows

Clock = dict[int, int]  # stream -> how many of its operations have come before
SIZE = 4


class Stream:
    """A stream of PyTorch's, whose id is a small number, or a user's, whose id is its handle."""

    def __init__(self, name: int, handle: int, foreign: bool) -> None:
        self.name, self.cuda_stream, self.stream_id = name, handle, handle if foreign else name
        self.clock: Clock = {}
        self.gone = False

    def run(self, machine: Machine) -> Clock:
        """The clock of an operation that is launched now."""
        assert not self.gone, "the stream was destroyed"
        merge(self.clock, machine.host)
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return dict(self.clock)

    def wait_event(self, event: Event) -> None:
        assert not self.gone, "the stream was destroyed"
        merge(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        assert not other.gone, "the stream was destroyed"
        merge(self.clock, other.clock)


class Event:
    def __init__(self) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream) -> None:
        assert not stream.gone, "the stream was destroyed"
        self.clock = dict(stream.clock)


class Machine:
    """A device that writes down, for each block, what happened to it in which order of launching."""

    def __init__(self) -> None:
        self.host: Clock = {}
        self.streams = [Stream(name, name * 8, False) for name in range(3)]
        self.current = self.streams[0]
        self.happened: list[tuple[str, int, int, Clock]] = []  # what, to which block, on which stream, when
        self.kept: list[tuple[int, int]] = []  # blocks and the streams that their memory is kept for

    def does(self, what: str, block: Block | torch.Tensor) -> None:
        rows = block.rows if isinstance(block, Block) else block
        clock = self.current.run(self)
        self.happened.append((what, rows.data_ptr(), self.current.name, clock))


def merge(clock: Clock, other: Clock) -> None:
    for name, count in other.items():
        clock[name] = max(clock.get(name, 0), count)


def came_before(first: tuple[str, int, int, Clock], then: tuple[str, int, int, Clock]) -> bool:
    return first[3][first[2]] <= then[3].get(first[2], 0)


def on(machine: Machine, patch: pytest.MonkeyPatch) -> Rows:
    """Rows on the machine's device, in memory of the CPU."""
    patch.setattr(torch.cuda, "current_stream", lambda device=None: machine.current)
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(
        torch.Tensor, "record_stream", lambda rows, s: machine.kept.append((rows.data_ptr(), s.name)), raising=False
    )
    clean, cat = Rows._clean, torch.cat

    def cleaned(self: Rows, block: Block) -> None:
        machine.does("clean", block)
        clean(self, block)

    def gathered(parts: list[torch.Tensor]) -> torch.Tensor:
        for part in parts:
            machine.does("fetch", part)
        return cat(parts)

    patch.setattr(Rows, "_clean", cleaned)
    patch.setattr(rows_room.torch, "cat", gathered)
    rows = Rows(torch.device("cpu"), SIZE, (0, 7))
    rows._cuda, rows._stream = True, lambda device: machine.current.cuda_stream
    return rows


def write(machine: Machine, rows: Rows, count: int) -> None:
    slot, block = rows.take(count)
    begin = slot % SIZE
    assert begin + count <= SIZE and (block.rows[begin : begin + count] == torch.tensor([0, 7])).all()
    block.rows[begin : begin + count] = slot
    machine.does("write", block)
    rows.wrote(block)


def drain(machine: Machine, rows: Rows) -> list[list[int]]:
    written = rows.written()
    numbers = rows.fetch(written)
    merge(machine.host, machine.current.clock if written.used else {})  # the copy to the host waits
    rows.reuse(written)
    return numbers


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Machine, Rows]]:
    machine = Machine()
    yield machine, on(machine, monkeypatch)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, SIZE)),
        st.tuples(st.just("switch"), st.integers(0, 2)),
        st.tuples(st.just("foreign"), st.integers(0, 1)),
        st.tuples(st.just("drain"), st.just(0)),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=150)
@given(STEPS)
def test_cleaning_writing_and_fetching_a_block_never_meet(steps: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine()
        rows = on(machine, patch)
        for what, number in [*steps, ("drain", 0)]:
            if what == "write":
                write(machine, rows, number)
            elif what == "switch":
                machine.current = machine.streams[number]
            elif what == "foreign":  # the user's streams come and go, and their handles come again
                foreign = Stream(10 + len(machine.streams), 8000 + number, True)
                for stream in machine.streams[3:]:
                    stream.gone = True
                machine.streams.append(foreign)
                machine.current = foreign
            else:
                if machine.current.gone:
                    machine.current = machine.streams[0]
                drain(machine, rows)
        for i, then in enumerate(machine.happened):
            for first in machine.happened[:i]:
                if first[1] == then[1] and {first[0], then[0]} != {"write"}:
                    assert came_before(first, then), (first, then)


def test_the_numbers_of_a_row_are_its_own_after_blocks_were_used_again(device: tuple[Machine, Rows]) -> None:
    machine, rows = device
    for _ in range(2):
        for count in (3, 2, 4):  # rows 0 to 2, 4 and 5, 8 to 11
            write(machine, rows, count)
        numbers = drain(machine, rows)
        assert [row[0] for row in numbers] == [0, 0, 0, 0, 4, 4, 0, 0, 8, 8, 8, 8]
    assert len({block for _, block, _, _ in machine.happened}) == 3


def test_rows_that_were_given_back_are_the_next_ones(device: tuple[Machine, Rows]) -> None:
    machine, rows = device
    rows.take(2)
    rows.give_back(2)
    write(machine, rows, 1)
    assert len(drain(machine, rows)) == 1 and drain(machine, rows) == []


def test_a_stream_waits_for_a_block_once_and_an_event_follows_only_launches_on_the_users_streams(
    device: tuple[Machine, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, rows = device
    waits, records = [], []
    monkeypatch.setattr(Stream, "wait_event", lambda stream, event: waits.append(stream.name))
    monkeypatch.setattr(Event, "record", lambda event, stream: records.append(stream.name))
    for name in (0, 0, 1, 1):
        machine.current = machine.streams[name]
        write(machine, rows, 1)
    assert waits == [0, 1] and records == [0]  # the record is that of the cleaning
    machine.current = Stream(9, 8000, True)
    drain(machine, rows)
    for _ in range(3):
        write(machine, rows, 1)
    assert records == [0, 9, 9, 9]


def test_memory_of_a_dropped_block_is_kept_for_the_streams_that_write_it(device: tuple[Machine, Rows]) -> None:
    machine, rows = device
    for name in (0, 1):
        machine.current = machine.streams[name]
        write(machine, rows, 1)
    assert [name for _, name in machine.kept] == [0, 1] and len(set(machine.kept)) == 2
