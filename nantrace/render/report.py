"""A verdict, with the trace that it judges, ready to be shown: terminal text, notebook, or a file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from nantrace.diagnosis.recipe import recipe
from nantrace.diagnosis.symptom import symptoms
from nantrace.diagnosis.verdict import Verdict, plain
from nantrace.events import Trace
from nantrace.render.text import text

_SUFFIXES = (".txt", ".json", ".html")


@dataclass(frozen=True)
class Report:
    """What `nantrace.report` gives: `str()` is the text, a notebook shows it, `save` writes it.

    Attributes:
        verdict: what is reported.
        trace: what it was judged by; None for a verdict alone.
    """

    verdict: Verdict
    trace: Trace | None = None

    def __str__(self) -> str:
        return text(self.trace, self.verdict)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from nantrace.render.html import cell  # a report in a terminal needs no page and no pictures

        return cell(self.trace, self.verdict)

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON types only.

        The verdict, what the trace covers, its ledger, one mapping a step, the rules of mixed precision that it broke,
        and what stands out over the steps.
        """
        covers: dict[str, Any] | None = None
        if self.trace is not None:
            covers = {
                "path": self.trace.path,
                "events": len(self.trace),
                "steps": len(self.trace.steps),
                "complete": self.trace.complete,
            }
        ledger = [] if self.trace is None else plain(self.trace.steps)
        broken = () if self.trace is None else recipe(self.trace)
        departures = [departure.to_dict() for departure in broken]
        observed = [] if self.trace is None else [each.to_dict() for each in symptoms(self.trace, self.verdict.status)]
        return {
            "verdict": self.verdict.to_dict(),
            "trace": covers,
            "ledger": ledger,
            "recipe": departures,
            "observations": observed,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report; the extension chooses the form: ".txt", ".json" or ".html".

        A report can be made again from its trace, so a file that is there is replaced.

        Raises:
            ValueError: another extension.
        """
        name = os.fspath(path)
        suffix = os.path.splitext(name)[1].lower()
        if suffix not in _SUFFIXES:
            allowed = ", ".join(_SUFFIXES)
            raise ValueError(f"a report cannot be written to {name!r} (extension {suffix!r}): use one of {allowed}.")
        content = {".txt": self._as_text, ".json": self._as_json, ".html": self._as_html}[suffix]()
        with open(name, "w", encoding="utf-8") as file:
            file.write(content)

    def _as_text(self) -> str:
        return f"{self}\n"

    def _as_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def _as_html(self) -> str:
        from nantrace.render.html import page

        return page(self.trace, self.verdict)
