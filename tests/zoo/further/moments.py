"""Updates: coefficients at their limits, optimizers written by hand, schedules, gradients left over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import ANY, Answer, Batch, Program, case
from tests.zoo.cases.parts import INF, NAN, ReluPerceptron, fill, sgd, training
from tests.zoo.further.parts import HARMLESS, Distance, contained, fault, good_rows


def _square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).pow(2).mean()


def _with_a_dead_unit() -> ReluPerceptron:
    torch.manual_seed(0)
    model = ReluPerceptron(3, 4, 1)
    with torch.no_grad():
        model.net[0].weight[0].fill_(-1.0)
        model.net[0].bias[0] = -1.0
    return model


@case("NAdam with eps 0 and a unit without a gradient", fault("optimizer", op="aten.addcdiv_", kind="nan"))
def nadam_without_eps() -> Program:
    model = _with_a_dead_unit()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3, eps=0.0)
    return model, {"x": good_rows()}, training(model, _square, optimizer=optimizer)


@case(
    "a schedule sets Adam's second beta to 1: its bias correction is 0",
    fault("optimizer", op="aten.div", kind="nan"),
)
def second_beta_of_one() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer.param_groups[0]["betas"] = (0.9, 1.0)
    return model, {"x": good_rows()}, training(model, _square, optimizer=optimizer)


@case("AdamW with an infinite learning rate decays first", fault("optimizer", op="aten.mul_"))
def learning_rate_is_infinite() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.param_groups[0]["lr"] = INF
    return model, {"x": good_rows()}, training(model, _square, optimizer=optimizer)


@case(
    "the learning rate is a tensor, and a cosine of the step is rooted below 0",
    fault(
        "optimizer",
        ANY,
        op="aten.sqrt",
        module=None,
        alts=(Answer("fault", "gradients", op="aten.sqrt"), Answer("fault", "update", op="aten.sqrt")),
        debatable="the schedule runs between backward and the optimizer, and what it makes is the optimizer's setting",
    ),
)
def tensor_rate_from_a_root() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-3), foreach=False)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = _square(model, batch)
        loss.backward()
        rate = 1e-3 * torch.sqrt(1.0 - batch["progress"])
        optimizer.param_groups[0]["lr"].copy_(rate)
        optimizer.step()
        return loss.detach()

    return model, {"x": good_rows(), "progress": torch.tensor(1.01)}, step


@case("weight decay of 1e38 on weights of 10", fault("optimizer", op="aten.add", kind="inf"))
def decay_overflows() -> Program:
    model = nn.Linear(3, 1, bias=False)
    fill(model, 10.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-40, weight_decay=1e38)
    return model, {"x": good_rows()}, training(model, _square, optimizer=optimizer)


@case("Adafactor, RAdam and Rprop on a unit without a gradient", HARMLESS)
def optimizers_with_a_floor() -> Program:
    model = _with_a_dead_unit()
    kinds: list[Callable[..., torch.optim.Optimizer]] = [
        torch.optim.Adafactor,
        torch.optim.RAdam,
        torch.optim.Rprop,
        torch.optim.Adamax,
        torch.optim.Adadelta,
    ]
    optimizers = [kind(model.parameters(), lr=1e-3) for kind in kinds]

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
            loss = _square(model, batch)
            loss.backward()
            optimizer.step()
        return loss.detach()

    return model, {"x": good_rows()}, step


@case("sparse gradients of the rows that were used", HARMLESS)
def sparse_adam_on_used_rows() -> Program:
    torch.manual_seed(0)
    model = nn.Embedding(6, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-3)
    return model, {"x": torch.tensor([1, 3])}, training(model, _square, iterations=2, optimizer=optimizer)


@case("LBFGS at a minimum: it stops before it divides", HARMLESS)
def lbfgs_at_a_minimum() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    fill(model, 0.0)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")

    def step(model: nn.Module, batch: Batch) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = _square(model, batch)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return model, {"x": good_rows()}, step


class _Orthogonal(torch.optim.Optimizer):
    """Divides each gradient by its norm, then makes it more orthogonal."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                x = p.grad / p.grad.norm()
                x = 1.5 * x - 0.5 * x @ x.t() @ x
                p.add_(x, alpha=-group["lr"])


@case(
    "an orthogonalizing optimizer divides a gradient of 0 by its norm",
    fault("optimizer", op="aten.div", module=None, kind="nan"),
)
def gradient_without_a_direction() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    optimizer = _Orthogonal(model.parameters(), {"lr": 0.1})

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.relu(model(batch["x"]) - 100).mean()

    return model, {"x": good_rows()}, training(model, loss_of, optimizer=optimizer)


