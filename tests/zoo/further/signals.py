"""Pictures and sound: normalization of single elements, spectra, sampling grids, boxes, alignment."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Answer, Batch, Program, case
from tests.zoo.cases.parts import INF, NAN, fill, training
from tests.zoo.further.parts import HARMLESS, fault


def _square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).float().pow(2).mean()


class _After(nn.Module):
    """`stem`, a convolution, then `act`."""

    def __init__(self, act: nn.Module, channels: int = 2) -> None:
        super().__init__()
        self.stem, self.act = nn.Conv1d(1, channels, 3, padding=1), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.stem(x))


@case(
    "group normalization without eps, one element in each group",
    fault("forward", op="aten.native_group_norm", module="act", kind="nan"),
)
def group_norm_of_one_element_without_eps() -> Program:
    torch.manual_seed(0)
    model = _After(nn.GroupNorm(2, 2, eps=0.0))
    return model, {"x": torch.randn(3, 1, 1)}, training(model, _square)


@case("group normalization of one element: 0 with its eps", HARMLESS)
def group_norm_of_one_element() -> Program:
    torch.manual_seed(0)
    model = _After(nn.GroupNorm(2, 2))
    return model, {"x": torch.randn(3, 1, 1)}, training(model, _square)


@case("a float16 convolution leaves its range", fault("forward", op="aten.convolution", module="act", kind="inf"))
def convolution_overflows_in_half() -> Program:
    torch.manual_seed(0)
    model = _After(nn.Conv1d(2, 2, 3, padding=1)).half()
    fill(model.stem, 50.0)
    fill(model.act, 200.0)
    return model, {"x": torch.ones(2, 1, 8).half()}, training(model, _square)


class _Compress(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.stft(x.flatten(0, 1), 4, window=torch.ones(4), return_complex=True, pad_mode="constant")
        return spectrum.abs() ** 0.3


@case(
    "the magnitudes of a silent clip raised to 0.3: the slope at 0 is infinite",
    fault("backward", op="aten.pow", module="act", node="PowBackward0", kind="inf"),
)
def compressed_spectrum_of_silence() -> Program:
    model = _After(_Compress(), channels=1)
    fill(model.stem, 0.1)
    x = torch.randn(2, 1, 16)
    x[1] = 0.0
    return model, {"x": x}, training(model, _square)


@case("log-mel of a silent clip", fault("forward", op="aten.log10", module="act.level", kind="inf"))
def decibels_of_silence() -> Program:
    class Level(nn.Module):
        def forward(self, power: Tensor) -> Tensor:
            return 10 * torch.log10(power)

    class Spectrogram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.level = Level()

        def forward(self, x: Tensor) -> Tensor:
            spectrum = torch.fft.rfft(x)
            return self.level(spectrum.real.square() + spectrum.imag.square())

    torch.manual_seed(0)
    model = _After(Spectrogram(), channels=1)
    fill(model.stem, 0.3)
    x = torch.randn(2, 1, 16)
    x[0] = 0.0
    return model, {"x": x}, training(model, _square)


@case("spectral convergence divides by the norm of a silent target", fault("loss", op="aten.div", kind="inf"))
def spectral_convergence_of_silence() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        made = torch.fft.rfft(model(batch["x"])).abs()
        real = torch.fft.rfft(batch["y"]).abs()
        return torch.linalg.norm(made - real) / torch.linalg.norm(real)

    torch.manual_seed(0)
    model = nn.Conv1d(1, 1, 3, padding=1)
    return model, {"x": torch.randn(2, 1, 16), "y": torch.zeros(2, 1, 16)}, training(model, loss_of)


@case("scale-invariant distortion against a silent reference", fault("loss", op="aten.div", kind="nan"))
def distortion_against_silence() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        made, real = model(batch["x"])[:, 0], batch["y"]
        scale = (made * real).sum(-1, keepdim=True) / real.square().sum(-1, keepdim=True)
        target = scale * real
        return -10 * torch.log10((target.square().sum(-1) + 1e-8) / ((made - target).square().sum(-1) + 1e-8)).mean()

    torch.manual_seed(0)
    model, y = nn.Conv1d(1, 1, 3, padding=1), torch.randn(3, 16)
    y[1] = 0.0
    return model, {"x": torch.randn(3, 1, 16), "y": y}, training(model, loss_of)


@case(
    "a mel filter whose edges coincide is a row of NaN in the model's table",
    fault("state", None, buffers_bad=("act.filters",), kind="nan"),
)
def mel_filter_without_width() -> Program:
    class Mel(nn.Module):
        filters: Tensor

        def __init__(self) -> None:
            super().__init__()
            edges = torch.tensor([0.0, 2.0, 2.0, 6.0])
            bins = torch.arange(7.0)
            up = (bins - edges[:-1, None]) / (edges[1:, None] - edges[:-1, None])
            self.register_buffer("filters", up.clamp(0, 1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.rfft(x).abs() @ self.filters.T

    torch.manual_seed(0)
    model = _After(Mel())
    return model, {"x": torch.randn(2, 1, 12)}, training(model, _square)


@case(
    "a hole in the depth map is blurred into its neighbours before the mask of the holes is applied",
    fault("input", None, batch_bad=("depth",), kind="nan"),
)
def depth_is_resized_over_its_holes() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        made = model(batch["x"])
        known = F.interpolate(batch["depth"].isfinite().float(), scale_factor=2.0, mode="nearest") > 0
        depth = F.interpolate(batch["depth"], scale_factor=2.0, mode="bilinear")
        return (made - depth)[known].abs().mean()

    torch.manual_seed(0)
    model, depth = nn.Conv2d(1, 1, 3, padding=1), torch.rand(2, 1, 4, 4) + 1
    depth[1, 0, 2, 1] = NAN
    return model, {"x": torch.randn(2, 1, 8, 8), "depth": depth}, training(model, loss_of)


@case("holes of a depth map are masked and filled before it is resized", HARMLESS)
def depth_is_filled_before_it_is_resized() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        known = batch["depth"].isfinite()
        depth = F.interpolate(torch.nan_to_num(batch["depth"]), scale_factor=2.0, mode="bilinear")
        weight = F.interpolate(known.float(), scale_factor=2.0, mode="bilinear")
        return ((model(batch["x"]) - depth) * (weight == 1)).abs().sum() / (weight == 1).sum()

    torch.manual_seed(0)
    model, depth = nn.Conv2d(1, 1, 3, padding=1), torch.rand(2, 1, 4, 4) + 1
    depth[1, 0, 2, 1] = NAN
    return model, {"x": torch.randn(2, 1, 8, 8), "depth": depth}, training(model, loss_of)


@case(
    "a sampling grid by perspective division: a point in the plane of the camera",
    fault("forward", op="aten.div", module="warp", kind="inf"),
)
def grid_through_the_camera_plane() -> Program:
    class Warp(nn.Module):
        def forward(self, x: Tensor, points: Tensor) -> Tensor:
            grid = points[..., :2] / points[..., 2:]
            return F.grid_sample(x, grid, align_corners=False)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pose, self.warp = nn.Linear(3, 3, bias=False), Warp()
            with torch.no_grad():
                self.pose.weight.copy_(torch.eye(3))

        def forward(self, x: Tensor, points: Tensor) -> Tensor:
            return self.warp(x, self.pose(points))

    torch.manual_seed(0)
    points = torch.rand(1, 4, 4, 3) * 0.5 + 0.5
    points[0, 1, 2] = torch.tensor([0.3, -0.2, 0.0])
    model = Net()
    batch = {"x": torch.rand(1, 1, 6, 6), "points": points}
    return model, batch, training(model, lambda model, batch: model(batch["x"], batch["points"]).mean())


@case("peak signal-to-noise ratio of a perfect copy", fault("loss", op="aten.log10", kind="inf"))
def noise_ratio_of_a_perfect_copy() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return 10 * torch.log10(F.mse_loss(model(batch["x"]), batch["x"]))

    model = nn.Conv2d(1, 1, 1)
    fill(model, 1.0)
    return model, {"x": torch.rand(2, 1, 4, 4)}, training(model, loss_of)


@case("intersection over union of two boxes without area", fault("loss", op="aten.div", kind="nan"))
def overlap_of_empty_boxes() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        low, high = model(batch["x"]).sigmoid().chunk(2, -1)
        low_y, high_y = batch["boxes"].chunk(2, -1)
        inter = (torch.minimum(high, high_y) - torch.maximum(low, low_y)).clamp(min=0).prod(-1)
        area = (high - low).clamp(min=0).prod(-1)
        return 1 - (inter / (area + (high_y - low_y).prod(-1) - inter)).mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    fill(model, 0.0)  # all corners at 0.5: a point
    boxes = torch.tensor([[0.1, 0.1, 0.6, 0.6], [0.5, 0.5, 0.5, 0.5]])
    return model, {"x": torch.rand(2, 3), "boxes": boxes}, training(model, loss_of)


@case(
    "the aspect ratio of a flat box: atan of infinity is finite, its gradient is not",
    fault("backward", op="aten.div", node="DivBackward0", kind="nan", alts=(Answer("fault", "loss", op="aten.div"),)),
)
def aspect_ratio_of_a_flat_box() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        width, height = F.relu(model(batch["x"])).unbind(-1)
        return (torch.atan(width / height) - batch["angle"]).square().mean()

    model = nn.Linear(3, 2)
    fill(model, 1.0)
    with torch.no_grad():
        model.weight[1] = -1.0
    return model, {"x": torch.rand(4, 3), "angle": torch.rand(4)}, training(model, loss_of)


@case("alignments that do not exist count 0: zero_infinity", HARMLESS)
def alignment_without_a_way_counts_nothing() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        scores = F.log_softmax(model(batch["x"]), -1)
        lengths = torch.tensor([4, 2])
        return F.ctc_loss(scores, batch["y"], lengths, torch.tensor([2, 3]), zero_infinity=True)

    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    return model, {"x": torch.randn(4, 2, 3), "y": torch.tensor([[1, 2, 0], [3, 3, 1]])}, training(model, loss_of)


@case(
    "the maximum over the valid frames of a clip that has none is -inf, and a linear layer makes NaN of it",
    fault(
        "forward",
        op="aten.addmm",
        module="head",
        kind="nan",
        alts=(Answer("fault", "forward", op="aten.masked_fill", module="pool"),),
    ),
)
def maximum_over_no_frame() -> Program:
    class Pool(nn.Module):
        def forward(self, x: Tensor, valid: Tensor) -> Tensor:
            return x.masked_fill(~valid[:, None], -INF).amax(-1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.pool, self.head = nn.Conv1d(1, 4, 3, padding=1), Pool(), nn.Linear(4, 2)

        def forward(self, x: Tensor, valid: Tensor) -> Tensor:
            return self.head(self.pool(self.stem(x), valid))

    torch.manual_seed(0)
    model, valid = Net(), torch.ones(3, 8, dtype=torch.bool)
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[1.0, -1.0, 0.5, 0.2], [-0.3, 0.4, 0.1, -1.0]]))
    valid[1] = False
    batch = {"x": torch.randn(3, 1, 8), "valid": valid}
    return model, batch, training(model, lambda model, batch: model(batch["x"], batch["valid"]).square().mean())
