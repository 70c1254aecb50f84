"""Errors of the server as responses: status, body and headers in OpenAI's form. Pure."""

from collections.abc import Mapping

from prompt_r1.environments.budget import OutOfBudget
from prompt_r1.errors import EnvError, FatalEnvError, QuestionTooLong
from prompt_r1.playing import LimitReached

NO_RETRY = {"x-should-retry": "false"}  # OpenAI's client repeats other failed requests by itself


class Failure(Exception):
    """A request that gets no answer, and the response that says so."""

    def __init__(
        self,
        status: int,
        type: str,
        message: str,
        *,
        code: str | None = None,
        field: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.headers = headers
        self.error = {"message": message, "type": type, "code": code, "param": field}
        self.body: dict[str, object] = {"error": self.error}


class BadRequest(Failure):
    """A request that cannot be answered: one sentence, and the field that is wrong."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(400, "invalid_request_error", message, field=field or None)


def failure_of(error: BaseException) -> Failure:
    """The response to an error: what the client did wrong, which limit was reached, or who failed."""
    message = str(error)
    match error:
        case Failure():
            return error
        case QuestionTooLong():
            code = "context_length_exceeded"
            return Failure(400, "invalid_request_error", message, code=code, field="messages")
        case LimitReached(limit="seconds"):
            return Failure(504, "time_limit", message, headers=NO_RETRY)
        case LimitReached() | OutOfBudget():
            return Failure(402, "budget_exhausted", message, headers=NO_RETRY)
        case EnvError():
            return Failure(502, "environment_error", message)
        case FatalEnvError():
            return Failure(502, "environment_unusable", message, headers=NO_RETRY)
    message = "an internal error; the server's log has the traceback"
    return Failure(500, "internal_error", message, headers=NO_RETRY)
