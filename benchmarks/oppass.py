"""What the op pass costs: the flow of nonfinite values through a whole step, on a GPT-2-like model and on tiny tensors.

Pairs within one process, as in overhead.py. The tiny model's figures are microseconds an op, the recorder's start and
end included; an empty dispatch mode beside it says what PyTorch itself takes for calling back into Python. They are the
thread's own time; machines differ by half in them from minute to minute, in the ratio of the two hardly: compare that.

    python benchmarks/oppass.py [--pairs 15] [--out benchmarks/results/oppass-cpu.csv]
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from overhead import language_model, pair, surroundings
from peers import Step
from rows import report, row
from torch.utils._python_dispatch import TorchDispatchMode

from nantrace.flow.recorder import OpRecorder


class EmptyMode(TorchDispatchMode):
    """Calls every op and does nothing else."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def recording(model: Any, optimizer: Any, step: Step) -> Iterator[Step]:
    with OpRecorder(model, optimizer=optimizer):
        yield step


def step_rows(pairs: int) -> Iterator[dict[str, Any]]:
    model, optimizer, step = language_model("cpu")
    for _ in range(2):
        step()
    ratios = []
    for _ in range(pairs):
        outside, inside = pair("cpu", recording, model, optimizer, step)
        ratios.append(inside / outside)
    yield row("op pass, GPT-2-like step", "ratio", ratios)


def op_rows(pairs: int) -> Iterator[dict[str, Any]]:
    """A model of 60 modules on 4 x 8 elements, with AdamW parameter by parameter: about 1,200 ops a step."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.LayerNorm(8)) for _ in range(20)]
    model = torch.nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    x = torch.randn(4, 8)

    def step() -> None:
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def recorded() -> OpRecorder:
        with OpRecorder(model, x, optimizer=optimizer) as recorder:
            step()
        return recorder

    def in_empty_mode() -> None:
        with EmptyMode():
            step()

    step()
    ops = recorded().time
    ours: list[float] = []
    empty: list[float] = []
    for _ in range(pairs * 4):
        ours_again, empty_again = _beyond(step, (recorded, in_empty_mode))
        ours.append(ours_again / ops * 1e6)
        empty.append(empty_again / ops * 1e6)
    torch.set_num_threads(threads)
    yield row("op pass, tiny tensors", "us an op", ours)
    yield row("empty dispatch mode, tiny tensors", "us an op", empty)
    yield row("op pass to an empty mode, tiny tensors", "ratio", [a / b for a, b in zip(ours, empty, strict=True)])


def _beyond(bare: Callable[[], Any], others: tuple[Callable[[], Any], ...]) -> list[float]:
    """Seconds that each of `others` takes beyond `bare`, all within some milliseconds of each other.

    A machine changes its speed within seconds, by half and more: each goes there and back again, so that what drifts
    meets all alike.
    """
    there = [_seconds(each) for each in (bare, *others)]
    back = [_seconds(each) for each in (*reversed(others), bare)]
    first, *rest = [a + b for a, b in zip(there, reversed(back), strict=True)]
    return [(each - first) / 2 for each in rest]


def _seconds(do: Callable[[], Any]) -> float:
    """Of this thread's own time: what other processes take in between is nobody's cost. All runs on one thread."""
    start = time.thread_time()
    do()
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "oppass-cpu.csv")
    arguments = parser.parse_args()
    measured = [*op_rows(arguments.pairs), *step_rows(arguments.pairs)]
    rows = [{**each, **surroundings("cpu")} for each in measured]
    report(rows, arguments.out)


if __name__ == "__main__":
    main()
