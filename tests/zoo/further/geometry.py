"""Geometry and metrics: degenerate directions, angles, decompositions, distances of a point to itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.case import ANY, Answer, Batch, Program, case
from tests.zoo.cases.parts import fill, training
from tests.zoo.further.parts import HARMLESS, fault, good_rows


class _Net(nn.Module):
    """`lin`, which hands the rows on unchanged, then `geo`."""

    def __init__(self, geo: nn.Module, width: int = 3) -> None:
        super().__init__()
        self.lin, self.geo = nn.Linear(width, width, bias=False), geo
        with torch.no_grad():
            self.lin.weight.copy_(torch.eye(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.geo(self.lin(x))


def _program(geo: nn.Module, x: Tensor) -> Program:
    model = _Net(geo, x.shape[-1])
    return model, {"x": x}, training(model, lambda model, batch: model(batch["x"]).mean())


@case("the normal of two parallel edges", fault("forward", op="aten.div", module="geo", kind="nan"))
def normal_of_parallel_edges() -> Program:
    class Normal(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            normal = torch.linalg.cross(x[:-1], x[1:])
            return normal / torch.linalg.norm(normal, dim=-1, keepdim=True)

    return _program(Normal(), torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [1.0, 0.0, 1.0]]))


@case(
    "the arcsine of exactly 1 has an infinite slope",
    fault("backward", op="aten.rsqrt", module="geo", node="AsinBackward0", kind="inf"),
)
def arcsine_of_one() -> Program:
    class Angle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.asin(x)

    return _program(Angle(), torch.tensor([[0.5, 1.0], [0.2, -0.3]]))


@case(
    "the hyperbolic distance of a point to itself: arcosh of 1",
    fault("backward", op="aten.rsqrt", module="geo", node="AcoshBackward0", kind="inf"),
)
def hyperbolic_distance_to_itself() -> Program:
    class Poincare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            gap = (x[:, None] - x).square().sum(-1)
            room = 1 - x.square().sum(-1)
            return torch.acosh(1 + 2 * gap / (room[:, None] * room))

    return _program(Poincare(), torch.tensor([[0.5, 0.1], [0.2, -0.3]]))


@case(
    "hypot of two zeros: 0/0 in its gradient",
    fault("backward", op="aten.div", module="geo", node="HypotBackward0", kind="nan"),
)
def hypot_of_the_origin() -> Program:
    class Radius(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.hypot(x[:, 0], x[:, 1])

    return _program(Radius(), torch.tensor([[0.5, 0.1], [0.0, 0.0]]))


@case(
    "the logarithm of a rotation by 0: where() selects another formula, and the gradient is 0/0",
    fault(
        "backward",
        op="aten.div",
        module="geo",
        node="DivBackward0",
        alts=(Answer("fault", "forward", op="aten.div", module="geo"),),
    ),
)
def logarithm_of_no_rotation() -> Program:
    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.where(x.abs() < 1e-6, 1.0, x / torch.sin(x))

    return _program(Log(), torch.tensor([[0.5, 0.0], [0.2, -0.3]]))


@case(
    "points in the camera's plane are indexed away after the division: their gradient is 0/0",
    fault(
        "backward",
        op="aten.div",
        module="geo",
        node="DivBackward0",
        alts=(Answer("fault", "forward", op="aten.div", module="geo"),),
    ),
)
def points_in_the_camera_plane_are_indexed_away() -> Program:
    class Project(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x[:, :2] / x[:, 2:])[x[:, 2] > 0]

    return _program(Project(), torch.tensor([[0.5, 1.0, 2.0], [0.2, -0.3, 0.0], [0.1, 0.2, 1.0]]))


@case("points in the camera's plane are indexed away before the division", HARMLESS)
def points_in_the_camera_plane_are_indexed_away_before() -> Program:
    class Project(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x[x[:, 2] > 0]
            return x[:, :2] / x[:, 2:]

    return _program(Project(), torch.tensor([[0.5, 1.0, 2.0], [0.2, -0.3, 0.0], [0.1, 0.2, 1.0]]))


@case(
    "singular vectors of the identity: its singular values have no gap",
    fault("backward", op=ANY, module="geo", node="LinalgSvdBackward0"),
)
def singular_vectors_of_the_identity() -> Program:
    class Vectors(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            left, _, right = torch.linalg.svd(x)
            return left * torch.arange(9.0).reshape(3, 3) @ right

    return _program(Vectors(), torch.eye(3))


@case("singular values of the identity: their own gradient needs no gap", HARMLESS)
def singular_values_of_the_identity() -> Program:
    class Values(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.svdvals(x)

    return _program(Values(), torch.eye(3))


@case(
    "a triangular system with a 0 on its diagonal",
    fault("forward", op="aten.linalg_solve_triangular", module="geo", kind=None),
)
def triangular_system_with_a_zero_pivot() -> Program:
    class Solve(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.solve_triangular(x.tril(), torch.ones(len(x), 1), upper=False)

    return _program(Solve(), torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.0, 0.0], [0.1, 0.2, 1.0]]))


@case(
    "the unchecked inverse of a singular matrix",
    fault("forward", op="aten.linalg_inv_ex", module="geo"),
)
def unchecked_inverse_of_a_singular_matrix() -> Program:
    class Inverse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv_ex(x).inverse

    return _program(Inverse(), torch.tensor([[1.0, 2.0], [2.0, 4.0]]))


@case("the exponential of a matrix leaves the range", fault("forward", op=ANY, module="geo"))
def matrix_exponential_overflows() -> Program:
    class Exponential(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.matrix_exp(x)

    return _program(Exponential(), torch.tensor([[100.0, 1.0], [2.0, 100.0]]))


@case(
    "the covariance of a single sample is NaN, and its Cholesky factor does not exist",
    fault("forward", op="aten.div", module="cov", kind="nan"),
)
def covariance_of_one_sample() -> Program:
    class Covariance(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x - x.mean(0)
            return x.T @ x / (len(x) - torch.ones(()))

    class Whiten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.cov = nn.Linear(3, 2), Covariance()

        def forward(self, x: Tensor) -> Tensor:
            x = self.lin(x)
            return torch.linalg.solve_triangular(torch.linalg.cholesky(self.cov(x)), x.T, upper=False)

    torch.manual_seed(0)
    model = Whiten()
    return model, {"x": good_rows(1)}, training(model, lambda model, batch: model(batch["x"]).mean())


@case("distances between points of which two coincide: cdist's gradient is 0 there", HARMLESS)
def distances_of_points_that_coincide() -> Program:
    class Distances(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cdist(x, x) + torch.nn.functional.pairwise_distance(x, x.flip(0))

    return _program(Distances(), torch.tensor([[0.5, 1.0], [0.5, 1.0]]))


@case(
    "distances out of products, cut at 0 before the root: of a point to itself 1/0",
    fault("backward", op="aten.div", node="SqrtBackward0"),
)
def distances_out_of_products() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        x = model(batch["x"])
        square = x.square().sum(-1)
        distance = torch.sqrt((square[:, None] + square - 2 * x @ x.T).clamp(min=0))
        return torch.relu(1 + distance.amax(-1) - distance.mean(-1)).mean()

    model = nn.Linear(2, 2)
    fill(model, 1.0)
    return model, {"x": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])}, training(model, loss_of)


@case("a step of Newton's method where the slope is 0", fault("forward", op="aten.div", module="geo", kind="inf"))
def newton_step_on_a_flat_spot() -> Program:
    class Newton(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            root = torch.zeros_like(x)
            for _ in range(3):
                root = root - (root**2 - x) / (2 * root)
            return root

    return _program(Newton(), good_rows())
