"""Who may use the server: holders of an API key, and the web pages that the user has named."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket

from quart import Request, Response

from serving.errors import ApiError
from serving.settings import Settings

OPEN_PATHS = re.compile(
    r"/|/health|/page/[^/]*"
)  # probes have no key, and the page cannot ask for one before it is there
HEADER_NAMES = re.compile(r"[A-Za-z0-9, -]{1,1000}")
USUAL_HEADERS = "Authorization, Content-Type, X-Api-Key"
PREFLIGHT_SECONDS = 600
PROXY_HEADERS = ("Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP")
HOST = re.compile(r"(?s)(\[.*\]|.*?)(?::[0-9]*)?")  # the name without the port


class Access:
    """Checks requests before anything else is done for them, and tells browsers what they may show to whom."""

    def __init__(self, settings: Settings) -> None:
        self._keys = settings.api_keys
        self._origins = frozenset(settings.allowed_origins)
        own = ("localhost", socket.gethostname(), settings.host)  # no name server is asked for more: that may take long
        self._hosts = frozenset(name.lower() for name in (*own, *settings.allowed_hosts))

    def check(self, request: Request, key: str) -> Response | None:
        """The answer to a browser that asks whether an allowed page may send a request; otherwise None. `key` is what
        `key_of` says of the request.

        Raises:
            ApiError: 401 without a key; 403 for a name that is not this server's.
        """
        self._check_host(request)
        if self._is_preflight(request):
            return self._preflight(request)
        if self._keys and not OPEN_PATHS.fullmatch(request.path) and not key:
            message = "a valid API key is needed, sent as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'"
            raise ApiError(401, message, code="invalid_api_key")
        return None

    def check_administrator(self, request: Request) -> None:
        """Lets those pass who may see and end the server: with a key, which `check` has seen, or, where there is none,
        from this machine; but not through a proxy on it, and not from a web page in a browser on it.

        Raises:
            ApiError: 403 for others.
        """
        if self._keys:
            return
        forwarded = any(name in request.headers for name in PROXY_HEADERS)
        foreign_page = "Origin" in request.headers and not self._from_allowed_page(request)
        if forwarded or foreign_page or not is_loopback(request.remote_addr):
            message = "without an API key this is only for programs on the server's own machine"
            raise ApiError(403, message, code="forbidden")

    def key_of(self, request: Request) -> str:
        """The key that a request was sent with; empty if it has none of those that are accepted."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        sent = [token.strip() if scheme.lower() == "bearer" else "", request.headers.get("X-Api-Key", "")]
        # All are compared, in the same time whatever they have in common.
        found = [key for key in self._keys for one in sent if hmac.compare_digest(one.encode(), key.encode())]
        return found[0] if found else ""

    def _check_host(self, request: Request) -> None:
        """Where no key is asked for, a web page could reach the server under a name of its own that it lets point here
        (DNS rebinding), and so pass for the server's own page."""
        name = HOST.fullmatch(request.host)[1].lower()
        if (
            self._keys
            or not name
            or name in self._hosts
            or name.endswith(".localhost")
            or _address(name.removeprefix("[").removesuffix("]"))
        ):
            return
        message = f"'{name:.80}' is not a name of this server; --allowed-host makes it one"
        raise ApiError(403, message, code="forbidden_host")

    def mark(self, request: Request, response: Response) -> None:
        """Lets pages of the allowed origins read the answer."""
        if not self._origins:
            return
        response.headers.add("Vary", "Origin")
        if self._from_allowed_page(request):
            response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
            response.headers["Access-Control-Expose-Headers"] = "Retry-After"

    def _from_allowed_page(self, request: Request) -> bool:
        return request.headers.get("Origin") in self._origins

    def _is_preflight(self, request: Request) -> bool:
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        return asks and self._from_allowed_page(request)

    def _preflight(self, request: Request) -> Response:
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        headers = {
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": wanted if HEADER_NAMES.fullmatch(wanted) else USUAL_HEADERS,
            "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
        }
        return Response(status=204, headers=headers)


def is_loopback(address: str | None) -> bool:
    """Whether an IP address, also an IPv4 one inside an IPv6 one, is this machine talking to itself."""
    parsed = _address(address or "")
    return parsed is not None and (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that this is; None for a name."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
