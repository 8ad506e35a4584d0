"""ServerSettings: what the HTTP side needs besides the engine, the tokenizer and the chat template."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServerSettings:
    served_model_names: tuple[str, ...]  # the first is the one /v1/models lists first and answers carry
    model_root: str  # where the weights came from: `root` of /v1/models
    api_key: str | None = None  # None: no key is asked for
    max_logprobs: int = 20
    max_body_bytes: int = 32 * 1024 * 1024
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds, `created` of /v1/models

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]
