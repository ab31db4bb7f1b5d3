"""The README keeps its word: its program runs, its commands exist, its links lead somewhere."""

import importlib
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ot_newton.experiments import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = list(re.finditer(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL))
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for block in BLOCKS
    if block[1] == "sh"
    for line in block[2].splitlines()
    if line.startswith("ot-newton ")
]


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the problems are small
    yield
    torch.set_num_threads(before)


def test_the_python_blocks_run_as_one_program(tmp_path, monkeypatch, capsys, one_thread):
    monkeypatch.chdir(tmp_path)  # some of them write files
    program = [block for block in BLOCKS if block[1] == "python"]
    assert len(program) >= 5
    namespace = {"__name__": "readme"}
    for block in program:
        line = README.count("\n", 0, block.start(2))  # so that a traceback names the line of the README
        exec(compile("\n" * line + block[2], "README.md", "exec"), namespace)
    shown = next(block[2] for block in BLOCKS if block[1] == "text")
    assert _words(capsys.readouterr().out) == _words(shown)


def _words(text: str) -> list[str]:
    """The text without its numbers, whose last digits are the machine's."""
    return re.sub(r"[-+]?\d+(\.\d+)?", "#", text).split()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_and_their_options_exist(command):
    name, *options = command
    assert name in cli.COMMANDS
    module = _experiment(name)
    assert isinstance(cli._parse(name, module, options), module.Config)


def test_the_main_job_has_a_quick_preset_and_the_tests_a_command():
    assert "quick" in _experiment(COMMANDS[0][0]).PRESETS
    assert re.search(r"^python -m pytest", README, flags=re.MULTILINE)


def _experiment(name: str) -> ModuleType:
    return importlib.import_module(f"ot_newton.experiments.{name.replace('-', '_')}")


def test_every_link_leads_somewhere():
    targets = re.findall(r"\]\(([^)\s]+)\)", PROSE) + re.findall(r'(?:src|href)="([^"]+)"', PROSE)
    headings = {_anchor(title) for title in re.findall(r"^#+ (.*)$", PROSE, flags=re.MULTILINE)}
    inside = [target for target in targets if not re.match(r"\w+:", target)]
    assert inside
    for target in inside:
        path, _, anchor = target.partition("#")
        assert not path or (ROOT / path).exists(), f"{target}: no such file"
        assert path or anchor in headings, f"{target}: no such heading"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_every_path_in_code_style_exists():
    folders = tuple(f"{path.name}/" for path in ROOT.iterdir() if path.is_dir())
    paths = [code for code in re.findall(r"`([^`\n]+)`", PROSE) if code.startswith(folders)]
    assert paths
    for path in paths:
        assert list(ROOT.glob(path.rstrip("/"))), f"{path}: no such file"
