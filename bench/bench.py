# SPDX-License-Identifier: Apache-2.0
"""Times BENCH of tests/bench_cases.py on the CPU, beside torch and the machine's ceilings."""

import argparse
import functools
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests"))

import numpy as np

import flashplan as fp
from bench_cases import BENCH
from environment import RESULTS, last_level_cache_bytes, write_json
from frameworks import NumPy
from inputs import make_inputs
from peers import ceilings, peer_output, peers_of, torch
from solve import assert_correct, problem, run_arguments


def microseconds(function):
    begin = time.perf_counter_ns()
    function()
    return (time.perf_counter_ns() - begin) / 1e3


class Row:
    """A case with enough copies of its data that none of it is in a cache when it is read."""

    def __init__(self, case, cache_bytes):
        self.case = case
        self.attn = fp.Attention(**case.options())
        one = make_inputs(case, seed=0)
        count = max(1, -(-2 * cache_bytes // (one.q.nbytes + case.kv_bytes)))
        self.inputs = [make_inputs(case, seed=i) for i in range(min(count, 64))]
        self.out = np.zeros((one.qo_indptr[-1], case.num_qo_heads, case.head_dims[1]), one.q.dtype)
        self.peers = {
            name: [make(case, inputs) for inputs in self.inputs]
            for name, make in peers_of(case).items()
        }

    def plan(self):
        self.attn.plan(*self.inputs[0].plan_args())

    def run(self, i):
        """Copies differ in their page tables too; the lengths, and so the plan, are the same."""
        args, kwargs = run_arguments(self.case, self.inputs[i], NumPy())
        return microseconds(lambda: self.attn.run(*args, **kwargs, out=self.out))

    def run_peer(self, name, i):
        calls = self.peers[name][i]
        return microseconds(lambda: [call() for _, call in calls])

    def verify(self):
        """A wrong result is not timed."""
        inputs, exact, twin = problem(self.case, seed=0)
        self.plan()
        args, kwargs = run_arguments(self.case, inputs, NumPy())
        state = self.attn.run(*args, **kwargs, return_lse=True)
        assert_correct(self.case, inputs, exact, twin, *state)
        self.run(0)
        for name, calls in self.peers.items():
            error = np.abs(peer_output(self.case, calls[0]) - self.out.astype(np.float32)).max()
            assert error < 0.05, f"{name} computes something else: error {error}"

    def measure(self, repeats):
        # One library after the other: the threads of the last one spin for a while after a call.
        times = {}
        for name in ("flashplan", *self.peers):
            run = self.run if name == "flashplan" else functools.partial(self.run_peer, name)
            time.sleep(0.5)
            times[name] = [run(i % len(self.inputs)) for i in range(repeats + 2)]
        plan_us = statistics.median(microseconds(self.plan) for _ in range(50))
        return {name: statistics.median(t[2:]) for name, t in times.items()} | {"plan": plan_us}


def result(name, case, times, ceiling):
    us = times["flashplan"]
    gb_s, gflop_s = case.kv_bytes / us / 1e3, case.flops / us / 1e3
    return {
        "name": name,
        "case": str(case),
        "us": round(us, 1),
        "plan_us": round(times["plan"], 1),
        "gb_s": round(gb_s, 2),
        "gflop_s": round(gflop_s, 1),
        "share_of_read": round(gb_s / ceiling["read_gb_s"], 3),
        "share_of_matmul_float32": round(gflop_s / ceiling["matmul_float32_gflop_s"], 3),
        "peers_us": {
            peer: round(t, 1) for peer, t in times.items() if peer not in ("flashplan", "plan")
        },
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=RESULTS / "cpu.json")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    fp.set_num_threads(args.threads)
    if torch is not None:
        torch.set_num_threads(args.threads)
    cache_bytes = last_level_cache_bytes()
    ceiling = ceilings(args.threads, cache_bytes)
    print({name: value and round(value, 1) for name, value in ceiling.items()})

    rows = []
    print(f"{'row':28}{'us':>10}{'GB/s':>8}{'GFLOP/s':>9}{'read':>6}{'matmul':>8}  peers")
    for name, case in BENCH.items():
        if args.only not in name:
            continue
        row = Row(case, cache_bytes)
        row.verify()
        r = result(name, case, row.measure(args.repeats), ceiling)
        rows.append(r)
        peers = ", ".join(f"{peer} {us / r['us']:.2f}x" for peer, us in r["peers_us"].items())
        print(
            f"{name:28}{r['us']:10.0f}{r['gb_s']:8.1f}{r['gflop_s']:9.1f}"
            f"{r['share_of_read']:6.0%}{r['share_of_matmul_float32']:8.0%}  {peers}",
            flush=True,
        )
    write_json(args.out, {"threads": args.threads, "ceilings": ceiling, "rows": rows})


if __name__ == "__main__":
    main()
