"""FCS files: round trips, every data type, compensation against a hand computation, and every way to be refused."""

import re
from pathlib import Path

import flowio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ot_newton.problems.cytometry import Events, load_events, load_healthy_donors, write_fcs

VALUES = np.array([[100.0, 20.0], [7.0, 300.0], [-5.0, 40.0]])
SPILL = np.array([[1.0, 0.25], [0.5, 1.0]])


def make_events(values: np.ndarray = VALUES, channels: tuple[str, ...] = ("FITC-A", "PE-A")) -> Events:
    return Events(values, channels, np.full(len(values), "tube"), "by hand")


def fcs_bytes(columns: list[np.ndarray], *, order: str = "1,2,3,4", slip: int = 0, **keywords: str) -> bytes:
    """An FCS 3.0 file put together byte by byte; `slip` moves the end of DATA, an empty keyword is left out."""
    end = "<" if order.startswith("1") else ">"
    record = np.dtype([(f"c{j}", column.dtype.newbyteorder(end)) for j, column in enumerate(columns)])
    table = np.empty(len(columns[0]), record)
    for j, column in enumerate(columns):
        table[f"c{j}"] = column
    kinds = {"u": "I", "f": "F" if columns[0].itemsize == 4 else "D"}
    start, size = 2000, table.nbytes
    text = {
        "$TOT": str(len(table)),
        "$PAR": str(len(columns)),
        "$MODE": "L",
        "$DATATYPE": kinds[columns[0].dtype.kind],
        "$BYTEORD": order,
        "$NEXTDATA": "0",
        "$BEGINDATA": str(start),
        "$ENDDATA": str(start + size - 1 + slip),
    }
    for j, column in enumerate(columns, start=1):
        text |= {f"$P{j}N": f"FL{j}-A", f"$P{j}B": str(8 * column.itemsize), f"$P{j}E": "0,0", f"$P{j}R": "262144"}
    text |= {(f"${key}" if key.isupper() else key): value for key, value in keywords.items()}
    body = "|" + "".join(f"{key}|{value}|" for key, value in text.items() if value)
    header = "FCS3.0    " + "".join(f"{n:>8}" for n in (256, 255 + len(body), start, start + size - 1, 0, 0))
    return (header.ljust(256) + body).ljust(start).encode() + table.tobytes()


def store(folder: Path, content: bytes) -> Path:
    path = folder / "tube.fcs"
    path.write_bytes(content)
    return path


def load_or_message(path: Path) -> Events | str:
    try:
        return load_events(path)
    except ValueError as error:
        return str(error)


def test_real_data_survive_a_round_trip(tmp_path):
    events = load_healthy_donors("A_1_1")
    write_fcs(tmp_path / "donor.fcs", events)
    back = load_events(tmp_path / "donor.fcs")
    assert np.array_equal(back.values, events.values)
    assert back.channels == events.channels
    assert back.samples == ("donor",)
    assert back.source == "donor.fcs, not compensated (no matrix in the file)"
    flow = flowio.FlowData(str(tmp_path / "donor.fcs"))
    assert np.array_equal(np.array(flow.events).reshape(-1, 5), events.values)


def test_channels_by_detector_and_by_marker(tmp_path):
    events = make_events(np.arange(12.0).reshape(3, 4), ("FSC-A", "FITC-A", "PE-A", "Time"))
    write_fcs(tmp_path / "tube.fcs", events, markers=["", "CD4", "CD8 µ/x", ""])
    every = load_events(tmp_path / "tube.fcs")
    assert every.channels == ("CD4", "CD8 µ/x")
    assert np.array_equal(every.values, events.values[:, 1:3])
    picked = load_events(tmp_path / "tube.fcs", ["pe-a", " cd4", "fsc-A"])
    assert picked.channels == ("PE-A", "CD4", "FSC-A")
    assert np.array_equal(picked.values, events.values[:, [2, 1, 0]])


def test_repeated_markers_fall_back_to_detectors_and_are_ambiguous(tmp_path):
    write_fcs(tmp_path / "tube.fcs", make_events(), markers=["CD4", "CD4"])
    assert load_events(tmp_path / "tube.fcs").channels == ("FITC-A", "PE-A")
    with pytest.raises(ValueError, match=r"'cd4' is ambiguous .* it fits FITC-A \(CD4\), PE-A \(CD4\)"):
        load_events(tmp_path / "tube.fcs", ["cd4"])


def test_scatter_alone_must_be_asked_for(tmp_path):
    write_fcs(tmp_path / "tube.fcs", make_events(channels=("FSC-A", "SS INT")))
    with pytest.raises(ValueError, match="no fluorescence channel; name the channels to read: FSC-A, SS INT"):
        load_events(tmp_path / "tube.fcs")
    assert load_events(tmp_path / "tube.fcs", ["FSC-A"]).values.shape == (3, 1)


