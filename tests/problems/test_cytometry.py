"""The bundled cells, tables, preprocessing and the way back from a regression between points."""

import doctest
import importlib
import re

import numpy as np
import pytest
import torch

from ot_newton.problems.cytometry import (
    Events,
    Preprocess,
    cytometry_points,
    load_events,
    load_healthy_donors,
    subsample,
    unscale_regression,
)

SAMPLES = [f"{day}_{replicate}" for day in ("A_1", "A_2", "C_3", "C_4", "D_2", "D_4") for replicate in (1, 2)]


@pytest.mark.parametrize("module", ["cytometry", "events", "preprocess", "fcs", "tables"])
def test_examples_in_the_documentation(module):
    assert doctest.testmod(importlib.import_module(f"ot_newton.problems.{module}")).failed == 0


def test_facts_of_the_bundled_data():
    events = load_healthy_donors()
    assert events.values.shape == (76671, 5)
    assert events.values.dtype == np.float64
    assert events.channels == ("CD4", "CD8", "CD19", "CD45", "CD3")
    assert list(events.samples) == SAMPLES
    counts = [int((events.sample == name).sum()) for name in SAMPLES]
    assert (min(counts), max(counts)) == (5181, 7580)
    assert np.array_equal(events.values, np.rint(events.values))
    assert (events.values < 0).any(axis=0).all()
    assert len(np.unique(events.values, axis=0)) == len(events)
    cd45 = events.channels.index("CD45")
    medians = [np.median(events.select_samples(name).values[:, cd45]) for name in ("A_1_1", "A_1_2")]
    np.testing.assert_allclose(medians, [214e3, 262e3], rtol=3e-3)


def test_samples_by_pattern_and_channels_by_name():
    events = load_healthy_donors(["D_2_*", "A_1_1"], ["cd3", "CD4"])
    assert events.samples == ("A_1_1", "D_2_1", "D_2_2")
    assert events.channels == ("CD3", "CD4")
    whole = load_healthy_donors()
    rows = np.isin(whole.sample, ["A_1_1", "D_2_1", "D_2_2"])
    assert np.array_equal(events.values, whole.values[rows][:, [4, 0]])
    with pytest.raises(ValueError, match=r"got 'B_\*'; samples: A_1_1, A_1_2"):
        load_healthy_donors(["A_*", "B_*"])
    with pytest.raises(ValueError, match="pattern"):
        load_healthy_donors([])
    with pytest.raises(ValueError, match=r"'CD56' not found in .*; available: CD4, CD8, CD19, CD45, CD3"):
        load_healthy_donors(channels=["CD56"])
    with pytest.raises(ValueError, match="at least one channel"):
        load_healthy_donors(channels=[])
    with pytest.raises(TypeError, match="expected a list of channel names, got 'CD4'"):
        load_healthy_donors(channels="CD4")


def test_subsample_is_seeded_and_without_replacement():
    events = load_healthy_donors("A_1_1")
    first, second, other = (subsample(events, 500, seed) for seed in (3, 3, 4))
    assert np.array_equal(first.values, second.values)
    assert not np.array_equal(first.values, other.values)
    assert len(np.unique(first.values, axis=0)) == 500
    assert {tuple(row) for row in first.values} <= {tuple(row) for row in events.values}
    assert {tuple(row) for row in subsample(events, len(events), 0).values} == {tuple(row) for row in events.values}
    for n in (0, len(events) + 1):
        with pytest.raises(ValueError, match=f"expected 1 ≤ n ≤ 7580 events .*got n = {n}"):
            subsample(events, n, 0)


def test_events_check_their_parts():
    sample = np.array(["s", "s"])
    for values, channels, labels, message in [
        (np.ones(2), ("a",), sample, r"shape \(n, p\)"),
        (np.ones((0, 1)), ("a",), sample[:0], r"shape \(n, p\)"),
        (np.ones((2, 2)), ("a",), sample, "expected 2 channel names"),
        (np.ones((2, 2)), ("a", " "), sample, "expected 2 channel names"),
        (np.ones((2, 2)), ("a", "a"), sample, "distinct"),
        (np.ones((2, 1)), ("a",), sample[:1], "one sample name for each of 2 events"),
        (np.array([[1.0], [np.nan]]), ("a",), sample, "expected finite numbers"),
    ]:
        with pytest.raises(ValueError, match=message):
            Events(values, channels, labels, "by hand")


@pytest.mark.parametrize("separator", list(",;\t|"))
@pytest.mark.parametrize("suffix", ["csv", "tsv", "txt"])
def test_table(tmp_path, separator, suffix):
    path = tmp_path / f"tube.{suffix}"
    lines = [("", '"CD4"', " CD8 "), ("1", "0.1", "-2"), ("2", "1e5", "7")]
    path.write_text("\ufeff" + "\n".join(separator.join(line) for line in lines), encoding="utf-8")
    events = load_events(path)
    assert events.channels == ("CD4", "CD8")
    assert events.values.tolist() == [[0.1, -2.0], [1e5, 7.0]]
    assert events.samples == ("tube",)
    assert load_events(path, ["cd8"]).values.tolist() == [[-2.0], [7.0]]


