"""Tables as text, for the terminal and for Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

MISSING = "–"


@dataclass(frozen=True)
class Column:
    """A column of a printed table: the key in the frame, the heading, and a format specification for numbers."""

    key: str
    title: str
    format: str = ""

    def text(self, value: Any) -> str:
        """One entry; a dash where there is none."""
        if value is None or value is pd.NA or value != value:
            return MISSING
        return format(int(value) if self.format == "d" else value, self.format)


def format_table(frame: pd.DataFrame, columns: Sequence[Column]) -> str:
    """The columns that `frame` has, aligned: words to the left, numbers to the right."""
    shown = [column for column in columns if column.key in frame]
    lines = [[column.title for column in shown]]
    lines += [[column.text(value) for column, value in zip(shown, row, strict=True)] for row in _rows(frame, shown)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column.format else cell.ljust(width)
            for cell, width, column in zip(line, widths, shown, strict=True)
        ).rstrip()
        for line in lines
    )


def format_markdown(frame: pd.DataFrame, columns: Sequence[Column]) -> str:
    """The columns that `frame` has, as a Markdown table."""
    shown = [column for column in columns if column.key in frame]
    head = "| " + " | ".join(column.title for column in shown) + " |"
    rule = "|" + "|".join("---:" if column.format else "---" for column in shown) + "|"
    rows = [
        "| " + " | ".join(column.text(value) for column, value in zip(shown, row, strict=True)) + " |"
        for row in _rows(frame, shown)
    ]
    return "\n".join([head, rule, *rows])


def _rows(frame: pd.DataFrame, columns: Sequence[Column]) -> list[tuple[Any, ...]]:
    return list(zip(*(frame[column.key] for column in columns), strict=True))
