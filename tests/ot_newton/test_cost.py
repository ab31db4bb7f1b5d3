import pytest
import torch
from referee import cost_matrix, pts, relative

from ot_newton.cost import Cosine, SquaredEuclidean, make_cost


@pytest.mark.parametrize("name", ["sqeuclidean", "cosine"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_costs_are_squared_distances_of_embedded_points(name, scale):
    x, y, cost = pts(6, 3), pts(5, 3, 1), make_cost(name, scale)
    C = cost_matrix(cost.embed(x), cost.embed(y), scale=cost.scale)
    assert relative(C, cost_matrix(x, y, name, scale)) < 1e-14


@pytest.mark.parametrize("cost", [SquaredEuclidean(), Cosine()])
def test_derivatives_of_the_embedding(cost):
    x, g = pts(6, 3), pts(6, 3, 1)
    V = pts(6, 6, 2).reshape(6, 3, 2)
    J = torch.func.jacrev(cost.embed)(x)  # (n, d, n, d)
    assert relative(cost.push(x, V), torch.einsum("idje,jek->idk", J, V)) < 1e-14
    assert relative(cost.pull(x, V), torch.einsum("idje,idk->jek", J, V)) < 1e-14
    bend = torch.func.jacrev(torch.func.grad(lambda x: (cost.embed(x) * g).sum()))(x)
    want, got = torch.einsum("idje,jek->idk", bend, V), cost.curvature(x, g, V)
    assert (want == 0).all() if got is None else relative(got, want) < 1e-13


def test_bad_costs():
    with pytest.raises(ValueError, match="cost: expected one of sqeuclidean, cosine, got 'euclidean'"):
        make_cost("euclidean", 1.0)
    for name in (["cosine"], None, {}, 3):
        with pytest.raises(ValueError, match="cost: expected one of sqeuclidean, cosine, got"):
            make_cost(name, 1.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="scale: expected a number above 0, got '1'"):
        make_cost("cosine", "1")  # pyright: ignore[reportArgumentType]
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="scale: expected a finite number above 0"):
            make_cost("cosine", scale)
