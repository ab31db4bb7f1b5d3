"""A run that is interrupted and continued is the run that was not interrupted, to the last bit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ot_newton
from ot_newton.checkpoint import Resumable, encode
from ot_newton.minimize import METHODS, minimize
from ot_newton.pairs import Passes
from ot_newton.problems import toys
from ot_newton.status import Status

OPTIONS = {"adam": {"lr": 0.05}}
PROBLEMS = {
    "valley": lambda: toys.Rosenbrock([-1.2, 1.0, 0.5, -0.3]),
    "matrix": lambda: toys.Rosenbrock([-1.2, 1.0, 0.5, -0.3], matrix=True),
    "saddle": lambda: toys.StrictSaddle([0.0, 0.0]),
    "large": lambda: toys.SaddleChain(150, x0=torch.linspace(-0.2, 0.3, 150)),
}
every_method = pytest.mark.parametrize("method", METHODS)


def same(a, b):
    """Two results agree in everything but the time they took."""
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.jac, b.jac)
    assert (a.fun, a.status, a.message) == (b.fun, b.status, b.message)
    assert (a.nit, a.nfev, a.njev, a.nhev, a.n_passes) == (b.nit, b.nfev, b.njev, b.nhev, b.n_passes)
    assert a.history.drop(columns="seconds").equals(b.history.drop(columns="seconds"))
    if a.certificate is None or b.certificate is None:
        assert a.certificate is b.certificate
    else:
        assert str(encode(a.certificate)) == str(encode(b.certificate))


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@every_method
def test_raising_the_limit_continues_exactly(method, problem, tmp_path):
    options = {"maxiter": 60, **OPTIONS.get(method, {})}
    whole = minimize(problem(), method=method, options=options)
    assert whole.nit > 0 or whole.status is Status.SADDLE
    for maxiter in (0, 1, 4, 7, 60):
        path = tmp_path / "run.ckpt"
        result = minimize(problem(), method=method, options=options | {"maxiter": maxiter}, checkpoint=path)
        assert result.nit <= maxiter
    same(result, whole)
    assert [file.name for file in tmp_path.iterdir()] == ["run.ckpt"]


@pytest.mark.parametrize("crash", [1, 5, 8])
@every_method
def test_a_crash_loses_at_most_the_steps_since_the_last_write(method, crash, tmp_path):
    options = {"maxiter": 25, "checkpoint_every": 3, **OPTIONS.get(method, {})}
    whole = minimize(PROBLEMS["valley"](), method=method, options=options)
    path, seen = tmp_path / "run.ckpt", []

    def stop(intermediate_result):
        if intermediate_result.nit == crash:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        minimize(PROBLEMS["valley"](), method=method, options=options, checkpoint=path, callback=stop)

    def watch(intermediate_result):
        seen.append(intermediate_result.nit)

    result = minimize(PROBLEMS["valley"](), method=method, options=options, checkpoint=path, callback=watch)
    same(result, whole)
    assert seen == list(range(crash - crash % 3 + 1, whole.nit + 1))


def test_stop_by_callback_and_finished_runs(tmp_path):
    path, problem = tmp_path / "run.ckpt", PROBLEMS["valley"]
    whole = minimize(problem())

    def stop(intermediate_result):
        return intermediate_result.nit == 7

    assert minimize(problem(), checkpoint=path, callback=stop).status is Status.STOPPED
    seen = []
    result = minimize(problem(), checkpoint=str(path), callback=lambda intermediate_result: seen.append(1))
    same(result, whole)
    assert len(seen) == whole.nit - 7
    same(minimize(problem(), checkpoint=path), whole)


def test_another_process_continues(tmp_path):
    path = tmp_path / "run.ckpt"
    program = (
        "import sys; from ot_newton.minimize import minimize; from ot_newton.problems import toys;"
        "minimize(toys.Rosenbrock([-1.2, 1.0, 0.5, -0.3]), method='adam-newton', options={'maxiter': 13},"
        "checkpoint=sys.argv[1])"
    )
    root = Path(ot_newton.__file__).parent.parent
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, cwd=root)
    result = minimize(PROBLEMS["valley"](), method="adam-newton", checkpoint=path)
    same(result, minimize(PROBLEMS["valley"](), method="adam-newton"))


class Warm(toys.Rosenbrock):
    """Each answer depends a little on the one before, as with a solver that starts warm."""

    error = 0.0

    def value(self, w):
        self.passes += Passes(half_steps=1)
        return super().value(w)

    def value_and_grad(self, w, rtol=None):
        f, g = super().value_and_grad(w, rtol)
        self.error = 1e-6 * float(torch.sin(f + 1e6 * self.error))
        return f, g * (1 + self.error)


class Remembering(Warm):
    def state(self):
        return {"error": self.error, "unused": (None, torch.zeros(2))}

    def restore(self, state):
        assert torch.equal(state["unused"][1], torch.zeros(2))
        self.error = state["error"]


@pytest.mark.parametrize("method", ["adam", "newton-cg"])
def test_a_problem_with_a_cache(method, tmp_path):
    options = {"maxiter": 30, "gtol": 1e-4}
    results = {}
    for cls in (Remembering, Warm):
        path = tmp_path / cls.__name__
        minimize(cls(), method=method, options=options | {"maxiter": 5}, checkpoint=path)
        problem = cls()
        problem.passes = Passes(1000)  # a counter that others have used
        results[cls] = minimize(problem, method=method, options=options, checkpoint=path)
    whole = minimize(Warm(), method=method, options=options)
    same(results[Remembering], whole)
    assert not torch.equal(results[Warm].x, whole.x)
    assert isinstance(Remembering(), Resumable)
    assert not isinstance(Warm(), Resumable)


def test_time_goes_on(tmp_path):
    path = tmp_path / "run.ckpt"
    options = {"gtol": 0.0, "lr": 1e-4, "maxiter": 10**9}
    first = minimize(toys.Rosenbrock(), method="adam", options=options | {"time_limit": 0.1}, checkpoint=path)
    assert first.status is Status.TIME_LIMIT
    again = minimize(toys.Rosenbrock(), method="adam", options=options | {"time_limit": 0.1}, checkpoint=path)
    assert again.nit == first.nit
    more = minimize(toys.Rosenbrock(), method="adam", options=options | {"maxiter": first.nit + 5}, checkpoint=path)
    seconds = more.history.seconds
    assert more.nit == first.nit + 5
    assert seconds.is_monotonic_increasing
    assert seconds.iloc[-1] >= 0.1


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    path = tmp_path / "run.ckpt"

    def run(maxiter, checkpoint=None):
        problem = toys.SaddleChain(200, device="cuda")
        return minimize(problem, method="adam-newton", options={"maxiter": maxiter}, checkpoint=checkpoint)

    run(5, path)
    result = run(500, path)
    assert result.success
    assert result.x.device.type == "cuda"
    torch.testing.assert_close(result.x, run(500).x)
    with pytest.raises(ValueError, match="device: cuda there, cpu here"):
        minimize(toys.SaddleChain(200), method="adam-newton", checkpoint=path)


def test_functions_can_be_continued(tmp_path):
    path = tmp_path / "run.ckpt"

    def fun(x):
        return ((x**2 - 1) ** 2).sum() + x.prod()

    x0 = torch.tensor([[0.3, -0.1]], dtype=torch.float32)
    minimize(fun, x0, options={"maxiter": 2}, checkpoint=path)
    same(minimize(fun, x0, checkpoint=path), minimize(fun, x0))
