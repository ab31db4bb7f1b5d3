"""Random inputs to every public function: `python tests/fuzz.py --count 2000`; `test_fuzz.py` runs the first of them.

Each seed makes one problem, with weights that may vanish, duplicates, strides, scales from 1e-6 to 1e6, any backend and
dtype, and hands it to each function in turn. A function may answer, with a status; it may warn `ConvergenceWarning`;
it may raise what it documents. It may not return a NaN under the status "converged", and no answer may be further from
a dense float64 referee than what it reports allows.

How far that is: rounding the exponents, of size L, changes an entry of the plan by the factor 1 + δ with δ = u L, and
the referee takes the potentials that were returned, so that no solve has to be repeated. Then

    marginals    |P1 - r|₁ + |Pᵀ1 - c|₁ ≤ δ,  and the error reported is that of (r, c) up to δ
    value        that of the plan with these marginals up to δ (|f|, |g| averaged + eps)
    gradient     the row sums of 2s P_ij (x_i - y_j) up to 2s δ Σ_j P_ij (|x_i| + |y_j|)
    Hessian      symmetric, and equal to the dense one up to (δ + rtol)/(1 - σ₂²) of its terms, with σ₂ the second
                 singular value of P/√(r c), the condition of the response; not compared where 1 - σ₂² < 1e-6
"""

import argparse
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before tests/, which has a folder ot_newton too

import torch
from random_case import Case, Dense, supported

from ot_newton import (
    NewtonCG,
    Plan,
    Status,
    cg,
    eigsh,
    minimize,
    minres,
    ot_loss,
    smallest_eigenvalue,
    solve,
)
from ot_newton.batch import solve_batch
from ot_newton.check import check
from ot_newton.problems.shuffled_regression import ShuffledRegression
from ot_newton.sinkhorn import ConvergenceWarning

DOCUMENTED = (TypeError, ValueError)


def require(holds: bool, what: str, *numbers: float) -> None:
    """Raise AssertionError with the numbers unless it holds."""
    if not holds:
        raise AssertionError(f"{what}: {', '.join(f'{float(number):.4g}' for number in numbers)}")


def solved(case: Case) -> tuple[Plan, Dense] | None:
    """A plan with its referee; None where the status says that the numbers mean nothing."""
    plan = solve(case.x, case.y, case.eps, **case.options)
    require(plan.f.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32), "dtype")
    numbers = (plan.f, plan.g, plan.row_sums, plan.col_sums, plan.value(), plan.grad())
    finite = all(bool(t.isfinite().all()) for t in numbers)
    require(finite or plan.status is Status.NONFINITE, f"not finite under {plan.status.value}")
    require(math.isfinite(plan.error) or plan.status is Status.NONFINITE, "error not finite", plan.error)
    require(plan.n_passes <= 2 * case.options["max_iter"] + 2, "budget", plan.n_passes)
    return (plan, Dense(plan)) if finite else None


def fuzz_plan(case: Case) -> None:
    """solve, and the methods of Plan."""
    got = solved(case)
    if got is None:
        return
    plan, dense = got
    delta = dense.delta
    if delta > 0.1:
        require(not plan.converged or dense.error < 1, "converged without digits", dense.error)
        return
    mass = float(dense.r.sum())
    off = float((dense.r - plan.row_sums).abs().sum() + (dense.c - plan.col_sums).abs().sum())
    require(off <= 2 * delta * max(mass, 1), "marginals", off, delta)
    require(dense.error <= plan.error + 2 * delta * max(mass, 1), "error", dense.error, plan.error, delta)
    if plan.converged:
        require(plan.error <= (1e-6 if case.dtype == torch.float64 else 1e-5), "converged above tol", plan.error)
    potentials = dense.r @ supported(dense.f, dense.r).abs() + dense.c @ supported(dense.g, dense.c).abs()
    gap, limit = abs(float(plan.value()) - dense.value), 4 * delta * (float(potentials) + case.eps * max(mass, 1))
    require(gap <= limit, "value", gap, limit)
    if case.cost == "sqeuclidean":
        gap = (plan.grad() - dense.grad).norm(dim=1).sum()
        limit = 8 * delta * dense.s * dense.spread * max(mass, 1)
        require(float(gap) <= limit, "gradient", gap, limit)
    V, U = case.randn(case.m, 3).to(plan.f.dtype), case.randn(case.n, 3).to(plan.f.dtype)
    for ours, theirs, bound in (
        (plan.apply(V), dense.P @ V.double(), float(V.abs().max())),
        (plan.adjoint(U), dense.P.T @ U.double(), float(U.abs().max())),
    ):
        gap, limit = float((ours - theirs).abs().max()), 4 * delta * max(mass, 1) * bound
        require(gap <= limit, "apply", gap, limit)
    held = plan.row_sums > 0
    require(bool(plan.barycenters()[held].isfinite().all()), "barycenters")
    require(bool(plan.grad_y().isfinite().all() and plan.dual_value().isfinite()), "grad_y, dual_value")


