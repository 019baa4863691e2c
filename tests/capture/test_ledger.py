"""The ledger of the steps: what became of each update, and what stood around it."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from nantrace.capture.tracer import Tracer


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def _overflow(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
    model[0].weight.grad[0, 0] = math.inf  # type: ignore[index, union-attr]


def _amp_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, overflows: bool = False
) -> float:
    optimizer.zero_grad()
    loss = model(torch.ones(4, 2)).pow(2).mean()
    scaler.scale(loss).backward()
    if overflows:
        _overflow(model)
    scaler.step(optimizer)
    scaler.update()
    return float(loss.detach())


def _traced(model: nn.Module) -> Tracer:
    return Tracer(model, on_nonfinite="ignore")


def _norm(model: nn.Module) -> float:
    return math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in model.parameters() if p.grad is not None))


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_a_skipped_update_is_attempted_and_not_committed(options: dict[str, bool]) -> None:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=65_536.0)
    _amp_step(model, optimizer, scaler)
    for state in optimizer.state.values():
        state["step"].fill_(4_199)
    with _traced(model) as tracer:
        _amp_step(model, optimizer, scaler, overflows=True)
        _amp_step(model, optimizer, scaler)
    skipped, succeeded = tracer.trace.steps
    assert (skipped["attempted_total"], skipped["committed_total"], skipped["skipped_total"]) == (4_200, 4_199, 1)
    assert (skipped["scale_before"], skipped["scale_after"]) == (65_536.0, 32_768.0)
    assert (skipped["attempted"], skipped["committed"], skipped["skipped"]) == (1, 0, 1)
    assert skipped["skipped_by"] == ["0.weight"]
    assert (succeeded["attempted_total"], succeeded["committed_total"], succeeded["skipped_total"]) == (4_201, 4_200, 1)
    assert "skipped_by" not in succeeded
    assert succeeded["totals_from"] == "the optimizer's state"


def test_the_loss_and_the_norm_stand_without_the_scale() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model(torch.ones(4, 2)).pow(2).mean().backward()
    norm = _norm(model)
    with _traced(model) as tracer:
        loss = _amp_step(model, optimizer, scaler)
    (step,) = tracer.trace.steps
    assert step["loss"] == loss
    assert step["gradient_norm"] == pytest.approx(norm)
    assert step["gradient_read"] == "by the optimizer, after unscale_"
    parts = step["gradient_norms"]
    assert set(parts) == {"0", "1"}
    assert math.hypot(*parts.values()) == pytest.approx(norm)


def test_a_fused_optimizer_is_given_scaled_gradients() -> None:
    model = _model()
    model(torch.ones(4, 2)).pow(2).mean().backward()
    norm = _norm(model)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    with _traced(model) as tracer:
        _amp_step(model, optimizer, torch.amp.GradScaler("cpu", init_scale=1024.0))
    (step,) = tracer.trace.steps
    assert step["gradient_norm"] == pytest.approx(norm)
    assert step["gradient_read"] == "by the optimizer, before unscale_ and divided by the scale here"


@pytest.mark.parametrize("unscales", [True, False])
def test_clipping_is_told_with_the_norm_before_it(unscales: bool) -> None:
    from torch.nn.utils import clip_grad_norm_  # bound here, as users have it

    model = _model()
    model(torch.ones(4, 2)).pow(2).mean().backward()
    norm = _norm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with _traced(model) as tracer:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 2)).pow(2).mean()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), norm / 8)
        scaler.step(optimizer)
        scaler.update()
    (step,) = tracer.trace.steps
    scale = 1.0 if unscales else 1024.0
    assert step["clip"]["norm"] == pytest.approx(norm * scale)
    assert step["clip"]["unscaled"] is unscales
    assert step["gradient_norm"] == pytest.approx(norm / 8 / scale, rel=1e-3)
    assert step["gradient_norm_before_clipping"] == pytest.approx(norm, rel=1e-3)
    assert step["gradient_read"].endswith(", after clipping")


def test_a_large_finite_gradient_has_a_finite_norm() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with _traced(model) as tracer:
        (model(torch.ones(1, 1)) * 1e30).sum().backward()
        optimizer.step()
    assert tracer.trace.steps[0]["gradient_norm"] == pytest.approx(1e30)


def test_two_optimizers_on_one_scaler_are_counted_apart() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    first = torch.optim.SGD(model["a"].parameters(), lr=0.1)
    second = torch.optim.SGD(model["b"].parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with _traced(model) as tracer:
        for overflows in (True, False):
            scaler.scale(sum(part(torch.ones(1, 2)).sum() for part in model.values())).backward()
            if overflows:
                model["b"].bias.grad.fill_(math.nan)  # type: ignore[union-attr, operator]
            for optimizer in (first, second):
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
    skipped, after = tracer.trace.steps
    assert (skipped["attempted"], skipped["committed"], skipped["skipped"]) == (2, 1, 1)
    assert [(one["name"], one["skipped"]) for one in skipped["optimizers"]] == [("SGD", 0), ("SGD 2", 1)]
    assert skipped["skipped_by"] == ["b.bias"]
    assert [one["committed_total"] for one in after["optimizers"]] == [2, 1]
    assert (after["attempted_total"], after["committed_total"], after["skipped_total"]) == (4, 3, 1)


def test_a_disabled_scaler_skips_nothing_and_ends_steps() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with _traced(model) as tracer:
        _amp_step(model, optimizer, scaler, overflows=True)
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()  # a loop that leaves the scaler alone where it can
        optimizer.step()
        model(torch.ones(1, 2))
    steps = tracer.trace.steps
    assert [(step["attempted"], step["committed"], step["skipped"]) for step in steps[:2]] == [(1, 1, 0)] * 2
    assert steps[0]["gradient_norm"] == math.inf
    assert "scale_before" not in steps[0]


def test_bfloat16_without_a_scaler_commits_what_it_has() -> None:
    model = _model().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with _traced(model) as tracer:
        model(torch.ones(4, 2, dtype=torch.bfloat16)).pow(2).mean().backward()
        norm = _norm(model)
        optimizer.step()
    (step,) = tracer.trace.steps
    assert (step["attempted_total"], step["committed_total"], step["skipped_total"]) == (1, 1, 0)
    assert step["gradient_norm"] == pytest.approx(norm)
    assert "totals_from" not in step


def test_an_update_that_raises_is_not_committed() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("no update today")

    model = _model()
    tracer = _traced(model)
    with pytest.raises(ValueError, match="no update today"), tracer:
        model(torch.ones(1, 2)).sum().backward()
        Broken(model.parameters(), lr=0.1).step()
    (step,) = tracer.trace.steps
    assert (step["attempted"], step["committed"], step["skipped"]) == (1, 0, 0)


def test_named_losses_are_kept_apart() -> None:
    class Output(dict[str, torch.Tensor]):
        pass

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            ce, kl = y.mean(), y.pow(2).mean()
            return Output(loss=ce + kl, ce=ce, kl=kl, logits=y)

    model = Model(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with _traced(model) as tracer:
        output = model(torch.ones(1, 2))
        output["loss"].backward()
        optimizer.step()
        tracer.mark_step()
        model(torch.ones(1, 2))["loss"].backward()
        tracer.mark_step(loss={"ce": torch.tensor(1.5), "kl": 2.5, "total": 4.0})
    first, second = tracer.trace.steps
    assert first["losses"] == {name: float(output[name].detach()) for name in ("loss", "ce", "kl")}
    assert (second["loss"], second["losses"]) == (4.0, {"ce": 1.5, "kl": 2.5, "total": 4.0})


def test_a_loss_that_is_written_over_later_keeps_its_value() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with _traced(model) as tracer:
        loss = model(torch.ones(1, 2)).sum()
        value = float(loss.detach())
        loss.backward()
        loss.detach().fill_(-1.0)
        optimizer.step()
    assert tracer.trace.steps[0]["loss"] == value


def test_schedulers_are_followed_against_committed_updates() -> None:
    class Own(torch.optim.lr_scheduler.StepLR):
        def step(self, epoch: int | None = None) -> None:
            super().step()

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scheduler = Own(optimizer, 1)
    with _traced(model) as tracer:
        for overflows in (False, True, False):
            _amp_step(model, optimizer, scaler, overflows)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scheduler.step()
    assert [step["schedulers"] for step in tracer.trace.steps] == [
        [{"name": "Own", "position": position, "steps": 1}] for position in (1, 2, 3)
    ]
    assert [step["committed_total"] for step in tracer.trace.steps] == [1, 1, 2]


def test_a_scheduler_that_raises_raises_to_the_user() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 - epoch))
    tracer = _traced(model)
    with pytest.raises(ZeroDivisionError), tracer:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
    (step,) = tracer.trace.steps
    assert step["committed"] == 1
    assert "schedulers" not in step
    assert tracer.trace.raised is not None
    assert tracer.trace.raised.error == "ZeroDivisionError"


def test_a_step_without_optimizer_loss_or_scaler_has_a_row() -> None:
    model = _model()
    with _traced(model) as tracer:
        model(torch.ones(1, 2))
        tracer.mark_step()
        model(torch.ones(1, 2)).sum().backward()
        norm = _norm(model)
        tracer.mark_step()
    forward, backward = tracer.trace.steps
    assert (forward["attempted"], forward["backwards"]) == (0, 0)
    assert not {"loss", "gradient_norm", "scale_before", "lr"} & forward.keys()
    assert backward["gradient_norm"] == pytest.approx(norm)
    assert backward["gradient_read"] == "after backward"


def test_a_scaler_of_another_model_does_not_end_the_step() -> None:
    model, other = _model(), _model()
    mine, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))
    scaler, foreign = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", init_scale=2.0)
    with _traced(model) as tracer:
        for _ in range(2):
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.step(mine)
            foreign.scale(other(torch.ones(1, 2)).sum()).backward()
            foreign.step(theirs)
            foreign.update()
            scaler.update()
    assert [step["scale_before"] for step in tracer.trace.steps] == [8.0, 8.0]
    assert [step["attempted"] for step in tracer.trace.steps] == [1, 1]


def test_a_scaler_shared_by_two_models_is_told_for_the_traced_one() -> None:
    model, other = _model(), _model()
    mine, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with _traced(model) as tracer:
        scaler.scale(model(torch.ones(1, 2)).sum() + other(torch.ones(1, 2)).sum()).backward()
        _overflow(other)
        scaler.step(mine)
        scaler.step(theirs)
        scaler.update()
    (step,) = tracer.trace.steps
    assert (step["attempted"], step["committed"], step["skipped"]) == (1, 1, 0)
    assert (step["scale_before"], step["scale_after"]) == (8.0, 4.0)


def test_micro_steps_are_counted() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with _traced(model) as tracer:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert tracer.trace.steps[0]["backwards"] == 3


@pytest.mark.parametrize("value", (math.nan, -math.inf))
def test_a_later_micro_batch_hides_no_nonfinite_loss(value: float) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with _traced(model) as tracer:
        for losses in ([1.0, value, 2.0], [1.0, 2.0]):
            for loss in losses:
                (model(torch.ones(1, 2)).sum() * 0 + loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [step["loss"] for step in tracer.trace.steps] == [pytest.approx(value, nan_ok=True), 2.0]


def test_a_sampled_step_tells_how_far_each_weight_moved() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with _traced(model) as tracer:
        before = [p.detach().clone() for p in model.parameters()]
        model(torch.ones(4, 2)).pow(2).mean().backward()
        norms = [float(p.grad.norm()) for p in model.parameters()]  # type: ignore[union-attr]
        optimizer.step()
    told = tracer.trace.steps[0]["weights"]
    moved = [float((p.detach() - b).norm() / b.norm()) for p, b in zip(model.parameters(), before, strict=True)]
    assert told["names"] == [name for name, _ in model.named_parameters()]
    assert told["gradient"] == pytest.approx(norms, rel=1e-3)
    assert told["update"] == pytest.approx(moved, rel=1e-3)


def test_a_decision_stands_in_the_row_of_its_step() -> None:
    model = _model()
    with _traced(model) as tracer:
        model(torch.ones(1, 2))
        tracer.note("quarantine", reason="batch 17 in /data/train/x.bin holds NaN", batch_id=17)
        tracer.mark_step()
        tracer.note("checkpoint", path="/home/me/run/step-1.pt")
        model(torch.ones(1, 2))
        tracer.mark_step()
        tracer.note("warm_restart", lr=math.inf)
    quarantined, saved, left = tracer.trace.steps
    assert quarantined["decisions"] == [
        {"kind": "quarantine", "reason": "batch 17 in x.bin holds NaN", "batch_id": 17},
    ]
    assert saved["decisions"] == [{"kind": "checkpoint", "path": "step-1.pt"}]
    assert (left["events"], left["decisions"]) == (0, [{"kind": "warm_restart", "lr": math.inf}])
    assert [step.get("checkpoint") for step in tracer.trace.steps] == [None, *2 * [{"path": "step-1.pt"}]]


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((3,), TypeError, "note got kind=3: pass a text"),
        (("a", 3), TypeError, "note got reason=3: pass a text"),
        (("",), ValueError, "note got kind='': pass a word"),
    ],
)
def test_a_wrong_note_is_refused(args: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with _traced(_model()) as tracer, pytest.raises(error, match=message):
        tracer.note(*args)


def test_a_note_outside_of_the_block_is_refused() -> None:
    tracer = _traced(_model())
    with pytest.raises(RuntimeError, match="outside of the block"):
        tracer.note("quarantine")


def test_the_ledger_alone_reads_no_other_tensor() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = []
    for stats in ("auto", "none"):
        torch.manual_seed(0)
        with Tracer(model, on_nonfinite="ignore", stats=stats) as tracer:  # type: ignore[arg-type]
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(4, 2)).pow(2).mean().backward()
                optimizer.step()
        rows.append(tracer.trace.steps)
        model.load_state_dict(_model().state_dict())
    assert not len(tracer.trace)
    assert len(rows[1]) == 3
    assert all(step["events"] == 0 for step in rows[1])
    kept = ("attempted_total", "committed_total", "backwards", "lr", "gradient_read")
    assert [[step[name] for name in kept] for step in rows[0]][1:] == [[s[n] for n in kept] for s in rows[1]][1:]


def test_the_ledger_alone_warns_of_a_nonfinite_loss() -> None:
    import nantrace

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(nantrace.NantraceWarning),
        nantrace.trace(model, stats="none") as tracer,
    ):
        (model(torch.ones(1, 2)) * math.nan).sum().backward()
        optimizer.step()
    verdict = nantrace.diagnose(tracer.trace)
    assert verdict.status == "fault"
    assert verdict.evidence[0] == "The loss of step 0 was nan."
