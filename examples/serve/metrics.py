# SPDX-License-Identifier: Apache-2.0
"""What the server has done, in Prometheus' text format."""

import time
from collections import Counter

from .library import Options, Statistics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Histogram:
    def __init__(self) -> None:
        self._counts = [0] * len(SECONDS)
        self._sum, self._count = 0.0, 0

    def observe(self, seconds: float) -> None:
        self._sum += seconds
        self._count += 1
        for i, bound in enumerate(SECONDS):
            self._counts[i] += seconds <= bound

    def samples(self, name: str) -> list[str]:
        buckets = [
            f'{name}_bucket{{le="{bound:g}"}} {count}'
            for bound, count in zip(SECONDS, self._counts)
        ]
        infinite = f'{name}_bucket{{le="+Inf"}} {self._count}'
        return [*buckets, infinite, f"{name}_sum {self._sum:.6f}", f"{name}_count {self._count}"]


class Metrics:
    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()  # by endpoint and HTTP status
        self.disconnects = 0
        self.prompt_tokens = 0
        self.new_tokens = 0
        self.first_token = Histogram()
        self.inter_token = Histogram()
        self.whole_request = Histogram()

    def text(self, engine: Statistics, options: Options) -> str:
        lines: list[str] = []

        def family(name: str, kind: str, text: str, samples: list[str]) -> None:
            lines.extend([f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples])

        def number(name: str, kind: str, text: str, value: int) -> None:
            family(f"flashplan_{name}", kind, text, [f"flashplan_{name} {value}"])

        def histogram(name: str, text: str, values: Histogram) -> None:
            name = f"flashplan_{name}"
            family(name, "histogram", text, values.samples(name))

        name = "flashplan_responses_total"
        counts = [
            f'{name}{{endpoint="{endpoint}",status="{status}"}} {count}'
            for (endpoint, status), count in sorted(self.responses.items())
        ]
        family(name, "counter", "HTTP responses.", counts)
        for name, text, value in (
            ("disconnects_total", "Clients that went away before the end.", self.disconnects),
            ("prompt_tokens_total", "Tokens of prompts.", self.prompt_tokens),
            ("generation_tokens_total", "Tokens that were drawn.", self.new_tokens),
            ("steps_total", "Steps of the engine.", engine.steps),
            ("mixed_steps_total", "Steps with prompts and decodes.", engine.mixed_steps),
            ("computed_tokens_total", "Tokens of all steps.", engine.computed_tokens),
            ("reused_tokens_total", "Tokens found in the cache.", engine.reused_tokens),
            ("preemptions_total", "Sequences that had to wait again.", engine.preemptions),
        ):
            number(name, "counter", text, value)
        for name, text, value in (
            ("sequences_running", "Sequences in the batch.", engine.running),
            ("sequences_waiting", "Sequences that wait.", engine.waiting),
            ("pages_used", "Pages of the cache that sequences use.", engine.used_pages),
            ("pages", "Pages of the cache.", options.num_pages),
        ):
            number(name, "gauge", text, value)
        histogram("time_to_first_token_seconds", "From request to first token.", self.first_token)
        histogram("inter_token_latency_seconds", "Between tokens of a choice.", self.inter_token)
        histogram("request_seconds", "From request to end.", self.whole_request)
        return "\n".join(lines) + "\n"


class Timer:
    """The times of one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._begin = time.perf_counter()
        self._last: dict[int, float] = {}  # when a choice got its last token
        self._has_ended = False

    def token(self, choice: int) -> None:
        now = time.perf_counter()
        if not self._last:
            self._metrics.first_token.observe(now - self._begin)
        if choice in self._last:
            self._metrics.inter_token.observe(now - self._last[choice])
        self._last[choice] = now

    def end(self, num_prompt_tokens: int, num_new_tokens: int) -> None:
        """To be called once or more often."""
        if self._has_ended:
            return
        self._has_ended = True
        self._metrics.prompt_tokens += num_prompt_tokens
        self._metrics.new_tokens += num_new_tokens
        self._metrics.whole_request.observe(time.perf_counter() - self._begin)
