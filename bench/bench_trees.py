# SPDX-License-Identifier: Apache-2.0
"""Times plans of random trees of shared prefixes on one GPU, with and without the groups.

No tree should take longer with groups. Trees whose prefixes are not computed once are left out:
their plans are the same. Results are checked before they are timed.
"""

import argparse
import pathlib
import re
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests"))

import numpy as np
import torch

import flashplan as fp
from case import Case
from flashplan.bench.gpu import Timer
from gpu_inputs import assert_right, make_gpu_inputs

PAGE_SIZE = 16
MOST_KEYS = 1 << 20  # of a batch, those of prefixes counted for each request: 4 GB of cache


def add_groups(rng, first, count, begin, most_pages, groups):
    """Requests [first, first + count) share some pages after the first `begin` ones; parts of them
    share more."""
    end = begin + int(rng.integers(most_pages + 1))
    groups.append((first, count, end * PAGE_SIZE))
    while count > 1:
        inside = int(rng.integers(1, count + 1))
        if rng.random() < 0.6:
            add_groups(rng, first, inside, end, most_pages // 2, groups)
        first, count = first + inside, count - inside


def random_tree(rng):
    """A Case: decodes or a few draft tokens below prefixes that are inside one another."""
    while True:
        size = int(rng.choice([4, 8, 16, 32, 64, 128, 256]))
        groups = []
        add_groups(rng, 0, size, 0, int(rng.choice([32, 256, 1024])), groups)
        groups = groups[: 2 * size]
        own = rng.integers(1, rng.choice([128, 1024, 4096]), size)
        qo_lens = rng.integers(1, rng.choice([2, 2, 2, 9]), size)
        kv_lens = qo_lens + own
        for first, count, tokens in groups:
            kv_lens[first : first + count] = np.maximum(
                kv_lens[first : first + count], tokens + own[first : first + count] + 8
            )
        if kv_lens.sum() <= MOST_KEYS:
            return Case(
                qo_lens=tuple(map(int, qo_lens)),
                kv_lens=tuple(map(int, kv_lens)),
                num_qo_heads=32,
                num_kv_heads=8,
                head_dim=128,
                page_size=PAGE_SIZE,
                shared_prefixes=tuple(groups),
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--trees", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    began = time.perf_counter()
    rng = np.random.default_rng(args.seed)
    timer = Timer(args.device)
    print(f"{'requests':>8}{'keys':>9}{'groups':>8}{'tiles':>7}{'us':>9}{'without':>9}{'ratio':>7}")
    ratios = []
    num_drawn = 0
    while len(ratios) < args.trees:
        case = random_tree(rng)
        num_drawn += 1
        shared, plain = (fp.Attention(**case.options() | {"device": args.device}) for _ in "ab")
        groups = np.array(case.shared_prefixes, np.int32)
        indptr = np.cumsum((0, *case.qo_lens), dtype=np.int32)
        text = shared.plan(indptr, case.kv_lens, shared_prefixes=groups).describe()
        computed = re.search(r"(\d+) row tiles of them computed once", text)
        if not computed:
            continue
        plain.plan(indptr, case.kv_lens)
        inputs = make_gpu_inputs(case, args.device)
        out = torch.empty_like(inputs.q)
        calls = [
            lambda attn=attn, inputs=inputs, out=out: attn.run(
                inputs.q, inputs.k, inputs.v, block_table=inputs.block_table, out=out
            )
            for attn in (shared, plain)
        ]
        for call in calls:
            out.fill_(torch.nan)
            call()
            assert_right(case, inputs, out, "flashplan")
        us, without = timer.in_turn(calls, args.repeats)
        ratios.append(us / without)
        print(
            f"{len(case.qo_lens):8}{sum(case.kv_lens):9}{len(groups):8}{computed[1]:>7}"
            f"{us:9.1f}{without:9.1f}{ratios[-1]:7.2f}",
            flush=True,
        )
    parts = ", ".join(f"{np.quantile(ratios, q):.2f}" for q in (0, 0.25, 0.5, 0.75, 1))
    print(f"{len(ratios)} of {num_drawn} trees shared, quartiles of the ratio: {parts}")
    print(f"{sum(r > 1.02 for r in ratios)} slower by more than 2 %")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
