# SPDX-License-Identifier: Apache-2.0
"""Measures times on a GPU with PyTorch, and the best rates that the GPU reaches."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

FLUSH_BYTES = 256 << 20
NUM_FIRST_FLUSHES = 30  # each takes some 60 us, so all take about 2 ms


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Timer:
    """Times a call by CUDA events, after the L2 was flushed by reading memory. Flushing by writes
    would leave dirty lines, whose write-back would be part of the call's time."""

    def __init__(self, device: str) -> None:
        self.buffer = torch.zeros(FLUSH_BYTES // 4, device=device)
        self.total = torch.zeros((), device=device)

    def flush(self) -> None:
        torch.sum(self.buffer, 0, out=self.total)

    def microseconds(self, call: Callable[[], Any], repeats: int, warmups: int = 2) -> float:
        """The median time of a call. A flush keeps the GPU busy while the host prepares a call."""
        return self.in_turn([call], repeats, warmups)[0]

    def in_turn(
        self, calls: Sequence[Callable[[], Any]], repeats: int, warmups: int = 2
    ) -> list[float]:
        """The median time of each of `calls`. Every round makes all calls one after the other, so
        that a GPU that gets faster or slower meanwhile affects all of them alike."""
        rounds: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []
        # The host gets 2 ms ahead. Otherwise the GPU waits between two events where the host is
        # slow for a moment, and the call seems to take longer.
        for _ in range(NUM_FIRST_FLUSHES):
            self.flush()
        for _ in range(repeats + warmups):
            rounds.append([])
            for call in calls:
                begin, end = _event(), _event()
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


def _memory_microseconds(timer: Timer, device: str, size: int) -> tuple[float, float]:
    """The time to read `size` bytes, and the time to copy half of them to the other half."""
    x = torch.zeros(size // 4, device=device)
    total = torch.zeros((), device=device)
    half = len(x) // 2
    read = timer.microseconds(lambda: torch.sum(x, 0, out=total), 5)
    return read, timer.microseconds(lambda: x[:half].copy_(x[half:]), 5)


def ceilings(timer: Timer, device: str, size: int = 8 << 30) -> dict[str, float]:
    """The best rates of a GPU: of reading memory, of copying it (bytes read and written), and of a
    bfloat16 matrix product; and the time of a small kernel."""
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
