# SPDX-License-Identifier: Apache-2.0
"""Measures attention with the installed package: the time of typical batches, and which part of the
machine's best rates they reach. On a GPU it needs PyTorch.

python -m flashplan.bench
python -m flashplan.bench --device cpu --only decode
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import flashplan as fp
from flashplan.bench import cpu
from flashplan.bench.work import flops, kv_bytes
from flashplan.options import to_cuda_device

HEAD_DIM, PAGE_SIZE = 128, 16


@dataclasses.dataclass(frozen=True)
class Row:
    """A batch to be measured: bfloat16, causal, head dim 128."""

    name: str
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    kv_dtype: str = "bfloat16"

    @property
    def is_decode(self) -> bool:
        return max(self.qo_lens) == 1

    def options(self, device: str) -> dict[str, Any]:
        """The keyword arguments of Attention."""
        return {
            "num_qo_heads": self.num_qo_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": HEAD_DIM,
            "page_size": PAGE_SIZE,
            "kv_dtype": self.kv_dtype,
            "max_batch_size": len(self.qo_lens),
            "max_qo_tokens": sum(self.qo_lens),
            "device": device,
        }

    def block_table(self, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.int32]]:
        """A block table that names the pages in random order."""
        counts = [-(-kv_len // PAGE_SIZE) for kv_len in self.kv_lens]
        table = np.zeros((len(counts), max(counts)), np.int32)
        ids = iter(rng.permutation(sum(counts)).tolist())
        for row, count in zip(table, counts, strict=True):
            row[:count] = [next(ids) for _ in range(count)]
        return table

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """The shape of the cache of keys, and of the cache of values."""
        num_pages = sum(-(-kv_len // PAGE_SIZE) for kv_len in self.kv_lens)
        return num_pages, PAGE_SIZE, self.num_kv_heads, HEAD_DIM


def decode(count: int, kv_len: int, **options: Any) -> Row:
    heads = f", {options['num_qo_heads']} query heads" if "num_qo_heads" in options else ""
    cache = ", 8-bit cache" if "kv_dtype" in options else ""
    name = f"decode, {count} x {kv_len} keys{heads}{cache}"
    return Row(name, (1,) * count, (kv_len,) * count, **options)


def prompt(count: int, length: int) -> Row:
    return Row(f"prompt, {count} x {length} tokens", (length,) * count, (length,) * count)


def mixed(chunk: int, chunk_kv_len: int, count: int, kv_len: int) -> Row:
    name = f"chunk of {chunk} at {chunk_kv_len} and decode, {count} x {kv_len}"
    return Row(name, (chunk,) + (1,) * count, (chunk_kv_len,) + (kv_len,) * count)


FP8 = {"kv_dtype": "float8_e4m3fn"}
CPU_ROWS = (
    decode(1, 8192),
    decode(8, 2048),
    decode(8, 2048, **FP8),
    prompt(1, 512),
    prompt(1, 1024),
    mixed(256, 512, 7, 1024),
)
GPU_ROWS = (
    decode(1, 8192),
    decode(1, 131072),
    decode(16, 1024),
    decode(64, 4096),
    decode(64, 4096, num_qo_heads=64),
    decode(64, 4096, **FP8),
    prompt(16, 512),
    prompt(4, 4096),
    mixed(2048, 8192, 64, 4096),
)


class Machine(NamedTuple):
    """The device to measure, its best rates of reading and of products, and how to time a row."""

    name: str
    unit: str  # "G" or "T": the prefix of B/s and FLOP/s in the printed rates
    read: float
    matmul: float
    microseconds: Callable[[Row], float]
    explanation: str


def this_cpu(repeats: int) -> Machine:
    rng = np.random.default_rng(0)

    def microseconds(row: Row) -> float:
        attn = fp.Attention(**row.options("cpu"))
        attn.plan(np.cumsum([0, *row.qo_lens]), row.kv_lens)
        # Draws the bits of numbers from 1 to 2, since NumPy has neither bfloat16 nor 8-bit floats.
        shape = (sum(row.qo_lens), row.num_qo_heads, HEAD_DIM)
        q = rng.integers(0x3F80, 0x4000, shape, np.uint16)
        if row.kv_dtype == "bfloat16":
            k, v = rng.integers(0x3F80, 0x4000, (2, *row.cache_shape), np.uint16)
        else:
            k, v = rng.integers(0x38, 0x40, (2, *row.cache_shape), np.uint8)
        table, out = row.block_table(rng), np.empty(shape, np.uint16)
        return cpu.microseconds(lambda: attn.run(q, k, v, block_table=table, out=out), repeats)

    threads = fp.get_num_threads()
    return Machine(
        f"CPU, {threads} threads",
        "G",
        cpu.read_ceiling(threads, max(64 << 20, (1 << 29) // threads)),
        cpu.matmul_ceiling(),
        microseconds,
        "a float32 matrix product of NumPy",
    )


def this_gpu(device: str, repeats: int) -> Machine:
    import torch

    from flashplan.bench.gpu import Timer, ceilings

    rng = np.random.default_rng(0)
    timer = Timer(device)

    def microseconds(row: Row) -> float:
        attn = fp.Attention(**row.options(device))
        attn.plan(np.cumsum([0, *row.qo_lens]), row.kv_lens)
        shape = (sum(row.qo_lens), row.num_qo_heads, HEAD_DIM)
        q, k, v = (
            torch.randn(s, dtype=torch.bfloat16, device=device)
            for s in (shape, row.cache_shape, row.cache_shape)
        )
        k, v = (x.to(getattr(torch, row.kv_dtype)) for x in (k, v))
        table = torch.from_numpy(row.block_table(rng)).to(device)
        out = torch.empty_like(q)
        return timer.microseconds(lambda: attn.run(q, k, v, block_table=table, out=out), repeats)

    free, _ = torch.cuda.mem_get_info(device)
    best = ceilings(timer, device, min(8 << 30, free // 4))
    return Machine(
        torch.cuda.get_device_name(device),
        "T",
        best["read_tb_s"],
        best["matmul_bf16_tflop_s"],
        microseconds,
        "a bfloat16 matrix product of cuBLAS. The L2 cache is flushed before each call",
    )


def duration(us: float) -> str:
    return f"{us / 1e3:.1f} ms" if us >= 1e3 else f"{us:.1f} us"


def measure(machine: Machine, rows: Sequence[Row]) -> None:
    """Prints a line for each row, and what the columns mean."""
    per_us = {"G": 1e3, "T": 1e6}[machine.unit]
    memory, arithmetic = f"{machine.unit}B/s", f"{machine.unit}FLOP/s"
    print(f"flashplan {fp.__version__}, {machine.name}")
    print(f"{'':46}{'time':>10}{memory:>8}{arithmetic:>10}  of the machine")
    dims = (HEAD_DIM, HEAD_DIM)
    for row in rows:
        us = machine.microseconds(row)
        item_size = 1 if row.kv_dtype.startswith("float8") else 2
        read = kv_bytes(row.qo_lens, row.kv_lens, row.num_kv_heads, dims, item_size) / us / per_us
        done = flops(row.qo_lens, row.kv_lens, row.num_qo_heads, dims) / us / per_us
        limit, share = arithmetic, done / machine.matmul
        if row.is_decode:
            limit, share = memory, read / machine.read
        print(
            f"{row.name:46}{duration(us):>10}{read:8.2f}{done:10.1f} {share:4.0%} of its {limit}",
            flush=True,
        )
    print(
        f"\n32 query heads and 8 kv heads of 128, bfloat16, pages of {PAGE_SIZE} in random order.\n"
        f"{memory}: keys and values over time, which limits decodes."
        f" The machine reads {machine.read:.3g}.\n"
        f"{arithmetic}: the two matrix products over time, which limits prompts."
        f" The machine reaches {machine.matmul:.3g}\nin {machine.explanation}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flashplan.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", help="cpu or cuda:<index>; default: the first GPU, or the CPU")
    parser.add_argument("--only", default="", help="measure only rows whose name contains this")
    parser.add_argument("--repeats", type=int, default=10, help="calls of each row; default: 10")
    args = parser.parse_args(arguments)
    if args.repeats < 1:
        parser.error(f"--repeats: expected >= 1, got {args.repeats}")
    try:
        index = to_cuda_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    device = "cpu" if index is None else f"cuda:{index}"
    supported, reason = fp.is_supported(32, 8, HEAD_DIM, device=device)
    if not supported:
        parser.error(reason)
    rows = [row for row in (CPU_ROWS if index is None else GPU_ROWS) if args.only in row.name]
    if not rows:
        parser.error(f"--only: expected a part of a row's name, got {args.only!r}")
    try:
        machine = this_cpu(args.repeats) if index is None else this_gpu(device, args.repeats)
    except ImportError as error:
        parser.error(
            f"--device {device}: PyTorch makes the tensors there: pip install torch ({error})"
        )
    measure(machine, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
