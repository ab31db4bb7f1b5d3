"""Flow Cytometry Standard files: events on their linear scale, spillover undone.

A detector sees its own dye and a share of the others. With the spillover matrix S stored in the file (row: dye, column:
detector) a row of observed values is `observed = true S`, so `true = observed S⁻¹`.

Reference: Spidlen et al., "Data File Standard for Flow Cytometry, version FCS 3.1", Cytometry A 77A:97-100 (2010).
"""

import io
import re
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import flowio
import numpy as np
from flowio.exceptions import FlowIOException, MultipleDataSetsError

from ot_newton.problems.events import Events, find_channels

_NOT_FLUORESCENCE = re.compile(r"(fsc?|v?ssc?|time|width|event)(?![a-z])", re.IGNORECASE)
_SPILLOVER_KEYWORDS = ("spillover", "spill", "comp")


def read_fcs(
    path: Path, channels: Sequence[str] | None = None, *, compensate: Literal["auto", "always", "never"] = "auto"
) -> Events:
    """Events of one FCS file (2.0, 3.0, 3.1; list mode; 8- to 64-bit integers, float, double).

    Values are linear: logarithmic amplification ($PnE) is undone as 10^(decades · value / range) · offset and gain
    ($PnG) is divided out, before compensation. Time stays in steps of the instrument.

    Args:
        path: the file.
        channels: detector ($PnN) or marker ($PnS) names, in this order and whatever the case; None for every channel
            except scatter, time, pulse width and event number.
        compensate: "auto" compensates if the file stores a matrix ($SPILLOVER, SPILL or a named $COMP), "always"
            insists on one, "never" ignores it.

    Returns:
        Events whose channels are named by marker where the file gives one, else by detector; asked for by name, by that
        name as the file spells it.

    Raises:
        ValueError: for a damaged or unsupported file, a channel that is missing or ambiguous, a malformed or singular
            spillover matrix, or values that are not finite.
    """
    content = path.read_bytes()
    header, text = _parse_text(path, content)
    try:
        values = _decode(content, header, text)
        detectors = [text[f"p{j + 1}n"].strip() for j in range(values.shape[1])]
    except KeyError as error:
        raise ValueError(f"{path} lacks the keyword ${str(error.args[0]).upper()}; export it again") from error
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path} cannot be read: {error}; export it again as FCS 3.1 list mode") from error
    markers = [text.get(f"p{j + 1}s", "").strip() for j in range(len(detectors))]
    keyword = next((key for key in _SPILLOVER_KEYWORDS if text.get(key, "").strip(" \0")), None)
    done = "not compensated"
    if keyword is None:
        if compensate == "always":
            raise ValueError(f"{path} stores no spillover matrix; export it with $SPILLOVER or use compensate='auto'")
        done += " (no matrix in the file)"
    elif compensate != "never":
        named, spillover = _parse_spillover(path, keyword, text[keyword], detectors)
        values[:, named] = np.linalg.solve(spillover.T, values[:, named].T).T
        done = f"compensated by {keyword.upper()}"

    own = list(zip(detectors, markers, strict=True))
    if channels is None:
        columns, labels = _fluorescence(path, detectors, markers)
    else:
        columns = find_channels(channels, own, str(path))
        labels = [_as_spelt(name, own[j]) for name, j in zip(channels, columns, strict=True)]
    sample = np.full(len(values), path.stem)
    return Events(values[:, columns], tuple(labels), sample, f"{path.name}, {done}")


