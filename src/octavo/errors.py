"""Every error Octavo raises on purpose.

    OctavoError
    ├── ConfigError            a flag or argument that cannot work            (exit code 2)
    ├── ModelError             a model that cannot be found, read or run
    │   ├── ModelNotFoundError       no such file, folder or name
    │   ├── CorruptModelError        truncated or damaged file
    │   └── UnsupportedModelError    an architecture or tensor type without code here
    ├── RequestError           one request is wrong: HTTP 400, the engine goes on
    │   └── ContextLengthError       prompt longer than the model or the pool can hold
    └── EngineError            the engine process died or does not answer: HTTP 503

A message names the value that was given and what to do instead. The command line prints it on one line.
"""


class OctavoError(Exception):
    """Base of all of them."""


class ConfigError(OctavoError):
    """A configuration that cannot work."""


class ModelError(OctavoError):
    """A model cannot be loaded."""


class ModelNotFoundError(ModelError):
    """No such file, folder or name."""


class CorruptModelError(ModelError):
    """The file is truncated or damaged."""


class UnsupportedModelError(ModelError):
    """The architecture or tensor type has no implementation here."""


class RequestError(OctavoError):
    """One request is wrong. `param` is the field at fault, `code` OpenAI's machine-readable word."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt does not fit the model's context or the block pool."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class EngineError(OctavoError):
    """The engine is not there."""
