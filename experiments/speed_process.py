"""Measuring processes as the experiment sees them: a request goes in, rows come out, and a failure is a row too."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ot_newton

Row = dict[str, Any]


def measure(request: Row, timeout: float) -> tuple[list[Row], Row | None]:
    """The rows of a `speed_worker`, and one that says why where it did not end well; rows before the end are kept."""
    failure, content = None, json.dumps(request).encode()
    try:
        output = start("speed_worker", timeout=timeout, content=content)
    except subprocess.SubprocessError as error:
        output = getattr(error, "stdout", None) or b""
        status = "timed out" if isinstance(error, subprocess.TimeoutExpired) else "crashed"
        failure = {"task": "next", "status": status, "detail": reason(error)}
    return [json.loads(line) for line in output.decode().splitlines() if line.endswith("}")], failure


def start(
    module: str, *arguments: str, timeout: float, content: bytes = b"", variables: dict[str, str] | None = None
) -> bytes:
    """Run a module of this folder in a fresh process and return what it printed.

    Raises:
        subprocess.SubprocessError: it failed or took longer than `timeout` seconds.
    """
    root = str(Path(ot_newton.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | (variables or {})
    command = [sys.executable, "-m", f"ot_newton.experiments.{module}", *arguments]
    return subprocess.run(
        command, input=content, env=environment, capture_output=True, check=True, timeout=timeout
    ).stdout


def reason(error: Exception) -> str:
    """Why a process failed: the last line that it wrote, or what ended it."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {error.timeout:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        if error.returncode < 0:
            return f"ended by signal {-error.returncode}"
        return (error.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {error.returncode}"])[-1][
            :300
        ]
    return str(error)[:300]
