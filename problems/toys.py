"""Small functions whose gradients, Hessians and minimisers are known in closed form.

Each is a `Toy`, a `Problem` with `minimisers`, a tensor (k, size) of all global minimisers (None where they form a
continuum or do not exist), and `minimum`, the value there. Gradients and Hessians are written out, not differentiated,
so that they referee what is.
"""

from typing import Any

import torch

from ot_newton.problems.closed_form import Toy


class Quadratic(Toy):
    """½ (w − c)ᵀ A (w − c), A = Q diag(spectrum) Qᵀ with a random orthogonal Q. One minimiser c if A ≻ 0.

    Args:
        spectrum: the eigenvalues, any signs.
        centre: c; zero if None.
        seed: of Q; the identity if None.
        **options: of `Toy`; `x0` is all ones unless given.

    Example:

        >>> problem = Quadratic([1.0, 10.0, 100.0], seed=0)
        >>> torch.linalg.eigvalsh(problem.hessian(problem.centre).to_dense()).round()
        tensor([  1.,  10., 100.], dtype=torch.float64)
    """

    def __init__(self, spectrum: Any, *, centre: Any = None, seed: int | None = None, x0: Any = None, **options: Any):
        spectrum = torch.as_tensor(spectrum, dtype=torch.float64).reshape(-1)
        super().__init__(torch.ones(len(spectrum)) if x0 is None else x0, **options)
        if self.size != len(spectrum):
            raise ValueError(f"expected x0 with {len(spectrum)} entries, got {self.size}")
        self.spectrum = spectrum.to(self.device, self.dtype)
        Q = torch.eye(self.size, dtype=torch.float64)
        if seed is not None:
            rng = torch.Generator().manual_seed(seed)
            Q, _ = torch.linalg.qr(torch.randn(self.size, self.size, generator=rng, dtype=torch.float64))
        self.A = ((Q * spectrum) @ Q.T).to(self.device, self.dtype)
        self.centre = torch.zeros_like(self._start) if centre is None else self.tensor(centre)
        self.minimum = 0.0 if bool((spectrum >= 0).all()) else None

    @property
    def minimisers(self) -> torch.Tensor | None:
        """The centre, if A is positive definite."""
        return self.centre[None] if bool((self.spectrum > 0).all()) else None

    def _value(self, w: torch.Tensor) -> torch.Tensor:
        return 0.5 * (w - self.centre) @ (self.A @ (w - self.centre))

    def _grad(self, w: torch.Tensor) -> torch.Tensor:
        return self.A @ (w - self.centre)

    def _hessian(self, w: torch.Tensor) -> torch.Tensor:
        return self.A


class StrictSaddle(Toy):
    """x² − b y² + y⁴: a strict saddle at 0, minimisers (0, ±√(b/2)) of value −b²/4. The x axis leads into the saddle.

    Args:
        b: depth of the negative curvature, −2b.
        x0, **options: of `Toy`.
    """

    default_start = (1.0, 0.0)

    def __init__(self, x0: Any = None, *, b: float = 1.0, **options: Any) -> None:
        if not b > 0:
            raise ValueError(f"expected b > 0, got {b}")
        super().__init__(x0, **options)
        self.b = b
        self.minimum = -self.scale * b * b / 4

    @property
    def minimisers(self) -> torch.Tensor:
        """(0, ±√(b/2))."""
        y = (self.b / 2) ** 0.5
        return self.tensor([[0.0, y], [0.0, -y]])

    def _value(self, w: torch.Tensor) -> torch.Tensor:
        x, y = w
        return x**2 - self.b * y**2 + y**4

    def _grad(self, w: torch.Tensor) -> torch.Tensor:
        x, y = w
        return torch.stack([2 * x, -2 * self.b * y + 4 * y**3])

    def _hessian(self, w: torch.Tensor) -> torch.Tensor:
        return torch.diag(torch.stack([2 * torch.ones_like(w[1]), 12 * w[1] ** 2 - 2 * self.b]))


class SaddleChain(Toy):
    """Σ (w_i² − 1)²/4 + c Σ (w_i − w_{i+1})²/2: at 0 every direction may fall; minimisers ±(1, …, 1) of value 0.

    Args:
        size: number of parameters.
        coupling: c ≥ 0. Without it all 2^size corners are minimisers.
        x0, **options: of `Toy`; the start is 0, the saddle itself, unless given.
    """

    def __init__(self, size: int = 5, *, coupling: float = 0.1, x0: Any = None, **options: Any) -> None:
        if size < 1 or not coupling >= 0:
            raise ValueError(f"expected size ≥ 1 and coupling ≥ 0, got {size} and {coupling}")
        super().__init__(torch.zeros(size) if x0 is None else x0, **options)
        self.coupling = coupling
        self.minimum = 0.0
        D = torch.diff(torch.eye(size, dtype=self.dtype, device=self.device), dim=0)  # (size − 1, size)
        self._laplacian = coupling * D.T @ D

    @property
    def minimisers(self) -> torch.Tensor | None:
        """±(1, …, 1), the only ones where there is coupling."""
        ones = torch.ones_like(self._start)
        return torch.stack([ones, -ones]) if self.coupling else None

    def _value(self, w: torch.Tensor) -> torch.Tensor:
        return ((w**2 - 1) ** 2).sum() / 4 + 0.5 * w @ (self._laplacian @ w)

    def _grad(self, w: torch.Tensor) -> torch.Tensor:
        return w**3 - w + self._laplacian @ w

    def _hessian(self, w: torch.Tensor) -> torch.Tensor:
        return torch.diag(3 * w**2 - 1) + self._laplacian


