"""Why a value was born nonfinite: what the op needs, what it was given, and what to check next.

Judges one event of a `Lineage` by the numbers recorded with it. Knows no torch, and never guesses: where the numbers
are missing or do not fit, the cause is "unknown" and the evidence says what is not known.
"""
