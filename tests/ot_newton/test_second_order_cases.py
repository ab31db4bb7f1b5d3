"""The inputs on which other libraries' operators, eigensolvers, linear solvers and densities went wrong.

Where a test elsewhere covers a case, this table says which; the tests below are the rest. Minimisers have their own.

test_krylov.py
    an iteration count off by one              test_the_last_allowed_iteration_counts
    cg on an indefinite operator               test_cg_hands_back_nonpositive_curvature
    a negative direction that ascends          test_negative_curvature_is_a_descent_direction
    an inconsistent singular system "solved"   test_minres_gives_least_squares_on_inconsistent_systems
    the boundary in the wrong norm             test_the_boundary_is_measured_in_the_norm_of_the_preconditioner
    right-hand sides from 1e-150 to 1e150      test_scaling_the_right_hand_side_scales_the_answer
test_operators.py
    an unsymmetric operator accepted           test_check_measures_the_asymmetry
    a float32 operator turned into float64     test_to_scipy_keeps_the_dtype_and_agrees_with_scipy
    a shift made on another device             test_mixed_devices_are_refused
    a shift made on another device             test_shift_and_identity_stay_on_the_gpu
    a tolerance fixed for float32              test_check_accepts_exact_operators_in_their_own_precision
    half a Hessian that is still symmetric     test_check_sees_a_detached_factor_in_a_custom_function
test_lanczos.py
    an invariant subspace after one step       test_invariant_subspaces_do_not_end_the_search
    the zero operator                          test_invariant_subspaces_do_not_end_the_search
    two eigenvalues, many copies               test_multiplicities_of_two_values
    lost orthogonality and ghosts              test_orthogonality_holds_and_no_ghosts_appear
    absolute thresholds: scales 1e-14 and 1e14 test_scaling_the_operator_scales_the_values
    one row, k = n                             test_smallest_sizes
    magnitude taken for algebraic order        test_magnitude_is_not_algebraic_order
    residuals over a signed eigenvalue         test_negative_definite_residuals_are_not_negative
    random spectra of every kind               test_random_spectra
    products beyond those that are counted     test_one_product_a_block
test_density.py
    an invariant subspace after one step       test_invariant_subspaces_make_the_rules_exact
    absolute thresholds: scales 1e-14 and 1e14 test_scaling_and_shifting_the_operator_move_the_density
    weights from whole eigenvectors            test_weights_are_squared_first_components
    moments while steps exceed the degree      test_moments_are_exact_while_steps_exceed_the_degree
    the determinant of a singular operator     test_determinants_need_a_definite_operator
    products beyond those that are counted     test_products_are_counted_and_come_in_blocks
test_trace.py
    absolute thresholds: scales 1e-14 and 1e14 test_scaling_the_operator_scales_everything
    one row, k = n                             test_smallest_sizes
    equal estimates taken for convergence      test_equal_estimates_are_not_taken_for_certainty
    products beyond those that are counted     test_products_are_counted_and_come_in_blocks
"""

import ast
from pathlib import Path

import pytest
import torch
from spectra import rotated

from ot_newton.certificate import Verdict, smallest_eigenvalue
from ot_newton.density import count_below, spectral_density
from ot_newton.krylov import cg, minres
from ot_newton.lanczos import eigsh, lanczos
from ot_newton.operator_algebra import congruence, shift
from ot_newton.operator_checks import check_operator
from ot_newton.operators import FunctionOperator, MatrixOperator
from ot_newton.status import Status
from ot_newton.trace import trace

HERE = Path(__file__).parent
DTYPES = [torch.float64, torch.float32]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def rotation(n: int) -> torch.Tensor:
    return torch.linalg.qr(randn(n, n, seed=42))[0]


def test_the_table_names_tests_that_exist():
    existing, found = set(), 0
    for line in (__doc__ or "").splitlines():
        if line.endswith(".py"):
            module = ast.parse((HERE / line).read_text())
            existing = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
        elif line.startswith("    "):
            assert line.split()[-1] in existing
            found += 1
    assert found >= 30


@pytest.mark.parametrize("folder", ["ot_newton", "kernels", "problems", "experiments", "tests"])
def test_a_tolerance_that_is_taken_is_used(folder):
    """As in a helper that passes atol twice and rtol never; methods may ignore what their protocol offers."""
    taken = 0
    for path in (HERE.parents[1] / folder).rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            if every and every[0].arg == "self":
                continue
            tolerances = {argument.arg for argument in every if argument.arg in ("tol", "rtol", "atol", "gtol", "xtol")}
            read = {n.id for part in function.body for n in ast.walk(part) if isinstance(n, ast.Name)}
            assert tolerances <= read, f"{path.name}: {function.name} does not use {tolerances - read}"
            taken += len(tolerances)
    assert taken or folder != "ot_newton"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_that_is_not_finite_gets_a_status(value, dtype):
    A, b = torch.eye(40, dtype=dtype), torch.ones(40, dtype=dtype)
    A[3, 5] = A[5, 3] = value
    assert MatrixOperator(A).symmetric is None
    for solve in (cg, minres):
        assert solve(A, b).status is Status.NONFINITE
    assert eigsh(A, 2).status is Status.NONFINITE
    assert lanczos(A, steps=5).status is Status.NONFINITE
    assert spectral_density(A, steps=5).status is Status.NONFINITE
    assert count_below(A, 0.0).status is Status.NONFINITE
    assert smallest_eigenvalue(MatrixOperator(A)).verdict is Verdict.UNDECIDED
    for method in ("hutchinson", "hutch++", "xtrace"):
        assert trace(A, method=method, budget=8).status is Status.NONFINITE
    assert not check_operator(A, strict=False).success


