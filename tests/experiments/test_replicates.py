"""`replicates`: gains that are known come back, what is printed is what the map does, a second run computes nothing."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import wasserstein_distance

from ot_newton.experiments import replicates
from ot_newton.experiments.cli import main
from ot_newton.experiments.files import load_table
from ot_newton.experiments.replicates import Config, conclude
from ot_newton.experiments.replicates_figure import NUMERIC, TEXT
from ot_newton.problems.cytometry import Events, load_healthy_donors

QUICK = ["replicates", "--preset", "quick", "--n", "200"]
GAINS = np.array([0.8, 1.3, 0.9, 1.25, 1.1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("replicates") / "run"
    assert main([*QUICK, "--out", str(out)]) == 0
    return out


def channels(folder: Path) -> pd.DataFrame:
    return load_table(folder / "table.csv", numeric=NUMERIC, text=TEXT)


def synthetic(name: str) -> Events:
    """Every other cell of one replicate; in "y" the other ones, each channel multiplied by its gain."""
    cells = load_healthy_donors("A_1_1")
    part = cells.take(np.arange(name == "y", len(cells), 2))
    return replace(part, values=part.values * (GAINS if name == "y" else 1.0))


def test_known_gains_come_back_without_partners(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(replicates, "load_healthy_donors", synthetic)
    command = ["replicates", "--preset", "quick", "--x", "x", "--y", "y", "--n", "600", "--out", str(tmp_path)]
    assert main(command) == 0
    table = channels(tmp_path)
    linear = table[table["run"] == "linear"]
    np.testing.assert_allclose(linear["gain_map"], GAINS, rtol=0.05)
    assert np.mean(linear["after"]) < 0.5 * np.mean(linear["before"])


def test_the_table_says_what_the_saved_map_does(folder: Path):
    config = Config(preset="quick", n=200)
    x, y = config.replicates
    for replicate in (x, y):
        rows = [set(map(tuple, events.values)) for events in (replicate.seen, replicate.unseen)]
        assert not rows[0] & rows[1]
        assert len(replicate.seen) + len(replicate.unseen) == len(replicate.cells)
    table = channels(folder)
    for scaling, rows in table.groupby("run"):
        scalers = [config.preprocess(str(scaling)).fit(side.seen.values[:200]) for side in (x, y)]
        w = np.load(folder / f"points/{scaling}.npy")

        def mapped(values: np.ndarray, scalers=scalers, w=w) -> np.ndarray:
            unclipped = [replace(s, lower=-np.inf * s.sd, upper=np.inf * s.sd) for s in scalers]
            return unclipped[1].inverse(unclipped[0].transform(values) @ w[:-1] + w[-1])

        medians = [np.median(values, 0) for values in (x.cells.values, y.cells.values, mapped(x.cells.values))]
        np.testing.assert_allclose(rows["gain_medians"], medians[1] / medians[0])
        np.testing.assert_allclose(rows["gain_map"], medians[2] / medians[0])
        for column, first, second in (
            ("before", x.unseen.values, y.unseen.values),
            ("after", mapped(x.unseen.values), y.unseen.values),
            ("sampling", y.seen.values, y.unseen.values),
        ):
            pairs = zip(np.arcsinh(first / 3000).T, np.arcsinh(second / 3000).T, strict=True)
            np.testing.assert_allclose(rows[column], [wasserstein_distance(u, v) for u, v in pairs])


def test_both_scalings_end_at_a_certified_minimum(folder: Path):
    summary = pd.read_csv(folder / "summary.csv")
    assert summary["run"].tolist() == ["arcsinh", "linear"]
    assert np.all(summary["status"] == "converged")
    assert np.all(summary["verdict"] == "nonnegative")
    assert np.all(summary["grad_norm"] <= 2e-5)
    assert np.all(summary["lambda_lower"] <= summary["lambda_upper"])
    assert json.loads((folder / "config.json").read_text())["experiment"] == "replicates"
    assert (folder / "figure.png").stat().st_size > 10_000


def test_the_sentence_follows_the_numbers():
    rows = pd.DataFrame(
        {
            "run": "linear",
            "channel": ["A", "B", "C"],
            "gain_medians": [1.0, 2.0, np.nan],
            "gain_se": [0.1, 0.1, np.nan],
            "gain_map": [1.1, 3.0, 4.0],
            "W_diagonal": [0.5, 2.1, 1.0],
            "before": [0.3, 0.3, 0.3],
            "after": [0.1, 0.4, 0.1],
            "sampling": [0.1, 0.1, 0.1],
        }
    )
    sentence = conclude(rows)
    assert "in 1 of 2 channels (not in B +50%), W_jj alone in 1;" in sentence
    assert "nearer in 2 of 3, on average from 0.300 to 0.200, where sampling alone leaves 0.100" in sentence
    assert "W_jj" not in conclude(rows.assign(run="arcsinh"))


def test_a_median_that_is_not_positive_has_no_gain():
    x, y = np.array([[-1.0, 1.0]]), np.array([[2.0, 3.0]])
    np.testing.assert_array_equal(replicates._gain(x, y), [np.nan, 3.0])


def test_second_run_computes_nothing_and_redraws_from_the_table(folder: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(replicates, "minimize", None)
    before = (folder / "table.csv").stat().st_mtime_ns
    assert main([*QUICK, "--out", str(folder)]) == 0
    assert "all 2 cases are finished" in capsys.readouterr().out
    assert (folder / "table.csv").stat().st_mtime_ns == before
    (tmp_path / "table.csv").write_bytes((folder / "table.csv").read_bytes())
    assert main(["replicates", "--redraw", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "figure.png").read_bytes() == (folder / "figure.png").read_bytes()


def test_a_lost_case_is_computed_again_to_the_same_end(folder: Path, tmp_path: Path):
    for name in ("config.json", "cases/arcsinh.json", "points/arcsinh.npy"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert main([*QUICK, "--out", str(tmp_path)]) == 0
    pd.testing.assert_frame_equal(channels(tmp_path), channels(folder), rtol=1e-6)


def test_an_unconverged_map_is_printed_as_such(tmp_path: Path, capsys):
    assert main([*QUICK, "--steps", "1", "--out", str(tmp_path)]) == 0
    assert "arcsinh not converged: The iteration limit was reached" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--x", "A_1_2"], "expected two different replicates, got A_1_2 twice"),
        (["--x", "Z"], "expected a pattern that matches a sample, got 'Z'"),
        (["--n", "9"], "expected n ≥ 10, got 9"),
        (["--eps", "0"], "expected eps > 0, got 0.0"),
        (["--device", "nowhere"], "'nowhere'"),
    ],
)
def test_wrong_input_is_refused_in_one_line(options: list[str], words: str, tmp_path: Path, capsys):
    out = tmp_path / "run"
    assert main(["replicates", *options, "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1
    assert not out.exists()
