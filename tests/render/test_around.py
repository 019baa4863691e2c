"""The table around the culprit of a trace with ops: which of the op's rows it stands on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import nantrace
from nantrace.events import Trace
from nantrace.render.around import rows_around


class Masked(nn.Module):
    """Its scores hold an infinity in every step, which its softmax saturates; nothing is finite for an infinite x."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.lin(x)
        scores = scores.log_softmax(-1) - torch.log(torch.relu(x))
        return torch.where(x > 0, scores, 0.0).sum(-1) + torch.log(x[:, 0] + 2)


def traced() -> Trace:
    """Three steps, the last of which takes the logarithm of 0 for good, on the second line of that op."""
    torch.manual_seed(0)
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with nantrace.trace(model, optimizer=optimizer, ops=True, on_nonfinite="ignore") as tracer:
        for first in (-1.0, -1.0, -2.0):
            optimizer.zero_grad()
            model(torch.tensor([[first, 1.0, 2.0]])).sum().backward()
            optimizer.step()
    return tracer.trace


def test_the_table_around_an_op_is_that_of_its_own_step_and_line() -> None:
    trace = traced()
    verdict = nantrace.diagnose(trace)
    assert verdict.origin is not None and (verdict.origin.op, verdict.origin.step) == ("aten.log", 2)
    rows, marked = rows_around(trace, verdict)
    assert rows[marked][0] == ">"
    shown = {int(trace.events["step"][trace.events["seq"] == int(row[2])][0]) for row in rows[1:]}
    assert 2 in shown
    culprit = trace.events[trace.events["seq"] == int(rows[marked][2])][0]
    assert (int(culprit["step"]), trace.site(culprit).where) == (2, verdict.origin.where)


def test_a_step_of_which_no_row_was_kept_has_no_table() -> None:
    trace = traced()
    verdict = nantrace.diagnose(trace)
    assert rows_around(trace.step(0), verdict) == ([], 0)
