"""Where the numbers are computed: the device, and versions, machine, threads and commit for `environment.json`."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import ot_newton


def describe_environment() -> dict[str, Any]:
    """Versions, machine and, in a checkout, the commit, as plain JSON values."""
    packages = ("torch", "triton", "numpy", "scipy", "pandas", "matplotlib")
    return {
        "ot_newton": ot_newton.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def pick_device(name: str) -> torch.device:
    """The device called `name`; "auto" is CUDA where there is one.

    Raises:
        ValueError: torch cannot use such a device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"expected a device that torch can use here, got {name!r} ({reason})") from error


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    root = Path(ot_newton.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        described = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
