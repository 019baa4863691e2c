"""Other tools on the same training step, each set up as its documentation shows. One that is missing is skipped.

`pip install -e ".[benchmarks]"` brings those that come as packages.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.debug_utils import DebugUnderflowOverflow

Step: TypeAlias = Callable[[], object]
#: (model, optimizer, step) -> a context in which the step that it gives is to be timed.
Mode: TypeAlias = Callable[[Any, Any, Step], contextlib.AbstractContextManager[Step]]


def peer_modes(folder: str) -> dict[str, Mode]:
    """The tools that are there, by name; what they write goes into `folder`."""
    found: dict[str, Mode] = {
        "torch detect_anomaly": detect_anomaly,
        "transformers DebugUnderflowOverflow": transformers_debug,
        "naive dispatch mode": naive_check,
    }
    for package, name, mode in (
        ("msprobe", "msprobe statistics, modules", msprobe_statistics(folder)),
        ("torchlens", "torchlens, the forward alone", torchlens_forward),
    ):
        if importlib.util.find_spec(package) is None:
            print(f"{name}: skipped, {package} is not installed", file=sys.stderr)
        else:
            found[name] = mode
    return found


@contextlib.contextmanager
def detect_anomaly(model: Any, optimizer: Any, step: Step) -> Iterator[Step]:
    with torch.autograd.detect_anomaly(check_nan=True):
        yield step


@contextlib.contextmanager
def transformers_debug(model: Any, optimizer: Any, step: Step) -> Iterator[Step]:
    before = {module: dict(module._forward_hooks) for module in model.modules()}
    DebugUnderflowOverflow(model, max_frames_to_save=5)
    try:
        yield step
    finally:  # it has no way to take its hooks back
        for module, hooks in before.items():
            module._forward_hooks.clear()
            module._forward_hooks.update(hooks)


class NaiveFiniteCheck(TorchDispatchMode):
    """Asks every output of every op at once whether it is finite, as one would write it in five minutes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                bool(torch.isfinite(leaf).all())
        return output


@contextlib.contextmanager
def naive_check(model: Any, optimizer: Any, step: Step) -> Iterator[Step]:
    with NaiveFiniteCheck():
        yield step


def msprobe_statistics(folder: str) -> Mode:
    """mindstudio-probe at level L0 (modules), task statistics: inputs, outputs and gradients, a JSON file a step."""

    @contextlib.contextmanager
    def mode(model: Any, optimizer: Any, step: Step) -> Iterator[Step]:
        os.environ.setdefault("MSPROBE_LOG_LEVEL", "3")  # errors alone; read when it is imported
        from msprobe.pytorch import PrecisionDebugger

        config = os.path.join(folder, "msprobe.json")
        with open(config, "w") as file:
            statistics = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
            options = {"task": "statistics", "level": "L0", "rank": [], "step": [], "statistics": statistics}
            json.dump({**options, "dump_path": os.path.join(folder, "msprobe")}, file)
        debugger = PrecisionDebugger(config_path=config)

        def dumped() -> None:
            debugger.start(model=model)
            step()
            debugger.stop()
            debugger.step()

        yield dumped

    return mode


@contextlib.contextmanager
def torchlens_forward(model: Any, optimizer: Any, step: Step) -> Iterator[Step]:
    """One logged forward, without backward and update: what it is compared with does more."""
    import torchlens
    from torchlens.options import CaptureOptions

    calls: list[tuple[Any, Any]] = []
    handle = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    step()
    handle.remove()
    args, kwargs = calls[0]
    yield lambda: torchlens.trace(model, args, kwargs, capture=CaptureOptions(unwrap_when_done=True))
