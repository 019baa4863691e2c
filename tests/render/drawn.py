"""Traces of every size and sort for pictures and pages: made by hand, no model and no torch."""

from __future__ import annotations

import dataclasses

import numpy as np

from nantrace.events import EVENT, Columns, ModuleEntry, Phase, Role, Site, Trace
from tests.diagnosis.written import NAN, NEGINF, POSINF, Written


def overflow(steps: int = 3, module: str = "block.1.ff.wo") -> Trace:
    """Two blocks in float16 of which the second overflows in the last step; a gradient scaler skips that step."""
    written = Written("float16", block="ModuleList", block__0="Block", block__1="Block")
    written.modules[module] = "Linear"
    for step in range(steps):
        last = step == steps - 1
        size = 2.0**step
        written.batch("x")
        for name in ("block.0.ff.wi", "block.0.ff.wo", "block.1.ff.wi", module):
            written.param(f"{name}.weight", low=0.25, high=0.5)
        with written.call("", made=NAN if last else {}):
            with written.call("block.0"):
                written.run("block.0.ff.wi", made={"size": 10 * size})
                written.run("block.0.ff.wo", made={"size": 100 * size})
            with written.call("block.1", made=POSINF if last else {}):
                written.run("block.1.ff.wi", made={"size": 1380.0 * size})
                written.run(module, made={"size": 60000.0, "posinf": 5 if last else 0})
        written.loss(**(NAN if last else {}))
        for name in (module, "block.0.ff.wo"):
            written.grad(f"{name}.weight", size=3.0 * size, **(NAN if last else {}))
        loss = float("nan") if last else 2.0 / size
        update = {"attempted": 1, "committed": int(not last), "skipped": int(last)}
        written.end(loss=loss, lr=0.01, scale_before=65536.0, scale_after=32768.0, seconds=0.01, **update)
    trace = written.trace()
    return dataclasses.replace(trace, steps=trace.steps[:steps], path="step.h5")


def clean() -> Trace:
    written = Written("float32")
    with written.call(""):
        written.run("head")
    written.loss()
    return written.trace()


def empty() -> Trace:
    return Trace(np.zeros(0, EVENT), ())


def one_event(**bad: int) -> Trace:
    written = Written()
    written.row("head", Phase.FORWARD, Role.OUTPUT, "output", **bad)
    return dataclasses.replace(written.trace(), steps=())


def all_nan() -> Trace:
    written = Written("float16")
    every = {"nan": 8}
    written.batch("x", **every)
    with written.call("", every, every):
        written.run("head", every, every)
    written.loss(**every)
    written.grad("head.weight", **every)
    return dataclasses.replace(written.trace(), steps=({"step": 0, "loss": float("nan")},))


def masked() -> Trace:
    written = Written()
    with written.call(""):
        written.run("mask", made=NEGINF)
    written.loss()
    return written.trace()


def wide(modules: int, steps: int = 1, born: float | None = None) -> Trace:
    """`modules` linear modules, five a layer, 5 events each in each step; the last step overflows at part `born`."""
    parts = ("ln", "attn.q", "attn.k", "mlp.wi", "mlp.wo")
    names = [f"layers.{number // 5}.{parts[number % 5]}" for number in range(modules)]
    shape = (8, 64)
    sites = [Site(name, Phase.FORWARD, Role.PARAM, "weight", "float16", (64, 64)) for name in names]
    for name in names:
        sites.append(Site(name, Phase.FORWARD, Role.INPUT, "args[0]", "float16", shape))
        sites.append(Site(name, Phase.FORWARD, Role.OUTPUT, "output", "float16", shape))
    sites.append(Site(None, Phase.LOSS, Role.LOSS, "loss", "float32", ()))
    for name in reversed(names):
        sites.append(Site(name, Phase.BACKWARD, Role.GRAD_OUTPUT, "output", "float16", shape))
        sites.append(Site(name, Phase.BACKWARD, Role.GRAD, f"{name}.weight", "float16", (64, 64)))
    events = _events(len(sites), modules, steps)
    if born is not None:
        first = int(len(events) - len(sites) * (1 - born))
        events["nan"][first + 1 :], events["posinf"][first] = 12, 12
        events["finite"][first:], events["first_bad"][first:] = 500, 3
    ledger = tuple(
        {"step": n, "first_seq": n * len(sites) + 1, "events": len(sites), "loss": 1.0} for n in range(steps)
    )
    entries = tuple(ModuleEntry(name, "Linear") for name in ("", *names))
    return Trace(events, tuple(sites), entries, ledger, {"torch": "2.13.0", "device": "cpu"})


def _events(sites: int, modules: int, steps: int) -> np.ndarray:  # type: ignore[type-arg]
    count = sites * steps
    events = np.zeros(count, EVENT)
    events["seq"] = np.arange(1, count + 1)
    events["step"] = np.repeat(np.arange(steps), sites)
    events["site"] = np.tile(np.arange(sites), steps)
    call = np.zeros(sites, dtype=np.int64)
    call[modules : 3 * modules] = np.repeat(np.arange(1, modules + 1), 2)
    call[3 * modules + 1 :: 2] = np.arange(modules, 0, -1)
    later = np.arange(steps)[:, None] * modules
    events["call"] = np.where(call > 0, call + later, 0).ravel()
    events["numel"] = events["finite"] = 512
    size = np.tile(10 ** np.linspace(-1, 3, sites), steps)
    events["min"], events["max"], events["absmin"] = -0.9 * size, size, 1e-4 * size
    events["first_bad"], events["columns"] = -1, Columns.full()
    return events
