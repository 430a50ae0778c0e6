# SPDX-License-Identifier: Apache-2.0
"""Runs small cases of all GPU code under each tool of compute-sanitizer.

python tests/gpu/sanitize.py [TOOL...]; or --once [TOOL]: its cases alone, in this process.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

TESTS = pathlib.Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")


def small_cases(tool):
    from batches import BATCH
    from case import Case

    split = {"qo_lens": (1, 2), "kv_lens": (900, 40), "num_ctas": 7, "head_dim": 64}
    # In these cases every warp has rows and sees all keys. A warp that has none skips the named
    # barriers, and racecheck then reports hazards between accesses that a barrier of all threads
    # separates.
    paired = {"kv_lens": (150,), "head_dim": 256, "causal": False, "num_ctas": 1}
    return [
        Case(**BATCH),
        Case(**BATCH, page_size=1, csr=True, memory="strided", q_dtype="float16"),
        Case(**BATCH, page_size=None, memory="strided", causal=False),
        Case(**BATCH, page_size=3, kv_layout="HND", head_dim=40, window_left=20),
        Case(**BATCH, head_dim=128, softcap=10.0, num_qo_heads=8),
        Case((80,), (80,), head_dim=128, page_size=None),
        Case((130,), (700,), head_dim=128, num_ctas=2, num_qo_heads=2),
        Case((130, 3), (400, 70), head_dim=128, num_qo_heads=2, page_size=3, csr=True),
        Case((140, 1), (150, 30), num_qo_heads=2, num_kv_heads=2),
        Case((0,), (5,)),
        Case((1, 2), (30, 40), planned_lens=(900, 41), num_ctas=7, window_left=33),
        Case((20, 3), (30, 40), custom_mask="tree", mask_begin=(10, 37), memory="strided"),
        Case((20, 1, 2), (30, 1500, 0), sinks=True, device_scales="heads", num_ctas=7),
        Case((130,), (200,), planned_lens=(700,), head_dim=128, num_ctas=2, num_qo_heads=2),
        Case(**split),
        Case(**split, batch_invariant=True),
        Case(**split, kv_dtype="float8_e4m3fn", k_scale=0.5, v_scale=1.7),
        Case(**split, kv_dtype="float8_e5m2", page_size=1),
        Case(
            (1,) * 9,
            tuple(range(330, 420, 10)),
            num_qo_heads=8,
            shared_prefixes=((0, 9, 320),),
            num_ctas=7,
        ),
        Case((20, 1), (40, 70), head_dim=256, num_qo_heads=2, num_kv_heads=1),
        Case((50,), **paired, num_qo_heads=4, num_kv_heads=2),
        Case((100,), **paired, kv_dtype="float8_e5m2", num_qo_heads=2),
        Case((20, 1), (40, 70), head_dim=(192, 128), num_qo_heads=2, num_kv_heads=1),
        Case((70,), (150,), head_dim=128, kv_dtype="float8_e4m3fn", num_qo_heads=2, num_ctas=1),
        Case((130, 3), (400, 70), head_dim=128, num_qo_heads=2, page_size=None, rope="plain"),
        Case((130, 3), (400, 70), head_dim=128, num_qo_heads=2, page_size=None, variant="linear"),
        # Many row tiles read few keys, so that these are prepared. Each CTA computes at most two
        # row tiles. With a third one synccheck would report a missing wait: a row tile of more than
        # 64 rows uses two mbarriers for its queries, the consumers wait only for the first of them,
        # and the third tile uses both again.
        Case((260, 3), (260, 70), head_dim=128, num_qo_heads=64, page_size=None, rope="plain"),
        Case((260, 3), (260, 70), head_dim=128, num_qo_heads=64, page_size=1),
        Case(
            (260, 3, 260), (260, 70, 150), head_dim=128, num_qo_heads=64, kv_dtype="float8_e4m3fn"
        ),
        Case((130, 3), (300, 70), head_dim=128, q_dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn"),
        Case((60,), **paired | {"head_dim": 512}, num_qo_heads=2, num_kv_heads=2),
        *(missing_pages_and_512_dims() if tool != "racecheck" else ()),
    ]


def missing_pages_and_512_dims():
    """Cases that racecheck does not run, because it reports hazards in them that are not errors.
    One warp sets the word that says that a page is missing while other warps read this word, and
    both values of the word give the same results. With 512 dims, warps without rows skip named
    barriers (see `paired` in small_cases())."""
    from case import Case

    for qo, kv in (((1, 3), (200, 40)), ((130, 3), (200, 70))):
        for dim, page in ((64, 16), (128, 3), (128, 64), (256, 16)):
            yield Case(qo, kv, head_dim=dim, page_size=page, window_left=50, page_ids="missing")
    yield Case((260,), (260,), head_dim=128, num_qo_heads=64, page_size=1, page_ids="missing")
    for page in (None, 3, 64):
        yield Case((130, 3), (300, 70), head_dim=512, num_qo_heads=2, page_size=page, num_ctas=2)


def latent_cases():
    """Cases with whole and with cut work tiles. The kernels copy the rows of the cache by boxes of
    tensor maps, one row at a time, or from addresses that are not aligned."""
    from mla_cases import MlaCase
    from sparse_cases import SparseCase

    for kv_dtype in (None, "float8_e4m3fn", "fp8_ds_mla"):
        for num_heads in (16, 128):
            options = {"num_heads": num_heads, "kv_dtype": kv_dtype, "num_ctas": 5}
            yield MlaCase((1, 2), (900, 70), **options)
            yield MlaCase((1, 2), (130, 300), page_size=1, **options)
            yield SparseCase((1, 2), (700, 300), topk=256, page_size=64, **options)
    yield MlaCase((1, 2), (130, 300), num_ctas=5, strided=True)


def run_once(tool):
    """All inputs are copies of host memory, so that all that kernels may read is initialised."""
    import numpy as np
    import torch

    import flashplan as fp
    import gpu_mla_cases
    import mla_cases
    import sparse_cases
    import test_append
    import test_filters
    import test_merge
    import test_penalties
    import test_rope
    import test_rope_append
    import test_rows
    import test_sampling
    import test_speculative
    from frameworks import TorchCuda
    from gpu_cases import DEVICE, is_supported
    from solve import assert_correct, problem, run_arguments

    framework = TorchCuda(torch)
    rng = np.random.default_rng(0)
    count = 0
    for case in filter(is_supported, small_cases(tool)):
        inputs, exact, twin = problem(case, seed=0)
        attn = fp.Attention(**case.options() | {"device": DEVICE})
        args, kwargs = run_arguments(case, inputs, framework)
        for _ in range(2):  # counters must be back at zero
            attn.plan(*inputs.plan_args(), **inputs.plan_options())
            state = attn.run(*args, **kwargs, return_lse=True)
        state = [framework.array(x) for x in state]
        assert_correct(case, inputs, exact, twin, *state)
        count += 1
    for case in filter(gpu_mla_cases.is_served, latent_cases()):
        is_dense = isinstance(case, mla_cases.MlaCase)
        make = mla_cases.make_mla_inputs if is_dense else sparse_cases.make_sparse_inputs
        check = gpu_mla_cases.assert_right if is_dense else sparse_cases.assert_sparse_correct
        inputs = make(case, 0)
        attn = fp.Attention(**gpu_mla_cases.options_of(case))
        for _ in range(2):
            state = gpu_mla_cases.run_on_gpu(case, inputs, torch, attn)
        check(case, inputs, *state)
        count += 1

    for cache_dtype in ("bfloat16", "float8_e4m3fn"):
        cache = test_append.Problem("bfloat16", cache_dtype, strided=True)
        cache.append(framework, [framework.tensor(x) for x in cache.caches])
        count += 1
    test_append.check_slots(
        rng, framework, strays=(-2, 2**40), dtype="float16", cache_dtype="float16"
    )
    for options in ({"cache_dtype": "float8_e4m3fn"}, {"strided": True, "csr": True}):
        problem = test_rope_append.Problem(rng, kv_lens=(5, 99, 12, 1, 40), **options)
        test_rope_append.check(problem, fp.Rope(), framework)
    # A cluster of several CTAs reads a row of `long` elements. A shorter row is read by one CTA,
    # which sends messages to itself. memcheck reports such messages as errors, so it gets long rows
    # only.
    long = 40000

    def short(size):
        return long if tool == "memcheck" else size

    # A thread that has received a CTA's message may overwrite shared memory that the CTA read
    # before it sent the message, because the message comes after these reads. racecheck does not
    # know this order and reports the writes as races, so it does not run these cases.
    for vocab in (short(70), long) if tool != "racecheck" else ():
        drafts = test_speculative.random_drafts(rng, 3, 4, vocab)
        test_speculative.verify(framework, *drafts, [-1, -1, 0, 1])
        count += 1
    test_penalties.check(rng, framework, 3, 9000, 50, "bfloat16", (1.3, 0.5, 0.25))
    count += 4
    for dtype, shape in (("bfloat16", (3, 5, 128)), ("float16", (7, 333)), ("float32", (2, 9000))):
        test_rows.check_rmsnorm(rng, shape, dtype, True, framework)
        test_rows.check_add_rmsnorm(rng, shape, dtype, framework)
        test_rows.check_layernorm(rng, shape, dtype, False, framework)
        test_rows.check_gated(rng, "gelu_tanh", shape, dtype, True, framework)
        test_rope.check_rope(rng, fp.Rope(), framework, dtype=dtype, strided=True)
        count += 5
    for name, options in test_sampling.FILTERS.items():
        # With these filters the kernels add up rows: each warp stores a sum in shared memory, and
        # after __syncthreads() one warp reads the sums of all warps. racecheck does not know that
        # this barrier orders them, and reports a race between the stores and the reads.
        if tool == "racecheck" and name in ("p tiny", "p 0.8", "p 0.999"):
            continue
        clusters = name in ("k 5", "p 0.3", "all")
        size, dtype = (long, "float32") if clusters else (short(5000), "bfloat16")
        test_sampling.check_filters(rng, framework, size, dtype, options)
        test_filters.check_filtered_probs(rng, framework, size, dtype, options)
        test_filters.check_logprobs(rng, framework, size, dtype, options)
        count += 3
    # counted_kernel() draws from these rows, each by a cluster of 16 CTAs. racecheck does not run
    # this case: it reports races between stores and reads that __syncthreads() orders.
    if tool != "racecheck":
        logits = rng.standard_normal((2, 140_000)).astype("float32")
        ids = framework.array(fp.sample(framework.tensor(logits), top_p=0.9, seed=1))
        assert (ids == fp.sample(logits, top_p=0.9, seed=1)).all()
        count += 1
    for options in ({"top_k": 5}, {"top_p": 0.3}):
        test_sampling.check_filters(
            rng, framework, short(1500), "float32", options, from_probs=True
        )
    for size in (short(7), long):
        test_sampling.check_softmax(rng, framework, 3, size, "float16", "float32", 0.5)
    count += 4
    o, lse = test_merge.states(3, "bfloat16")
    merged = fp.merge_states(framework.tensor(o), framework.tensor(lse))
    test_merge.assert_merged(o, lse, *(framework.array(x) for x in merged))
    torch.cuda.synchronize()
    print(f"{count + 1} small cases ran")


def sanitize(tool):
    """Whether the tool found nothing in this library's kernels, and all cases ran."""
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "all"]
    command += ["--kernel-name", "kns=flashplan"]
    # Each tensor is an allocation of its own, so that reading past its end is seen.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    clean = r"ERROR SUMMARY: 0 errors"
    if tool == "memcheck":
        command += ["--leak-check", "no", "--report-api-errors", "no"]
    elif tool == "initcheck":
        # It does not see what TMA writes, so copies of results to the host would be reported.
        command += ["--check-api-memory-access", "no"]
    elif tool == "racecheck":
        # The pattern allows warnings: the tool warns where a CTA initialises an mbarrier and then
        # waits at a relaxed barrier of the cluster. In the sm90 kernels, lanes of a warp write to
        # shared memory, call __syncwarp(), and one lane arrives at an mbarrier. The tool reports a
        # race there, although this orders the writes of all lanes. So it runs the sm80 kernels.
        clean = r"RACECHECK SUMMARY: .*\b0 (hazards|errors)"
        environment["FLASHPLAN_KERNEL_FAMILY"] = "sm80"
    done = subprocess.run(
        [*command, sys.executable, __file__, "--once", tool],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    ran = re.search(r"\d+ small cases ran", done.stdout)
    if done.returncode == 0 and re.search(clean, done.stdout) and ran:
        print(f"{tool}: nothing found, {ran.group()}", flush=True)
        return True
    print(done.stdout, f"{tool}: failed ({done.returncode})", sep="\n", flush=True)
    return False


def main():
    if sys.argv[1:2] == ["--once"]:
        sys.path[:0] = [str(TESTS), str(TESTS / "gpu")]
        run_once(*sys.argv[2:3] or [None])
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer: expected on PATH (of the CUDA toolkit), got none")
        return 1
    results = [sanitize(tool) for tool in sys.argv[1:] or TOOLS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
