"""The one tree of errors a user can meet, each with its HTTP status, OpenAI code and field.

Owns: what can go wrong and how it is called on the wire. Does not own: how it is rendered
(`server.problems` does). A message names the limit and the value, never the user's text.
"""

from __future__ import annotations


class MoestroError(Exception):
    """Base of everything Moestro raises on purpose.

    `status` is the HTTP status, `kind` the OpenAI error type, `code` the machine-readable
    reason (or None) and `param` the request field or command-line flag at fault (or None).
    """

    status = 500
    kind = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(MoestroError):
    """The request cannot be served as it is; sending it again will not help."""

    status = 400
    kind = "invalid_request_error"


class ContextTooLong(InvalidRequest):
    """The prompt does not fit the model's context or the KV pool."""

    code = "context_length_exceeded"


class GrammarError(InvalidRequest):
    """A grammar is wrong, too large, or takes too long to compile."""

    code = "invalid_grammar"


class BadKey(MoestroError):
    """The API key is missing or wrong."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class NotFound(MoestroError):
    """No such route, model or object."""

    status = 404
    kind = "not_found_error"


class BodyTooLarge(MoestroError):
    """The request body is over the byte limit."""

    status = 413
    kind = "invalid_request_error"
    code = "request_too_large"


class BodyTimeout(MoestroError):
    """The request body did not arrive in time."""

    status = 408
    kind = "invalid_request_error"
    code = "request_timeout"


class HeadTooLarge(MoestroError):
    """The address and the headers of a request are over the limits."""

    status = 431
    kind = "invalid_request_error"
    code = "headers_too_large"


class RateLimited(MoestroError):
    """This client has sent too many requests; `retry_after` seconds later one is taken again."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(MoestroError):
    """The server cannot take this now: loading, draining or the engine is gone. Retry later."""

    status = 503
    kind = "overloaded_error"
    retry_after = 1  # seconds, sent as Retry-After


class QueueFull(Unavailable):
    """The waiting queue is at its limit."""

    code = "queue_full"


class EngineDead(Unavailable):
    """The engine process is gone."""

    code = "engine_dead"


class RequestTimeout(MoestroError):
    """The request took longer than --request-timeout; what was running for it was ended."""

    status = 504
    code = "timeout"


class StepFailed(MoestroError):
    """A step raised; the sequences that were in it end with this."""

    code = "step_failed"


class ConfigError(MoestroError):
    """A flag, a config file or a combination of them is wrong. Start-up ends here."""

    kind = "config_error"


class ModelError(MoestroError):
    """A checkpoint is of an unknown family, damaged, or has keys that are not understood."""

    kind = "model_error"


class OutOfMemory(ConfigError):
    """The model does not fit what the flags allow; names the missing bytes and the flag."""

    code = "out_of_memory"
