import pytest
import torch

from ot_newton.graphs import repeated
from ot_newton.pairs import Pairs


def uniform(n: int, device: str) -> torch.Tensor:
    return torch.full((n,), 1 / n, dtype=torch.float32, device=device)


def test_on_a_cpu_it_is_the_step_itself():
    step = lambda: None  # noqa: E731
    assert repeated(step, torch.device("cpu")) is step


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_repeated_sweeps_are_those_of_a_loop_and_all_counted(device):
    rng = torch.Generator().manual_seed(0)
    x, y = (torch.rand(n, 5, generator=rng).to(device) for n in (300, 200))
    pairs = Pairs.of(x, y, uniform(300, device), uniform(200, device), eps=0.1)
    phi, psi = torch.zeros(300, device=device), torch.zeros(200, device=device)

    def sweep() -> None:
        phi.copy_(pairs.row(psi, phi))
        psi.copy_(pairs.col(phi, psi))

    repeat = pairs.repeated(sweep)
    for _ in range(20):
        repeat()
    got = phi.clone(), psi.clone()
    assert pairs.passes.half_steps == 40
    assert pairs.passes.total == 40

    phi.zero_()
    psi.zero_()
    for _ in range(20):
        sweep()
    assert torch.equal(got[0], phi)
    assert torch.equal(got[1], psi)


@pytest.mark.gpu
def test_a_step_that_fails_while_it_is_recorded_leaves_the_device_usable():
    calls = 0
    state = torch.zeros(3, device="cuda")

    def step() -> None:
        nonlocal calls
        calls += 1
        state.add_(1)
        if calls == 2:
            raise RuntimeError("no")

    repeat = repeated(step, state.device)
    repeat()
    with pytest.raises(RuntimeError, match="no"):
        repeat()
    assert state.tolist() == [1.0, 1.0, 1.0]
