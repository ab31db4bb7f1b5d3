"""One direction of imports: kernels → nothing, ot_newton → kernels, problems → ot_newton, experiments → problems."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ["kernels", "ot_newton", "problems", "experiments"]  # each may use itself and what stands before it
FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def imported(path: Path) -> list[str]:
    """Full names of all modules and members that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    assert not [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level], path
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return plain + [f"{n.module}.{alias.name}" for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path):
    allowed = ROOMS[: ROOMS.index(path.relative_to(ROOT).parts[0]) + 1]
    for name in imported(path):
        first, *rest = name.split(".")
        assert first not in ROOMS or first == "ot_newton", f"expected ot_newton.{name}, got {name}"
        if first == "ot_newton" and path.name != "__main__.py":
            room = rest[0] if rest and rest[0] in ROOMS else "ot_newton"
            assert room in allowed, f"{path.relative_to(ROOT)} may use {allowed}, got {name}"
