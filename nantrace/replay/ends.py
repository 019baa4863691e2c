"""The ends of a step: loss, gradients, parameters, moments, buffers, what it returned or raised. Cheap to look at.

Looks only where training keeps a value, at the moment it counts, and at what the model is called with: no other module
and no op is watched, and nothing of the step runs otherwise. Two runs of the same step are told apart by what was seen
here.
"""

from __future__ import annotations

import hashlib
import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nantrace.capture.lifecycle import StepListener, parameters_of
from nantrace.flow.links import fqn
from nantrace.flow.source import line_of_source
from nantrace.flow.values import Scanner, planes, tensors_in, unseen, unwrapped
from nantrace.replay.surroundings import random_state
from nantrace.stats.layout import array_of

_WORDS = {"loss": "loss", "gradient": "gradient", "parameter": "parameter", "moment": "moment", "buffer": "buffer"}


@dataclass(frozen=True)
class End:
    """One nonfinite end. `iteration` counts optimizer steps, from 1."""

    place: str  # loss | gradient | parameter | moment | buffer | returned
    name: str
    iteration: int
    nan: int
    inf: int

    def __str__(self) -> str:
        if self.place == "returned":
            return self.name.replace("returned", "what the step returned", 1)
        return self.place if self.place == "loss" else f"{self.place} {self.name}"


@dataclass(frozen=True)
class Ends:
    """What one run came to.

    Attributes:
        losses: each root of a backward pass as text: its exact bits, or "nan", "inf", "-inf".
        nonfinite: the ends that the run made nonfinite, in order of time.
        inputs: what the model was called with each time, as digests of its bits; None if nobody listened.
        gradients: (parameter, digest of its bits) of each gradient that was finite, where it was used or left.
        random: (stream, digest) of the global random streams at the end.
        error: what the step raised, in a sentence: type, message, line; None if it ended well.
        raised: the type of that.
        stepping: class of the optimizer in whose step it was raised; None if it was in none.
        skipped: updates that a gradient scaler skipped.
    """

    losses: tuple[str, ...] = ()
    nonfinite: tuple[End, ...] = ()
    inputs: tuple[str, ...] | None = ()
    gradients: tuple[tuple[str, str], ...] = ()
    random: tuple[tuple[str, str], ...] = ()
    error: str | None = None
    raised: str | None = None
    stepping: str | None = None
    skipped: int = 0

    @property
    def failed(self) -> bool:
        return bool(self.nonfinite) or self.error is not None

    @property
    def forward_was_finite(self) -> bool:
        return all(text not in ("nan", "inf", "-inf") for text in self.losses)

    def places(self) -> frozenset[tuple[str, str, int]]:
        """Which ends went nonfinite, whatever exactly they hold."""
        return frozenset((end.place, end.name, end.iteration) for end in self.nonfinite)

    def in_words(self) -> str:
        """ "loss nan, 3 gradients, 2 parameters nonfinite"."""
        if not self.failed:
            return "all finite"
        losses = {text for text in self.losses if text in ("nan", "inf", "-inf")}
        parts = [f"loss {' and '.join(sorted(losses))}"] if losses else []
        for place, word in _WORDS.items():
            count = len({end.name for end in self.nonfinite if end.place == place})
            if count and place != "loss":
                parts.append(f"{count:,} {word}{'s' if count > 1 else ''} nonfinite")
        if self.raised:
            parts.append(f"raised {self.raised}")
        return ", ".join(parts) or "a returned value nonfinite"


