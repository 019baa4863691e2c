"""What tests of capture ask of a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.modules import module as module_internals

from nantrace.capture import lifecycle
from nantrace.events import Trace

Rows = Callable[..., list[tuple[Any, ...]]]


@pytest.fixture
def rows() -> Rows:
    """`rows(trace, role="output", phase="forward")`: (module, slot, event) of the rows that match, in order."""

    def select(trace: Trace, **wanted: object) -> list[tuple[Any, ...]]:
        found = []
        for event in trace.events:
            site = trace.site(event)
            described = {"role": site.role.label, "phase": site.phase.label, "module": site.module, "slot": site.slot}
            if all(described[name] == value for name, value in wanted.items()):
                found.append((site.module, site.slot, event))
        return found

    return select


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert not module_internals._has_any_global_hook()
    assert not lifecycle._watching
    assert not lifecycle._originals
    assert torch.is_grad_enabled()
    assert torch._C._len_torch_dispatch_stack() == 0


def hooks_of(model: torch.nn.Module) -> int:
    """How many hooks are on modules and parameters."""
    on_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    on_parameters = sum(
        len(p._post_accumulate_grad_hooks or ()) + len(p._backward_hooks or ()) for p in model.parameters()
    )
    return on_modules + on_parameters


def is_bad(event: np.void) -> bool:
    return bool(event["nan"] or event["posinf"] or event["neginf"])
