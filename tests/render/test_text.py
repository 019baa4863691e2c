"""The terminal report: what it says, and that no name can break it."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nantrace.diagnosis.diagnose import diagnose
from nantrace.diagnosis.verdict import Origin, Verdict
from nantrace.events import Phase, Role, TensorStats, Trace
from nantrace.lineage import Operand
from nantrace.render.cells import columns, harmless, pad, shorten, shorten_all, wrap
from nantrace.render.html import cell
from nantrace.render.overview import overview
from nantrace.render.sentence import sentence
from nantrace.render.text import next_command, text
from tests.diagnosis.written import FINITE, NAN, POSINF, Written


def overflow(module: str = "block.1.ff.wo") -> Trace:
    written = Written("float16")
    written.modules[module] = "Linear"
    written.param(f"{module}.weight")
    with written.call("", made=NAN):
        written.run("block.1.ff.wi", made={"size": 1380.0})
        written.run(module, made={"posinf": 5, "size": 64000.0})
    written.loss(nan=8)
    written.grad(f"{module}.weight", nan=8)
    return dataclasses.replace(written.trace(), path="step.h5")


def report(trace: Trace, **options: bool | int) -> str:
    return text(trace, diagnose(trace), **options)  # type: ignore[arg-type]


def test_the_report_names_the_first_nonfinite_tensor_its_cause_and_the_next_command() -> None:
    lines = report(overflow()).split("\n")
    assert lines[0] == "step.h5   torch 2.13.0, cpu, 1 step, 9 events, complete"
    assert lines[2] == "FIRST NONFINITE   forward   block.1.ff.wo   output   float16 [2, 4]"
    assert lines[3] == "    5 +inf of 8 elements; first at [0, 3]"
    assert "FAULT in forward: overflow. Inputs and weights are finite; the result left" in lines
    assert lines[-1] == "Next: nantrace bisect FILE.py:step"


def test_the_culprit_is_the_only_marked_row_of_the_table() -> None:
    marked = [line for line in report(overflow()).split("\n") if line.startswith(">")]
    assert len(marked) == 1
    assert re.fullmatch(r">\s+6\s+block\.1\.ff\.wo\s+forward\s+output\s+float16\s+6\.40e\+04\s+\.\s+5", marked[0])


def test_the_ascii_report_has_nothing_beyond_ascii() -> None:
    assert report(overflow("bl\u00f6ck.\u5c42" * 20), ascii=True).isascii()


def test_colour_is_only_there_when_asked_for() -> None:
    assert "\x1b" not in report(overflow())
    coloured = report(overflow(), colour=True)
    assert "\x1b[1;31m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == report(overflow())


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize(
    "module",
    ["a" * 300, "\u5c42" * 120, "deep." * 60 + "end", "x" + "\u0301" * 90, "\x1b[2Jred"],
    ids=["one word", "wide", "deep", "combining", "escape"],
)
def test_no_line_is_wider_than_the_terminal(module: str, width: int) -> None:
    assert all(columns(line) <= width for line in report(overflow(module), width=width).split("\n"))


@given(st.text(max_size=40), st.integers(40, 100), st.booleans())
@settings(deadline=None, max_examples=60)
def test_any_name_leaves_the_report_printable_and_in_its_width(name: str, width: int, ascii_only: bool) -> None:
    origin = Origin(phase="forward", module=name, tensor=name, dtype=name, where=name, kind="nan")
    verdict = Verdict("fault", "forward", name, origin, (name, name), (name,), (origin,), region=(name,))
    for line in text(None, verdict, width=width, ascii=ascii_only).split("\n"):
        assert columns(line) <= width
        assert line.isprintable() or not line
        assert line.isascii() or not ascii_only


def test_escape_sequences_in_names_are_shown_and_not_obeyed() -> None:
    assert "\x1b" not in report(overflow("evil\x1b]0;title\x07"))
    assert harmless("a\x1b[31m\n\u202e\u2028") == "a\\x1b[31m\\x0a\\u202e\\u2028"
    assert harmless("\u5c42 \u00e9") == "\u5c42 \u00e9"
    assert harmless("\u5c42\u2026", ascii_only=True) == "\\u5c42..."


def test_long_names_keep_both_ends() -> None:
    assert shorten("encoder.layers.11.attention.output.dense", 20) == "encode\u2026.output.dense"
    assert shorten("abc", 3) == "abc"
    assert columns(shorten("\u5c42" * 30, 9)) <= 9


def test_wide_characters_take_two_columns_and_combining_ones_none() -> None:
    assert columns("\u5c42a") == 3
    assert columns("e\u0301") == 1
    assert pad("\u5c42", 4) == "\u5c42  "
    assert pad("1", 3, right=True) == "  1"


def test_words_longer_than_the_line_are_broken() -> None:
    assert wrap("x" * 25, 20, indent=5) == ["     " + "x" * 15, "     " + "x" * 10]


def bisected() -> Verdict:
    origin = Origin(
        phase="backward",
        module="unit",
        op="aten.div",
        node="SqrtBackward0",
        kind="nan",
        dtype="float32",
        where="model.py:41 in forward",
        inputs=(Operand("self", "float32", (2, 1), 0, 0, 0, 0.0, 1.5, zero=1),),
        output=TensorStats("float32", (2, 1), 2, 1, nan=1, min=0.5, max=0.5, first_bad=1),
        first_bad=(1, 0),
        samples=(1,),
    )
    other = Origin(phase="backward", module="unit", op="aten.mul", node="PowBackward0", dtype="float32")
    return Verdict(
        "fault",
        "backward",
        "sqrt_at_zero",
        origin,
        (
            "0/0.",
            "Reached.",
        ),
        ("eps.",),
        (other,),
        replays=3,
    )


def test_an_op_level_verdict_shows_op_node_line_operands_samples_and_replays() -> None:
    shown = text(None, bisected())
    assert "aten.div   node SqrtBackward0" in shown.replace("\n    ", "   ")
    assert "at model.py:41 in forward" in shown
    assert "read numerator: float32 [2, 1], 0 to 1.5, 1 zero" in shown
    assert "samples of the batch: 1" in shown
    verdict = bisected()
    assert verdict.origin is not None
    every = dataclasses.replace(verdict, origin=dataclasses.replace(verdict.origin, samples=(0, 1)))
    assert "every sample of the batch (all 2)" in text(None, every)
    assert "Also: backward, unit, aten.mul, node PowBackward0, float32." in shown
    assert "3 replays." in shown
    assert "FAULT in backward: sqrt at zero. 0/0." in shown


def shown_lines(verdict: Verdict) -> list[str]:
    return [line.strip() for line in text(None, verdict).split("\n")]


def test_the_way_from_an_op_to_its_sink_is_told_module_by_module() -> None:
    def step(op: str, module: str | None, phase: str = "forward") -> dict[str, str | None]:
        return {"op": f"aten.{op}", "module": module, "phase": phase}

    way = (step("exp", "enc"), step("mul", "enc"), step("mean", None, "loss"), {"sink": "loss", "name": "loss"})
    assert "Way: enc (exp, mul) -> loss code (mean) -> loss." in shown_lines(Verdict("fault", path=way))
    long = tuple(step("add", f"layer.{n}", "backward") for n in range(9))
    said = " ".join(shown_lines(Verdict("fault", path=(*long, {"sink": "grad", "name": "w"}))))
    assert "backward of layer.0 (add) -> backward of layer.1 (add) -> ... -> backward of layer.7" in said
    assert said.rstrip().endswith("-> grad w.") and "layer.4" not in said


def test_numbers_that_the_operands_show_are_not_said_again() -> None:
    verdict = bisected()
    read = "The numerator (float32, 2x1) was finite, from 0 to 1.5 with 1 zero."
    made = "aten.div put out 1 NaN among 2 elements (float32)."
    more = dataclasses.replace(verdict, evidence=("0/0.", read, made, "Input self was odd.", "Reached."))
    assert text(None, more) == text(
        None, dataclasses.replace(verdict, evidence=("0/0.", "Input self was odd.", "Reached."))
    )
    assert read not in text(None, more) and "odd" in text(None, more)


def test_operands_are_named_by_what_they_are_and_by_tensor_and_one_value_is_said_once() -> None:
    weight = Operand("mat2", "float16", (32, 8), 0, 0, 0, 100.0, 100.0, tensor="head.weight")
    bias = Operand("self", "float16", (8,), 0, 0, 0, 0.0, 0.0, zero=8)
    shown = shown_lines(dataclasses.replace(bisected(), origin=Origin(op="aten.addmm", inputs=(weight, bias))))
    assert "read right matrix = head.weight: float16 [32, 8], all 100" in shown
    assert "read addend: float16 [8], all 0" in shown


def test_a_line_of_a_backward_is_not_called_that_of_its_forward() -> None:
    origin = Origin(op="aten.div", node="HalfBackward", where="net.py:12 in backward")
    assert "its forward ran at net.py:12 in backward" in shown_lines(Verdict("fault", origin=origin))
    own = dataclasses.replace(origin, own_line=True)
    assert "its backward runs at net.py:12 in backward" in shown_lines(Verdict("fault", origin=own))


def test_a_tensor_that_was_bad_from_the_start_has_no_phase() -> None:
    stats = TensorStats("float32", (2,), 2, 0, nan=2)
    origin = Origin(module="head", tensor="head.bias", kind="nan", dtype="float32", output=stats)
    assert shown_lines(Verdict("fault", "state", "bad_param", origin))[0] == (
        "FIRST NONFINITE   before the step   head.bias   float32 [2]"
    )
    nameless = Origin(kind="inf", dtype="float32", output=stats)
    assert "before the step   a tensor without a name" in shown_lines(Verdict("fault", origin=nameless))[0]


def test_an_op_of_a_later_iteration_counts_like_the_sentences_about_it() -> None:
    origin = dataclasses.replace(bisected().origin or Origin(), step=3)
    assert "FIRST NONFINITE   iteration 3   backward" in text(None, dataclasses.replace(bisected(), origin=origin))


def test_a_shape_is_not_torn_from_its_dtype() -> None:
    first, second, *_ = text(None, bisected()).split("\n")
    assert first.endswith("node SqrtBackward0") and second == "    float32 [2, 1]"
    origin = Origin(phase="forward", module="layers.0.attn", op="aten._softmax", dtype="float32")
    for length in range(20):  # the first line gives way before it is full, where wrapping would break it
        long = dataclasses.replace(origin, module="m" * (20 + length), output=TensorStats("float32", (4, 4, 4), 64, 0))
        lines = text(None, dataclasses.replace(bisected(), origin=long)).split("\n")
        assert any("float32 [4, 4, 4]" in line for line in lines[:2])


def test_a_verdict_that_has_its_op_does_not_ask_for_bisect_again() -> None:
    assert "nantrace bisect" not in text(None, bisected())


@pytest.mark.parametrize(
    ("status", "headline"),
    [
        ("clean", "CLEAN: nothing nonfinite was seen."),
        ("expected", "EXPECTED: nonfinite values that training does not feel, no fault."),
        ("not_reproduced", "NOT REPRODUCED: the replayed step stayed finite."),
        ("inconclusive", "INCONCLUSIVE. Why."),
        ("contained", "CONTAINED. Why."),
    ],
)
def test_every_status_has_its_headline_and_tells_its_evidence_once(status: str, headline: str) -> None:
    shown = text(None, Verdict(status, evidence=("Why.",)))  # type: ignore[arg-type]
    assert shown.startswith(headline)
    assert shown.count("Why.") == 1


def test_what_is_left_under_suspicion_is_listed() -> None:
    assert "Left under suspicion: a.b, a.c." in text(None, Verdict("inconclusive", region=("a.b", "a.c")))


def test_an_incomplete_trace_is_called_so() -> None:
    lines = report(dataclasses.replace(overflow(), complete=False)).split("\n")
    assert lines[0] == "step.h5"  # what does not fit beside the path stands below it, whole
    assert lines[1].endswith("1 step, 9 events, incomplete: the writer did not close it")


def test_the_warning_names_tensor_shape_count_and_command() -> None:
    said = sentence(diagnose(overflow()), "my step.h5")
    assert said == (
        "first nonfinite tensor: forward, block.1.ff.wo output, float16 [2, 4], 5 inf (overflow). "
        "See: nantrace report 'my step.h5'"
    )
    assert sentence(diagnose(overflow())).endswith("See: print(nantrace.report(tracer.trace))")


def test_the_overview_says_what_is_covered_and_what_was_skipped() -> None:
    written = Written()
    written.run("", made=POSINF)
    written.end(skipped=1, committed=0, loss=float("nan"), lr=[0.1, 0.01], notes=["no gradient came: a"])
    shown = overview(dataclasses.replace(written.trace(), path="a b.h5"))
    assert "2, 1 of them nonfinite" in shown
    assert re.search(r"0\s+0\s+nan\s+0\.1, 0\.01\s+\.\s+skipped", shown)
    assert "no gradient came: a" in shown
    assert shown.endswith("Next: nantrace report 'a b.h5'")


def test_the_warning_says_a_stage_only_where_the_phase_does_not() -> None:
    origin = Origin(phase="forward", tensor="head.bias", dtype="float32")
    assert "(state, bad param)" in sentence(Verdict("fault", "state", "bad_param", origin))
    assert "(" not in sentence(Verdict("fault", "forward", None, origin)).partition(" See:")[0]


def deep() -> Trace:
    written = Written()
    with written.call("", made=NAN):
        for layer in range(8, 13):
            bad = NAN if layer >= 11 else FINITE
            name = f"model.encoder.{'a_wide_wrapper.' * 9}layers.{layer}.attention.output.dense"
            written.run(name, given=NAN if layer > 11 else FINITE, made=bad)
    written.loss(nan=1)
    return written.trace()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_long_names_that_differ_in_the_middle_stay_different_in_the_table(width: int) -> None:
    rows = [line for line in report(deep(), width=width).split("\n") if re.search(r" output .*[.1]$", line)]
    names = [re.sub(r"^>", " ", row).split()[1] for row in rows]
    assert len(names) >= 4
    assert len(set(names)) == len(names)


def test_a_long_name_is_whole_where_it_is_first_said_and_cut_in_the_middle_elsewhere() -> None:
    full = f"model.encoder.{'a_wide_wrapper.' * 9}layers.11.attention.output.dense"
    shown = report(deep())
    assert shown.replace("\n    ", "").count(full) == 1
    assert re.search(r"Inputs and weights of\s+model\.enc\S*\u2026\S*layers\.11\.attention\.output\.dense\s+are", shown)


def test_columns_are_cut_where_different_texts_differ() -> None:
    names = [f"{'a.' * 20}layers.{n}.{'b.' * 20}end" for n in range(12)]
    for width in (16, 24, 60):
        cut = shorten_all(names, width)
        assert len(set(cut)) == 12 and all(columns(text) <= width for text in cut)
    assert shorten_all(["same" * 9, "same" * 9, "x"], 8)[2] == "x"


def test_a_keyword_argument_stands_apart_from_its_role() -> None:
    written = Written()
    call = next(written.calls)
    written.row("emb", Phase.FORWARD, Role.INPUT, "kwargs.input_ids", call, **NAN)
    written.row("emb", Phase.FORWARD, Role.OUTPUT, "output[0].hidden", call, **NAN)
    written.loss(nan=1)
    shown = report(written.trace())
    assert "input kwargs.input_ids" in shown and "output[0].hidden" in shown


def test_a_narrow_table_leaves_columns_out_and_keeps_its_numbers() -> None:
    rows = [line.split() for line in report(overflow(), width=40).split("\n") if line.startswith((">", "   "))]
    assert ["#", "module", "role", "nan", "inf"] in rows
    assert [">", "6", "block.1.ff.wo", "output", ".", "5"] in rows


def test_sentences_on_a_wide_page_stay_readable_and_the_table_uses_it() -> None:
    lines = report(deep(), width=220).split("\n")
    table = lines[next(n for n, line in enumerate(lines) if line.endswith("inf")) :]
    assert max(map(columns, table)) > 180
    sentences = [line for line in lines if line not in table and "   " not in line.strip()]
    assert len(sentences) > 5
    assert all(columns(line) <= 100 for line in sentences if "model.encoder" not in line)


def test_a_culprit_of_a_later_step_stands_beside_its_row_of_the_step_before() -> None:
    written = Written()
    for bad, size in ((FINITE, 3.0), (FINITE, 700.0), (NAN, 1.0)):
        with written.call("", made=bad):
            written.run("head", made={**bad, "size": size})
        written.loss(**bad)
        written.end()
    shown = report(written.trace())
    assert "FIRST NONFINITE   step 2   forward   head" in shown
    assert re.search(r"\n +1 +8 +head +forward +output +float32 +7\.00e\+02", shown)
    assert re.search(r"\n> +2 +13 +head", shown)


@pytest.mark.parametrize(
    ("verdict", "command"),
    [
        (Verdict("fault", "forward", origin=Origin(module="a")), "nantrace bisect FILE.py:step"),
        (Verdict("contained", "forward", origin=Origin(module="a")), "nantrace bisect FILE.py:step"),
        (
            Verdict("fault", "forward", origin=Origin(module="a", op="aten.log")),
            "nantrace bisect FILE.py:step --reproducer reproducer",
        ),
        (Verdict("fault", "state", origin=Origin(tensor="head.bias")), None),
        (Verdict("fault", "input", origin=Origin(tensor="batch.wav")), None),
        (
            Verdict("fault", "input", origin=Origin(op="aten.log")),
            "nantrace bisect FILE.py:step --reproducer reproducer",
        ),
        (Verdict("clean"), None),
        (Verdict("expected"), None),
    ],
)
def test_the_next_command_of_a_trace_is_the_one_that_tells_more(verdict: Verdict, command: str | None) -> None:
    assert next_command(overflow(), verdict) == command
    assert next_command(None, verdict) is None  # the caller of bisect knows with what it was called


def test_how_to_bisect_is_told_once() -> None:
    shown = " ".join(report(overflow()).split())
    assert shown.count("nantrace bisect FILE.py:step") == 1
    assert "let step() in FILE.py return nantrace.Step(run, model, batch)" in shown


def test_a_tensor_that_a_trace_found_bad_before_the_step_has_no_phase_either() -> None:
    written = Written()
    written.param("head.bias", nan=1)
    written.run("head", made=NAN)
    written.loss(nan=1)
    assert "FIRST NONFINITE   before the step   head.bias   float32 [2, 4]" in report(written.trace())


def test_an_op_that_prepared_data_is_said_to_have_run_before_the_model() -> None:
    origin = Origin(phase="loss", op="aten.log", dtype="float32", where="train.py:8 in step")
    verdict = Verdict("fault", "input", "log_of_zero", origin, ("aten.log is infinite at 0.",))
    assert "FIRST NONFINITE   before the model   aten.log   float32" in text(None, verdict)
    assert "first nonfinite tensor: before the model, " in sentence(verdict)
    assert "<span>before the model</span>" in cell(None, verdict)
