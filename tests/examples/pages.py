"""The code blocks of a page, and a folder in which its commands can be run as they are written.

A block is run when its fence names a language (`sh`, `python`, `ts`); blocks without one are output or sketches. The
only thing a test changes is the port, through the environment variables that the pages themselves name.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path(sys.executable).parent
LIMIT_S = 60.0


def blocks(page: str, language: str) -> list[str]:
    """The text of every block of that language, in the order of the page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def block_with(page: str, language: str, words: str) -> str:
    found = [block for block in blocks(page, language) if words in block]
    assert len(found) == 1, f"{page} has {len(found)} {language} blocks with {words!r}"
    return found[0]


def prepare(folder: Path) -> Path:
    """A folder that looks like the root of the project to commands: its .venv and its examples are there."""
    (folder / ".venv").symlink_to(ENVIRONMENT.parent)
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def environment(port: int = 0) -> dict[str, str]:
    """PATH with the installed commands; `port` is where programs find the server, and 0 lets a server choose."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    path = f"{ENVIRONMENT}{os.pathsep}{os.environ['PATH']}"
    chosen = {"HEADRACE_PORT": str(port), "HEADRACE_TCP_PORT": str(port), "HEADRACE_HTTP_PORT": "0"}
    if port:
        chosen["HEADRACE_URL"] = f"headrace://127.0.0.1:{port}"
    return {**inherited, "PATH": path, **chosen}


def run(command: list[str], folder: Path, port: int = 0) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        command, cwd=folder, env=environment(port), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_shell(block: str, folder: Path, port: int = 0) -> str:
    return run(["bash", "-euo", "pipefail", "-c", block], folder, port)


@contextmanager
def serving(block: str, folder: Path) -> Iterator[str]:
    """A server started by a one-line shell block; gives the line it prints when it listens, and stops it in order."""
    command = ["bash", "-c", f"exec env {block}" if block.startswith("HEADRACE_") else f"exec {block}"]
    with (folder / "server.err").open("w") as errors:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
            process.terminate()
            assert process.wait(LIMIT_S) == 0, (folder / "server.err").read_text()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def port_of(line: str) -> int:
    return int(line.split("://", 1)[1].split()[0].rsplit(":", 1)[1])
