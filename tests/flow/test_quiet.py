"""Ops that look harmless the short way: the few of them that are not have to be found all the same."""

from __future__ import annotations

import torch
from torch import nn

from tests.flow.steps import kinds, only, recorded, sinks


def test_a_later_one_of_several_outputs_is_looked_at_too() -> None:
    lineage = recorded(lambda: torch.linalg.slogdet(torch.zeros(2, 2)))
    event = only(lineage, "aten._linalg_slogdet")
    assert (event.kind, event.neginf, event.outputs) == ("inf", 1, 4)


def test_an_inplace_op_on_finite_values_that_makes_a_nan_shows_them_as_they_were() -> None:
    lineage = recorded(lambda: torch.tensor([4.0, -9.0]).sqrt_())
    operand = only(lineage, "aten.sqrt_").operands[0]
    assert (operand.min, operand.max, operand.nan) == (-9.0, 4.0, 0)


def test_a_test_of_a_nonfinite_value_is_followed_through_integers_to_the_host() -> None:
    def run() -> None:
        bool(torch.isnan(torch.log(torch.zeros(2))).to(torch.int64).sum() == 0)

    lineage = recorded(run)
    assert [ids for _, ids, _ in lineage.guard_reads] == [(1,)]


def test_a_harmless_step_has_neither_events_nor_sinks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def run() -> None:
        model(torch.ones(2, 4)).pow(2).sum().backward()
        optimizer.step()

    lineage = recorded(run, model, optimizer=optimizer)
    assert (kinds(lineage), sinks(lineage)) == ([], [])


def test_one_bad_moment_among_good_ones_is_a_sink_by_its_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)

    def run() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones(2, 2)
        model[1].weight.grad = torch.ones(2, 2) / torch.tensor([1.0, 0.0])
        optimizer.step()

    lineage = recorded(run, model, optimizer=optimizer)
    assert ("state", "optimizer.state.1.weight.momentum_buffer") in sinks(lineage)
    assert ("state", "optimizer.state.0.weight.momentum_buffer") not in sinks(lineage)
