"""Showing a trace or a verdict: text, HTML, JSON. Needs no file, no model and no torch."""