def fuzz_hessian(case: Case) -> None:
    """PlanHessian, eigsh, smallest_eigenvalue, cg and minres on it."""
    got = solved(case)
    if got is None:
        return
    plan, dense = got
    H = plan.hessian(method=case.pick(["block", "cg"]))
    v, w = (case.randn(case.n * case.d).to(plan.f.dtype) for _ in range(2))
    Hv = H @ v
    assert H.last_response is not None
    status = H.last_response.status
    require(bool(Hv.isfinite().all()) or not status.success, f"product not finite under {status.value}")
    if dense.delta > 1e-4 or not Hv.isfinite().all():
        return
    referee = dense.hessian() if case.cost == "sqeuclidean" else None
    exact, condition = referee if referee is not None else (None, 1.0)
    size = 2 * dense.s * (float(dense.r.max()) + 2 * dense.s * dense.spread**2 * float(dense.r.max()) / case.eps)
    allowed = (dense.delta + H.rtol) * condition * size
    if exact is not None and status.success:
        gap, limit = float((Hv - exact @ v.double()).norm()), allowed * float(v.norm())
        require(gap <= limit, "HVP", gap, limit)
        skew = abs(float(v @ (H @ w) - w @ Hv))
        require(skew <= 2 * limit * float(w.norm()), "symmetry", skew, limit)
    if not plan.converged or not status.success:
        return
    k = min(2, H.shape[0])
    pairs = eigsh(H, k=k, which="SA", maxiter=20)
    require(bool(pairs.w.isfinite().all()) or pairs.status is Status.NONFINITE, "eigsh not finite")
    certificate = smallest_eigenvalue(H, maxiter=64)
    require(math.isfinite(certificate.lambda_min) or certificate.verdict.value == "undecided", "certificate")
    require(not certificate.lower > certificate.upper, "bracket", certificate.lower, certificate.upper)
    if exact is not None:
        true = float(torch.linalg.eigvalsh((exact + exact.T) / 2)[0])
        slack = allowed * H.shape[0]
        low, high = certificate.lower - slack, certificate.upper + slack
        require(low <= true <= high, "smallest eigenvalue", low, true, high)
        require(not pairs.status.success or abs(float(pairs.w[0]) - true) <= slack, "eigsh", pairs.w[0], true, slack)
    for solver in (cg, minres):
        answer = solver(H, v, rtol=1e-3, maxiter=40)
        require(bool(answer.x.isfinite().all()) or not answer.success, f"{solver.__name__} not finite")
        if answer.success:
            left = float((v - H @ answer.x).norm() / v.norm())
            require(left <= 2e-3 + 10 * H.rtol * size * float(answer.x.norm() / v.norm()), solver.__name__, left)


def fuzz_loss(case: Case) -> None:
    """ot_loss forward, backward and backward of backward, for points and weights."""
    x, y = (t.detach().clone().requires_grad_() for t in (case.x, case.y))
    weights = [None if w is None else w.clone().requires_grad_() for w in (case.a, case.b)]
    options = case.options | {"a": weights[0], "b": weights[1]}
    loss = ot_loss(x, y, case.eps, **options)
    plan = solve(case.x, case.y, case.eps, **case.options)
    if plan.status is Status.NONFINITE:
        return
    require(torch.equal(loss.detach(), plan.value()), "value of the plan")
    leaves = [x, y, *(w for w in weights if w is not None)]
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    require(all(bool(g.isfinite().all()) for g in grads), "gradient not finite")
    shortest = 1.0 if case.cost == "sqeuclidean" else float(x.detach().float().norm(dim=1).min())
    gap, size = (grads[0].detach().double() - plan.grad().double()).abs().max(), plan.embedded_grad().abs().max()
    require(float(gap) <= 8 * torch.finfo(x.dtype).eps * float(size) / shortest, "gradient of the plan", gap, size)
    directions = [case.randn(*t.shape).to(t.dtype) for t in (x, y)]
    second = torch.autograd.grad(sum((g * v).sum() for g, v in zip(grads[:2], directions, strict=True)), (x, y))
    for got, leaf in zip(second, (x, y), strict=True):
        require(got.shape == leaf.shape and got.dtype == leaf.dtype, "shape or dtype")
    overflow = torch.finfo(x.dtype).max if x.dtype == torch.float16 else math.inf  # what 16 bits cannot hold
    require(all(bool(g.isfinite().all()) for g in second) or overflow < math.inf, "double backward not finite")


