"""Errors as clients see them: a status, and OpenAI's JSON shape."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """Ends a request with `status`; `retry_after` is in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def renamed(self, param: str) -> ApiError:
        """The same error of a field that the client knows under another name."""
        message = self.message.replace(f"'{self.param}", f"'{param}", 1)
        return ApiError(self.status, message, param=param, code=self.code, retry_after=self.retry_after)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the reply, which is also the last frame of a stream that fails."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """What the client sent cannot be served, and why."""
    return ApiError(400, message, param=param, code=code)
