#!/usr/bin/env python3
"""Check what the built archives hold: contents.py SDIST WHEEL.

The source archive holds the modules and the data where the repository has them; the wheel holds them below ot_newton/,
and beside that only its metadata.
"""

import re
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("ot_newton", "kernels", "problems", "experiments")


def main(sdist: str, wheel: str) -> int:
    """Print what is missing or too much; 0 if nothing is."""
    sources = {path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    sources |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "problems/data").iterdir() if path.is_file()}
    sources.add("ot_newton/py.typed")
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    metadata = {name for name in in_wheel if re.match(r"ot_newton-[^/]+\.dist-info/", name)}
    installed = {name if name.startswith("ot_newton/") else f"ot_newton/{name}" for name in sources}
    problems = [
        *(f"the source archive lacks {name}" for name in sorted(sources - in_sdist)),
        *(f"the wheel lacks {name}" for name in sorted(installed - in_wheel)),
        *(f"the wheel holds {name}" for name in sorted(in_wheel - installed - metadata)),
    ]
    if not any(name.endswith("/LICENSE") for name in metadata):
        problems.append("the wheel's metadata lacks the licence")
    print("\n".join(problems) or f"{len(installed)} files and {len(metadata)} of metadata in {Path(wheel).name}")
    return bool(problems)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
