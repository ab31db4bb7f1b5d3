"""Operators against dense matrices, scipy, and finite differences of gradients."""

import doctest
import importlib

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg as sla
import torch

from ot_newton.operator_algebra import congruence, shift
from ot_newton.operator_checks import check_operator
from ot_newton.operators import (
    DiagonalOperator,
    FunctionOperator,
    IdentityOperator,
    LinearOperator,
    MatrixOperator,
    aslinearoperator,
)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def symmetric(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    A = randn(n, n, seed=seed)
    return ((A + A.mT) / 2).to(dtype)


A = randn(5, 4, seed=1)
B = randn(5, 4, seed=2)
C = randn(4, 3, seed=3)
S = symmetric(4, seed=4)
op = aslinearoperator

EXPRESSIONS = {
    "matrix": (op(A), A),
    "sum": (op(A) + op(B), A + B),
    "difference": (op(A) - op(B), A - B),
    "scaled": (2.5 * op(A), 2.5 * A),
    "scaled by a tensor": (op(A) * torch.tensor(-3.0), -3 * A),
    "scaled by numpy": (np.float64(0.5) * op(A), 0.5 * A),
    "divided": (op(A) / 3, A / 3),
    "negated": (-op(A), -A),
    "product": (op(A) @ op(C), A @ C),
    "adjoint": (op(A).T, A.mT),
    "adjoint of a product": ((op(A) @ op(C)).H, (A @ C).mT),
    "gram": (op(A).T @ op(A), A.mT @ A),
    "shift": (shift(S, -0.7), S - 0.7 * torch.eye(4, dtype=torch.float64)),
    "congruence": (congruence(S, C), C.mT @ S @ C),
    "diagonal": (DiagonalOperator(S[0]), torch.diag(S[0])),
    "identity": (op(S) + 1e-3 * IdentityOperator(4, torch.float64), S + 1e-3 * torch.eye(4, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions_agree_with_their_matrices(name):
    operator, dense = EXPRESSIONS[name]
    m, n = dense.shape
    V, U, v, u = randn(n, 3), randn(m, 2), randn(n, seed=9), randn(m, seed=8)
    assert operator.shape == (m, n)
    close = {"rtol": 0, "atol": 1e-13}
    torch.testing.assert_close(operator.matmat(V), dense @ V, **close)
    torch.testing.assert_close(operator @ V, dense @ V, **close)
    torch.testing.assert_close(operator @ v, dense @ v, **close)
    torch.testing.assert_close(operator.rmatmat(U), dense.mT @ U, **close)
    torch.testing.assert_close(operator.rmatvec(u), dense.mT @ u, **close)
    torch.testing.assert_close(u @ operator, u @ dense, **close)
    torch.testing.assert_close(U.mT @ operator, U.mT @ dense, **close)
    torch.testing.assert_close(operator.T.to_dense(), dense.mT, **close)
    torch.testing.assert_close(operator.to_dense(chunk=2), dense, **close)
    assert operator.matmat(V[:, :0]).shape == (m, 0)


def test_adjoint_is_an_involution_and_symmetric_operators_are_their_own():
    plain = op(A)
    assert plain.T.T is plain
    for operator in (op(S), shift(S, 2.0), 2 * op(S), op(S) + op(S), congruence(S, C), DiagonalOperator(S[0])):
        assert operator.symmetric is True
        assert operator.T is operator


def test_symmetry_of_a_matrix_is_read_off_to_rounding():
    assert MatrixOperator(S + 1e-15 * randn(4, 4)).symmetric is True
    assert MatrixOperator(S + 1e-6 * randn(4, 4)).symmetric is False
    assert MatrixOperator(S + 1e-6 * randn(4, 4), symmetric=True).T.symmetric is True
    assert MatrixOperator(A).symmetric is False


def test_counters_count_columns_of_every_part():
    a, c = op(A), op(C)
    both = a @ c
    both.matvec(randn(3))
    both.matmat(randn(3, 4))
    both.rmatmat(randn(5, 2))
    assert (both.n_matvec, a.n_matvec, c.n_matvec) == (7, 7, 7)
    a.to_dense(chunk=3)
    assert a.n_matvec == 11


def test_a_subclass_needs_only_matmat():
    class Roll(LinearOperator):
        def _matmat(self, V):
            return V.roll(1, 0)

    roll = Roll((3, 3), torch.float32)
    assert (roll @ torch.arange(3.0)).tolist() == [2, 0, 1]
    with pytest.raises(NotImplementedError, match="Roll does not define _rmatmat"):
        roll.rmatvec(torch.ones(3))


def test_function_operator_applies_vectors_by_column():
    operator = FunctionOperator(
        (5, 4), matvec=lambda v: A @ v, rmatmat=lambda U: A.mT @ U, dtype=torch.float64, device="cpu"
    )
    torch.testing.assert_close(operator.to_dense(), A)
    torch.testing.assert_close(operator.T.to_dense(), A.mT)
    with pytest.raises(ValueError, match="expected matvec or matmat, got neither"):
        FunctionOperator((2, 2), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_to_scipy_keeps_the_dtype_and_agrees_with_scipy(dtype):
    operator = MatrixOperator(A.to(dtype))
    theirs = operator.to_scipy()
    assert theirs.dtype == A.to(dtype).numpy().dtype
    x, y, X = np.ones(4), np.arange(5.0), np.eye(4)
    rtol = 1e-6 if dtype == torch.float32 else 1e-14
    dense = A.numpy()
    pairs = ((theirs.matvec(x), dense @ x), (theirs.rmatvec(y), dense.T @ y), (theirs.matmat(X), dense))
    for got, want in pairs:
        assert got.dtype == theirs.dtype
        np.testing.assert_allclose(np.asarray(got), want, rtol=rtol)


def test_scipy_solves_with_our_operator_as_it_does_with_its_own():
    H = torch.diag(torch.arange(1.0, 30.0, dtype=torch.float64)) + 0.1 * symmetric(29)
    ours = sla.eigsh(MatrixOperator(H).to_scipy(), 3, which="LA", return_eigenvectors=False)
    np.testing.assert_allclose(ours, torch.linalg.eigvalsh(H)[-3:], rtol=1e-10)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scipy_operators_come_in_with_their_dtype(dtype):
    sparse = scipy.sparse.csr_matrix(np.eye(6, 4, 1) + 2 * np.eye(6, 4, -2), dtype=dtype)
    wanted = torch.tensor(sparse.toarray())
    for theirs in (sparse, sla.aslinearoperator(sparse), sparse.toarray()):
        operator = aslinearoperator(theirs)
        assert operator.dtype == wanted.dtype
        torch.testing.assert_close(operator.to_dense(), wanted)
        torch.testing.assert_close(operator.T.to_dense(), wanted.mT)
    with pytest.raises(TypeError, match="expected a LinearOperator, a matrix or a scipy operator, got list"):
        aslinearoperator([[1.0]])


def test_half_precision_stays_half_precision():
    operator = 2 * shift(torch.eye(3, dtype=torch.bfloat16), 1.0)
    assert (operator @ torch.ones(3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(TypeError):
        operator.to_scipy()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: op(A) @ randn(5), ValueError, r"expected a vector of shape \(4,\), got \(5,\)"),
        (lambda: op(A) @ randn(5, 2), ValueError, r"expected a tensor of shape \(4, k\), got \(5, 2\)"),
        (lambda: op(A) @ randn(4).float(), ValueError, "torch.float64 on cpu, got torch.float32 on cpu"),
        (lambda: op(A).matvec([1.0]), TypeError, "to be a torch tensor, got list"),  # type: ignore[arg-type]
        (lambda: op(A) + op(C), ValueError, "expected two operators of the same shape"),
        (lambda: op(A) + op(A.float()), ValueError, "expected both terms of a sum in torch.float64"),
        (lambda: op(A) @ op(A), ValueError, "expected 4 rows in the second factor, got 5"),
        (lambda: op(A) * op(A), TypeError, "unsupported operand"),
        (lambda: op(A) @ "x", TypeError, "unsupported operand"),
        (lambda: shift(A, 1.0), ValueError, "expected a square operator"),
        (lambda: shift(S, "one"), TypeError, "expected a real number, got str"),  # type: ignore[arg-type]
        (lambda: congruence(S, A), ValueError, "expected A of shape"),
        (lambda: MatrixOperator(A[0]), ValueError, "expected a tensor with two dimensions, got shape"),
        (lambda: LinearOperator((2, -1), torch.float64), ValueError, "expected a shape"),
        (lambda: LinearOperator((2, 2), torch.complex64), TypeError, "expected a real floating-point"),
        (lambda: LinearOperator((2, 3), torch.float64, symmetric=True), ValueError, "expected a square shape"),
    ],
)
def test_mistakes_are_named_before_any_work(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_product_of_the_wrong_shape_or_dtype_is_refused():
    wrong_shape = FunctionOperator((3, 3), matmat=lambda V: V[:2], dtype=torch.float64)
    wrong_dtype = FunctionOperator((3, 3), matmat=lambda V: V.float(), dtype=torch.float64)
    for operator in (wrong_shape, wrong_dtype):
        with pytest.raises(ValueError, match="expected FunctionOperator to return"):
            operator.matvec(randn(3))


def test_mixed_devices_are_refused():
    there = IdentityOperator(4, torch.float64, "meta")
    with pytest.raises(ValueError, match="expected both terms of a sum in"):
        op(S).__add__(there)
    with pytest.raises(ValueError, match="expected a scalar on cpu, got meta"):
        op(S).__mul__(torch.tensor(2.0, device="meta"))


@pytest.mark.gpu
def test_shift_and_identity_stay_on_the_gpu():
    H = MatrixOperator(S.cuda())
    for operator in (shift(H, 1e-3), H + 1e-3 * IdentityOperator(4, torch.float64, "cuda")):
        assert operator.device.type == "cuda"
        torch.testing.assert_close(operator.to_dense().cpu(), S + 1e-3 * torch.eye(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="expected the argument of a product in"):
        H.matvec(randn(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-14, 1.0, 1e14])
def test_check_accepts_exact_operators_in_their_own_precision(dtype, scale):
    check = check_operator(scale * symmetric(200, dtype=dtype))
    assert check.success
    assert check.noise <= 100 * torch.finfo(dtype).eps
    assert 0.1 < check.anorm / (scale * 10) < 10


def test_check_measures_the_asymmetry():
    for matrix in (torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.eye(5).roll(1, 0)):
        with pytest.raises(ValueError, match=r"expected a symmetric operator .* got \|uᵀAv − vᵀAu\| / ‖A‖ = 0"):
            check_operator(matrix)
        check = check_operator(matrix, strict=False)
        assert check.asymmetry > 0.01
        assert not check.success


def test_check_sees_noise_and_nonlinearity():
    noise = torch.Generator().manual_seed(0)
    H = symmetric(50)
    noisy = FunctionOperator(
        (50, 50), matmat=lambda V: H @ V + 1e-6 * torch.randn(*V.shape, generator=noise).double(), dtype=torch.float64
    )
    check = check_operator(noisy, strict=False)
    assert 1e-8 < check.irreproducibility < 1e-4
    assert check_operator(noisy, rtol=1e-4).success
    crooked = FunctionOperator((50, 50), matmat=lambda V: H @ V + V.abs(), dtype=torch.float64)
    with pytest.raises(ValueError, match="expected a linear operator"):
        check_operator(crooked)
    broken = FunctionOperator((50, 50), matmat=lambda V: V * torch.nan, dtype=torch.float64)
    with pytest.raises(ValueError, match="nan"):
        check_operator(broken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_check_compares_with_differences_of_the_gradient(dtype):
    W, x = randn(40, 20, dtype=dtype), randn(20, seed=5, dtype=dtype)

    def gradient(w):
        return W.mT @ torch.sin(W @ w)

    def hessian(factor):
        return FunctionOperator(
            (20, 20), matmat=lambda V: factor * (W.mT @ (torch.cos(W @ x)[:, None] * (W @ V))), dtype=dtype
        )

    check = check_operator(hessian(1.0), grad_fn=gradient, x=x)
    assert check.success
    assert check.gradient_error is not None
    assert check.gradient_error < 4 * torch.finfo(dtype).eps ** (1 / 3)
    with pytest.raises(ValueError, match=r"expected the derivative of grad_fn .* = 0.5"):
        check_operator(hessian(0.5), grad_fn=gradient, x=x)  # linear and symmetric, yet half of the truth
    with pytest.raises(ValueError, match="expected grad_fn and x together"):
        check_operator(hessian(1.0), grad_fn=gradient)


def test_check_sees_a_detached_factor_in_a_custom_function():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return (x**3).sum()

        @staticmethod
        def backward(ctx, *grad_outputs):
            (x,) = ctx.saved_tensors
            return grad_outputs[0] * 3 * x * x.detach()

    x = randn(6, seed=7)

    def gradient(w):
        w = w.clone().requires_grad_()
        return torch.autograd.grad(Square.apply(w), w)[0]

    def hvp(v):
        w = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(Square.apply(w), w, create_graph=True)
        return torch.autograd.grad(g @ v, w)[0]

    half = FunctionOperator((6, 6), matvec=hvp, dtype=torch.float64)
    assert check_operator(half).success
    with pytest.raises(ValueError, match="expected the derivative of grad_fn"):
        check_operator(half, grad_fn=gradient, x=x)


@pytest.mark.parametrize("module", ["linear_operator", "operators", "operator_algebra", "operator_checks"])
def test_the_examples_run(module):
    tried = doctest.testmod(importlib.import_module(f"ot_newton.{module}"))
    assert tried.attempted > 0
    assert tried.failed == 0
