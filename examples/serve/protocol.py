# SPDX-License-Identifier: Apache-2.0
"""The requests of OpenAI's endpoints, with the sampling parameters that vLLM and others add."""

import secrets
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from .library import ALL_TOKENS, MAX_LOGPROBS, Request

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_PROMPTS = 64
SMALLEST_TOP_P = 1e-6  # for 0, by which clients mean the likeliest token

Number = Annotated[float, Field(allow_inf_nan=False)]
Prompt = str | list[int]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_prompts(value: Any) -> list[Prompt]:
    """One prompt or several, each a text or token ids."""

    def is_tokens(prompt: Any) -> bool:
        return isinstance(prompt, list) and all(type(token) is int for token in prompt)

    prompts = [value] if isinstance(value, str) or (value and is_tokens(value)) else value
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"expected a text, token ids, or a list of 1 to {MAX_PROMPTS} of these")
    if not all(isinstance(prompt, str) or is_tokens(prompt) for prompt in prompts):
        raise ValueError("expected texts or lists of token ids")
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_unicode(prompt)
    return prompts


def _check_unicode(text: str) -> str:
    """JSON can name halves of characters, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"expected Unicode, got half a character at {error.start}") from None
    return text


def _as_text(value: Any) -> Any:
    """A text, or a list of parts, of which only those with text can be served."""
    if not isinstance(value, list):
        return value
    for part in value:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise ValueError("expected a text, or a list of parts of the type text")
    return "".join(part["text"] for part in value)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        """null means what a missing argument does."""
        if not isinstance(value, dict):
            return value
        return {name: entry for name, entry in value.items() if entry is not None}


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted: the server never adds such padding


class _Generation(_Strict):
    """What both endpoints take."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    stop: Annotated[list[str], BeforeValidator(_as_list), Field(max_length=MAX_STOPS)] = []
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Number, Field(ge=0, le=1)] = 1.0
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1 - 2**20)] | None = None
    user: str | None = None  # accepted, and not used
    metadata: dict[str, Any] | None = None
    store: Literal[False] = False
    # Parameters that vLLM and others add.
    top_k: Annotated[int, Field(ge=-1, le=ALL_TOKENS)] = 0  # 0 and -1: all tokens
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] = 1.0
    ignore_eos: bool = False

    @model_validator(mode="after")
    def _check_stream_options(self) -> "_Generation":
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ValueError("stream_options needs stream")
        return self

    @property
    def num_logprobs(self) -> int:
        raise NotImplementedError

    def engine_request(self, prompt: list[int], max_new_tokens: int, seed: int) -> Request:
        return Request(
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            num_samples=self.n,
            num_logprobs=self.num_logprobs,
            ignore_model_stops=self.ignore_eos,
            temperature=self.temperature,
            top_k=self.top_k if self.top_k > 0 else ALL_TOKENS,
            top_p=max(self.top_p, SMALLEST_TOP_P),
            min_p=self.min_p,
            repetition=self.repetition_penalty,
            presence=self.presence_penalty,
            frequency=self.frequency_penalty,
            seed=seed,
        )

    def seeds(self, num_prompts: int) -> list[int]:
        """The seed of the first choice of each prompt; each choice has the next one."""
        first = secrets.randbits(62) if self.seed is None else self.seed
        return [first + i * self.n for i in range(num_prompts)]


class CompletionRequest(_Generation):
    prompt: Annotated[list[Prompt], BeforeValidator(_as_prompts)]
    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: Literal[False] = False
    best_of: int | None = None

    @model_validator(mode="after")
    def _check(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n):
            raise ValueError("best_of must equal n")
        return self

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_as_text), AfterValidator(_check_unicode)] = ""
    name: str | None = None  # accepted, and not used: chat templates have no place for it
    refusal: None = None  # of an answer that comes back in the next request

    def for_template(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content}


class ChatRequest(_Generation):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0

    @model_validator(mode="after")
    def _check(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        return self

    @property
    def num_logprobs(self) -> int:
        return self.top_logprobs if self.logprobs else -1
