# SPDX-License-Identifier: Apache-2.0
"""Host overhead seen from Python: plan() of a large batch, run() of next to nothing."""

import argparse
import contextlib
import random
import statistics
import time

import numpy as np

import flashplan as fp
from environment import RESULTS, write_json


def microseconds_per_call(function, calls=200, rounds=50):
    """Median over rounds of the mean of `calls`."""
    function()
    means = []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        for _ in range(calls):
            function()
        means.append((time.perf_counter_ns() - begin) / 1e3 / calls)
    return round(statistics.median(means), 3)


def mixed_lengths(num_requests, seed=0):
    """Seven decodes to one prefill, kv lengths over four orders of magnitude."""
    rng = random.Random(seed)
    qo_lens = [1 if rng.random() < 7 / 8 else rng.randint(16, 512) for _ in range(num_requests)]
    kv_lens = [qo + int(4 ** rng.uniform(0, 7)) for qo in qo_lens]
    qo_indptr = np.concatenate([[0], np.cumsum(qo_lens)]).astype(np.int32)
    return qo_indptr, np.array(kv_lens, np.int32)


def bench_plan():
    rows = {}
    for num_requests in (1, 64, 256, 1024, 4096):
        qo_indptr, kv_lens = mixed_lengths(num_requests)
        attn = fp.Attention(
            32,
            8,
            128,
            device="cpu",
            num_ctas=132,
            max_batch_size=num_requests,
            max_qo_tokens=int(qo_indptr[-1]),
        )
        lists = qo_indptr.tolist(), kv_lens.tolist()
        calls = max(1, 20000 // num_requests)
        rows[str(num_requests)] = {
            "numpy_us": microseconds_per_call(
                lambda attn=attn, a=qo_indptr, b=kv_lens: attn.plan(a, b), calls=min(calls, 200)
            ),
            "list_us": microseconds_per_call(
                lambda attn=attn, a=lists: attn.plan(*a), calls=min(calls, 200)
            ),
        }
    return rows


def bench_tree():
    """256 decodes below a system prompt, eight sets of examples and 32 conversations."""
    count = 256
    rng = random.Random(0)
    qo_indptr = np.arange(count + 1, dtype=np.int32)
    kv_lens = np.array([3200 + rng.randrange(8000) for _ in range(count)], np.int32)
    groups = np.array(
        [
            (first, count // branches, tokens)
            for branches, tokens in ((1, 1024), (8, 2048), (32, 3072))
            for first in range(0, count, count // branches)
        ],
        np.int32,
    )
    attn = fp.Attention(32, 8, 128, device="cpu", num_ctas=264)
    return {
        "without_us": microseconds_per_call(lambda: attn.plan(qo_indptr, kv_lens)),
        "shared_us": microseconds_per_call(
            lambda: attn.plan(qo_indptr, kv_lens, shared_prefixes=groups)
        ),
    }


def tiny_run(qo_len, kv_len, make):
    """(run(), a bound call): one head of eight elements, into a given output."""
    attn = fp.Attention(
        1, 1, 8, page_size=1, q_dtype="float32", device="cpu", num_ctas=1, max_qo_tokens=1
    )
    attn.plan([0, qo_len], [kv_len])
    q, cache = make(np.ones((1, 1, 8), np.float32)), make(np.ones((1, 1, 1, 8), np.float32))
    table, out = make(np.zeros((1, 2), np.int32)), make(np.zeros((1, 1, 8), np.float32))
    call = attn.bind(q, cache, cache, block_table=table, out=out)
    return (
        microseconds_per_call(
            lambda: attn.run(q, cache, cache, block_table=table, out=out), calls=2000
        ),
        microseconds_per_call(lambda: call(), calls=2000),
    )


def bench_run():
    """With no query nothing is launched: that is checking and dispatch. One query adds the launch
    on the calling thread, one key the smallest computation there is."""
    makers = {"numpy": lambda array: array}
    modes = contextlib.ExitStack()
    try:
        import torch

        makers["torch"] = torch.from_numpy
        modes.enter_context(torch.no_grad())  # as engines run
    except ImportError:
        pass
    rows = {}
    with modes:
        for name, make in makers.items():
            rows[name] = row = {}
            for what, lens in (("no_query", (0, 1)), ("no_key", (1, 0)), ("one_key", (1, 1))):
                row[f"{what}_us"], row[f"bound_{what}_us"] = tiny_run(*lens, make)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=RESULTS / "host.json")
    args = parser.parse_args()
    results = {"num_ctas": 132, "plan": bench_plan(), "tree": bench_tree(), "run": bench_run()}
    for num_requests, row in results["plan"].items():
        print(f"plan() of {num_requests:>4} requests: {row}")
    print(f"plan() of a tree of prefixes over 256 decodes, 264 queues: {results['tree']}")
    for framework, row in results["run"].items():
        print(f"run() with {framework}: {row}")
    write_json(args.out, results)


if __name__ == "__main__":
    main()
