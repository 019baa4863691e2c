"""Steps that fail in a known way, each with what the rows of its matrix have to come to.

Every program states its answer beforehand: the rows that matter by axis, the modules that have to run in float32, and
words that the reading has to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nantrace.replay.step import Step

YES, NO, NA = "finite", "nonfinite", "not_applicable"


@dataclass(frozen=True)
class Program:
    """A step and its answer: outcome by axis, place of the first row, smallest set (None: not asked), words said."""

    make: Callable[[], tuple[Step, Any]]
    rows: Mapping[str, str]
    begins: str | None = None
    smallest: tuple[str, ...] | None = None
    says: tuple[str, ...] = ()
    never_says: tuple[str, ...] = ()
    axes: tuple[str, ...] | None = None


class Scaled(nn.Module):
    """What its linear layer puts out is too large for float16, before it is divided again."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        with torch.no_grad():
            self.proj.weight.copy_(1000 * torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        big = self.proj(x * 1000)
        return (big - big.mean()) / 1e6  # inf - inf


def body(middle: nn.Module, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), middle, nn.Linear(width, 4))


def batch_of(seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.rand(6, 8, generator=generator) + 0.1, "y": torch.randn(6, 4, generator=generator)}


def amp_step(model: nn.Module, batch: Any, dtype: torch.dtype = torch.float16, scaler: Any = None) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def run(m: nn.Module, b: Any) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = F.mse_loss(m(b["x"]), b["y"])
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    return Step(run, model, batch, optimizer=optimizer, scaler=scaler)


def plain_step(model: nn.Module, batch: Any, lr: float = 1e-3, wrap: Any = None) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def run(m: nn.Module, b: Any) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss((wrap or m)(b["x"]), b["y"])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Step(run, model, batch, optimizer=optimizer)


def fp16_overflow() -> tuple[Step, Any]:
    return amp_step(body(Scaled()), batch_of()), batch_of(2)


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.detach().amin()).log()


def log_of_zero() -> tuple[Step, Any]:
    return plain_step(body(Log()), batch_of()), batch_of(2)


class Dropped(nn.Module):
    """All of a row dropped: its norm is 0, and 0 / 0 follows."""

    def forward(self, x: Tensor) -> Tensor:
        kept = F.dropout(x, 0.9, self.training)
        return kept / kept.norm(dim=-1, keepdim=True)


def dropout_only() -> tuple[Step, Any]:
    return plain_step(body(Dropped()), batch_of()), batch_of(2)


def scale_too_high() -> tuple[Step, Any]:
    model = body(nn.Tanh())
    return amp_step(model, batch_of(), scaler=torch.amp.GradScaler("cpu", init_scale=2.0**22)), batch_of(2)


def optimizer_only() -> tuple[Step, Any]:
    """The learning rate alone carries the weights beyond float32."""
    model = body(nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38)

    def run(m: nn.Module, b: Any) -> Tensor:
        optimizer.zero_grad()
        loss = 1e4 * F.mse_loss(m(b["x"]), b["y"])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Step(run, model, batch_of(), optimizer=optimizer), batch_of(2)


def bad_batch() -> tuple[Step, Any]:
    batch = batch_of()
    batch["x"][3, 2] = float("nan")
    return plain_step(body(nn.Tanh()), batch), batch_of(2)


def compiled_log() -> tuple[Step, Any]:
    """Fails compiled (backend eager) and not compiled alike."""
    model = body(Log())
    return plain_step(model, batch_of(), wrap=torch.compile(model, backend="eager")), batch_of(2)


class OnlyCompiled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 0 * 0 if torch.compiler.is_compiling() else x


def compiled_only() -> tuple[Step, Any]:
    model = body(OnlyCompiled())
    return plain_step(model, batch_of(), wrap=torch.compile(model, backend="eager")), batch_of(2)


def bfloat16_digits() -> tuple[Step, Any]:
    """1 + 1e-3 is 1 in bfloat16, whose difference from 1 has no logarithm; float16 and float32 can tell."""

    class Digits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)
            with torch.no_grad():
                self.one.weight.zero_()
                self.one.bias.fill_(1.001)

        def forward(self, x: Tensor) -> Tensor:
            return (self.one(x) - 1).log()

    return amp_step(body(Digits()), batch_of(), torch.bfloat16), batch_of(2)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        big = (x * 1e25).pow(2)
        return big - big.detach()


def float32_overflow() -> tuple[Step, Any]:
    return plain_step(body(Square()), batch_of()), batch_of(2)


def half_model() -> tuple[Step, Any]:
    """Parameters of float16, no autocast."""
    model = body(Scaled()).half()
    batch = {"x": batch_of()["x"].half(), "y": batch_of()["y"]}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def run(m: nn.Module, b: Any) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(m(b["x"]).float(), b["y"].to(torch.float32))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Step(run, model, batch, optimizer=optimizer), None


def by_chance() -> tuple[Step, Any]:
    """Fails every other time: a counter outside of model and batch."""
    model = body(nn.Tanh())
    calls: list[int] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def run(m: nn.Module, b: Any) -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = F.mse_loss(m(b["x"]), b["y"]) * (float("nan") if len(calls) % 2 else 1.0)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Step(run, model, batch_of(), optimizer=optimizer), batch_of(2)


