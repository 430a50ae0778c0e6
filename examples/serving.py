# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: each step computes whatever tokens every request has ready."""

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

import flashplan as fp
from kv_pool import KvPool
from llama import Array, Llama


@dataclass
class Request:
    name: str
    tokens: list[int]  # the prompt, then what has been generated
    max_new_tokens: int
    num_prompt_tokens: int = field(init=False)
    num_cached: int = 0  # how many tokens have their keys and values in the pages
    pages: list[int] = field(default_factory=list)
    seed: int = 0  # of its random numbers

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def capacity(self) -> int:
        return self.num_prompt_tokens + self.max_new_tokens


@dataclass
class Statistics:
    prefill_steps: int = 0  # steps with prompt tokens
    decode_steps: int = 0  # steps with a token of a request that is past its prompt
    mixed_steps: int = 0  # steps with both, counted in each of the above as well
    peak_pages: int = 0
    shared_tokens: int = 0  # prompt tokens whose pages another request had computed
    plan_us: list[float] = field(default_factory=list)  # of each step


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. By its own seed, a request gets the same tokens beside any others."""

    temperature: float = 0.0  # 0: the most likely token
    top_p: float = 1.0
    seed: int = 0  # of the first request; the next one has the next


class Engine:
    """Serves requests over one paged KV cache.

    Prefill and decode are not two modes: a request always has some tokens that are not cached yet
    (the rest of its prompt, or the token sampled last), and a step computes as many of them as
    max_step_tokens allows, in one ragged batch.
    """

    def __init__(
        self,
        model: Llama,
        pool: KvPool,
        max_batch_size: int,
        max_step_tokens: int,
        device: str,
        sampling: Sampling,
    ) -> None:
        if max_step_tokens < max_batch_size:
            raise ValueError("max_step_tokens: every running request needs at least one")
        self.model, self.pool = model, pool
        self.max_batch_size, self.max_step_tokens = max_batch_size, max_step_tokens
        self.sampling, self.num_submitted = sampling, 0
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.statistics = Statistics()
        heads, dim = model.config.num_qo_heads, model.config.head_dim
        self.attention = fp.Attention(
            num_qo_heads=heads,
            num_kv_heads=model.config.num_kv_heads,
            head_dim=dim,
            page_size=pool.page_size,
            q_dtype=model.kv_dtype,
            o_dtype="float32",
            max_batch_size=max_batch_size,
            max_qo_tokens=max_step_tokens,
            device=device,
        )
        self._out = model.xp.empty((max_step_tokens, heads, dim), dtype=model.xp.float32)

    def submit(self, request: Request) -> None:
        if self.pool.pages_for(request.capacity) > self.pool.num_pages:
            raise ValueError(f"{request.name}: {request.capacity} tokens do not fit the KV cache")
        request.seed = self.sampling.seed + self.num_submitted
        self.num_submitted += 1
        self.waiting.append(request)

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[Request]:
        """Runs one batch through the model and returns the requests that it finished."""
        counts = self._schedule()
        requests = self.running
        new = [range(r.num_cached, r.num_cached + n) for r, n in zip(requests, counts)]
        self._count_step(new)

        # What attention has to know of the step: lengths for the plan, page ids for each layer.
        qo_indptr = np.cumsum([0, *counts], dtype=np.int32)
        kv_lens = np.array([span.stop for span in new], np.int32)
        block_table = np.zeros((len(requests), max(len(r.pages) for r in requests)), np.int32)
        for row, request in zip(block_table, requests):
            row[: len(request.pages)] = request.pages

        start = time.perf_counter()
        self.attention.plan(qo_indptr, kv_lens)
        self.statistics.plan_us.append(1e6 * (time.perf_counter() - start))

        xp, pool = self.model.xp, self.pool
        indptr, lens, table = xp.asarray(qo_indptr), xp.asarray(kv_lens), xp.asarray(block_table)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            k_cache, v_cache = pool.k[layer], pool.v[layer]
            fp.append_paged_kv(k, v, k_cache, v_cache, indptr, lens, block_table=table)
            out = self._out[: len(q)]
            return self.attention.run(q, k_cache, v_cache, block_table=table, out=out)

        tokens = [r.tokens[i] for r, span in zip(requests, new) for i in span]
        positions = [i for span in new for i in span]
        logits = self.model.forward(tokens, positions, attend, rows=indptr[1:] - 1)

        for request, span, token in zip(requests, new, self._sample(logits, kv_lens)):
            request.num_cached = span.stop
            if request.num_cached == len(request.tokens):
                request.tokens.append(token)
        return self._retire_finished()

    def _sample(self, logits: Array, kv_lens: np.ndarray) -> list[int]:
        """A token for each request; of those that are still in their prompt it is not used."""
        xp = self.model.xp
        seeds = np.array([r.seed for r in self.running], np.int64)
        ids = fp.sample(
            logits,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            seed=xp.asarray(seeds),
            offset=xp.asarray(kv_lens.astype(np.int64)),
        )
        return ids.tolist()

    def _schedule(self) -> list[int]:
        """Admits waiting requests; returns how many tokens to compute of each running one.

        Oldest first: only the youngest can have tokens left over, and a long prompt never holds up
        requests that are decoding.
        """
        counts: list[int] = []

        def take_tokens(request: Request) -> None:
            budget = self.max_step_tokens - sum(counts)
            counts.append(min(budget, len(request.tokens) - request.num_cached))
            # Each layer writes all new keys and values before it attends to any, so a request that
            # joins in this very step can already share these pages.
            computed = request.tokens[: request.num_cached + counts[-1]]
            self.pool.publish(computed, request.pages, request.num_cached)

        for request in self.running:
            take_tokens(request)
        while (
            self.waiting
            and len(self.running) < self.max_batch_size
            and sum(counts) < self.max_step_tokens
        ):
            # All pages a request can ever need are taken now: it will never run out of them.
            acquired = self.pool.acquire(self.waiting[0].tokens, self.waiting[0].capacity)
            if acquired is None:
                break
            request = self.waiting.popleft()
            request.pages, request.num_cached = acquired
            self.statistics.shared_tokens += request.num_cached
            self.running.append(request)
            take_tokens(request)
        return counts

    def _count_step(self, new: list[range]) -> None:
        is_prefill = [span.start < r.num_prompt_tokens for r, span in zip(self.running, new)]
        s = self.statistics
        s.prefill_steps += any(is_prefill)
        s.decode_steps += not all(is_prefill)
        s.mixed_steps += any(is_prefill) and not all(is_prefill)
        s.peak_pages = max(s.peak_pages, self.pool.num_used_pages)

    def _retire_finished(self) -> list[Request]:
        finished = [r for r in self.running if self._is_finished(r)]
        for request in finished:
            self.running.remove(request)
            self.pool.release(request.pages)
        return finished

    def _is_finished(self, request: Request) -> bool:
        ended = request.new_tokens[-1:] == [self.model.config.eos_token]
        return ended or len(request.tokens) == request.capacity
