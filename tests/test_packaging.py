"""The folders are one package, however it is reached, and it needs neither Triton nor a GPU."""

import os
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

import ot_newton

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def python(*arguments: str, cwd: Path, path: Path | None = None) -> str:
    """Standard output of a fresh interpreter that knows the dependencies and, if any, one more folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(path)} if path else {})
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_folder_with_modules_is_a_package_of_the_distribution():
    mapped = {name: ROOT / folder for name, folder in SETUPTOOLS["package-dir"].items()}
    assert set(mapped) == set(SETUPTOOLS["packages"])
    rooms = [ROOT / room for room in ("ot_newton", "kernels", "problems", "experiments")]
    holding_modules = {path.parent for room in rooms for path in room.rglob("*.py")}
    assert holding_modules <= set(mapped.values())
    assert all(folder.is_dir() for folder in mapped.values())
    assert not (ROOT / "kernels/__init__.py").exists()  # would shadow another package of that name


def test_every_data_file_is_shipped():
    patterns = SETUPTOOLS["package-data"]["ot_newton.problems.data"]
    data = [path.name for path in (ROOT / "problems/data").iterdir() if path.is_file() and path.suffix != ".py"]
    assert any(name.endswith(".npz") for name in data)
    assert any(name.startswith("LICENSE") for name in data)
    assert [name for name in data if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_a_bare_checkout_runs_the_command_line():
    assert "saddle-escape" in python("-m", "ot_newton", "--help", cwd=ROOT)
    assert python("-m", "ot_newton", "--version", cwd=ROOT).split()[-1] == ot_newton.__version__


def test_the_package_is_found_from_elsewhere_and_loads_without_triton(tmp_path):
    program = """
import sys
sys.modules["triton"] = None
import ot_newton
import ot_newton.autograd, ot_newton.minimize, ot_newton.lanczos, ot_newton.problems.shuffled_regression
import torch
assert not torch.cuda.is_initialized()
print(ot_newton.__file__)
"""
    found = python("-c", program, cwd=tmp_path, path=ROOT).strip()
    assert Path(found).samefile(ROOT / "ot_newton/__init__.py")


@pytest.mark.parametrize("name", ["kernels", "problems", "experiments"])
def test_no_folder_installs_under_its_bare_name(name):
    assert name not in SETUPTOOLS["packages"]
