"""Where the potentials of the next point are looked for: at the last ones, moved along their response."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

FARTHEST = 5.0  # eps, of a displacement that the first order still foretells


@dataclass(frozen=True, eq=False)
class WarmStart:
    """The last potentials, and their response in units of eps to the parameters, (n, size), (m, size), if known."""

    w: Tensor
    f: Tensor
    g: Tensor
    modes: Tensor | None
    dphi: Tensor | None
    dpsi: Tensor | None

    def moved_to(self, w: Tensor, eps: float) -> "WarmStart":
        """Moved along their response to w, where that is a small move."""
        if self.dphi is None or self.dpsi is None:
            return self
        step = w - self.w
        dphi, dpsi = self.dphi @ step, self.dpsi @ step
        if not float(torch.maximum(dphi.abs().max(), dpsi.abs().max())) < FARTHEST:
            return self
        return replace(self, f=self.f + eps * dphi, g=self.g + eps * dpsi)