@pytest.mark.parametrize("matrix", [torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.eye(5).roll(1, 0)])
def test_a_matrix_that_is_not_symmetric_is_refused_by_all(matrix):
    b = torch.ones(len(matrix))
    calls = (
        lambda: cg(matrix, b),
        lambda: minres(matrix, b),
        lambda: eigsh(matrix, 1),
        lambda: lanczos(matrix),
        lambda: spectral_density(matrix),
        lambda: count_below(matrix, 0.0),
        lambda: trace(matrix),
        lambda: check_operator(matrix),
    )
    for call in calls:
        with pytest.raises(ValueError, match="expected a symmetric operator"):
            call()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_single_step_and_a_single_row(dtype):
    A = torch.full((1, 1), -2.0, dtype=dtype)
    T = lanczos(A, steps=7)
    assert (T.alpha.tolist(), T.beta.tolist()) == ([-2.0], [0.0])
    assert smallest_eigenvalue(MatrixOperator(A)).lambda_min == -2
    assert spectral_density(A).range == (-2, -2)
    assert trace(A).value == -2
    assert cg(A, torch.ones(1, dtype=dtype)).status is Status.NEGATIVE_CURVATURE
    assert minres(A, torch.ones(1, dtype=dtype)).x.tolist() == [-0.5]
    one = lanczos(torch.diag(torch.tensor([1.0, 3.0], dtype=dtype)), torch.ones(2, dtype=dtype), steps=1)
    assert one.T.shape == (1, 1)
    assert float(one.alpha) == pytest.approx(2, rel=4 * torch.finfo(dtype).eps)
    assert float(one.beta) == pytest.approx(1, rel=4 * torch.finfo(dtype).eps)
    assert spectral_density(torch.eye(9, dtype=dtype), steps=1).nodes.shape == (8, 1)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_results_keep_the_dtype_of_the_operator(dtype):
    operator = FunctionOperator((30, 30), matmat=lambda V: 2 * V, dtype=dtype, symmetric=True)
    for composed in (
        operator,
        shift(operator, 1.0),
        0.5 * operator,
        operator + operator,
        congruence(operator, operator),
    ):
        assert (composed @ torch.ones(30, dtype=dtype)).dtype == dtype
        w, V = eigsh(composed, 2, v0=randn(30))  # a float64 guess
        assert w.dtype == V.dtype == dtype
    if dtype is not torch.bfloat16:
        assert cg(operator, torch.ones(30, dtype=dtype)).x.dtype == dtype
        assert minres(operator, torch.ones(30, dtype=dtype)).x.dtype == dtype
    with pytest.raises(ValueError, match="expected b in"):
        cg(operator, torch.ones(30, dtype=torch.float16))


@pytest.mark.parametrize("s", [-4.0, 1e3])
def test_a_shift_moves_every_ritz_value(s):
    A, v = rotated(randn(70), generator()), randn(70, seed=1)
    one, two = (torch.linalg.eigvalsh(lanczos(B, v, steps=15).T) for B in (A, shift(A, s)))
    torch.testing.assert_close(two, one + s, rtol=0, atol=1e-11 * abs(s))
    moved = count_below(shift(A, s), s, steps=70)
    assert (moved.lower, moved.upper) == ((count := count_below(A, 0.0, steps=70)).lower, count.upper)


def test_a_rotation_of_the_coordinates_rotates_the_answers():
    n, Q = 60, rotation(60)
    A, b = rotated(torch.linspace(-1, 2, n).double(), generator()), randn(n, seed=2)
    R = Q @ A @ Q.mT
    R = (R + R.mT) / 2
    one, two = lanczos(A, b, steps=20), lanczos(R, Q @ b, steps=20)
    torch.testing.assert_close(two.alpha, one.alpha, rtol=0, atol=1e-10)
    torch.testing.assert_close(two.V, Q @ one.V, rtol=0, atol=1e-9)
    torch.testing.assert_close(eigsh(R, 4, which="BE").w, eigsh(A, 4, which="BE").w, rtol=0, atol=1e-12)
    torch.testing.assert_close(minres(R, Q @ b, rtol=1e-12).x, Q @ minres(A, b, rtol=1e-12).x)
    definite, turned = shift(A, 2.0), shift(R, 2.0)
    here, there = cg(definite, b), cg(turned, Q @ b)
    assert here.n_iter == there.n_iter
    torch.testing.assert_close(there.x, Q @ here.x, rtol=1e-9, atol=1e-9)
    saddle, same = cg(A, b), cg(R, Q @ b)
    assert saddle.status is same.status is Status.NEGATIVE_CURVATURE
    assert same.npc_curvature == pytest.approx(saddle.npc_curvature, rel=1e-8)


def test_every_result_counts_the_products_it_took():
    A = rotated(torch.linspace(0.5, 2, 50).double(), generator())
    taken = []

    def matmat(V: torch.Tensor) -> torch.Tensor:
        taken.append(V.shape[1])
        return A @ V

    operator = FunctionOperator((50, 50), matmat=matmat, dtype=torch.float64, symmetric=True)
    calls = (
        lambda: cg(operator, randn(50)),
        lambda: minres(operator, randn(50)),
        lambda: eigsh(operator, 3),
        lambda: lanczos(operator, randn(50, 4), steps=9),
        lambda: smallest_eigenvalue(operator),
        lambda: spectral_density(operator, n_probes=3, steps=9),
        lambda: count_below(operator, 1.0, n_probes=3, steps=9),
        lambda: trace(operator, budget=10),
    )
    for call in calls:
        taken.clear()
        assert call().n_matvec == sum(taken)
