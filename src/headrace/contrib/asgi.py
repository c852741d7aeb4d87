"""An app inside a web application: FastAPI, Starlette or anything else that speaks ASGI. Needs none of them.

    api = FastAPI(lifespan=lifespan(jobs, worker=True))
    api.mount("/queue", Dashboard(jobs))

Request handlers need nothing special: `await send.enqueue(...)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from headrace.config import Settings
from headrace.embedded import LocalPeer
from headrace.errors import ConfigError
from headrace.server.asgi import AsgiApp, Receive, Scope, Send
from headrace.tasks.app import Headrace


def lifespan(
    app: Headrace, *, worker: bool = False, **options: Any
) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """A lifespan for the web application: connected while it serves, and with `worker` running the app's tasks in its
    loop. The options are those of `app.worker`. A lifespan of your own does the same with
    `async with app, app.worker(): yield`."""

    @asynccontextmanager
    async def live(_: Any) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(app)
            if worker:
                await stack.enter_async_context(app.worker(**options))
            yield

    return live


class Dashboard:
    """Dashboard and HTTP API of an app with its engine in this process, to be mounted at a path of its own.

    It has no authentication: put the web application's own login in front of it.
    """

    def __init__(self, app: Headrace, settings: Settings | None = None) -> None:
        if not app.url.startswith(("sqlite:", "memory:")):
            scheme = app.url.partition(":")[0]  # the rest may hold a password
            raise ConfigError(
                f"{scheme}: only an app with its engine inside (sqlite:///, memory://) can show a dashboard; "
                "a server has a dashboard of its own, on port 6790"
            )
        self._app = app
        self._settings = settings
        self._mounted: tuple[LocalPeer, AsgiApp] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (await self._asgi())(scope, receive, send)

    async def _asgi(self) -> AsgiApp:
        """Created again when the app was closed and reopened: then it is another engine."""
        channel = await asyncio.wrap_future(self._app.client.connect())
        assert isinstance(channel, LocalPeer)
        if self._mounted is None or self._mounted[0] is not channel:
            self._mounted = (channel, AsgiApp(channel.home, self._settings))
        return self._mounted[1]
