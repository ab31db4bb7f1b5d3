"""From linear fluorescence to standardised points, and a regression between them back to the scale of the file.

    t = arcsinh(x / cofactor),   u = t clipped to mean(t) ± clip · sd(t),   z = (u − mean(u)) / sd(u)     by channel

arcsinh is linear near zero and logarithmic far away, so that the negative values that compensation leaves do no harm.
Clipping comes first, so that z has mean 0 and standard deviation 1 exactly, however far the debris lies.
"Arcsinh units" below are t; without a cofactor t = x and they are the raw units of the file.

Reference: Finak, Perez, Weng, Gottardo, "Optimizing transformations for automated, high throughput analysis of flow
cytometry data", BMC Bioinformatics 11:546 (2010).
"""

from dataclasses import dataclass

import numpy as np
import torch

from ot_newton.problems.events import Events


@dataclass(frozen=True)
class Preprocess:
    """How to turn measured values into points; `fit` learns bounds, mean and standard deviation.

    Args:
        cofactor: the value where arcsinh turns from linear to logarithmic, or None to keep the values linear. 3000
            suits a 20-bit linear scale, 150 is usual on an 18-bit scale, 5 for mass cytometry.
        clip: farthest distance from the mean in standard deviations (both of the unclipped t), or None. A few far
            outliers otherwise decompose the transport plan.
        standardise: whether points have mean 0 and standard deviation 1 in each channel.

    Raises:
        ValueError: for a cofactor or a clip that is not positive and finite.
    """

    cofactor: float | None = 3000.0
    clip: float | None = 5.0
    standardise: bool = True

    def __post_init__(self) -> None:
        for name in ("cofactor", "clip"):
            value = getattr(self, name)
            if value is not None and not (np.isfinite(value) and value > 0):
                raise ValueError(f"expected {name} > 0 and finite, or None, got {value}")

    def fit(self, data: Events | np.ndarray) -> "Scaler":
        """Bounds of the clipping, mean and standard deviation (divisor n) of each channel, in arcsinh units.

        Args:
            data: events, or their (n, p) values.

        Raises:
            ValueError: for another shape, values that are not finite, or a constant channel.
        """
        values = _rows(data.values if isinstance(data, Events) else data)
        t = _forward(values, self.cofactor)
        constant = np.flatnonzero(np.ptp(t, axis=0) == 0)
        if constant.size:
            names = data.channels if isinstance(data, Events) else [f"column {j}" for j in range(values.shape[1])]
            raise ValueError(
                "expected channels that vary, got a constant one: "
                f"{', '.join(names[j] for j in constant)}; leave it out or give more events"
            )
        reach = np.inf if self.clip is None else self.clip * t.std(axis=0)
        lower, upper = t.mean(axis=0) - reach, t.mean(axis=0) + reach
        clipped = np.clip(t, lower, upper)
        return Scaler(self, lower, upper, clipped.mean(axis=0), clipped.std(axis=0))


@dataclass(frozen=True, eq=False)
class Scaler:
    """A fitted `Preprocess`. All four arrays are (p,), in arcsinh units.

    Args:
        preprocess: what was fitted.
        lower, upper: bounds of the clipping, infinite for none.
        mean, sd: mean and standard deviation of the clipped values.

    >>> values = np.array([[100.0], [2000.0], [90000.0]])
    >>> scaler = Preprocess(cofactor=150.0).fit(values)
    >>> np.allclose(scaler.inverse(scaler.transform(values)), values)
    True
    """

    preprocess: Preprocess
    lower: np.ndarray
    upper: np.ndarray
    mean: np.ndarray
    sd: np.ndarray

    @property
    def shift(self) -> np.ndarray:
        """(p,) such that t = point · scale + shift."""
        return self.mean if self.preprocess.standardise else np.zeros_like(self.mean)

    @property
    def scale(self) -> np.ndarray:
        """(p,) such that t = point · scale + shift."""
        return self.sd if self.preprocess.standardise else np.ones_like(self.sd)

    @property
    def units(self) -> str:
        """The units that `unscale_regression` leads back to, for a report."""
        cofactor = self.preprocess.cofactor
        return "raw" if cofactor is None else f"arcsinh(raw / {cofactor:g})"

    def transform(self, data: Events | np.ndarray) -> np.ndarray:
        """Points (n, p), float64, of measured values (n, p)."""
        values = _rows(data.values if isinstance(data, Events) else data, len(self.mean))
        t = _forward(values, self.preprocess.cofactor)
        return (np.clip(t, self.lower, self.upper) - self.shift) / self.scale

    def inverse(self, points: np.ndarray) -> np.ndarray:
        """Measured values (n, p) of points (n, p); exact up to rounding for every value that was not clipped."""
        t = _rows(points, len(self.mean)) * self.scale + self.shift
        cofactor = self.preprocess.cofactor
        return t if cofactor is None else cofactor * np.sinh(t)


def unscale_regression(
    W: torch.Tensor | np.ndarray, intercept: torch.Tensor | np.ndarray | None, x_scaler: Scaler, y_scaler: Scaler
) -> tuple[np.ndarray, np.ndarray]:
    """Carry a regression between points back to arcsinh units (raw units for a scaler without a cofactor).

    With points z = (t − m) / s on either side, the rows

        z_y = z_x W + b      ⇔      t_y = t_x W' + b',     W' = diag(1/s_x) W diag(s_y),   b' = m_y + b ∘ s_y − m_x W'

    so W'[i, j] is the change of channel j of Y, in its arcsinh units, for one arcsinh unit of channel i of X. With a
    cofactor c a raw prediction is c_y · sinh(arcsinh(x / c_x) W' + b'). Clipping is no part of the map.

    Args:
        W: (p, q), row vectors times W.
        intercept: (q,), or None for none.
        x_scaler: fitted on X, p channels.
        y_scaler: fitted on Y, q channels.

    Returns:
        W' (p, q) and b' (q,), numpy float64.

    Raises:
        ValueError: when a shape does not fit the scalers.
    """
    weight = _numpy(W)
    p, q = len(x_scaler.mean), len(y_scaler.mean)
    if weight.shape != (p, q):
        raise ValueError(f"expected W of shape {(p, q)}, got {weight.shape}")
    b = np.zeros(q) if intercept is None else _numpy(intercept)
    if b.shape != (q,):
        raise ValueError(f"expected an intercept of shape {(q,)}, got {b.shape}")
    raw = weight * y_scaler.scale / x_scaler.scale[:, None]  # (p, q)
    return raw, y_scaler.shift + b * y_scaler.scale - x_scaler.shift @ raw


def _forward(values: np.ndarray, cofactor: float | None) -> np.ndarray:
    return values if cofactor is None else np.arcsinh(values / cofactor)


def _rows(values: np.ndarray, p: int | None = None) -> np.ndarray:
    """`values` as float64, checked to be finite and (n, p)."""
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 2 or 0 in values.shape or (p is not None and values.shape[1] != p):
        raise ValueError(f"expected values of shape (n, {'p' if p is None else p}) with n ≥ 1, got {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("expected finite values, got NaN or infinity")
    return values


def _numpy(array: torch.Tensor | np.ndarray) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu().numpy()
    return np.asarray(array, dtype=np.float64)
