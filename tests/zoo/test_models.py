"""The healthy models are healthy: repeatable bit for bit, silent and finite."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from tests.zoo.identity import untraced_equals_traced
from tests.zoo.models import TRANSFORMERS_MODELS
from tests.zoo.plain_models import PLAIN_MODELS
from tests.zoo.training import ZooModel

_MODELS = (*PLAIN_MODELS, *TRANSFORMERS_MODELS)


@pytest.mark.parametrize("zoo_model", _MODELS, ids=lambda m: m.name)
def test_a_model_trains_the_same_each_time(zoo_model: ZooModel) -> None:
    assert untraced_equals_traced(zoo_model.build, lambda model, step: nullcontext()) == []


@pytest.mark.parametrize("zoo_model", _MODELS, ids=lambda m: m.name)
def test_a_model_stays_finite(zoo_model: ZooModel) -> None:
    model, batch, step = zoo_model.build()
    step(model, batch)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_the_zoo_draws_from_the_random_streams_of_torch_and_numpy() -> None:
    build = next(m.build for m in TRANSFORMERS_MODELS if m.name == "wav2vec2")
    model, batch, step = build()
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[2]
    step(model, batch)
    assert not torch.equal(torch.get_rng_state(), torch_before)
    assert np.random.get_state()[2] != numpy_before
