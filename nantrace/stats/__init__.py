"""Statistics: one tensor in, one row of numbers out."""