class MonkeySaddle(Toy):
    """x³ − 3xy² + (x² + y²)²: the Hessian vanishes at the saddle 0, so that no curvature shows the way out.

    In polar coordinates r³ cos 3φ + r⁴: minimisers at r = ¾, cos 3φ = −1, of value −27/256.
    """

    default_start = (0.0, 0.0)

    def __init__(self, x0: Any = None, **options: Any) -> None:
        super().__init__(x0, **options)
        self.minimum = -self.scale * 27 / 256

    @property
    def minimisers(self) -> torch.Tensor:
        """¾ (cos φ, sin φ) for φ = π/3, π, 5π/3."""
        phi = torch.pi * self.tensor([1.0, 3.0, 5.0]) / 3
        return 0.75 * torch.stack([phi.cos(), phi.sin()], dim=1)

    def _value(self, w: torch.Tensor) -> torch.Tensor:
        x, y = w
        return x**3 - 3 * x * y**2 + (x**2 + y**2) ** 2

    def _grad(self, w: torch.Tensor) -> torch.Tensor:
        x, y = w
        r2 = x**2 + y**2
        return torch.stack([3 * x**2 - 3 * y**2 + 4 * r2 * x, -6 * x * y + 4 * r2 * y])

    def _hessian(self, w: torch.Tensor) -> torch.Tensor:
        x, y = w
        r2 = x**2 + y**2
        mixed = -6 * y + 8 * x * y
        return torch.stack([6 * x + 4 * r2 + 8 * x**2, mixed, mixed, -6 * x + 4 * r2 + 8 * y**2]).reshape(2, 2)


class Rosenbrock(Toy):
    """Σ 100 (w_{i+1} − w_i²)² + (1 − w_i)², a curved narrow valley; global minimiser (1, …, 1) of value 0.

    Rosenbrock 1960. `x0` is (−1.2, 1) unless given; more than two entries give the extended function.
    """

    def __init__(self, x0: Any = (-1.2, 1.0), **options: Any) -> None:
        super().__init__(x0, **options)
        if self.size < 2:
            raise ValueError(f"expected x0 with at least 2 entries, got {self.size}")
        self.minimum = 0.0

    @property
    def minimisers(self) -> torch.Tensor:
        """(1, …, 1)."""
        return torch.ones_like(self._start)[None]

    def _value(self, w: torch.Tensor) -> torch.Tensor:
        return (100 * (w[1:] - w[:-1] ** 2) ** 2 + (1 - w[:-1]) ** 2).sum()

    def _grad(self, w: torch.Tensor) -> torch.Tensor:
        gap = w[1:] - w[:-1] ** 2
        g = torch.zeros_like(w)
        g[:-1] = -400 * w[:-1] * gap - 2 * (1 - w[:-1])
        g[1:] += 200 * gap
        return g

    def _hessian(self, w: torch.Tensor) -> torch.Tensor:
        diagonal = torch.zeros_like(w)
        diagonal[:-1] = 1200 * w[:-1] ** 2 - 400 * w[1:] + 2
        diagonal[1:] += 200
        off = torch.diag(-400 * w[:-1], 1)
        return torch.diag(diagonal) + off + off.T


class QuarticBowl(Toy):
    """Σ w_i⁴: the minimiser 0 has a Hessian of zero, where Newton's method converges only linearly."""

    def __init__(self, x0: Any = (1.0, 2.0), **options: Any) -> None:
        super().__init__(x0, **options)
        self.minimum = 0.0

    @property
    def minimisers(self) -> torch.Tensor:
        """The origin."""
        return torch.zeros_like(self._start)[None]

    def _value(self, w: torch.Tensor) -> torch.Tensor:
        return (w**4).sum()

    def _grad(self, w: torch.Tensor) -> torch.Tensor:
        return 4 * w**3

    def _hessian(self, w: torch.Tensor) -> torch.Tensor:
        return torch.diag(12 * w**2)


class LogBarrier(Toy):
    """Σ w_i − log w_i: NaN outside w > 0, minimiser (1, …, 1) of value `size`. A full Newton step from w > 2 leaves."""

    def __init__(self, x0: Any = (2.5,), **options: Any) -> None:
        super().__init__(x0, **options)
        self.minimum = self.scale * self.size

    @property
    def minimisers(self) -> torch.Tensor:
        """(1, …, 1)."""
        return torch.ones_like(self._start)[None]

    def _value(self, w: torch.Tensor) -> torch.Tensor:
        return (w - w.log()).sum()

    def _grad(self, w: torch.Tensor) -> torch.Tensor:
        return 1 - 1 / w

    def _hessian(self, w: torch.Tensor) -> torch.Tensor:
        return torch.diag(w**-2)


class Valley(Toy):
    """(x² + y² − 1)²: the minimisers are a circle, the Hessian on it is singular, and the origin is a maximum."""

    default_start = (2.0, 0.5)

    def __init__(self, x0: Any = None, **options: Any) -> None:
        super().__init__(x0, **options)
        self.minimum = 0.0

    def _value(self, w: torch.Tensor) -> torch.Tensor:
        return (w @ w - 1) ** 2

    def _grad(self, w: torch.Tensor) -> torch.Tensor:
        return 4 * (w @ w - 1) * w

    def _hessian(self, w: torch.Tensor) -> torch.Tensor:
        return 4 * (w @ w - 1) * torch.eye(2, dtype=w.dtype, device=w.device) + 8 * torch.outer(w, w)
