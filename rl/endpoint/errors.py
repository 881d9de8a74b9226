"""Errors in OpenAI's form."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

KINDS = {
    401: ("authentication_error", "invalid_api_key"),
    404: ("not_found_error", "model_not_found"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "server_is_full"),
}


def content(status: int, text: str) -> dict[str, Any]:
    """Return the body of an error."""
    default = ("server_error", None) if status >= 500 else ("invalid_request_error", None)
    kind, code = KINDS.get(status, default)
    return {"error": {"message": text, "type": kind, "param": None, "code": code}}


def error(status: int, text: str) -> Response:
    return JSONResponse(content(status, text), status)
