"""Where in the step's life we are: forward, between backward and optimizer, in the optimizer, after it.

An iteration is a round that ends in an optimizer update or a skip; it is counted up when the next forward or backward
begins, because what comes right after an update (an average of weights) still belongs to it; of what does not,
`between` knows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

State = Literal["before", "forward", "after_backward", "after_update", "end"]


@dataclass
class Rounds:
    """Counters and marks of time; times are numbers of dispatched ops.

    Attributes:
        in_optimizer: optimizers now running (one may call another).
        optimizer_depth: length of the module stack when the optimizer began: more means a closure runs the model.
        last_backward, last_update: when these ended last; -1 never.
        skipped_at: number of backward passes when a scaler skipped last; -1 never.
    """

    iteration: int = 1
    state: State = "before"
    over: bool = False
    in_optimizer: int = 0
    optimizer_depth: int = 0
    backwards: int = 0
    last_backward: int = -1
    last_update: int = -1
    skipped_at: int = -1
    round_times: list[int] = field(default_factory=list)
    step_times: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """A forward or backward begins: after an update this is the next iteration."""
        if self.over:
            self.iteration, self.over = self.iteration + 1, False

    def forward(self, time: int, outermost: bool) -> None:
        self.begin()
        self.state = "forward"
        if outermost:
            self.round_times.append(time)

    def backward_ended(self, time: int) -> None:
        self.backwards += 1
        self.state, self.last_backward = "after_backward", time

    def updated(self, time: int) -> None:
        self.step_times.append(time)
        self.last_update, self.over, self.state = time, True, "after_update"

    def updated_by_hand(self, time: int) -> None:
        """The step itself wrote into a parameter after backward."""
        self.last_update, self.over = time, True

    def skip(self) -> None:
        self.skipped.append(self.iteration)
        self.over, self.state, self.skipped_at = True, "after_update", self.backwards

    @property
    def last_was_skipped(self) -> bool:
        return self.backwards > 0 and self.skipped_at == self.backwards
