"""The published recipe as a baseline: its evaluations, its damped Hessian, and that it gets where it should."""

import math

import pytest
import torch

from ot_newton.experiments.real_regression import RegressionConfig
from ot_newton.experiments.recipe import Recipe, _Run, run_recipe
from ot_newton.pairs import Passes

CONFIG = RegressionConfig(n=60)
SHORT = Recipe(sweeps=100, lanczos_steps=8, cg_steps=30)


def start(seed: int = 0):
    problem = CONFIG.problem(0.5)
    return problem, problem.start(torch.Generator().manual_seed(seed))


def test_an_evaluation_takes_the_fixed_number_of_iterations():
    problem, w = start()
    plan, loss, grad, norm = _Run(problem, SHORT).evaluate(w)
    assert plan.n_iter == SHORT.sweeps
    exact, slope = CONFIG.problem(0.5).value_and_grad(w)
    assert loss == pytest.approx(float(exact), rel=1e-3)
    assert float((grad - slope).norm()) < 0.05 * float(slope.norm())
    assert norm == pytest.approx(float(grad.norm()))


def test_products_are_those_of_the_damped_system():
    problem, w = start()
    run = _Run(problem, Recipe(sweeps=2000, cg_steps=400, cg_rtol=1e-10, damping=0.0))
    plan = run.evaluate(w)[0]
    v = torch.randn(problem.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = CONFIG.problem(0.5).hessian(w, 1e-8) @ v
    assert float((run.hessian(plan) @ v - exact).norm()) < 10 * plan.error * float(exact.norm())
    errors = []
    for damping in (1e-5, 1e-3):
        damped = _Run(problem, Recipe(cg_steps=400, cg_rtol=1e-10, damping=damping)).hessian(plan) @ v
        errors.append(float((damped - exact).norm() / exact.norm()))
    assert 1e-5 < errors[0] < errors[1]


def test_it_ends_at_a_minimum_and_counts_every_pass():
    problem, w = start(3)
    told: list[float] = []
    x, rows = run_recipe(problem, w, SHORT, lr=0.1, gtol=1e-5, adam_steps=150, newton_steps=30, progress=told.append)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    phases = [row["phase"] for row in rows]
    assert phases[:2] == ["start", "adam"]
    assert set(phases[phases.index("newton") :]) == {"newton"}
    looks = [row["lambda_min"] for row in rows if not math.isnan(row["lambda_min"])]
    assert looks[0] < 0
    assert looks[-1] > -SHORT.threshold
    assert all(look <= -SHORT.threshold for look in looks[:-1])
    assert rows[-1]["grad_norm"] <= 1e-5
    exact = CONFIG.problem(0.5)
    assert float(exact.value_and_grad(x)[1].norm()) < 0.05
    assert float(torch.linalg.eigvalsh(exact.hessian(x).to_dense())[0]) > -0.05
    assert all(row["n_passes"] == Passes(row["half_steps"], row["applications"]).total for row in rows)
    assert rows[-1]["n_passes"] > 60 * len(rows)
    assert len(told) == len(rows) - 1


def test_it_stops_at_the_limits():
    problem, w = start()
    _, rows = run_recipe(problem, w, SHORT, lr=1e-3, gtol=0.0, adam_steps=3, newton_steps=5, progress=lambda part: None)
    assert [row["phase"] for row in rows] == ["start", "adam", "adam", "adam"]
