"""The residuals r(x) of the 35 functions f(x) = Σ r_i(x)² of Moré, Garbow and Hillstrom.

"Testing unconstrained optimization software", ACM Trans. Math. Softw. 7 (1981) 17-41; the functions are named and
ordered as there. Each maps a point (n,) to residuals (m,) in the dtype and on the device of the point.
"""

from math import pi, sqrt

import torch
from torch import Tensor, exp

_BARD = (0.14, 0.18, 0.22, 0.25, 0.29, 0.32, 0.35, 0.39, 0.37, 0.58, 0.73, 0.96, 1.34, 2.10, 4.39)
_GAUSSIAN = (0.0009, 0.0044, 0.0175, 0.0540, 0.1295, 0.2420, 0.3521, 0.3989)
_MEYER = (34780, 28610, 23650, 19630, 16370, 13720, 11540, 9744, 8261, 7030, 6005, 5147, 4427, 3820, 3307, 2872)
_KOWALIK_Y = (0.1957, 0.1947, 0.1735, 0.1600, 0.0844, 0.0627, 0.0456, 0.0342, 0.0323, 0.0235, 0.0246)
_KOWALIK_U = (4.0, 2.0, 1.0, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625)
_OSBORNE_1 = (
    0.844, 0.908, 0.932, 0.936, 0.925, 0.908, 0.881, 0.850, 0.818, 0.784, 0.751, 0.718, 0.685, 0.658, 0.628, 0.603,
    0.580, 0.558, 0.538, 0.522, 0.506, 0.490, 0.478, 0.467, 0.457, 0.448, 0.438, 0.431, 0.424, 0.420, 0.414, 0.411,
    0.406,
)  # fmt: skip
_OSBORNE_2 = (
    1.366, 1.191, 1.112, 1.013, 0.991, 0.885, 0.831, 0.847, 0.786, 0.725, 0.746, 0.679, 0.608, 0.655, 0.616, 0.606,
    0.602, 0.626, 0.651, 0.724, 0.649, 0.649, 0.694, 0.644, 0.624, 0.661, 0.612, 0.558, 0.533, 0.495, 0.500, 0.423,
    0.395, 0.375, 0.372, 0.391, 0.396, 0.405, 0.428, 0.429, 0.523, 0.562, 0.607, 0.653, 0.672, 0.708, 0.633, 0.668,
    0.645, 0.632, 0.591, 0.559, 0.597, 0.625, 0.739, 0.710, 0.729, 0.720, 0.636, 0.581, 0.428, 0.292, 0.162, 0.098,
    0.054,
)  # fmt: skip


def _count(x: Tensor, last: int, first: int = 1) -> Tensor:
    """first, …, last as numbers of the kind of x."""
    return torch.arange(first, last + 1, dtype=x.dtype, device=x.device)


def rosenbrock(x: Tensor) -> Tensor:  # also the extended one, in pairs
    odd, even = x[::2], x[1::2]
    return torch.cat([10 * (even - odd**2), 1 - odd])


def freudenstein_roth(x: Tensor) -> Tensor:
    a, b = x
    return torch.stack([-13 + a + ((5 - b) * b - 2) * b, -29 + a + ((b + 1) * b - 14) * b])


def powell_badly_scaled(x: Tensor) -> Tensor:
    return torch.stack([1e4 * x[0] * x[1] - 1, exp(-x[0]) + exp(-x[1]) - 1.0001])


def brown_badly_scaled(x: Tensor) -> Tensor:
    return torch.stack([x[0] - 1e6, x[1] - 2e-6, x[0] * x[1] - 2])


def beale(x: Tensor) -> Tensor:
    return x.new_tensor([1.5, 2.25, 2.625]) - x[0] * (1 - x[1] ** _count(x, 3))


def jennrich_sampson(x: Tensor) -> Tensor:
    i = _count(x, 10)
    return 2 + 2 * i - exp(i * x[0]) - exp(i * x[1])


def helical_valley(x: Tensor) -> Tensor:
    turn = 0.25 - torch.atan2(x[0], x[1]) / (2 * pi)  # cut where x₁ = 0, x₂ < 0
    return torch.stack([10 * (x[2] - 10 * turn), 10 * (x[:2].norm() - 1), x[2]])


def bard(x: Tensor) -> Tensor:
    u = _count(x, 15)
    v = 16 - u
    return x.new_tensor(_BARD) - x[0] - u / (v * x[1] + torch.minimum(u, v) * x[2])


def gaussian(x: Tensor) -> Tensor:
    t = (8 - _count(x, 15)) / 2
    return x[0] * exp(-x[1] * (t - x[2]) ** 2 / 2) - x.new_tensor(_GAUSSIAN + _GAUSSIAN[-2::-1])


def meyer(x: Tensor) -> Tensor:
    return x[0] * exp(x[1] / (45 + 5 * _count(x, 16) + x[2])) - x.new_tensor(_MEYER)


def gulf_research(x: Tensor) -> Tensor:
    t = _count(x, 99) / 100
    y = 25 + (-50 * t.log()) ** (2 / 3)
    return exp(-((y - x[1]).abs() ** x[2]) / x[0]) - t


def box_3d(x: Tensor) -> Tensor:
    t = _count(x, 10) / 10
    return exp(-t * x[0]) - exp(-t * x[1]) - x[2] * (exp(-t) - exp(-10 * t))


def powell_singular(x: Tensor) -> Tensor:  # also the extended one, in fours
    a, b, c, d = x.reshape(-1, 4).T
    return torch.cat([a + 10 * b, sqrt(5) * (c - d), (b - 2 * c) ** 2, sqrt(10) * (a - d) ** 2])


