# SPDX-License-Identifier: Apache-2.0
"""Serves chat prompts with SmolLM2-135M-Instruct, all attention through flashplan.

python examples/generate.py
python examples/generate.py --device cuda (with PyTorch or CuPy)
python examples/generate.py --temperature 0.8 --top-p 0.95 --seed 1
"""

import argparse
import os
import statistics
import sys
import time

# BLAS threads wait in a spin: beside other work on a few cores they cost far more than they give.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy is imported

try:
    import gguf
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
    from tokenizers import Tokenizer
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install '.[demo]'") from None

from dense import TIE_TOLERANCE, compare_with_dense
from devices import array_module
from display import Display
from kv_pool import KvPool
from llama import Llama
from prompts import PROMPTS, SYSTEM
from serving import Engine, Request, Sampling
from smollm2 import load_model
from smollm2_file import chat_prompt, find_weights, load_tokenizer

KV_DTYPES = {"cpu": "float32", "cuda": "float16"}
PAGE_SIZE = 16
NUM_PAGES = 96  # too few for all requests at once
MAX_BATCH_SIZE = 5  # requests in one step
MAX_STEP_TOKENS = 192  # longer prompts are computed in several steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--framework",
        choices=("numpy", "torch", "cupy"),
        help="of the arrays; default: numpy, on a GPU torch or else cupy",
    )
    parser.add_argument("--max-new-tokens", type=int, default=112, help="for each prompt")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely token")
    parser.add_argument("--top-p", type=float, default=1.0, help="mass of the tokens to draw from")
    parser.add_argument("--seed", type=int, default=0, help="of the first request's random numbers")
    args = parser.parse_args()
    try:
        xp = array_module(args.framework, args.device)
        weights = find_weights()
    except (RuntimeError, FileNotFoundError) as error:
        parser.error(str(error))

    console = Console(highlight=False)
    console.print(f"Loading {weights.name}\n")
    reader = gguf.GGUFReader(weights)
    tokenizer = load_tokenizer(reader)
    model = load_model(reader, xp, KV_DTYPES[args.device])
    c = model.config
    pool = KvPool(
        c.num_layers, NUM_PAGES, PAGE_SIZE, c.num_kv_heads, c.head_dim, model.xp, model.kv_dtype
    )
    sampling = Sampling(args.temperature, args.top_p, args.seed)
    engine = Engine(model, pool, MAX_BATCH_SIZE, MAX_STEP_TOKENS, args.device, sampling)
    requests = [
        Request(name, tokenizer.encode(chat_prompt(SYSTEM, user)).ids, args.max_new_tokens)
        for name, user in PROMPTS.items()
    ]
    for request in requests:
        engine.submit(request)

    display = Display(console, tokenizer, requests)
    start = time.perf_counter()
    with display.live:
        while engine.is_busy:
            finished = engine.step()
            display.update(engine, finished)
    seconds = time.perf_counter() - start

    if sampling.temperature == 0:
        verdict, passed = check(model, tokenizer, requests, console)
    else:
        verdict, passed = "none: tokens were drawn, not the most likely ones", True
    console.print(summary(engine, requests, seconds, verdict))
    return 0 if passed else 1


def check(
    model: Llama, tokenizer: Tokenizer, requests: list[Request], console: Console
) -> tuple[str, bool]:
    """Compares the generated tokens with the dense model's; returns a verdict and if they pass."""
    num_ties = num_errors = 0
    for request in track(
        requests, "Comparing with dense attention", console=console, transient=True
    ):
        for d in compare_with_dense(model, request):
            num_ties += d.is_tie
            num_errors += not d.is_tie
            served, dense = (repr(tokenizer.id_to_token(t)) for t in (d.served, d.dense))
            console.print(
                f"{'near-tie' if d.is_tie else 'ERROR'}: {request.name}, generated token "
                f"{d.index}: served {served}, dense {dense}, whose logit is {d.gap:.2g} larger",
                markup=False,
            )
    num_tokens = sum(len(r.new_tokens) for r in requests)
    if num_errors:
        return f"FAILED: {num_errors} of {num_tokens} tokens differ from dense attention", False
    if num_ties:
        return (
            f"{num_tokens - num_ties} of {num_tokens} tokens equal those of dense attention, "
            f"{num_ties} are near-ties (logits within {TIE_TOLERANCE[model.kv_dtype]:g})"
        ), True
    return f"all {num_tokens} tokens equal those of dense attention", True


def summary(engine: Engine, requests: list[Request], seconds: float, verdict: str) -> Table:
    s, pool = engine.statistics, engine.pool
    num_prompt_tokens = sum(r.num_prompt_tokens for r in requests)
    num_new_tokens = sum(len(r.new_tokens) for r in requests)
    rows = {
        "requests": f"{len(requests)}, at most {MAX_BATCH_SIZE} at a time",
        "prompt tokens": f"{num_prompt_tokens}, of which {s.shared_tokens} in shared pages",
        "generated tokens": f"{num_new_tokens} in {seconds:.1f} s",
        "tokens/s": f"{num_new_tokens / seconds:.1f}",
        "steps": f"{len(s.plan_us)}",
        "… with prefill": f"{s.prefill_steps}",
        "… with decode": f"{s.decode_steps}",
        "… with both": f"{s.mixed_steps}",
        "pages used at peak": f"{s.peak_pages} of {pool.num_pages}",
        "pages shared": f"{s.shared_tokens // pool.page_size}",
        "plan µs per step": f"{statistics.median(s.plan_us):.1f} (median)",
        "check": verdict,
    }
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


if __name__ == "__main__":
    sys.exit(main())
