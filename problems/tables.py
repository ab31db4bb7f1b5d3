"""Events from a text table: one header line with channel names, then one line of numbers an event."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ot_newton.problems.events import Events, find_channels

SUFFIXES = (".csv", ".tsv", ".txt")


def read_table(path: Path, channels: Sequence[str] | None = None) -> Events:
    """Events of a text table, separated by comma, semicolon, tab or vertical bar (told from the header line).

    A column without a name (an index) is left out.

    Args:
        path: the file, UTF-8.
        channels: names of columns to read, in this order and whatever the case; None for all.

    Raises:
        TypeError: when `channels` is one string instead of a list of strings.
        ValueError: for a table that cannot be parsed, has no header or no rows, lacks a channel, or holds something
            other than finite numbers. The message names the columns.
    """
    names, frame = _parse(path)
    listing = "columns: " + ", ".join(name for name in names if name)
    if frame.empty:
        raise ValueError(f"expected at least one event in {path}, got none; {listing}")
    if not isinstance(frame.index, pd.RangeIndex):
        raise ValueError(f"expected {len(names)} fields a line in {path}, as in its header, got more; {listing}")
    if channels is None:
        columns = [j for j, name in enumerate(names) if name]
    else:
        columns = find_channels(channels, [(name,) for name in names], str(path))
    textual = [j for j in columns if frame.dtypes[j].kind not in "iuf"]
    if textual:
        numeric = ", ".join(names[j] for j in columns if j not in textual)
        raise ValueError(
            f"expected numbers (with a decimal point) in {path}, got something else in: "
            f"{', '.join(names[j] for j in textual)}; name the channels to read; numeric columns: {numeric or 'none'}"
        )
    values = frame[columns].to_numpy(dtype=np.float64)
    sample = np.full(len(values), path.stem)
    return Events(values, tuple(names[j] for j in columns), sample, f"{path.name} (table)")


def _parse(path: Path) -> tuple[list[str], pd.DataFrame]:
    """Names of the columns, "" for none, and the table with columns 0, 1, …"""
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            header = next((line for line in stream if line.strip()), "")
            separator = max(",;\t|", key=header.count)
            names = [name.strip() for name in next(csv.reader([header], delimiter=separator), [])]
            named = [name for name in names if name]
            if not named or all(_is_number(name) for name in named):
                raise ValueError(f"its first line is {header.strip()[:60]!r}")
            frame = pd.read_csv(
                stream,
                sep=separator,
                header=None,
                names=list(range(len(names))),
                skipinitialspace=True,
                low_memory=False,
            )
    except (ValueError, csv.Error) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"expected a header line with channel names, then lines of numbers, in {path}: {reason}"
        ) from error
    return names, frame


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
