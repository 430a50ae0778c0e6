# SPDX-License-Identifier: Apache-2.0
"""Times sample() on a GPU, in microseconds, over distributions and ways to call it, in some 20 s.

Other than bench_gpu.py it compares no tokens unless it is told to (--check), which takes the CPU
minutes. The L2 is flushed before each call; times are medians.
"""

import argparse

import torch

import flashplan as fp
from flashplan.bench.gpu import Timer
from gpu_sampling import DISTRIBUTIONS, OTHER_WAYS, TOP_P_WAYS, VOCAB, sample_call

NUMBERS = {
    "top-k 50": ({"top_k": 50}, {}),
    "top-k 1000": ({"top_k": 1000}, {}),
    "top-k 1000 cold": ({"top_k": 1000, "temperature": 0.4}, {}),
    "top-k 50 top-p 0.9": ({"top_k": 50, "top_p": 0.9}, {}),
    "min-p 0.1": ({"min_p": 0.1}, {}),
    "top-p 0.1": ({"top_p": 0.1}, {}),
    "temperature 0.8": ({"temperature": 0.8}, {}),
    "probabilities": ({"from_probs": True}, {}),
}


def time_of(timer, logits, way, args):
    call, check = sample_call(logits, *way)
    if args.check:
        check()
    return timer.microseconds(call, args.repeats)


def print_row(name, times):
    print(f"{name:>20}" + "".join(f"{us:>22.1f}" for us in times), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 32, 256])
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--check", action="store_true", help="compare tokens with the CPU's")
    args = parser.parse_args()
    torch.manual_seed(0)
    timer = Timer("cuda")
    print(fp.__version__, torch.cuda.get_device_name(), args.vocab, "elements")
    with torch.no_grad():
        for num_rows in args.rows:
            print(f"{num_rows} rows, top-p{'':>6}" + "".join(f"{w:>22}" for w in TOP_P_WAYS))
            for name, make in DISTRIBUTIONS.items():
                logits = make(num_rows, "cuda", args.vocab)
                print_row(name, [time_of(timer, logits, w, args) for w in TOP_P_WAYS.values()])
        others = NUMBERS | {f"arrays {name}": way for name, way in OTHER_WAYS.items()}
        print(f"{'N(0,3^2)':>20}" + "".join(f"{f'{n} rows':>22}" for n in args.rows))
        logits = [DISTRIBUTIONS["N(0,3^2)"](n, "cuda", args.vocab) for n in args.rows]
        for name, way in others.items():
            print_row(name, [time_of(timer, x, way, args) for x in logits])


if __name__ == "__main__":
    main()
