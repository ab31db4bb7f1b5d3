"""The speed experiment: its referee is right, wrong answers are caught, and what fails becomes a row that says so."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import referee as dense
import torch

from ot_newton.experiments import speed
from ot_newton.experiments.errors import InputError
from ot_newton.experiments.files import load_table
from ot_newton.experiments.peers import LIBRARIES
from ot_newton.experiments.run import Outcome
from ot_newton.experiments.speed_figure import NUMERIC, TEXT
from ot_newton.experiments.speed_own import Own
from ot_newton.experiments.speed_problem import Clouds, Referee, Task, errors
from ot_newton.experiments.speed_process import measure
from ot_newton.experiments.speed_worker import Meter, _measure

MODULES = {"GeomLoss": "geomloss", "OTT-JAX": "ott", "POT": "ot"}
CLOUDS = Clouds(n=30, d=3, eps=0.2, iterations=4)


@pytest.fixture(scope="module")
def judge() -> Referee:
    found = Referee(CLOUDS, "cpu")
    found.saved = found.prepare()
    return found


def answers(judge: Referee, iterate: str) -> dict[str, np.ndarray]:
    """Dense answers at an iterate, by the referee of the tests, which shares nothing with the judged one."""
    assert judge.saved is not None
    x, y = (torch.as_tensor(p).double() for p in CLOUDS.points)
    C, w, eps = dense.cost_matrix(x, y), torch.full((30,), 1 / 30, dtype=torch.float64), CLOUDS.eps
    f = g = before = torch.zeros(30, dtype=torch.float64)
    if iterate == "averaged":
        temperatures = CLOUDS.averaged_temperatures
        f, g = dense.row_potential(C, w, g, temperatures[0]), dense.row_potential(C.T, w, f, temperatures[0])
        for t in temperatures:
            f, g = (f + dense.row_potential(C, w, g, t)) / 2, (g + dense.row_potential(C.T, w, f, t)) / 2
        before, f, g = g, dense.row_potential(C, w, g, eps), dense.row_potential(C.T, w, f, eps)
        at = (dense.row_potential(C, w, before, eps), before)
    else:
        for _ in range(CLOUDS.iterations):
            before, f = g, dense.row_potential(C, w, g, eps)
            g = dense.row_potential(C.T, w, f, eps)
        at = {"plan": (f, before), "pair": (f, g), "ahead": (dense.row_potential(C, w, g, eps), g)}[iterate]
    there = dense.Referee(x, y, eps, at=at)
    value = there.r @ f + there.c @ before if iterate == "plan" else w @ f + w @ g
    return {"potential": f.numpy(), "value": value.numpy(), "gradient": there.grad_x.numpy()}


@pytest.mark.parametrize("iterate", ["plan", "pair", "ahead", "averaged"])
def test_referee_is_right_at_every_iterate(judge: Referee, iterate: str):
    found = errors(answers(judge, iterate), judge, iterate)
    assert set(found) == {"potential", "value", "gradient"}
    assert max(found.values()) < 1e-12


def test_iterates_are_told_apart(judge: Referee):
    found = errors(answers(judge, "pair"), judge, "averaged")
    assert found["potential"] > 1e-3
    assert found["gradient"] > 1e-3


def test_referee_product_is_that_of_the_dense_hessian(judge: Referee):
    assert judge.saved is not None
    x, y = (torch.as_tensor(p).double() for p in CLOUDS.points)
    f, g = torch.as_tensor(judge.saved["f"]), torch.as_tensor(judge.saved["before"])
    H = dense.Referee(x, y, CLOUDS.eps, at=(f, g)).hessian_x
    product = H @ torch.as_tensor(CLOUDS.direction()).double().reshape(-1)
    assert dense.relative(torch.as_tensor(judge.saved["hvp"]), product.reshape(30, 3)[CLOUDS.rows]) < 1e-9


@pytest.mark.parametrize("clouds", [CLOUDS, Clouds(n=24, d=17, eps=0.3, shift=100.0, scale=4.0)])
def test_our_answers_agree_with_the_referee(clouds: Clouds):
    judge = Referee(clouds, "cpu")
    judge.saved = judge.prepare()
    seen = {}
    for name, task in Own(clouds, "cpu", judge).tasks({"solve", "kernels", "accuracy"}):
        seen[name] = errors(task.answer(task.run()), judge, "plan")
    assert {
        "half-step",
        "forward",
        "gradient",
        "hvp",
        "transport of 1",
        "transport of 64",
        "Hadamard transport",
    } <= set(seen)
    assert max(error for found in seen.values() for error in found.values()) < 1e-3


def test_products_reach_the_error_that_they_are_named_after(judge: Referee):
    tasks = dict(Own(CLOUDS, "cpu", judge).tasks({"hvp"}))
    for name in ("hvp to 1e-4", "hvp to 1e-4, plain CG"):
        assert errors(tasks[name].answer(tasks[name].run()), judge, "plan")["hvp"] <= 1e-4


def test_a_problem_too_large_to_repeat_is_judged_by_what_must_hold():
    judge = Referee(CLOUDS, "cpu")
    for name, task in Own(CLOUDS, "cpu", judge).tasks({"solve", "kernels", "hvp"}):
        answer = task.answer(task.run())
        assert errors(answer, judge, "plan").keys() & answer.keys(), name
        assert max(errors(answer, judge, "plan").values()) < 1e-3, name


@pytest.mark.parametrize("kind", ["potential", "value", "gradient", "hvp"])
def test_wrong_and_nonfinite_answers_are_caught(judge: Referee, kind: str):
    assert judge.saved is not None
    right = answers(judge, "plan") | {"hvp": np.zeros((30, 3))}
    right["hvp"][CLOUDS.rows] = judge.saved["hvp"]
    for wrong, least in ((1.05 * right[kind], 0.02), (np.full_like(right[kind], np.nan), np.inf)):
        task = Task(lambda: None, lambda _, wrong=wrong: {kind: wrong})
        row = _measure(task, Meter("cpu", jax=False), 0.0, judge, "plan")
        assert row["status"] == "disagrees"
        assert f"{kind} off by" in row["detail"]
        assert errors({kind: wrong}, judge, "plan")[kind] >= least


def test_a_potential_is_compared_up_to_a_constant(judge: Referee):
    found = answers(judge, "pair")["potential"]
    assert errors({"potential": found + 7.0}, judge, "pair")["potential"] < 1e-10


@pytest.mark.filterwarnings("ignore")  # other libraries' own
@pytest.mark.parametrize("library", [name for name in LIBRARIES if not name.startswith("flash")])
def test_other_libraries_solve_the_same_problem(judge: Referee, library: str):
    package = next(package for name, package in MODULES.items() if library.startswith(name))
    needed = [package, *(["pykeops"] if library == "GeomLoss-online" else [])]
    if not all(find_spec(name) for name in needed):
        pytest.skip(f"needs {' and '.join(needed)}")
    made = LIBRARIES[library][1](CLOUDS, "cpu", judge)
    for name, task in made.tasks({"solve", "hvp"}):
        found = errors(task.answer(task.run()), judge, made.iterate)
        assert found, name
        assert max(found.values()) < 1e-3, name


def test_meter_sees_the_memory_that_a_task_takes():
    meter = Meter("cpu", jax=False)
    meter.start()
    seconds, held = meter.time(lambda: np.ones(1 << 25))  # 256 MiB
    peak = meter.peak()
    del held
    assert seconds > 0
    assert peak is not None
    assert 250 < peak < 400


def test_a_crash_and_a_hang_become_rows():
    rows, failure = measure({"mode": "nothing", "problems": [], "device": "cpu"}, timeout=120)
    assert rows == []
    assert failure is not None
    assert failure["status"] == "crashed"
    assert "mode: expected prepare, tasks" in failure["detail"]
    rows, failure = measure({"mode": "nothing", "problems": [], "device": "cpu"}, timeout=0.01)
    assert failure == {"task": "next", "status": "timed out", "detail": "no answer within 0.01 s"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": ("40",)}, "sizes like 5000x64, got '40'"),
        ({"large": ("0x3",)}, "sizes like 5000x64, got '0x3'"),
        ({"eps": 0.0}, "eps > 0"),
        ({"timeout": 0.0}, "timeout > 0"),
        ({"accuracy": (0,)}, "≥ 1"),
        ({"iterations": 0}, "≥ 1"),
    ],
)
def test_wrong_options_are_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        speed.Config(**options)


def test_a_run_is_whole_resumable_and_drawn_again(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch):
    config = speed.Config(
        preset="quick", sizes=("24x2",), libraries=("ot-newton", "GeomLoss"), first_n=0, seconds=0.0, device="cpu",
        out=tmp_path / "run", copy_to=tmp_path / "copy",
    )  # fmt: skip
    monkeypatch.setattr(speed, "installed", lambda name: None)
    assert speed.main(config) == 0
    table = load_table(tmp_path / "run/table.csv", numeric=NUMERIC, text=TEXT)
    ours = table[table["library"] == "ot-newton"].set_index("task")
    assert set(ours.drop("hvp")["status"]) == {"ok"}
    assert (ours["ms"].to_numpy() > 0).all()
    np.testing.assert_allclose(ours["ms_per_pass"].astype(float) * ours["passes"], ours["ms"])
    assert table[table["library"] == "GeomLoss"]["status"].tolist() == ["not installed"]
    assert "not installed: GeomLoss" in capsys.readouterr().out
    for name in ("table.csv", "environment.json", "figure.png"):
        assert (tmp_path / f"copy/run-{name}").read_bytes() == (tmp_path / "run" / name).read_bytes()
    assert (tmp_path / "run/figure.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(speed, "measure", None)  # nothing is measured a second time
    assert speed.main(config) == 0
    (tmp_path / "run/figure.png").unlink()
    assert speed.main(speed.Config(**{**config.__dict__, "redraw": True})) == 0
    assert (tmp_path / "run/figure.png").is_file()
    with pytest.raises(InputError, match=r"eps: 0\.1 → 0\.2"):
        speed.main(speed.Config(**{**config.__dict__, "eps": 0.2}))


def test_times_are_set_against_the_limits_and_against_ours():
    labels = {"variant": "plain", "status": "ok", "eps": 0.1, "n": 1000, "d": 5, "columns": 0, "task": "forward"}
    limits = [
        {"task": "exponentials per second", "rate": 1e9, "status": "limit"},
        {"task": "fp16 products per second", "rate": 1e10, "status": "limit"},
    ]
    outcomes = {
        "limits": Outcome({}, limits),
        "a": Outcome({}, [{**labels, "library": "ot-newton", "ms": 40.0, "passes": 20}]),
        "b": Outcome({}, [{**labels, "library": "other", "ms": 100.0, "passes": 20}]),
    }
    table = speed.compare(outcomes, device="cuda").table.set_index("run")
    assert table.loc["a", "exp_fraction"] == pytest.approx(0.5)  # 1 ms at the limit, 2 ms taken
    assert table.loc["a", "product_fraction"] == pytest.approx(1.5)
    assert pd.isna(table.loc["b", "product_fraction"])
    assert table.loc["b", "times_ours"] == pytest.approx(2.5)
    assert table.loc["a", "memory_bound_mb"] == pytest.approx(64 * 2000 * 5 / 2**20)


def test_on_a_gpu_what_matters_most_comes_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(speed, "installed", lambda name: "1")
    names = list(speed._cases(speed.PRESETS["h200"]))
    assert names[:5] == ["limits", "40000x5-ot-newton", "10000x64-ot-newton", "50000x64-ot-newton", "first"]
    rivals = [name for name in names if "flash" in name]
    assert names[5] == "compile"
    assert names[6:15] == rivals
    assert names[15] == "1000000x5-ot-newton"
    assert names[16:25] == [f"accuracy-{d}" for d in (5, 64, 65, 80, 96, 128, 256, 300, 512)]
    assert {name.split("-", 1)[1] for name in names[25:]} == {
        "GeomLoss", "GeomLoss-online", "OTT-JAX", "OTT-JAX-dense", "POT"
    }  # fmt: skip


def test_settings_do_not_depend_on_where_copies_go(tmp_path: Path):
    plain, other = speed.Config(), speed.Config(copy_to=tmp_path, timeout=1.0, out=tmp_path)
    assert plain.settings() == other.settings()
    json.dumps(plain.settings())
