"""The comparison of optimisers, small: its rows against scipy and dense eigenvalues, its files, and its verdicts."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.optimize
import torch

from ot_newton.experiments import optimisers
from ot_newton.experiments.cli import main
from ot_newton.experiments.files import load_table
from ot_newton.experiments.optimisers import COLLECTION, EVERY_METHOD, PRESETS, Config, _run, compare, judge
from ot_newton.experiments.optimisers_figure import NUMERIC, TEXT
from ot_newton.experiments.optimisers_scipy import SCIPY_METHODS, minimize_by_scipy
from ot_newton.experiments.run import Outcome
from ot_newton.minimize import METHODS, minimize
from ot_newton.problem import FunctionProblem

PNG = b"\x89PNG\r\n\x1a\n"
NAMES = ["beale", "saddle_from_itself", "saddle_from_its_manifold"]
CHOSEN = ["adam", "newton-cg", "adam-newton", *SCIPY_METHODS]
SMALL = ["optimisers", "--problems", *NAMES, "--methods", *CHOSEN, "--first-order-steps", "600"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("optimisers") / "run"
    assert main([*SMALL, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def table(folder: Path) -> pd.DataFrame:
    return load_table(folder / "table.csv", numeric=[*NUMERIC, "n_certificate"], text=TEXT)


@cache
def whole_collection(method: str) -> pd.DataFrame:
    return pd.DataFrame([_run(Config(), method, benchmark) for benchmark in COLLECTION.values()]).set_index("problem")


@pytest.mark.parametrize("method", [name for name in METHODS if name != "adam"])
def test_every_second_order_method_ends_at_certified_minimisers_and_says_so(method: str):
    rows = whole_collection(method)
    assert set(rows["outcome"]) == {"success"}
    assert set(rows.index[rows["known"] == "no"]) <= {"meyer", "powell_badly_scaled"}  # their gradients are small early


def test_products_are_no_more_than_those_of_scipy():
    ours, theirs = whole_collection("newton-cg"), whole_collection("scipy-trust-krylov")
    solved = theirs.index[theirs["outcome"] == "success"]
    assert len(solved) > 25
    assert int(np.sum(ours.loc[solved, "nhev"])) <= int(np.sum(theirs.loc[solved, "nhev"]))
    assert list(theirs["outcome"]).count("false success") > 5


def test_files_of_a_run(folder: Path):
    assert {path.name for path in folder.iterdir()} == {
        "cases", "config.json", "environment.json", "figure.png", "summary.csv", "table.csv",
    }  # fmt: skip
    assert {path.stem for path in (folder / "cases").iterdir()} == set(CHOSEN)
    assert (folder / "figure.png").read_bytes().startswith(PNG)
    assert json.loads((folder / "config.json").read_text())["problems"] == NAMES


def test_scipy_stops_at_the_saddles_and_ours_do_not(table: pd.DataFrame):
    at_saddle = table[(table["problem"] == "saddle_from_itself") & (table["run"] != "adam")]
    ours = at_saddle["run"].isin(list(METHODS))
    assert set(at_saddle[ours]["outcome"]) == {"success"}
    assert set(at_saddle[~ours]["outcome"]) == {"false success"}
    assert np.all(at_saddle[~ours]["lambda_ratio"] == -1)
    adam = table[(table["run"] == "adam") & (table["problem"] != "beale")]
    assert set(adam["outcome"]) == {"failure"}
    assert "false success" not in set(table[table["run"].isin(list(METHODS))]["outcome"])


def test_rows_are_those_of_the_libraries(table: pd.DataFrame):
    beale = COLLECTION["beale"]
    rows = table[table["problem"] == "beale"].set_index("run")
    problem = beale.problem()
    unit = max(1.0, float(problem.value_and_grad(problem.start(torch.Generator()))[1].norm()))
    ours = minimize(beale.problem(), options={"gtol": 0.0, "gtol_abs": 1e-8 * unit})
    for name in ("nit", "nfev", "njev", "nhev", "fun"):
        assert rows.loc["newton-cg", name] == getattr(ours, name)
    assert rows.loc["newton-cg", "n_certificate"] == 2
    products = []

    def product(x, v):
        products.append(v)
        return scipy.optimize.rosen_hess_prod(x, v)

    found = scipy.optimize.minimize(
        scipy.optimize.rosen, [0.0, 0.0], jac=scipy.optimize.rosen_der, hessp=product,
        method="trust-ncg", options={"gtol": 1e-6},
    )  # fmt: skip

    def rosen(x):
        return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()

    limits = {"gtol": 1e-6, "xtol": 1e-8, "maxiter": 200, "max_products": 1000}
    end, row = minimize_by_scipy(FunctionProblem(rosen, [0.0, 0.0]), "scipy-trust-ncg", **limits)
    np.testing.assert_allclose(end.numpy(), found.x, rtol=1e-9)
    assert (row["nit"], row["nhev"], row["claimed"]) == (found.nit, len(products), True)
    _, row = minimize_by_scipy(FunctionProblem(rosen, [0.0, 0.0]), "scipy-trust-exact", **limits)
    assert row["nhev"] % 2 == 0


def test_summary_adds_the_table_up(folder: Path, table: pd.DataFrame):
    summary = pd.read_csv(folder / "summary.csv").set_index("run")
    assert list(summary.index) == CHOSEN
    assert np.all(summary["n_problems"] == len(NAMES))
    for method, rows in table.groupby("run"):
        for name in ("nit", "nfev", "njev", "nhev"):
            assert summary.loc[method, name] == rows[name].sum()
        for outcome in optimisers.OUTCOMES:
            assert summary.loc[method, outcome] == (rows["outcome"] == outcome).sum()
        assert summary.loc[method, "nhev_common"] == rows[rows["common"] == "yes"]["nhev"].sum()
    assert set(table[table["common"] == "yes"]["problem"]) == {"beale"}


def test_second_run_computes_nothing_and_says_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    monkeypatch.setattr(optimisers, "minimize", None)
    assert main([*SMALL, "--out", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert f"all {len(CHOSEN)} cases are finished" in printed
    assert "scipy-trust-ncg claims success at a saddle of: saddle_from_itself, saddle_from_its_manifold" in printed
    assert "newton-cg claims" not in printed.replace("scipy-newton-cg claims", "")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")} == before


def test_figure_is_drawn_from_the_table_alone(folder: Path, tmp_path: Path):
    (tmp_path / "table.csv").write_bytes((folder / "table.csv").read_bytes())
    assert main(["optimisers", "--redraw", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "figure.png").read_bytes() == (folder / "figure.png").read_bytes()


@pytest.mark.parametrize(
    ("w", "claimed", "outcome", "known"),
    [
        ((0.0, 0.5**0.5), True, "success", "yes"),
        ((0.0, -(0.5**0.5)), False, "unclaimed", "yes"),
        ((0.0, 0.0), True, "false success", "no"),
        ((0.0, 0.0), False, "failure", "no"),
        ((0.1, 0.7), True, "false success", "no"),
        ((float("nan"), 0.7), False, "failure", "no"),
    ],
)
def test_verdicts(w: tuple[float, float], claimed: bool, outcome: str, known: str):
    saddle = COLLECTION["saddle_from_its_manifold"]
    row = judge(Config(), saddle, torch.tensor(w, dtype=torch.float64), 1.0, claimed=claimed, start=1.0)
    assert (row["outcome"], row["known"]) == (outcome, known)


@pytest.mark.parametrize("method", SCIPY_METHODS)
def test_what_scipy_cannot_finish_is_no_success(method: str):
    limits = {"gtol": 1e-8, "xtol": 1e-8, "maxiter": 50, "max_products": 500}
    for fun, x0 in (
        (lambda x: x[0] + x[1].abs() ** 1.5, [1.0, 0.0]),  # a NaN product
        (lambda x: x.log().sum(), [-1.0, 1.0]),
    ):
        end, row = minimize_by_scipy(FunctionProblem(fun, x0), method, **limits)
        assert not row["claimed"]
        assert row["message"]
        assert end.shape == (2,)


def test_products_are_limited():
    def bowl(x):
        return (torch.arange(1, 41, dtype=x.dtype) * x**2).sum()

    limits = {"gtol": 1e-8, "xtol": 1e-8, "maxiter": 50, "max_products": 5}
    _, row = minimize_by_scipy(FunctionProblem(bowl, torch.ones(40).double()), "scipy-trust-ncg", **limits)
    assert row["status"] == "stopped"
    assert row["message"] == "stopped after 5 Hessian products"


def test_compare_counts_what_is_common():
    def outcome(**verdicts: str) -> Outcome:
        rows = [{"problem": name, "outcome": verdict, "nhev": 10} for name, verdict in verdicts.items()]
        return Outcome({}, rows)

    results = compare(
        {
            "adam": outcome(a="failure", b="failure", c="success"),
            "newton-cg": outcome(a="success", b="success", c="success"),
            "scipy-trust-ncg": outcome(a="success", b="false success", c="success"),
        }
    )
    assert results.summary["nhev_common"].tolist() == [20, 20, 20]
    assert results.table["common"].tolist() == ["yes", "no", "yes"] * 3


def test_settings():
    assert PRESETS["full"] == Config()
    for name, preset in PRESETS.items():
        assert preset.preset == name
    assert set(EVERY_METHOD) == {*METHODS, *SCIPY_METHODS}
    for wrong, words in (
        ({"methods": ("bfgs",)}, "expected methods among newton-cg, .* got bfgs"),
        ({"problems": ()}, "expected problems among rosenbrock, .* got none"),
        ({"gtol": 0.0}, "expected gtol, xtol"),
        ({"maxiter": 0}, "expected maxiter"),
    ):
        with pytest.raises(ValueError, match=words):
            Config(**wrong)