def write_fcs(
    path: str | Path,
    events: Events,
    *,
    markers: Sequence[str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write events as an FCS 3.1 file of 32-bit floats (integers are exact up to 2²⁴); sample names are not stored.

    Args:
        path: the file to write, ending in .fcs; an existing one is replaced.
        events: channel names become $PnN.
        markers: p marker names ($PnS), "" for none.
        metadata: further keywords, such as {"SPILL": "2,CD4,CD8,1,0.1,0,1"}.

    Raises:
        FileNotFoundError: when the folder does not exist.
        ValueError: for another suffix, a name or keyword that FCS cannot hold, or values beyond 32-bit floats.
    """
    path = Path(path)
    if path.suffix.lower() != ".fcs":
        raise ValueError(f"expected a file that ends in .fcs, got {path}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent}; create it first")
    p = len(events.channels)
    if markers is not None and len(markers) != p:
        raise ValueError(f"expected {p} marker names, got {len(markers)}")
    metadata = dict(metadata or {})
    for name in (*events.channels, *(markers or ())):
        if set(name) & set(",$"):
            raise ValueError(f"expected a channel name without ',' and '$', got {name!r}")
    for entry in (*events.channels, *(name for name in markers or () if name), *metadata, *metadata.values()):
        if not entry or entry != entry.strip("/ "):
            raise ValueError(f"expected text that neither begins nor ends with '/' or a blank, got {entry!r}")
    if np.abs(events.values).max() > np.finfo(np.float32).max:
        raise ValueError("expected values within the range of 32-bit floats, got larger ones")
    data = array("f")
    data.frombytes(events.values.astype(np.float32).tobytes())
    ranges = {f"p{j + 1}r": str(int(max(top, 0)) + 1) for j, top in enumerate(events.values.max(axis=0))}
    with path.open("wb") as stream:
        flowio.create_fcs(stream, data, list(events.channels), list(markers) if markers else None, ranges | metadata)


def _parse_text(path: Path, content: bytes) -> tuple[dict, dict[str, str]]:
    """HEADER and TEXT segments (keywords in lower case, without $), with the kinds of file that are refused."""
    if not content.startswith(b"FCS"):
        raise ValueError(f"{path} is not an FCS file (it does not begin with 'FCS'); export it as FCS 3.1")
    try:
        flow = flowio.FlowData(io.BytesIO(content), only_text=True, use_header_offsets=True)
    except MultipleDataSetsError as error:
        raise ValueError(f"{path} holds several data sets; export one data set a file") from error
    except KeyError as error:
        raise ValueError(f"{path} lacks the keyword ${str(error.args[0]).upper()}; export it again") from error
    except (FlowIOException, ValueError, LookupError, EOFError, OverflowError, re.error) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is damaged or not an FCS file ({reason}); export it again") from error
    return flow.header, flow.text


def _decode(content: bytes, header: dict, text: dict[str, str]) -> np.ndarray:
    """Events (n, p) of the DATA segment, float64, on the linear scale."""
    n, p = int(text["tot"]), int(text["par"])
    mode, kind = text["mode"].strip().upper(), text["datatype"].strip().upper()
    if n < 1 or p < 1:
        raise ValueError(f"expected events and channels, got $TOT = {n}, $PAR = {p}")
    if mode != "L":
        raise ValueError(f"expected list mode ($MODE L), got {mode}")
    if any(text.get(f"p{j}datatype", kind).strip().upper() != kind for j in range(1, p + 1)):
        raise ValueError("expected one data type for all channels, got several ($PnDATATYPE)")
    bits = [int(text[f"p{j}b"]) for j in range(1, p + 1)]
    allowed = {"I": (8, 16, 32, 64), "F": (32,), "D": (64,)}.get(kind, ())
    if not set(bits) <= set(allowed):
        raise ValueError(
            f"expected $DATATYPE I (8 to 64 bits), F (32) or D (64), got {kind} with $PnB {sorted(set(bits))}"
        )
    order = [int(digit) for digit in text["byteord"].split(",")]
    if order not in (sorted(order), sorted(order, reverse=True)):
        raise ValueError(f"expected $BYTEORD ascending or descending, got {text['byteord']}")
    end = "<" if order == sorted(order) else ">"
    code = "u" if kind == "I" else "f"
    record = np.dtype([(str(j), f"{end}{code}{width // 8}") for j, width in enumerate(bits)])
    start = _data_start(header, text, n * record.itemsize, len(content))
    stored = np.frombuffer(content, record, count=n, offset=start)

    values = np.empty((n, p))
    for j in range(p):
        column = stored[str(j)]
        top = float(text[f"p{j + 1}r"])
        if kind == "I":
            column = column & np.asarray(_mask(int(top), bits[j]), dtype=column.dtype)
        values[:, j] = column
        decades, offset = (float(part) for part in text.get(f"p{j + 1}e", "0,0").split(","))
        gain = float(text.get(f"p{j + 1}g", "1"))
        if decades > 0:
            with np.errstate(all="ignore"):  # Events names the channel of a value that is not finite
                values[:, j] = 10.0 ** (decades * values[:, j] / top) * (offset or 1.0)
        if gain not in (0.0, 1.0):
            values[:, j] /= gain
    return values


def _data_start(header: dict, text: dict[str, str], needed: int, size: int) -> int:
    """Where DATA begins: of the offsets in TEXT and HEADER the first pair that holds the bytes needed.

    An end one byte too far (exclusive instead of inclusive) is a common slip and passes.
    """
    places = [(header["data_start"], header["data_stop"])]
    if "begindata" in text and "enddata" in text:
        places.insert(0, (int(text["begindata"]), int(text["enddata"])))
    for start, stop in places:
        if stop - start + 1 - needed in (0, 1) and 0 < start <= size - needed:
            return start
    lengths = " or ".join(str(stop - start + 1) for start, stop in places)
    raise ValueError(f"expected {needed} bytes of data ($TOT events of $PAR channels), got a segment of {lengths}")


def _mask(top: int, bits: int) -> int:
    """Integers use only the bits below their range $PnR, rounded up to a power of two."""
    return (1 << min(bits, max(top - 1, 0).bit_length())) - 1


def _parse_spillover(path: Path, keyword: str, value: str, detectors: list[str]) -> tuple[list[int], np.ndarray]:
    """Columns and matrix (k, k) of "k, k names, k² numbers row by row"."""
    label = f"{keyword.upper()} of {path}"
    advice = "correct the file or use compensate='never'"
    parts = [part.strip() for part in value.strip(" \0").split(",")]
    if not parts[0].isdecimal() or int(parts[0]) < 1:
        raise ValueError(f"expected {label} to begin with the number of channels, got {parts[0]!r}; {advice}")
    k = int(parts[0])
    if keyword == "comp" and len(parts) == 1 + k * k:
        raise ValueError(
            f"{label} names no channels, so that its meaning is not certain; export the file with $SPILLOVER or use "
            "compensate='never'"
        )
    if len(parts) != 1 + k + k * k:
        raise ValueError(
            f"expected {label} to hold {k} names and {k * k} numbers, got {len(parts) - 1} entries; {advice}"
        )
    try:
        spillover = np.array([float(part) for part in parts[1 + k :]]).reshape(k, k)
        named = find_channels(parts[1 : 1 + k], [(name,) for name in detectors], label)
    except ValueError as error:
        raise ValueError(f"{label} cannot be used: {error}; {advice}") from error
    if not np.isfinite(spillover).all() or np.linalg.cond(spillover) > 1e8:
        raise ValueError(f"expected a finite, invertible matrix in {label}, got {spillover.tolist()}; {advice}")
    return named, spillover


def _fluorescence(path: Path, detectors: list[str], markers: list[str]) -> tuple[list[int], list[str]]:
    """Columns of the fluorescence channels, and their labels: markers as far as they are distinct, else detectors."""
    columns = [j for j, name in enumerate(detectors) if not _NOT_FLUORESCENCE.match(name)]
    if not columns:
        raise ValueError(f"{path} has no fluorescence channel; name the channels to read: {', '.join(detectors)}")
    labels = [markers[j] or detectors[j] for j in columns]
    return columns, labels if len(set(labels)) == len(labels) else [detectors[j] for j in columns]


def _as_spelt(name: str, own: tuple[str, ...]) -> str:
    """The one of a channel's own names that `name` means."""
    return name if name in own else next(spelt for spelt in own if spelt.casefold() == name.strip().casefold())