class _Trusted(torch.optim.Optimizer):
    """Scales each update by the length of the weights over that of the update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad.sign() * p.grad.abs().sqrt()
                p.sub_(group["lr"] * (p.norm() / update.norm()) * update)


@case(
    "a layer-wise rate: weights of some length over an update of none",
    fault("optimizer", op="aten.div", module=None, kind="inf"),
)
def trust_ratio_of_no_update() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    optimizer = _Trusted(model.parameters(), {"lr": 0.1})

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.relu(model(batch["x"]) - 100).mean()

    return model, {"x": good_rows()}, training(model, loss_of, optimizer=optimizer)


@case(
    "accumulated gradients are divided by the number of tokens, which is 0",
    fault("gradients", "post_backward", op="aten.div_", module=None, kind="nan"),
)
def gradients_over_no_tokens() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        tokens = torch.tensor(0.0)
        for x, y in zip(batch["x"], batch["y"], strict=True):
            loss = F.cross_entropy(model(x), y, reduction="sum")
            loss.backward()
            tokens += (y != -100).sum()
        for p in model.parameters():
            p.grad.div_(tokens)
        optimizer.step()
        return loss.detach()

    return model, {"x": [good_rows(), good_rows()], "y": [torch.full((4,), -100)] * 2}, step


@case(
    "the loss is divided by the number of micro-batches, read from an empty list",
    fault("loss", op="aten.div", module=None, kind="inf"),
)
def loss_over_no_micro_batches() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return _square(model, batch) / batch["others"].count_nonzero()

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, {"x": good_rows(), "others": torch.zeros(0)}, training(model, loss_of)


@case(
    "clip_grad_norm_ refuses a nonfinite norm",
    fault("backward", op="aten.div", module="dist", node="SqrtBackward0"),
)
def clipping_refuses() -> Program:
    torch.manual_seed(0)
    model, x = Distance(), good_rows()
    x[0] = 0.0
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch["x"]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        return loss.detach()

    return model, {"x": x}, step


@case(
    "a hook of the optimizer brings gradients of 0 to length 1",
    fault(
        "gradients",
        ANY,
        op="aten.div_",
        module=None,
        kind="nan",
        alts=(Answer("fault", "optimizer", op="aten.div_", module=None),),
    ),
)
def optimizer_hook_divides() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = sgd(model)

    def normalize(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.div_(p.grad.norm())

    optimizer.register_step_pre_hook(normalize)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.relu(model(batch["x"]) - 100).mean()

    return model, {"x": good_rows()}, training(model, loss_of, optimizer=optimizer)


@case("one group's rate is 1e30: the next forward overflows", fault("update", ANY, op=ANY, module=ANY))
def rate_of_one_group() -> Program:
    torch.manual_seed(0)
    model = ReluPerceptron(3, 4, 1)
    optimizer = torch.optim.SGD(
        [{"params": model.net[0].parameters(), "lr": 1e30}, {"params": model.net[2].parameters(), "lr": 1e-3}]
    )
    return model, {"x": good_rows()}, training(model, _square, iterations=3, optimizer=optimizer)


@case("the moment of a frozen parameter is NaN and is never read", HARMLESS)
def moment_of_a_frozen_parameter() -> Program:
    torch.manual_seed(0)
    model = ReluPerceptron(3, 4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step, batch = training(model, _square, optimizer=optimizer), {"x": good_rows()}
    step(model, batch)
    model.net[0].weight.requires_grad_(False)
    model.net[0].weight.grad = None
    optimizer.state[model.net[0].weight]["exp_avg"].fill_(NAN)
    return model, batch, step


@case("a frozen parameter keeps a NaN gradient of long ago, and is in no optimizer", HARMLESS)
def gradient_of_a_frozen_parameter() -> Program:
    torch.manual_seed(0)
    model = ReluPerceptron(3, 4, 1)
    frozen = model.net[0].weight
    frozen.grad = torch.full_like(frozen, NAN)
    frozen.requires_grad_(False)
    optimizer = sgd(model.net[2])
    return model, {"x": good_rows()}, training(model, _square, optimizer=optimizer)


@case(
    "gradients of a step that failed were never cleared: the next one adds to them",
    fault("state", None, param_bad=("weight",), kind="nan"),
)
def gradient_was_never_cleared() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    model.weight.grad = torch.tensor([[0.1, NAN, 0.2]])
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        loss = _square(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, {"x": good_rows()}, step


@case(
    "weights are brought to length 1 through `.data` before the forward, and a row is 0",
    fault("update", ANY, op="aten.reciprocal", module=None, kind="inf"),
)
def length_through_data() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight[1].zero_()
    optimizer = sgd(model)

    def step(model: Any, batch: Batch) -> Tensor:
        model.weight.data.mul_(1.0 / model.weight.data.norm(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss = _square(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, {"x": good_rows()}, step


@case(
    "gradients travel as float16 between processes, and one is 1e5",
    fault("gradients", "post_backward", op="aten._to_copy", module=None, kind="inf", dtype="float16"),
)
def gradient_is_sent_as_half() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = (model(batch["x"]) * 1e5).sum()
        loss.backward()
        for p in model.parameters():
            p.grad = p.grad.half().float()
        optimizer.step()
        return loss.detach()

    return model, {"x": good_rows()}, step


@case(
    "a hook on the activation replaces NaN in its gradient",
    contained("backward", op="aten.div", module="dist", node="SqrtBackward0"),
)
def gradient_hook_replaces_nan() -> Program:
    class Net(Distance):
        def forward(self, x: Tensor) -> Tensor:
            h = self.lin(x)
            if h.requires_grad:
                h.register_hook(lambda gradient: torch.nan_to_num(gradient, 0.0, 0.0, 0.0))
            return self.dist(h)

    torch.manual_seed(0)
    model, x = Net(), good_rows()
    x[0] = 0.0
    return model, {"x": x}, training(model, lambda model, batch: model(batch["x"]).mean())
