"""The kernels under NVIDIA's memory and race checkers, where those run."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("every_kernel.py")
REFUSALS = ("Device not supported", "not supported on this device", "Unable to connect")


@pytest.fixture(scope="module")
def _compiled():
    """The kernels are in the disk cache, so that nothing is compiled under a checker."""
    subprocess.run([sys.executable, str(PROGRAM)], cwd=PROGRAM.parents[2], check=True)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_compiled")
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_nothing_found(tool):
    run = subprocess.run(
        ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, str(PROGRAM)],
        cwd=PROGRAM.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    output = run.stdout[-3000:] + run.stderr[-1000:]
    if any(refusal in output for refusal in REFUSALS):
        pytest.skip(f"{tool} refuses this device")
    assert run.returncode == 0, output
    assert "ERROR SUMMARY: 0 errors" in output or "0 hazards" in output, output
