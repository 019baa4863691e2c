"""How many cases bisect answers rightly: `python -m tests.zoo.count`.

Prints one line for each wrong case, with what differs, and the count. Exit code 1 if any is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from nantrace.diagnosis.verdict import Verdict
from tests.zoo.answers import matches
from tests.zoo.case import Case
from tests.zoo.cases import CASES


def wrong_answers(bisect: Callable[..., Verdict]) -> Iterator[tuple[Case, list[str]]]:
    """The cases that `bisect(step, model, batch)` answers wrongly, each with what differs.

    An exception counts as a wrong answer and is reported in its place.
    """
    for case in CASES:
        differences = _differences(case, bisect)
        if differences:
            yield case, differences


def _differences(case: Case, bisect: Callable[..., Verdict]) -> list[str]:
    model, batch, step = case.build()
    try:
        return matches(case, bisect(step, model, batch))
    except Exception as error:  # one broken case must not hide the others
        return [f"{type(error).__name__}: {error}"]


def main(write: Callable[[str], Any] = print) -> int:
    import nantrace

    wrong = 0
    for case, differences in wrong_answers(nantrace.bisect):
        wrong += 1
        write(f"{case.name}: {'; '.join(differences)}")
    write(f"{len(CASES) - wrong} of {len(CASES)} right")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
