"""Spectra along a trajectory and at a saved point, against the problem's own Hessian."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from ot_newton.experiments import hessian_spectrum
from ot_newton.experiments.cli import main
from ot_newton.experiments.files import load_table
from ot_newton.experiments.hessian_spectrum import NUMERIC, TEXT, Config

SMALL = ["hessian-spectrum", "--n", "80", "--eps", "0.5", "--every", "4"]
PROBLEM = Config(n=80, eps=0.5).problem


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("spectrum") / "run"
    assert main([*SMALL, "--out", str(out)]) == 0
    return out


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
