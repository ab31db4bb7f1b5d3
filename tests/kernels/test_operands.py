"""The fp16 operands carry 22 bits, whatever the scale of the points.

Like the other kernels these run in Triton's interpreter only in a process that was started for it; `test_triton.py`
runs this file too.
"""

import os

import pytest
import torch

pytest.importorskip("triton")

from ot_newton.kernels import operands

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
here = pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="runs in the process of test_in_the_interpreter")


@pytest.mark.parametrize(
    ("d", "precision", "expected"),
    [(1, "fp32", (16, 1)), (5, "fp32", (16, 1)), (6, "fp32", (32, 1)), (42, "fp32", (128, 1)), (43, "fp32", (64, 3)),
     (65, "fp32", (96, 3)), (1000, "fp32", (1024, 3)), (16, "tf32", (16, 1)), (128, "bf16", (128, 1)),
     (129, "tf32", (160, 1))],
)  # fmt: skip
def test_layout(d, precision, expected):
    assert operands.layout(d, precision) == expected


def product(Q: torch.Tensor, K: torch.Tensor) -> torch.Tensor:
    """The scores that the kernels form, without rounding their sum."""
    Q, K = Q.double(), K.double()
    return Q @ K.T if Q.dim() == 2 else Q[0] @ K[0].T + Q[1] @ K[0].T + Q[0] @ K[1].T


@here
@pytest.mark.parametrize("d", [1, 3, 7, 33, 45, 65])
@pytest.mark.parametrize("power", [-14, 0, 14])
def test_scores_keep_22_bits_and_roles_can_be_exchanged(d, power):
    g = torch.Generator().manual_seed(0)
    q = (torch.randn(37, d, generator=g) * 2.0**power).to(DEVICE)
    k = (torch.randn(21, d, generator=g) * 2.0**-power).to(DEVICE)
    Q, K = operands.prepare(q, k, factor=3.0)
    error = product(Q, K)[:37, :21] - 3 * q.double() @ k.double().T
    # the last digit of a part, and below it the smallest fp16 number times the largest entry of a scaled operand
    smallest = d * 2.0**-23 * (3 * q.abs().max() * k.abs().max()).sqrt().double()
    assert (error.abs() <= 3 * 2.0**-21 * (q.double().abs() @ k.double().abs().T) + smallest).all()
    assert torch.equal(product(K, Q), product(Q, K).T)
    assert Q.shape[-2] % 256 == K.shape[-2] % 256 == 0
    assert (product(Q, K)[37:] == 0).all()


@here
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_low_precision_keeps_11_bits(precision):
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(5, 20, generator=g).to(DEVICE), torch.randn(6, 20, generator=g).to(DEVICE)
    Q, K = operands.prepare(q, k, precision=precision, factor=1.0)
    error = product(Q, K)[:5, :6] - q.double() @ k.double().T
    assert (error.abs() <= 2.0**-10 * (q.double().abs() @ k.double().abs().T)).all()
    assert error.abs().max() > 0


@here
def test_columns_keep_22_bits_at_any_scale():
    g = torch.Generator().manual_seed(0)
    V = torch.randn(50, 5, generator=g).to(DEVICE) * torch.tensor([1e-30, 1e-5, 1.0, 0.0, 1e30], device=DEVICE)
    parts, scale = operands.prepare_columns(V, 16)
    back = (parts[0].double() + parts[1].double()) * scale.double()
    assert ((back[:50, :5] - V.double()).abs() <= 2.0**-22 * V.double().abs()).all()
    assert (back[50:] == 0).all()
    assert (back[:, 5:] == 0).all()


def test_refuses_other_types_and_devices():
    x = torch.zeros(2, 3)
    with pytest.raises(TypeError, match=r"q: expected torch.float32 .* got torch.float64"):
        operands.check("fp32", q=x.double())
    with pytest.raises(ValueError, match="precision: expected one of fp32, tf32, bf16, got 'fp8'"):
        operands.check("fp8", q=x)
    if not INTERPRETED:
        with pytest.raises(ValueError, match="q: expected a tensor on one CUDA device, got cpu"):
            operands.check("fp32", q=x)
