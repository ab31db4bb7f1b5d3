"""The runner: what is finished stays finished, what is damaged is named, what cannot be written is said."""

import errno
import gc
import json
import os
import random
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest

from ot_newton.experiments import files, run
from ot_newton.experiments.environment import describe_environment
from ot_newton.experiments.errors import InputError, OutputError
from ot_newton.experiments.files import load_table, write
from ot_newton.experiments.run import Context, Outcome, RunConfig, run_cases


@dataclass(frozen=True, kw_only=True)
class Squares(RunConfig):
    """Squares of a few numbers."""

    name: ClassVar[str] = "squares"

    count: int = 3
    """How many numbers."""
    scale: float = 0.1
    """Their unit."""


class Work:
    """Computes cases and remembers which; `fail` maps a case to what goes wrong in it."""

    def __init__(self, config: Squares, fail: dict[int, BaseException] | None = None):
        self.config, self.fail, self.computed = config, fail or {}, []

    def case(self, number: int, context: Context) -> Outcome:
        if number in self.fail:
            raise self.fail[number]
        self.computed.append(number)
        context.progress(0.5)
        value = np.float64(number * self.config.scale)
        steps = [{"step": step, "value": value * step, "phase": "up"} for step in range(number + 1)]
        return Outcome({"square": value**2, "even": np.bool_(number % 2 == 0)}, steps, np.full((2, 2), value))

    def run(self):
        return run_cases(self.config, {f"case{k}": partial(self.case, k) for k in range(self.config.count)})


def test_tables_hold_every_case_and_every_digit(tmp_path: Path):
    config = Squares(out=tmp_path / "run")
    results = Work(config).run()
    table = load_table(tmp_path / "run/table.csv", numeric=["step", "value"], text=["run", "phase"])
    pd.testing.assert_frame_equal(table, results.table, check_dtype=False, check_exact=True)
    assert table.groupby("run").size().to_dict() == {"case0": 1, "case1": 2, "case2": 3}
    summary = load_table(tmp_path / "run/summary.csv", numeric=["square"], text=["even"])
    assert summary.square.tolist() == [0.0, 0.1**2, (2 * 0.1) ** 2]
    np.testing.assert_array_equal(np.load(tmp_path / "run/points/case2.npy"), np.full((2, 2), 0.2))
    assert json.loads((tmp_path / "run/config.json").read_text()) == {"experiment": "squares", "count": 3, "scale": 0.1}


def test_finished_run_computes_nothing_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = Squares(out=tmp_path)
    first = Work(config).run()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    capsys.readouterr()
    again = Work(config)
    second = again.run()
    assert again.computed == []
    assert "nothing to compute" in capsys.readouterr().out
    pd.testing.assert_frame_equal(first.table, second.table)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")} == before


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("a defect")])
def test_interruption_loses_only_the_case_in_progress(tmp_path: Path, failure: BaseException):
    config = Squares(out=tmp_path, count=4)
    with pytest.raises(type(failure)) as caught:
        Work(config, fail={2: failure}).run()
    if isinstance(failure, KeyboardInterrupt):
        assert "2 of 4 cases are finished" in str(caught.value)
    assert set(load_table(tmp_path / "table.csv")["run"]) == {"case0", "case1"}
    rest = Work(config)
    results = rest.run()
    assert rest.computed == [2, 3]
    whole = Work(Squares(out=tmp_path / "whole", count=4)).run()
    pd.testing.assert_frame_equal(results.table, whole.table)
    pd.testing.assert_frame_equal(results.summary, whole.summary)


class Lines:
    """Counts the lines executed in the runner, the writer and the case, and interrupts at one of them."""

    def __init__(self, at: int = -1):
        self.at, self.count = at, 0

    def trace(self, frame, event, argument):
        if frame.f_code.co_filename not in (run.__file__, files.__file__, __file__):
            return None
        if event == "line":
            self.count += 1
            if self.count - 1 == self.at:
                raise KeyboardInterrupt
        return self.trace

    @contextmanager
    def running(self):
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(before)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # interrupted between open and with
def test_interrupted_at_any_line_it_loses_at_most_the_case_in_progress(tmp_path: Path):
    work, lines = Work(Squares(out=tmp_path / "whole")), Lines()
    with lines.running():
        whole = work.run()
    moments = random.Random(0).sample(range(lines.count), 40)
    for moment in [0, *moments, lines.count - 1]:
        config = Squares(out=tmp_path / str(moment))
        first = Work(config)
        with pytest.raises(KeyboardInterrupt), Lines(moment).running():
            first.run()
        kept = {path.stem for path in (config.folder() / "cases").glob("*.json")}
        assert len(kept) >= len(first.computed) - 1
        rest = Work(config)
        results = rest.run()
        assert {f"case{k}" for k in rest.computed} == {"case0", "case1", "case2"} - kept
        pd.testing.assert_frame_equal(results.table, whole.table)
        for name in ("table.csv", "summary.csv", "points/case2.npy"):
            assert (config.folder() / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    gc.collect()


def test_other_settings_are_refused_and_named(tmp_path: Path):
    Work(Squares(out=tmp_path)).run()
    with pytest.raises(InputError, match=r"scale: 0\.1 → 0\.2.*give another --out"):
        Work(Squares(out=tmp_path, scale=0.2)).run()


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"summary": {}}', '{"summary": {}, "steps": [1]}', "\x00"])
def test_damaged_case_is_refused_by_name(tmp_path: Path, content: str):
    Work(Squares(out=tmp_path)).run()
    path = tmp_path / "cases/case1.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"case1\.json is damaged"):
        Work(Squares(out=tmp_path)).run()
    path.unlink()
    again = Work(Squares(out=tmp_path))
    again.run()
    assert again.computed == [1]


