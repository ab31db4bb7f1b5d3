"""The command line: exit codes, and one line that says what to do."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ot_newton
from ot_newton.experiments import cli, saddle_escape
from ot_newton.experiments.cli import COMMANDS, main
from ot_newton.problems.cytometry import Events, write_fcs


@pytest.fixture
def fcs(tmp_path: Path) -> str:
    values = np.random.default_rng(0).normal(size=(40, 2)) * 5000
    path = tmp_path / "tube.fcs"
    write_fcs(path, Events(values, ("CD4", "CD8"), np.full(40, "tube"), "random"))
    return str(path)


def fails(capsys: pytest.CaptureFixture[str], argv: list[str], code: int = 2) -> str:
    """The one line on stderr of a command that must fail."""
    assert main(argv) == code
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("ot-newton: ")
    assert "Traceback" not in captured.out
    return lines[0]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["bogus"], "unknown command 'bogus'"),
        (["saddle-escap"], "did you mean saddle-escape?"),
        (["saddle-escape", "--nn", "3"], "Unrecognized options: --nn, 3 (did you mean --n?)"),
        (["saddle-escape", "extra"], "Unrecognized options: extra"),
        (["saddle-escape", "--n", "many"], "--n: invalid literal"),
        (["saddle-escape", "--n"], "Missing value for argument '--n'"),
        (["saddle-escape", "--preset", "fast"], "'quick', 'laptop', 'paper'"),
        (["saddle-escape", "--preset"], "--preset"),
        (["saddle-escape", "--n", "1"], "expected n ≥ 2 cells, got 1"),
        (["saddle-escape", "--n", "90000"], "expected at most 76671 cells"),
        (["saddle-escape", "--eps", "-1"], "expected eps > 0"),
        (["saddle-escape", "--device", "nowhere"], "'nowhere'"),
        (["hessian-spectrum", "--point", "none.npy"], "none.npy does not exist"),
        (["fit"], "--x"),
        (["fit", "--x", "a.fcs", "--y", "b.fcs"], "no file a.fcs; check the path"),
        (["fit", "--x", "a.fcs", "--y", "b.fcs", "--eps", ".1", "--noise", ".2"], "--eps or --noise, got both"),
    ],
)
def test_wrong_arguments_exit_2_with_one_line(capsys, monkeypatch, tmp_path, argv: list[str], words: str):
    monkeypatch.chdir(tmp_path)
    assert words in fails(capsys, argv)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--channels", "CD4", "CD99"], "'CD99' not found in"),
        (["--channels", "CD4", "cd4"], "asked for twice"),
        (["--y-channels", "CD4", "--start-law", "monge"], "expected as many columns in X as in Y, got 2 and 1"),
        (["--y-channels", "CD4", "--starts", "0"], "expected --starts ≥ 1"),
        (["--cofactor", "-3"], "expected cofactor > 0"),
    ],
)
def test_what_a_file_lacks_is_said(capsys, tmp_path, fcs: str, options: list[str], words: str):
    out = tmp_path / "run"
    assert words in fails(capsys, ["fit", "--x", fcs, "--y", fcs, "--out", str(out), *options])
    assert not out.exists()


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((5, 4)), "of shape (5, 5)"),
        (np.full((5, 5), np.nan), "expected finite W"),
        (np.full((5, 5), "a"), "not numbers"),
        (np.full((5, 5), None), "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_wrong_points_are_named(capsys, tmp_path, array: np.ndarray | None, words: str):
    path = tmp_path / "W.npy"
    if array is None:
        path.write_text("not an array")
    else:
        np.save(path, array, allow_pickle=True)
    line = fails(capsys, ["hessian-spectrum", "--n", "60", "--point", str(path), "--out", str(tmp_path / "run")])
    assert words in line
    assert str(path) in line


def test_help_and_version(capsys):
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ot-newton {ot_newton.__version__}\n"
    assert main([]) == 2
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        assert "--out" in capsys.readouterr().out


def test_preset_sets_what_the_options_default_to(capsys):
    assert main(["saddle-escape", "--preset=quick", "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"(default: {saddle_escape.PRESETS['quick'].n})" in shown
    parsed = cli._parse("saddle-escape", saddle_escape, ["--preset", "quick", "--starts", "7"])
    assert (parsed.n, parsed.starts) == (saddle_escape.PRESETS["quick"].n, 7)


def test_unwritable_output_exits_1_with_one_line(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    line = fails(capsys, ["saddle-escape", "--n", "60", "--out", str(tmp_path / "file/run")], code=1)
    assert "cannot write" in line
    assert "--out" in line


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_interrupt_exits_130_and_says_how_to_go_on(tmp_path):
    command = [sys.executable, "-m", "ot_newton", "saddle-escape", "--n", "100", "--steps", "100000"]
    command += ["--starts", "1", "--methods", "adam", "--gtol", "0", "--out", str(tmp_path / "run")]
    root = Path(ot_newton.__file__).parent.parent
    with subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        while not (tmp_path / "run/environment.json").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, messages = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted: " in messages
    assert "the same command goes on from there" in messages
    assert "Traceback" not in messages
