"""Formulas at the edge of their domain, written out by hand in a module or in the loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import ANY, Answer, Batch, Program, case
from tests.zoo.cases.parts import fill, silenced, training
from tests.zoo.further.parts import HARMLESS, fault, good_rows


class _Apply(nn.Module):
    """`stem`, a linear layer that multiplies by `weight`, then a formula in the submodule `act`."""

    def __init__(self, act: nn.Module, weight: float = 1.0) -> None:
        super().__init__()
        self.stem, self.act = nn.Linear(3, 3), act
        fill(self.stem, weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.stem(x))


def _mean(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).mean()


def _square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).pow(2).mean()


@case(
    "atanh of a value that was clamped to 1, not below it", fault("forward", op="aten.atanh", module="act", kind="inf")
)
def atanh_of_a_clamped_value() -> Program:
    class Fisher(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.atanh(x.clamp(-1.0, 1.0))

    model = _Apply(Fisher())
    return model, {"x": torch.ones(4, 3)}, training(model, _mean)


@case("the log of a product of many small probabilities", fault("loss", op="aten.log", kind="inf"))
def log_of_an_underflowed_product() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return -torch.log(torch.cumprod(torch.sigmoid(model(batch["x"])), -1)).mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 6)
    fill(model, 0.0, -25.0)
    return model, {"x": good_rows()}, training(model, loss_of)


@case("standard deviation over a dimension of one", fault("forward", op="aten.std", module="act", kind="nan"))
def std_over_one_element() -> Program:
    class Standardize(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.unsqueeze(-1)
            return ((x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)).squeeze(-1)

    model = _Apply(Standardize())
    return model, {"x": torch.ones(4, 3)}, silenced(training(model, _square), r"std\(\): degrees of freedom is <= 0")


@case("softplus by hand without a threshold", fault("forward", op="aten.exp", module="act", kind="inf"))
def softplus_by_hand() -> Program:
    class Softplus(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(1 + torch.exp(x))

    model = _Apply(Softplus(), 50.0)
    return model, {"x": torch.ones(4, 3)}, training(model, _mean)


@case(
    "softplus by hand with a threshold in where(): the branch not taken is infinite, its gradient 0 * inf",
    fault("forward", op="aten.exp", module="act", kind="inf"),
)
def softplus_by_hand_in_where() -> Program:
    class Softplus(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x > 20, x, torch.log1p(torch.exp(x)))

    model = _Apply(Softplus(), 50.0)
    return model, {"x": torch.ones(4, 3)}, training(model, _mean)


@case("log1p(-p) of a certain event", fault("loss", op="aten.log1p", kind="inf"))
def log1p_of_minus_one() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return -torch.log1p(-torch.sigmoid(model(batch["x"]))).mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    fill(model, 0.0, 40.0)
    return model, {"x": good_rows()}, training(model, loss_of)


@case("a column scaled to [0, 1] is constant", fault("forward", op="aten.div", module="act", kind="nan"))
def division_by_a_constant_column_s_range() -> Program:
    class Rescale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            low, high = x.amin(0), x.amax(0)
            return (x - low) / (high - low)

    model = _Apply(Rescale())
    return model, {"x": torch.ones(4, 3)}, training(model, _square)


@case("tanh-squashed policy: log(1 - tanh(u)^2) of a large u", fault("loss", op="aten.log", kind="inf"))
def log_of_a_saturated_squash() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return torch.log(1 - torch.tanh(model(batch["x"])).pow(2)).sum(-1).mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    fill(model, 10.0)
    return model, {"x": good_rows()}, training(model, loss_of)


@case(
    "a ratio clamped after exp: the loss is finite, the gradient is 0 * inf",
    fault("loss", op="aten.exp", kind="inf"),
)
def ratio_clamped_after_exp() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        ratio = torch.exp(model(batch["x"])).clamp(max=1.0)
        return -(ratio * batch["advantage"]).mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    fill(model, 100.0)
    return model, {"x": good_rows(), "advantage": torch.randn(4, 1)}, training(model, loss_of)


@case("log_prob of a normal distribution whose scale underflowed", fault("loss", op="aten.log", kind="inf"))
def normal_with_scale_zero() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        mean, log_scale = model(batch["x"]).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_scale.exp(), validate_args=False)
        return -normal.log_prob(batch["y"]).mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.bias[1] = -300.0
    return model, {"x": good_rows(), "y": torch.randn(4, 1)}, training(model, loss_of)


@case("a flow layer whose weight is singular", fault("forward", op="aten._linalg_slogdet", module="flow", kind="inf"))
def singular_flow() -> Program:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x @ self.weight, torch.linalg.slogdet(self.weight)[1]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flow = Flow()

        def forward(self, x: Tensor) -> Tensor:
            z, log_volume = self.flow(x)
            return z.pow(2).mean() - log_volume

    model = Net()
    return model, {"x": good_rows()}, training(model, lambda model, batch: model(batch["x"]))


@case("generalized mean pooling of negative values", fault("forward", op="aten.pow", module="act", kind="nan"))
def fractional_power_of_negatives() -> Program:
    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.pow(1.5).mean(-1)

    model = _Apply(Pool(), -1.0)
    return model, {"x": torch.ones(4, 3)}, training(model, _mean)


@case(
    "a fractional power of 0 has an infinite slope",
    fault("backward", op="aten.pow", module="act", node="PowBackward0", kind="inf"),
)
def fractional_power_of_zero() -> Program:
    class Gamma(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.pow(0.45)

    model = _Apply(Gamma(), 0.0)
    return model, {"x": torch.ones(4, 3)}, training(model, _mean)


@case("the angle of the origin: PyTorch masks the infinite reciprocal in its gradient", HARMLESS)
def angle_of_the_origin() -> Program:
    class Angle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.atan2(x[:, 0], x[:, 1])

    model = _Apply(Angle(), 0.0)
    return model, {"x": torch.ones(4, 3)}, training(model, _mean)


@case(
    "layer_norm with eps 0 of a constant row", fault("forward", op="aten.native_layer_norm", module="act", kind="nan")
)
def layer_norm_without_eps() -> Program:
    model = _Apply(nn.LayerNorm(3, eps=0.0))
    return model, {"x": torch.ones(4, 3)}, training(model, _square)


@case(
    "spectral normalization of a weight that was initialized to zero",
    fault("forward", op="aten.div", module="0.parametrizations.weight.0", kind="nan"),
)
def spectral_norm_of_zeros() -> Program:
    from torch.nn.utils.parametrizations import spectral_norm

    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    nn.init.zeros_(layer.weight)
    model = nn.Sequential(spectral_norm(layer))
    return model, {"x": good_rows()}, training(model, _square)


@case(
    "no label of the batch has a class weight", fault("loss", op="aten.nll_loss_forward", module="<CrossEntropyLoss>")
)
def class_weights_of_zero() -> Program:
    torch.manual_seed(0)
    model, criterion = nn.Linear(3, 4), nn.CrossEntropyLoss(torch.tensor([0.0, 0.0, 1.0, 1.0]))

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return criterion(model(batch["x"]), batch["y"])

    return model, {"x": good_rows(), "y": torch.tensor([0, 1, 0, 1])}, training(model, loss_of)


@case(
    "Kullback-Leibler divergence by hand with a target of 0",
    fault("loss", op="aten.log", kind="inf", alts=(Answer("fault", "loss", op="aten.mul", module=None),)),
)
def divergence_by_hand() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        target = batch["target"]
        return (target * (target.log() - F.log_softmax(model(batch["x"]), -1))).sum(-1).mean()

    torch.manual_seed(0)
    target = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    return (model := nn.Linear(3, 3)), {"x": good_rows(2), "target": target}, training(model, loss_of)


@case("a loss averaged over the valid tokens, of which there are none", fault("loss", op="aten.div", kind="nan"))
def no_valid_token() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (each * batch["valid"]).sum() / batch["valid"].sum()

    torch.manual_seed(0)
    batch = {"x": good_rows(), "y": torch.tensor([0, 1, 2, 0]), "valid": torch.zeros(4)}
    return (model := nn.Linear(3, 3)), batch, training(model, loss_of)


@case("the complex logarithm of a silent frequency", fault("loss", op="aten.log", module=ANY, kind="inf"))
def complex_log_of_zero() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return torch.log(torch.fft.fft(model(batch["x"]))).real.mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    fill(model, 0.0, 1.0)
    return model, {"x": good_rows()}, training(model, loss_of)
