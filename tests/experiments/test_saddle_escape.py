"""The saddle escape, small: its files, its tables, and that a finished run is left alone."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from ot_newton.experiments import escape_runs, saddle_escape
from ot_newton.experiments.cli import main
from ot_newton.experiments.escape_figure import NUMERIC, TEXT
from ot_newton.experiments.files import load_table
from ot_newton.experiments.run import Outcome
from ot_newton.experiments.saddle_escape import Config, compare

PNG = b"\x89PNG\r\n\x1a\n"
SMALL = [
    "saddle-escape", "--n", "80", "--starts", "2", "--adam-steps", "25", "--eps", "0.5",
    "--methods", "adam-newton", "adam", "--beside", "trust-ncg", "saddle-free",
    "--polish-starts", "1", "--polish-cells", "40",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("escape") / "run"
    assert main([*SMALL, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def summary(folder: Path) -> pd.DataFrame:
    numeric = [
        "loss", "grad_norm", "lambda_min", "lambda_lower", "lambda_upper", "start_lambda_min", "loss_above_best",
        "rel_W_pairs", "seconds", "newton_seconds", "n_passes", "steps", "newton_steps",
    ]  # fmt: skip
    return load_table(folder / "summary.csv", numeric=numeric, text=["run", "start", "method", "status", "best_basin"])


def test_files_of_a_run(folder: Path):
    assert {path.name for path in folder.iterdir()} == {
        "cases", "config.json", "environment.json", "figure.png", "methods.png", "points", "summary.csv", "table.csv",
    }  # fmt: skip
    for name in ("figure.png", "methods.png"):
        assert (folder / name).read_bytes().startswith(PNG)
    assert json.loads((folder / "config.json").read_text())["n"] == 80


def test_summary_holds_the_evidence(folder: Path, summary: pd.DataFrame):
    assert summary["method"].value_counts().to_dict() == {
        "adam-newton": 2, "adam": 2, "trust-ncg": 1, "saddle-free": 1, "monge-newton": 1, "polish": 1,
    }  # fmt: skip
    assert np.min(summary["loss_above_best"]) == 0
    random = summary[summary["start"].isin(["0", "1"])]
    assert np.all(random["start_lambda_min"] < 0)
    switched = summary[summary["method"] != "adam"]
    assert np.all(switched["status"] == "converged")
    assert np.all(switched["grad_norm"] < 1e-6)
    assert np.all(switched["lambda_lower"] > 0)
    assert np.all(switched["lambda_lower"] <= switched["lambda_min"])
    assert np.all(switched["lambda_min"] <= switched["lambda_upper"])
    assert np.all(summary["rel_W_pairs"] < 0.2)
    newton = summary[summary["method"].isin(["trust-ncg", "saddle-free"])]
    assert np.all(newton["newton_steps"] == newton["steps"])
    assert np.all(summary["newton_seconds"] <= summary["seconds"])
    assert np.all(summary[summary["method"] == "adam"]["status"] == "max_iter")


def test_summary_agrees_with_the_problem_at_the_saved_point(folder: Path, summary: pd.DataFrame):
    config = Config(n=80, eps=(0.5,))
    for _, row in summary.iterrows():
        problem = config.problem(0.5)
        w = torch.from_numpy(np.load(folder / f"points/{row['run']}.npy")).reshape(-1)
        loss, grad = problem.value_and_grad(w)
        assert float(loss) == pytest.approx(row["loss"], rel=1e-4)
        assert float(grad.norm()) == pytest.approx(row["grad_norm"], rel=0.2, abs=1e-7)
        eigenvalues = torch.linalg.eigvalsh(problem.hessian(w).to_dense())
        assert float(eigenvalues[0]) == pytest.approx(row["lambda_min"], abs=1e-3 * float(eigenvalues[-1]))


def test_table_follows_every_run(folder: Path, summary: pd.DataFrame):
    table = load_table(folder / "table.csv", numeric=[*NUMERIC, "n_passes"], text=TEXT)
    assert set(table["run"]) == set(summary["run"])
    for name, run in table.groupby("run"):
        assert run["step"].tolist() == list(range(len(run)))
        assert np.all(run["seconds"].diff()[1:] >= 0)
        assert np.all(run["n_passes"].diff()[1:] >= 0)
        last, total = run.iloc[-1], summary[summary["run"] == name].iloc[0]
        for column in ("loss", "lambda_min", "seconds", "n_passes", "loss_above_best"):
            assert last[column] == total[column]
    adam = table[(table["method"] == "adam") & (table["start"] == "0")]
    assert len(adam) == 26
    assert bool(np.isfinite(adam["lambda_min"].to_numpy()).all())  # it comes with every gradient


def test_second_run_computes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    monkeypatch.setattr(escape_runs, "minimize", None)
    assert main([*SMALL, "--out", str(folder)]) == 0
    assert "all 8 cases are finished" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")} == before


def test_figure_is_drawn_from_the_table_alone(folder: Path, tmp_path: Path):
    (tmp_path / "table.csv").write_bytes((folder / "table.csv").read_bytes())
    assert main(["saddle-escape", "--redraw", "--out", str(tmp_path)]) == 0
    for name in ("figure.png", "methods.png"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"table.csv", "figure.png", "methods.png"}


def test_redraw_refuses_a_damaged_table(folder: Path, tmp_path: Path, capsys):
    (tmp_path / "table.csv").write_bytes((folder / "table.csv").read_bytes()[:-7])
    assert main(["saddle-escape", "--redraw", "--out", str(tmp_path)]) == 2
    line = capsys.readouterr().err
    assert f"{tmp_path / 'table.csv'} is damaged" in line
    assert line.count("\n") == 1


def test_unconverged_runs_are_printed_as_such(tmp_path: Path, capsys):
    options = ["--steps", "3", "--starts", "1", "--no-monge", "--no-polish", "--beside-starts", "0"]
    assert main(["saddle-escape", "--n", "60", *options, "--out", str(tmp_path)]) == 0
    assert "not converged: eps0.25-start0-adam-newton: The iteration limit was reached" in capsys.readouterr().out


def test_compare_measures_against_the_best_converged_run():
    def outcome(eps: float, loss: float, status: str) -> Outcome:
        return Outcome({"eps": eps, "loss": loss, "status": status}, [{"eps": eps, "loss": loss}])

    results = compare(
        {
            "a": outcome(0.1, 1.0, "converged"),
            "b": outcome(0.1, 1.5, "converged"),
            "c": outcome(0.1, 0.9995, "max_iter"),
            "d": outcome(0.5, 3.0, "max_iter"),
        }
    )
    np.testing.assert_allclose(results.summary["loss_above_best"], [0, 0.5, -0.0005, 0], atol=1e-12)
    assert results.summary["best_basin"].tolist() == ["yes", "no", "yes", "yes"]
    assert results.table["loss_above_best"].equals(results.summary["loss_above_best"])


def test_presets_are_complete():
    for name, preset in saddle_escape.PRESETS.items():
        assert preset.preset == name
        assert preset.folder() == Path(f"runs/saddle-escape-{name}")
    assert saddle_escape.PRESETS["laptop"] == Config()
    assert dataclasses.replace(Config(), out=Path("elsewhere")).settings() == Config().settings()


def test_matched_noise_has_half_the_temperature_as_variance():
    config = Config(n=50, eps=(0.1, 0.5), matched_noise=True)
    assert [config.data_at(eps).noise ** 2 for eps in config.eps] == pytest.approx([0.05, 0.25])
    assert config.data_at(0.1) is config.data_at(0.1)
    assert Config(n=50).data_at(0.1).noise == 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"starts": -1}, "expected starts, beside_starts"),
        ({"polish_cells": 1}, "expected polish_cells ≥ 2, got 1"),
        ({"starts": 0, "monge": False, "polish": False}, "nothing to run"),
        ({"eps": ()}, "expected eps > 0"),
        ({"steps": 0}, "expected steps"),
    ],
)
def test_settings_that_make_no_run_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Config(**options)
