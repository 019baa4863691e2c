"""Births in places that are easily missed: methods, hooks, parametrizations, code between modules, loaders."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.case import ANY, Answer, Batch, Program, case
from tests.zoo.cases.parts import INF, NAN, fill, sgd, training
from tests.zoo.further.parts import Code, RowShare, chain, fault, good_rows


def _square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).square().mean()


@case("the model's own code undoes a logarithm", fault("forward", op="aten.expm1", module="", kind="inf"))
def prediction_leaves_the_log_scale() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.out = nn.Linear(3, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            z = self.out(torch.tanh(self.body(x)))
            return z.sign() * torch.expm1(z.abs())

    torch.manual_seed(0)
    model = Net()
    fill(model.out, 0.1, -120.0)
    batch = {"x": good_rows(), "y": torch.ones(4, 1)}
    return model, batch, training(model, lambda model, b: F.smooth_l1_loss(model(b["x"]), b["y"]))


@case(
    "log cosh written out in a method of a submodule: inf - inf",
    fault("forward", op="aten.cosh", module="critic", kind="inf"),
)
def log_cosh_in_a_method() -> Program:
    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), 40.0))

        def energy(self, x: Tensor) -> Tensor:
            return torch.log(torch.cosh(x @ self.weight))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.critic = nn.Linear(3, 3), Critic()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.critic.energy(self.embed(x)) - self.critic.energy(self.embed(y))

    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.embed.bias.fill_(3.0)
    batch = {"x": torch.rand(3, 3), "y": torch.rand(3, 3)}
    return model, batch, training(model, lambda model, b: model(b["x"], b["y"]).mean())


@case(
    "the second of three planar flows cannot be inverted: the loss is NaN, its gradients are not",
    fault("forward", op="aten.log1p", module="flow.1", kind="nan"),
)
def flow_cannot_be_inverted() -> Program:
    class Planar(nn.Module):
        def __init__(self, u: float, w: float) -> None:
            super().__init__()
            self.u, self.w = nn.Parameter(torch.full((3,), u)), nn.Parameter(torch.full((3,), w))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            t = torch.tanh(x @ self.w)
            return x + self.u * t[:, None], torch.log1p((1 - t * t) * (self.u @ self.w))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flow = nn.ModuleList([Planar(0.1, 0.1), Planar(-2.0, 1.0), Planar(0.1, 0.1)])

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            volume = torch.zeros(len(x))
            for layer in self.flow:
                x, more = layer(x)
                volume = volume + more
            return x, volume

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        z, volume = model(batch["x"])
        return (z.square().sum(1) / 2 - volume).mean()

    torch.manual_seed(0)
    x = torch.full((4, 3), 3.0)
    x[1] = 0.1
    return (model := Net()), {"x": x}, training(model, loss_of)


@case("code of a container between its modules", fault("forward", op="aten.reciprocal", module="encoder", kind="inf"))
def code_between_modules_of_a_container() -> Program:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.blocks[0](x))
            return self.blocks[1](h * (1.0 / h.sum(-1, keepdim=True)))

    torch.manual_seed(0)
    model = chain(encoder=Encoder(), head=nn.Linear(3, 1))
    fill(model.encoder.blocks[0], 1.0)
    x = torch.rand(4, 3)
    x[1] = -1.0
    return model, {"x": x}, training(model, _square)


@case("a forward hook takes the log of what a ReLU put out", fault("forward", op="aten.log", module=ANY, kind="inf"))
def forward_hook_takes_a_log() -> Program:
    torch.manual_seed(0)
    model = chain(lin=nn.Linear(3, 4), act=nn.ReLU(), head=nn.Linear(4, 1))
    model.act.register_forward_hook(lambda module, args, output: torch.log(output))
    return model, {"x": torch.randn(4, 3)}, training(model, _square)


@case("a parametrization divides a row of zeros", fault("forward", op="aten.div", module=ANY, kind="nan"))
def parametrized_row_is_zero() -> Program:
    torch.manual_seed(0)
    model = chain(lin=nn.Linear(3, 4), head=nn.Linear(4, 1))
    unit = Code(lambda weight: weight / weight.norm(dim=1, keepdim=True))
    nn.utils.parametrize.register_parametrization(model.lin, "weight", unit)
    with torch.no_grad():
        model.lin.parametrizations.weight.original[2] = 0.0
    return model, {"x": torch.randn(4, 3)}, training(model, _square)


@case("a straight-through rounding with a scale of 0", fault("forward", op="aten.div", module="quant", kind="nan"))
def rounding_scale_is_zero() -> Program:
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            scale = x.abs().amax(-1, keepdim=True) / 127
            return torch.round(x / scale) * scale

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient

    torch.manual_seed(0)
    model = chain(lin=nn.Linear(3, 4, bias=False), quant=Code(Round.apply), head=nn.Linear(4, 1))
    x = torch.rand(3, 3)
    x[2] = 0.0
    return model, {"x": x}, training(model, _square)


@case("a part of each row is divided in place by its sum", fault("forward", op="aten.div_", module="share", kind="nan"))
def part_of_a_row_is_divided_in_place() -> Program:
    def share(x: Tensor) -> Tensor:
        y = x.clone()
        part = y[:, 1:]
        part.div_(part.sum(-1, keepdim=True))
        return y

    torch.manual_seed(0)
    model = chain(lin=nn.Linear(3, 4, bias=False), act=nn.ReLU(), share=Code(share), head=nn.Linear(4, 1)).double()
    fill(model.lin, 0.5)
    x = torch.rand(4, 3).double()
    x[3] = -1.0
    return model, {"x": x}, training(model, _square)


@case("the complex logarithm of a silent signal", fault("forward", op="aten.log", module="cepstrum", kind="inf"))
def cepstrum_of_silence() -> Program:
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.rfft(x) * self.weight

    torch.manual_seed(0)
    cepstrum = Code(lambda z: torch.fft.irfft(torch.log(z), n=8))
    model = chain(filter=Filter(), cepstrum=cepstrum, head=nn.Linear(8, 1))
    x = torch.randn(3, 8)
    x[2] = 0.0
    return model, {"x": x}, training(model, _square)


@case(
    "a target is NaN in a batch that the step's own loader brings",
    fault("input", None, batch_bad=("",), any_tensor=True, kind="nan"),
)
def loader_yields_a_bad_target() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    y = torch.rand(9, 1)
    y[7] = NAN
    data = DataLoader(TensorDataset(torch.rand(9, 3), y), batch_size=3)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for x, target in data:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
        return loss

    return model, {"epoch": torch.tensor(3)}, step


@case("atanh leaves its range in inference mode", fault("forward", op="aten.atanh", module="inverse", kind="nan"))
def inference_leaves_the_range() -> Program:
    torch.manual_seed(0)
    model = chain(lin=nn.Linear(3, 2), sign=Code(torch.sign), inverse=Code(lambda x: torch.atanh(1.5 * x)))

    def step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        with torch.inference_mode():
            return {"loss": model(batch["x"]).mean()}

    return model, {"x": torch.randn(4, 3)}, step


@case(
    "the embeddings that two replicas gather are divided by their lengths; one is 0",
    fault("loss", op="aten.div", kind="nan"),
)
def gathered_embedding_is_zero() -> Program:
    torch.manual_seed(0)
    model = nn.ModuleDict({"rank0": nn.Linear(3, 4, bias=False), "rank1": nn.Linear(3, 4, bias=False)})

    def loss_of(model: Any, batch: Batch) -> Tensor:
        z = torch.cat([model["rank0"](batch["x0"]), model["rank1"](batch["x1"])])
        z = z / z.norm(dim=-1, keepdim=True)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))

    return model, {"x0": torch.randn(3, 3), "x1": torch.zeros(2, 3)}, training(model, loss_of)


@case(
    "a distribution refuses the NaN that a row of zeros became",
    fault("forward", op="aten.div", module="share", kind="nan"),
)
def distribution_refuses_a_row_of_zeros() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return -torch.distributions.Categorical(logits=model(batch["x"])).log_prob(torch.zeros(4)).mean()

    torch.manual_seed(0)
    model = chain(share=RowShare(), lin=nn.Linear(3, 2))
    x = torch.rand(4, 3)
    x[1] = 0.0
    return model, {"x": x}, training(model, loss_of)


@case(
    "the loss of a class without positives, whose weight is a criterion's buffer",
    fault(
        "state",
        None,
        buffers_bad=("pos_weight",),
        kind="inf",
        alts=(Answer("fault", "input"), Answer("fault", "loss", module="<BCEWithLogitsLoss>")),
    ),
)
def weight_of_a_class_without_positives() -> Program:
    torch.manual_seed(0)
    positives = torch.tensor([4.0, 2.0, 0.0])
    model, criterion = nn.Linear(4, 3), nn.BCEWithLogitsLoss(pos_weight=(8 - positives) / positives)
    batch = {"x": torch.randn(4, 4), "y": torch.eye(4)[:, 1:]}
    batch["y"][:, 2] = 0.0
    return model, batch, training(model, lambda model, b: criterion(model(b["x"]), b["y"]))


@case("weight norm with a length that was never set", fault("state", None, param_bad=("original0",), kind="nan"))
def weight_norm_length_is_nan() -> Program:
    torch.manual_seed(0)
    model = chain(lin=nn.Linear(3, 4), act=nn.ReLU(), head=nn.utils.parametrizations.weight_norm(nn.Linear(4, 1)))
    with torch.no_grad():
        model.head.parametrizations.weight.original0.fill_(NAN)
    return model, {"x": torch.randn(4, 3)}, training(model, _square)


@case("sparse rows hold an infinity", fault("input", None, batch_bad=("adj",), kind="inf"))
def sparse_rows_hold_an_infinity() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return model(torch.sparse.mm(batch["adj"], batch["x"])).square().mean()

    torch.manual_seed(0)
    adj = torch.tensor([[0.5, INF, 0.0], [0.0, 1.0, 0.25], [2.0, 0.0, 1.0]]).to_sparse()
    return (model := nn.Linear(3, 2)), {"x": torch.rand(3, 3), "adj": adj}, training(model, loss_of)
