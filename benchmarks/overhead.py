"""What tracing costs: a training step of a GPT-2-like model with and without it, and the price of a recorded tensor.

Each mode's steps run between bare steps, in one process, again and again; the figure is the median over these pairs of
the ratio to their mean. Machines are noisy: read ratios, not seconds.

    python benchmarks/overhead.py [--device cuda] [--pairs 7] [--out benchmarks/results/overhead-cpu.csv]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from peers import Mode, Step, peer_modes
from rows import report, row
from transformers import GPT2Config, GPT2LMHeadModel

import nantrace
from nantrace.capture import lifecycle
from nantrace.capture.calls import CallRecorder
from nantrace.capture.tracer import Tracer


def nantrace_modes(path: str) -> dict[str, Mode]:
    """Every level of detail. All but the ledger read parameters and optimizer state, whatever the modules."""

    def tracer(**options: Any) -> Mode:
        @contextlib.contextmanager
        def mode(model: Any, optimizer: Any, step: Step) -> Iterator[Step]:
            with nantrace.trace(model, path, overwrite=True, optimizer=optimizer, on_nonfinite="ignore", **options):
                yield step

        return mode

    return {
        "nantrace all modules": tracer(),
        "nantrace all modules and ops": tracer(ops=True),
        "nantrace depth 1": tracer(depth=1),
        "nantrace root only": tracer(depth=0),
        "nantrace imported, off": lambda model, optimizer, step: contextlib.nullcontext(step),
    }


def language_model(device: str) -> tuple[Any, Any, Step]:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=6, n_embd=256, n_head=4, vocab_size=8192, n_positions=256)
    model = GPT2LMHeadModel(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, config.vocab_size, (4, 256), device=device)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def timed(device: str, step: Step) -> float:
    """Seconds for one step, the device's work included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


_IN_A_ROW = 3  # steps whose median is taken


def pair(device: str, mode: Mode, model: Any, optimizer: Any, step: Step) -> tuple[float, float]:
    """Seconds of a bare step, from some before and some after, and of a step inside the mode, after a first one.

    The end of a traced step, where rows are drained and written, falls into the next one's beginning and is timed.
    """
    before = several(device, step, _IN_A_ROW)
    with mode(model, optimizer, step) as traced:
        traced()
        inside = several(device, traced, _IN_A_ROW)
    step()  # the first step after a mode may have to warm up again
    return (before + several(device, step, _IN_A_ROW)) / 2, inside


_SEVERAL = 9


def several(device: str, step: Step, steps: int = _SEVERAL) -> float:
    """The median of a few steps, which takes a step's hiccups away and is over before the machine changes its pace."""
    return statistics.median(timed(device, step) for _ in range(steps))


def step_rows(device: str, pairs: int, only: str | None) -> Iterator[dict[str, Any]]:
    model, optimizer, step = language_model(device)
    for _ in range(2):
        step()
    with tempfile.TemporaryDirectory() as folder:
        every = {**nantrace_modes(os.path.join(folder, "step.h5")), **peer_modes(folder)}
        chosen = {name: mode for name, mode in every.items() if not only or only in name}
        ratios: dict[str, list[float]] = {name: [] for name in chosen}
        bare: list[float] = []
        for _ in range(pairs):
            for name, mode in chosen.items():
                outside, inside = pair(device, mode, model, optimizer, step)
                ratios[name].append(inside / outside)
                bare.append(outside)
        yield row("bare step", "ms", [1e3 * seconds for seconds in bare])
        for name, values in ratios.items():
            yield row(name, "ratio", values)


_SAMPLING = 8  # steps: of one in so many the ledger compares the weights as well


