# SPDX-License-Identifier: Apache-2.0
"""Generations over a service that does what a real engine does rarely: refuse, and fail."""

import asyncio
import json
import math

import pytest

from serve.errors import ApiError
from serve.generation import Delta, Generation, TokenEntry
from serve.library import Finish, Options, Output, Request, Statistics
from serve.metrics import Histogram, Metrics, Timer
from serve.model import Model
from serve.responses import SMALLEST_LOGPROB, CompletionFormat
from serve.service import Service
from serve.text import TokenBytes
from tiny_model import make_tokenizer

BYTES = TokenBytes(make_tokenizer())


class FakeEngine:
    """Says what its test has put into `polls`, and remembers what is aborted."""

    def __init__(self, *polls, refuses=()):
        self.polls, self.refuses = list(polls), refuses
        self.aborted, self.num_submitted, self.is_closed = [], 0, False

    def submit(self, request):
        if self.num_submitted in self.refuses:
            raise ValueError("prompt: expected another one")
        self.num_submitted += 1
        return self.num_submitted - 1

    def poll(self, timeout_ms):
        if not self.polls:
            raise RuntimeError("the device is gone")
        return self.polls.pop(0)

    def abort(self, number, sample):
        self.aborted.append((number, sample))

    def statistics(self):
        return Statistics()

    def close(self):
        self.is_closed = True


def generate(engine, num_requests=1):
    """What the steps of a generation add, and its service."""

    async def run():
        service = Service(engine, max_live=10)
        requests = [Request([1], max_new_tokens=9) for _ in range(num_requests)]
        generation = Generation(service, BYTES, requests, [], Timer(Metrics()))
        service.start()
        try:
            return [delta async for deltas in generation.steps() for delta in deltas]
        finally:
            generation.close()
            service.close()
            assert engine.is_closed
            with pytest.raises(ApiError, match="shutting down|failed"):
                service.check_ready()

    return asyncio.run(run())


def output(token, finish=Finish.NOT, request=0):
    return Output(request, 0, token, finish, 0.0, [])


def test_tokens_of_one_poll():
    letters = [BYTES._bytes.index(letter) for letter in (b"a", b"b", b"c")]
    a, b, c = letters
    deltas = generate(FakeEngine([output(a), output(b)], [], [output(c, Finish.LENGTH)]))
    assert [delta.text for delta in deltas] == ["a", "b", "c"]
    assert [delta.finish_reason for delta in deltas] == [None, None, "length"]


def test_engines_that_fail():
    with pytest.raises(ApiError, match="The engine has failed: the device is gone") as failure:
        generate(FakeEngine([output(5)]))
    assert failure.value.status == 500
    assert failure.value.body["error"]["type"] == "server_error"


def test_all_requests_or_none():
    engine = FakeEngine(refuses=[2])
    service = Service(engine, max_live=10)
    requests = [Request([1], max_new_tokens=9)] * 4
    with pytest.raises(ApiError, match="prompt: expected another one") as refusal:
        Generation(service, BYTES, requests, [], Timer(Metrics()))
    assert refusal.value.status == 400
    assert [number for number, _ in engine.aborted] == [0, 1]


def test_room_is_counted_in_choices():
    service = Service(FakeEngine(), max_live=5)
    service.submit(Request([1], 9, num_samples=3), print)
    service.check_room(2)
    with pytest.raises(ApiError, match="queue is full") as full:
        service.check_room(3)
    assert full.value.status == 429
    with pytest.raises(ApiError, match="at most 5 choices") as too_many:
        service.check_room(6)
    assert too_many.value.status == 400


def test_buckets_count_what_is_below():
    histogram = Histogram()
    for seconds in (0.3, 0.5, 100):
        histogram.observe(seconds)
    samples = histogram.samples("x")
    assert {'x_bucket{le="0.25"} 0', 'x_bucket{le="0.5"} 2', 'x_bucket{le="60"} 2'} < set(samples)
    assert samples[-3:] == ['x_bucket{le="+Inf"} 3', "x_sum 100.800000", "x_count 3"]


def test_log_probabilities_are_numbers_of_json():
    model = Model("x", 1, 300, make_tokenizer(), BYTES, None)
    form = CompletionFormat(model, with_logprobs=True)
    entry = TokenEntry(5, -math.inf, [(6, -math.inf)], begin=0)
    whole = form.whole([[Delta(0, "x", [entry], "stop")]], {})
    assert whole["choices"][0]["logprobs"]["token_logprobs"] == [SMALLEST_LOGPROB]
    json.dumps(whole, allow_nan=False)


def test_metrics_of_an_engine_that_did_nothing():
    text = Metrics().text(Statistics(), Options(num_pages=7))
    assert "flashplan_pages 7\n" in text
    assert "flashplan_steps_total 0\n" in text
