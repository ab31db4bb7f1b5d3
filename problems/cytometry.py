"""Flow cytometry: bundled cells of healthy donors, a user's own files, and points ready for a regression.

The bundled events are lymphocytes of three donors stained in five colours, from the Bioconductor package flowVS
(Artistic-2.0; `data/SOURCE.md` says what was changed).

Reference: Azad, Rajwa, Pothen, "flowVS: channel-specific variance stabilization in flow cytometry", BMC Bioinformatics
17 (2016).
"""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ot_newton.problems.events import Events, subsample
from ot_newton.problems.fcs import read_fcs, write_fcs
from ot_newton.problems.preprocess import Preprocess, Scaler, unscale_regression
from ot_newton.problems.tables import SUFFIXES, read_table

__all__ = [
    "Events",
    "Preprocess",
    "Scaler",
    "cytometry_points",
    "load_events",
    "load_healthy_donors",
    "subsample",
    "unscale_regression",
    "write_fcs",
]


def load_healthy_donors(samples: str | Sequence[str] | None = None, channels: Sequence[str] | None = None) -> Events:
    """The bundled real data: 76 671 lymphocytes, channels CD4, CD8, CD19, CD45, CD3, linear 20-bit scale, compensated.

    Samples are named donor_day_replicate: donors A, C, D, two days each, two replicates a day. The replicates differ in
    gain, the donors in their share of B cells.

    Args:
        samples: patterns of sample names to keep, such as "A_1_*" or ["A_*", "D_2_*"]; None for all twelve.
        channels: names of channels to keep, in this order; None for all five.

    Raises:
        ValueError: when a pattern or a name matches nothing; the message lists what there is.

    >>> events = load_healthy_donors("A_1_*")
    >>> events.values.shape, events.samples
    ((14655, 5), ('A_1_1', 'A_1_2'))
    """
    resource = files("ot_newton.problems").joinpath("data", "healthy_donor_lymphocytes.npz")
    with resource.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
        events = Events(
            stored["X"].astype(np.float64),
            tuple(map(str, stored["channels"])),
            stored["samples"][stored["sample"]],
            "healthy donors (flowVS), compensated",
        )
    if samples is not None:
        events = events.select_samples(samples)
    return events if channels is None else events.select_channels(channels)


def load_events(
    path: str | Path,
    channels: Sequence[str] | None = None,
    *,
    compensate: Literal["auto", "always", "never"] = "auto",
) -> Events:
    """Events of a user's own file: FCS (.fcs), or a table with a header line (.csv, .tsv, .txt).

    Args:
        path: the file; its name without suffix becomes the sample name.
        channels: channels to read, in this order, by detector ($PnN) or marker ($PnS) name, whatever the case; None for
            every channel of the file except scatter, time, pulse width and event number.
        compensate: for FCS files, whether to undo the spillover by the matrix stored in the file: "auto" if there is
            one, "always" to insist, "never". `Events.source` says what was done.

    Raises:
        FileNotFoundError: when there is no such file.
        TypeError: when `channels` is one string instead of a list of strings.
        ValueError: when the file is empty, damaged or of another kind, a channel is missing, ambiguous or not numeric,
            a value is missing, or the spillover matrix is malformed. Each message says what to do.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write_fcs(f"{folder}/tube.fcs", load_healthy_donors("A_1_1"))
    ...     events = load_events(f"{folder}/tube.fcs", ["cd4", "cd8"])
    >>> events.values.shape, events.channels, events.samples
    ((7580, 2), ('CD4', 'CD8'), ('tube',))
    """
    path = Path(path)
    if compensate not in ("auto", "always", "never"):
        raise ValueError(f"expected compensate 'auto', 'always' or 'never', got {compensate!r}")
    if path.suffix.lower() not in (".fcs", *SUFFIXES):
        raise ValueError(f"expected a file that ends in .fcs, {', '.join(SUFFIXES)}, got {path}")
    if not path.exists():
        raise FileNotFoundError(f"no file {path}; check the path (working directory: {Path.cwd()})")
    if not path.is_file():
        raise ValueError(f"expected a file, got the folder {path}; name one file in it")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty; export it again")
    if path.suffix.lower() == ".fcs":
        return read_fcs(path, channels, compensate=compensate)
    if compensate == "always":
        raise ValueError(f"{path} is a table and holds no spillover matrix; use compensate='auto' or an FCS file")
    return read_table(path, channels)


def cytometry_points(
    n: int,
    seed: int,
    *,
    samples: str | Sequence[str] | None = None,
    cofactor: float | None = 3000.0,
    clip: float | None = 5.0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """n random cells of the healthy donors as points (n, 5): arcsinh(·/cofactor), clipped, z-scored over these n.

    Args:
        n: number of cells, at most 76 671 (or what `samples` leaves).
        seed: the same seed gives the same cells.
        samples: patterns as in `load_healthy_donors`; None pools all samples.
        cofactor, clip: as in `Preprocess`.
        dtype, device: of the returned tensor.

    Raises:
        TypeError: for a dtype that is not floating.
        ValueError: for an n out of range or a pattern that matches nothing.

    >>> cytometry_points(1000, seed=0).shape
    torch.Size([1000, 5])
    """
    if not dtype.is_floating_point:
        raise TypeError(f"expected a floating dtype, got {dtype}")
    events = subsample(load_healthy_donors(samples), n, seed)
    points = Preprocess(cofactor, clip).fit(events).transform(events)
    return torch.as_tensor(points, dtype=dtype, device=device)
