# SPDX-License-Identifier: Apache-2.0
"""Valid calls with any data: NaN and infinity among it, and any softcap."""

import warnings

import numpy as np

import flashplan as fp
import reference
from frameworks import NumPy
from inputs import make_inputs
from misuse import note
from misuse.any_call import any_call
from misuse.calls import Run, pick, python_random, small_case
from misuse.finding import Finding, kind
from misuse.memory import place
from random_cases import random_case
from solve import run_arguments

NANS = (0x7FC00000, 0x7FC00001, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0xFFC00000)


@kind("valid", weight=6)
def valid(rng):
    """Valid calls: small ones, and any of random_case()."""
    if rng.integers(4) > 0:
        call = any_call(rng)
        note(f"a valid {type(call).__name__}")
        if not call.judge({}, []):
            raise Finding("a valid call was refused")
        return
    case = random_case(python_random(rng))
    note(f"a valid run of {case}")
    fixed = {field: getattr(case, field) for field in case.__dataclass_fields__}
    Run(rng, **fixed).judge({}, [])


def special(rng, array, chance):
    """NaN of any payload, and infinities, at random places."""
    where = rng.random(array.shape) < chance
    kinds = pick(rng, "nan", "inf", "both")
    for index in np.argwhere(where):
        value = pick(rng, np.inf, -np.inf)
        if kinds == "nan" or (kinds == "both" and rng.integers(2)):
            value = np.array([pick(rng, *NANS)], np.uint32).view(np.float32)[0]
        if array.dtype == np.float32:
            array.view(np.uint32)[tuple(index)] = np.float32(value).view(np.uint32)
        else:
            array[tuple(index)] = value


@kind("NaN and infinity", weight=4)
def nan_and_infinity(rng):
    dtype = pick(rng, "float32", "float32", "bfloat16")
    kv_lens = pick(rng, (1,), (7, 40), (300,), (70, 0, 129), (1000, 3))
    qo_lens = tuple(pick(rng, 1, 1, 5, 40) for _ in kv_lens)
    case = small_case(rng, q_dtype=dtype, kv_dtype=None, kv_lens=kv_lens, qo_lens=qo_lens,
                      head_dim=pick(rng, 1, 8, 24), softcap=pick(rng, 0.0, 0.0, 5.0),
                      custom_mask=None, sinks=False, device_scales=None)  # fmt: skip
    inputs = make_inputs(case, int(rng.integers(2**31)))
    chance = pick(rng, 0.0005, 0.005, 0.05)
    for name in ("q", "k", "v"):
        if rng.integers(2):
            special(rng, getattr(inputs, name), chance)
    note(f"NaN and infinity in {case}")
    attn = fp.Attention(**case.options())
    attn.plan(*inputs.plan_args())
    args, kwargs = run_arguments(case, inputs, NumPy())
    o, lse = attn.run(*(place(a, rng).array for a in args), **kwargs, return_lse=True)
    for r, (k, v) in enumerate(inputs.requests(case.kv_layout)):
        rows = slice(*inputs.qo_indptr[r : r + 2])
        check_rows(case, inputs.q[rows], k, v, o[rows], lse[rows])


