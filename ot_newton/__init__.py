"""Newton's method for optimal-transport losses, without ever forming the n×m plan."""

from pathlib import Path as _Path

__version__ = "0.1.0"

# A checkout keeps the sub-packages `kernels`, `problems` and `experiments` beside this folder, an installed copy keeps
# them inside it. Looking in the repository root as well makes `python -m ot_newton` run from a bare checkout.
if not (_Path(__file__).parent / "kernels").is_dir():
    __path__.append(str(_Path(__file__).parent.parent))
