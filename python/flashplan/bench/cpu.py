# SPDX-License-Identifier: Apache-2.0
"""Measures times on the CPU, and the best rates that the machine reaches."""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np


def best_of(function: Callable[[], Any], repeats: int) -> float:
    """The time of the fastest call, in seconds."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def microseconds(function: Callable[[], Any], repeats: int) -> float:
    """The median time of calls, after two calls that do not count."""
    times = []
    for _ in range(repeats + 2):
        begin = time.perf_counter_ns()
        function()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return statistics.median(times[2:])


def read_ceiling(num_threads: int, bytes_per_thread: int) -> float:
    """The rate in GB/s at which threads read memory and do next to nothing with it."""
    parts = [np.ones(bytes_per_thread // 4, np.float32) for _ in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as pool:
        seconds = best_of(lambda: list(pool.map(np.max, parts)), 10)
    return sum(part.nbytes for part in parts) / seconds / 1e9


def matmul_ceiling(size: int = 2048) -> float:
    """The rate in GFLOP/s of NumPy's product of square float32 matrices."""
    a = np.random.default_rng(0).standard_normal((size, size), np.float32)
    return 2 * size**3 / best_of(lambda: a @ a, 5) / 1e9
