"""Problems in other coordinates, for tests of what should not depend on them."""

import torch

from ot_newton.operators import FunctionOperator, MatrixOperator
from ot_newton.problem import Problem


class Rotated(Problem):
    """f(Qᵀw): the same function in other coordinates."""

    def __init__(self, inner, Q):
        self.inner, self.Q = inner, Q
        self.size, self.dtype, self.device = inner.size, inner.dtype, inner.device

    def start(self, rng):
        return self.Q @ self.inner.start(rng)

    def value(self, w):
        return self.inner.value(self.Q.T @ w)

    def value_and_grad(self, w, rtol=None):
        f, g = self.inner.value_and_grad(self.Q.T @ w)
        return f, self.Q @ g

    def hessian(self, w, rtol=None):
        H = self.inner.hessian(self.Q.T @ w)
        if self.inner.matrix:
            return MatrixOperator(self.Q @ H.matrix @ self.Q.T, symmetric=True)
        return FunctionOperator(H.shape, matmat=lambda V: self.Q @ (H @ (self.Q.T @ V)), dtype=H.dtype, symmetric=True)


class Stretched(Rotated):
    """f(w / c): the same function in other units."""

    def __init__(self, inner, c):
        super().__init__(inner, torch.eye(inner.size, dtype=inner.dtype))
        self.c = c

    def start(self, rng):
        return self.c * self.inner.start(rng)

    def value(self, w):
        return self.inner.value(w / self.c)

    def value_and_grad(self, w, rtol=None):
        f, g = self.inner.value_and_grad(w / self.c)
        return f, g / self.c

    def hessian(self, w, rtol=None):
        H = self.inner.hessian(w / self.c).to_dense() / self.c**2
        if self.inner.matrix:
            return MatrixOperator(H, symmetric=True)
        return FunctionOperator(tuple(H.shape), matmat=lambda V: H @ V, dtype=H.dtype, symmetric=True)
