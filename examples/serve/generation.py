# SPDX-License-Identifier: Apache-2.0
"""The choices of one HTTP request while they grow."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from .errors import ApiError
from .library import Finish, Output, Request
from .metrics import Timer
from .service import Service
from .text import TextStream, TokenBytes


@dataclass(frozen=True)
class TokenEntry:
    """A token with its log-probabilities."""

    token: int
    logprob: float
    likeliest: list[tuple[int, float]]
    begin: int  # of its text, in characters of the whole text


@dataclass(frozen=True)
class Delta:
    """What a step adds to a choice."""

    choice: int
    text: str
    entries: list[TokenEntry]
    finish_reason: str | None


@dataclass
class _Choice:
    index: int
    stream: TextStream
    held: list[TokenEntry] = field(default_factory=list)  # whose text is held back
    num_tokens: int = 0
    finish_reason: str | None = None

    def feed(self, output: Output, token: bytes) -> Delta:
        if output.finish == Finish.ABORTED:
            raise ApiError(503, "The server is shutting down.", code="shutting_down")
        self.num_tokens += 1
        if output.finish != Finish.STOP:  # a token that says no more than that
            begin = self.stream.num_decoded
            self.held.append(TokenEntry(output.token, output.logprob, output.likeliest, begin))
        text = self.stream.feed(token, is_last=output.finish != Finish.NOT)
        if self.stream.has_stopped or output.finish == Finish.STOP:
            self.finish_reason = "stop"
        elif output.finish == Finish.LENGTH:
            self.finish_reason = "length"
        end = self.stream.num_given
        entries = [entry for entry in self.held if entry.begin < end]
        self.held = self.held[len(entries) :]
        return Delta(self.index, text, entries, self.finish_reason)


class Generation:
    """Choice i is sample i % n of prompt i // n."""

    def __init__(
        self,
        service: Service,
        token_bytes: TokenBytes,
        requests: Sequence[Request],
        stops: Sequence[str],
        timer: Timer,
    ) -> None:
        """Submits the requests, all or none."""
        self._service, self._token_bytes, self._timer = service, token_bytes, timer
        self._steps: asyncio.Queue[list[Output] | Exception] = asyncio.Queue()
        self._choices: dict[tuple[int, int], _Choice] = {}
        self.num_prompt_tokens = sum(len(request.prompt) for request in requests)
        self._num_open = sum(request.num_samples for request in requests)
        service.check_ready()
        service.check_room(self._num_open)
        self._numbers: list[int] = []
        for request in requests:
            try:
                number = service.submit(request, self._steps.put_nowait)
            except ApiError:
                self.close()
                raise
            self._numbers.append(number)
            for sample in range(request.num_samples):
                choice = _Choice(len(self._choices), TextStream(stops))
                self._choices[number, sample] = choice

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def num_new_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices.values())

    async def steps(self) -> AsyncIterator[list[Delta]]:
        """What each step adds, until all choices have finished."""
        while self._num_open > 0:
            step = await self._steps.get()
            if isinstance(step, Exception):
                raise ApiError(500, f"The engine has failed: {step}", code="engine_failed")
            deltas = [self._feed(output) for output in step]
            yield [delta for delta in deltas if delta is not None]

    def _feed(self, output: Output) -> Delta | None:
        choice = self._choices[output.request, output.sample]
        if choice.finish_reason is not None:  # it ended at a stop string
            return None
        delta = choice.feed(output, self._token_bytes[output.token])
        self._timer.token(choice.index)
        if choice.finish_reason is not None:
            self._num_open -= 1
            if output.finish == Finish.NOT:
                self._service.abort(output.request, output.sample)
        return delta

    def close(self) -> None:
        """Ends what has not finished."""
        for number in self._numbers:
            self._service.abort(number)
        self._timer.end(self.num_prompt_tokens, self.num_new_tokens)
