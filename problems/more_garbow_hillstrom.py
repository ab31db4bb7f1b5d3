"""The collection of Moré, Garbow and Hillstrom: 35 functions f(x) = Σ r_i(x)², with their starts and minimal values.

"Testing unconstrained optimization software", ACM Trans. Math. Softw. 7 (1981) 17-41. Starts and minima are those
printed there; where n is free it is given here. The residuals are in `least_squares.py`.
"""

from collections.abc import Callable

import torch

from ot_newton.problems import least_squares as ls
from ot_newton.problems.benchmark import Benchmark

SOURCE = "Moré, Garbow and Hillstrom 1981"
M = ls.LINEAR_RESIDUALS

Residuals = Callable[[torch.Tensor], torch.Tensor]


class SumOfSquares:
    """x ↦ Σ r_i(x)² for a function r."""

    def __init__(self, residuals: Residuals) -> None:
        self.residuals = residuals

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        r = self.residuals(x)
        return r @ r


def _entry(number: int, residuals: Residuals, start: tuple[float, ...], *minima: float) -> Benchmark:
    name = {21: "extended_rosenbrock", 22: "extended_powell_singular"}.get(number, residuals.__name__)
    return Benchmark(name, SumOfSquares(residuals), start, minima, number, SOURCE)


MORE_GARBOW_HILLSTROM: tuple[Benchmark, ...] = (
    _entry(1, ls.rosenbrock, (-1.2, 1.0), 0.0),
    _entry(2, ls.freudenstein_roth, (0.5, -2.0), 0.0, 48.9842),
    _entry(3, ls.powell_badly_scaled, (0.0, 1.0), 0.0),
    _entry(4, ls.brown_badly_scaled, (1.0, 1.0), 0.0),
    _entry(5, ls.beale, (1.0, 1.0), 0.0),
    _entry(6, ls.jennrich_sampson, (0.3, 0.4), 124.362),
    _entry(7, ls.helical_valley, (-1.0, 0.0, 0.0), 0.0),
    _entry(8, ls.bard, (1.0, 1.0, 1.0), 8.21487e-3),
    _entry(9, ls.gaussian, (0.4, 1.0, 0.0), 1.12793e-8),
    _entry(10, ls.meyer, (0.02, 4000.0, 250.0), 87.9458),
    _entry(11, ls.gulf_research, (5.0, 2.5, 0.15), 0.0),
    _entry(12, ls.box_3d, (0.0, 10.0, 20.0), 0.0),
    _entry(13, ls.powell_singular, (3.0, -1.0, 0.0, 1.0), 0.0),
    _entry(14, ls.wood, (-3.0, -1.0, -3.0, -1.0), 0.0),
    _entry(15, ls.kowalik_osborne, (0.25, 0.39, 0.415, 0.39), 3.07505e-4),
    _entry(16, ls.brown_dennis, (25.0, 5.0, -5.0, -1.0), 85822.2),
    _entry(17, ls.osborne_1, (0.5, 1.5, -1.0, 0.01, 0.02), 5.46489e-5),
    _entry(18, ls.biggs_exp6, (1.0, 2.0, 1.0, 1.0, 1.0, 1.0), 0.0, 5.65565e-3),
    _entry(19, ls.osborne_2, (1.3, 0.65, 0.65, 0.7, 0.6, 3.0, 5.0, 7.0, 2.0, 4.5, 5.5), 4.01377e-2),
    _entry(20, ls.watson, (0.0,) * 6, 2.28767e-3),
    _entry(21, ls.rosenbrock, (-1.2, 1.0) * 10, 0.0),
    _entry(22, ls.powell_singular, (3.0, -1.0, 0.0, 1.0) * 5, 0.0),
    _entry(23, ls.penalty_1, tuple(float(i) for i in range(1, 11)), 7.08765e-5),
    _entry(24, ls.penalty_2, (0.5,) * 10, 2.93660e-4),
    _entry(25, ls.variably_dimensioned, tuple(1 - i / 10 for i in range(1, 11)), 0.0),
    _entry(26, ls.trigonometric, (0.1,) * 10, 0.0, 2.79506e-5),
    _entry(27, ls.brown_almost_linear, (0.5,) * 10, 0.0, 1.0),
    _entry(28, ls.discrete_boundary_value, tuple(i / 11 * (i / 11 - 1) for i in range(1, 11)), 0.0),
    _entry(29, ls.discrete_integral_equation, tuple(i / 11 * (i / 11 - 1) for i in range(1, 11)), 0.0),
    _entry(30, ls.broyden_tridiagonal, (-1.0,) * 10, 0.0),
    _entry(31, ls.broyden_banded, (-1.0,) * 10, 0.0),
    _entry(32, ls.linear_full_rank, (1.0,) * 10, M - 10.0),
    _entry(33, ls.linear_rank_1, (1.0,) * 10, M * (M - 1) / (2 * (2 * M + 1))),
    _entry(34, ls.linear_rank_1_zeros, (1.0,) * 10, (M**2 + 3 * M - 6) / (2 * (2 * M - 3))),
    _entry(35, ls.chebyquad, tuple(i / 9 for i in range(1, 9)), 3.51687e-3),
)
