"""The axes of a matrix: when each can apply to a step, and how the one thing is changed for one run.

Knows no table and no order of runs. What a change touches is put back by itself or by the snapshot's `restore`, after
whatever the run came to.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nantrace.capture.lifecycle import Lifecycle, StepListener
from nantrace.capture.sites import is_compiled, watched_modules
from nantrace.errors import ReplayError
from nantrace.replay.change.precision import FLOATING, HALF, InFloat32, autocast_as, cast, castable
from nantrace.replay.observed import Observed
from nantrace.replay.snapshot import Snapshot, too_large
from nantrace.replay.step import Step

#: By how much the loss scale is divided in the row "scale lowered".
SCALE_DIVISOR = 1024.0
_SPREAD = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


@dataclass(frozen=True)
class Scene:
    """What the axes look at and change.

    Attributes:
        step: the step.
        snapshot: of its state.
        seen: what a run of the step as it was showed.
        module: FQN of the module that is to run in float32, if there is one.
        other_batch: what the row "another batch" hands to the step, None if no other was given.
    """

    step: Step
    snapshot: Snapshot
    seen: Observed
    module: str | None = None
    other_batch: Any = None

    @functools.cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Floating-point types of model, batch and optimizer state."""
        return frozenset(tensor.dtype for tensor in castable(self.snapshot, FLOATING))

    @functools.cached_property
    def compiles(self) -> bool:
        """Whether the step compiles something: its model, a module that it reaches, or a function."""
        reached = (*self.snapshot.objects(nn.Module), *self.snapshot.objects(type(_marked)))
        return is_compiled(self.step.model) or any(_compiled(each) for each in reached) or self.seen.compiled

    @property
    def uses_half(self) -> bool:
        return bool(self.seen.regions) or bool(self.dtypes & set(HALF))


def _marked() -> None:
    """A function, for its type."""


def _compiled(thing: Any) -> bool:
    own = vars(thing) if hasattr(thing, "__dict__") else {}
    return "_torchdynamo_orig_callable" in own or "_orig_mod" in own.get("_modules", {})


@dataclass(frozen=True)
class Axis:
    """One thing that can be changed.

    Attributes:
        refuse: why it cannot apply, "" if it can.
        words: what exactly is changed.
        change: the room in which the given step runs with the change.
        eager: compiled code runs eagerly in this row, as the change would not reach into it.
    """

    refuse: Callable[[Scene], str]
    words: Callable[[Scene], str]
    change: Callable[[Scene], contextlib.AbstractContextManager[Step]]
    eager: bool = True


# ---------------------------------------------------------------------------------------------------- autocast, dtypes
def _refuse_autocast_off(scene: Scene) -> str:
    return "" if scene.seen.regions else "the step enters no autocast"


@contextlib.contextmanager
def _autocast_off(scene: Scene) -> Iterator[Step]:
    with autocast_as(lambda dtype: None):
        yield scene.step


def _refuse_bfloat16(scene: Scene) -> str:
    if not scene.uses_half:
        return "the step uses no half precision"
    used = set(scene.seen.regions) | (scene.dtypes & set(HALF))
    if used == {torch.bfloat16}:
        return "the half precision of the step is bfloat16 already"
    return _refuse_cast(scene) if torch.float16 in scene.dtypes else ""


@contextlib.contextmanager
def _bfloat16(scene: Scene) -> Iterator[Step]:
    source = (torch.float16,)
    with autocast_as(lambda dtype: torch.bfloat16), cast(castable(scene.snapshot, source), source, torch.bfloat16):
        yield scene.step


def _refuse_float32(scene: Scene) -> str:
    if not scene.uses_half and scene.dtypes <= {torch.float32}:
        return "the step computes in float32 already"
    return "" if scene.dtypes <= {torch.float32} else _refuse_cast(scene)


def _refuse_float64(scene: Scene) -> str:
    if not scene.uses_half and scene.dtypes == {torch.float64}:
        return "the step computes in float64 already"
    if not scene.dtypes:
        return "the step holds no floating-point tensor to cast"
    return _refuse_cast(scene) or _refuse_size(scene)


def _refuse_cast(scene: Scene) -> str:
    """Where `.data` of another dtype would break what stands around or behind a parameter."""
    spread = [type(each).__name__ for each in scene.snapshot.objects(nn.Module) if type(each).__name__ in _SPREAD]
    if spread:
        return f"{spread[0]} holds on to the gradient nodes of its parameters, which a cast would renew"
    model = scene.step.model
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers()) if t.dtype in FLOATING}
    odd = [t for t in tensors.values() if type(t) not in (torch.Tensor, nn.Parameter, nn.Buffer)]
    if odd:
        return f"parameters are of type {type(odd[0]).__name__}, which is not cast here"
    storages = [t.untyped_storage()._cdata for t in tensors.values() if t.layout == torch.strided and not t.is_meta]
    if len(set(storages)) < len(storages):
        return "parameters are views of one memory, which casts would part"
    return ""


