"""A value that is rough is no reason to stop for any method that descends along models."""

import pytest
import torch

from ot_newton.cubic import Cubic
from ot_newton.minimize import minimize
from ot_newton.newton_cg import NewtonCG
from ot_newton.operators import MatrixOperator
from ot_newton.problems import toys
from ot_newton.saddle_free import SaddleFree
from ot_newton.trust_region import TrustNCG, TrustRegion

METHODS = [NewtonCG, TrustNCG, TrustRegion, Cubic, SaddleFree]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_rough_values_do_not_stop_it_where_gradients_bring_sharp_ones(method):
    class Rough(toys.Quadratic):
        """The curvature of a weak direction is taken for eight times what it is, so each step gains an eighth."""

        def value(self, w):
            self.value_error = 1e-3
            return super().value(w) + 1e-3 * torch.sin(1e9 * w.sum())

        def value_and_grad(self, w, rtol=None):
            self.value_error = 1e-16
            return self._value(w), self.A @ w

        def hessian(self, w, rtol=None):
            self.hessian_error = 0.07
            return MatrixOperator(torch.diag(torch.tensor([1.0, 0.08]).double()), symmetric=True)

    problem = Rough([1.0, 0.01], x0=[0.0, 0.1])
    result = minimize(problem, method=method(), options={"gtol": 0.0, "gtol_abs": 1e-7})
    assert result.success
    assert float(result.x.abs().max()) < 1e-5