@pytest.mark.parametrize("name", ["config.json", "cases/case1.json", "points/case1.npy"])
def test_a_file_that_is_cut_or_overwritten_is_refused_by_name(tmp_path: Path, name: str):
    Work(Squares(out=tmp_path)).run()
    path = tmp_path / name
    good = path.read_bytes()
    cut = [good[:size] for size in range(0, len(good) - 2, 5)]
    for data in (*cut, random.Random(0).randbytes(len(good)), b"\xff" * 10, b"\0" * len(good)):
        path.write_bytes(data)
        work = Work(Squares(out=tmp_path))
        with pytest.raises(InputError, match=path.name) as caught:
            work.run()
        assert "\n" not in str(caught.value)
        assert work.computed == []
        assert path.read_bytes() == data


def test_tables_that_are_damaged_are_made_again_from_the_cases(tmp_path: Path):
    Work(Squares(out=tmp_path)).run()
    for name in ("table.csv", "summary.csv"):
        good = (tmp_path / name).read_bytes()
        for data in (b"", good[: len(good) // 2], random.Random(0).randbytes(100)):
            (tmp_path / name).write_bytes(data)
            again = Work(Squares(out=tmp_path))
            again.run()
            assert again.computed == []
            assert (tmp_path / name).read_bytes() == good


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cut off"),
        (b"run,step\na,1\nb", "cut off"),
        (b"run,step\na,1\nb\n", "differ in length"),
        (b"run,step\na,1\nb,x\n", "could not convert"),
        (b"run,other\na,1\n", "no column step"),
        (b"run,step\n", "no rows"),
        (b"run,step\na,\xff1\n", "damaged"),
        (b"\n", "no rows"),
    ],
)
def test_damaged_table_is_refused_by_name(tmp_path: Path, content: bytes, reason: str):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=reason) as caught:
        load_table(path, numeric=["step"], text=["run"])
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_full_disk_keeps_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = Squares(out=tmp_path)
    synchronise = os.fsync

    def full(descriptor: int) -> None:
        if (tmp_path / "cases/case0.json").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        synchronise(descriptor)

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        Work(config).run()
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "cases").iterdir()] == ["case0.json"]
    rest = Work(config)
    rest.run()
    assert rest.computed == [1, 2]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
def test_a_folder_that_turns_read_only_keeps_what_is_there(tmp_path: Path, monkeypatch, number: int):
    config = Squares(out=tmp_path)

    def refuse(path, mode="r"):
        if (tmp_path / "cases/case1.json").exists():
            raise OSError(number, os.strerror(number), str(path))
        return open(path, mode)

    monkeypatch.setattr(files, "open", refuse, raising=False)
    with pytest.raises(OutputError, match=rf"^cannot write .* \({os.strerror(number)}\); make room") as caught:
        Work(config).run()
    monkeypatch.undo()
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in (tmp_path / "cases").iterdir()) == ["case0.json", "case1.json"]
    rest = Work(config)
    rest.run()
    assert rest.computed == [2]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    work = Work(Squares(out=tmp_path / "file/run"))
    with pytest.raises(OutputError, match=r"cannot write .*config\.json"):
        work.run()
    assert work.computed == []


def test_write_replaces_whole_files(tmp_path: Path):
    path = tmp_path / "a/b.txt"
    write(path, "one")
    write(path, b"two")
    assert path.read_text() == "two"
    assert [entry.name for entry in path.parent.iterdir()] == ["b.txt"]


def test_environment_names_versions_and_machine():
    environment = describe_environment()
    assert environment["numpy"] == np.__version__
    assert environment["threads"] >= 1
    assert environment["cpu"]
    json.dumps(environment)
