# SPDX-License-Identifier: Apache-2.0
"""What clients are told when something is wrong: an HTTP status and OpenAI's error object."""

from typing import Any


class ApiError(Exception):
    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = {429: "rate_limit_error"}.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


def from_validation(errors: Any) -> ApiError:
    """The first error that pydantic has found in a body."""
    error = errors[0]
    place = [str(part) for part in error["loc"] if part != "body"]
    param = place[0] if place else None
    if error["type"] == "json_invalid":
        return invalid(None, f"The body is not valid JSON: {error['ctx']['error']}.")
    if error["type"] == "extra_forbidden":
        return invalid(param, f"Unrecognized request argument: {'.'.join(place)}")
    where = ".".join(place) or "body"
    return invalid(param, f"{where}: {error['msg'].removeprefix('Value error, ')}")
