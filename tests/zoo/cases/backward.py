"""Values born in backward, after a finite loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.case import Batch, End, Expectation, Program, case
from tests.zoo.cases.parts import INF, fill, sgd, training


@case(
    "richzhang/PerceptualSimilarity#69; pytorch/pytorch#6394, #2421; mpariente/pytorch_stoi#7; akanazawa/cmr#11",
    Expectation(
        "fault",
        "backward",
        phase="backward",
        op="aten.div",
        module="unit",
        node="SqrtBackward0",
        kind="nan",
        culprit="eps is added after the sqrt: the upstream gradient 0 / (2*sqrt(0)) is 0/0",
        end=End(loss="finite", params=True),
    ),
)
def sqrt_zero_backward() -> Program:
    class UnitLength(nn.Module):
        def forward(self, features: Tensor) -> Tensor:
            return features / (torch.sqrt((features**2).sum(1, keepdim=True)) + 1e-10)

    class Perceptual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.feat, self.unit = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh()), UnitLength()

        def forward(self, x: Tensor) -> Tensor:
            return self.unit(self.feat(x))

    torch.manual_seed(0)
    model = Perceptual()
    batch = {"x": torch.tensor([[1.0, 1, 1, 1], [0.0, 0, 0, 0]])}  # the second feature vector is exactly 0
    return model, batch, training(model, lambda model, batch: (model(batch["x"]) - 1).pow(2).mean())


@case(
    "variant of where_sqrt_forward_all_finite behind a ReLU",
    Expectation(
        "contained",
        "backward",
        phase="backward",
        op="aten.div",
        module="safe",
        node="SqrtBackward0",
        kind="nan",
        culprit="a real NaN gradient, but threshold_backward writes 0 wherever its input was <= 0",
        end=End(loss="finite", params=False, grads=False),
    ),
)
def where_sqrt_absorbed_by_relu() -> Program:
    class SafeSqrt(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x > 0, torch.sqrt(x), torch.zeros_like(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.safe = nn.Linear(3, 4), SafeSqrt()

        def forward(self, x: Tensor) -> Tensor:
            return self.safe(torch.relu(self.lin(x)))

    torch.manual_seed(0)
    model = Net()
    return model, {"x": torch.randn(4, 3)}, training(model, lambda model, batch: model(batch["x"]).sum())


@case(
    "mpariente/pytorch_stoi#7; akanazawa/cmr#11; pytorch/pytorch#2421, #6394; photosynthesis-team/piq#308",
    Expectation(
        "fault",
        "backward",
        phase="backward",
        op="aten.div",
        module="dist",
        node="SqrtBackward0",
        kind="inf",
        also=(("backward", "aten.mul", "dist"),),
        culprit="d sqrt(0) is inf, then 0*inf in PowBackward0, which detect_anomaly names: one node too late",
        end=End(loss="finite", params=True),
    ),
)
def distance_sqrt_zero_inf_then_nan() -> Program:
    class Distance(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.sqrt(((a - b) ** 2).sum(-1))

    class Triplet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.dist = nn.Linear(3, 4), Distance()

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.dist(self.enc(a), self.enc(b))

    torch.manual_seed(0)
    model = Triplet()
    a = torch.randn(3, 3)
    b = torch.cat([a[:1], torch.randn(2, 3)])  # pair 0 is identical
    return model, {"a": a, "b": b}, training(model, lambda model, batch: model(batch["a"], batch["b"]).mean())


@case(
    "pytorch/pytorch#108618, #23395, #187297; Ciela-Institute/caustics PR#83",
    Expectation(
        "fault",
        "backward",
        phase="backward",
        op="aten.div",
        module="safe",
        node="LogBackward0",
        kind="nan",
        culprit="the forward -inf sits in the branch that is not selected (harmless), the 0/0 of its backward does not",
        end=End(loss="finite", params=True),
    ),
)
def where_log_unselected_branch() -> Program:
    class SafeLog(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x > 0, torch.log(x), 2 * x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.safe = nn.Linear(3, 4), SafeLog()

        def forward(self, x: Tensor) -> Tensor:
            return self.safe(self.lin(x) ** 2)

    torch.manual_seed(0)
    model = Net()
    model.lin.bias.data.zero_()
    x = torch.randn(4, 3)
    x[1] = 0
    return model, {"x": x}, training(model, lambda model, batch: model(batch["x"]).sum())


@case(
    "kornia/kornia#4007; pytorch/pytorch#8069, #61810; geoopt/geoopt PR#79",
    Expectation(
        "fault",
        "backward",
        phase="backward",
        op="aten.rsqrt",
        module="log",
        node="AcosBackward0",
        kind="inf",
        also=(("backward", "aten.mul", "log"),),
        culprit="clamping to exactly [-1, 1] protects forward only; the rotation is the identity",
        end=End(loss="finite", params=True),
    ),
)
def acos_clamped_backward() -> Program:
    class RotationLog(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            w, v = q[:, :1].clamp(-1.0, 1.0), q[:, 1:]
            return v * torch.acos(w) / v.norm(dim=1, keepdim=True).clamp(min=1e-8)

    class Pose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.log = nn.Parameter(torch.tensor([[1.0, 0.0, 0.0, 0.0]])), RotationLog()

        def forward(self, target: Tensor) -> Tensor:
            return self.log(self.q) - target

    model = Pose()
    batch = {"t": torch.full((1, 3), 0.1)}
    return model, batch, training(model, lambda model, batch: model(batch["t"]).pow(2).sum())


@case(
    "pytorch/pytorch#49886 (svd); jax-ml/jax#2311, #8732; geomstats/geomstats PR#176",
    Expectation(
        "fault",
        "backward",
        phase="backward",
        op="aten.div_",
        module="spec",
        node="LinalgEighBackward0",
        kind="naninf",
        culprit="repeated eigenvalues: 1/(l_i - l_j)",
        end=End(loss="finite", params=True),
    ),
)
def eigh_degenerate_backward() -> Program:
    class Spectrum(nn.Module):
        def forward(self, matrix: Tensor) -> Tensor:
            _, vectors = torch.linalg.eigh(matrix)
            return vectors[..., 0]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.A, self.spec = nn.Parameter(torch.eye(3)), Spectrum()

        def forward(self, target: Tensor) -> Tensor:
            return self.spec(self.A + self.A.t()) - target

    model = Net()
    batch = {"t": torch.tensor([0.3, 0.2, 0.1])}
    return model, batch, training(model, lambda model, batch: model(batch["t"]).pow(2).sum())


@case(
    "pytorch/pytorch#31829, #49724",
    Expectation(
        "fault",
        "backward",
        phase="backward",
        op="aten.sub",
        module="crf",
        node="LogsumexpBackward0",
        kind="naninf",
        culprit="row 1 is fully masked: (-inf) - (-inf) in LogsumexpBackward0; where() protects the loss value only",
        end=End(loss="finite", params=True),
    ),
)
def logsumexp_all_neg_inf_backward() -> Program:
    class CRF(nn.Module):
        def forward(self, emission: Tensor, mask: Tensor) -> Tensor:
            bias = torch.zeros(emission.shape).masked_fill(~mask, -INF)
            z = torch.logsumexp(emission + bias, -1)
            return torch.where(mask.any(-1), z, torch.zeros_like(z))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emit, self.crf = nn.Linear(3, 4), CRF()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.crf(self.emit(x), mask)

    torch.manual_seed(0)
    model = Net()
    mask = torch.tensor([[True, True, False, False], [False] * 4])
    batch = {"x": torch.randn(2, 3), "mask": mask}
    return model, batch, training(model, lambda model, batch: model(batch["x"], batch["mask"]).sum())


@case(
    "mechanism only (module state advanced twice because checkpoint re-runs forward)",
    Expectation(
        "fault",
        "backward",
        phase="recompute",
        op="aten.div",
        module="balance",
        kind="inf",
        culprit="forward values are finite, recomputed ones are not: the buffer `left` has reached 0",
        end=End(loss="finite", params=True),
    ),
)
def checkpoint_recompute_only() -> Program:
    class Balance(nn.Module):
        """Keeps a usage counter and normalises by what is left: 0 the second time that forward runs."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("left", torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            self.left.sub_(1.0)
            return x * (x.sum() / self.left)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.balance, self.out = nn.Linear(3, 3), Balance(), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Any:
            return self.out(checkpoint(self.balance, self.inp(x), use_reentrant=False))

    torch.manual_seed(0)
    model = Net()
    return model, {"x": torch.rand(2, 3)}, training(model, lambda model, batch: model(batch["x"]).pow(2).mean())


@case(
    "pytorch/pytorch#46849",
    Expectation(
        "fault",
        "backward",
        phase="backward",
        op="aten.div",
        module="",
        node="SqrtBackward0",
        kind="inf",
        culprit="only the gradients of b are nonfinite; the NaN clip coefficient then makes every gradient NaN",
        end=End(loss="finite", params=True),
    ),
)
def clip_grad_norm_spreads_nan() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            return self.a(x).pow(2).mean() + torch.sqrt(self.b(z).pow(2)).sum()

    torch.manual_seed(0)
    model = Net()
    fill(model.b, 1.0, -1.0)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        loss = model(batch["x"], batch["z"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    batch = {"x": torch.randn(2, 3), "z": torch.full((2, 3), 1.0) * torch.tensor([1.0, 0.0, 0.0])}
    return model, batch, step
