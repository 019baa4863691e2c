"""Steps that were lost before they began: a bad batch, parameter or buffer."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Answer, Batch, End, Expectation, Program, case
from tests.zoo.cases.parts import INF, NAN, ReluPerceptron, TanhPerceptron, fill, training


@case(
    "bshall/hifigan#4",
    Expectation(
        "fault",
        "input",
        kind="nan",
        batch_bad=("wav",),
        culprit="sample 1 is all NaN before the model sees it (0/0, peak normalisation in the dataset)",
        end=End(loss="nonfinite", params=True),
    ),
)
def silent_wav_peak_norm() -> Program:
    torch.manual_seed(0)
    model = ReluPerceptron(6, 8, 1)
    wav = torch.randn(3, 6)
    wav[1] = 0.0
    wav = wav / wav.abs().amax(1, keepdim=True)
    return model, {"wav": wav}, training(model, lambda model, batch: model(batch["wav"]).pow(2).mean())


@case(
    "pyg-team/pytorch_geometric#61 (degree**-0.5), sparse variant",
    Expectation(
        "fault",
        "input",
        kind="inf",
        batch_bad=("adj",),
        culprit="inf is stored in the values of a sparse batch tensor; torch.isfinite takes no sparse layout",
        end=End(loss="nonfinite", params=True),
    ),
)
def sparse_adj_inf_values() -> Program:
    class SparseConvolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            return torch.sparse.mm(adjacency, self.lin(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = SparseConvolution()

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            return self.conv(x, adjacency)

    torch.manual_seed(0)
    model = Net()
    edges = torch.tensor([[0, 1, 2, 2], [1, 0, 0, 1]])
    degree = torch.tensor([2.0, 2.0, 0.0])  # node 2 has no incoming edge
    values = degree[edges[0]].pow(-0.5) * degree[edges[1]].pow(-0.5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse invariant checks")  # torch says it once a process
        adjacency = torch.sparse_coo_tensor(edges, values, (3, 3)).coalesce()
    batch = {"x": torch.randn(3, 3), "adj": adjacency}
    return model, batch, training(model, lambda model, batch: model(batch["x"], batch["adj"]).mean())


@case(
    "pvjosue/pytorch_convNd#4; sauradip/STALE#16; kmkurn/pytorch-crf#1",
    Expectation(
        "fault",
        "state",
        module="head",
        kind="nan",
        param_bad=("head.bias",),
        culprit="head.bias is NaN before the first step",
        end=End(loss="nonfinite", params=True),
    ),
)
def uninit_param_nan() -> Program:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((2, 8), 0.1))
            self.bias = nn.Parameter(torch.full((2,), NAN))  # stands for torch.empty(2), never initialised

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 8), Head()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.body(x)))

    torch.manual_seed(0)
    model = Net()
    return model, {"x": torch.randn(2, 4)}, training(model, lambda model, batch: model(batch["x"]).pow(2).mean())


@case(
    "pyg-team/pytorch_geometric#1129 (uninitialised output ~ -3e26, NaN batches later); pytorch/pytorch#24263",
    Expectation(
        "fault",
        "loss",
        phase="loss",
        op="aten.mse_loss",
        kind="inf",
        culprit="parameter bg holds uninitialised memory of size 3e26; every forward output is still finite",
        end=End(loss="nonfinite", params=True),
    ),
)
def uninit_param_huge_finite() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.cls = nn.Linear(4, 8), nn.Linear(8, 2)
            self.bg = nn.Parameter(torch.full((8,), -3.0873e26))  # garbage memory: huge but finite

        def forward(self, x: Tensor) -> Tensor:
            return self.cls(torch.relu(self.body(x)) + self.bg)

    torch.manual_seed(0)
    model = Net()
    fill(model.cls, 0.1)
    batch = {"x": torch.randn(2, 4), "y": torch.zeros(2, 2)}
    return model, batch, training(model, lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"]))


@case(
    "kekmodel/FixMatch-pytorch#42; ultralytics/ultralytics PR#24307",
    Expectation(
        "fault",
        "state",
        kind="inf",
        buffers_bad=("backbone.1.running_var",),
        alts=(Answer("contained", "state", tensor="running_var"),),
        culprit="fine-tuning with frozen statistics, one of which is infinite",
        debatable="x/sqrt(inf) = 0: the channel is dead and nothing nonfinite is ever computed; damage without NaN",
    ),
)
def frozen_bn_running_var_inf() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.backbone(x))

    torch.manual_seed(0)
    model = Net()
    model.backbone[1].running_var[2] = INF
    model.backbone[1].eval()
    batch = {"x": torch.randn(4, 3), "y": torch.tensor([0, 1, 0, 1])}
    return (
        model,
        batch,
        training(model, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]), iterations=2),
    )


@case(
    "DigitalPhonetics/IMS-Toucan#214; UCSD-E4E/acoustic-multiclass-training PR#9",
    Expectation(
        "fault",
        "input",
        kind="inf",
        batch_bad=("",),
        any_tensor=True,
        culprit="inf enters with a tensor that is neither batch, parameter nor buffer",
        debatable="an input of the model's forward; a name for the tensor cannot be asked for",
    ),
)
def loader_in_closure_corrupt() -> Program:
    torch.manual_seed(0)
    model = TanhPerceptron(4, 6, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x = torch.randn(6, 4)
    x[4, 0] = INF
    y = torch.tensor([0, 1, 0, 1, 0, 1])

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for start in range(0, 6, 2):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[start : start + 2]), y[start : start + 2])
            loss.backward()
            optimizer.step()
        return loss

    return model, {"epoch": torch.tensor(0)}, step


@case(
    "KimythAnly/AGAIN-VC#5 (-inf in the stored spectrogram)",
    Expectation(
        "fault",
        "input",
        kind="inf",
        batch_bad=("mel",),
        culprit="-inf among varied finite features (log(0) of a silent frame) is data, not a mask",
    ),
)
def batch_log_mel_minus_inf() -> Program:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.rnn, self.out = nn.Linear(4, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, mel: Tensor) -> Tensor:
            return self.out(self.rnn(torch.relu(self.proj(mel)))[0][:, -1])

    torch.manual_seed(0)
    model = Encoder()
    mel = torch.randn(2, 5, 4) - 4
    mel[1, 3] = -INF
    batch = {"mel": mel, "y": torch.tensor([0, 2])}
    return model, batch, training(model, lambda model, batch: F.cross_entropy(model(batch["mel"]), batch["y"]))


@case(
    "alibaba/TorchEasyRec PR#88; pytorch/pytorch#73205",
    Expectation(
        "fault",
        "state",
        kind="inf",
        buffers_bad=("weight",),
        alts=(Answer("fault", "input"), Answer("fault", "loss", module="<CrossEntropyLoss>")),
        culprit="a class without samples has weight sum/0, which label smoothing reads",
        debatable="the tensor is a buffer of a criterion outside the model: state, input or the product that used it",
    ),
)
def class_weight_inf_label_smoothing() -> Program:
    torch.manual_seed(0)
    counts = torch.tensor([30.0, 10.0, 0.0])
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    criterion = nn.CrossEntropyLoss(weight=counts.sum() / counts, label_smoothing=0.1)
    batch = {"x": torch.randn(4, 4), "y": torch.tensor([0, 1, 0, 1])}
    return model, batch, training(model, lambda model, batch: criterion(model(batch["x"]), batch["y"]), iterations=2)


@case(
    "",
    Expectation(
        "fault",
        "input",
        kind="inf",
        batch_bad=("",),
        any_tensor=True,
        alts=(Answer("fault", "loss", op="aten.mul"), Answer("fault", "state")),
        culprit="a forbidden assignment costs inf, and the loss multiplies by it",
    ),
)
def cost_matrix_leaks() -> Program:
    torch.manual_seed(0)
    model = TanhPerceptron(3, 6, 4)
    cost = torch.rand(4, 4)
    cost[0, 3] = INF

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        p = model(batch["x"]).softmax(-1)
        return (p[:, :, None] * cost * p[:, None]).sum((1, 2)).mean()

    return model, {"x": torch.randn(3, 3)}, training(model, loss_of)


@case(
    "",
    Expectation(
        "contained",
        "state",
        kind="inf",
        param_bad=("gate.logit",),
        alts=(Answer("fault", "state", tensor="logit"), Answer("expected")),
        debatable="an infinite gate parameter saturates: frozen for ever, nothing nonfinite is computed",
    ),
)
def gate_parameter_saturated() -> Program:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logit = nn.Parameter(torch.tensor([0.0, INF, 0.5]))

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(self.logit)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.gate, self.out = nn.Linear(3, 3), Gate(), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.gate(self.lin(x)))

    torch.manual_seed(0)
    model = Net()
    return model, {"x": torch.randn(4, 3)}, training(model, lambda model, batch: model(batch["x"]).pow(2).mean())


@case(
    "",
    Expectation(
        "contained",
        "state",
        kind="inf",
        buffers_bad=("norm.scale",),
        alts=(Answer("fault", "state", tensor="scale"),),
        culprit="dividing by an infinite scale silences the feature",
    ),
)
def buffer_scale_inf_silences_branch() -> Program:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x / self.scale

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = Scale(), TanhPerceptron(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.norm(x))

    torch.manual_seed(0)
    model = Net()
    model.norm.scale[2] = INF
    return model, {"x": torch.randn(4, 3)}, training(model, lambda model, batch: model(batch["x"]).pow(2).mean())
