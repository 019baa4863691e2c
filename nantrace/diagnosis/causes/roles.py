"""What the arguments of ops are, in words: a user knows a divisor, not `other`."""

from __future__ import annotations

_PRODUCT = {"self": "first factor", "other": "second factor", "vec2": "second vector", "vec": "vector"}
_SUM = {"self": "first term", "other": "second term", "end": "end"}
_QUOTIENT = {"self": "numerator", "other": "divisor"}
_POWER = {"self": "base", "exponent": "exponent"}
_MATRICES = {
    "self": "left matrix",
    "mat2": "right matrix",
    "other": "right matrix",
    "vec": "vector",
    "tensor": "vector",
}
_ADDED = {
    **{name: "left matrix" for name in ("mat1", "mat", "batch1")},
    **{name: "right matrix" for name in ("mat2", "batch2")},
    "self": "addend",
    "vec": "vector",
    "vec1": "first vector",
    "vec2": "second vector",
}
_TERNARY = {
    "addcdiv": {"self": "first term", "tensor1": "numerator", "tensor2": "divisor"},
    "addcmul": {"self": "first term", "tensor1": "first factor", "tensor2": "second factor"},
}
_BY_OP: dict[str, dict[str, str]] = {
    **dict.fromkeys(("mul", "multiply"), _PRODUCT),
    **dict.fromkeys(("add", "sub", "rsub", "subtract"), _SUM),
    **dict.fromkeys(("div", "divide", "true_divide", "floor_divide", "remainder", "fmod"), _QUOTIENT),
    **dict.fromkeys(("pow", "float_power"), _POWER),
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "matmul", "_sparse_sparse_matmul"), _MATRICES),
    **dict.fromkeys(("addmm", "_addmm_activation", "_sparse_addmm", "sspaddmm", "addmv", "addr"), _ADDED),
    **dict.fromkeys(("addbmm", "baddbmm"), _ADDED),
    **_TERNARY,
    "reciprocal": {"self": "divisor"},
    "mse_loss": {"self": "prediction"},
    "_sparse_mm": _MATRICES,
}
_ANY = {
    "self": "input",
    "src": "input",
    "grad_output": "incoming gradient",
    "log_probs": "tensor of log-probabilities",
    "rstd": "saved rstd",
    "v": "direction",
}
_ANY |= dict.fromkeys(("A", "LU", "L", "R", "B"), "matrix")


def role(op: str | None, name: str) -> str:
    """ "divisor" for the argument `other` of aten.div; the schema's own name where no better word is known.

    Args:
        op: "aten.div_", or None where only the argument is known.
        name: of the argument in the schema, with an index inside a list: "self[2]".
    """
    base, _, index = name.partition("[")
    base, _, number = base.partition(" ")  # "self (4 tensors)"
    words = _BY_OP.get(_bare(op), {}).get(base) or _ANY.get(base, base)
    return f"{words} (tensor {index.removesuffix(']')} of the list)" if index else f"{words} {number}".rstrip()


def _bare(op: str | None) -> str:
    parts = (op or "").replace("::", ".").split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).removeprefix("_foreach_").rstrip("_")
