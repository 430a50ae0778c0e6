# SPDX-License-Identifier: Apache-2.0
"""Times attention on steps that the engine has written, with flashplan and with other libraries.

serving ... --step-log sharegpt; python bench/serving/replay.py sharegpt --out replay.json

Of each step the host plans once, and the layers run one after the other on caches of their own, as
in the engine. On a GPU the layers are one graph, so that nobody's launches from Python count, but
for flashplan's in steps with prompts; what the host takes to plan is given beside. All libraries
read the same keys, most of them in the engine's pages. They are timed in turn, so that a GPU that
gets slower meanwhile does so for all of them. Without a GPU, flashplan is timed on the CPU.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from libraries import Library, Shape, is_decode, libraries
from steps import Step, read_steps

REPEATS = 3
# ||o - exact|| / ||exact|| of a layer: bfloat16 has some 0.005, a wrong page more than 0.1.
MAX_ERROR = 0.03


def with_pages(step: Step, old_size: int, new_size: int) -> Step:
    """The step in a cache with pages of another size, which lie side by side."""
    if new_size == old_size:
        return step
    counts = -(-step.kv_lens // new_size)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return step._replace(page_indptr=indptr, page_indices=np.arange(indptr[-1], dtype=np.int32))


def exact(step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """o in float32."""
    rows = []
    for request, kv_len in enumerate(step.kv_lens.tolist()):
        begin, end = step.qo_indptr[request : request + 2].tolist()
        ids = step.page_indices[step.page_indptr[request] : step.page_indptr[request + 1]]
        pages = torch.from_numpy(ids).to(k.device)
        keys, values = (x[pages].flatten(0, 1)[:kv_len].float() for x in (k, v))
        queries = q[begin:end].float().unflatten(1, (keys.shape[1], -1))
        logits = torch.einsum("thgd,khd->hgtk", queries, keys) * q.shape[-1] ** -0.5
        positions = torch.arange(kv_len, device=k.device)
        is_later = positions > positions[kv_len - (end - begin) :, None]
        weights = logits.masked_fill_(is_later, -torch.inf).softmax(-1)
        rows.append(torch.einsum("hgtk,khd->thgd", weights, values).flatten(1, 2))
    return torch.cat(rows)


class Clock:
    """Milliseconds of work on the device."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self.stream = torch.cuda.Stream()
            self.graph: torch.cuda.CUDAGraph | None = None

    def time(self, work: Callable[[], None], is_captured: bool) -> float:
        if not self.on_gpu:
            begin = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - begin)
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            work()  # what is compiled or allocated once
            torch.cuda.synchronize()
            if is_captured:
                work = self.capture(work).replay
                work()
            return statistics.median(self.of_device(work) for _ in range(REPEATS))

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # All graphs have one pool of memory, which is gone when the last one is.
        if self.graph is None:
            graph.capture_begin()
        else:
            graph.capture_begin(pool=self.graph.pool())
        try:
            work()
        finally:
            graph.capture_end()
        self.graph = graph
        return graph

    def of_device(self, work: Callable[[], None]) -> float:
        self.events[0].record()
        work()
        self.events[1].record()
        torch.cuda.synchronize()
        return self.events[0].elapsed_time(self.events[1])


