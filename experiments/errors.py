"""Failures that the command line shows as one line instead of a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(Exception):
    """What the user gave cannot be used; the message says what to do."""


class OutputError(Exception):
    """A file cannot be written; the message says which and why."""


@contextmanager
def checking_input() -> Iterator[None]:
    """Turn what a wrong argument or file raises into an `InputError`.

    It belongs around reading and checking what the user gave, not around the computation: an error there is ours.
    """
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise InputError(one_line(error)) from error


def one_line(error: BaseException) -> str:
    """The message of an exception on one line; of a file error the file and the reason."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