def ledger_rows(device: str, pairs: int) -> Iterator[dict[str, Any]]:
    """The ledger alone, which costs less than one step differs from the next.

    Two equal models step in turn, one of them traced, so that each traced step stands between two bare ones; for the
    second half of the steps the other one is traced. The same with neither traced says how far to trust the figure.
    The last row is the share of the step that passes within nantrace's own functions.
    """
    twins = [language_model(device), language_model(device)]
    ratios: dict[bool, list[float]] = {True: [], False: []}
    shares: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for (model, optimizer, step), (_, _, bare) in (twins, twins[::-1]):
            for traced, found in ratios.items():
                mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
                if traced:
                    path = os.path.join(folder, "ledger.h5")
                    mode = nantrace.trace(model, path, overwrite=True, optimizer=optimizer, stats="none")
                with mode, own_time() as spent:
                    for inside, own, outside in in_turn(device, step, bare, max(1, pairs // 2) * _SAMPLING, spent):
                        found.append(inside / outside)
                        shares += [own / outside] if traced else []
    yield row("nantrace ledger only", "ratio", ratios[True])
    yield row("a twin, nothing traced", "ratio", ratios[False])
    yield row("nantrace ledger only, its own functions", "share", shares)


def in_turn(
    device: str, step: Step, bare: Step, steps: int, spent: list[float]
) -> Iterator[tuple[float, float, float]]:
    """Of each step its seconds, those that were added to `spent`, and the mean of the bare steps on either side."""
    for _ in range(_SAMPLING):
        step()
        bare()
    before = timed(device, bare)
    for _ in range(steps):
        began = spent[0]
        inside = timed(device, step)
        own, after = spent[0] - began, timed(device, bare)
        yield inside, own, (before + after) / 2
        before = after


@contextlib.contextmanager
def own_time() -> Iterator[list[float]]:
    """Adds up, in a list of one number, the seconds of what PyTorch's hooks and wrapped methods call of nantrace."""
    spent = [0.0]
    places = ((lifecycle, "_tell_all"), (CallRecorder, "begin"), (CallRecorder, "end"))
    originals = [getattr(owner, name) for owner, name in places]

    def clocked(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - began

        return call

    try:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, clocked(original))
        yield spent
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def tensor_rows(device: str, pairs: int) -> Iterator[dict[str, Any]]:
    """Microseconds a recorded tensor, file included, on tensors so small that their arithmetic is free.

    The yardstick beside it reads each module's output in a forward hook as one would by hand: `aminmax`, two `item()`.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(100))).to(device)
    x = torch.randn(4, 8, device=device)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    costs, by_hand = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(pairs):
            before = several(device, step)
            with Tracer(model, path=os.path.join(folder, "step.h5"), overwrite=True) as tracer:

                def ended(tracer: Tracer = tracer) -> None:
                    step()
                    tracer.mark_step()

                inside = several(device, ended)
                recorded = tracer.trace.steps[-1]["events"]
            between = several(device, step)
            with extremes_by_hand(model) as extremes:
                reading = several(device, step)
                read = len(extremes) / _SEVERAL
            after = several(device, step)
            costs.append(1e6 * (inside - (before + between) / 2) / recorded)
            by_hand.append(1e6 * (reading - (between + after) / 2) / read)
    yield row("cost of a recorded tensor, file included", "us", costs)
    yield row("a bare forward hook with aminmax", "us", by_hand)
    yield row(
        "a recorded tensor to a bare hook", "ratio", [ours / bare for ours, bare in zip(costs, by_hand, strict=True)]
    )


@contextlib.contextmanager
def extremes_by_hand(model: torch.nn.Module) -> Iterator[list[tuple[float, float]]]:
    extremes: list[tuple[float, float]] = []

    def read(module: Any, args: Any, output: torch.Tensor) -> None:
        low, high = torch.aminmax(output.detach())
        extremes.append((low.item(), high.item()))

    handles = [module.register_forward_hook(read) for module in model.modules() if not list(module.children())]
    try:
        yield extremes
    finally:
        for handle in handles:
            handle.remove()


def surroundings(device: str) -> dict[str, Any]:
    host = f"{platform.machine()}, {torch.get_num_threads()} threads"
    where = torch.cuda.get_device_name() if device == "cuda" else host
    return {
        "device": where,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "nantrace": nantrace.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", help="only modes whose name contains this")
    parser.add_argument("--out", type=Path, help="CSV file; default benchmarks/results/overhead-DEVICE.csv")
    arguments = parser.parse_args()
    where = surroundings(arguments.device)
    rows = [
        {**measured, **where}
        for measured in (
            *tensor_rows(arguments.device, arguments.pairs),
            *ledger_rows(arguments.device, arguments.pairs),
            *step_rows(arguments.device, arguments.pairs, arguments.only),
        )
    ]
    report(rows, arguments.out or Path(__file__).parent / "results" / f"overhead-{arguments.device}.csv")


if __name__ == "__main__":
    main()
