"""What a skipped update, a selection or a saturation keeps from harm, and what looks the same and is not kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import ANY, Batch, Program, case
from tests.zoo.cases.parts import INF, NAN, fill, sgd, training
from tests.zoo.further.parts import HARMLESS, chain, contained, fault


def _half(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return model(x).float()


def _levels(boxes: Tensor) -> Tensor:
    """The level of a feature pyramid for each box: an empty one has the logarithm of 0."""
    return torch.floor(2 + torch.log2(boxes.prod(-1).sqrt() / 8)).clamp(0, 3).long()


@case(
    "a scaler skips, and an update written by hand beside it does not",
    fault("backward", op="aten._to_copy", node="ToCopyBackward0", kind="inf"),
)
def hand_written_update_beside_a_skip() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale, self.head = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.body(x)) * self.scale)

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam([*model.body.parameters(), *model.head.parameters()])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        model.zero_grad()
        loss = _half(model, batch["x"]).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            model.scale -= 1e-6 * model.scale.grad
        return loss.detach()

    return model, {"x": torch.randn(3, 4)}, step


@case(
    "the generator's update is skipped; its backward left inf in the critic's gradients, which are cleared",
    contained("backward", op="aten._to_copy", node="ToCopyBackward0", kind="inf", dtype="float16"),
)
def generator_is_skipped() -> Program:
    torch.manual_seed(0)
    model = nn.ModuleDict({"generator": nn.Linear(2, 3), "critic": nn.Linear(3, 1)})
    generator, critic = model["generator"], model["critic"]
    of_generator = torch.optim.RMSprop(generator.parameters(), 1e-4)
    of_critic = torch.optim.Adam(critic.parameters(), 1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for factor in (1000.0, 0.1):
            of_critic.zero_grad()
            loss = _half(critic, batch["x"]).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(of_critic)
            scaler.step(of_critic)
            of_generator.zero_grad()
            fake = _half(nn.Sequential(generator, critic), batch["z"]).sum() * factor
            scaler.scale(fake).backward()
            scaler.step(of_generator)
            scaler.update()
        return loss.detach()

    return model, {"x": torch.randn(3, 3), "z": torch.randn(3, 2)}, step


@case(
    "the gradient of a convolution's weight overflows while the scale is sought",
    contained(
        "backward",
        op="aten.convolution_backward",
        node="ConvolutionBackward0",
        module="conv",
        kind="inf",
        dtype="float16",
    ),
)
def scale_is_too_large_for_a_weight_gradient() -> Program:
    torch.manual_seed(0)
    model = chain(conv=nn.Conv1d(2, 3, 3, padding=1))
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=1000)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for _ in range(9):
            optimizer.zero_grad()
            loss = _half(model, batch["x"]).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return loss

    return model, {"x": torch.rand(4, 2, 20)}, step


@case(
    "a running centre keeps the overflow of a step that was skipped",
    fault("update", "forward", op="aten.addmm", module="stem", kind="inf", buffers_bad=("center",)),
)
def running_center_is_poisoned() -> Program:
    class Net(nn.Module):
        center: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
            self.register_buffer("center", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.stem(x).float()
            self.center.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            return self.head(h)

    torch.manual_seed(0)
    model = Net()
    fill(model.stem, 1.0)
    optimizer, scaler = torch.optim.Adam(model.parameters()), torch.amp.GradScaler("cpu", init_scale=16.0)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for x in batch["x"]:
            optimizer.zero_grad()
            loss = _half(model, x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss

    x = torch.randn(3, 4, 3)
    x[1, 2] = 5e4
    return model, {"x": x}, step


@case("scaled gradients are stepped on without the scaler", fault("update", ANY, op=ANY, module=ANY))
def scaled_gradients_are_stepped_on() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer, scaler = sgd(model, 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for _ in range(4):
            optimizer.zero_grad()
            loss = (_half(model, batch["x"]) - 1).square().mean()
            scaler.scale(loss).backward()
            optimizer.step()
            scaler.update(2.0**12)
        return loss

    return model, {"x": torch.randn(4, 4)}, step


@case(
    "gradients are clipped by hand, and the square of one overflows",
    contained("gradients", "post_backward", op="aten.pow", kind="inf"),
)
def norm_by_hand_overflows() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        loss = (model(batch["x"]) * 1e21).mean()
        optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        total = torch.stack([(gradient**2).sum() for gradient in gradients]).sum() ** 0.5
        for gradient in gradients:
            gradient.mul_((1.0 / (total + 1e-6)).clamp(max=1.0))
        optimizer.step()
        return loss

    return model, {"x": torch.rand(4, 3)}, step


@case("nanmean over missing labels: its gradient is 0 * NaN", fault("input", None, batch_bad=("y",), kind="nan"))
def nanmean_over_missing_labels() -> Program:
    torch.manual_seed(0)
    y = torch.rand(4, 2)
    y[1, 0] = NAN
    batch = {"x": torch.randn(4, 3), "y": y}
    return (
        (model := nn.Linear(3, 2)),
        batch,
        training(model, lambda model, b: (model(b["x"]) - b["y"]).square().nanmean()),
    )


@case(
    "rows of NaN are dropped by where() behind a linear layer, whose weight gradient is 0 * NaN",
    fault("input", None, batch_bad=("feature",), kind="nan"),
)
def padding_dropped_behind_a_linear_layer() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return torch.where(batch["keep"], model(batch["feature"]), 0.0).square().mean()

    torch.manual_seed(0)
    x = torch.randn(2, 5, 3)
    x[0, 4] = NAN
    batch = {"feature": x, "keep": ~x[..., :1].isnan()}
    return (model := nn.Sequential(nn.Linear(3, 4), nn.Tanh())), batch, training(model, loss_of)


@case("an auxiliary loss over nothing has the weight 0", fault("loss", op="aten.div", kind="nan"))
def auxiliary_loss_with_weight_zero() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        z = model(batch["x"])
        return z[:, 0].square().mean() + 0.0 * (z[:, 1] * batch["has"]).sum() / batch["has"].sum()

    torch.manual_seed(0)
    return (model := nn.Linear(3, 2)), {"x": torch.rand(4, 3), "has": torch.zeros(4)}, training(model, loss_of)


class Pyramid(nn.Module):
    """Boxes get an embedding of their level, and a gate that may overflow half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.level, self.gate, self.head = nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor, boxes: Tensor) -> Tensor:
        return self.head((x + self.level(_levels(boxes))) * torch.sigmoid(self.gate(x)))


