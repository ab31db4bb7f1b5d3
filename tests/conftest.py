"""What all tests share: GPU tests need a GPU, unwritten memory shows as NaN, and no test may change global state."""

import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matrix products ask for on CUDA


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked `gpu` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


@pytest.fixture(autouse=True, scope="session")
def _fresh_memory_is_nan():
    torch.set_deterministic_debug_mode("error")


@pytest.fixture(autouse=True)
def _global_state_is_left_alone():
    before = _global_state()
    yield
    assert _global_state() == before


def _global_state() -> tuple:
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )
