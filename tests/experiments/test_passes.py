"""The pass counts: what is counted, that the judge is right, and that the tables follow from the measurements."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from referee import Referee, relative

from ot_newton.experiments import passes
from ot_newton.experiments.cli import main
from ot_newton.experiments.files import load_table
from ot_newton.experiments.passes import Config
from ot_newton.experiments.passes_figure import NUMERIC, TEXT
from ot_newton.experiments.passes_plain import PlainRegression
from ot_newton.experiments.passes_point import Point, dense_hessian, until
from ot_newton.experiments.passes_tables import GOALS, count

TINY = ["passes", "--sizes", "40", "--eps", "0.5", "--steps", "10", "--most", "800", "--gtol", "1e-4"]
CONFIG = Config(sizes=(40,), eps=(0.5,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("passes") / "run"
    assert main([*TINY, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def table(folder: Path) -> pd.DataFrame:
    kinds = ("half_steps", "applications", "columns", "lambda_min", "loss")
    return load_table(folder / "table.csv", numeric=[*NUMERIC, *kinds], text=TEXT)


def test_passes_are_the_sum_of_their_kinds(table: pd.DataFrame):
    counted = table[table["table"] != "solution"]
    assert np.array_equal(counted["passes"], counted["half_steps"] + counted["applications"])
    assert np.all(counted[counted["table"].isin(["product", "hessian"])]["half_steps"] == 0)
    assert np.all(counted[counted["method"] == "alternating"]["applications"] == 0)


def test_dense_judge_agrees_with_the_referee():
    problem = CONFIG.problem(40, 0.5)
    w = CONFIG.random_start(problem)
    x = problem.X @ w.reshape(5, 5)
    judge = Referee(x, problem.Y, 0.5)
    J = torch.kron(problem.X, torch.eye(5, dtype=torch.float64))
    want = J.T @ judge.hessian_x @ J
    assert relative(dense_hessian(judge.P, problem.X, problem.Y, 1.0, 0.5), want) < 1e-9
    assert relative(Point(problem, w, 0.02, 0).exact, want) < 1e-7


def test_more_columns_never_take_more_passes(table: pd.DataFrame):
    counts = count(table)
    for kind, slow, fast in (
        ("product", "CG", "block + random columns"),
        ("hessian", "columns", "columns + random"),
        ("hessian", "columns + random", "columns + slow modes"),
    ):
        here = counts[counts["table"] == kind]
        by_goal = here.pivot(index=["point", "goal"], columns="method", values="passes")
        assert np.all(by_goal[fast] <= by_goal[slow])
        assert by_goal.notna().all(axis=None)


def test_bracket_holds_lambda_min(table: pd.DataFrame):
    seen = table[table["lower"].notna() & table["exact"].notna()]
    assert set(seen["table"]) == {"hessian", "adam"}
    assert np.all(seen["lower"] <= seen["exact"])
    assert np.all(seen["exact"] <= seen["upper"])


def test_potentials_meet_their_goals(table: pd.DataFrame):
    counts = count(table)
    here = counts[(counts["table"] == "potentials") & (counts["method"] != "alternating")]
    assert len(here) == 3 * 2 * len(GOALS["potentials"])
    assert np.all(here["error"] <= here["goal"].astype(float))


def test_plain_solvers_agree_and_pay_more(table: pd.DataFrame):
    counts = count(table)
    ends = counts[(counts["table"] == "run") & (counts["goal"] == "end")].set_index("method")
    assert ends["status"].to_dict() == {"this library": "converged", "plain Sinkhorn + CG": "pass_limit"}
    passes = ends["passes"].to_dict()
    assert passes["plain Sinkhorn + CG"] > passes["this library"]
    problem = CONFIG.problem(40, 0.5)
    plain = PlainRegression(problem.X, problem.Y, 0.5, most=20_000, backend="auto")
    w = CONFIG.random_start(problem)
    value, grad = plain.value_and_grad(w, 1e-6)
    want, want_grad = problem.value_and_grad(w)
    assert float(value) == pytest.approx(float(want), rel=1e-6)
    assert relative(grad, want_grad) < 1e-5
    assert relative(plain.hessian(w, 1e-4).to_dense(), problem.hessian(w).to_dense()) < 1e-3
    assert plain.passes.half_steps > problem.passes.half_steps
    assert plain.hessian_at_hand(w) is None


def test_thinning_keeps_the_first_row_within_each_goal():
    errors = [1.0, 0.95, 0.9, 0.099, 0.0985, 0.098, 0.009, 0.0001]
    rows = [{"error": error, "passes": 2 * k} for k, error in enumerate(errors)]
    kept = until(iter(rows), (0.1, 0.0985, 0.01))
    assert [row["error"] for row in kept] == [1.0, 0.099, 0.0985, 0.009]


def test_second_run_computes_nothing_and_prints_the_same(folder: Path, monkeypatch, capsys):
    monkeypatch.setattr(passes, "minimize", None)
    before = (folder / "figure.png").read_bytes()
    assert main([*TINY, "--out", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "nothing to compute" in out
    assert "n = 40, the exact Hessian" in out
    assert main([*TINY, "--redraw", "--out", str(folder)]) == 0
    assert out.split("\n", 1)[1] == capsys.readouterr().out
    assert (folder / "figure.png").read_bytes() == before
    assert len(before) > 10_000


def test_own_tables(tmp_path: Path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2)) @ np.array([[1.0, 0.4], [0.0, 0.8]])
    files = []
    for name, points in (("x", x), ("y", x[rng.permutation(60)] @ np.array([[0.9, 0.1], [-0.2, 1.1]]))):
        files.append(tmp_path / f"{name}.csv")
        pd.DataFrame(points, columns=["a", "b"]).to_csv(files[-1], index=False)
    options = ["--sizes", "50", "--starts", "0", "--eps", "0.5", "--steps", "2", "--cofactor", "0", "--most", "200"]
    options += ["--x", str(files[0]), "--y", str(files[1]), "--copy-to", str(tmp_path / "kept")]
    assert main(["passes", *options, "--out", str(tmp_path / "run")]) == 0
    found = load_table(tmp_path / "kept/run-summary.csv", numeric=("passes",), text=("table",))
    assert {"product", "hessian", "potentials", "adam"} == set(found["table"])
    assert main(["passes", *options, "--sizes", "90", "--out", str(tmp_path / "more")]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--x", "a.csv"], "expected both --x and --y"),
        (["--eps", "0"], "expected eps > 0"),
        (["--sizes", "1"], "expected sizes ≥ 2"),
        (["--steps", "0"], "expected steps, run_steps and most ≥ 1"),
    ],
)
def test_wrong_options(options: list[str], message: str, capsys):
    assert main(["passes", *options]) == 2
    assert message in capsys.readouterr().err