def _pyramid(gate: float) -> Program:
    torch.manual_seed(0)
    model = Pyramid().half()
    fill(model.gate, gate)
    batch = {"x": (torch.rand(3, 3) + 1).half(), "boxes": torch.tensor([[4.0, 5.0], [0.0, 3.0], [20.0, 30.0]])}
    return model, batch, training(model, lambda model, b: model(b["x"], b["boxes"]).float().square().mean())


@case("the level of an empty box is the logarithm of 0, clamped to the lowest", HARMLESS)
def level_of_an_empty_box() -> Program:
    return _pyramid(gate=0.5)


@case(
    "a gate overflows and saturates beside the level of an empty box",
    contained("forward", op="aten.addmm", module="gate", kind="inf", dtype="float16"),
)
def gate_overflows_beside_an_empty_box() -> Program:
    return _pyramid(gate=3e4)


@case("a soft alignment around blocked cells", HARMLESS)
def soft_alignment_around_blocked_cells() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        cost = (model(batch["x"])[:, None] - batch["y"]).square().sum(-1) + batch["blocked"]
        above = cost[0].cumsum(0)
        for row in cost[1:]:
            here = [row[0] + above[0]]
            for j in range(1, len(row)):
                here.append(row[j] - torch.logsumexp(-torch.stack([above[j], above[j - 1], here[-1]]), 0))
            above = torch.stack(here)
        return above[-1]

    torch.manual_seed(0)
    blocked = torch.zeros(4, 4)
    blocked[0, 3] = blocked[3, 0] = INF
    batch = {"x": torch.randn(4, 3), "y": torch.randn(4, 2), "blocked": blocked}
    return (model := nn.Linear(3, 2)), batch, training(model, loss_of)


@case("visited cities are masked, and the best of the others is taken", HARMLESS)
def visited_cities_are_masked() -> Program:
    class Pointer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(2, 4), nn.Linear(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            visited, at, total = torch.zeros(len(x), dtype=torch.bool), x[0], torch.zeros(())
            for _ in range(3):
                scores = (self.key(x) @ self.query(at)).masked_fill(visited, -INF).log_softmax(-1)
                chosen = scores.argmax()
                total, at = total + scores[chosen], x[chosen]
                visited = visited | F.one_hot(chosen, len(x)).bool()
            return total

    torch.manual_seed(0)
    return (model := Pointer()), {"x": torch.rand(4, 2)}, training(model, lambda model, batch: -model(batch["x"]))


@case("attention without weights over nothing but padding: the fused kernel puts out 0", HARMLESS)
def attention_over_padding_without_weights() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, padded: Tensor) -> Tensor:
            return self.attn(x, x, x, key_padding_mask=padded, need_weights=False)[0]

    torch.manual_seed(0)
    batch = {"x": torch.randn(2, 4, 8), "padded": torch.tensor([[False] * 4, [True] * 4])}
    return (model := Net()), batch, training(model, lambda model, b: model(b["x"], b["padded"]).square().mean())
