"""Every kernel once on a small problem of odd sizes; run as a program under a memory checker, see test_sanitizer.py."""

import torch

from ot_newton.kernels.fused import apply, attend, hadamard, half_step, lse, prepare


def main() -> int:
    """Run them on the GPU; 0 if all results are finite."""
    rng = torch.Generator(device="cuda").manual_seed(0)
    draw = lambda *shape: torch.rand(shape, generator=rng, device="cuda")  # noqa: E731
    finite = True
    for n, m, d in ((129, 65, 5), (65, 131, 65), (33, 257, 300)):
        q, k, u, v = draw(n, d), draw(m, d), -draw(n), draw(m)
        operands = prepare(q, k)
        anchor = lse(q, k, v)
        results = [anchor, *half_step(q, k, v, -anchor, operands=operands)]
        for columns in (1, 7, 33, 64, 65):
            V = draw(m, columns)
            results += [apply(q, k, u - anchor, v, V), *attend(q, k, v, V), *attend(q, k, v, V, anchor=anchor)]
        results.append(hadamard(q, k, u - anchor, v, draw(n, 3), draw(m, 3), V, operands=operands))
        bad = anchor.clone()
        bad[::9] = float("nan")  # rows that are repeated
        results += [lse(q, k, v, anchor=bad), *attend(q, k, v, V, anchor=bad)]
        finite &= all(bool(torch.isfinite(result).all()) for result in results)
    return 0 if finite else 1


if __name__ == "__main__":
    raise SystemExit(main())
