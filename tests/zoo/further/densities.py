"""Densities of torch.distributions at the edge of their support, without their validation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import (
    Bernoulli,
    Beta,
    Categorical,
    Gamma,
    LogNormal,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    Poisson,
    Uniform,
)

from tests.zoo.case import ANY, Program, case
from tests.zoo.cases.parts import INF, LossOf, fill, training
from tests.zoo.further.parts import HARMLESS, fault, good_rows


def _program(loss_of: LossOf, outputs: int = 2, bias: float | None = None, **batch: Tensor) -> Program:
    """A linear layer under a density; with `bias`, every output is that."""
    torch.manual_seed(0)
    model = nn.Linear(3, outputs)
    if bias is not None:
        fill(model, 0.0, bias)
    return model, {"x": good_rows(), **batch}, training(model, loss_of)


@case("a beta distribution with a concentration of 0", fault("loss", op="aten.lgamma", kind="inf"))
def beta_without_concentration() -> Program:
    return _program(
        lambda model, batch: (
            -Beta(*torch.relu(model(batch["x"])).unbind(-1), validate_args=False).log_prob(batch["y"]).mean()
        ),
        bias=-1.0,
        y=torch.full((4,), 0.4),
    )


@case("a gamma density below concentration 1 has a pole at 0", fault("loss", op="aten.xlogy", kind="inf"))
def gamma_density_at_zero() -> Program:
    return _program(
        lambda model, batch: -Gamma(*model(batch["x"]).unbind(-1), validate_args=False).log_prob(batch["y"]).mean(),
        bias=0.5,
        y=torch.tensor([0.3, 0.0, 1.0, 2.0]),
    )


@case(
    "a Poisson rate of 0 where nothing was counted: the value is 0 log 0 = 0, the gradient 0/0",
    fault("backward", op="aten.div", node="XlogyBackward0", kind="nan"),
)
def poisson_of_nothing() -> Program:
    return _program(
        lambda model, batch: (
            -Poisson(model(batch["x"]).square()[:, 0], validate_args=False).log_prob(batch["y"]).mean()
        ),
        bias=0.0,
        y=torch.zeros(4),
    )


@case(
    "a Gaussian in two dimensions without spread in one of them",
    fault("loss", op="aten.linalg_solve_triangular", module=ANY),
)
def gaussian_without_spread_in_one_direction() -> Program:
    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        spread = torch.diag_embed(torch.relu(model(batch["x"])))
        return -MultivariateNormal(torch.zeros(2), scale_tril=spread, validate_args=False).log_prob(batch["y"]).mean()

    model, batch, step = _program(loss_of, bias=1.0, y=torch.ones(4, 2))
    with torch.no_grad():
        model.bias[1] = -1.0  # type: ignore[index, operator]
    return model, batch, step


@case("a categorical distribution out of probabilities that are all 0", fault("loss", op="aten.div", kind="nan"))
def categorical_without_mass() -> Program:
    return _program(
        lambda model, batch: (
            -Categorical(probs=torch.relu(model(batch["x"])), validate_args=False).log_prob(batch["y"]).mean()
        ),
        bias=-1.0,
        y=torch.tensor([0, 1, 0, 1]),
    )


@case("the log-normal density of 0", fault("loss", op="aten.log", kind="inf"))
def log_normal_density_of_zero() -> Program:
    return _program(
        lambda model, batch: (
            -LogNormal(model(batch["x"])[:, 0], torch.ones(4), validate_args=False).log_prob(batch["y"]).mean()
        ),
        y=torch.tensor([1.0, 2.0, 0.0, 0.5]),
    )


@case("a uniform prior outside its support", fault("loss", op="aten.log", kind="inf"))
def uniform_prior_outside_its_support() -> Program:
    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["x"])
        return out.square().mean() - Uniform(-1.0, 1.0, validate_args=False).log_prob(out).mean()

    return _program(loss_of, bias=3.0)


@case("a certain Bernoulli variable: its log probability is clamped", HARMLESS)
def certain_bernoulli() -> Program:
    return _program(
        lambda model, batch: (
            -Bernoulli(torch.sigmoid(model(batch["x"]))[:, 0], validate_args=False).log_prob(batch["y"]).mean()
        ),
        bias=100.0,
        y=torch.zeros(4),
    )


@case("one component of a mixture is switched off by -inf", HARMLESS)
def mixture_with_a_component_switched_off() -> Program:
    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = torch.tensor([0.0, -INF, 1.0]).expand(4, 3)
        mixture = MixtureSameFamily(
            Categorical(logits=logits, validate_args=False),
            Normal(model(batch["x"]), torch.ones(3)),
            validate_args=False,
        )
        return -mixture.log_prob(batch["y"]).mean()

    return _program(loss_of, outputs=3, y=torch.rand(4))
