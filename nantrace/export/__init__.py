"""A trace in the formats of other tools, each through the library made for it. Reads a `Trace`, opens no trace file.

Names come out of a trace that others may have made. In every format they are text to read: characters that a terminal
would obey or hide (control characters, changes of direction, lone surrogates) are written as escapes.
"""