def _refuse_size(scene: Scene) -> str:
    needed: dict[str, int] = {}
    for tensor in castable(scene.snapshot, FLOATING):
        needed[str(tensor.device)] = needed.get(str(tensor.device), 0) + 8 * tensor.numel()
    found = too_large(needed)
    if found is None:
        return ""
    device, size, free = found
    return f"casting needs {size:,} bytes on {device}, and {free:,} are available"


def _everything_in(target: torch.dtype) -> Callable[[Scene], contextlib.AbstractContextManager[Step]]:
    @contextlib.contextmanager
    def change(scene: Scene) -> Iterator[Step]:
        before = torch.get_default_dtype()
        with autocast_as(lambda dtype: None), cast(castable(scene.snapshot, FLOATING), FLOATING, target):
            torch.set_default_dtype(target)
            try:
                yield scene.step
            finally:
                torch.set_default_dtype(before)

    return change


def _all_words(target: str) -> Callable[[Scene], str]:
    return lambda scene: f"model, batch and optimizer state in {target}, autocast off"


# ---------------------------------------------------------------------------------------------------- one module
def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Each module of the model that a hook can stand at, by FQN; also where a hook may make other kernels run."""
    watched = watched_modules(model)[0]
    return {each.fqn: each.module for each in watched if not isinstance(each.module, torch.jit.ScriptModule)}


def _refuse_module(scene: Scene) -> str:
    if scene.module is None:
        return "no module is suspect: nothing nonfinite was first seen in one; name one with --module"
    if scene.module not in modules_by_name(scene.step.model):
        return f"{scene.module or 'the model'} cannot have hooks"
    if not scene.uses_half:
        return "the step uses no half precision"
    return _refuse_cast(scene) if scene.dtypes & set(HALF) else ""


@contextlib.contextmanager
def _module_in_float32(scene: Scene) -> Iterator[Step]:
    model = scene.step.model
    with InFloat32(model, [modules_by_name(model)[scene.module or ""]]) as inside:
        yield scene.step
        if not inside.entered:
            raise Unreached(f"{scene.module or 'the model'} was not called as a module in the step")


class Unreached(Exception):
    """The change did not come to anything in this run."""


# ---------------------------------------------------------------------------------------------------- scaler, update
def _refuse_scaler(scene: Scene) -> str:
    if not scene.seen.scalers:
        return "the step uses no GradScaler"
    return "" if any(enabled for enabled, _ in scene.seen.scalers) else "its GradScaler is disabled"


def _refuse_lower(scene: Scene) -> str:
    low = all(scale <= 1 for enabled, scale in scene.seen.scalers if enabled)
    return _refuse_scaler(scene) or ("its scale is not above 1" if low else "")


class _Scalers(StepListener):
    """Changes each scaler before the step's first use of it."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self._change = change

    def scaler_seen(self, scaler: torch.amp.GradScaler) -> None:
        self._change(scaler)


def _scalers_by(change: Callable[[Any], None]) -> Callable[[Scene], contextlib.AbstractContextManager[Step]]:
    @contextlib.contextmanager
    def room(scene: Scene) -> Iterator[Step]:
        with Lifecycle(_Scalers(change)):
            yield scene.step

    return room


def _disable(scaler: Any) -> None:
    scaler._enabled = False


def _lower(scaler: Any) -> None:
    if scaler._scale is not None:  # a new tensor: the old one is the caller's
        scaler._scale = (scaler._scale / SCALE_DIVISOR).clamp(min=1.0)
    elif scaler._enabled:  # it makes its tensor when it first scales
        scaler._init_scale = max(scaler._init_scale / SCALE_DIVISOR, 1.0)


def _lowered_words(scene: Scene) -> str:
    scales = [scale for enabled, scale in scene.seen.scalers if enabled]
    return "; ".join(f"scale {_scale(max(scale / SCALE_DIVISOR, 1.0))} in place of {_scale(scale)}" for scale in scales)


def _scale(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,}"


def _refuse_no_update(scene: Scene) -> str:
    if not scene.seen.optimizers:
        return "no optimizer steps in it"
    if "LBFGS" in scene.seen.optimizers:
        return "LBFGS runs the step's own code inside its update"
    return ""


@contextlib.contextmanager
def _no_update(scene: Scene) -> Iterator[Step]:
    with Lifecycle(_NothingToUpdate()):
        yield scene.step


class _NothingToUpdate(StepListener):
    """An optimizer finds no parameters in its groups while it steps."""

    def __init__(self) -> None:
        self._taken: list[tuple[dict[str, Any], Any]] = []

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            self._taken.append((group, group["params"]))
            group["params"] = []

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        while self._taken:
            group, parameters = self._taken.pop()
            group["params"] = parameters


