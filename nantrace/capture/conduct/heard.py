"""How a step was conducted: what was called in which order around autocast, scalers, optimizers and schedulers.

Hears it and writes facts into the row of the step; what is right or wrong is said elsewhere. Writes nothing where
neither autocast nor a scaler nor half-precision parameters are at work. Not heard: gradients clipped or divided
by hand, and the autocast state in which a loss was computed that is not one of PyTorch's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from nantrace.capture.conduct.scaling import Gradients, scale_of, tensors_given
from nantrace.capture.conduct.tail import (
    HALF,
    Factor,
    factors_before,
    may_be_scaled,
    reaches,
    sequence_number,
    tail_of,
    word,
)
from nantrace.capture.lifecycle import StepListener, parameters_of
from nantrace.capture.quiet import Quiet

_MOST_CALLS = 64
_SCALER_METHODS = ("scale", "unscale_", "step", "update")
_in_autocast = torch._C._is_any_autocast_enabled


@dataclass
class _Count:
    """Updates of one optimizer over the whole trace."""

    attempted: int = 0
    committed: int = 0


@dataclass
class _Heard:
    """What was heard in the open step."""

    forward: bool = False  # of a module; outside the sample none is heard
    calls: list[str] = field(default_factory=list)
    autocast: dict[torch.dtype, None] = field(default_factory=dict)
    scales: list[torch.Tensor] = field(default_factory=list)
    backward_autocast: str | None = None
    accumulating: int = 0
    half_losses: dict[tuple[str, str], None] = field(default_factory=dict)
    half_probabilities: str | None = None
    factors: list[tuple[str, Factor, int]] = field(default_factory=list)  # which side, what, address of the scale
    clips: list[dict[str, Any]] = field(default_factory=list)
    scaled_optimizers: dict[str, None] = field(default_factory=dict)
    bypassed: dict[str, int] = field(default_factory=dict)
    never_scaled: dict[str, int] = field(default_factory=dict)
    groups: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    updates: list[Callable[[], None]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)

    def call(self, name: str) -> None:
        if len(self.calls) < _MOST_CALLS:
            self.calls.append(name)


class Conduct(StepListener):
    """Listens to one trace's steps.

    Args:
        device: type of the device that the model computes on ("cuda").
        parameters: gives those of the model that require a gradient.
        concerns: whether an optimizer holds a parameter of the traced model.
        failed: told when recording raised.
    """

    def __init__(
        self,
        device: str,
        parameters: Callable[[], Iterable[torch.Tensor]],
        concerns: Callable[[torch.optim.Optimizer], bool],
        failed: Callable[[Exception], None],
    ) -> None:
        self._device = device
        self._concerns = concerns
        self._failed = failed
        self._heard = _Heard()
        self._gradients = Gradients(parameters)
        self._scaling = False  # an enabled scaler, all of whose methods are heard, has scaled something
        self._inside: object = None  # the scaler in whose `step` we are
        self._epoch = 0
        self._scaled: bool | None = False  # the backward pass that runs began at a scaled loss
        self._scale_nodes: set[int] = set()
        self._scale_address = 0
        self._was_read = False  # somebody read the scale since the last forward
        self._scale_is_fresh = False
        self._counts: weakref.WeakKeyDictionary[Any, _Count] = weakref.WeakKeyDictionary()
        self._marks: weakref.WeakKeyDictionary[Any, _Count] = weakref.WeakKeyDictionary()

    def module_begins(self) -> None:
        """A module of the model begins its forward."""
        self._was_read = False
        self._heard.forward = True
        if _in_autocast() and torch.is_autocast_enabled(self._device):
            self._heard.autocast[torch.get_autocast_dtype(self._device)] = None

    def facts(self) -> dict[str, Any]:
        """What was heard since the last call, in plain values. Waits for the device, once the step has ended."""
        heard, self._heard = self._heard, _Heard()
        for settle in heard.updates:
            settle()
        on_unscaled, on_other = self._gradients.on_unscaled, self._gradients.on_other_scale
        self._gradients.forget_mixed()
        self._scale_nodes.clear()
        if not (heard.autocast or heard.scales or heard.groups or heard.schedulers or on_unscaled.parameters):
            return {}
        scales = [float(scale) for scale in heard.scales]
        facts = {
            "calls": heard.calls,
            "autocast": [word(dtype) for dtype in heard.autocast],
            "scales": scales,
            "backward_autocast": heard.backward_autocast,
            "backwards": heard.accumulating,
            "half_losses": [list(loss) for loss in heard.half_losses],
            "half_probabilities": heard.half_probabilities,
            "by_hand": _by_hand(heard, scales),
            "clips": [{**clip, "scale": scales[clip["scale"]]} for clip in heard.clips if clip["scale"] < len(scales)],
            "scaled_optimizers": list(heard.scaled_optimizers),
            "bypassed": heard.bypassed,
            "never_scaled": heard.never_scaled,
            "unscaled_early": vars(on_unscaled) if on_unscaled.parameters else None,
            "updated_early": vars(on_other) if on_other.parameters else None,
            "schedulers": heard.schedulers,
            "groups": list(heard.groups.values()),
        }
        return {name: value for name, value in facts.items() if value}

    def recorder_failed(self, error: Exception) -> None:
        self._failed(error)

    def loss_scaled(self, scaler: torch.amp.GradScaler, given: Any, scaled: Any) -> None:
        heard = self._heard
        heard.call("scale")
        if not _all_heard(scaler):
            return
        self._scaling = True
        fresh = self._scale_is_fresh and heard.scales  # else it was updated, or the last scaling was in another step
        scale = None if fresh else scale_of(scaler)
        if scale is not None:
            heard.scales.append(scale)
            self._scale_is_fresh = True
        self._scale_address = 0 if scaler._scale is None else scaler._scale.data_ptr()
        for tensor in tensors_given(given):
            self._note_factors("before", tensor, set())
        for tensor in tensors_given(scaled):
            number = None if tensor.grad_fn is None else sequence_number(tensor.grad_fn)
            if number is not None:
                self._scale_nodes.add(number)

    def backward_begins(self, roots: tuple[torch.Tensor, ...], accumulates: bool, nested: bool) -> None:
        if nested:
            return
        if not accumulates:
            self._heard.call("autograd.grad")
            return
        heard = self._heard
        heard.call("backward")
        heard.accumulating += 1
        if _in_autocast() and roots and torch.is_autocast_enabled(roots[0].device.type):
            heard.backward_autocast = word(torch.get_autocast_dtype(roots[0].device.type))
        if heard.autocast:
            for root in roots:
                tail = tail_of(root)
                heard.half_losses.update(dict.fromkeys(tail.half_losses))
                heard.half_probabilities = heard.half_probabilities or tail.half_probabilities
        if self._scaling:
            self._gradients.backward_begins()
            self._scaled = self._whether_scaled(roots)
            for root in roots:
                if reaches(root, self._scale_nodes):
                    self._note_factors("after", root, self._scale_nodes)

    def backward_ends(self, accumulates: bool, nested: bool, failed: bool) -> None:
        if self._scaling and accumulates and not nested:
            self._gradients.backward_ends(self._scaled, self._epoch)

    def gradients_unscaled(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        if self._inside is None:
            self._heard.call("unscale_")
        if self._scaling and _all_heard(scaler) and self._concerns(optimizer):
            never = self._gradients.unscaled(parameters_of(optimizer))
            if never and not self._was_read:
                self._heard.never_scaled[type(optimizer).__name__] = never

    def clipping_begins(self, parameters: Any) -> None:
        if self._scaling:
            self._gradients.clipping(tensors_given(parameters))

    def gradients_clipped(self, parameters: Any, max_norm: float, total_norm: torch.Tensor) -> None:
        self._heard.call("clip_grad_norm_")
        if self._scaling:
            self._note_clip("clip_grad_norm_", max_norm, self._gradients.clipped())

    def values_clipped(self, gradients: list[torch.Tensor], clip_value: float) -> None:
        self._heard.call("clip_grad_value_")
        if self._scaling:
            self._note_clip("clip_grad_value_", clip_value, self._gradients.values_clipped(gradients))

    def scale_read(self, scaler: torch.amp.GradScaler) -> None:
        self._was_read = True

    def scaler_steps(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        self._heard.call("scaler.step")
        self._inside = scaler
        if self._concerns(optimizer):
            self._note_groups(optimizer, scaler.is_enabled())
            if scaler.is_enabled():
                self._heard.scaled_optimizers[type(optimizer).__name__] = None

    def scaler_step_left(self, scaler: torch.amp.GradScaler) -> None:
        self._inside = None

    def scaler_stepped(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, found_inf: tuple[torch.Tensor, ...]
    ) -> None:
        with Quiet():
            self._count(optimizer, tuple(found.clone() for found in found_inf))
        self._gradients.spent(parameters_of(optimizer))

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if self._inside is not None:
            return
        self._heard.call("optimizer.step")
        if not self._concerns(optimizer):
            return
        self._note_groups(optimizer, False)
        self._count(optimizer, ())
        if self._scaling:
            if torch._C._current_graph_task_id() >= 0:  # called by a hook, while backward runs
                self._gradients.accumulated(parameters_of(optimizer), self._scaled, self._epoch)
            scaled = self._gradients.still_scaled(parameters_of(optimizer))
            own = type(optimizer).__module__.startswith("torch.optim") and not hasattr(optimizer, "grad_scale")
            if scaled and own:  # another's may unscale what it is given
                self._heard.bypassed[type(optimizer).__name__] = scaled
            self._gradients.spent(parameters_of(optimizer))

    def scaler_updated(self, scaler: torch.amp.GradScaler) -> None:
        self._heard.call("update")
        self._epoch += 1
        self._scale_is_fresh = False
        self._scale_nodes.clear()  # autograd saved the scale: what was scaled before can no longer run backward

    def scheduler_stepped(self, scheduler: LRScheduler) -> None:
        self._heard.call("scheduler.step")
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None or not self._concerns(optimizer):
            return
        # PyTorch's first call of a scheduler, before any update of its optimizer: nothing had been committed.
        first = getattr(scheduler, "_step_count", 0) == 2 and getattr(optimizer, "_opt_called", True) is False
        mark = self._marks.get(scheduler)
        known = mark is not None or first
        mark = self._marks.setdefault(scheduler, _Count())
        count, moved = self._counts.setdefault(optimizer, _Count()), self._heard.schedulers
        name = type(scheduler).__name__

        def settle() -> None:
            attempted, committed = count.attempted - mark.attempted, count.committed - mark.committed
            mark.attempted, mark.committed = count.attempted, count.committed
            if known and attempted and not committed:
                moved.append({"scheduler": name, "attempted": attempted, "committed": committed})

        self._heard.updates.append(settle)

    def _count(self, optimizer: Any, found_inf: tuple[torch.Tensor, ...]) -> None:
        count = self._counts.setdefault(optimizer, _Count())

        def settle() -> None:
            count.attempted += 1
            count.committed += not any(float(found) > 0 for found in found_inf)

        self._heard.updates.append(settle)

    def _whether_scaled(self, roots: tuple[torch.Tensor, ...]) -> bool | None:
        """Whether all roots come from a scaled loss; None if some do, or if it cannot be told."""
        found = {reaches(root, self._scale_nodes) for root in roots}
        if found == {False}:
            by_hand = any(root.numel() != 1 or may_be_scaled(root) for root in roots)
            return None if by_hand else False
        return True if found == {True} else None

    def _note_factors(self, side: str, tensor: torch.Tensor, stop: set[int]) -> None:
        for factor in factors_before(tensor, stop):
            by_number = self._was_read and self._heard.forward and factor.value is not None
            if factor.address == self._scale_address or by_number:
                self._heard.factors.append((side, factor, self._scale_address))

    def _note_clip(self, name: str, bound: Any, scaled: int) -> None:
        if scaled and isinstance(bound, (int, float)) and self._heard.scales:
            at = len(self._heard.scales) - 1
            self._heard.clips.append({"call": name, "bound": float(bound), "gradients": scaled, "scale": at})

    def _note_groups(self, optimizer: torch.optim.Optimizer, scaled: bool) -> None:
        """Groups with half-precision parameters."""
        for number, group in enumerate(optimizer.param_groups):
            dtypes = [one.dtype for one in group["params"] if one.dtype in HALF]
            if not dtypes:
                continue
            eps, cls = group.get("eps"), type(optimizer)
            own = cls.__module__.startswith("torch.optim") and not group.get("fused")
            self._heard.groups[cls.__name__, number] = {
                "optimizer": cls.__name__,
                "group": number,
                "dtypes": {word(dtype): dtypes.count(dtype) for dtype in dict.fromkeys(dtypes)},
                "scaled": scaled,
                # Fused kernels compute in float32, and others may.
                **({"eps": float(eps)} if own and isinstance(eps, float) else {}),
            }


def _by_hand(heard: _Heard, scales: list[float]) -> list[dict[str, Any]]:
    """Factors of the loss that are the scale itself or its reciprocal, on either side of `scaler.scale`."""
    found: list[dict[str, Any]] = []
    for side, factor, address in heard.factors:
        for scale in scales:
            times = factor.value is not None and _close(factor.value, scale)
            over = factor.value is not None and _close(factor.value * scale, 1.0)
            if factor.address == address:
                times, over = not factor.divides, factor.divides
            if scale >= 2 and (times or over):
                found.append({"side": side, "divided": over, "scale": scale})
                break
    divided = sum(each["divided"] for each in found)
    return [] if 2 * divided == len(found) else found  # one undoes the other


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * abs(b)


def _all_heard(scaler: torch.amp.GradScaler) -> bool:
    """Not so of a scaler of another class that does these things its own way."""
    return scaler.is_enabled() and not any(
        name in vars(cls)
        for cls in type(scaler).__mro__
        if cls not in (torch.amp.GradScaler, object)
        for name in _SCALER_METHODS
    )
