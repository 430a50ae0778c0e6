# SPDX-License-Identifier: Apache-2.0
"""Times the operators on the CPU in turn with PyTorch, and prints the best time of each.

Sampling stands beside the usual pipelines of sort or topk, softmax and multinomial. The best of
many turns is comparable where the machine has other work too.
"""

import argparse
import time

import torch

import flashplan as fp

SIZE, VOCAB = 4096, 128256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def best_times(calls, seconds):
    """The least seconds of each call, of turns for so long and of at least five."""
    for call in calls:
        call()
    best = [float("inf")] * len(calls)
    begin, turns = time.perf_counter(), 0
    while turns < 5 or time.perf_counter() - begin < seconds:
        turns += 1
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def norms():
    functional = torch.nn.functional
    for dtype in DTYPES:
        for rows in (1, 32, 512):
            x, out = torch.randn(rows, SIZE).to(dtype), torch.empty(rows, SIZE, dtype=dtype)
            w, b = (torch.randn(SIZE).to(dtype) for _ in range(2))
            name = f"{rows} x {SIZE} {str(dtype)[6:]}"
            yield (
                f"rmsnorm {name}",
                lambda x=x, w=w, out=out: fp.rmsnorm(x, w, out=out),
                lambda x=x, w=w: functional.rms_norm(x, (SIZE,), w, 1e-6),
            )
            yield (
                f"layernorm {name}",
                lambda x=x, w=w, b=b, out=out: fp.layernorm(x, w, b, out=out),
                lambda x=x, w=w, b=b: functional.layer_norm(x, (SIZE,), w, b),
            )


def ropes():
    half = 64

    def of_torch(q, k, positions):
        angle = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
        angle = torch.cat((angle, angle), -1)[:, None]
        cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
        return [x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin for x in (q, k)]

    for dtype in DTYPES:
        for tokens in (1, 32, 512):
            q, k = (torch.randn(tokens, heads, 2 * half).to(dtype) for heads in (32, 8))
            outs = {"out_q": torch.empty_like(q), "out_k": torch.empty_like(k)}
            args = (q, k, torch.arange(tokens, dtype=torch.int32))
            rope = fp.Rope()
            yield (
                f"rope {tokens} x 32+8 {str(dtype)[6:]}",
                lambda args=args, rope=rope, outs=outs: fp.apply_rope(*args, rope, **outs),
                lambda args=args: of_torch(*args),
            )


def top_k_top_p(logits, top_k=None, top_p=None):
    if top_k is None:
        values, ids = logits.sort(-1, descending=True)
    else:
        values, ids = logits.topk(top_k, -1)
    if top_p is not None:
        p = values.softmax(-1)
        values = values.masked_fill(p.cumsum(-1) - p > top_p, -torch.inf)
    return ids.gather(-1, torch.multinomial(values.softmax(-1), 1))


def min_p(logits, least):
    p = logits.softmax(-1)
    return torch.multinomial(p.masked_fill(p < least * p.amax(-1, keepdim=True), 0), 1)


def samplers():
    for batch in (1, 32):
        x = 2 * torch.randn(batch, VOCAB)
        p, out = x.softmax(-1), torch.empty_like(x)
        ids = torch.empty(batch, dtype=torch.int32)
        pairs = {
            "sample probs": ({"from_probs": True}, lambda x, p: torch.multinomial(p, 1)),
            "sample": ({}, lambda x, p: torch.multinomial(x.softmax(-1), 1)),
            "argmax": ({"temperature": 0}, lambda x, p: x.argmax(-1)),
            "sample top-p": ({"top_p": 0.9}, lambda x, p: top_k_top_p(x, top_p=0.9)),
            "sample top-k": ({"top_k": 50}, lambda x, p: top_k_top_p(x, 50)),
            "sample top-k top-p": (
                {"top_k": 50, "top_p": 0.9},
                lambda x, p: top_k_top_p(x, 50, 0.9),
            ),
            "sample min-p": ({"min_p": 0.1}, lambda x, p: min_p(x, 0.1)),
        }
        for name, (options, peer) in pairs.items():
            rows = p if "from_probs" in options else x
            yield (
                f"{name} b{batch}",
                lambda rows=rows, options=options, ids=ids: fp.sample(rows, out=ids, **options),
                lambda peer=peer, x=x, p=p: peer(x, p),
            )
        yield (
            f"softmax b{batch}",
            lambda x=x, out=out: fp.softmax(x, 0.8, out),
            lambda x=x: (x / 0.8).softmax(-1),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="of both libraries")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each row")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    fp.set_num_threads(args.threads)
    print(f"{'row':36}{'us':>10}{'torch us':>12}{'torch/ours':>12}")
    for rows in (norms, ropes, samplers):
        for name, ours, peer in rows():
            if args.only not in name:
                continue
            us, peer_us = (1e6 * t for t in best_times([ours, peer], args.seconds))
            print(f"{name:36}{us:10.1f}{peer_us:12.1f}{peer_us / us:12.2f}", flush=True)


if __name__ == "__main__":
    main()