def wood(x: Tensor) -> Tensor:
    a, b, c, d = x
    pairs = [10 * (b - a**2), 1 - a, sqrt(90) * (d - c**2), 1 - c]
    return torch.stack([*pairs, sqrt(10) * (b + d - 2), (b - d) / sqrt(10)])


def kowalik_osborne(x: Tensor) -> Tensor:
    u = x.new_tensor(_KOWALIK_U)
    return x.new_tensor(_KOWALIK_Y) - x[0] * (u**2 + u * x[1]) / (u**2 + u * x[2] + x[3])


def brown_dennis(x: Tensor) -> Tensor:
    t = _count(x, 20) / 5
    return (x[0] + t * x[1] - exp(t)) ** 2 + (x[2] + x[3] * t.sin() - t.cos()) ** 2


def osborne_1(x: Tensor) -> Tensor:
    t = 10 * _count(x, 32, first=0)
    return x.new_tensor(_OSBORNE_1) - x[0] - x[1] * exp(-t * x[3]) - x[2] * exp(-t * x[4])


def biggs_exp6(x: Tensor) -> Tensor:
    t = _count(x, 13) / 10
    y = exp(-t) - 5 * exp(-10 * t) + 3 * exp(-4 * t)
    return x[2] * exp(-t * x[0]) - x[3] * exp(-t * x[1]) + x[5] * exp(-t * x[4]) - y


def osborne_2(x: Tensor) -> Tensor:
    t = _count(x, 64, first=0) / 10
    bumps = x[1:4, None] * exp(-((t - x[8:, None]) ** 2) * x[5:8, None])  # (3, 65)
    return x.new_tensor(_OSBORNE_2) - x[0] * exp(-t * x[4]) - bumps.sum(0)


def watson(x: Tensor) -> Tensor:
    t = _count(x, 29)[:, None] / 29
    j = _count(x, len(x) - 1, first=0)
    slope = (j[1:] * t ** j[:-1]) @ x[1:]
    return torch.cat([slope - (t**j @ x) ** 2 - 1, x[:1], x[1:2] - x[:1] ** 2 - 1])


def penalty_1(x: Tensor) -> Tensor:
    return torch.cat([sqrt(1e-5) * (x - 1), (x @ x - 0.25)[None]])


def penalty_2(x: Tensor) -> Tensor:
    i, small = _count(x, len(x)), sqrt(1e-5)
    e, wanted = exp(x / 10), exp(i / 10)
    pairs = small * (e[1:] + e[:-1] - wanted[1:] - wanted[:-1])
    return torch.cat([x[:1] - 0.2, pairs, small * (e[1:] - exp(-i.new_tensor(0.1))), (i.flip(0) @ x**2 - 1)[None]])


def variably_dimensioned(x: Tensor) -> Tensor:
    total = _count(x, len(x)) @ (x - 1)
    return torch.cat([x - 1, torch.stack([total, total**2])])


def trigonometric(x: Tensor) -> Tensor:
    return len(x) - x.cos().sum() + _count(x, len(x)) * (1 - x.cos()) - x.sin()


def brown_almost_linear(x: Tensor) -> Tensor:
    return torch.cat([x[:-1] + x.sum() - (len(x) + 1), (x.prod() - 1)[None]])


def discrete_boundary_value(x: Tensor) -> Tensor:
    h = 1 / (len(x) + 1)
    around = torch.nn.functional.pad(x, (1, 1))
    return 2 * x - around[:-2] - around[2:] + h**2 * (x + h * _count(x, len(x)) + 1) ** 3 / 2


def discrete_integral_equation(x: Tensor) -> Tensor:
    h = 1 / (len(x) + 1)
    t = h * _count(x, len(x))
    kernel = torch.minimum(t[:, None], t) * (1 - torch.maximum(t[:, None], t))  # Green's function of −u″
    return x + h / 2 * kernel @ (x + t + 1) ** 3


def broyden_tridiagonal(x: Tensor) -> Tensor:
    around = torch.nn.functional.pad(x, (1, 1))
    return (3 - 2 * x) * x - around[:-2] - 2 * around[2:] + 1


def broyden_banded(x: Tensor) -> Tensor:
    i = _count(x, len(x))
    offset = i - i[:, None]  # column − row
    band = ((offset >= -5) & (offset <= 1) & (offset != 0)).to(x)
    return x * (2 + 5 * x**2) + 1 - band @ (x * (1 + x))


LINEAR_RESIDUALS = 20


def linear_full_rank(x: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(x, (0, LINEAR_RESIDUALS - len(x)))
    return padded - 2 / LINEAR_RESIDUALS * x.sum() - 1


def linear_rank_1(x: Tensor) -> Tensor:
    return _count(x, LINEAR_RESIDUALS) * (_count(x, len(x)) @ x) - 1


def linear_rank_1_zeros(x: Tensor) -> Tensor:  # the first and last rows and columns are zero
    inner = _count(x, LINEAR_RESIDUALS - 2) * (_count(x, len(x) - 1, first=2) @ x[1:-1])
    return torch.nn.functional.pad(inner, (1, 1)) - 1


def chebyquad(x: Tensor) -> Tensor:
    z = 2 * x - 1  # Chebyshev polynomials, shifted to [0, 1]
    before, now, means = torch.ones_like(z), z, []
    for i in range(1, len(x) + 1):
        means.append(now.mean() + (1 / (i**2 - 1) if i % 2 == 0 else 0))
        before, now = now, 2 * z * now - before
    return torch.stack(means)
