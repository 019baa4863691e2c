"""What `torch.autograd.detect_anomaly` says of a step, where it can be right: after a forward that was finite.

For a value born in forward it names the wrong node, often the loss line, and it is silent on an infinity.
"""

from __future__ import annotations

import re
import warnings

import torch

from nantrace.capture.surroundings import eager_instead_of_compiled
from nantrace.replay.ends import Ends, describe
from nantrace.replay.replays import Replays, called

_NODE = re.compile(r"Function '(\w+)' returned nan")
_FRAMES = 3


def anomaly_evidence(replays: Replays, first: Ends) -> tuple[str, ...]:
    """Sentences: the node it stopped at with its forward stack, or why it was not asked or could not tell."""
    if not first.forward_was_finite:
        return (
            "detect_anomaly was not run: the loss was nonfinite already, and then it names the loss line or another "
            "wrong node.",
        )
    if not first.failed:
        return ("detect_anomaly was not run: no end of the step is nonfinite.",)
    if replays.left < 1:
        return ("detect_anomaly was not run: no replay was left.",)
    with replays.one("under detect_anomaly") as listener, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with eager_instead_of_compiled(), torch.autograd.detect_anomaly(check_nan=True):
            returned, error = called(replays.step)
        listener.ended(returned, error)
    stopped = _NODE.search(str(error)) if error is not None else None
    if stopped is None:
        raised = f", and the step raised {describe(error)}" if error is not None else ""
        return (f"detect_anomaly stopped at no node: no backward node returned NaN{raised}.",)
    lines = _forward_lines([str(warning.message) for warning in caught])
    where = f", made in forward at {' < '.join(lines)}" if lines else ""
    return (f"detect_anomaly stopped at {stopped.group(1)}{where}.",)


def _forward_lines(messages: list[str]) -> list[str]:
    """The innermost lines of the user's in the traceback of the forward call that anomaly mode prints."""
    text = next((m for m in messages if "Traceback of forward call" in m or "forward call that caused" in m), "")
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text)
    own = [f"{file.rpartition('/')[2]}:{line} in {name}" for file, line, name in frames if _is_own(file)]
    return own[::-1][:_FRAMES]


def _is_own(file: str) -> bool:
    return "/torch/" not in file and "/nantrace/" not in file and not file.startswith("<")
