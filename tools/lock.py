"""Writes requirements-dev.lock: the exact versions that development, tests and benchmarks run with (`make lock`).

pip resolves the newest versions that pyproject.toml allows, without installing any. tools/setup.sh then installs with
the file as constraints, so every clone gets the same. Versions only: hashes would tie it to one platform and registry.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
LOCK: Final = ROOT / "requirements-dev.lock"
WANTED: Final = ".[dev,bench,otel]"
HEAD: Final = """\
# What development, tests and benchmarks run with. Written by `make lock`, read by tools/setup.sh as constraints.
"""


def main() -> None:
    resolve = ["pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-", WANTED]
    resolved = subprocess.run([sys.executable, "-m", *resolve], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    packages = [found["metadata"] for found in json.loads(resolved.stdout)["install"]]
    pinned = sorted(f"{normal(one['name'])}=={one['version']}" for one in packages if one["name"] != "headrace")
    LOCK.write_text(HEAD + "\n".join(pinned) + "\n", encoding="utf-8")
    print(f"wrote {LOCK.name}: {len(pinned)} packages")


def normal(name: str) -> str:
    """The one spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