def explicit_cast() -> tuple[Step, Any]:
    """Half precision that the code asks for by name: no axis reaches it."""

    class Cast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 3e5).to(torch.float16)

    class Back(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.detach()).to(torch.get_default_dtype())

    model = body(nn.Sequential(Cast(), Back()))
    return plain_step(model, batch_of()), batch_of(2)


def clean() -> tuple[Step, Any]:
    return amp_step(body(nn.Tanh()), batch_of(), torch.bfloat16), batch_of(2)


def guarded() -> tuple[Step, Any]:
    """The step's own guard raises before backward."""
    model = body(Scaled())

    def run(m: nn.Module, b: Any) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(m(b["x"]), b["y"])
        if not torch.isfinite(loss):
            raise FloatingPointError("loss is not finite")
        loss.backward()

    return Step(run, model, batch_of()), None


PROGRAMS: dict[str, Program] = {
    "float16 overflows under autocast": Program(
        fp16_overflow,
        {"as-it-was": NO, "autocast-off": YES, "bfloat16": YES, "float32": YES, "float64": YES, "module-float32": YES,
         "scaler-off": NA, "scale-lowered": NA, "no-update": NO, "evaluation": NO, "other-batch": NO,
         "deterministic": NO, "eager": NA, "aot-eager": NA, "inductor": NA},
        begins="forward 1.proj",
        smallest=("1.proj",),
        says=("range is what was missing", "The failure needs autocast", "The failure does not need training mode"),
        never_says=("No digits and no range mend it",),
    ),
    "a logarithm of zero in any dtype": Program(
        log_of_zero,
        {"as-it-was": NO, "autocast-off": NA, "bfloat16": NA, "float32": NA, "float64": NO, "module-float32": NA,
         "no-update": NO, "evaluation": NO, "other-batch": NO},
        begins="forward 1",
        smallest=(),
        says=("No digits and no range mend it", "It begins at the same place, forward 1"),
        never_says=("The failure needs",),
    ),
    "dropout alone": Program(
        dropout_only,
        {"as-it-was": NO, "evaluation": YES, "float64": NO, "other-batch": NO, "no-update": NO},
        says=("The failure needs what only training mode does",),
    ),
    "a loss scale too high": Program(
        scale_too_high,
        {"as-it-was": NO, "scaler-off": YES, "scale-lowered": YES, "autocast-off": YES, "float32": YES,
         "no-update": NO, "evaluation": NO, "bfloat16": YES},
        says=("without the loss scale the same step is finite", "scale 4,096 in place of 4,194,304",
              "how a GradScaler calibrates", "Either change suffices"),
    ),
    "the update alone": Program(
        optimizer_only,
        {"as-it-was": NO, "no-update": YES, "scaler-off": NA, "float64": YES},
        begins="optimizer 0.weight",
        smallest=(),
        says=("The failure is in the update",),
    ),
    "a NaN in the batch": Program(
        bad_batch,
        {"as-it-was": NO, "other-batch": YES, "float64": NO, "evaluation": NO, "no-update": NO},
        begins="input batch.x",
        says=("The failure needs this batch",),
    ),
    "compiled, and wrong without": Program(
        compiled_log,
        {"as-it-was": NO, "eager": NO, "aot-eager": NO, "float64": NO},
        says=("The failure does not need compilation", "rows that change dtypes, modes or data run eagerly"),
        axes=("eager", "aot-eager", "float64"),
    ),
    "wrong only where it is compiled": Program(
        compiled_only,
        {"as-it-was": NO, "eager": YES, "aot-eager": NO, "other-batch": YES},
        says=("The failure needs compilation", "before any generated code"),
        never_says=("The failure needs this batch",),
        axes=("eager", "aot-eager", "other-batch"),
    ),
    "digits that bfloat16 has not": Program(
        bfloat16_digits,
        {"as-it-was": NO, "bfloat16": NA, "autocast-off": YES, "float32": YES, "module-float32": YES},
        smallest=("1.one",),
        says=("The failure needs autocast", "It suffices that this module computes in float32"),
    ),
    "float32 overflows": Program(
        float32_overflow,
        {"as-it-was": NO, "float64": YES, "float32": NA, "autocast-off": NA},
        smallest=(),
        says=("digits and the range of float64",),
    ),
    "a model of float16": Program(
        half_model,
        {"as-it-was": NO, "autocast-off": NA, "float32": YES, "float64": YES, "bfloat16": YES, "other-batch": NA},
        smallest=("1.proj",),
        says=("The failure needs half precision",),
    ),
    "chance": Program(
        by_chance,
        {"as-it-was": "cannot_tell", "float64": "cannot_tell", "evaluation": "cannot_tell", "eager": "cannot_tell"},
        smallest=(),
        never_says=("The failure",),
    ),
    "a cast that the code asks for": Program(
        explicit_cast,
        {"as-it-was": NO, "float64": NO, "autocast-off": NA},
        says=("still put out float16",),
    ),
    "nothing wrong": Program(
        clean,
        {"as-it-was": YES, "autocast-off": YES, "float32": YES, "module-float32": NA, "other-batch": YES},
        smallest=(),
        never_says=("The failure", "makes the step fail"),
    ),
    "a guard that raises": Program(
        guarded,
        {"as-it-was": NO, "autocast-off": YES, "float32": YES, "bfloat16": YES, "no-update": NA, "other-batch": NA},
        begins="forward 1.proj",
        smallest=("1.proj",),
        says=("The failure needs autocast",),
    ),
}  # fmt: skip
