"""The trace file, format 1.1: what it holds, byte for byte, and what a reader may rely on.

MUST, MAY and MUST NOT are meant literally. The tables are plain HDF5 datasets: `h5py`, `h5dump` and viewers show
them. `h5dump -d /sites step.h5` prints one; `-r` shows the bytes of `/ledger` and `/lineage` as the text that they are.

    import h5py, pandas
    with h5py.File("step.h5", "r", locking=False) as file:
        names, sites = pandas.Series(file["names"].asstr()[:]), pandas.DataFrame(file["sites"][:])
        rows = pandas.DataFrame(file["events"][: file["committed"]["events"]]).join(sites, on="site")
    rows["module"] = rows["module"].map(names)  # likewise slot, dtype, shape, op, node and where

**File.** One HDF5 file with superblock version 0 to 2 (`libver=("earliest", "v108")`), never in SWMR mode. All
datasets and attributes named here MUST lie under the root as hard links and MUST hold their values themselves: a
reader MUST refuse soft and external links, virtual datasets and external storage, and MUST NOT unpickle anything. A
file MUST NOT hold a pickle, a host name, a user name or an absolute path; a writer stores what its caller gives it,
so this binds the caller as well. Numbers are little endian. Datasets MAY be stored compressed with filters that ship
with HDF5.

**Versions.** The group `/meta` MUST have the attribute `format_version`, a string "major.minor". A reader MUST refuse
a newer major version and name both numbers, and MUST read a newer minor one. Each dataset has an integer attribute
`version`, now 1, that rises with the major version. A reader MUST ignore datasets, groups, attributes and compound
fields that it does not know, and MUST find compound fields by name, not by position. A minor version MAY add any of
them.

**`/meta`**, a group. Its other attributes:
    `complete`          bool: True once the writer closed the file. False: the process was killed, or still writes.
    `raised`            the exception that ended the traced block early, JSON as below: {"error": its type, "message":
                        one line, "step": the step that it broke off, or null}; empty if none did. MAY be missing.
                        Padded with NUL to a fixed length, so that it can be filled in without moving anything.
    `verdict`           MAY be there: "json:" followed by `nantrace.diagnosis.verdict.Verdict.to_dict`, as JSON like
                        that of `/ledger`: what a bisection found, with replays that the file does not hold. A reader
                        SHOULD show it instead of a judgement of its own.
    anything else       what holds for the whole trace (`nantrace`, `torch`, `python`, `device`, ...), its name escaped
                        as in `/names`. Booleans, 64-bit integers and floats are native; a text is a string, escaped as
                        in `/names`; everything else is a string "json:" followed by JSON as in `/ledger`. A text that
                        begins with "json:" is JSON too. Strings are of fixed length, ASCII, up to 60,000 bytes, because
                        HDF5 may loop for ever over a damaged heap of strings; a reader MUST take variable ones as well.

**`/committed`**, a scalar compound of u8, one field a table, written last by each flush: how many rows of that table
are whole. A reader MUST ignore rows behind it: the tables grow ahead of the rows, and a killed write may have torn
one. When the file is closed each table has exactly its committed length. The dataset, or a field of it, MAY be
missing from a file that something else wrote; then all rows of the table count.

**`/events`**, a compound `nantrace.events.EVENT`: one row an event, in order of execution. `site` is a row of
`/sites`. `min`, `max` and `absmin` are NaN, and `first_bad` is -1, where there is nothing to tell; `columns` says
which optional columns were measured. `seq` is 1 in row 0 and rises by 1 each row. The events of a trace are the
*longest valid prefix*: rows from the first on for which `seq == row + 1` and the site exists. What follows MUST be
ignored.

**`/sites`**, a compound: one row a site. `module`, `slot`, `dtype`, `shape`, `op`, `node` and `where` are u4
references to `/names`; `phase` and `role` are u1 enums with the labels of `nantrace.events`. The reference 4294967295
is None, which differs from the empty text: module "" is the model itself, None no module. `shape` refers to a JSON
list of integers.

**`/modules`**, a compound: one row a module, parents before children. `fqn` and `cls` refer to `/names`; `aliases`
refers to a JSON list of texts, or is None for an empty one.

**`/names`**, fixed-length ASCII strings of 96 bytes, padded with NUL. A writer SHOULD declare them null-terminated,
as viewers print every NUL of a null-padded string; a row of 96 bytes then has no terminator, and HDF5 reads it as it
is. A reader MUST take both. A reference is the row where a text begins. A row whose 96 bytes are all used is continued
in the next row, so that a text of exactly 96 bytes is followed by an empty row. A text is joined first and then
unescaped: printable ASCII other than the backslash stands for itself; the rest is `\\\\` for a backslash, `\\t`,
`\\n`, `\\r`, `\\xhh`, `\\uhhhh` or `\\Uhhhhhhhh` for one code point (Python's `unicode_escape`). Every Python
text survives this: NUL, line ends, "/", lone surrogates, any length. Names are never used as HDF5 links.

**`/steps`**, a compound `nantrace.steps.STEP`: one row a step, every step, in order, numbers only. A float is NaN
where it was not recorded as one number; `marks` tells that from a loss (2) or a norm (4) that was NaN, and is 1 for a
step outside the sample, of which no module was recorded. `events` counts what was seen; whether it was kept, `/events`
shows. `first_seq` is 0 where the events were dropped, or were still held back when the row was written.

**`/ledger`**, bytes (u1): lines of ASCII JSON, an object each, ended by a line feed: all that is known of one step. A
step whose events are kept has one, and so has one at which something is worth saying: a nonfinite loss, a skipped
update, a decision. Other steps are their numbers. Keys MAY differ from step to step. The JSON is strict: a nonfinite
float is {"finite": false, "value": "nan" | "inf" | "-inf"}, a text with surrogates is {"escaped": text escaped as in
`/names`}. Sequences come back as tuples.

**`/lines`**, u8: for each line of `/ledger` the row of `/steps` that it belongs to. Lines are in order of writing; of
several that belong to one row the last counts: a step that was held back is said to be dropped first. A reader MUST
refuse a line of a row that is not there. *Format 1.0* had neither `/lines` nor the later columns of `/steps`: where
one of these is missing, line i is step i, and `/steps` MUST be ignored. A reader of format 1.0 finds the steps that
have a line.

**`/lineage`**, bytes (u1): each line is one `nantrace.lineage.Lineage` as its `to_json` writes it, ended by a line
feed, and the last line counts. No line: no ops were recorded. Its JSON is strict as well; a nonfinite float is
{"float": "nan" | "inf" | "-inf"}.

**Killed writers.** After SIGKILL at any moment the file MUST open with plain h5py and hold every row whose flush
returned. Two measures serve this. Rows are written straight into space that was allocated before, so that a flush
changes no metadata; and when a table does grow, the end of file that the superblock states is raised before anything
points behind the old one. Power loss is another matter: nothing is synced to the disk. `nantrace.trace` flushes at the
end of each step whose events it writes, and otherwise when a second has passed since the last flush: a kill can lose
the numbers of steps that ended within a second after it, and the events that `keep_steps` holds back in memory.
"""

