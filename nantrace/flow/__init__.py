"""The op pass: every op of a step, and the flow of nonfinite values from its writer to its readers."""
