# SPDX-License-Identifier: Apache-2.0
"""The answers of both endpoints, whole and in pieces."""

import secrets
import time
from typing import Any

from .generation import Delta, TokenEntry
from .model import Model

SMALLEST_LOGPROB = -9999.0  # for -infinity, which JSON does not know


class Format:
    """The objects of one request. Subclasses know what an endpoint calls its parts."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: Model, with_logprobs: bool) -> None:
        self._model, self._with_logprobs = model, with_logprobs
        self._head = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
        }

    def whole(self, deltas: list[list[Delta]], usage: dict[str, int]) -> dict[str, Any]:
        """The answer to a request that is not streamed. `deltas`: the pieces of each choice."""
        choices = []
        for index, pieces in enumerate(deltas):
            text = "".join(piece.text for piece in pieces)
            entries = [entry for piece in pieces for entry in piece.entries]
            choices.append(
                {
                    "index": index,
                    **self._text(text),
                    "logprobs": self._logprobs(entries),
                    "finish_reason": pieces[-1].finish_reason,
                }
            )
        return self._object(self.whole_object, choices) | {"usage": usage}

    def first_chunks(self, num_choices: int) -> list[dict[str, Any]]:
        """What a stream begins with."""
        return []

    def chunk(self, delta: Delta) -> dict[str, Any]:
        choice = {
            "index": delta.choice,
            **self._delta(delta.text),
            "logprobs": self._logprobs(delta.entries) if delta.entries else None,
            "finish_reason": delta.finish_reason,
        }
        return self._object(self.chunk_object, [choice])

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        return self._object(self.chunk_object, []) | {"usage": usage}

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": kind, "model": self._model.name, "choices": choices}

    def _token_text(self, token: int) -> str:
        """A token for itself, as log-probabilities name it; a special token by its name."""
        token_bytes = self._model.token_bytes[token]
        try:
            return token_bytes.decode() or self._model.tokenizer.id_to_token(token) or ""
        except UnicodeDecodeError:  # a part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)

    def _text(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, entries: list[TokenEntry]) -> dict[str, Any] | None:
        raise NotImplementedError


class CompletionFormat(Format):
    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _delta = _text

    def _logprobs(self, entries: list[TokenEntry]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        likeliest = [
            {self._token_text(token): _finite(logprob) for token, logprob in entry.likeliest}
            for entry in entries
        ]
        return {
            "tokens": [self._token_text(entry.token) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": likeliest,
            "text_offset": [entry.begin for entry in entries],
        }


class ChatFormat(Format):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first_chunks(self, num_choices: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        choice = {"delta": delta, "logprobs": None, "finish_reason": None}
        choices = [choice | {"index": index} for index in range(num_choices)]
        return [self._object(self.chunk_object, [choice]) for choice in choices]

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, entries: list[TokenEntry]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        content = [
            self._token(entry.token, entry.logprob)
            | {"top_logprobs": [self._token(*likely) for likely in entry.likeliest]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._token_text(token),
            "logprob": _finite(logprob),
            "bytes": list(self._model.token_bytes[token]),
        }


def usage(num_prompt_tokens: int, num_new_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
    }


def _finite(logprob: float) -> float:
    return max(logprob, SMALLEST_LOGPROB)
