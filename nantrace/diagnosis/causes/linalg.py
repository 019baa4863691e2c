"""Solves, inverses, determinants and decompositions: they need full rank, and their gradients a simple spectrum."""

from __future__ import annotations

from nantrace.diagnosis.causes.dtypes import wider
from nantrace.diagnosis.causes.reading import absmax, all_finite, argument, has_zero
from nantrace.diagnosis.causes.table import Explanation
from nantrace.diagnosis.causes.wording import label, line, outcome, place, read, spot, zeros
from nantrace.lineage import Lineage, OpEvent

_MATRICES = ("A", "self", "input", "LU", "L", "R", "B")


def factorization(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """Nonfinite out of a finite matrix: a pivot was 0, or so small that the quotient did not fit."""
    matrix = argument(event, *_MATRICES)
    if not all_finite(event):
        return None
    held: tuple[str, ...] = ()
    if matrix is not None:
        only_zeros = absmax(matrix) == 0
        held = (read(matrix, event.op),) + (("All its elements are 0.",) if only_zeros else ())
    name = label(matrix, event.op) if matrix is not None else "the matrix"
    fact = (
        f"{place(event)} divides by the pivots of {name}; from finite elements it put out nonfinite ones, "
        "as a singular matrix does."
    )
    advice = (
        f"Print torch.linalg.matrix_rank and torch.linalg.cond of {name} in float64 before {line(event)}.",
        f"Add 1e-6 to the diagonal of {name} before {line(event)} and see whether the step stays finite.",
        f"Run {spot(event)} in {wider(event.dtype)} and compare.",
    )
    return Explanation("singular_matrix", (fact, *held, outcome(event)), advice)


def spectrum_gradient(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """The gradient of eigenvectors divides by the differences of eigenvalues; of singular values likewise."""
    gaps = argument(event, "other", "self")
    if gaps is None or has_zero(gaps) is not True or not all_finite(event):
        return None
    fact = (
        "The gradient of eigenvectors and singular vectors divides by differences of eigenvalues or of squared "
        f"singular values; in {place(event)} these held {zeros(gaps)}."
    )
    advice = (
        f"Print the sorted spectrum of the matrix at {line(event)} and its smallest gap.",
        f"Add a small random diagonal to the matrix before {line(event)} and see whether the gradient stays finite.",
        "Use only eigenvalues or singular values in the loss, for a test: their gradient does not divide by the gaps.",
    )
    return Explanation("degenerate_spectrum", (fact, read(gaps, event.op), outcome(event)), advice)
