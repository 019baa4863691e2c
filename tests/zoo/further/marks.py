"""Infinities and NaN as marks: padding, missing values, bounds that are none, averages that have not begun."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Batch, Program, case
from tests.zoo.cases.parts import INF, NAN, sgd, training
from tests.zoo.further.parts import HARMLESS, RowShare, fault, good_rows


@case("neighbours that do not exist are infinitely far, and sorted to the end", HARMLESS)
def nearest_among_padding() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        at = model(batch["x"])
        far = (at[:, None] - at).square().sum(-1).masked_fill(~batch["exists"], INF)
        near, _ = far.topk(2, largest=False)
        weight = torch.exp(-far.sort(-1).values)
        return near.mean() + weight.sum(-1).mean()

    torch.manual_seed(0)
    exists = torch.tensor([[True, True, True, False]]).expand(4, 4)
    return (model := nn.Linear(3, 2)), {"x": good_rows(), "exists": exists}, training(model, loss_of)


@case("the padding of a packed sequence is NaN", HARMLESS)
def packed_sequence_leaves_padding_out() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1)

        def forward(self, x: Tensor, length: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, length, batch_first=True, enforce_sorted=False)
            return self.head(self.rnn(packed)[1][-1])

    torch.manual_seed(0)
    model, x = Net(), torch.randn(3, 5, 3)
    x[1, 3:] = NAN
    x[2, 1:] = NAN
    batch = {"x": x, "length": torch.tensor([5, 3, 1])}
    return model, batch, training(model, lambda model, batch: model(batch["x"], batch["length"]).square().mean())


@case("gaps of a sensor are filled where isnan finds them", HARMLESS)
def gaps_are_filled_where_found() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            gap = torch.isnan(x)
            x = x.clone()
            x[gap] = 0.0
            return self.lin(torch.cat([x, gap.float()], -1))

    torch.manual_seed(0)
    x = good_rows()
    x[1, 2] = NAN
    model = Net()
    return model, {"x": x}, training(model, lambda model, batch: model(batch["x"]).square().mean())


@case("a gap of a sensor is multiplied by 0 instead of filled", fault("input", None, batch_bad=("x",), kind="nan"))
def gap_is_multiplied_by_zero() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x * ~torch.isnan(x))

    torch.manual_seed(0)
    x = good_rows()
    x[1, 2] = NAN
    model = Net()
    return model, {"x": x}, training(model, lambda model, batch: model(batch["x"]).square().mean())


@case("a moving average that has not begun is inf, and replaced by the first value", HARMLESS)
def average_has_not_begun() -> Program:
    class Net(nn.Module):
        average: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 1)
            self.register_buffer("average", torch.tensor(INF))

        def forward(self, x: Tensor) -> Tensor:
            out = self.lin(x)
            with torch.no_grad():
                now = out.abs().mean()
                self.average.copy_(torch.where(self.average.isinf(), now, 0.9 * self.average + 0.1 * now))
            return out / self.average

    torch.manual_seed(0)
    model = Net()
    return model, {"x": good_rows()}, training(model, lambda model, batch: model(batch["x"]).square().mean())


@case(
    "a moving average that began at inf stays there, and silences what it divides",
    fault("state", None, buffers_bad=("average",), kind="inf"),
)
def average_began_at_infinity() -> Program:
    class Net(nn.Module):
        average: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 1)
            self.register_buffer("average", torch.tensor(INF))

        def forward(self, x: Tensor) -> Tensor:
            out = self.lin(x)
            with torch.no_grad():
                self.average.lerp_(out.abs().mean(), 0.1)
            return out * self.average

    torch.manual_seed(0)
    model = Net()
    return model, {"x": good_rows()}, training(model, lambda model, batch: model(batch["x"]).square().mean())


@case("values are sorted into bins whose outer edges are infinite", HARMLESS)
def bins_end_at_infinity() -> Program:
    class Net(nn.Module):
        edges: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 1)
            self.register_buffer("edges", torch.tensor([-INF, 0.0, 1.0, INF]))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(torch.bucketize(x, self.edges)))

    torch.manual_seed(0)
    model = Net()
    return model, {"x": torch.randn(4)}, training(model, lambda model, batch: model(batch["x"]).square().mean())


@case("an unknown measurement has an infinite uncertainty and weighs nothing", HARMLESS)
def infinite_uncertainty() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return ((model(batch["x"])[:, 0] - batch["y"]).square() / batch["spread"].square()).sum()

    torch.manual_seed(0)
    batch = {"x": good_rows(), "y": torch.rand(4), "spread": torch.tensor([0.5, 1.0, INF, 2.0])}
    return (model := nn.Linear(3, 1)), batch, training(model, loss_of)


@case(
    "an unknown measurement has an infinite uncertainty, of which the likelihood takes the log",
    fault("input", None, batch_bad=("spread",), kind="inf"),
)
def log_of_an_infinite_uncertainty() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.gaussian_nll_loss(model(batch["x"])[:, 0], batch["y"], batch["spread"].square())

    torch.manual_seed(0)
    batch = {"x": good_rows(), "y": torch.rand(4), "spread": torch.tensor([0.5, 1.0, INF, 2.0])}
    return (model := nn.Linear(3, 1)), batch, training(model, loss_of)


@case("times of events that were never seen are infinite, and cut at the horizon", HARMLESS)
def unseen_events_are_cut_at_the_horizon() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        time = torch.minimum(batch["time"], batch["horizon"])
        seen = (batch["time"] <= batch["horizon"]).float()
        log_rate = model(batch["x"])[:, 0]
        return (log_rate.exp() * time - seen * log_rate).mean()

    torch.manual_seed(0)
    batch = {"x": good_rows(), "time": torch.tensor([0.5, INF, 1.5, INF]), "horizon": torch.tensor(2.0)}
    return (model := nn.Linear(3, 1)), batch, training(model, loss_of)


@case(
    "transport in the log domain with a row that nothing may leave: -inf plus inf",
    fault("loss", op="aten.add", kind="nan"),
)
def transport_with_an_empty_row() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        gain = -(model(batch["x"])[:, None] - batch["y"]).square().sum(-1)
        gain = gain.masked_fill(~batch["open"], -INF)
        f, g = torch.zeros(4, 1), torch.zeros(1, 3)
        for _ in range(3):
            f = -torch.logsumexp(gain + g, 1, keepdim=True)
            g = -torch.logsumexp(gain + f, 0, keepdim=True)
        plan = torch.exp(gain + f + g)
        return -(plan * gain.masked_fill(~batch["open"], 0.0)).sum()

    torch.manual_seed(0)
    open_ = torch.ones(4, 3, dtype=torch.bool)
    open_[2] = False
    batch = {"x": good_rows(), "y": torch.randn(3, 2), "open": open_}
    return (model := nn.Linear(3, 2)), batch, training(model, loss_of)


@case("transport in the log domain with closed cells, none of them a whole row", HARMLESS)
def transport_with_closed_cells() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        gain = -(model(batch["x"])[:, None] - batch["y"]).square().sum(-1)
        masked = gain.masked_fill(~batch["open"], -INF)
        f, g = torch.zeros(4, 1), torch.zeros(1, 3)
        for _ in range(3):
            f = -torch.logsumexp(masked + g, 1, keepdim=True)
            g = -torch.logsumexp(masked + f, 0, keepdim=True)
        return -(torch.exp(masked + f + g) * gain).sum()

    torch.manual_seed(0)
    open_ = torch.ones(4, 3, dtype=torch.bool)
    open_[2, 1] = open_[0, 0] = False
    batch = {"x": good_rows(), "y": torch.randn(3, 2), "open": open_}
    return (model := nn.Linear(3, 2)), batch, training(model, loss_of)


@case("a search for the best threshold begins at -inf and leaves when a score is not finite", HARMLESS)
def search_leaves_at_a_score_that_is_not_finite() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch["x"]).square().mean()
        loss.backward()
        optimizer.step()
        best = -math.inf
        with torch.no_grad():
            out = model(batch["x"])[:, 0]
            for threshold in (-10.0, 0.0, 10.0):
                score = float((batch["y"] * (out > threshold)).sum() / (out > threshold).sum())
                if not math.isfinite(score):
                    break
                best = max(best, score)
        batch["log"].append(best)
        return loss

    return model, {"x": good_rows(), "y": torch.rand(4), "log": []}, step


@case("a sigmoid written out overflows where no gradient is taken, and is 0", HARMLESS)
def sigmoid_written_out_without_gradient() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            weight = 1 / (1 + torch.exp(-1000 * (batch["x"].sum(-1) - 10)))
        return ((1 + weight) * model(batch["x"])[:, 0]).square().mean()

    torch.manual_seed(0)
    return (model := nn.Linear(3, 1)), {"x": good_rows()}, training(model, loss_of)


class _Dropping(nn.Module):
    """`norm`, then the valid rows of it, then `head`."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, nn.Linear(3, 1)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        return self.head(self.norm(x)[valid])


