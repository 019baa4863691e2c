"""Small programs that drive the tracer, bisect and the report alike.

`cases` are training steps with a known answer, `models` and `plain_models` are healthy ones of many kinds.
"""
