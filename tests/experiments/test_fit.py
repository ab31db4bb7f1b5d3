"""`fit`: a known map comes back from two files whose rows do not correspond."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from ot_newton.experiments import fit
from ot_newton.experiments.cli import main
from ot_newton.experiments.errors import InputError
from ot_newton.problems.cytometry import Events, Preprocess, load_healthy_donors, subsample, write_fcs
from ot_newton.problems.simulation import simulate

CHANNELS = ("CD4", "CD8", "CD3")
N, NOISE = 600, 0.2


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Two FCS files, A and B = A W* + noise in another order, with W* in the units of arcsinh(raw / 3000)."""
    events = subsample(load_healthy_donors(channels=CHANNELS), 2 * N, seed=1)
    scaler = Preprocess(3000.0, None).fit(events)
    cells = torch.from_numpy(scaler.transform(events))
    data = simulate(cells, n=N, split="permuted", noise=NOISE, w_star="near-identity", seed=1)
    folder = tmp_path_factory.mktemp("fcs")
    for name, points in (("A", data.X), ("B", data.Y)):
        raw = scaler.inverse(points.numpy())
        write_fcs(folder / f"{name}.fcs", Events(raw, CHANNELS, np.full(N, name), "simulated"))
    return {"folder": folder, "W": data.W_star.numpy() * scaler.scale / scaler.scale[:, None], "scale": scaler.scale}


@pytest.fixture(scope="module")
def argv(truth: dict) -> list[str]:
    files = ["--x", str(truth["folder"] / "A.fcs"), "--y", str(truth["folder"] / "B.fcs")]
    return ["fit", *files, "--noise", str(NOISE), "--starts", "2", "--start-cells", "120"]


@pytest.fixture(scope="module")
def folder(argv: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fit") / "run"
    assert main([*argv, "--out", str(out)]) == 0
    return out


def weights(path: Path, channels: tuple[str, ...] = CHANNELS) -> np.ndarray:
    frame = pd.read_csv(path)
    assert frame["channel"].tolist() == [*channels, "intercept"]
    return frame[list(channels)].to_numpy()


def test_the_map_comes_back(folder: Path, truth: dict):
    raw = weights(folder / "W_raw.csv")
    scale = truth["scale"]
    error = (raw[:-1] - truth["W"]) * scale[:, None] / scale
    assert np.linalg.norm(error) / np.linalg.norm(truth["W"] * scale[:, None] / scale) <= 0.06


def test_scaled_and_raw_weights_predict_the_same(folder: Path, truth: dict):
    config = fit.Config(x=truth["folder"] / "A.fcs", y=truth["folder"] / "B.fcs", clip=0.0)
    pair = config.pair
    scaled, raw = weights(folder / "W_scaled.csv"), weights(folder / "W_raw.csv")
    points = Preprocess(3000.0, None).fit(pair.x).transform(pair.x)
    through_points = (points @ scaled[:-1] + scaled[-1]) * pair.y_scaler.scale + pair.y_scaler.shift
    direct = np.arcsinh(pair.x.values / 3000) @ raw[:-1] + raw[-1]
    np.testing.assert_allclose(through_points, direct, atol=1e-9)


def test_report_holds_the_evidence(folder: Path):
    report = json.loads((folder / "report.json").read_text())
    assert report["status"] == "converged"
    assert report["verdict"] == "nonnegative"
    assert report["grad_norm"] < 1e-6
    assert report["marginal_error"] < 1e-6
    assert report["eps"] == pytest.approx(2 * NOISE**2)
    assert report["starts_at_the_lowest_loss"].endswith("of 3")
    np.testing.assert_allclose(report["W_scaled"], weights(folder / "W_scaled.csv")[:-1])
    text = (folder / "report.md").read_text()
    assert "a minimum: no direction of negative curvature" in text
    assert all(channel in text for channel in CHANNELS)
    assert (folder / "figure.png").stat().st_size > 10_000


def test_second_run_computes_nothing(argv: list[str], folder: Path, monkeypatch, capsys):
    monkeypatch.setattr(fit, "minimize", None)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    assert main([*argv, "--out", str(folder)]) == 0
    assert "all 4 cases are finished" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")} == before


def test_a_lost_polish_is_redone_from_the_best_start(argv: list[str], folder: Path, tmp_path: Path):
    for part in ("cases", "points"):
        (tmp_path / part).mkdir()
        for path in (folder / part).iterdir():
            if path.stem != fit.POLISH:
                (tmp_path / part / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert main([*argv, "--out", str(tmp_path)]) == 0
    np.testing.assert_allclose(weights(tmp_path / "W_raw.csv"), weights(folder / "W_raw.csv"), atol=1e-6)


def test_a_changed_file_is_not_mistaken_for_a_finished_run(argv: list[str], truth: dict, tmp_path: Path, capsys):
    other = tmp_path / "A.csv"
    pd.DataFrame(np.random.default_rng(0).normal(size=(60, 3)) * 5000, columns=list(CHANNELS)).to_csv(
        other, index=False
    )
    command = ["fit", "--x", str(other), "--y", argv[4], "--starts", "0", "--max-cells", "60", "--steps", "2"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    assert "NOT CONVERGED" in capsys.readouterr().out
    other.write_text(other.read_text() + "1,2,3\n")
    assert main([*command, "--out", str(tmp_path / "run")]) == 2
    assert "x_sha256" in capsys.readouterr().err


def test_figure_is_drawn_from_the_tables_alone(argv: list[str], folder: Path, tmp_path: Path):
    for name in ("W_scaled.csv", "cells.csv"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert main([*argv, "--redraw", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "figure.png").read_bytes() == (folder / "figure.png").read_bytes()


def test_other_numbers_of_channels_and_an_intercept(argv: list[str], tmp_path: Path):
    options = ["--channels", "CD4", "CD3", "--y-channels", "CD3", "--starts", "1", "--max-cells", "80", "--intercept"]
    command = [*argv[:5], *options, "--eps", "0.5", "--out", str(tmp_path)]
    assert main(command) == 0
    frame = pd.read_csv(tmp_path / "W_scaled.csv")
    assert frame["channel"].tolist() == ["CD4", "CD3", "intercept"]
    assert list(frame.columns) == ["channel", "CD3"]


def test_monge_map_needs_as_many_channels(truth: dict):
    config = fit.Config(
        x=truth["folder"] / "A.fcs", y=truth["folder"] / "B.fcs", y_channels=("CD4",), start_law="auto", starts=0
    )
    with pytest.raises(InputError, match="no Monge map from 3 to 1 channels"):
        fit.main(config)