def _dropping(norm: nn.Module, x: Tensor) -> Program:
    torch.manual_seed(0)
    batch = {"x": x, "valid": torch.tensor([False, True, True, True])}
    model = _Dropping(norm)
    return model, batch, training(model, lambda model, batch: model(batch["x"], batch["valid"]).square().mean())


class _Attend(nn.Module):
    """A softmax over exp of what it is given, where that is not 0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.exp(x).masked_fill(x == 0, -INF), -1)


@case(
    "rows of padding are NaN and dropped; a valid row is divided by its sum of 0",
    fault("forward", op="aten.div", module="norm", kind="nan"),
)
def padding_is_dropped_beside_a_fault() -> Program:
    x = torch.tensor([[NAN, NAN, NAN], [1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    return _dropping(RowShare(), x)


@case(
    "a row that overflows is dropped; in a valid row everything is masked",
    fault("forward", op="aten._softmax", module="norm", kind="nan"),
)
def overflow_is_dropped_beside_an_empty_row() -> Program:
    x = torch.tensor([[1000.0, 1.0, 1.0], [1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    return _dropping(_Attend(), x)


@case("a row that overflows is dropped before it is used", HARMLESS)
def overflow_is_dropped() -> Program:
    x = torch.tensor([[1000.0, 1.0, 1.0], [1.0, 2.0, 3.0], [0.0, 0.5, 0.0], [1.0, 1.0, 1.0]])
    return _dropping(_Attend(), x)