@pytest.mark.parametrize("keyword", ["SPILL", "$SPILLOVER", "$COMP"])
def test_compensation_by_hand(tmp_path, keyword):
    path = tmp_path / "tube.fcs"
    write_fcs(path, make_events(VALUES @ SPILL), metadata={keyword: "2,FITC-A,PE-A,1,0.25,0.5,1"})
    events = load_events(path)
    np.testing.assert_allclose(events.values, VALUES, rtol=1e-12)
    assert events.source == f"tube.fcs, compensated by {keyword.strip('$')}"
    determinant = 1 - 0.25 * 0.5
    observed = VALUES[0] @ SPILL
    by_hand = [(observed[0] - 0.5 * observed[1]) / determinant, (observed[1] - 0.25 * observed[0]) / determinant]
    np.testing.assert_allclose(events.values[0], by_hand, rtol=1e-12)
    assert np.array_equal(load_events(path, compensate="never").values, VALUES @ SPILL)
    assert load_events(path, compensate="never").source == "tube.fcs, not compensated"


def test_compensation_of_some_channels_in_another_order(tmp_path):
    true = np.column_stack([VALUES, [1.0, 2.0, 3.0]])
    observed = true.copy()
    observed[:, :2] = VALUES @ SPILL
    path = tmp_path / "tube.fcs"
    write_fcs(path, make_events(observed, ("FITC-A", "PE-A", "APC-A")), metadata={"SPILL": "2,PE-A,FITC-A,1,.5,.25,1"})
    np.testing.assert_allclose(load_events(path).values, true, rtol=1e-12)
    np.testing.assert_allclose(load_events(path, ["PE-A"]).values, true[:, [1]], rtol=1e-12)


@pytest.mark.parametrize(
    ("keyword", "matrix", "message"),
    [
        ("SPILL", "x,FITC-A,1", "begin with the number of channels, got 'x'"),
        ("SPILL", "2,FITC-A,PE-A,1,0,0,2,0,1", "hold 2 names and 4 numbers, got 8 entries"),
        ("SPILL", "2,FITC-A,PE-A,1,0,zero,1", "could not convert string to float"),
        ("SPILL", "2,FITC-A,APC-A,1,0,0,1", "channel 'APC-A' not found .* available: FITC-A, PE-A"),
        ("SPILL", "2,FITC-A,FITC-A,1,0,0,1", "asked for twice"),
        ("SPILL", "2,FITC-A,PE-A,1,1,1,1", "finite, invertible matrix"),
        ("SPILL", "2,FITC-A,PE-A,1,nan,0,1", "finite, invertible matrix"),
        ("$COMP", "2,1,0,0,1", "names no channels"),
    ],
)
def test_malformed_spillover(tmp_path, keyword, matrix, message):
    path = tmp_path / "tube.fcs"
    write_fcs(path, make_events(), metadata={keyword: matrix})
    with pytest.raises(ValueError, match=message) as caught:
        load_events(path)
    assert "compensate='never'" in str(caught.value)
    assert np.array_equal(load_events(path, compensate="never").values, VALUES)


def test_compensation_is_insisted_on(tmp_path):
    write_fcs(tmp_path / "tube.fcs", make_events())
    with pytest.raises(ValueError, match="stores no spillover matrix"):
        load_events(tmp_path / "tube.fcs", compensate="always")
    with pytest.raises(ValueError, match="expected compensate 'auto', 'always' or 'never', got 'yes'"):
        load_events(tmp_path / "tube.fcs", compensate="yes")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("order", ["1,2,3,4", "4,3,2,1"])
@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "f4", "f8"])
def test_every_data_type(tmp_path, dtype, order):
    columns = [np.array([0, 3, 200]).astype(dtype), np.array([255, 1, 77]).astype(dtype)]
    events = load_events(store(tmp_path, fcs_bytes(columns, order=order)))
    assert events.values.dtype == np.float64
    assert np.array_equal(events.values, np.column_stack(columns).astype(np.float64))
    if dtype != "u8":
        flow = flowio.FlowData(str(tmp_path / "tube.fcs"))
        assert np.array_equal(np.array(flow.events).reshape(-1, 2), events.values)


def test_integers_of_mixed_width_are_masked_by_their_range(tmp_path):
    columns = [np.array([0xFFFF, 0x0401], "u2"), np.array([5, 0x80000001], "u4")]
    events = load_events(store(tmp_path, fcs_bytes(columns, order="2,1", P1R="1000", P2R="4294967296")))
    assert events.values.tolist() == [[1023.0, 5.0], [1.0, 0x80000001]]


def test_log_amplification_and_gain_are_undone(tmp_path):
    columns = [np.array([0, 512, 768], "u2"), np.array([10, 20, 30], "u2")]
    path = store(tmp_path, fcs_bytes(columns, P1E="4,0", P1R="1024", P2R="65536", P2G="4"))
    events = load_events(path)
    np.testing.assert_allclose(events.values, [[1.0, 2.5], [100.0, 5.0], [1000.0, 7.5]], rtol=1e-14)
    if hasattr(flowio.FlowData, "as_array"):
        np.testing.assert_allclose(events.values, flowio.FlowData(str(path)).as_array(), rtol=1e-14)


