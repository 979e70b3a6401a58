"""What goes in and out of the page's server, before Gradio sees it.

Gradio copies any file that a request names to where it can be fetched, and downloads what a request
gives an address of. So requests that change something may only do what the page itself does: upload
a file, and ask for an answer about a file that was uploaded.
"""

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

HOSTS = ("127.0.0.1", "localhost")
UPLOAD, ASK = "/gradio_api/upload", "/gradio_api/queue/join"
MOST_BYTES = 2**16  # of a question: it names a file, and holds none
# The browser asks nobody else, whatever Gradio's own scripts would like.
POLICY = "; ".join(
    [
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "worker-src 'self' blob:",
        "object-src 'none'",
        "frame-ancestors 'none'",
    ]
)


class Guard:
    """Refuses what the page itself never asks, and tells browsers to load nothing from elsewhere.

    Args:
        app: an ASGI application.
        folder: of uploads: the only files that a request may name.
    """

    def __init__(self, app: Any, folder: Path) -> None:
        self.app = app
        self.folder = folder

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None

        async def send_with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", POLICY.encode())
                message = {**message, "headers": [*message["headers"], policy]}
            await send(message)

        if scope["method"] in ("GET", "HEAD"):
            allowed = _from_here(scope)
        elif scope["path"] == ASK:
            body = await _body(receive)
            allowed = _from_here(scope) and self._names_uploads_only(body)
            receive = _again(body, receive)
        else:
            allowed = _from_here(scope) and scope["path"] == UPLOAD
        if not allowed:
            return await _refuse(send_with_policy)
        return await self.app(scope, receive, send_with_policy)

    def _names_uploads_only(self, body: bytes | None) -> bool:
        try:
            return body is not None and self._good(json.loads(body))
        except (ValueError, RecursionError):
            return False

    def _good(self, value: Any) -> bool:
        if isinstance(value, list):
            return all(map(self._good, value))
        if not isinstance(value, dict):
            return True
        if "path" in value and not is_upload(self.folder, value["path"]):
            return False
        return all(map(self._good, value.values()))


def is_upload(folder: Path, path: Any) -> bool:
    """Whether this is the path of something in a folder."""
    try:
        return isinstance(path, str) and Path(path).resolve().is_relative_to(folder.resolve())
    except (ValueError, OSError):  # ValueError: a path that holds a zero byte
        return False


def _from_here(scope: Any) -> bool:
    """Whether the page sends this, and not another site that gave its name to our address."""
    headers = {key.lower(): value.decode("latin-1") for key, value in scope["headers"]}
    named = [f"//{headers.get(b'host', '')}"]
    if b"origin" in headers:
        named.append(headers[b"origin"])
    try:
        return all(urlsplit(address).hostname in HOSTS for address in named)
    except ValueError:
        return False


async def _body(receive: Any) -> bytes | None:
    """What a request holds; `None` where that is too much, or the client went away."""
    body = b""
    while len(body) <= MOST_BYTES:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body
    return None


def _again(body: bytes | None, receive: Any) -> Any:
    """Gives a request once more that was read already."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Any:
        return waiting.pop() if waiting else await receive()

    return receive_again


async def _refuse(send: Any) -> None:
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": b"the demo's page never asks this\n"})