def test_table_with_text_column_is_read_by_name(tmp_path):
    path = tmp_path / "tube.csv"
    path.write_text("CD4,donor,gated\n1,A,True\n2,B,False\n")
    with pytest.raises(ValueError, match=r"something else in: donor, gated; name the channels .*numeric columns: CD4"):
        load_events(path)
    assert load_events(path, ["CD4"]).values.tolist() == [[1.0], [2.0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n\n", "expected a header line"),
        ("1.5,2.5\n3,4\n", "expected a header line .*its first line is '1.5,2.5'"),
        ("CD4,CD8\n", "at least one event .* columns: CD4, CD8"),
        ("CD4,CD8\n1,2,3\n", "expected 2 fields a line .* got more"),
        ("CD4,CD8\n1,2\n1,2,3\n", "Expected 2 fields in line 2, saw 3"),
        ("CD4,CD8\n1,2\n3\n", "count by channel: {'CD8': 1}"),
        ("CD4,CD8\n1,\n3,4\n", "count by channel: {'CD8': 1}"),
        ("CD4,CD4\n1,2\n", "distinct channel names"),
        ("CD4;CD8\n1,5;2,5\n", "decimal point"),
        ('CD4,CD8\n1,"2\n', "expected a header line"),
    ],
)
def test_bad_tables(tmp_path, text, message):
    path = tmp_path / "tube.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_events(path)
    assert "tube.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_table_channels_that_do_not_fit(tmp_path):
    path = tmp_path / "tube.csv"
    path.write_text("CD4,cd4,CD8\n1,2,3\n")
    assert load_events(path, ["cd4"]).values.tolist() == [[2.0]]
    with pytest.raises(ValueError, match=r"'Cd4' is ambiguous .* it fits CD4, cd4; available: CD4, cd4, CD8"):
        load_events(path, ["Cd4"])
    with pytest.raises(ValueError, match=r"'CD3' not found .*available: CD4, cd4, CD8"):
        load_events(path, ["CD3"])
    with pytest.raises(ValueError, match="'cd8' is asked for twice"):
        load_events(path, ["CD8", "cd8"])
    with pytest.raises(ValueError, match="holds no spillover matrix"):
        load_events(path, compensate="always")


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "tube.csv"
    path.write_bytes(b"CD4,CD8\n\xff\xfe,\x00\n")
    with pytest.raises(ValueError, match=r"tube\.csv"):
        load_events(path)


def test_wrong_paths(tmp_path):
    (tmp_path / "folder.fcs").mkdir()
    (tmp_path / "empty.csv").touch()
    with pytest.raises(FileNotFoundError, match=r"no file .*absent\.fcs; check the path"):
        load_events(tmp_path / "absent.fcs")
    for name, message in [("a.parquet", "ends in .fcs, .csv"), ("folder.fcs", "the folder"), ("empty.csv", "is empty")]:
        with pytest.raises(ValueError, match=message):
            load_events(str(tmp_path / name))


@pytest.mark.parametrize("cofactor", [None, 150.0, 3000.0])
@pytest.mark.parametrize("standardise", [True, False])
def test_preprocessing_is_the_formula_and_inverts(cofactor, standardise):
    events = subsample(load_healthy_donors(), 2000, 0)
    scaler = Preprocess(cofactor, None, standardise).fit(events)
    t = events.values if cofactor is None else np.log(events.values / cofactor + np.hypot(events.values / cofactor, 1))
    expected = (t - t.mean(axis=0)) / t.std(axis=0) if standardise else t
    points = scaler.transform(events)
    np.testing.assert_allclose(points, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(scaler.inverse(points), events.values, rtol=1e-9, atol=1e-6)
    assert scaler.units == ("raw" if cofactor is None else f"arcsinh(raw / {cofactor:g})")


def test_clipping_moves_only_what_is_far():
    values = load_healthy_donors().values
    t = np.arcsinh(values / 3000.0)
    far = np.abs(t - t.mean(axis=0)) > 5.0 * t.std(axis=0)  # (n, 5)
    assert far.sum(axis=0).tolist() == [0, 2, 2, 292, 0]
    points = Preprocess(standardise=False).fit(values).transform(values)
    assert np.array_equal(points[~far], t[~far])
    np.testing.assert_allclose(np.abs(points - t.mean(axis=0))[far], np.broadcast_to(5.0 * t.std(axis=0), t.shape)[far])
    scaled = Preprocess().fit(values).transform(values)
    np.testing.assert_allclose(scaled, (points - points.mean(axis=0)) / points.std(axis=0), rtol=1e-12, atol=1e-12)


def test_scaler_clips_and_scales_other_data_by_what_it_learnt():
    scaler = Preprocess(cofactor=None, clip=2.0).fit(np.array([[0.0], [2.0]]))
    assert (scaler.lower.item(), scaler.upper.item(), scaler.mean.item(), scaler.sd.item()) == (-1.0, 3.0, 1.0, 1.0)
    assert scaler.transform(np.array([[-9.0], [0.5], [9.0]])).tolist() == [[-2.0], [-0.5], [2.0]]


def test_bad_preprocessing():
    for bad in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match=f"expected cofactor > 0 and finite, or None, got {bad}"):
            Preprocess(cofactor=bad)
        with pytest.raises(ValueError, match=f"expected clip > 0 and finite, or None, got {bad}"):
            Preprocess(clip=bad)
    scaler = Preprocess().fit(np.arange(6.0).reshape(3, 2))
    for values in (np.ones(3), np.ones((3, 3)), np.ones((0, 2))):
        with pytest.raises(ValueError, match=r"expected values of shape \(n, 2\)"):
            scaler.transform(values)
    with pytest.raises(ValueError, match="expected finite values"):
        scaler.inverse(np.array([[np.nan, 1.0]]))
    values = np.array([[1.0, 2.0], [1.0, 3.0]])
    with pytest.raises(ValueError, match="constant one: column 0;"):
        Preprocess().fit(values)
    with pytest.raises(ValueError, match="constant one: CD4;"):
        Preprocess().fit(Events(values, ("CD4", "CD8"), np.array(["s", "s"]), "by hand"))


