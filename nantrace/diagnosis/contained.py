"""What remains to be advised of nonfinite values that did no harm: what kept them harmless, and how to be rid of them.

Makes its sentences of the checks for the cause. A check of which the answer is known, as that the step stays finite, is
left out or becomes plain advice. Knows no op.
"""

from __future__ import annotations

import re

#: The question at the end of a check that was answered already: the step did stay sound.
_ANSWERED = re.compile(
    r"(,? and see whether (?:it|the (?:step|gradient|update|parameters?|loss)|\w+ and \w+)"
    r"(?: is| stays?)(?: finite)?|: does (?:it|the (?:step|gradient|loss)) stay finite\?)(?=$|\.|:|;)"
)
#: Checks that do nothing but ask that question: the same step on other data or in another range.
_ASKS_ONLY = re.compile(r"^Repeat the step (?:on another batch|without samples?)|^Run the step in bfloat16")
_MEND = "To be rid of it:"
_WHEN = {
    "skip": "A skipped update now and then is what a gradient scaler is for. It does harm where each step is skipped.",
    "guard": (
        "The check in the step kept it out of the parameters. It does harm where it goes on: count how many updates "
        "are left out."
    ),
    "returned": "It does harm only where something is done with what the step returned: test it with torch.isfinite.",
    "soft": "It does harm where the differentiated value goes into a loss: test it with torch.isfinite before.",
}


def advice_of_contained(
    advice: tuple[str, ...], excuse: str | None, absorbed_by: str | None, grad: bool
) -> tuple[str, ...]:
    """At most three sentences.

    Args:
        advice: the checks for the cause.
        excuse: why the sink that it reached does not count; None: it reached none.
        absorbed_by: the op that made finite values of it, if one did.
        grad: whether a gradient can flow back to where it was made.
    """
    return (_when(excuse, absorbed_by, grad), *still_open(advice))[:3]


def _when(excuse: str | None, absorbed_by: str | None, grad: bool) -> str:
    if excuse is not None:
        return _WHEN[excuse]
    if absorbed_by is None:
        return "It does harm as soon as a loss or an update reads it; as long as none does, nothing has to be mended."
    back = ", or a gradient flows back through it: 0 * inf is NaN" if grad else ""
    return f"{absorbed_by} keeps it out of the result. It does harm where that lets it through{back}."


def still_open(advice: tuple[str, ...]) -> tuple[str, ...]:
    """The checks that still tell something; one that only asked whether the step stays sound says how to mend it.

    Behind the first, which tells where to look, these come before the others.
    """
    kept: list[str] = []
    for text in advice:
        if _ASKS_ONLY.search(text):
            continue
        mended = _ANSWERED.sub("", text)
        kept.append(text if mended == text else f"{_MEND} {mended[:1].lower()}{mended[1:].rstrip('.')}.")
    return (*kept[:1], *sorted(kept[1:], key=lambda text: not text.startswith(_MEND)))
