"""Spectra along a trajectory and at a saved point, against the problem's own Hessian."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.integrate import trapezoid

from ot_newton.experiments import hessian_spectrum
from ot_newton.experiments.cli import main
from ot_newton.experiments.density_figure import NUMERIC as DENSITY
from ot_newton.experiments.files import load_table
from ot_newton.experiments.hessian_spectrum import NUMERIC, TEXT, Config

SMALL = ["hessian-spectrum", "--n", "80", "--eps", "0.5", "--every", "4"]
PROBLEM = Config(n=80, eps=0.5).problem
FULL = ["hessian-spectrum", "--n", "120", "--eps", "0.5", "--every", "20"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("spectrum") / "run"
    assert main([*SMALL, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trajectory that the full Hessian was added to by a second run."""
    out = tmp_path_factory.mktemp("full") / "run"
    assert main([*FULL, "--out", str(out)]) == 0
    done = (out / "cases/trajectory.json").stat().st_mtime_ns
    assert main([*FULL, "--full", "--out", str(out)]) == 0
    assert (out / "cases/trajectory.json").stat().st_mtime_ns == done
    return out


def densities(folder: Path) -> pd.DataFrame:
    table = load_table(folder / "table.csv", numeric=(*NUMERIC, *DENSITY), text=TEXT)
    return table.query("run == 'full'")


def spectra(folder: Path) -> pd.DataFrame:
    return load_table(folder / "table.csv", numeric=NUMERIC, text=TEXT)


def test_trajectory_goes_from_a_saddle_to_a_minimum(folder: Path):
    table = spectra(folder)
    assert np.all(table.groupby("step").size() == 25)
    assert all(values.is_monotonic_increasing for _, values in table.groupby("step")["eigenvalue"])
    lowest = table[table["index"] == 0]
    assert lowest["eigenvalue"].iloc[0] < 0 < lowest["eigenvalue"].iloc[-1]
    adam = lowest[lowest["phase"] == "adam"]
    assert np.all(adam["step"] % 4 == 0)
    assert (folder / "figure.png").stat().st_size > 10_000


def test_spectrum_at_a_saved_point_is_that_of_the_hessian(folder: Path, tmp_path: Path, capsys):
    point = folder / "points/trajectory.npy"
    assert main([*SMALL, "--point", str(point), "--out", str(tmp_path / "run")]) == 0
    found = spectra(tmp_path / "run")["eigenvalue"].to_numpy()
    w = torch.from_numpy(np.load(point)).reshape(-1)
    expected = torch.linalg.eigvalsh(PROBLEM(0.5).hessian(w).to_dense()).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-3 * expected[-1])
    end = spectra(folder)
    np.testing.assert_allclose(found, end[end["step"] == end["step"].max()]["eigenvalue"], atol=1e-3 * expected[-1])
    assert f"eigenvalues: {found[0]:+.4f}" in capsys.readouterr().out


def test_second_run_computes_nothing_and_redraws_from_the_table(folder: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(hessian_spectrum, "minimize", None)
    before = (folder / "table.csv").stat().st_mtime_ns
    assert main([*SMALL, "--out", str(folder)]) == 0
    assert "nothing to compute" in capsys.readouterr().out
    assert (folder / "table.csv").stat().st_mtime_ns == before
    (tmp_path / "table.csv").write_bytes((folder / "table.csv").read_bytes())
    assert main(["hessian-spectrum", "--redraw", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "figure.png").read_bytes() == (folder / "figure.png").read_bytes()


def test_unconverged_trajectory_is_printed_as_such(tmp_path: Path, capsys):
    assert main([*SMALL, "--steps", "2", "--out", str(tmp_path)]) == 0
    assert "not converged: The iteration limit was reached" in capsys.readouterr().out


def test_density_of_the_full_hessian_holds_its_dense_spectrum(full: Path):
    problem = Config(n=120, eps=0.5).problem(0.5)
    w = torch.from_numpy(np.load(full / "points/trajectory.npy")).reshape(-1)
    exact = torch.linalg.eigvalsh(problem.solve_plan(w, 1e-10).hessian().to_dense()).numpy()
    summary = pd.read_csv(full / "summary.csv").set_index("run").loc["full"]
    assert summary["rows"] == len(exact) == 600
    assert summary["status"] == "converged"
    assert summary["n_matvec"] == 8 * 64
    assert summary["n_passes"] > 64
    assert summary["n_below_lower"] <= (exact < 0).sum() <= summary["n_below_upper"]
    np.testing.assert_allclose([summary["smallest_node"], summary["largest_node"]], exact[[0, -1]], rtol=1e-3)

    rows, sigma = densities(full), summary["sigma"]
    x = rows["x"].to_numpy()
    share = (exact[:, None] < x).mean(0)
    kernels = np.exp(-0.5 * ((exact[:, None] - x) / sigma) ** 2) / (sigma * np.sqrt(2 * np.pi))
    for true, lower, upper in (
        (share, rows["share_lower"], rows["share_upper"]),
        (kernels.mean(0), rows["lower"], rows["upper"]),
    ):
        slack = 1e-9 * true.max()
        held = (true >= lower.to_numpy() - slack) & (true <= upper.to_numpy() + slack)
        assert held.mean() >= 0.95
    assert np.max(rows["share_upper"] - rows["share_lower"]) < 0.2
    np.testing.assert_allclose(rows["share"], share, atol=0.05)
    np.testing.assert_allclose(trapezoid(rows["density"], x), 1, rtol=1e-3)


def test_full_hessian_is_not_computed_twice_and_redrawn_from_the_table(full: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(hessian_spectrum, "spectral_density", None)
    assert main([*FULL, "--full", "--out", str(full)]) == 0
    printed = capsys.readouterr().out
    assert "all 2 cases are finished" in printed
    assert "full Hessian, 600 × 600: nodes from -" in printed
    (tmp_path / "table.csv").write_bytes((full / "table.csv").read_bytes())
    assert main(["hessian-spectrum", "--redraw", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "figure.png").read_bytes() == (full / "figure.png").read_bytes()


def test_full_hessian_at_a_saved_point_is_that_at_the_end_of_the_trajectory(full: Path, tmp_path: Path):
    point = ["--point", str(full / "points/trajectory.npy")]
    assert main([*FULL, *point, "--full", "--out", str(tmp_path)]) == 0
    found, expected = (densities(folder).reset_index(drop=True) for folder in (tmp_path, full))
    pd.testing.assert_frame_equal(found, expected)


def test_full_hessian_that_is_not_accurate_is_printed_as_such(full: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(hessian_spectrum, "FULL_RTOL", 1e-30)
    few = ["--full", "--probes", "1", "--lanczos-steps", "2", "--out", str(tmp_path)]
    assert main([*FULL, "--point", str(full / "points/trajectory.npy"), *few]) == 0
    printed = capsys.readouterr().out
    assert "2 products" in printed
    assert "not converged: Rounding stops further progress" in printed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--n", "1"], "expected n ≥ 2 cells, got 1"),
        (["--probes", "0"], "expected probes and lanczos-steps ≥ 1, got 0 and 64"),
        (["--lanczos-steps", "0"], "expected probes and lanczos-steps ≥ 1, got 8 and 0"),
    ],
)
def test_too_few_of_anything_is_refused(options: list[str], words: str, tmp_path: Path, capsys):
    out = tmp_path / "run"
    assert main(["hessian-spectrum", "--full", *options, "--out", str(out)]) == 2
    assert words in capsys.readouterr().err
    assert not out.exists()