@pytest.mark.parametrize(
    "changes", [{"slip": 1}, {"slip": 5}, {"BEGINDATA": "0", "ENDDATA": "0"}, {"BEGINDATA": "", "ENDDATA": ""}]
)
def test_offsets_that_disagree_are_settled_by_the_count_of_events(tmp_path, changes):
    columns = [np.array([1.5, 2.5], "f4"), np.array([3.5, 4.5], "f4")]
    assert load_events(store(tmp_path, fcs_bytes(columns, **changes))).values.tolist() == [[1.5, 3.5], [2.5, 4.5]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"TOT": "7"}, "expected 56 bytes of data .* got a segment of 16 or 16"),
        ({"TOT": "0"}, "expected events and channels, got \\$TOT = 0"),
        ({"TOT": ""}, "lacks the keyword \\$TOT"),
        ({"TOT": "many"}, "many"),
        ({"P2N": ""}, "lacks the keyword \\$P2N"),
        ({"P2B": ""}, "lacks the keyword \\$P2B"),
        (
            {"P2B": "24"},
            "expected \\$DATATYPE I \\(8 to 64 bits\\), F \\(32\\) or D \\(64\\), got F with \\$PnB \\[24, 32\\]",
        ),
        ({"P1DATATYPE": "D"}, "expected one data type for all channels"),
        ({"MODE": "C"}, "expected list mode"),
        ({"DATATYPE": "A"}, "expected \\$DATATYPE .* got A"),
        ({"order": "1,3,2,4"}, "expected \\$BYTEORD ascending or descending, got 1,3,2,4"),
        ({"NEXTDATA": "5000"}, "holds several data sets"),
        ({"P2N": "FL1-A"}, "expected distinct channel names"),
    ],
)
def test_unsupported_and_inconsistent_files(tmp_path, changes, message):
    columns = [np.array([1.5, 2.5], "f4"), np.array([3.5, 4.5], "f4")]
    path = store(tmp_path, fcs_bytes(columns, **changes))
    with pytest.raises(ValueError, match=message) as caught:
        load_events(path)
    assert "tube.fcs" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_files(tmp_path):
    whole = fcs_bytes([np.array([1.5, 2.5], "f4")])
    for content, message in [
        (b"", "is empty"),
        (b"CD4,CD8\n1,2\n", "does not begin with 'FCS'"),
        (whole[:20], "damaged or not an FCS file"),
        (whole[:300], "damaged or not an FCS file"),
        (whole[:-3], "damaged|expected 8 bytes of data"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_events(store(tmp_path, content))


def test_missing_values(tmp_path):
    path = store(tmp_path, fcs_bytes([np.array([1.5, np.nan, np.inf], "f4"), np.ones(3, "f4")]))
    with pytest.raises(ValueError, match=re.escape("(count by channel: {'FL1-A': 2}) in tube.fcs")):
        load_events(path)
    assert load_events(path, ["FL2-A"]).values.tolist() == [[1.0], [1.0], [1.0]]
    for beyond in ("0", "1"):
        path = store(tmp_path, fcs_bytes([np.array([0.0, 1e9], "f4")], P1E="4,1", P1R=beyond))
        with pytest.raises(ValueError, match="missing or infinite values"):
            load_events(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 700), new=st.binary(min_size=1, max_size=3), cut=st.integers(0, 3000), spill=st.booleans())
def test_no_damage_escapes_the_reader(tmp_path, place, new, cut, spill):
    columns = [np.array([1, 2, 300], "u2"), np.array([4, 50, 6], "u2")]
    whole = fcs_bytes(columns, P1E="4,1", SPILL="2,FL1-A,FL2-A,1,.1,.1,1" if spill else "")
    damaged = (whole[:place] + new + whole[place + len(new) :])[: max(cut, 1)]
    outcome = load_or_message(store(tmp_path, damaged))
    assert np.isfinite(outcome.values).all() if isinstance(outcome, Events) else "\n" not in outcome


def test_writing_refuses_what_the_format_cannot_hold(tmp_path):
    path = tmp_path / "tube.fcs"
    for call, message in [
        (lambda: write_fcs(tmp_path / "tube.csv", make_events()), "ends in .fcs"),
        (lambda: write_fcs(path, make_events(channels=("a,b", "c"))), "without ',' and '\\$', got 'a,b'"),
        (lambda: write_fcs(path, make_events(channels=("a/", "c"))), "neither begins nor ends with '/'"),
        (lambda: write_fcs(path, make_events(), markers=["CD4"]), "expected 2 marker names, got 1"),
        (lambda: write_fcs(path, make_events(), metadata={"SPILL": ""}), "neither begins nor ends"),
        (lambda: write_fcs(path, make_events(1e39 * VALUES)), "32-bit floats"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(FileNotFoundError, match="create it first"):
        write_fcs(tmp_path / "none" / "tube.fcs", make_events())
    assert not path.exists()
