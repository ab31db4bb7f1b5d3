"""A part of the random inputs of `fuzz.py`; `python tests/fuzz.py` runs all."""

import fuzz
import pytest


@pytest.mark.parametrize("start", range(0, 60, 20))
def test_no_random_input_is_silently_wrong(start):
    failures = list(fuzz.run(range(start, start + 20)))
    assert not failures, "\n".join(failures)


def test_seeds_are_repeatable_and_reach_every_function():
    cases = [fuzz.Case(seed) for seed in range(2)]
    assert str(cases[0]) == str(fuzz.Case(0))
    assert str(cases[0]) != str(cases[1])
    assert {name for name in vars(fuzz) if name.startswith("fuzz_")} == {f.__name__ for f in fuzz.FUNCTIONS}


def test_a_wrong_answer_is_found(monkeypatch):
    """The bounds are not so wide that anything passes."""
    grad = fuzz.Plan.grad
    monkeypatch.setattr(fuzz.Plan, "grad", lambda plan: grad(plan) * (1 + 1e-3))
    seeds = range(0, 120, len(fuzz.FUNCTIONS))
    found = [failure for seed in seeds for failure in fuzz.run(range(seed, seed + 1))]
    assert sum("gradient" in failure for failure in found) >= 3
