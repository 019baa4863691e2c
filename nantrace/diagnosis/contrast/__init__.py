"""One step run under one change after the other: the rows, and what they establish."""