def fuzz_batch(case: Case) -> None:
    """solve_batch against a loop, and check."""
    points = (torch.stack([t, t]) for t in (case.x, case.y))
    plans = solve_batch(*points, [case.eps, 2 * case.eps], **case.options)
    for plan, eps in zip(plans, (case.eps, 2 * case.eps), strict=True):
        alone = solve(case.x, case.y, eps, **case.options)
        require(plan.status is alone.status, "status of a batch")
        require(torch.equal(plan.f.nan_to_num(), alone.f.nan_to_num()), "batch")
    report = check(case.x, case.y, case.a, case.b, case.eps, cost=case.cost, scale=case.scale)
    require(math.isfinite(report.mean_cost) and math.isfinite(report.median_cost) and len(str(report)) > 0, "report")


def fuzz_regression(case: Case) -> None:
    """ShuffledRegression and minimize."""
    X = case.cloud(case.n, 1.0, 0.0)
    options = {name: case.options[name] for name in ("a", "b", "scale", "backend")}
    problem = ShuffledRegression(X, case.y, eps=case.eps, intercept=case.uniform() < 0.3, **options)
    w = problem.start(torch.Generator().manual_seed(case.seed))
    value, grad = problem.value_and_grad(w)
    assert problem.plan is not None
    if problem.plan.status is Status.NONFINITE:
        return
    require(bool(value.isfinite() and grad.isfinite().all()), f"not finite under {problem.plan.status.value}")
    H = problem.hessian(w)
    require(bool((H @ w).isfinite().all()), "product not finite")
    result = minimize(problem, w, method=NewtonCG(), options={"maxiter": 2})
    assert result.status is not None
    finite = math.isfinite(result.fun) and bool(result.x.isfinite().all())
    require(finite or not result.success, f"{result.status.value} without a number")
    require(result.success == result.status.success, "success")
    allowed = float(value) + 1e-3 * (abs(float(value)) + case.eps)
    require(not finite or result.fun <= allowed, "ascent", result.fun, allowed)


def fuzz_arguments(case: Case) -> None:
    """One argument spoilt: the answer is an error that is documented, before any work."""
    x, n, m = case.x, case.n, case.m
    spoilt = {
        "x": [x.long(), x[:0], x[:, 0], x * math.nan, "x", None, x.cfloat(), x[..., None, None], x > 0],
        "eps": [0.0, -1.0, math.nan, math.inf, "1", None, True, torch.ones(2)],
        "a": [torch.ones(n + 1), torch.full((n,), -1.0), torch.ones(n).long(), "a", torch.full((n,), 3.0)],
        "max_iter": [0, -3, 2.5, "3", True, None],
        "tol": [-1.0, math.nan],
        "anneal": [0.0, 2.0, math.nan],
        "method": ["", "lbfgs", None],
        "backend": ["", "keops"],
        "cost": ["", "l1"],
        "scale": [0.0, math.inf, -1.0],
        "init": [(torch.zeros(n + 1), torch.zeros(m)), (torch.full((n,), math.nan), torch.zeros(m))],
    }
    name = case.pick(list(spoilt))
    value = case.pick(spoilt[name])
    arguments = {"x": x, "y": case.y, "eps": case.eps} | case.options | {name: value}
    try:
        case.pick([solve, ot_loss])(**arguments)
    except DOCUMENTED as error:
        require("expected" in str(error), f"no word on what is expected: {error}")
        return
    raise AssertionError(f"{name}={value!r} was accepted")


FUNCTIONS: list[Callable[[Case], None]] = [
    fuzz_plan, fuzz_hessian, fuzz_loss, fuzz_batch, fuzz_regression, fuzz_arguments,
]  # fmt: skip


def run(seeds: range) -> Iterator[str]:
    """A line for every failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ConvergenceWarning)
        for seed in seeds:
            function = FUNCTIONS[seed % len(FUNCTIONS)]
            case = Case(seed)
            try:
                function(case)
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                place = "" if isinstance(error, AssertionError) else f" at {Path(where.filename).name}:{where.lineno}"
                yield f"{function.__name__} {type(error).__name__}{place}: {str(error)[:300]}\n    {case}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="how many seeds")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    failures = 0
    for line in run(range(options.start, options.start + options.count)):
        failures += 1
        print(line, flush=True)  # noqa: T201
    print(f"{failures} failures in {options.count} seeds")  # noqa: T201
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
