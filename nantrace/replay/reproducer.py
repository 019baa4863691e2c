"""A short script and a tensor file that give birth to the same nonfinite value with torch alone.

One op with its real inputs, taken in a replay just before the op ran, under the switches and the random stream that it
ran under. For a backward op it is the aten backward op itself. It is run once in a fresh process before it is handed
over, and the result says what came of that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nantrace.diagnosis.verdict import Origin, Verdict
from nantrace.errors import ReplayError
from nantrace.flow.values import planes
from nantrace.lineage import Lineage, OpEvent
from nantrace.replay.replays import Replays, called
from nantrace.replay.step import Step

_SECONDS = 300
_SCRIPT = '''"""{title}

{line}
Needs torch alone; made with torch {torch}.
"""

import os

import torch

here = os.path.dirname(os.path.abspath(__file__))
kept = torch.load(os.path.join(here, "inputs.pt"), weights_only=True)
torch.set_num_threads(kept["threads"])
torch.use_deterministic_algorithms(kept["deterministic"], warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = False
torch.set_rng_state(kept["random"])

op = torch.ops.{op}
with torch.no_grad(), torch.autocast("cpu", enabled=False):  # below autograd and autocast, as the op ran
    out = op(*kept["args"], **kept["kwargs"])

written = out if isinstance(out, (list, tuple)) else [out]
written = [t for t in (*written, *(kept["args"][i] for i in {writes}))]
tensors = [t for t in written for t in (t if isinstance(t, (list, tuple)) else [t]) if isinstance(t, torch.Tensor)]
floats = [t.float() if t.element_size() == 1 else t for t in tensors if t.is_floating_point() or t.is_complex()]
nan = sum(int(t.isnan().sum()) for t in floats)
inf = sum(int(t.isinf().sum()) for t in floats)
print(f"{op}: {{nan}} nan, {{inf}} inf")
raise SystemExit(0 if nan + inf else 1)
'''


@dataclass(frozen=True)
class Reproducer:
    """What was written, and whether it does what it is for.

    Attributes:
        script: path of the script; its tensors lie beside it in inputs.pt.
        verified: whether a fresh process gave birth to a nonfinite value with it.
        said: what that process printed last.
    """

    script: Path
    verified: bool
    said: str

    def __str__(self) -> str:
        end = "verified in a fresh process" if self.verified else "NOT verified, a fresh process did not fail"
        return f"Wrote {self.script} ({end}: {self.said})"


def write_reproducer(folder: str | os.PathLike[str], step: Step, verdict: Verdict) -> Reproducer:
    """Write the op at which `verdict` puts the origin, with its real inputs, as a script.

    Takes two replays of the step: one finds the op again, the other keeps what it reads. The state comes back.

    Args:
        folder: made if it is not there; `reproduce.py` and `inputs.pt` in it are replaced.
        step: the step that was bisected.
        verdict: its verdict; its origin must be an op.

    Raises:
        ReplayError: the verdict names no op, the op does not run again, or its inputs cannot be kept.
    """
    origin = verdict.origin
    if origin is None or origin.op is None:
        raise ReplayError(f"The verdict ({verdict.status}) names no op to reproduce; bisect down to an op first.")
    replays = Replays(step, 2)
    recording, _ = replays.recorded("every op, to find the op again")
    event = _found(recording.lineage, origin)
    keeper = _Keeper(event.time)
    with replays.one("to keep what the op reads") as listener:
        error = _run_as_recorded(replays.step, keeper)
        listener.ended(None, error)
    if keeper.kept is None or keeper.name != event.op:
        raise ReplayError(f"{origin.op} did not run again as operation {event.time}: the step is not deterministic.")
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        torch.save(keeper.kept, target / "inputs.pt")
        script = target / "reproduce.py"
        script.write_text(_text(origin, keeper), encoding="utf-8")
    except OSError as failed:
        raise ReplayError(f"{target} cannot be written ({failed.strerror}): choose another folder.") from None
    return _verified(script)


def _found(lineage: Lineage, origin: Origin) -> OpEvent:
    wanted = (origin.op, origin.module, origin.node, origin.phase, origin.where)
    for event in lineage.events:
        if (event.op, event.module, event.node, event.phase, str(event.where) if event.where else None) == wanted:
            return event
    loose = [e for e in lineage.events if (e.op, e.module, e.node) == wanted[:3]]
    if not loose:
        raise ReplayError(f"{origin.op} gave birth to nothing nonfinite when the step ran again.")
    return loose[0]


def _run_as_recorded(step: Step, keeper: _Keeper) -> Exception | None:
    with torch.compiler.set_stance("force_eager"), keeper:
        return called(step)[1]


class _Keeper(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts ops as the recorder does, and keeps the arguments of one of them before it runs."""

    def __init__(self, time: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._time, self._count = time, 0
        self.kept: dict[str, Any] | None = None
        self.name = ""
        self.overload = ""
        self.writes: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count += 1
        if self._count == self._time:
            self._keep(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _keep(self, func: Any, args: Any, kwargs: Any) -> None:
        schema = func._schema
        self.name = schema.name.replace("::", ".")
        self.overload = f"{self.name}.{schema.overload_name or 'default'}"
        written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        self.writes = tuple(i for i in written if i < len(args))
        with torch.no_grad():
            self.kept = {
                "args": _copied(args),
                "kwargs": _copied(kwargs),
                "random": torch.get_rng_state(),
                "threads": torch.get_num_threads(),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
            }


def _copied(value: Any) -> Any:
    """Copies with the same layout, as kernels depend on it; a copy on the CPU of what lies elsewhere."""
    if isinstance(value, torch.Tensor):
        plain = value.detach()
        if plain.layout == torch.strided and planes(plain):
            kept = torch.empty_strided(plain.size(), plain.stride(), dtype=plain.dtype, device=plain.device)
            return kept.copy_(plain) if 0 not in plain.stride() else plain.clone()
        return plain.clone()
    if isinstance(value, (list, tuple)):
        return [_copied(item) for item in value]
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value


def _text(origin: Origin, keeper: _Keeper) -> str:
    line = origin.where or "an unknown line"
    node = f"It belongs to {origin.node} of the forward line {line}." if origin.node else f"It ran at {line}."
    return _SCRIPT.format(
        title=f"{origin.op} gives birth to {origin.kind or 'a nonfinite value'} from its real inputs.",
        line=node.replace("\\", "/"),
        torch=torch.__version__,
        op=keeper.overload,
        writes=list(keeper.writes),
    )


def _verified(script: Path) -> Reproducer:
    try:
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return Reproducer(script, False, f"it took longer than {_SECONDS} seconds")
    lines = (done.stdout.strip() or done.stderr.strip()).split("\n")
    return Reproducer(script, done.returncode == 0, lines[-1])
