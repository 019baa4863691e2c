"""Each example runs, is short, and its report names the failure that it was built around."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

SAID = {
    "adam_eps_in_float16": ("FAULT in optimizer", "0.weight"),
    "all_masked_row": ("FAULT in forward", "FIRST NONFINITE   forward   attention"),
    "bad_batch": ("FAULT in input: bad input", "batch.wav"),
    "learning_rate_too_large": ("FAULT in update: exploding update", "the weights explode"),
    "log_of_zero_in_loss": ("FAULT in loss", "<CrossEntropyByHand>"),
    "overflow_in_float16": ("FAULT in forward: overflow", "FIRST NONFINITE   forward   1.wo"),
    "poisoned_batch_norm": ("FAULT in update: overflow", "norm.running_mean, norm.running_var"),
    "sqrt_at_zero": ("FAULT in backward", "FIRST NONFINITE   backward   distance"),
    "t5_in_float16": ("FAULT in forward: overflow", "encoder.block.1.layer.1.DenseReluDense.wo"),
}


def test_every_example_has_an_answer_and_is_short() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAID)
    assert all(len(path.read_text().split("\n")) <= 61 for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", SAID)
def test_an_example_names_its_failure(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "t5_in_float16":
        pytest.importorskip("transformers")
    with warnings.catch_warnings():
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    shown = capsys.readouterr().out
    for words in SAID[name]:
        assert words in shown
