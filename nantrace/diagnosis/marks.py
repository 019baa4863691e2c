"""Which rows of -inf are masks, and which are damage.

-inf is what masks look like, and what log(0) looks like. Read by a softmax it is a mask; a module that adds up or
multiplies what it is given cannot have been meant to read one. Knows single rows and calls, not where values go.
"""

from __future__ import annotations

import re

from nantrace.diagnosis.modules.seen import Call, Seen

#: Modules that compute with every element they are given: -inf in makes NaN or infinities out of good values.
_ARITHMETIC = re.compile(r"Norm|Linear|Conv|RNN|LSTM|GRU|Bilinear")
_READS_MASKS = re.compile(r"softm|atten|attn|transformer|pool|logsumexp", re.IGNORECASE)
_NAMES_A_MASK = re.compile(r"mask|bias", re.IGNORECASE)


def reads_masks(seen: Seen, call: Call, row: int) -> bool | None:
    """Whether `call` may have been meant to be given the -inf of its input `row`; None where nothing tells."""
    cls = seen.classes.get(call.module, call.module)
    if _ARITHMETIC.search(cls) and not _READS_MASKS.search(cls):
        return False
    if _NAMES_A_MASK.search(seen.site(row).slot) or _READS_MASKS.search(f"{cls} {call.module.rpartition('.')[2]}"):
        return True
    event = seen.trace.events[row]
    varied = float(event["min"]) < float(event["max"])  # else 0 and -inf, or -inf alone
    return None if varied and not call.foreign else True
