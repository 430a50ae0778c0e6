# SPDX-License-Identifier: Apache-2.0
"""The engine of examples/engine, as its C interface in engine_c.h describes it. ctypes lets other
threads of Python run while a function of the engine does."""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

MAX_LOGPROBS = 20
MESSAGE_SIZE = 512
OUTPUTS_AT_ONCE = 256
INVALID = 1  # engine_status: an argument, a file or a request is refused
ALL_SAMPLES = -1
ALL_TOKENS = 2**31 - 1  # for Request.top_k


DEVICES = ("cpu", "cuda")  # by their numbers in Options.device


class Finish(IntEnum):
    NOT = 0
    STOP = 1
    LENGTH = 2
    ABORTED = 3


class Options(ctypes.Structure):
    _fields_ = [
        ("page_size", c_int32),
        ("num_pages", c_int32),
        ("max_batch_size", c_int32),
        ("max_step_tokens", c_int32),
        ("batch_invariant", c_int32),
        ("device", c_int32),
        ("has_8bit_cache", c_int32),
    ]


class _Request(ctypes.Structure):
    _fields_ = [
        ("prompt", POINTER(c_int32)),
        ("prompt_len", c_int32),
        ("max_new_tokens", c_int32),
        ("num_samples", c_int32),
        ("num_logprobs", c_int32),
        ("ignore_model_stops", c_int32),
        ("top_k", c_int32),
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("repetition", c_float),
        ("presence", c_float),
        ("frequency", c_float),
        ("seed", c_int64),
    ]


class _Output(ctypes.Structure):
    _fields_ = [
        ("request", c_int64),
        ("sample", c_int32),
        ("token", c_int32),
        ("finish", c_int32),
        ("logprob", c_float),
        ("num_likeliest", c_int32),
        ("likeliest_tokens", c_int32 * MAX_LOGPROBS),
        ("likeliest_logprobs", c_float * MAX_LOGPROBS),
    ]


class Statistics(ctypes.Structure):
    _fields_ = [
        ("steps", c_int64),
        ("mixed_steps", c_int64),
        ("computed_tokens", c_int64),
        ("reused_tokens", c_int64),
        ("preemptions", c_int64),
        ("used_pages", c_int32),
        ("running", c_int32),
        ("waiting", c_int32),
    ]


@dataclass(frozen=True)
class Request:
    """A request for Engine.submit(); engine.h explains the fields."""

    prompt: list[int]
    max_new_tokens: int
    num_samples: int = 1
    num_logprobs: int = -1
    ignore_model_stops: bool = False
    temperature: float = 0.0
    top_k: int = ALL_TOKENS
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Output:
    request: int
    sample: int
    token: int
    finish: Finish
    logprob: float
    likeliest: list[tuple[int, float]]


class Engine:
    """An engine that serves the model in `folder`. Errors of the caller are ValueError, others
    RuntimeError."""

    def __init__(self, library: Path, folder: Path, options: Options) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.engine_abort.argtypes = [c_void_p, c_int64, c_int32]
        self._library.engine_close.argtypes = [c_void_p]
        self._outputs = (_Output * OUTPUTS_AT_ONCE)()
        self._handle = c_void_p()
        self._call("engine_open", c_char_p(bytes(folder)), byref(options), byref(self._handle))

    def close(self) -> None:
        """Stops after the current step. No other function may be running, or be called later."""
        self._library.engine_close(self._handle)

    def submit(self, request: Request) -> int:
        """Queues a request; returns its number."""
        fields = dict(vars(request))
        prompt = fields.pop("prompt")
        tokens = (c_int32 * len(prompt))(*prompt)
        number = c_int64()
        wanted = _Request(prompt=tokens, prompt_len=len(prompt), **fields)
        self._call("engine_submit", self._handle, byref(wanted), byref(number))
        return number.value

    def abort(self, number: int, sample: int = ALL_SAMPLES) -> None:
        """Ends a sample that has not finished, or all of them."""
        self._library.engine_abort(self._handle, number, sample)

    def poll(self, timeout_ms: int) -> list[Output]:
        """Outputs since the last call; waits for them if there is none. One thread may poll."""
        count = c_int32()
        self._call(
            "engine_poll", self._handle, c_int32(timeout_ms), self._outputs,
            c_int32(OUTPUTS_AT_ONCE), byref(count),
        )  # fmt: skip
        return [_converted(self._outputs[i]) for i in range(count.value)]

    def statistics(self) -> Statistics:
        statistics = Statistics()
        self._library.engine_get_statistics(self._handle, byref(statistics))
        return statistics

    def _call(self, name: str, *arguments: Any) -> None:
        message = ctypes.create_string_buffer(MESSAGE_SIZE)
        status = getattr(self._library, name)(*arguments, message)
        if status:
            text = message.value.decode(errors="replace")
            raise ValueError(text) if status == INVALID else RuntimeError(text)


def _converted(output: _Output) -> Output:
    count = output.num_likeliest
    likeliest = zip(output.likeliest_tokens[:count], output.likeliest_logprobs[:count])
    return Output(
        output.request,
        output.sample,
        output.token,
        Finish(output.finish),
        output.logprob,
        list(likeliest),
    )
