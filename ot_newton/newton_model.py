"""The quadratic model of a Newton step: where it leads inside a given radius, or which ray to search instead."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

import torch

from ot_newton.capped_cg import capped_cg
from ot_newton.certificate import Verdict, dense_certificate, rounding, spectrum
from ot_newton.eigen_step import eigen_step
from ot_newton.linesearch import first_length
from ot_newton.operators import LinearOperator, MatrixOperator
from ot_newton.status import Status


@dataclass(frozen=True)
class Ray:
    """A unit direction with f′ = `slope` ≤ 0 and f″ = `curvature` ≤ 0 along it, and a first length to try."""

    direction: torch.Tensor
    slope: float
    curvature: float
    length: float


@dataclass(frozen=True)
class Model:
    """A quadratic model of f around a point.

    Attributes:
        within: maps a radius to a step (size,) inside it and the decrease that the model promises; None if `ray` or
            nothing is to be followed.
        ray: a direction of negative curvature that promises more.
        lambda_min, scale: of the Hessian, NaN where they are not known.
        lambda_bound: upper bound of the smallest eigenvalue, from the certificate or the least Rayleigh quotient.
    """

    within: Callable[[float], tuple[torch.Tensor, float]] | None
    ray: Ray | None
    lambda_min: float
    scale: float
    lambda_bound: float


def exact_model(H: MatrixOperator, w: torch.Tensor, g: torch.Tensor, *, error: float, radius: float) -> Model:
    """Newton's step with |H|, or the lowest eigenvector if the quadratic model falls farther along that.

    `error` is the relative error of H; eigenvalues within it are raised to it.
    """
    values, vectors = spectrum(H)
    evidence = dense_certificate(values, vectors, H, rtol=error, error=error)
    lowest, scale, floor = evidence.lambda_min, evidence.scale, evidence.noise
    if not isfinite(lowest):
        return Model(None, None, lowest, scale, lowest)
    if scale == 0:
        return Model(None, _steepest(w, g, radius), lowest, scale, lowest)
    c = vectors.T @ g.to(vectors)  # (n,)

    def within(limit: float) -> tuple[torch.Tensor, float]:
        step, promised = eigen_step(values, c, floor=floor, radius=limit)
        return (vectors @ step).to(w), promised

    if evidence.verdict is Verdict.NEGATIVE:
        step, _ = eigen_step(values, c, floor=floor, radius=radius)
        fall = -float(c @ step + 0.5 * step @ (values * step))
        length = radius if isfinite(radius) else max(float(torch.linalg.vector_norm(step)), first_length(w))
        slope = float(c[0])
        if abs(slope) * length - 0.5 * lowest * length**2 >= 0.9 * fall:  # about as much, and it can go on
            v = -evidence.vector if slope > 0 else evidence.vector
            return Model(None, Ray(v, -abs(slope), lowest, length), lowest, scale, evidence.upper)
    return Model(within, None, lowest, scale, evidence.upper)


def inexact_model(
    H: LinearOperator,
    w: torch.Tensor,
    g: torch.Tensor,
    *,
    rtol: float,
    error: float,
    radius: float,
    maxiter: int | None,
) -> Model:
    """Capped CG to the relative residual `rtol`; its step is shortened by scaling."""
    damping = max(rounding(H), 3 * error)
    found = capped_cg(H, g, rtol=rtol, damping=damping, radius=radius, maxiter=maxiter)
    unknown = float("nan")
    if found.status is Status.NONFINITE:
        return Model(None, None, unknown, unknown, unknown)
    if found.norm == 0:
        return Model(None, _steepest(w, g, radius), unknown, 0.0, 0.0)
    length = float(torch.linalg.vector_norm(found.vector))
    if found.status is Status.NEGATIVE_CURVATURE:
        first = radius if isfinite(radius) else first_length(w)
        bent = min(found.curvature / length**2, 0.0)
        ray = Ray(found.vector / length, found.slope / length, bent, first)
        return Model(None, ray, unknown, found.norm, bent)

    def within(limit: float) -> tuple[torch.Tensor, float]:
        t = min(1.0, limit / length) if length else 1.0
        return t * found.vector, -t * found.slope - 0.5 * t * t * found.curvature

    return Model(within, None, unknown, found.norm, found.curvature / length**2 if length else unknown)


def _steepest(w: torch.Tensor, g: torch.Tensor, radius: float) -> Ray | None:
    """Where the Hessian vanishes, nothing but the gradient points anywhere."""
    norm = float(torch.linalg.vector_norm(g, dtype=torch.float64))
    length = radius if isfinite(radius) else first_length(w)
    return Ray(-g / norm, -norm, 0.0, length) if norm else None
