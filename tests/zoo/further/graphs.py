"""Graphs: degrees of zero, empty neighbourhoods, aggregation by index."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.case import Answer, Batch, Program, case
from tests.zoo.cases.parts import INF, NAN, training
from tests.zoo.further.parts import HARMLESS, fault


class _Net(nn.Module):
    """`lin`, then `conv`, which is given the node features and the edges, then `head`."""

    def __init__(self, conv: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.lin, self.conv, self.head = nn.Linear(3, 4, bias=bias), conv, nn.Linear(4, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.head(self.conv(self.lin(x), edges))


#: From, to. Node 3 has no incoming edge, node 2 has one.
_EDGES = torch.tensor([[0, 1, 2, 3, 1], [1, 0, 0, 2, 0]])


def _program(conv: nn.Module) -> Program:
    torch.manual_seed(0)
    model = _Net(conv)
    batch = {"x": torch.rand(4, 3) + 0.5, "edges": _EDGES}
    return model, batch, training(model, lambda model, batch: model(batch["x"], batch["edges"]).square().mean())


def _dense(x: Tensor, edges: Tensor) -> Tensor:
    return torch.zeros(len(x), len(x)).index_put((edges[1], edges[0]), torch.ones(()))


@case(
    "symmetric normalization of an adjacency with an isolated node",
    fault("forward", op="aten.pow", module="conv", kind="inf"),
)
def degree_of_zero() -> Program:
    class Conv(nn.Module):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            adjacency = _dense(x, edges)
            scale = adjacency.sum(1) ** -0.5
            return (scale[:, None] * adjacency * scale) @ x

    return _program(Conv())


@case("the infinite scale of an isolated node is set to 0 before it is used", HARMLESS)
def degree_of_zero_is_made_safe() -> Program:
    class Conv(nn.Module):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            degree = torch.zeros(len(x)).index_add(0, edges[1], torch.ones(edges.shape[1]))
            scale = degree.pow(-0.5)
            scale.masked_fill_(scale == INF, 0.0)
            weight = (scale[edges[0]] * scale[edges[1]])[:, None]
            return torch.zeros_like(x).index_add(0, edges[1], weight * x[edges[0]])

    return _program(Conv())


@case("the mean over no neighbour", fault("forward", op="aten.div", module="conv", kind="nan"))
def mean_over_no_neighbour() -> Program:
    class Conv(nn.Module):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            total = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
            count = torch.zeros(len(x), 1).index_add(0, edges[1], torch.ones(edges.shape[1], 1))
            return total / count

    return _program(Conv())


@case("a softmax over each neighbourhood, its maxima beginning at -inf; one node has none", HARMLESS)
def segment_softmax_with_an_empty_neighbourhood() -> Program:
    class Conv(nn.Module):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            score = (x[edges[0]] * x[edges[1]]).sum(-1)
            with torch.no_grad():
                top = torch.full((len(x),), -INF).scatter_reduce(0, edges[1], score, "amax")
            weight = torch.exp(score - top[edges[1]])
            total = torch.zeros(len(x)).index_add(0, edges[1], weight)
            share = (weight / total[edges[1]])[:, None]
            return torch.zeros_like(x).index_add(0, edges[1], share * x[edges[0]])

    return _program(Conv())


@case(
    "the maximum over no neighbour stays -inf, and a linear layer makes NaN of it",
    fault(
        "forward",
        op="aten.addmm",
        module="head",
        kind="nan",
        alts=(Answer("fault", "forward", op="aten.full", module="conv"),),
    ),
)
def maximum_over_no_neighbour() -> Program:
    class Conv(nn.Module):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            index = edges[1][:, None].expand(-1, x.shape[1])
            return torch.full(tuple(x.shape), -INF).scatter_reduce(0, index, x[edges[0]], "amax")

    model, batch, step = _program(Conv())
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[1.0, -1.0, 0.5, 0.2]]))  # type: ignore[union-attr, operator]
    return model, batch, step


@case(
    "the standard deviation over one neighbour: the root of 0, which a clamp at 0 lets through",
    fault("backward", op="aten.div", module="conv", node="SqrtBackward0"),
)
def spread_of_one_neighbour() -> Program:
    class Conv(nn.Module):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            count = torch.zeros(len(x), 1).index_add(0, edges[1], torch.ones(edges.shape[1], 1)).clamp(min=1)
            mean = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]) / count
            square = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] ** 2) / count
            return torch.sqrt((square - mean * mean).clamp(min=0))

    return _program(Conv())


@case("the standard deviation over one neighbour: ReLU's gradient at 0 erases the infinite slope", HARMLESS)
def spread_of_one_neighbour_behind_relu() -> Program:
    class Conv(nn.Module):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            count = torch.zeros(len(x), 1).index_add(0, edges[1], torch.ones(edges.shape[1], 1)).clamp(min=1)
            mean = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]) / count
            square = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] ** 2) / count
            return torch.sqrt(torch.relu(square - mean * mean))

    return _program(Conv())


@case(
    "attenuation by the log of the degree: an isolated node has infinity times 0",
    fault("forward", op="aten.div", module="conv.scale", kind="inf", also=(("forward", "aten.mul", "conv"),)),
)
def attenuation_of_an_isolated_node() -> Program:
    class Scale(nn.Module):
        def forward(self, degree: Tensor) -> Tensor:
            return torch.log(torch.tensor(3.0)) / torch.log(degree + 1)

    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scale()

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            degree = torch.zeros(len(x)).index_add(0, edges[1], torch.ones(edges.shape[1]))
            total = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
            return total * self.scale(degree)[:, None]

    return _program(Conv())


class _Attention(nn.Module):
    def __init__(self, added: bool) -> None:
        super().__init__()
        self.added = added

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        adjacent, scores = _dense(x, edges) > 0, x @ x.T
        if self.added:
            scores = scores + torch.zeros(len(x), len(x)).masked_fill(~adjacent, -INF)
        else:
            scores = scores.masked_fill(~adjacent, -INF)
        return torch.where(adjacent.any(-1, keepdim=True), torch.softmax(scores, -1), 0.0) @ x


@case(
    "the NaN row of a node without neighbours is replaced after softmax: its gradient is not",
    fault("forward", op="aten._softmax", module="conv", kind="nan"),
)
def empty_neighbourhood_replaced_after_softmax() -> Program:
    return _program(_Attention(added=True))


@case("the NaN row of a node without neighbours is replaced, and the mask before softmax erases its gradient", HARMLESS)
def empty_neighbourhood_erased_by_its_mask() -> Program:
    return _program(_Attention(added=False))


@case("the row of a node without neighbours is opened before softmax and zeroed after it", HARMLESS)
def empty_neighbourhood_opened_before_softmax() -> Program:
    class Conv(nn.Module):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            adjacent = _dense(x, edges) > 0
            alone = ~adjacent.any(-1, keepdim=True)
            share = torch.softmax((x @ x.T).masked_fill(~adjacent & ~alone, -INF), -1)
            return share.masked_fill(alone, 0.0) @ x

    return _program(Conv())


@case("one feature of one edge is missing", fault("input", None, batch_bad=("length",), kind="nan"))
def feature_of_an_edge_is_missing() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor, edges: Tensor, length: Tensor) -> Tensor:
            message = self.lin(torch.cat([x[edges[0]], length[:, None]], -1))
            total = torch.zeros(len(x), 4).index_add(0, edges[1], message)
            return self.head(torch.relu(total))

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["edges"], batch["length"]).square().mean()

    torch.manual_seed(0)
    length = torch.tensor([0.5, 1.2, NAN, 0.7, 2.0])
    return (model := Net()), {"x": torch.rand(4, 3), "edges": _EDGES, "length": length}, training(model, loss_of)


@case("pairs that no path joins are infinitely far: their weight is exp(-inf)", HARMLESS)
def unreachable_pairs_weigh_nothing() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return (torch.exp(-batch["hops"]) @ model(batch["x"])).square().mean()

    torch.manual_seed(0)
    hops = torch.tensor([[0.0, 1.0, INF], [1.0, 0.0, INF], [INF, INF, 0.0]])
    return (model := nn.Linear(3, 2)), {"x": torch.rand(3, 3), "hops": hops}, training(model, loss_of)