#: Calls of the model in one step whose inputs are told apart.
_MOST_CALLS = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class EndsListener(StepListener):
    """Looks at the ends of one run; ask for `ends` when `ended` was told what the run returned or raised.

    `hears_calls`: asked at the end whether it was told of each call of the model; set by whoever lets it be told.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.hears_calls: Callable[[], bool] = bool
        self._unreadable = False
        self._scanner = Scanner()
        self._names = {id(p): fqn(name, model) for name, p in model.named_parameters()}
        self._losses: list[str] = []
        self._inputs: list[str] = []
        self._gradients: dict[str, str] = {}  # the first time counts
        self._found: dict[tuple[str, str], End] = {}  # the first time counts
        self._iteration, self._skipped = 1, 0
        self._failure: Exception | None = None
        with unseen():
            self._before = {(place, name): counts for place, name, t in self._state() if any(counts := self._count(t))}
        self.ends = Ends()

    def backward_begins(self, roots: tuple[torch.Tensor, ...], accumulates: bool, nested: bool) -> None:
        if nested or not accumulates:
            return
        with unseen():
            for root in roots:
                plain = unwrapped(root)
                self._losses.append(_bits(plain))
                self._look("loss", "loss", plain)

    def model_called(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pre-hook of the model. Compiled into it, it does nothing: the first line is decided then."""
        if torch.compiler.is_compiling():
            return
        if len(self._inputs) < _MOST_CALLS:
            try:
                with unseen():
                    self._inputs.append(digest([unwrapped(t) for _, t in tensors_in((args, kwargs), "")]))
            except Exception:  # values within a functorch transform cannot be read: then nobody heard the calls
                self._unreadable = True

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        with unseen():
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None:
                    self._look_at_gradient(self._name(parameter), parameter.grad)

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        with unseen():
            for parameter in parameters_of(optimizer):
                name = self._name(parameter)
                self._look("parameter", name, parameter)
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        self._look("moment", f"{name}.{key}", value)
        self._iteration += 1

    def scaler_stepped(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, found_inf: tuple[torch.Tensor, ...]
    ) -> None:
        with unseen():
            self._skipped += any(float(found) > 0 for found in found_inf)

    def recorder_failed(self, error: Exception) -> None:
        self._failure = self._failure or error

    def ended(self, returned: Any, error: Exception | None) -> Ends:
        """The run is over: look at what is left, and close the account.

        Raises:
            Exception: a failure of this listener's own, which nothing of the step's could have caused.
        """
        with unseen():
            for place, name, tensor in self._state():
                if place == "gradient":
                    self._look_at_gradient(name, tensor)
                else:
                    self._look(place, name, tensor)
            for path, tensor in tensors_in(returned, "returned"):
                self._look("returned", path, unwrapped(tensor))
        if self._failure is not None:
            raise self._failure
        told = None if error is None else describe(error)
        raised = None if error is None else type(error).__name__
        self.ends = Ends(
            tuple(self._losses),
            tuple(self._found.values()),
            tuple(self._inputs) if self.hears_calls() and not self._unreadable else None,
            tuple(sorted(self._gradients.items())),
            tuple((name, _digest_of(state)) for name, state in random_state().items()),
            told,
            raised,
            None if error is None else _stepping(error),
            self._skipped,
        )
        return self.ends

    def _state(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for name, parameter in self._model.named_parameters():
            if torch.nn.parameter.is_lazy(parameter):
                continue
            yield "parameter", fqn(name, self._model), parameter
            if parameter.grad is not None:
                yield "gradient", fqn(name, self._model), parameter.grad
        for name, buffer in self._model.named_buffers():
            yield "buffer", fqn(name, self._model), buffer

    def _name(self, parameter: torch.Tensor) -> str:
        return self._names.get(id(parameter), "outside the model")

    def _look_at_gradient(self, name: str, gradient: torch.Tensor) -> None:
        if not self._look("gradient", name, gradient) and name not in self._gradients:
            self._gradients[name] = _sums(gradient)

    def _look(self, place: str, name: str, tensor: torch.Tensor) -> bool:
        """Whether it is nonfinite."""
        nan, inf = self._count(tensor)
        new = (nan or inf) and self._before.get((place, name)) != (nan, inf)
        if new and (place, name) not in self._found:
            self._found[place, name] = End(place, name, self._iteration, nan, inf)
        return bool(nan or inf)

    def _count(self, tensor: torch.Tensor) -> tuple[int, int]:
        """How many elements are NaN, how many infinite."""
        nan = inf = 0
        for plane in planes(tensor):
            found = self._scanner.nonfinite(plane)
            if found is not None:
                nan, inf = nan + found.nan, inf + found.posinf + found.neginf
        return nan, inf


def describe(error: Exception) -> str:
    """A step's own exception in a sentence: "KeyError: 'x' at train.py:41 in forward"."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    message = str(error).strip().split("\n")[0]
    last = frames[-1] if frames else None
    at = f" at {line_of_source(last.filename, last.lineno or 0, last.name)}" if last else ""
    optimizer = _stepping(error)
    at += f", inside {optimizer}.step" if optimizer else ""
    return f"{type(error).__name__}: {message}{at}" if message else f"{type(error).__name__}{at}"


def _stepping(error: Exception) -> str | None:
    """The class of the innermost optimizer whose methods were running."""
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [type(owner).__name__ for owner in owners if isinstance(owner, torch.optim.Optimizer)]
    return found[-1] if found else None


def _is_library(filename: str) -> bool:
    return "/torch/" in filename or "/nantrace/" in filename


def _bits(root: torch.Tensor) -> str:
    """Exact: equal texts are equal bits. NaNs are all alike."""
    plain = root.detach()
    if plain.numel() == 1 and plain.layout == torch.strided and not plain.is_complex():
        value = float(plain)
        return value.hex() if math.isfinite(value) else repr(value)
    return digest([plain])


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Equal digests are equal bits of the values, dtypes and shapes; what cannot be read counts by its shape."""
    hashed = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        hashed.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        plain = tensor.detach()
        readable = plain.layout == torch.strided and not _has_no_values(plain)
        for plane in (plain,) if readable else planes(plain):
            hashed.update(array_of(plane.contiguous().reshape(-1).view(torch.uint8).cpu()).tobytes())
    return hashed.hexdigest()


def _has_no_values(tensor: torch.Tensor) -> bool:
    composed = type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_nested or tensor.is_quantized
    return composed or tensor.is_meta or tensor._is_zerotensor()


def _sums(tensor: torch.Tensor) -> str:
    """A digest that is cheap on large tensors and on any device: equal bits have equal sums."""
    said = []
    for plane in planes(tensor):
        bits = plane.detach().contiguous().reshape(-1).view(_INTEGERS[min(plane.element_size(), 8)])
        said.append(f"{int(bits.sum(dtype=torch.int64))} {int(bits[::3].sum(dtype=torch.int64))}")
    return " ".join(said)


def _digest_of(state: Any) -> str:
    if isinstance(state, torch.Tensor):
        return digest([state])
    return hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()
