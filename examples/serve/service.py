# SPDX-License-Identifier: Apache-2.0
"""The engine on the side of the event loop: who gets which outputs, how many may wait."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

from .errors import ApiError
from .library import ALL_SAMPLES, Engine, Finish, Output, Request

POLL_MS = 100

# Takes the outputs that a step has for a request; an exception if the engine has failed.
Listener = Callable[[list[Output] | Exception], None]


@dataclass
class _Live:
    listener: Listener
    num_samples: int  # that have not finished


class Service:
    """All methods are for the event loop. A thread polls the engine, and wakes the loop once for
    the outputs of all requests."""

    def __init__(self, engine: Engine, max_live: int) -> None:
        self.engine = engine
        self._max_live = max_live  # samples that run or wait
        self._live: dict[int, _Live] = {}
        self._num_live = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._poll, name="engine outputs", daemon=True)
        self._ends = threading.Event()
        self.failure: Exception | None = None
        self.is_stopping = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and the engine."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()
        self.is_stopping = True
        self._live.clear()  # so that nobody calls the engine
        self.engine.close()

    @property
    def num_live(self) -> int:
        return self._num_live

    def check_ready(self) -> None:
        if self.failure is not None:
            raise ApiError(503, f"The engine has failed: {self.failure}", code="engine_failed")
        if self.is_stopping:
            raise ApiError(503, "The server is shutting down.", code="shutting_down")

    def check_room(self, num_samples: int) -> None:
        """429 if so many more samples would be too many. Nothing is reserved."""
        if num_samples > self._max_live:
            raise ApiError(400, f"n: at most {self._max_live} choices fit the queue", "n")
        if self._num_live + num_samples > self._max_live:
            raise ApiError(429, "The queue is full; try again later.", code="rate_limit_exceeded")

    def submit(self, request: Request, listener: Listener) -> int:
        """Queues a request; returns its number."""
        self.check_ready()
        try:
            number = self.engine.submit(request)
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        self._live[number] = _Live(listener, request.num_samples)
        self._num_live += request.num_samples
        return number

    def abort(self, number: int, sample: int = ALL_SAMPLES) -> None:
        """Ends a sample, or what is left of a request; its listener hears of each."""
        if number in self._live:
            self.engine.abort(number, sample)

    def abort_all(self) -> None:
        for number in self._live:
            self.engine.abort(number)

    def _poll(self) -> None:
        assert self._loop is not None
        while not self._ends.is_set():
            try:
                outputs = self.engine.poll(POLL_MS)
            except Exception as error:
                self._call(self._fail, error)
                return
            if outputs:
                self._call(self._deliver, outputs)

    def _call(self, function: Callable, argument: object) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(function, argument)

    def _deliver(self, outputs: list[Output]) -> None:
        of_request: dict[int, list[Output]] = {}
        for output in outputs:
            of_request.setdefault(output.request, []).append(output)
        for number, mine in of_request.items():
            live = self._live.get(number)
            if live is None:  # the service is closed
                continue
            num_finished = sum(output.finish != Finish.NOT for output in mine)
            live.num_samples -= num_finished
            self._num_live -= num_finished
            if live.num_samples == 0:
                del self._live[number]
            live.listener(mine)

    def _fail(self, error: Exception) -> None:
        self.failure = error
        live, self._live, self._num_live = self._live, {}, 0
        for request in live.values():
            request.listener(error)