class Replay:
    """Runs libraries on the tensors of a model."""

    def __init__(self, shape: Shape, num_caches: int) -> None:
        self.shape = shape
        options = {"dtype": shape.dtype, "device": shape.device}
        cache = (shape.num_pages, shape.page_size, shape.kv_heads, shape.head_dim)
        self.q = torch.randn(shape.max_tokens, shape.qo_heads, shape.head_dim, **options)
        self.out = torch.empty_like(self.q)
        self.caches = [
            (torch.randn(cache, **options), torch.randn(cache, **options))
            for _ in range(num_caches)
        ]
        self.clock = Clock(shape.device)

    def run(self, library: Library, steps: list[Step]) -> list[dict[str, Any]]:
        """Time to plan and to run each step."""
        caches = [
            tuple(x.view(-1, library.page_size, *x.shape[2:]) for x in pair) for pair in self.caches
        ]
        steps = [with_pages(step, self.shape.page_size, library.page_size) for step in steps]
        for kind in (True, False):
            same = [step for step in steps if is_decode(step) is kind]
            if same:
                self.check(library, same[len(same) // 2], caches[0])
        try:
            return [self.time_step(library, step, caches) for step in steps]
        except RuntimeError:
            if not library.has_graphs or not self.clock.on_gpu:
                raise
            traceback.print_exc()
        library.has_graphs = False
        return [self.time_step(library, step, caches) for step in steps]

    def of_step(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = int(step.qo_indptr[-1])
        return self.q[:tokens], self.out[:tokens]

    def check(self, library: Library, step: Step, cache: tuple[torch.Tensor, ...]) -> None:
        q, out = self.of_step(step)
        library.prepare(step, *cache)
        run = library.plan(step)
        run(q, *cache, out=out)
        o = run(q, *cache, out=out).float()  # as a second layer calls it
        expected = exact(step, q, *cache)
        error = float((o - expected).norm() / expected.norm())
        if not error < MAX_ERROR:
            kind = "decodes" if is_decode(step) else "prompts"
            raise ValueError(f"o of {kind}: expected an error below {MAX_ERROR}, got {error:.3g}")

    def time_step(self, library: Library, step: Step, caches: list) -> dict[str, Any]:
        q, out = self.of_step(step)
        library.prepare(step, *caches[0])
        # Planned once: some libraries do less if the lengths are those of the plan before.
        begin = time.perf_counter()
        run = library.plan(step)
        plan_ms = 1e3 * (time.perf_counter() - begin)

        def all_layers() -> None:
            for k, v in caches:
                run(q, k, v, out=out)

        run_ms = self.clock.time(all_layers, library.is_captured(step))
        return {
            "is_decode": is_decode(step),
            "plan_ms": plan_ms,
            "run_ms": run_ms * self.shape.layers / len(caches),
        }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of decodes and of steps with prompts: how many, and milliseconds."""
    result = {}
    for name, kind in (("decodes", True), ("prompts", False)):
        same = [row for row in rows if row["is_decode"] is kind]
        if not same:
            continue
        runs = sorted(row["run_ms"] for row in same)
        result[name] = {
            "steps": len(same),
            "plan_ms_p50": statistics.median(row["plan_ms"] for row in same),
            "run_ms_mean": statistics.mean(runs),
            "run_ms_p50": statistics.median(runs),
            "run_ms_p99": runs[min(len(runs) - 1, int(0.99 * len(runs)))],
        }
    return result


def medians(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each step, over rounds that have all of them."""
    return [
        row[0]
        | {key: statistics.median(part[key] for part in row) for key in ("plan_ms", "run_ms")}
        for row in zip(*rounds, strict=True)
    ]


def sample(steps: list[Step], count: int) -> list[Step]:
    """Up to `count` decodes and as many steps with prompts, from the whole of a log."""
    chosen = []
    for kind in (True, False):
        same = [step for step in steps if is_decode(step) is kind]
        places = np.linspace(0, len(same) - 1, min(count, len(same))).round().astype(int)
        chosen += [same[place] for place in places]
    return chosen


def shape_of(steps: list[Step], arguments: argparse.Namespace) -> Shape:
    has_gpu = torch.cuda.is_available()
    qo_heads, kv_heads, head_dim = map(int, arguments.heads.split(","))
    largest_page = 128 // arguments.page_size  # FlashAttention-3's, in pages of the engine
    num_pages = max(
        max(
            int(step.page_indices.max(initial=0)) + 1,
            int((-(-step.kv_lens // 128)).sum()) * largest_page,
        )
        for step in steps
    )
    return Shape(
        qo_heads=qo_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=arguments.layers,
        page_size=arguments.page_size,
        num_pages=-(-num_pages // largest_page) * largest_page,
        max_batch=max(len(step.kv_lens) for step in steps),
        max_tokens=max(int(step.qo_indptr[-1]) for step in steps),
        device=torch.device("cuda:0" if has_gpu else "cpu"),
        dtype=torch.bfloat16 if has_gpu else torch.float32,
    )


def run_all(replay: Replay, logs: dict[str, list[Step]], arguments: argparse.Namespace) -> None:
    path = arguments.out
    results = json.loads(path.read_text()) if path.exists() else []
    makers = dict(libraries(replay.shape, arguments.sglang))
    chosen = [name for name in makers if any(part in name for part in arguments.only or [""])]
    made: dict[str, Library] = {}
    for name in chosen:
        with no_matter_what(name):
            made[name] = makers[name]()
    for workload, steps in logs.items():
        rounds: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in made}
        for name in list(made) * arguments.rounds:
            # A library that failed once is not timed again.
            library = made.pop(name, None)
            if library is not None:
                with no_matter_what(name):
                    rounds[name].append(replay.run(library, steps))
                    made[name] = library
        for name, library in made.items():
            times = summary(medians(rounds[name]))
            row = {"set": "replay", "workload": workload, "library": name}
            results.append(row | {"graphs": library.has_graphs} | times)
            for kind, parts in times.items():
                text = " ".join(f"{key} {value:8.3f}" for key, value in parts.items())
                print(f"{workload:20} {name:32} {kind:8} {text}", flush=True)
        path.write_text(json.dumps(results, indent=1) + "\n")


@contextlib.contextmanager
def no_matter_what(name: str) -> Iterator[None]:
    """Says what went wrong with a library of others: the next one is timed all the same."""
    try:
        yield
    except ImportError as error:
        print(f"{name}: {error}", file=sys.stderr)
    except Exception:
        print(name, file=sys.stderr)
        traceback.print_exc()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logs", type=Path, nargs="+", help="what --step-log has written")
    parser.add_argument("--out", type=Path, required=True, help="rows are added to this JSON file")
    parser.add_argument("--sample", type=int, default=100, help="of each kind of steps")
    parser.add_argument("--heads", default="32,8,128", help="of queries, of keys; their dim")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--caches", type=int, default=32, help="layers with a cache of their own")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument(
        "--only", action="append", help="libraries whose name contains this, or another --only"
    )
    parser.add_argument("--rounds", type=int, default=1, help="times that each library is timed")
    parser.add_argument(
        "--sglang", type=Path, help="the folder sglang/kernels/ops/attention of SGLang's package"
    )
    arguments = parser.parse_args()
    logs = {}
    for path in arguments.logs:
        logs[path.stem] = sample(list(read_steps(path)), arguments.sample)
    shape = shape_of([step for steps in logs.values() for step in steps], arguments)
    run_all(Replay(shape, arguments.caches), logs, arguments)


if __name__ == "__main__":
    main()
