"""A part of the random inputs of `fuzz.py`; `python tests/fuzz.py` runs all."""

import fuzz
import pytest

from ot_newton import PlanHessian


@pytest.mark.parametrize("start", [20, 40, 80, 100, 120])
def test_no_random_input_is_silently_wrong(start):
    failures = list(fuzz.run(range(start, start + 20)))
    assert not failures, "\n".join(failures)


def test_seeds_are_repeatable_and_reach_every_function():
    cases = [fuzz.Case(seed) for seed in range(2)]
    assert str(cases[0]) == str(fuzz.Case(0))
    assert str(cases[0]) != str(cases[1])
    assert {name for name in vars(fuzz) if name.startswith("fuzz_")} == {f.__name__ for f in fuzz.FUNCTIONS}


@pytest.mark.parametrize(
    ("owner", "name", "first", "word"),
    [(fuzz.Plan, "grad", 0, "gradient"), (PlanHessian, "_embedded", 1, "HVP"), (fuzz.Plan, "value", 0, "value")],
)
def test_a_wrong_answer_is_found(owner, name, first, word, monkeypatch):
    """The bounds are not so wide that anything passes: an answer off by a thousandth is seen."""
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments: right(*arguments) * (1 + 1e-3))
    seeds = range(first, 120, len(fuzz.FUNCTIONS))
    found = [failure for seed in seeds for failure in fuzz.run(range(seed, seed + 1))]
    assert sum(word in failure for failure in found) >= 3, found
