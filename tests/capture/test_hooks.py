"""Module hooks: what they see, what carries them, and that none is left."""

from __future__ import annotations

import collections
import contextlib
import copy
import io
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_internals

from nantrace.capture.tracer import Tracer

from .conftest import Rows, hooks_of


@dataclass
class Answer:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()


class Named(collections.OrderedDict[str, Any]):
    """A dict subclass that PyTorch's pytree does not open."""


class Nested(nn.Module):
    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> Any:
        return [Answer(x * mask, (x, x + 1)), Named(deep={"x y": x}, loop=None)]


def test_containers_of_every_kind_are_opened(rows: Rows) -> None:
    with Tracer(Nested()) as tracer:
        tracer._model(torch.ones(2), mask=torch.ones(2))
    assert [slot for _, slot, _ in rows(tracer.trace, role="input", module="")] == ["args[0]", "kwargs.mask"]
    assert [slot for _, slot, _ in rows(tracer.trace, role="output", module="")] == [
        "output[0].logits",
        "output[0].hidden[0]",
        "output[0].hidden[1]",
        "output[1].deep['x y']",
    ]


def test_a_value_that_contains_itself_ends_the_walk(rows: Rows) -> None:
    class Loop(nn.Module):
        def forward(self, x: torch.Tensor) -> list[Any]:
            output: list[Any] = [x]
            output.append(output)
            return output

    model = Loop()
    with Tracer(model) as tracer:
        model(torch.ones(2))
    assert [slot for _, slot, _ in rows(tracer.trace, role="output")] == ["output[0]"]


def test_what_was_not_opened_is_named() -> None:
    class Cache:
        pass

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            return x

    model = Model()
    with Tracer(model) as tracer:
        model(torch.ones(2), Cache())
    assert "not looked into: Cache" in tracer.trace.steps[0]["notes"]


def test_a_shared_module_is_told_apart_by_its_calls(rows: Rows) -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    with Tracer(model) as tracer:
        model(torch.ones(1, 2)).sum().backward()
    outputs = [int(event["call"]) for _, _, event in rows(tracer.trace, role="output", module="0")]
    gradients = [int(event["call"]) for _, _, event in rows(tracer.trace, role="grad_output", module="0")]
    assert len(set(outputs)) == 2
    assert gradients == outputs[::-1]
    (entry,) = [entry for entry in tracer.trace.modules if entry.fqn == "0"]
    assert entry.aliases == ("2",)


def test_shared_parameters_have_one_name_and_aliases(rows: Rows) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    with Tracer(model) as tracer:
        pass
    assert [(module, slot) for module, slot, _ in rows(tracer.trace, role="param")] == [("embed", "weight")]
    assert tracer.trace.meta["aliases"] == {"embed.weight": ["head.weight"]}


def test_a_module_outside_the_model_is_named_by_its_class(rows: Rows) -> None:
    class Criterion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MSELoss()

        def forward(self, *, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self.inner(output, target)

    model, criterion = nn.Linear(2, 2), Criterion()
    with Tracer(model) as tracer:
        criterion(output=model(torch.ones(1, 2)), target=torch.ones(1, 2)).backward()
    outside = rows(tracer.trace, module="<Criterion>", phase="loss")
    assert [slot for _, slot, _ in outside] == ["kwargs.output", "kwargs.target", "output"]
    assert not rows(tracer.trace, module="<MSELoss>")


def test_hooks_of_the_user_have_had_their_say_first(rows: Rows) -> None:
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 100,))
    model.register_forward_hook(lambda module, args, output: output * 0 + 7)
    with Tracer(model) as tracer:
        model(torch.ones(1, 2))
    assert rows(tracer.trace, role="input")[0][2]["max"] == 100
    assert rows(tracer.trace, role="output")[0][2]["max"] == 7


def test_a_prehook_of_the_user_that_raises_leaves_the_stack_whole(rows: Rows) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def refuse(module: nn.Module, args: Any) -> None:
        raise ZeroDivisionError("mine")

    handle = model[1].register_forward_pre_hook(refuse)
    with Tracer(model) as tracer:
        with pytest.raises(ZeroDivisionError, match="mine"):
            model(torch.ones(1, 2))
        handle.remove()
        model(torch.ones(1, 2))
    assert len(rows(tracer.trace, role="output", module="")) == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_in_forward_is_the_users_and_leaves_no_hook(error: type[BaseException]) -> None:
    raised = error("from forward")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first(x)
            raise raised

    model = Model()
    tracer = Tracer(model)
    with pytest.raises(error) as caught, tracer:
        model(torch.ones(1, 2))
    assert caught.value is raised
    assert hooks_of(model) == 0
    assert len(tracer.trace) > 0


