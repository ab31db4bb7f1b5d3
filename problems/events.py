"""Events of a cytometer as a table, with channels found by name and samples by pattern."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np


@dataclass(frozen=True, eq=False)
class Events:
    """Measured events (cells): one row an event, one column a channel.

    Args:
        values: (n, p) float64, finite, n ≥ 1, p ≥ 1; as the file means them (linear scale, no arcsinh).
        channels: the p channel names, distinct.
        sample: (n,) text, the sample that each event belongs to.
        source: where the events come from and what was done to them, in a few words.

    Raises:
        ValueError: for a wrong shape, a value that is not finite, or channel names that are empty or repeated.

    >>> events = Events(np.array([[1.0, 2.0], [3.0, 4.0]]), ("CD4", "CD8"), np.array(["tube", "tube"]), "by hand")
    >>> len(events), events.samples, events.select_channels(["cd8"]).values.tolist()
    (2, ('tube',), [[2.0], [4.0]])
    """

    values: np.ndarray
    channels: tuple[str, ...]
    sample: np.ndarray
    source: str

    def __post_init__(self) -> None:
        values = np.asarray(self.values, dtype=np.float64)
        channels, sample = tuple(self.channels), np.asarray(self.sample, dtype=np.str_)
        if values.ndim != 2 or 0 in values.shape:
            raise ValueError(f"expected values of shape (n, p) with n, p ≥ 1, got {values.shape} ({self.source})")
        if len(channels) != values.shape[1] or not all(name.strip() for name in channels):
            raise ValueError(f"expected {values.shape[1]} channel names, got {channels} ({self.source})")
        if len(set(channels)) != len(channels):
            raise ValueError(f"expected distinct channel names, got {channels} ({self.source})")
        if sample.shape != (len(values),):
            raise ValueError(f"expected one sample name for each of {len(values)} events, got shape {sample.shape}")
        bad = ~np.isfinite(values)
        if bad.any():
            counts = {name: int(n) for name, n in zip(channels, bad.sum(axis=0), strict=True) if n}
            raise ValueError(
                f"expected finite numbers, got missing or infinite values (count by channel: {counts}) in "
                f"{self.source}; remove those events or leave those channels out"
            )
        for name, value in (("values", values), ("channels", channels), ("sample", sample)):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def samples(self) -> tuple[str, ...]:
        """The distinct samples, in order of first appearance."""
        names, first = np.unique(self.sample, return_index=True)
        return tuple(str(name) for name in names[np.argsort(first)])

    def take(self, rows: np.ndarray) -> "Events":
        """The events at `rows` (indices, or a boolean mask), in that order."""
        return replace(self, values=self.values[rows], sample=self.sample[rows])

    def select_channels(self, channels: Sequence[str]) -> "Events":
        """Only `channels`, in that order; names match as in `find_channels`."""
        columns = find_channels(channels, [(name,) for name in self.channels], self.source)
        return replace(self, values=self.values[:, columns], channels=tuple(self.channels[j] for j in columns))

    def select_samples(self, patterns: str | Sequence[str]) -> "Events":
        """Only the samples that match one of `patterns` (shell style: `*`, `?`, `[…]`), in their present order.

        Raises:
            ValueError: when a pattern matches no sample; the message lists the samples.
        """
        patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        for pattern in patterns or ("",):
            if not any(fnmatchcase(name, pattern) for name in self.samples):
                raise ValueError(
                    f"expected a pattern that matches a sample, got {pattern!r}; samples: {', '.join(self.samples)}"
                )
        kept = [name for name in self.samples if any(fnmatchcase(name, pattern) for pattern in patterns)]
        return self.take(np.isin(self.sample, kept))


def subsample(events: Events, n: int, seed: int | np.random.Generator) -> Events:
    """n distinct events, uniformly at random and in random order; the same seed gives the same events.

    Raises:
        ValueError: unless 1 ≤ n ≤ the number of events.
    """
    if not 1 <= n <= len(events):
        raise ValueError(f"expected 1 ≤ n ≤ {len(events)} events ({events.source}), got n = {n}")
    return events.take(np.random.default_rng(seed).choice(len(events), size=n, replace=False))


def find_channels(wanted: Sequence[str], names: Sequence[tuple[str, ...]], source: str) -> list[int]:
    """Index of each wanted channel among `names`, where each channel may go by several names.

    A name that matches exactly wins; otherwise case and outer blanks do not count.

    Raises:
        TypeError: when `wanted` is one string instead of a list of strings.
        ValueError: when a name is missing, fits several channels, or two names mean one channel; the message lists the
            channels at hand.
    """
    if isinstance(wanted, str) or not all(isinstance(name, str) for name in wanted):
        raise TypeError(f"expected a list of channel names, got {wanted!r}")
    listing = "available: " + ", ".join(_spell(own) for own in names if any(own))
    if not wanted:
        raise ValueError(f"expected at least one channel name, got none; {listing} ({source})")
    found = []
    for name in wanted:
        hits = [j for j, own in enumerate(names) if name in own]
        hits = hits or [j for j, own in enumerate(names) if _fold(name) in map(_fold, own)]
        if not hits:
            raise ValueError(f"channel {name!r} not found in {source}; {listing}")
        if len(hits) > 1:
            fits = ", ".join(_spell(names[j]) for j in hits)
            raise ValueError(f"channel {name!r} is ambiguous in {source}: it fits {fits}; {listing}")
        if hits[0] in found:
            raise ValueError(f"channel {name!r} is asked for twice in {source}; {listing}")
        found.append(hits[0])
    return found


def _fold(name: str) -> str:
    return name.strip().casefold()


def _spell(own: tuple[str, ...]) -> str:
    """'FITC-A (CD4)'."""
    first, *others = [name for name in own if name]
    return f"{first} ({', '.join(others)})" if others else first
