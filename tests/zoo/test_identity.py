"""The identity check sees each kind of disturbance, and nothing where there is none."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.zoo.case import Program, Step
from tests.zoo.identity import untraced_equals_traced
from tests.zoo.training import TrainingStep, cross_entropy_of

Disturb = Callable[[nn.Module, Any], Any]


def _build() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3), nn.Dropout(0.2), nn.Flatten(), nn.Linear(12, 4))
    optimizer = torch.optim.Adam(model.parameters())
    batch = {"x": torch.randn(5, 1, 6), "y": torch.tensor([0, 1, 2, 3, 0])}
    return model, batch, TrainingStep(optimizer, cross_entropy_of)


class _Ops(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def _around(before: Disturb | None, after: Disturb | None, model: nn.Module, step: Step) -> Iterator[None]:
    if before:
        before(model, step)
    yield
    if after:
        after(model, step)


def _complaints(before: Disturb | None = None, after: Disturb | None = None) -> list[str]:
    return untraced_equals_traced(_build, lambda model, step: _around(before, after, model, step))


def test_nothing_around_a_step_changes_nothing() -> None:
    assert untraced_equals_traced(_build, lambda model, step: nullcontext()) == []


def test_hooks_that_are_removed_change_nothing() -> None:
    @contextmanager
    def watched(model: nn.Module, step: Step) -> Iterator[None]:
        handles = [m.register_forward_hook(lambda module, args, out: None) for m in model.modules()]
        handles += [p.register_hook(lambda grad: None) for p in model.parameters()]
        with _Ops():
            yield
        for handle in handles:
            handle.remove()

    assert untraced_equals_traced(_build, watched) == []


def _nudge_bias(model: Any) -> None:
    with torch.no_grad():
        model[4].bias[0] = torch.nextafter(model[4].bias[0], torch.tensor(9.0))


def _channels(model: Any) -> None:
    model[0].weight.data = model[0].weight.data.transpose(0, 2).contiguous().transpose(0, 2)


@pytest.mark.parametrize(
    ("disturb", "complaint"),
    [
        (lambda model, step: torch.rand(1), "random stream of torch"),
        (lambda model, step: np.random.rand(), "random stream of numpy"),
        (lambda model, step: random.random(), "random stream of python"),
        (lambda model, step: _nudge_bias(model), "parameter 4.bias"),
        (lambda model, step: model[4].weight.grad.mul_(2), "gradient 4.weight"),
        (lambda model, step: model[4].zero_grad(), "gradient 4.weight"),
        (lambda model, step: model[1].running_mean.add_(1), "buffer 1.running_mean"),
        (lambda model, step: step.optimizer.state[model[4].bias]["exp_avg"].zero_(), "optimizer state"),
        (lambda model, step: _channels(model), "parameter 0.weight"),
        (lambda model, step: model[4].bias.requires_grad_(False), "parameter 4.bias"),
        (lambda model, step: model.register_buffer("extra", torch.zeros(1)), "buffer extra"),
    ],
)
def test_a_change_after_the_step_is_seen(disturb: Disturb, complaint: str) -> None:
    assert complaint in _complaints(after=disturb)


def test_a_changed_result_is_seen() -> None:
    def halve(model: Any, step: Any) -> None:
        handle = model.register_forward_hook(lambda module, args, output: output / 2)
        handles.append(handle)

    handles: list[Any] = []
    found = _complaints(before=halve, after=lambda model, step: handles[0].remove())
    assert "returned values" in found and "gradient 0.weight" in found and "left behind: module hooks" not in found


def test_a_result_cut_off_from_its_graph_is_seen() -> None:
    def build() -> Program:
        return nn.Linear(2, 2), torch.ones(1, 2), lambda model, batch: model(batch)

    @contextmanager
    def cut(model: nn.Module, step: Step) -> Iterator[None]:
        handle = model.register_forward_hook(lambda module, args, output: output.detach())
        yield
        handle.remove()

    assert untraced_equals_traced(build, cut) == ["returned values"]


def _unpatch(owner: Any, name: str) -> tuple[Disturb, Callable[[], None]]:
    original = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return (lambda model, step: setattr(owner, name, replaced)), (lambda: setattr(owner, name, original))


def _handled(register: Callable[[Any, Any], Any]) -> tuple[Disturb, Callable[[], None]]:
    handles: list[Any] = []
    return (lambda model, step: handles.append(register(model, step))), (lambda: handles[0].remove())


def _entered(mode: Any) -> tuple[Disturb, Callable[[], None]]:
    return (lambda model, step: mode.__enter__()), (lambda: mode.__exit__(None, None, None))


def _on_grad(param: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("disturb", "undo", "kind"),
    [
        (*_handled(lambda m, s: m[0].register_forward_hook(lambda *a: None)), "module hooks"),
        (*_handled(lambda m, s: m[0].register_forward_pre_hook(lambda *a: None)), "module hooks"),
        (*_handled(lambda m, s: m[0].register_full_backward_hook(lambda *a: None)), "module hooks"),
        (*_handled(lambda m, s: m.register_state_dict_post_hook(lambda *a: None)), "module hooks"),
        (
            *_handled(lambda m, s: nn.modules.module.register_module_forward_hook(lambda *a: None)),
            "global module hooks",
        ),
        (*_handled(lambda m, s: m[0].weight.register_hook(lambda grad: None)), "tensor hooks"),
        (*_handled(lambda m, s: m[0].weight.register_post_accumulate_grad_hook(_on_grad)), "tensor hooks"),
        (*_handled(lambda m, s: s.optimizer.register_step_pre_hook(lambda *a: None)), "optimizer hooks"),
        (*_handled(lambda m, s: register_optimizer_step_post_hook(lambda *a: None)), "global optimizer hooks"),
        (*_entered(_Ops()), "dispatch modes"),
        (*_entered(_Functions()), "function modes"),
        (*_entered(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)), "saved tensor hooks"),
        (*_entered(torch.no_grad()), "autograd settings"),
        (*_unpatch(torch.autograd, "_engine_run_backward"), "patched functions"),
        (*_unpatch(torch.amp.GradScaler, "step"), "patched functions"),
        (*_unpatch(torch.amp.GradScaler, "scale"), "patched functions"),
        (*_unpatch(torch.Tensor, "backward"), "patched functions"),
        (*_unpatch(nn.Linear, "forward"), "patched functions"),
        (lambda m, s: m[4].__setattr__("forward", m[4].forward), lambda: None, "module attributes"),
        (lambda m, s: m[4].eval(), lambda: None, "module flags"),
        (lambda m, s: m[4].bias.__setattr__("note", 1), lambda: None, "parameter attributes"),
        (lambda m, s: sys.setprofile(_no_profile), lambda: sys.setprofile(None), "interpreter"),
        (lambda m, s: warnings.simplefilter("ignore"), lambda: None, "warning filters"),
    ],
)
def test_what_is_left_behind_is_seen(disturb: Disturb, undo: Callable[[], None], kind: str) -> None:
    with warnings.catch_warnings():
        try:
            found = _complaints(after=disturb)
        finally:
            undo()
    assert found == [f"left behind: {kind}"]


def _no_profile(frame: Any, event: str, arg: Any) -> None: ...
