"""The lineage survives the way through JSON, whatever it holds."""

import json
import math

import pytest

from nantrace.errors import TraceFormatError
from nantrace.lineage import Lineage, Operand, OpEvent, Sink


def example() -> Lineage:
    operand = Operand("self", "float16", (2, 3), 0, 1, 0, -1.0, 2.0, tensor="head.weight")
    event = OpEvent(
        1, 7, "aten.log", "inf", "forward", "head", None, "model.py:3 in forward", 1, "float16", (2, 3),
        neginf=1, min=None, max=3.0, first_bad=4, samples=(1,), nan_parents=(), inf_parents=(1, 2),
        node_key=(0, 12, "LogBackward0"), readers=((0, 12, "LogBackward0"), "forward"), operands=(operand,),
        scalars={"value": -math.inf, "dim": [0, 1], "z": 1 + 2j, "mode": None},
    )  # fmt: skip
    sink = Sink("grad", "head.weight", ((1, "inf"),), 1, 9, "skip", guards=(((1,), True),))
    return Lineage(
        [event], [sink], [(1, 1.0, math.inf, 9)], [1], [0], [9], [(8, (1,), False)], backwards=1, notes=["x"]
    )


def test_a_lineage_comes_back_equal_from_strict_json() -> None:
    text = example().to_json()
    json.loads(text, parse_constant=lambda token: pytest.fail(f"{token} is not JSON"))
    back = Lineage.from_json(text)
    assert back.events[0].scalars == {"value": -math.inf, "dim": (0, 1), "z": 1 + 2j, "mode": None}
    back.events[0].scalars = example().events[0].scalars
    assert back == example()


def test_fields_of_a_newer_writer_are_ignored() -> None:
    plain = json.loads(example().to_json())
    plain["novelty"], plain["events"][0]["novelty"] = 1, [2]
    assert Lineage.from_json(json.dumps(plain)).events[0].op == "aten.log"


@pytest.mark.parametrize("text", ["", "[]", '{"events": [{"id": 1}]}', '{"events": 3'])
def test_what_is_not_a_lineage_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(TraceFormatError, match="lineage cannot be read"):
        Lineage.from_json(text)
