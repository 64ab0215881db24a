"""The page's web server, for browsers on this machine."""

from __future__ import annotations

import errno
import json
import math
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from plotly.offline import get_plotlyjs
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from farflung.errors import UserError
from farflung.report.watching.view import PLOTLY, View
from farflung.report.watching.watched import Watched
from farflung.signals import on_stop_signals

LOOPBACK = "127.0.0.1"
NAMES = ["localhost", LOOPBACK]
"""What this machine is called by a browser on it; a page elsewhere that has its name lead here gets nothing."""
UNKEPT = {"Cache-Control": "no-store", "Content-Security-Policy": "default-src 'self' 'unsafe-inline' data: blob:"}


def serve(watched: Sequence[Watched], port: int, opened: bool, tell: Callable[[str], None]) -> None:
    """Serves the page until a signal asks for the end. Raises UserError where the port cannot be had."""
    view = View(watched)
    with _listening(port) as door:
        address = f"http://{LOOPBACK}:{door.getsockname()[1]}"
        # Long runs are being read while the browser is on its way.
        threading.Thread(target=view.refresh, daemon=True).start()
        config = uvicorn.Config(_app(view), log_level="warning", access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        tell(f"watching at {address}; Ctrl-C ends it")
        if opened:
            webbrowser.open(address)

        def end(*_: object) -> None:
            server.should_exit = True

        with on_stop_signals(end):
            server.run(sockets=[door])


def _listening(port: int) -> socket.socket:
    """A socket that listens for browsers of this machine. Raises UserError."""
    try:
        return socket.create_server((LOOPBACK, port))
    except (OSError, OverflowError) as error:
        used = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        fault = "is in use" if used else f"cannot be had ({getattr(error, 'strerror', None) or error})"
        raise UserError(f"port {port} {fault}; choose another with --port, or --port 0 for a free one") from error


def _app(view: View) -> Starlette:
    async def shell(request: Request) -> Response:
        return HTMLResponse(view.shell(), headers=UNKEPT)

    def now(request: Request) -> Response:
        return HTMLResponse(view.page(), headers=UNKEPT)

    def news(request: Request) -> Response:
        asked = request.query_params
        try:
            have = [[int(one) for one in line.split(",") if one] for line in asked["have"].split(";")]
            told = view.news(asked["epoch"], int(asked["since"]), have)
        except (KeyError, ValueError):
            return Response("news?epoch=…&since=…&have=…", 400)
        return Response(json.dumps(_finite(told)), media_type="application/json", headers=UNKEPT)

    def program(request: Request) -> Response:
        forever = {"Cache-Control": "public, max-age=31536000, immutable"}
        return Response(get_plotlyjs(), media_type="text/javascript", headers=forever)

    async def icon(request: Request) -> Response:
        return Response(status_code=204)  # browsers ask for one, and complain where there is none

    answers = {"/": shell, "/now": now, "/news": news, PLOTLY: program, "/favicon.ico": icon}
    routes = [Route(path, answer) for path, answer in answers.items()]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=NAMES)])


def _finite(told: Any) -> Any:
    """The same without NaN, which JSON does not have."""
    if isinstance(told, dict):
        return {key: _finite(value) for key, value in told.items()}
    if isinstance(told, list | tuple):
        return [_finite(value) for value in told]
    return None if isinstance(told, float) and not math.isfinite(told) else told
