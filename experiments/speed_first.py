"""The time to a first Hessian product in a fresh process, where nothing is imported and perhaps nothing compiled.

Run as a module: it prints one row of JSON. `framework_s` is what torch and the GPU's context take, `first_s` what this
library takes on top: its import, its kernels, a solve and a product.
"""

import json
import sys
from time import perf_counter


def main() -> int:
    """Measure, with the library imported only once the clock runs."""
    began = perf_counter()
    n, d, eps, device = (convert(word) for convert, word in zip((int, int, float, str), sys.argv[1:], strict=True))
    import torch

    rng = torch.Generator(device=device).manual_seed(0)
    x, y, A = (torch.rand(n, d, generator=rng, device=device) for _ in range(3))
    float(x.sum())
    started = perf_counter()
    from ot_newton.sinkhorn import solve

    plan = solve(x, y, eps)
    product = plan.hessian(rtol=1e-4) @ A.reshape(-1)
    total = float(product.sum())
    ended = perf_counter()
    row = {"framework_s": started - began, "first_s": ended - started, "finite": total - total == 0}
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
