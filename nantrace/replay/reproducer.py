"""A short script and a tensor file that give birth to the same nonfinite value with torch alone.

One op with its real inputs, taken in a replay just before the op ran, under the switches and the random stream that it
ran under; the autocast state of the step is recorded beside it. For a backward op it is the aten op that ran in the
node. It is run once in a fresh process before it is handed over, and the result says whether it gave the same bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from nantrace.capture.surroundings import eager_instead_of_compiled, own_path, rank
from nantrace.diagnosis.verdict import Origin, Verdict
from nantrace.errors import ReplayError
from nantrace.lineage import Lineage, OpEvent
from nantrace.replay.keeper import Keeper, watching_autocast
from nantrace.replay.replays import Replays, called, replay_more
from nantrace.replay.step import Step

_SECONDS = 300
#: Ops that torch brings along itself.
_TORCHS_OWN = ("aten", "prims", "quantized", "mkldnn", "_c10d_functional", "sparse")
_SCRIPT = '''"""{title}

{line}
{autocast}
Needs torch alone; made with torch {torch}.
Exit code 0: the same value with the same bits; 1: nothing nonfinite; 2: other bits.
"""

import os

import torch

here = os.path.dirname(os.path.abspath(__file__))
kept = torch.load(os.path.join(here, "inputs.pt"), weights_only=True)


def unpacked(value):
    if isinstance(value, list):
        return [unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "generator" in value:
        return torch.Generator(value["of"]).set_state(value["generator"])
    if "device" in value:
        return torch.device(value["device"])
    return complex(*value["complex"]) if "complex" in value else getattr(torch, value["torch"])


args, kwargs = unpacked(kept["args"]), {{name: unpacked(value) for name, value in kept["kwargs"].items()}}
torch.set_num_threads(kept["threads"])
torch.set_default_dtype(unpacked(kept["default_dtype"]))
torch.set_float32_matmul_precision(kept["precision"])
torch.use_deterministic_algorithms(kept["deterministic"], warn_only=kept["warn_only"])
torch.utils.deterministic.fill_uninitialized_memory = kept["fill"]
torch.set_grad_enabled(kept["grad_mode"])
torch.set_rng_state(kept["random"])
if kept["random_cuda"] is not None:
    torch.cuda.set_rng_state(kept["random_cuda"])

out = torch.ops.{op}(*args, **kwargs)  # below autocast, as it ran: its inputs are cast already

results = [*(out if isinstance(out, (list, tuple)) else [out]), *(args[i] for i in {writes})]
results = [t for r in results for t in (r if isinstance(r, (list, tuple)) else [r]) if isinstance(t, torch.Tensor)]


def bits(tensor):
    plain = tensor.detach()
    plain = plain if plain.layout == torch.strided else plain.to_dense()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


floats = [t.float() if t.element_size() == 1 else t for t in results if t.is_floating_point() or t.is_complex()]
nan, inf = sum(int(t.isnan().sum()) for t in floats), sum(int(t.isinf().sum()) for t in floats)
equal = len(results) == len(kept["outputs"]) and all(map(same, results, kept["outputs"]))
print(f"{op}: {{nan}} nan, {{inf}} inf, {{'the same' if equal else 'OTHER'}} bits as in the step")
raise SystemExit(1 if not nan + inf else 0 if equal else 2)
'''


@dataclass(frozen=True)
class Reproducer:
    """What was written, and whether it does what it is for.

    Attributes:
        script: path of the script; its tensors lie beside it in inputs.pt.
        verified: whether a fresh process gave birth to the same nonfinite value with it, bit for bit.
        said: what that process printed last.
    """

    script: Path
    verified: bool
    said: str

    def __str__(self) -> str:
        end = "verified in a fresh process" if self.verified else "NOT verified, a fresh process did otherwise"
        return f"Wrote {self.script} ({end}: {self.said})"


def write_reproducer(folder: str | os.PathLike[str], step: Step, verdict: Verdict) -> Reproducer:
    """Write the op at which `verdict` puts the origin, with its real inputs, as a script.

    Takes two replays of the step: one finds the op again, the other keeps what it reads. The state comes back. All
    ranks of a step that communicates have to call this, each for a folder of its own: "folder.r00001".

    Args:
        folder: made if it is not there; `reproduce.py` and `inputs.pt` in it are replaced.
        step: the step that was bisected.
        verdict: its verdict; its origin must be an op.

    Raises:
        ReplayError: the verdict names no op, the op does not run again, or its inputs cannot be kept.
    """
    origin, problem = verdict.origin, _why_not(verdict)
    replay_more(step, problem and f"No reproducer: {problem}.")
    assert origin is not None
    with Replays(step, 2) as replays:
        keeper = _kept(replays, origin)
    target = Path(own_path(folder, rank()))
    try:
        target.mkdir(parents=True, exist_ok=True)
        torch.save(keeper.kept, target / "inputs.pt")
        script = target / "reproduce.py"
        script.write_text(_text(origin, keeper), encoding="utf-8")
    except OSError as failed:
        said = f"No reproducer: {target} cannot be written ({failed.strerror}): choose another folder."
        raise ReplayError(said) from None
    return _verified(script)


def _why_not(verdict: Verdict) -> str | None:
    origin = verdict.origin
    if origin is None or origin.op is None:
        return _why_no_op(verdict)
    library = origin.op.partition(".")[0]
    if library not in _TORCHS_OWN:
        return f"{origin.op} is an op of {library}, which torch alone cannot run"
    return None


def _why_no_op(verdict: Verdict) -> str:
    if verdict.status in ("clean", "expected"):
        return f"the verdict is {verdict.status}, there is no op to reproduce"
    if verdict.stage not in ("input", "state"):
        return f"the verdict ({verdict.status}) names no op to reproduce; bisect down to an op first"
    if verdict.stage == "state":
        bad = "the state was bad before the step began"
    else:
        bad = "a constant was bad" if verdict.cause == "bad_constant" else "the batch itself was bad"
    name = verdict.origin.tensor if verdict.origin is not None else None
    return f"{bad}{f' ({name})' if name else ''}, there is no op to reproduce"


def _kept(replays: Replays, origin: Origin) -> Keeper:
    """The op at the origin, with what it read and wrote."""
    recording, _ = replays.recorded("every op, to find the op again")
    event = _found(recording.lineage, origin)
    with replays.one("to keep what the op reads") as listener, watching_autocast() as autocast:
        keeper = Keeper(event.time, autocast)
        with eager_instead_of_compiled(), keeper:
            returned, error = called(replays.step)
        listener.ended(returned, error)
    if keeper.problem:
        raise ReplayError(f"No reproducer: {origin.op} cannot be run by torch alone, {keeper.problem}.")
    if keeper.kept is None or keeper.name != event.op:
        said = f"{origin.op} did not run again as operation {event.time}, the step is not deterministic"
        raise ReplayError(f"No reproducer: {said}.")
    return keeper


def _found(lineage: Lineage, origin: Origin) -> OpEvent:
    wanted = (origin.op, origin.module, origin.node, origin.phase, origin.where)
    for event in lineage.events:
        if (event.op, event.module, event.node, event.phase, str(event.where) if event.where else None) == wanted:
            return event
    loose = [e for e in lineage.events if (e.op, e.module, e.node) == wanted[:3]]
    if not loose:
        raise ReplayError(f"No reproducer: {origin.op} gave birth to nothing nonfinite when the step ran again.")
    return loose[0]


def _text(origin: Origin, keeper: Keeper) -> str:
    line = origin.where or "an unknown line"
    of = "and runs in backward at" if origin.own_line else "of the forward line"
    node = f"It belongs to {origin.node} {of} {line}." if origin.node else f"It ran at {line}."
    return _SCRIPT.format(
        title=f"{origin.op} gives birth to {origin.kind or 'a nonfinite value'} from its real inputs.",
        line=node.replace("\\", "/"),
        autocast=_autocast_in_words(keeper),
        torch=torch.__version__,
        op=keeper.overload,
        writes=list(keeper.writes),
    )


def _autocast_in_words(keeper: Keeper) -> str:
    assert keeper.kept is not None
    states = keeper.kept["autocast"]
    on = [
        f"{device} ({state['dtype'].removeprefix('torch.')})"
        for device, state in states.items()
        if device != "cache" and state["enabled"]
    ]
    cache = "on" if states["cache"] else "off"
    return f"Autocast in the step: {', '.join(on) or 'off'}; its cache was {cache}."


def _verified(script: Path) -> Reproducer:
    try:
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return Reproducer(script, False, f"it took longer than {_SECONDS} seconds")
    lines = (done.stdout.strip() or done.stderr.strip()).split("\n")
    return Reproducer(script, done.returncode == 0, lines[-1])
