"""Values born in the model's forward pass, in float32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.case import Batch, End, Expectation, Program, case
from tests.zoo.cases.parts import RMSNorm, fill, silenced, training


@case(
    "vanderschaarlab/synthcity#331; lucidrains/DALLE2-pytorch#138; GRIST ID_4 (VGAE kl)",
    Expectation(
        "fault",
        "forward",
        phase="forward",
        op="aten.exp",
        module="reparam",
        kind="inf",
        culprit="the output of fc_logvar is unbounded",
        end=End(loss="nonfinite", params=True),
    ),
)
def vae_logvar_exp_overflow() -> Program:
    class Reparameterize(nn.Module):
        def forward(self, mu: Tensor, logvar: Tensor) -> Tensor:
            return mu + torch.exp(0.5 * logvar) * 0.1

    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.fc_mu, self.fc_logvar = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)
            self.reparam, self.dec = Reparameterize(), nn.Linear(2, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            hidden = torch.tanh(self.enc(x))
            mu, logvar = self.fc_mu(hidden), self.fc_logvar(hidden)
            return self.dec(self.reparam(mu, logvar)), mu, logvar

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        decoded, mu, logvar = model(batch["x"])
        return F.mse_loss(decoded, batch["x"]) - 0.5 * (1 + logvar - mu**2 - logvar.exp()).mean()

    torch.manual_seed(0)
    model = VAE()
    with torch.no_grad():
        model.fc_logvar.bias.fill_(200.0)
    return model, {"x": torch.randn(3, 4)}, training(model, loss_of)


@case(
    "facebookresearch/fairseq#1863",
    Expectation(
        "fault",
        "forward",
        phase="forward",
        op="aten.std",
        module="frontend.cmvn",
        kind="nan",
        culprit="an utterance of one frame: the unbiased std of one element",
        end=End(loss="nonfinite", params=True),
    ),
)
def cmvn_single_frame() -> Program:
    class CMVN(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)

    class Frontend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cmvn, self.lin = CMVN(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(self.cmvn(x))

    class ASR(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frontend, self.head = Frontend(), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.frontend(x))

    torch.manual_seed(0)
    model = ASR()
    step = training(model, lambda model, batch: model(batch["x"]).pow(2).mean())
    return model, {"x": torch.randn(2, 1, 4)}, silenced(step, r"std\(\): degrees of freedom")


@case(
    "cpnota/autonomous-learning-library#139; philtabor/Actor-Critic-Methods-Paper-To-Code#7",
    Expectation(
        "fault",
        "forward",
        phase="forward",
        op="aten.log",
        module="squash",
        kind="nan",
        culprit="the action is scaled by 2 before the tanh correction; the loss is NaN but its gradients are finite "
        "(d log x = g/x exists for x < 0), so training goes on silently with wrong gradients",
        end=End(loss="nonfinite", params=False, grads=False),
    ),
)
def sac_log_of_negative() -> Program:
    class Squash(nn.Module):
        def forward(self, raw: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
            action = torch.tanh(raw) * scale
            return action, torch.log(1 - action.pow(2) + 1e-6)

    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.mu, self.squash = nn.Linear(3, 8), nn.Linear(8, 2), Squash()

        def forward(self, observation: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
            return self.squash(self.mu(torch.relu(self.body(observation))), scale)

    torch.manual_seed(0)
    model = Actor()
    with torch.no_grad():
        model.mu.bias.fill_(2.0)
    batch = {"o": torch.randn(4, 3), "scale": torch.tensor(2.0)}
    return model, batch, training(model, lambda model, batch: -model(batch["o"], batch["scale"])[1].sum(1).mean())


@case(
    "pyg-team/pytorch_geometric#3032 (degree normalisation of the coarsened adjacency)",
    Expectation(
        "fault",
        "forward",
        phase="forward",
        op="aten.div_",
        module="pool.norm",
        kind="nan",
        culprit="an empty cluster has degree 0; the op is in place, its inputs must be looked at before the call",
        end=End(loss="nonfinite", params=True),
    ),
)
def inplace_div_zero_row() -> Program:
    class Normalize(nn.Module):
        def forward(self, adjacency: Tensor) -> Tensor:
            adjacency = adjacency.clone()
            adjacency.fill_diagonal_(0.0)
            degree = adjacency.sum(-1, keepdim=True)
            return adjacency.div_(degree)

    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.assign, self.norm = nn.Linear(3, 2), Normalize()

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            clusters = torch.relu(self.assign(x))
            return self.norm(clusters.t() @ adjacency @ clusters) @ (clusters.t() @ x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool, self.head = Pool(), nn.Linear(3, 1)

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            return self.head(self.pool(x, adjacency))

    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.pool.assign.weight.copy_(torch.tensor([[1.0, 1, 1], [-1.0, -1, -1]]))
        model.pool.assign.bias.zero_()
    batch = {"x": torch.rand(4, 3), "adj": torch.ones(4, 4)}
    return model, batch, training(model, lambda model, batch: model(batch["x"], batch["adj"]).mean())


@case(
    "ml-explore/mlx-examples PR#113 (encoder values grow to inf, NaN in RMSNorm); huggingface/transformers#27179",
    Expectation(
        "fault",
        "forward",
        phase="forward",
        op="aten.mm",
        module="layers.9.lin",
        kind="inf",
        culprit="every layer multiplies by 8000 from layers.0 on (initialisation or scale); layers.9 is the messenger",
        end=End(loss="nonfinite", params=True),
    ),
)
def deep_growth_then_overflow() -> Program:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(16, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.lin(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.norm = nn.ModuleList([Block() for _ in range(12)]), RMSNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        fill(layer.lin, 500.0)
    return model, {"x": torch.ones(2, 16)}, training(model, lambda model, batch: model(batch["x"]).mean())


@case(
    "pytorch/pytorch#96543 (complex magnitude near 0, family); csteinmetz1/auraloss PR#12",
    Expectation(
        "fault",
        "forward",
        phase="forward",
        op="aten.div",
        module="phase",
        kind="nan",
        dtype="complex64",
        culprit="the second signal is silent: every spectral bin is exactly 0",
        end=End(loss="nonfinite", params=True),
    ),
)
def complex_normalize_zero() -> Program:
    class PhaseOnly(nn.Module):
        def forward(self, spectrum: Tensor) -> Tensor:
            return spectrum / spectrum.abs()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filt, self.phase = nn.Parameter(torch.ones(5, dtype=torch.cfloat)), PhaseOnly()

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.irfft(self.phase(torch.fft.rfft(x) * self.filt), n=8)

    model = Net()
    batch = {"x": torch.stack([torch.ones(8), torch.zeros(8)])}
    return model, batch, training(model, lambda model, batch: model(batch["x"]).pow(2).mean())


@case(
    "GRIST ID_22, 51, 62, 63; samparizi/git1_rbm#1",
    Expectation(
        "fault",
        "forward",
        phase="forward",
        op="aten.exp",
        module="rbm",
        kind="inf",
        also=(("forward", "aten.sub", "rbm"),),
        culprit="softplus by hand; the NaN is born later as inf - inf",
        end=End(loss="nonfinite", params=True),
    ),
)
def rbm_free_energy() -> Program:
    class RBM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W = nn.Parameter(torch.full((3, 4), 30.0))
            self.hb, self.vb = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))

        def energy(self, visible: Tensor) -> Tensor:
            hidden = F.linear(visible, self.W, self.hb)
            return (-torch.log(torch.exp(hidden) + 1).sum(1) - visible.mv(self.vb)).mean()

        def forward(self, visible: Tensor, sampled: Tensor) -> Tensor:
            return self.energy(visible) - self.energy(sampled)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rbm = RBM()

        def forward(self, visible: Tensor, sampled: Tensor) -> Tensor:
            return self.rbm(visible, sampled)

    model = Net()
    batch = {"v": torch.ones(2, 4), "v1": torch.ones(2, 4)}
    return model, batch, training(model, lambda model, batch: model(batch["v"], batch["v1"]))


@case(
    "pytorch/pytorch#94700, #89543",
    Expectation(
        "fault",
        "forward",
        phase="forward",
        op="aten.log",
        module="kl",
        kind="inf",
        also=(("forward", "aten.mul", "kl"),),
        culprit="log(0) in forward; nan_to_num cleans the loss value, not its gradient",
        end=End(loss="finite", params=True),
    ),
)
def nan_to_num_hides_forward() -> Program:
    class Divergence(nn.Module):
        def forward(self, p: Tensor, target: Tensor) -> Tensor:
            return (p * torch.log(p / target) + target - p).nan_to_num(0.0).mean()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.kl = nn.Linear(3, 4), Divergence()

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return self.kl(self.lin(x) ** 2, target)

    torch.manual_seed(0)
    model = Net()
    model.lin.bias.data.zero_()
    x = torch.randn(4, 3)
    x[2] = 0
    batch = {"x": x, "t": torch.rand(4, 4) + 0.1}
    return model, batch, training(model, lambda model, batch: model(batch["x"], batch["t"]))


@case(
    "mechanism only (activation checkpointing replays forward inside backward)",
    Expectation(
        "fault",
        "forward",
        phase="forward",
        op="aten.exp",
        module="layers.1.gate",
        kind="inf",
        culprit="the same op is seen again during recompute: it must not be reported as a backward fault",
        end=End(loss="nonfinite", params=True),
    ),
)
def checkpoint_recompute_overflow() -> Program:
    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.exp(x)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.gate = nn.Linear(4, 4), Gate()

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(self.lin(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Any:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = Net()
    fill(model.layers[0].lin, 0.5)
    fill(model.layers[1].lin, 20.0)
    batch = {"x": torch.ones(2, 4, requires_grad=True)}
    return model, batch, training(model, lambda model, batch: model(batch["x"]).mean())
