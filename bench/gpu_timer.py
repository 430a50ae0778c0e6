# SPDX-License-Identifier: Apache-2.0
"""Time on the GPU and on the host, and what the GPU can do at best."""

import statistics
import time

import torch

FLUSH_BYTES = 256 << 20


class Timer:
    """CUDA events around one call, after the L2 was flushed by reading: zeroing memory would leave
    dirty lines, whose write-back the call would pay for."""

    def __init__(self, device):
        self.buffer = torch.zeros(FLUSH_BYTES // 4, device=device)
        self.total = torch.zeros((), device=device)

    def flush(self):
        torch.sum(self.buffer, 0, out=self.total)

    def microseconds(self, call, repeats, warmups=2):
        """Median. The flush keeps the GPU busy while the host prepares the call."""
        return self.in_turn([call], repeats, warmups)[0]

    def in_turn(self, calls, repeats, warmups=2):
        """The same of each of `calls`, one after the other in every round: a GPU that warms up or
        slows down meanwhile is the same for all of them."""
        rounds = []
        for _ in range(repeats + warmups):
            rounds.append([])
            for call in calls:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.flush()
                begin.record()
                call()
                end.record()
                rounds[-1].append((begin, end))
        torch.cuda.synchronize()
        return [
            1e3 * statistics.median(begin.elapsed_time(end) for begin, end in events[warmups:])
            for events in zip(*rounds, strict=True)
        ]


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


def _memory_microseconds(timer, device, size):
    """Of reading `size` bytes, and of copying half of them to the other half."""
    x = torch.zeros(size // 4, device=device)
    total = torch.zeros((), device=device)
    half = len(x) // 2
    read = timer.microseconds(lambda: torch.sum(x, 0, out=total), 5)
    return read, timer.microseconds(lambda: x[:half].copy_(x[half:]), 5)


def ceilings(timer, device, size=8 << 30):
    """A read stream and a copy (bytes read and written over time), a bfloat16 matmul."""
    read_us, copy_us = _memory_microseconds(timer, device, size)
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    matmul_us = timer.microseconds(lambda: torch.mm(a, b, out=out), 9)
    return {
        "read_tb_s": size / read_us / 1e6,
        "copy_tb_s": size / copy_us / 1e6,
        "matmul_bf16_tflop_s": 2 * 8192**3 / matmul_us / 1e6,
        "small_kernel_us": timer.microseconds(lambda: timer.total.add_(1), 20),
    }
