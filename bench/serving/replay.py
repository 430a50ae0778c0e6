# SPDX-License-Identifier: Apache-2.0
"""Times attention on steps that the engine has written, with flashplan and with other libraries.

serving ... --step-log steps; python bench/serving/replay.py steps --out replay.json

Of each step the host plans once, and the layers run one after the other on caches of their own, as
in the engine. All libraries read the same pages. Without a GPU, flashplan is timed on the CPU.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from steps import Step, read_steps

import flashplan as fp

WORKSPACE_BYTES = 512 << 20


class Shape(argparse.Namespace):
    """Heads and layers of a model, and its cache."""

    qo_heads: int
    kv_heads: int
    head_dim: int
    layers: int
    page_size: int
    num_pages: int
    device: torch.device
    dtype: torch.dtype


class Flashplan:
    """One Attention for decodes and one for all other steps, as the engine has them."""

    def __init__(self, shape: Shape, steps: list[Step]) -> None:
        self.shape = shape
        batch = max(len(step.kv_lens) for step in steps)
        tokens = max(int(step.qo_indptr[-1]) for step in steps)
        make = functools.partial(
            fp.Attention,
            shape.qo_heads,
            shape.kv_heads,
            shape.head_dim,
            page_size=shape.page_size,
            q_dtype=str(shape.dtype).removeprefix("torch."),
            device=str(shape.device),
            max_batch_size=batch,
        )
        self.mixed = make(max_qo_tokens=max(tokens, batch))
        self.decodes = make(max_qo_tokens=batch)

    def plan(self, step: Step) -> Callable[..., Any]:
        is_decode = int(step.qo_indptr[-1]) == len(step.kv_lens)
        attention = self.decodes if is_decode else self.mixed
        table = {"page_indptr": step.page_indptr, "page_indices": step.page_indices}
        prefixes = fp.find_shared_prefixes(
            step.qo_indptr, step.kv_lens, page_size=self.shape.page_size, **table
        )
        attention.plan(step.qo_indptr, step.kv_lens, shared_prefixes=prefixes)
        on_device = {
            name: torch.from_numpy(ids).to(self.shape.device, non_blocking=True)
            for name, ids in table.items()
        }
        return functools.partial(attention.run, **on_device)


class FlashInfer:
    """Its wrapper for prompts serves all steps; that for decodes serves those of decodes alone."""

    def __init__(self, shape: Shape, steps: list[Step], backend: str) -> None:
        import flashinfer

        self.shape = shape
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        self.mixed = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend=backend
        )
        self.decodes = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )

    def plan(self, step: Step) -> Callable[..., Any]:
        shape = self.shape
        heads = shape.qo_heads, shape.kv_heads, shape.head_dim, shape.page_size
        last = torch.from_numpy((step.kv_lens - 1) % shape.page_size + 1)
        pages = torch.from_numpy(step.page_indptr), torch.from_numpy(step.page_indices), last
        dtypes = {"q_data_type": shape.dtype, "kv_data_type": shape.dtype}
        pages = tuple(part.to(shape.device, non_blocking=True) for part in pages)
        if int(step.qo_indptr[-1]) == len(step.kv_lens):
            self.decodes.plan(*pages, *heads, **dtypes)
            return lambda q, k, v, out: self.decodes.run(q, (k, v), out=out)
        qo_indptr = torch.from_numpy(step.qo_indptr).to(shape.device)
        self.mixed.plan(qo_indptr, *pages, *heads, causal=True, **dtypes)
        return lambda q, k, v, out: self.mixed.run(q, (k, v), out=out)


def libraries(shape: Shape, steps: list[Step]) -> dict[str, Any]:
    made: dict[str, Any] = {"flashplan": Flashplan(shape, steps)}
    if shape.device.type != "cuda":
        return made
    try:
        for backend in ("fa2", "fa3"):
            made[f"flashinfer {backend}"] = FlashInfer(shape, steps, backend)
    except ImportError:
        pass
    return made


class Clock:
    """Milliseconds of work on the device."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def time(self, work: Callable[[], None]) -> float:
        if not self.on_gpu:
            begin = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - begin)
        self.events[0].record()
        work()
        self.events[1].record()
        torch.cuda.synchronize()
        return self.events[0].elapsed_time(self.events[1])


def replay(library: Any, shape: Shape, steps: list[Step], tensors: dict) -> list[dict[str, float]]:
    """Time to plan and to run each step; the median of three times."""
    clock = Clock(shape.device)
    rows = []
    for step in steps:
        tokens = int(step.qo_indptr[-1])
        q, out = tensors["q"][:tokens], tensors["out"][:tokens]
        plans, runs = [], []
        for _ in range(3):
            begin = time.perf_counter()
            run = library.plan(step)
            plans.append(1e3 * (time.perf_counter() - begin))

            def all_layers(run=run, q=q, out=out) -> None:
                for k, v in tensors["caches"]:
                    run(q, k, v, out=out)

            runs.append(clock.time(all_layers))
        rows.append(
            {
                "tokens": tokens,
                "batch": len(step.kv_lens),
                "keys": int(step.kv_lens.sum()),
                "plan_ms": statistics.median(plans),
                "run_ms": statistics.median(runs) * shape.layers / len(tensors["caches"]),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=Path, help="what --step-log has written")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    parser.add_argument("--sample", type=int, default=200, help="so many steps are timed")
    parser.add_argument("--heads", default="32,8,128", help="of queries, of keys; their dim")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--caches", type=int, default=8, help="layers with a cache of their own")
    parser.add_argument("--page-size", type=int, default=16)
    arguments = parser.parse_args()
    steps = list(read_steps(arguments.steps))
    stride = max(1, len(steps) // arguments.sample)
    steps = steps[::stride]
    has_gpu = torch.cuda.is_available()
    qo_heads, kv_heads, head_dim = map(int, arguments.heads.split(","))
    shape = Shape(
        qo_heads=qo_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=arguments.layers,
        page_size=arguments.page_size,
        num_pages=max(int(step.page_indices.max(initial=0)) for step in steps) + 1,
        device=torch.device("cuda:0" if has_gpu else "cpu"),
        dtype=torch.bfloat16 if has_gpu else torch.float32,
    )
    tokens = max(int(step.qo_indptr[-1]) for step in steps)
    options = {"dtype": shape.dtype, "device": shape.device}
    cache = (shape.num_pages, shape.page_size, kv_heads, head_dim)
    tensors = {
        "q": torch.randn(tokens, qo_heads, head_dim, **options),
        "out": torch.empty(tokens, qo_heads, head_dim, **options),
        "caches": [
            (torch.randn(cache, **options), torch.randn(cache, **options))
            for _ in range(arguments.caches)
        ],
    }
    results = {}
    for name, library in libraries(shape, steps).items():
        rows = results[name] = replay(library, shape, steps, tensors)
        for kind in ("plan_ms", "run_ms"):
            mean = statistics.mean(row[kind] for row in rows)
            print(f"{name:16} {kind:8} mean {mean:8.3f}")
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
