"""A training step with the answer that a tracer must give, as a value.

Knows the vocabulary of expectations and nothing of the tools that are judged by it (`answers` compares).

Vocabulary of an `Expectation`

verdict
    fault: nonfinite values, or their consequence, damage training. contained: they arise and the training state
    survives (a skipped step, an absorbed infinity). expected: they are there on purpose (masks, sentinels, missing
    labels). clean: nothing is nonfinite although the code looks dangerous.
stage
    input: the batch was bad. state: a parameter, buffer or moment was bad before the step. forward, loss, backward,
    optimizer: where the value was born. gradients: between backward and the optimizer. update: what an update left
    behind and a later iteration trips over. None: nothing to blame.
phase
    when `op` runs: forward, loss (outside every module), backward, recompute, post_backward, optimizer. None: no op.
op, node, module, kind, dtype, iteration
    op: the aten op to name. node: its autograd node, for a backward op. module: FQN of the module whose own code runs
    the op; "" the model itself, "<ClassName>" a module outside the model, None no module. kind: "nan", "inf" or
    "naninf" (both). dtype: of the op's output. iteration: in a step that iterates, which call of the model, from 1.
batch_bad, param_bad, buffers_bad, state_bad
    names of the tensors that are nonfinite before the step, or, with the stage `update`, after it. `any_tensor`: the
    bad tensor has no name that could be asked for.
alts
    other answers that are as good.
also
    (phase, op, module) of a second place worth naming: where an infinity becomes NaN.
culprit, debatable
    the cause in words, where the op is only the messenger; why the answer can be argued.
end
    the state after the step.

`ANY` in a field means that the field is not asked for; None is an answer.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import nn

from nantrace.diagnosis.verdict import Stage, Status

Batch = dict[str, Any]
Step = Callable[[nn.Module, Any], Any]
#: A model, its batch and the step that trains the one on the other: `step(model, batch)` returns the last loss.
Program = tuple[nn.Module, Any, Step]


class Unasked(enum.Enum):
    """The type of `ANY`."""

    ANY = "any"


ANY: Final = Unasked.ANY
Asked = str | None | Unasked


@dataclass(frozen=True)
class Answer:
    """One acceptable answer. A field at `ANY` is not compared; `tensor` need only be contained in the given name."""

    verdict: Status
    stage: Stage | Unasked | None = ANY
    op: Asked = ANY
    module: Asked = ANY
    node: Asked = ANY
    tensor: str | Unasked = ANY


@dataclass(frozen=True)
class End:
    """The state after the step. Flags are True if any such tensor is nonfinite; None was not looked at."""

    loss: Literal["finite", "nonfinite"] | None = None
    params: bool | None = None
    grads: bool | None = None
    buffers: bool | None = None


@dataclass(frozen=True)
class Expectation:
    """The right answer; the fields are explained in this module's docstring."""

    verdict: Literal["fault", "contained", "expected", "clean"]
    stage: Stage | None = None
    phase: str | Unasked | None = None
    op: Asked = None
    node: str | None = None
    module: Asked = None
    kind: str | None = None
    dtype: str | None = None
    iteration: int | None = None
    batch_bad: tuple[str, ...] = ()
    param_bad: tuple[str, ...] = ()
    buffers_bad: tuple[str, ...] = ()
    state_bad: tuple[str, ...] = ()
    any_tensor: bool = False
    alts: tuple[Answer, ...] = ()
    also: tuple[tuple[str, str, str | None], ...] = ()
    culprit: str = ""
    debatable: str = ""
    end: End = End()

    @property
    def harmless(self) -> bool:
        """Whether a tool must raise no alarm."""
        return self.verdict in ("expected", "clean")


@dataclass(frozen=True)
class Case:
    """One small program, where its mechanism was reported (`source`), and the right answer.

    `build()` makes everything anew and always the same, so that a case can be run as often as needed.
    """

    name: str
    source: str
    build: Callable[[], Program]
    expect: Expectation


def case(source: str, expect: Expectation) -> Callable[[Callable[[], Program]], Case]:
    """Turns a build function into the `Case` of the same name."""

    def make(build: Callable[[], Program]) -> Case:
        return Case(build.__name__, source, build, expect)

    return make
