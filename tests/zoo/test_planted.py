"""Faults planted deep inside real models are found at their module, op and source line."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import nantrace
from tests.zoo.models import TRANSFORMERS_MODELS

#: Model -> a linear layer behind most of its forward, and the op of its product.
_PLACES = {
    "gpt2": ("transformer.h.1.mlp.c_fc", "aten.addmm"),
    "bert": ("bert.encoder.layer.1.intermediate.dense", "aten.addmm"),
    "t5": ("decoder.block.1.layer.2.DenseReluDense.wi", "aten.mm"),
    "vit": ("vit.layers.1.mlp.fc1", "aten.addmm"),
    "whisper": ("model.decoder.layers.1.fc1", "aten.addmm"),
}


# The second line of each of these functions is the one that must be named.
def _log_of_zero(y: Tensor) -> Tensor:
    return y + torch.log(y * 0.0)


def _division_by_zero(y: Tensor) -> Tensor:
    return y / (y - y)


def _root_of_zero(y: Tensor) -> Tensor:
    return y + torch.sqrt(y * 0.0)


def _all_masked_row(y: Tensor) -> Tensor:
    return y + torch.softmax(torch.full_like(y, -math.inf), -1)


def _zero_times_infinity(y: Tensor) -> Tensor:
    return y + (y * 0.0) * math.inf


def _exp_overflow(y: Tensor) -> Tensor:
    return y + torch.exp(y * 0.0 + 1000.0)


def _weight_is_huge(layer: nn.Module) -> None:
    layer.weight.fill_(3e38)


def _weight_is_nan(layer: nn.Module) -> None:
    layer.weight[0, 1] = math.nan


@dataclass(frozen=True)
class _Plant:
    """What is done to a layer (to its output, or to its weight), and the answer; `op` None: the layer's own product."""

    output: Callable[[Tensor], Tensor] | None
    weight: Callable[[nn.Module], None] | None
    stage: str
    op: str | None
    node: str | None = None


_PLANTS = {
    "log_of_zero": _Plant(_log_of_zero, None, "forward", "aten.log"),
    "division_by_zero": _Plant(_division_by_zero, None, "forward", "aten.div"),
    "root_of_zero": _Plant(_root_of_zero, None, "backward", "aten.div", "SqrtBackward0"),
    "all_masked_row": _Plant(_all_masked_row, None, "forward", "aten._softmax"),
    "zero_times_infinity": _Plant(_zero_times_infinity, None, "forward", "aten.mul"),
    "exp_overflow": _Plant(_exp_overflow, None, "forward", "aten.exp"),
    "weight_is_huge": _Plant(None, _weight_is_huge, "forward", None),
    "weight_is_nan": _Plant(None, _weight_is_nan, "state", None),
}

#: The ReLU behind T5's layer turns log's -inf into 0; what trips over it is the 0/0 in log's gradient.
_ABSORBED = {("t5", "log_of_zero"): _Plant(_log_of_zero, None, "backward", "aten.div", "LogBackward0")}


def _sow(layer: nn.Module, plant: _Plant) -> None:
    if plant.weight is not None:
        with torch.no_grad():
            plant.weight(layer)
    if plant.output is not None:
        forward, spoil = layer.forward, plant.output

        @functools.wraps(forward)
        def spoilt(x: Tensor) -> Tensor:
            return spoil(forward(x))

        layer.forward = spoilt


def _line_of(spoil: Callable[[Tensor], Tensor]) -> str:
    return f"test_planted.py:{spoil.__code__.co_firstlineno + 1} in {spoil.__name__}"


@pytest.mark.parametrize("planted", _PLANTS)
@pytest.mark.parametrize("name", _PLACES)
def test_a_planted_fault_is_found_where_it_was_planted(name: str, planted: str) -> None:
    (model, batch, step), plant = next(m for m in TRANSFORMERS_MODELS if m.name == name).build(), _PLANTS[planted]
    plant = _ABSORBED.get((name, planted), plant)
    place, product = _PLACES[name]
    _sow(model.get_submodule(place), plant)
    verdict = nantrace.bisect(step, model, batch)
    origin = verdict.origin
    assert origin is not None, verdict.evidence
    assert (verdict.status, verdict.stage, origin.module) == ("fault", plant.stage, place)
    if plant.stage == "state":
        assert (origin.op, origin.tensor, origin.first_bad) == (None, f"{place}.weight", (0, 1))
    else:
        assert (origin.op, origin.node) == (plant.op or product, plant.node)
    if plant.output is not None:
        assert origin.where == _line_of(plant.output)
