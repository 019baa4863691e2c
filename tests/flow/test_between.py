"""What runs between an update and the forward that follows it: with a trace of modules it is in the same step."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import nantrace

pytestmark = pytest.mark.filterwarnings("ignore::nantrace.NantraceWarning")
Body = Callable[[nn.Linear, torch.optim.Optimizer, Tensor, bool], None]


def _traced(body: Body, *, ops: bool = True) -> nantrace.Trace:
    """Six steps, of which the body is told the fourth to be the one to fail; step 3."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with nantrace.trace(model, optimizer=optimizer, ops=ops) as tracer:
        for step in range(6):
            body(model, optimizer, torch.rand(8, 4) + 0.1, step == 3)
    return tracer.trace


def _train(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _prepared(model: nn.Linear, optimizer: torch.optim.Optimizer, x: Tensor, fails: bool) -> None:
    _train(optimizer, model(((-x if fails else x).log() - 1) * 2).pow(2).mean())


def _from_outside(model: nn.Linear, optimizer: torch.optim.Optimizer, x: Tensor, fails: bool) -> None:
    x.numpy()[5, 1] = float("nan") if fails else 0.0
    _train(optimizer, model((x - 1) * 2).pow(2).mean())


def _without_a_module(model: nn.Linear, optimizer: torch.optim.Optimizer, x: Tensor, fails: bool) -> None:
    _train(optimizer, ((-x if fails else x).log() @ model.weight.t()).pow(2).mean())


def _scheduled(model: nn.Linear, optimizer: torch.optim.Optimizer, x: Tensor, fails: bool) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(-1.0 if fails else 1.1).log()
    _train(optimizer, model(x).pow(2).mean())


@pytest.mark.parametrize("body", [_prepared, _from_outside, _without_a_module, _scheduled])
def test_what_is_made_before_a_forward_belongs_to_the_step_of_that_forward(body: Body) -> None:
    trace = _traced(body)
    verdict = nantrace.diagnose(trace)
    by_modules = nantrace.diagnose(_traced(body, ops=False))
    assert verdict.status == by_modules.status == "fault"
    assert verdict.origin is not None and by_modules.origin is not None
    assert (verdict.origin.step, by_modules.origin.step) == (3, 3)


def test_its_rows_lie_in_that_step_as_well() -> None:
    trace = _traced(_prepared)
    rows = [(int(row["step"]), trace.sites[row["site"]].op) for row in trace.events]
    ops = [(step, op) for step, op in rows if op]
    assert ops[:3] == [(3, "aten.log"), (3, "aten.sub"), (3, "aten.mul")]
    assert not any(step.get("nonfinite") for step in trace.steps[:3])


def test_a_report_on_recorded_ops_counts_steps() -> None:
    report = str(nantrace.report(_traced(_prepared)))
    assert "step 3" in report and "iteration" not in report


def test_what_nobody_can_read_later_stays_in_the_step_that_it_ran_in() -> None:
    def logged(model: nn.Linear, optimizer: torch.optim.Optimizer, x: Tensor, fails: bool) -> None:
        _train(optimizer, model(x).pow(2).mean())
        (-x if fails else x).log()

    trace = _traced(logged)
    assert trace.lineage is not None
    assert [(event.op, event.iteration - 1) for event in trace.lineage.events] == [("aten.log", 3)]
    assert [int(row["step"]) for row in trace.events if trace.sites[row["site"]].op] == [3]


def test_a_copy_of_a_loss_stays_in_the_step_of_the_loss() -> None:
    kept: list[Tensor] = []

    def logged(model: nn.Linear, optimizer: torch.optim.Optimizer, x: Tensor, fails: bool) -> None:
        loss = (model(x).pow(2) * (-1.0 if fails else 1.0)).mean().log()
        if not fails:
            _train(optimizer, loss)
            return
        with torch.no_grad():
            model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
        kept.append(loss.detach() * 2)

    trace = _traced(logged)
    assert trace.lineage is not None
    copies = [event for event in trace.lineage.events if event.op == "aten.mul"]
    assert [event.iteration - 1 for event in copies] == [3]


def test_after_a_skip_the_next_data_belong_to_the_next_step() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with nantrace.trace(model, optimizer=optimizer, scaler=scaler, ops=True) as tracer:
        for step in range(5):
            x = torch.rand(8, 4) + 0.1
            x = (-x if step == 3 else x).log()
            loss = model(x).pow(2).mean() * (float("inf") if step == 2 else 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert tracer.trace.lineage is not None
    logs = [event for event in tracer.trace.lineage.events if event.op == "aten.log"]
    assert [event.iteration - 1 for event in logs] == [3]


def _target(model: nn.Linear, optimizer: torch.optim.Optimizer, x: Tensor, fails: bool) -> None:
    target = (-x if fails else x).log().sum(1, keepdim=True)
    _train(optimizer, (model(x) - target).pow(2).mean())


def _data_and_target(model: nn.Linear, optimizer: torch.optim.Optimizer, x: Tensor, fails: bool) -> None:
    read = (-x if fails else x).log()
    _train(optimizer, (model(read) - read.sum(1, keepdim=True)).pow(2).mean())


def _in_loss(model: nn.Linear, optimizer: torch.optim.Optimizer, x: Tensor, fails: bool) -> None:
    out = model(x).pow(2) + 1
    _train(optimizer, (-out if fails else out).log().mean())


def _from_an_output(model: nn.Linear, optimizer: torch.optim.Optimizer, x: Tensor, fails: bool) -> None:
    seen = model(x).detach().pow(2).sum(1, keepdim=True).expand(8, 4) + 1
    _train(optimizer, model((-seen if fails else seen).log()).pow(2).mean())


@pytest.mark.parametrize(
    ("body", "stage", "by_modules"),
    [
        (_prepared, "input", "input"),
        (_data_and_target, "input", "input"),
        (_target, "loss", "loss"),  # made as early, and read by the loss alone
        (_in_loss, "loss", "loss"),
        (_from_an_output, "loss", None),  # after a module had been called it is no preparation any more
    ],
)
def test_what_is_made_before_a_forward_that_reads_it_is_input(body: Body, stage: str, by_modules: str | None) -> None:
    verdict = nantrace.diagnose(_traced(body))
    assert (verdict.status, verdict.stage) == ("fault", stage)
    assert verdict.origin is not None and verdict.origin.op == "aten.log"
    assert nantrace.diagnose(_traced(body, ops=False)).stage == by_modules


def test_data_of_a_later_micro_batch_are_input_where_an_op_reads_the_batch_itself() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    batch = {"first": torch.rand(8, 4) + 0.1, "second": torch.zeros(8, 4)}
    with nantrace.trace(model, batch=batch, ops=True) as tracer:
        for part in batch.values():
            model(part.log()).pow(2).mean().backward()
    assert nantrace.diagnose(tracer.trace).stage == "input"


def test_data_that_the_model_itself_puts_right_were_prepared_as_well() -> None:
    class Clamped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clamp(min=-5))

    model = Clamped(4, 2)
    with nantrace.trace(model, ops=True) as tracer:
        model(torch.zeros(8, 4).log()).pow(2).mean().backward()
    verdict = nantrace.diagnose(tracer.trace)
    assert (verdict.status, verdict.stage) == ("contained", "input")