def test_an_outside_module_that_raises_is_taken_off_the_stack(rows: Rows) -> None:
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("from the loss")

    model, loss = nn.Linear(2, 2), Loss()
    with Tracer(model) as tracer:
        with pytest.raises(ValueError, match="from the loss"):
            loss(model(torch.ones(1, 2)))
        nn.MSELoss()(model(torch.ones(1, 2)), torch.ones(1, 2))
    assert len(rows(tracer.trace, module="<MSELoss>", role="output")) == 1


def test_deepcopy_and_save_within_the_block_take_no_tracer_along() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with Tracer(model) as tracer:
        x = torch.ones(1, 2, requires_grad=True)
        model(x).sum().backward()
        before = len(tracer._buffer.rows)
        copied = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        torch.save(x, io.BytesIO())
        copied[0](torch.ones(1, 2)).sum().backward()
        inside = len(tracer._buffer.rows) - before
    assert b"nantrace" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for copy_of_it in (copied, loaded, copy.deepcopy(copied)):
        hooks = [*copy_of_it[0]._forward_hooks.values(), *copy_of_it[0]._forward_pre_hooks.values()]
        assert {hook.__func__ for hook in hooks} == {contextlib.nullcontext.__exit__}
        assert copy_of_it(torch.ones(1, 2)).shape == (1, 2)
    assert inside == 4  # the copy is a module outside the model: its input, output, the root, the output's gradient


def test_every_hook_is_gone_after_exit() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.TransformerEncoderLayer(2, 1, 4), nn.GRU(2, 2))
    with Tracer(model):
        assert hooks_of(model) > 0
        model(torch.ones(3, 1, 2))
    assert hooks_of(model) == 0
    assert not module_internals._global_forward_hooks


def _everything(model: nn.Module, *tensors: torch.Tensor) -> list[Any]:
    """All attributes of modules and tensors, with the hooks that PyTorch keeps outside of `__dict__`."""
    found: list[Any] = [{**module.__dict__} for module in model.modules()]
    for each in found:
        for name, value in each.items():
            each[name] = dict(value) if isinstance(value, dict) else value
    for tensor in (*model.parameters(), *model.buffers(), *tensors):
        hooks = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
        found.append((dict(tensor.__dict__), *(None if each is None else dict(each) for each in hooks)))
    return found


class TakesAParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.ones(1, 2))
        self.norm = nn.BatchNorm1d(2)
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.query) + self.norm(x)  # type: ignore[no-any-return]


def test_nothing_at_all_is_left_on_modules_parameters_and_inputs() -> None:
    model, x = TakesAParameter(), torch.ones(3, 2, requires_grad=True)
    owned = model.linear.weight.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[no-untyped-call]
    before = _everything(model, x)
    with Tracer(model, batch=x), Tracer(model):
        model(x).sum().backward()
        assert _everything(model, x) != before
    assert _everything(model, x) == before
    assert model.query._post_accumulate_grad_hooks is None and x._backward_hooks is None
    owned.remove()


def test_depth_and_globs_choose_what_is_recorded(rows: Rows) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 1))

    def recorded(**options: Any) -> set[str | None]:
        model = make()
        with Tracer(model, **options) as tracer:
            model(torch.ones(1, 2)).sum().backward()
        return {module for module, _, _ in rows(tracer.trace, role="output")}

    assert recorded() == {"", "0", "0.0", "0.1", "1"}
    assert recorded(depth=0) == {""}
    assert recorded(depth=1) == {"", "0", "1"}
    assert recorded(modules="0.*") == {"0.0", "0.1"}
    assert recorded(modules=["*"], depth=1) == {"", "0", "1"}


def test_wrappers_do_not_show_in_names(rows: Rows) -> None:
    model = nn.DataParallel(nn.Sequential(nn.Linear(2, 2)))
    with Tracer(model) as tracer:
        model.module(torch.ones(1, 2)).sum().backward()
    assert {entry.fqn for entry in tracer.trace.modules} == {"", "0"}
    assert {slot for _, slot, _ in rows(tracer.trace, role="grad")} == {"0.weight", "0.bias"}


def test_a_submodule_that_is_called_module_keeps_its_name() -> None:
    model = nn.ModuleDict({"module": nn.Linear(1, 1)})
    with Tracer(model) as tracer:
        pass
    assert [entry.fqn for entry in tracer.trace.modules] == ["", "module"]


def test_modules_inside_vmap_are_counted_not_read() -> None:
    model = nn.Linear(2, 2)
    with Tracer(model) as tracer:
        torch.vmap(model)(torch.ones(3, 2))
    assert any("functorch" in note for note in tracer.trace.steps[0]["notes"])


def test_a_mode_of_the_user_sees_nothing_of_the_recording() -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Ops(TorchDispatchMode):
        seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Functions(TorchFunctionMode):
        seen: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    def run(traced: bool) -> tuple[list[str], list[str]]:
        Ops.seen, Functions.seen = [], []
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        x = torch.ones(1, 2, requires_grad=True)
        with Tracer(model) if traced else torch.enable_grad(), Functions(), Ops():
            model(x).sum().backward()
        return Ops.seen, Functions.seen

    assert run(True) == run(False)
