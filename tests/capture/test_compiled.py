"""Compiled models run eagerly while they are traced, and compiled again afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import nantrace
from nantrace.capture.tracer import Tracer

from .conftest import Rows


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    """Compilers skip code of PyTorch's own, such as `nn.Sequential.forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def _counting() -> tuple[list[int], Callable[..., Any]]:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    return compiled, backend


def _whole(model: nn.Module, backend: Any) -> nn.Module:
    return torch.compile(model, backend=backend, fullgraph=True)  # type: ignore[return-value]


def _in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


def _one_block(model: nn.Module, backend: Any) -> nn.Module:
    model.block = torch.compile(model.block, backend=backend)  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("compile_it", [_whole, _in_place, _one_block])
def test_submodules_of_a_compiled_model_are_seen_and_nothing_is_compiled_anew(compile_it: Any, rows: Rows) -> None:
    compiled, backend = _counting()
    model = compile_it(Model(), backend)
    x = torch.ones(1, 2)
    model(x).sum().backward()
    before = len(compiled)
    assert before >= 1
    with Tracer(model) as tracer:
        model(x).sum().backward()
    model(x).sum().backward()
    assert len(compiled) == before
    assert {module for module, _, _ in rows(tracer.trace, role="output")} == {"", "block", "block.inner", "head"}
    assert {slot for _, slot, _ in rows(tracer.trace, role="grad", phase="backward")} == {
        "block.inner.weight",
        "block.inner.bias",
        "head.weight",
        "head.bias",
    }
    assert tracer.trace.meta["user_mode"] == "compiled"
    assert tracer.trace.meta["executed"] == "eager"
    assert "compiled code run eagerly" in str(nantrace.report(tracer.trace))


def test_the_stance_is_put_back_after_an_exception() -> None:
    compiled, backend = _counting()
    function = torch.compile(lambda x: x + 1, backend=backend)
    with pytest.raises(KeyError), Tracer(nn.Linear(1, 1)):
        function(torch.ones(1))
        raise KeyError
    assert compiled == []
    function(torch.ones(1))
    assert compiled == [1]
