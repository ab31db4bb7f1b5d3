import pytest
import torch
from referee import pts, relative

from ot_newton.problems.simulation import GENERATORS, SPLITS, least_squares_on_pairs, simulate, true_map

CELLS = pts(200, 3)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_is_drawn(split, dtype):
    data = simulate(CELLS.to(dtype), n=60, split=split, noise=0.0, intercept=0.5, seed=3)
    assert data.X.shape == data.Y.shape == (60, 3)
    assert data.X.dtype == data.Y.dtype == data.W_star.dtype == data.X_test.dtype == dtype
    assert len(data.X_test) == len(data.Y_test) == 60
    assert relative(data.Y_test, (data.X_test @ data.W_star + data.intercept_star).double()) < 1e-6
    image = data.X @ data.W_star + data.intercept_star
    if split == "unpaired":
        assert data.order is None
        assert (torch.cdist(image, data.Y) < 1e-6).sum() == 0
    else:
        assert data.order is not None
        assert torch.equal(image[data.order], data.Y)
        assert torch.equal(data.order, torch.arange(60)) == (split == "paired")
        assert torch.equal(data.order.sort().values, torch.arange(60))
    cells = {tuple(row) for row in CELLS.to(dtype).tolist()}
    assert {tuple(row) for row in data.X.tolist()} <= cells
    assert not {tuple(row) for row in data.X.tolist()} & {tuple(row) for row in data.X_test.tolist()}


def test_the_seed_decides():
    first, again, other = (simulate(CELLS, n=50, seed=seed) for seed in (1, 1, 2))
    for name in ("X", "Y", "W_star", "X_test", "Y_test"):
        assert torch.equal(getattr(first, name), getattr(again, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))
    state = torch.get_rng_state()
    simulate(CELLS, n=50, seed=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_has_the_size_it_should():
    data = simulate(pts(20000, 2), n=10000, split="paired", noise=0.3, seed=0)
    residual = data.Y - data.X @ data.W_star
    assert abs(float(residual.std()) - 0.3) < 0.01
    assert residual.mean(0).abs().max() < 0.02


@pytest.mark.parametrize("law", GENERATORS)
@pytest.mark.parametrize(("p", "q"), [(5, 5), (3, 5), (5, 3), (1, 1)])
def test_laws_of_the_map(law, p, q):
    maps = torch.stack([true_map(p, q, law, torch.Generator().manual_seed(seed)) for seed in range(400)])
    assert maps.shape == (400, p, q)
    mean = torch.eye(p, q).double() if law == "near-identity" else torch.zeros(p, q).double()
    assert (maps.mean(0) - mean).abs().max() < 0.2
    if law == "near-identity":
        assert abs(float((maps - mean).std()) - 0.15) < 0.03
    else:
        singular = torch.linalg.svdvals(maps)
        assert float((singular - 1).abs().mean()) < 0.3


def test_a_given_map_is_used():
    W = pts(3, 2)
    data = simulate(CELLS, n=50, w_star=W, noise=0.0, split="paired")
    assert torch.equal(data.W_star, W)
    assert relative(data.Y, data.X @ W) < 1e-14
    assert simulate(CELLS, n=50, q=7).W_star.shape == (3, 7)
    assert simulate(CELLS, n=50, n_test=9).X_test.shape == (9, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "shuffled"}, "split: expected one of paired, permuted, unpaired, got 'shuffled'"),
        ({"w_star": "identity"}, "w_star: expected one of near-identity, arbitrary or a tensor"),
        ({"w_star": torch.zeros(4, 3)}, r"w_star: expected shape \(3, q\), got \(4, 3\)"),
        ({"w_star": torch.zeros(3)}, r"w_star: expected shape \(3, q\), got \(3,\)"),
        ({"n": 0}, "n: expected at most 200 cells in all, got n=0"),
        ({"n": 200}, r"n: expected at most 200 cells in all, got n=200 \(200 for split 'permuted'\)"),
        ({"n": 100, "split": "unpaired"}, r"got n=100 \(200 for split 'unpaired'\)"),
        ({"n": 50, "n_test": 151}, "and n_test=151"),
        ({"noise": -0.1}, "noise: expected a finite number ≥ 0, got -0.1"),
        ({"noise": float("nan")}, "noise: expected a finite number ≥ 0, got nan"),
    ],
)
def test_bad_requests(options, message):
    with pytest.raises(ValueError, match=message):
        simulate(CELLS, **({"n": 50} | options))


def test_least_squares_on_the_true_pairs():
    cells = pts(300, 3)
    exact = simulate(cells, n=200, noise=0.0, intercept=1.0, seed=1)
    W = least_squares_on_pairs(exact)
    assert W is not None
    assert relative(W, exact.W_star) < 1e-12
    noisy = simulate(cells, n=200, noise=0.1, seed=1)
    W, X, Y = least_squares_on_pairs(noisy), noisy.X[noisy.order], noisy.Y
    assert W is not None
    assert 0 < relative(W, noisy.W_star) < 0.2
    assert float((X.T @ (X @ W - Y)).abs().max()) < 1e-10
    assert least_squares_on_pairs(simulate(cells, n=100, split="unpaired")) is None
