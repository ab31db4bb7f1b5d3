"""Operators across the border to scipy, both ways, in one dtype: float32 on this side is float32 on the other."""

import numpy as np
import scipy.sparse.linalg
import torch
from torch import Tensor

from ot_newton.linear_operator import LinearOperator, Product
from ot_newton.operators import FunctionOperator


class ScipyOperator(scipy.sparse.linalg.LinearOperator):
    """A torch operator as a scipy one: numpy arrays in and out, computed on the operator's own device.

    Raises `TypeError` for a dtype that numpy lacks (bfloat16).
    """

    def __init__(self, operator: LinearOperator) -> None:
        super().__init__(torch.empty(0, dtype=operator.dtype).numpy().dtype, operator.shape)
        self.operator = operator

    def _through(self, product: Product, x: np.ndarray) -> np.ndarray:
        return product(torch.tensor(x, dtype=self.operator.dtype, device=self.operator.device)).detach().cpu().numpy()

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        return self._through(self.operator.matvec, x.reshape(-1))

    def _rmatvec(self, x: np.ndarray) -> np.ndarray:
        return self._through(self.operator.rmatvec, x.reshape(-1))

    def _matmat(self, X: np.ndarray) -> np.ndarray:
        return self._through(self.operator.matmat, X)

    def _rmatmat(self, X: np.ndarray) -> np.ndarray:
        return self._through(self.operator.rmatmat, X)


def from_scipy(operator: scipy.sparse.linalg.LinearOperator, device: torch.device | str = "cpu") -> LinearOperator:
    """A scipy operator as a torch one whose vectors live on `device`; scipy itself computes on the CPU."""
    dtype = torch.empty(0, dtype=torch.from_numpy(np.empty(0, operator.dtype)).dtype).dtype
    place = torch.empty(0, device=device).device

    def matmat(V: Tensor) -> Tensor:
        return torch.tensor(operator.matmat(V.detach().cpu().numpy()), dtype=dtype, device=place)

    def rmatmat(U: Tensor) -> Tensor:
        return torch.tensor(operator.rmatmat(U.detach().cpu().numpy()), dtype=dtype, device=place)

    shape = (int(operator.shape[0]), int(operator.shape[1]))
    return FunctionOperator(shape, matmat=matmat, rmatmat=rmatmat, dtype=dtype, device=place)
