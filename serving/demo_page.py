"""`GET /`: the chat page in `serving/page/`. It is plain files, and an ordinary client of this server's API."""

from __future__ import annotations

from pathlib import Path

from quart import Blueprint, Response, abort

FOLDER = Path(__file__).parent / "page"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere and nothing inline; with trusted types the browser refuses to make HTML out of any text.
CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

blueprint = Blueprint("demo_page", __name__)
_files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES}


@blueprint.get("/")
async def page() -> Response:
    """The page itself."""
    return _file("index.html")


@blueprint.get("/page/<name>")
async def part(name: str) -> Response:
    """A file that the page is made of."""
    return _file(name)


def _file(name: str) -> Response:
    if name not in _files:
        abort(404)
    return Response(_files[name], headers=HEADERS, content_type=MEDIA_TYPES[Path(name).suffix])
