import copy
import gc
import io

import pytest
import torch
from torch import nn
from training import data, flat, last, memory, network, training

from ot_newton.adam import Adam
from ot_newton.minimize import METHODS
from ot_newton.newton_cg import NewtonCG
from ot_newton.optim import SecondOrder
from ot_newton.saddle_switch import SaddleSwitch


def saved(thing):
    """What comes back from a file, read as torch reads by default."""
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", [*sorted(METHODS), SaddleSwitch(Adam(lr=0.03), NewtonCG(radius=2.0), check_every=3)])
def test_saved_and_loaded_it_goes_on_bit_for_bit(method, dtype):
    net = network(dtype=dtype)
    optimizer, closure = SecondOrder(net.parameters(), method=method), training(net, dtype)
    for _ in range(7):
        optimizer.step(closure)
    stored = saved({"net": net.state_dict(), "optimizer": optimizer.state_dict()})

    other = network(dtype=dtype)
    resumed = SecondOrder(other.parameters(), method="newton-cg")
    other.load_state_dict(stored["net"])
    resumed.load_state_dict(stored["optimizer"])
    assert resumed.method == optimizer.method
    again = training(other, dtype)
    for _ in range(8):
        assert torch.equal(optimizer.step(closure), resumed.step(again))
        assert torch.equal(flat(net), flat(other))
    assert last(optimizer).phase == last(resumed).phase
    assert last(optimizer).nhev == last(resumed).nhev


def test_the_state_keeps_every_dtype():
    net = network(dtype=torch.float32)
    optimizer, closure = SecondOrder(net.parameters(), method="adam-newton"), training(net, torch.float32)
    for _ in range(7):
        optimizer.step(closure)
    resumed = SecondOrder(network(dtype=torch.float32).parameters())
    resumed.load_state_dict(saved(optimizer.state_dict()))

    def leaves(value):
        if isinstance(value, torch.Tensor):
            return [(value.dtype, value.tolist())]
        if hasattr(value, "__dataclass_fields__"):
            return [x for name in value.__dataclass_fields__ for x in leaves(getattr(value, name))]
        return [(type(value), value)]

    assert repr(leaves(optimizer._memory)) == repr(leaves(resumed._memory))  # NaN included
    assert memory(optimizer).steps == memory(resumed).steps == 7


def test_a_method_of_ones_own_with_state_in_other_dtypes_survives():
    optimizer = SecondOrder([torch.ones(3, requires_grad=True)], method="adam")
    x = optimizer.param_groups[0]["params"][0]
    optimizer.step(lambda: (x**2).sum())
    state = memory(optimizer).state
    extra = {"m": torch.full((3,), 1 / 3, dtype=torch.float64), "v": torch.get_rng_state()}
    object.__setattr__(memory(optimizer), "state", type(state)(**{**state.__dict__, **extra}))
    resumed = SecondOrder([torch.ones(3, requires_grad=True)])
    resumed.load_state_dict(saved(optimizer.state_dict()))
    for name, tensor in extra.items():
        assert getattr(memory(resumed).state, name).dtype == tensor.dtype
        assert torch.equal(getattr(memory(resumed).state, name), tensor)


def test_the_state_of_another_optimizer_or_model_is_refused():
    net = network()
    optimizer = SecondOrder(net.parameters())
    with pytest.raises(ValueError, match="expected the state of a SecondOrder, got that of another optimizer"):
        optimizer.load_state_dict(torch.optim.SGD(net.parameters(), lr=0.1).state_dict())
    wide = network(3, 5)
    big = SecondOrder(wide.parameters())
    big.step(training(wide))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"expected 21 trainable entries in torch\.float64, got 26"):
        optimizer.load_state_dict(big.state_dict())
    assert optimizer.state_dict() == before
    fresh = SecondOrder(network().parameters())
    fresh.load_state_dict(saved(optimizer.state_dict()))  # before the first step there is nothing to remember
    fresh.step(lambda: torch.stack([(p**2).sum() for p in fresh.param_groups[0]["params"]]).sum())
    assert last(fresh).accepted


@pytest.mark.parametrize("method", sorted(METHODS))
def test_200_steps_leave_nothing_behind(method):
    net = network()
    optimizer = SecondOrder(net.parameters(), method=method)
    X, Y = data()
    rng = torch.Generator().manual_seed(1)

    def step():
        batch = torch.randint(len(X), (8,), generator=rng)
        optimizer.step(lambda: ((net(X[batch]) - Y[batch]) ** 2).mean())

    def alive() -> int:
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    for _ in range(25):  # until the memories of the method are full
        step()
    gc.collect()
    gc.disable()  # so that a cycle would show
    try:
        before = alive()
        for _ in range(200):
            step()
        assert alive() <= before + 2
    finally:
        gc.enable()


def test_dropout_draws_once_a_step_and_leaves_the_random_state_as_one_call_would():
    net = network(middle=nn.Dropout(0.3))
    closure = training(net)
    optimizer = SecondOrder(net.parameters(), method="newton-cg")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        closure()
        after = torch.get_rng_state()
        losses = []
        for seed in range(20):
            torch.manual_seed(seed)
            first = optimizer.step(closure)
            if seed == 0:
                assert torch.equal(torch.get_rng_state(), after)
            torch.manual_seed(seed)
            losses.append((float(first), float(closure().detach())))
    # each accepted step lowers the loss with the units that it was taken with
    assert all(end <= begin for begin, end in losses)
    assert losses[-1][1] < losses[0][0]


def test_an_interrupted_step_puts_the_parameters_back():
    net = network()
    optimizer, closure = SecondOrder(net.parameters()), training(net)
    before, calls = flat(net), []

    def interrupted():
        calls.append(flat(net))
        if not torch.equal(calls[-1], before):
            raise KeyboardInterrupt
        return closure()

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(interrupted)
    assert not torch.equal(calls[-1], before)
    assert torch.equal(flat(net), before)


def test_a_copy_goes_its_own_way():
    net = network()
    optimizer, closure = SecondOrder(net.parameters(), method="adam"), training(net)
    optimizer.step(closure)
    twin_net, twin = copy.deepcopy((net, optimizer))
    held = flat(net)
    twin.step(training(twin_net))
    optimizer.step(closure)
    assert torch.equal(flat(net), flat(twin_net))
    assert not torch.equal(flat(net), held)
