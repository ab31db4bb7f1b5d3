"""Files that are written whole or not at all, and that are checked when they are read back."""

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ot_newton.experiments.errors import InputError, OutputError, one_line


def write(path: Path, data: str | bytes) -> None:
    """Write a file whole or not at all, and leave it alone when it already holds `data`.

    Raises:
        OutputError: the folder is read-only, the disk is full, …; what was there before is kept.
    """
    content = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.is_file() and path.read_bytes() == content:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"cannot write {path} ({reason}); make room or give another --out") from error


def write_csv(path: Path, frame: pd.DataFrame) -> None:
    """Write a table as CSV; floats keep all their digits."""
    write(path, frame.to_csv(index=False))


def write_array(path: Path, array: np.ndarray) -> None:
    """Write an array as .npy."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    write(path, buffer.getvalue())


def load_array(path: Path) -> np.ndarray:
    """Read an array of numbers written as .npy.

    Raises:
        InputError: no such file, damaged, or not an array of numbers.
    """
    try:
        with open(path, "rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
        if array.dtype.kind not in "fiu":
            raise ValueError(f"it holds {array.dtype}, not numbers")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; check the path") from None
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"{path} cannot be read as a .npy array ({one_line(error)})") from error
    return array


def load_table(path: Path, *, numeric: Sequence[str] = (), text: Sequence[str] = ()) -> pd.DataFrame:
    """Read a CSV table written by an experiment and check that it is whole.

    Args:
        path: the file.
        numeric: columns that must be there and hold numbers or nothing; they come back as float64.
        text: columns that must be there; they and all others come back as text.

    Raises:
        InputError: no such file, a cut or ragged line, a missing column, a word where a number belongs.
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist; run the experiment first, without --redraw")
    try:
        content = path.read_text()
        header, *rows = list(csv.reader(io.StringIO(content))) or [[]]
        if not content.endswith("\n"):
            raise ValueError("its last line is cut off")
        if any(len(row) != len(header) for row in rows):
            raise ValueError("its lines differ in length")
        if not rows:
            raise ValueError("it has no rows")
        missing = [column for column in [*numeric, *text] if column not in header]
        if missing:
            raise ValueError(f"it has no column {', '.join(missing)}")
        frame = pd.DataFrame(rows, columns=pd.Index(header))
        for column in numeric:
            frame[column] = [float(word) if word else np.nan for word in frame[column]]
    except (ValueError, OSError, csv.Error) as error:
        raise InputError(f"{path} is damaged ({one_line(error)}); delete it and run the experiment again") from error
    return frame
