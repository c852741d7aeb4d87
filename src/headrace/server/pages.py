"""The files of the dashboard and of the API page: a few static files from the package, nothing from elsewhere.

Rules: only what lies in the folders is served, by exact name; the browser may load nothing from other hosts and run
nothing inline (CSP). Files are read again when they change, so a page can be worked on while the server runs.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.errors import NotFound
from headrace.server.exchange import Request, Response

if TYPE_CHECKING:
    from headrace.server.httpsession import HttpSession

HERE: Final = Path(__file__).parent
DASHBOARD: Final = HERE / "dashboard"
API_PAGE: Final = HERE / "apipage"

_TYPES: Final = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".png": b"image/png",
    ".ico": b"image/x-icon",
    ".woff2": b"font/woff2",
    ".json": b"application/json",
}
_POLICY: Final = (
    b"Content-Security-Policy: default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'\r\n"
    b"Referrer-Policy: no-referrer\r\nX-Frame-Options: DENY\r\nCross-Origin-Opener-Policy: same-origin\r\n"
    b"Cross-Origin-Resource-Policy: same-origin\r\nCache-Control: no-cache\r\n"
)


_ALONE: Final = _POLICY.replace(
    b"default-src 'self'; img-src 'self' data:;", b"default-src 'none'; style-src 'unsafe-inline'; img-src data:;"
)
"""For a page that brings its style along and needs nothing else."""


class File:
    """One file as it is sent; read again when it has changed on disk."""

    def __init__(self, path: Path, policy: bytes = _POLICY) -> None:
        self._path = path
        self._policy = policy
        self._stamp: tuple[int, int] = (0, -1)
        self._body = b""
        self._tag = b""

    def response(self, request: Request) -> Response:
        self._refresh()
        headers = b"ETag: " + self._tag + b"\r\n" + self._policy
        if self._tag in request.headers.get(b"if-none-match", b""):
            return Response(304, headers=headers)
        return Response(200, self._body, _TYPES[self._path.suffix], headers)

    def _refresh(self) -> None:
        try:
            stat = self._path.stat()
            if (stat.st_mtime_ns, stat.st_size) != self._stamp:
                self._body = self._path.read_bytes()
                self._stamp = (stat.st_mtime_ns, stat.st_size)
                self._tag = b'"' + hashlib.sha256(self._body).hexdigest()[:20].encode() + b'"'
        except OSError:
            raise NotFound("Not found") from None


class Page:
    """One file at one path."""

    is_open = True

    def __init__(self, path: Path) -> None:
        self._file = File(path)

    def serve(self, session: HttpSession, request: Request) -> Response:
        return self._file.response(request)


class Report:
    """What `headrace pipeline report` wrote, for those who may ask; 204 while there is none."""

    is_open = False

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None
        self._file = File(self._path, _ALONE) if self._path else None

    def serve(self, session: HttpSession, request: Request) -> Response:
        if self._path is None or self._file is None or not self._path.is_file():
            return Response(204)
        return self._file.response(request)


class Folder:
    """The files of a folder; the path parameter `file` names one of them."""

    is_open = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, File] = {}

    def serve(self, session: HttpSession, request: Request) -> Response:
        name = request.parameters["file"]
        if name not in self._files:
            self._files |= {path.name: File(path) for path in self._listed() if path.name not in self._files}
        if name not in self._files:
            raise NotFound("Not found")
        return self._files[name].response(request)

    def _listed(self) -> list[Path]:
        return [path for path in self._folder.iterdir() if path.is_file() and path.suffix in _TYPES]
