# SPDX-License-Identifier: Apache-2.0
"""Time on the host of calls that return before the GPU is done."""

import statistics
import time

import torch


def host_microseconds(call, calls=200):
    """Median time until `call` returns, without waiting for the GPU."""
    torch.cuda.synchronize()
    times = []
    for _ in range(calls):
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    torch.cuda.synchronize()
    return statistics.median(times) / 1e3