@pytest.mark.parametrize("cofactor", [None, 3000.0])
@pytest.mark.parametrize("standardise", [True, False])
@pytest.mark.parametrize("intercept", [True, False])
def test_unscaled_regression_predicts_the_same(cofactor, standardise, intercept):
    rng = np.random.default_rng(1)
    options = Preprocess(cofactor, None, standardise)
    x, y = load_healthy_donors("A_1_1", ["CD4", "CD8", "CD3"]), load_healthy_donors("A_1_2", ["CD19", "CD45"])
    x_scaler, y_scaler = options.fit(x), options.fit(y)
    W, b = rng.normal(size=(3, 2)), rng.normal(size=2) if intercept else None
    predicted = x_scaler.transform(x) @ W + (0.0 if b is None else b)  # (n, q), points
    W_raw, b_raw = unscale_regression(torch.tensor(W), b, x_scaler, y_scaler)
    t = x.values if cofactor is None else np.arcsinh(x.values / cofactor)
    t_predicted = t @ W_raw + b_raw
    raw_predicted = t_predicted if cofactor is None else cofactor * np.sinh(t_predicted)
    np.testing.assert_allclose(y_scaler.inverse(predicted), raw_predicted, rtol=1e-9, atol=1e-6)


def test_unscaled_regression_recovers_known_raw_coefficients():
    rng = np.random.default_rng(2)
    W_true, b_true = rng.normal(size=(5, 4)), 1e4 * rng.normal(size=4)
    x = subsample(load_healthy_donors(), 3000, 0).values
    y = x @ W_true + b_true
    x_scaler, y_scaler = (Preprocess(None, None).fit(values) for values in (x, y))
    W = np.linalg.lstsq(x_scaler.transform(x), y_scaler.transform(y), rcond=None)[0]  # points have mean 0: no intercept
    W_raw, b_raw = unscale_regression(W, None, x_scaler, y_scaler)
    np.testing.assert_allclose(W_raw, W_true, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(b_raw, b_true, rtol=1e-7)


def test_unscaled_regression_checks_shapes():
    scaler = Preprocess().fit(np.arange(6.0).reshape(3, 2))
    with pytest.raises(ValueError, match=re.escape("expected W of shape (2, 2), got (2, 3)")):
        unscale_regression(np.ones((2, 3)), None, scaler, scaler)
    with pytest.raises(ValueError, match=re.escape("expected an intercept of shape (2,), got (1,)")):
        unscale_regression(np.ones((2, 2)), np.ones(1), scaler, scaler)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points(dtype):
    points = cytometry_points(1000, seed=5, dtype=dtype)
    assert points.shape == (1000, 5)
    assert points.dtype == dtype
    assert torch.equal(points, cytometry_points(1000, seed=5, dtype=dtype))
    assert not torch.equal(points, cytometry_points(1000, seed=6, dtype=dtype))
    assert points.mean(dim=0).abs().max() < 1e-6
    torch.testing.assert_close(points.std(dim=0, correction=0), torch.ones(5, dtype=dtype))
    assert points.abs().max() < 7.0 < cytometry_points(1000, seed=5, dtype=dtype, clip=None).abs().max()


def test_points_know_their_limits():
    assert cytometry_points(76671, seed=0).shape == (76671, 5)
    assert cytometry_points(12, seed=0, samples="A_*").shape == (12, 5)
    with pytest.raises(ValueError, match="expected 1 ≤ n ≤ 76671"):
        cytometry_points(76672, seed=0)
    with pytest.raises(TypeError, match=r"expected a floating dtype, got torch\.int64"):
        cytometry_points(10, seed=0, dtype=torch.int64)