from __future__ import annotations

import re
from typing import Any

import h5py
import numpy as np

from nantrace.events import EVENT, Phase, Role
from nantrace.steps import STEP

FORMAT_MAJOR = 1
FORMAT_MINOR = 1
TABLE_VERSION = 1

#: Reference to `/names` that stands for None.
NULL = 2**32 - 1

#: Bytes of one row of `/names`: most module names fit into one.
NAME_WIDTH = 96

_ENUM = {kind: h5py.enum_dtype({member.label: int(member) for member in kind}, "u1") for kind in (Phase, Role)}

SITE = np.dtype(
    [
        ("module", "<u4"),
        ("phase", _ENUM[Phase]),
        ("role", _ENUM[Role]),
        ("slot", "<u4"),
        ("dtype", "<u4"),
        ("shape", "<u4"),
        ("op", "<u4"),
        ("node", "<u4"),
        ("where", "<u4"),
    ]
)
MODULE = np.dtype([("fqn", "<u4"), ("cls", "<u4"), ("aliases", "<u4")])
NAME = np.dtype(f"S{NAME_WIDTH}")
BYTE = np.dtype("u1")
LINE = np.dtype("<u8")

#: Each table with its row and the rows of one chunk: small traces stay small, long ones have few chunks.
TABLES: dict[str, tuple[np.dtype[Any], int]] = {
    "names": (NAME, 256),
    "sites": (SITE, 512),
    "modules": (MODULE, 256),
    "steps": (STEP, 512),
    "ledger": (BYTE, 8192),
    "lineage": (BYTE, 8192),
    "events": (EVENT, 1024),
    "lines": (LINE, 512),
}
COMMITTED = np.dtype([(name, "<u8") for name in TABLES])

_ESCAPE = re.compile(r"\\(?:([\\tnr])|x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|)")
_SHORT = {"\\": "\\", "t": "\t", "n": "\n", "r": "\r"}


def escape(text: str) -> str:
    """Any text as printable ASCII."""
    return text.encode("unicode_escape").decode("ascii")


def unescape(text: str) -> str:
    """The inverse of `escape`; ValueError for what `escape` never makes."""
    return _ESCAPE.sub(_unescape_one, text) if "\\" in text else text


def _unescape_one(match: re.Match[str]) -> str:
    short, *digits = match.groups()
    if short:
        return _SHORT[short]
    code = next((d for d in digits if d), None)
    if code is None:
        raise ValueError(f"unknown escape at {match.string[match.start() : match.start() + 12]!r}")
    return chr(int(code, 16))


def split_name(text: str) -> list[bytes]:
    """The rows of `/names` that hold a text, at least one."""
    escaped = escape(text).encode("ascii")
    return [escaped[at : at + NAME_WIDTH] for at in range(0, len(escaped) + 1, NAME_WIDTH)]


def join_names(rows: list[bytes]) -> dict[int, str]:
    """Texts by the row where they begin; ValueError for rows that no writer makes."""
    texts: dict[int, str] = {}
    begin, parts = 0, []
    for row, part in enumerate(rows):
        parts.append(part)
        if len(part) < NAME_WIDTH:
            texts[begin] = unescape(b"".join(parts).decode("ascii"))
            begin, parts = row + 1, []
    return texts