def check_rows(case, q, k, v, o, lse):
    q, k, v, o = (x.astype(np.float64) for x in (q, k, v, o))
    visible = reference.visible_keys(len(q), len(k), case.causal, case.window_left)
    group_size = case.num_qo_heads // case.num_kv_heads
    tolerance = 3e-5 if case.q_dtype == "float32" else 4e-2
    for head in range(case.num_qo_heads):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            logits = (q[:, head, None] * k[None, :, head // group_size]).sum(-1)
            logits /= np.sqrt(q.shape[2])
            if case.softcap:
                logits = case.softcap * np.tanh(logits / case.softcap)
        for i in range(len(q)):
            row, values = logits[i][visible[i]], v[visible[i], head // group_size]
            check_row(case, row, values, o[i, head], lse[i, head], tolerance)


def check_row(case, logits, values, o, lse, tolerance):
    """One row of one head: what each of NaN, +inf and -inf may become."""

    def fail(what):
        raise Finding(f"{what}\nlse {lse}, o {o[:4]}; {case}; logits {logits[:6]}")

    if len(logits) == 0:
        if lse != -np.inf or (o != 0).any():
            fail("a row without keys is not o = 0, lse = -inf")
        return
    if np.isnan(logits).any():
        if not (np.isnan(lse) and np.isnan(o).all()):
            fail("a NaN among the logits vanished")
        return
    if np.isposinf(logits).any():
        if np.isfinite(lse) or lse == -np.inf or np.isfinite(o).any():
            fail("an infinite logit vanished")
        return
    if np.isneginf(logits).all():
        if np.isfinite(lse):
            fail("a row of logits of -inf has a finite lse")
        return
    highest = logits.max()
    weights = np.exp(logits - highest)
    exact_lse = highest + np.log(weights.sum())
    if not abs(lse - exact_lse) <= tolerance * (1 + abs(exact_lse)):
        fail(f"lse is not as the reference: {exact_lse}")
    weights /= weights.sum()
    for d in range(values.shape[1]):
        odd = ~np.isfinite(values[:, d])
        if odd.any():
            if (weights[odd] > 1e-30).any() and np.isfinite(o[d]):
                fail(f"a NaN or infinity among the values of dim {d} vanished")
            continue
        exact = weights @ values[:, d]
        if not abs(o[d] - exact) <= tolerance * (1 + np.abs(values[:, d]).max()):
            fail(f"o[{d}] differs from {exact}")


@kind("merging NaN and infinity", weight=2)
def merge_special(rng):
    count, shape = int(rng.integers(1, 5)), (2, 2, int(rng.integers(1, 20)))
    o = rng.standard_normal((count, *shape)).astype(np.float32)
    lse = (5 * rng.standard_normal((count, *shape[:2]))).astype(np.float32)
    lse[rng.random(lse.shape) < 0.2] = -np.inf
    chance = pick(rng, 0.05, 0.3)
    special(rng, o, chance)
    if rng.integers(2):
        nans = rng.random(lse.shape) < chance
        lse.view(np.uint32)[nans] = pick(rng, *NANS)
        lse[rng.random(lse.shape) < chance / 2] = np.inf
    note("merging states with NaN and infinity")
    out, out_lse = fp.merge_states(o, lse)
    for index in np.ndindex(*shape[:2]):
        states = [(o[s][index].astype(np.float64), float(lse[s][index])) for s in range(count)]
        merged, merged_lse = out[index], out_lse[index]
        states = [(x, y) for x, y in states if y != -np.inf]
        text = f"lse {merged_lse}, o {merged[:4]} from {states}"[:600]
        if not states:
            if merged_lse != -np.inf or merged.any():
                raise Finding(f"states without keys do not merge to one: {text}")
            continue
        if any(np.isnan(y) or y == np.inf for _, y in states):
            if np.isfinite(merged_lse) or merged_lse == -np.inf:
                raise Finding(f"a NaN or infinite lse vanished in a merge: {text}")
            continue
        highest = max(y for _, y in states)
        weights = np.array([np.exp(y - highest) for _, y in states])
        exact_lse = highest + np.log(weights.sum())
        if not abs(merged_lse - exact_lse) < 1e-5 * (1 + abs(exact_lse)):
            raise Finding(f"lse of merged states differs from {exact_lse}: {text}")
        for d in range(shape[2]):
            values = np.array([x[d] for x, _ in states])
            odd = ~np.isfinite(values)
            if odd.any():
                if (weights[odd] > 1e-30).any() and np.isfinite(merged[d]):
                    raise Finding(f"a NaN or infinity vanished in a merge: {text}")
                continue
            if not abs(merged[d] - weights @ values / weights.sum()) < 1e-4:
                raise Finding(f"o of merged states differs: {text}")


@kind("softcap", weight=2)
def softcap(rng):
    """One key: lse is the capped logit, to a few last bits of a float32."""
    cap = np.float32(10.0 ** rng.uniform(-6, 8))
    logit = np.float32(pick(rng, 1, -1) * 10.0 ** rng.uniform(-6, 4))
    note(f"softcap {cap} of logit {logit}")
    attn = fp.Attention(1, 1, 1, page_size=None, q_dtype="float32", softcap=float(cap),
                        softmax_scale=1.0, device="cpu")  # fmt: skip
    attn.plan([0, 1], [1])
    one = np.ones((1, 1, 1), np.float32)
    _, lse = attn.run(one * logit, one, one, return_lse=True)
    exact = float(cap) * np.tanh(float(logit) / float(cap))
    if not abs(lse[0, 0] - exact) <= 1e-6 * abs(exact):
        raise Finding(f"capped logits are wrong\nexpected {exact}, got {lse[0, 0]}")


@kind("scales")
def scales(rng):
    """stored key = key / k_scale, for any scale that is not refused."""
    scale = np.float32(10.0 ** rng.uniform(-45, 38))
    keys = rng.standard_normal((3, 1, 4)).astype(np.float32)
    keys[0, 0, 0] = 0
    caches = [np.full((1, 4, 1, 4), np.nan, np.float32) for _ in range(2)]
    note(f"append with k_scale {scale}")
    one = np.array([0, 3], np.int32), np.array([3], np.int32)
    try:
        fp.append_paged_kv(keys, keys, *caches, *one, block_table=np.zeros((1, 1), np.int32),
                           k_scale=float(scale))  # fmt: skip
    except ValueError:
        return
    with np.errstate(all="ignore"):
        expected = keys / scale
    actual = caches[0][0, :3]
    if not np.array_equal(actual.view(np.uint32), expected.view(np.uint32)):
        raise Finding(f"stored keys are not key / k_scale\n{actual.ravel()[:4]}")