# ---------------------------------------------------------------------------------------------------- mode, batch
def _refuse_evaluation(scene: Scene) -> str:
    return "" if scene.seen.training else "no module is in training mode"


@contextlib.contextmanager
def _evaluation(scene: Scene) -> Iterator[Step]:
    """`train()` within the step does nothing either."""
    owner: Any = nn.Module
    original = owner.train

    @functools.wraps(original)
    def nantrace_train(self: nn.Module, mode: bool = True) -> Any:
        return original(self, False)

    for module in scene.snapshot.objects(nn.Module):
        module.training = False
    owner.train = nantrace_train
    try:
        yield scene.step
    finally:
        owner.train = original


def _refuse_other(scene: Scene) -> str:
    if scene.step.batch is None:
        return "the step reads its batch itself: hand it to nantrace.Step"
    return "no other batch was given" if scene.other_batch is None else ""


@contextlib.contextmanager
def _other_batch(scene: Scene) -> Iterator[Step]:
    try:
        batch = copy.deepcopy(scene.other_batch)  # the step may write into it
    except Exception as error:  # whatever an object of the user's makes of being copied
        raise ReplayError(
            f"The other batch cannot be copied ({type(error).__name__}: {error}); give one of tensors and containers."
        ) from None
    yield dataclasses.replace(scene.step, batch=batch)


# ---------------------------------------------------------------------------------------------------- kernels
def _refuse_deterministic(scene: Scene) -> str:
    on = torch.are_deterministic_algorithms_enabled()
    return "deterministic algorithms are on already" if on else ""


@contextlib.contextmanager
def _deterministic(scene: Scene) -> Iterator[Step]:
    """The snapshot puts the switches back."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  it fills with NaN
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic")
        yield scene.step


def _refuse_compiled(scene: Scene) -> str:
    return "" if scene.compiles else "the step compiles nothing"


def _refuse_inductor(scene: Scene) -> str:
    return _refuse_compiled(scene) or _no_compiler(scene.step.model)


def _no_compiler(model: nn.Module) -> str:
    """Why inductor cannot make a kernel here, "" if it can: it needs Triton on a GPU, and a C++ compiler elsewhere."""
    device = next((tensor.device.type for tensor in (*model.parameters(), *model.buffers())), "cpu")
    if device != "cpu":
        from torch.utils._triton import has_triton

        return "" if has_triton() else f"inductor needs Triton for {device}, which is not usable here"
    from torch._inductor import cpp_builder  # takes seconds; the step has loaded the compiler

    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:  # of a class of inductor's own, which moved between versions
        return f"inductor finds no C++ compiler here ({type(error).__name__}): install one, or name it in CXX"
    return ""


def _backend(name: str) -> Callable[[Scene], contextlib.AbstractContextManager[Step]]:
    @contextlib.contextmanager
    def room(scene: Scene) -> Iterator[Step]:
        with torch.compiler.set_stance("default", force_backend=name):
            yield scene.step

    return room


def _says(words: str) -> Callable[[Scene], str]:
    return lambda scene: words


_BF16_WORDS = "autocast to bfloat16, float16 tensors cast to bfloat16"
#: How each axis but the first is changed; names and order are those of `diagnosis.contrast.AXES`.
TABLE: dict[str, Axis] = {
    "autocast-off": Axis(_refuse_autocast_off, _says("every autocast region off"), _autocast_off),
    "bfloat16": Axis(_refuse_bfloat16, _says(_BF16_WORDS), _bfloat16),
    "float32": Axis(_refuse_float32, _all_words("float32"), _everything_in(torch.float32)),
    "float64": Axis(_refuse_float64, _all_words("float64"), _everything_in(torch.float64)),
    "module-float32": Axis(
        _refuse_module, lambda scene: f"{scene.module or 'the model'} in float32", _module_in_float32
    ),
    "scaler-off": Axis(_refuse_scaler, _says("GradScaler disabled"), _scalers_by(_disable)),
    "scale-lowered": Axis(_refuse_lower, _lowered_words, _scalers_by(_lower)),
    "no-update": Axis(_refuse_no_update, _says("optimizers update nothing"), _no_update),
    "evaluation": Axis(_refuse_evaluation, _says("every module in evaluation mode"), _evaluation),
    "other-batch": Axis(_refuse_other, _says("another batch"), _other_batch),
    "deterministic": Axis(_refuse_deterministic, _says("torch.use_deterministic_algorithms"), _deterministic),
    # Nothing to change: a traced run is eager already.
    "eager": Axis(
        _refuse_compiled, _says("compiled code run eagerly"), lambda scene: contextlib.nullcontext(scene.step)
    ),
    "aot-eager": Axis(_refuse_compiled, _says("backend aot_eager"), _backend("aot_eager"), eager=False),
    "inductor": Axis(_refuse_inductor, _says("backend inductor"), _backend("inductor"), eager=False),
}
