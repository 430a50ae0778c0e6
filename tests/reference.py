# SPDX-License-Identifier: Apache-2.0
"""The reference: attention in NumPy, slow and short, and the error that a result may have.

With `dtype=float64` the functions are exact for our purposes. With a low-precision dtype they
are the twin: the same steps, every tensor rounded to the dtype where a naive program would store
it. The twin's error is what the dtype costs, and the error budget of the library.
"""

import math

import ml_dtypes
import numpy as np

EPS_FLOAT32 = 2.0**-23
EPS = {"float64": 2.0**-52, "float32": EPS_FLOAT32, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def visible_keys(qo_len, kv_len, causal=True, window_left=-1):
    """[qo_len, kv_len] of bool: whether query i sees key j; the last query is at the last key."""
    i = np.arange(qo_len)[:, None] + kv_len - qo_len
    j = np.arange(kv_len)[None, :]
    visible = np.ones((qo_len, kv_len), bool)
    if causal:
        visible &= j <= i
    if window_left >= 0:
        visible &= j >= i - window_left
    return visible


def softmax(logits):
    """Probabilities and log-sum-exp of each row; a row of -inf has probabilities 0, lse -inf, and
    one with a logit of NaN or +inf has NaN."""
    highest = logits.max(axis=1, initial=-np.inf)
    shift = np.where(highest == -np.inf, 0, highest)
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp(logits - shift[:, None])
        total = weights.sum(axis=1)
        lse = shift + np.log(total)
    return weights / np.where(total == 0, 1, total)[:, None], lse


def weighted_sums(probabilities, visible, v):
    """probabilities @ v, without the values that a row does not see, since 0 * NaN is NaN."""
    finite = np.isfinite(v)
    sums = probabilities @ np.where(finite, v, 0)
    for key in np.flatnonzero(~finite.all(axis=1)):
        special = np.where(finite[key], 0, v[key])
        with np.errstate(invalid="ignore"):
            products = probabilities[:, key, None] * special
            sums += np.where(visible[:, key, None], products, 0)
    return sums


def attention(
    q,
    k,
    v,
    *,
    causal=True,
    window_left=-1,
    softmax_scale=None,
    softcap=0.0,
    q_scale=1.0,
    k_scale=1.0,
    v_scale=1.0,
    mask=None,
    sinks=None,
    rotate=None,
    bodies=None,
    arguments=None,
    uses_softmax=True,
    request=0,
    dtype="float64",
    stored_dtype=None,
    spread=False,
):
    """One request: q [qo_len, num_qo_heads, head_dim_qk], k and v [kv_len, num_kv_heads, ...],
    mask [qo_len, kv_len] of bool, sinks [num_qo_heads]: a logit without a value for each head,
    scales: numbers, or [num_kv_heads], rotate(x, positions): of q and k; see rope_cases.py.
    `bodies` are those of a variant: see variant_cases.py. `stored_dtype` is that of q, k and v
    after bodies and rotations, if it is not `dtype`. With `spread` each element of o is the root of
    the sum of the squares of what it is the sum of, weights times values."""
    wide = np.float64 if dtype == "float64" else np.float32

    def stored(x, dtype=dtype):
        return x.astype(dtype).astype(wide)

    def stored_input(x):
        return stored(x, stored_dtype or dtype)

    bodies = bodies or {}
    arguments = arguments or {}
    q_tokens = np.arange(q.shape[0]) + k.shape[0] - q.shape[0]

    def transformed(name, x, tokens):
        """[tokens, heads, dim] by the body for elements of that name."""
        if name not in bodies:
            return x
        heads = [
            bodies[name](
                x[:, h], request, tokens[:, None], h, np.arange(x.shape[2])[None], **arguments
            )
            for h in range(x.shape[1])
        ]
        return np.stack(heads, axis=1)

    group_size = q.shape[1] // k.shape[1]
    scale_of_heads = np.repeat(np.broadcast_to(np.asarray(q_scale, wide), k.shape[1]), group_size)
    q = transformed("query", q.astype(wide), q_tokens) * scale_of_heads[:, None]
    q = stored_input(q)
    kv_tokens = np.arange(k.shape[0])
    k = stored_input(
        transformed("key", k.astype(wide), kv_tokens) * np.asarray(k_scale, wide)[..., None]
    )
    if rotate is not None:
        q, k = stored_input(rotate(q, q_tokens)), stored_input(rotate(k, kv_tokens))
    v = stored_input(
        transformed("value", v.astype(wide), kv_tokens) * np.asarray(v_scale, wide)[..., None]
    )
    scale = 1 / math.sqrt(q.shape[2]) if softmax_scale is None else softmax_scale
    visible = visible_keys(q.shape[0], k.shape[0], causal, window_left)
    if mask is not None:
        visible &= mask

    o = np.zeros((q.shape[0], q.shape[1], v.shape[2]), wide)
    lse = np.zeros(q.shape[:2], wide)
    for head in range(q.shape[1]):
        kv_head = head // group_size
        with np.errstate(invalid="ignore"):
            logits = stored(q[:, head] @ k[:, kv_head].T * wide(scale))
        at = (request, q_tokens[:, None], kv_tokens[None], head, kv_head, q.shape[0], k.shape[0])
        seen = visible & bodies["mask"](*at, **arguments) if "mask" in bodies else visible
        if "logits" in bodies:
            logits = stored(bodies["logits"](logits, *at, **arguments))
        if softcap > 0:
            logits = stored(wide(softcap) * np.tanh(logits / wide(softcap)))
        logits = np.where(seen, logits, -np.inf)
        if sinks is not None:
            logits = np.column_stack([logits, np.full(len(q), wide(sinks[head]))])
        if uses_softmax:
            probabilities, lse[:, head] = softmax(logits)
        else:
            probabilities = np.where(np.isneginf(logits), 0, logits)
        probabilities = stored(probabilities[:, : len(k)])
        if spread:
            o[:, head] = np.sqrt(weighted_sums(probabilities**2, seen, v[:, kv_head] ** 2))
        else:
            o[:, head] = stored(weighted_sums(probabilities, seen, v[:, kv_head]))
    o[np.isnan(lse)] = np.nan  # also where the sink alone is NaN
    return transformed("output", o, q_tokens), lse


def unpacked_mask(words, begin, kv_len):
    """[rows, kv_len] of bool from a mask of bits that begins at key `begin`."""
    seen = np.zeros((len(words), kv_len), bool)
    for key in range(kv_len):
        bit = key - begin
        if bit < 0:
            seen[:, key] = True
        elif bit < 32 * words.shape[1]:
            seen[:, key] = words[:, bit // 32] >> np.uint32(bit % 32) & np.uint32(1)
    return seen


def batch_attention(q, requests, qo_indptr, masks=None, **options):
    """All requests: rows qo_indptr[r] to qo_indptr[r + 1] - 1 of q see requests[r] = (k, v), except
    for what masks[r] hides."""
    masks = masks or [None] * len(requests)
    states = [
        attention(q[qo_indptr[r] : qo_indptr[r + 1]], k, v, mask=masks[r], request=r, **options)
        for r, (k, v) in enumerate(requests)
    ]
    o = np.concatenate([o for o, _ in states])
    lse = np.concatenate([lse for _, lse in states])
    return o, lse


def gather_pages(cache, pages, kv_len, kv_layout="NHD"):
    """The first kv_len tokens of a request whose pages are `pages`: [kv_len, num_kv_heads, d]."""
    if kv_layout == "HND":
        cache = cache.swapaxes(1, 2)
    j = np.arange(kv_len)
    return cache[np.asarray(pages)[j // cache.shape[1]], j % cache.shape[1]]


def append_pages(cache, tokens, pages, kv_len, kv_layout="NHD", scale=1.0):
    """Writes `tokens` to the last positions of a request that is then kv_len tokens long. `scale`:
    a number, or one for each head."""
    if kv_layout == "HND":
        cache = cache.swapaxes(1, 2)
    largest = float(ml_dtypes.finfo(cache.dtype).max)
    with np.errstate(over="ignore", under="ignore"):
        values = tokens.astype(np.float32) / np.reshape(np.float32(scale), (-1, 1))
        if cache.dtype.itemsize == 1:
            values = np.clip(values, -largest, largest)
        j = np.arange(kv_len - len(tokens), kv_len)
        cache[np.asarray(pages)[j // cache.shape[1]], j % cache.shape[1]] = values.astype(
            cache.dtype
        )


def merge_states(o, lse):
    """Merges states o [n, ..., head_dim], lse [n, ...] over disjoint keys. With an lse of -inf, o
    is ignored; an lse of NaN or +inf makes the result NaN."""
    o, lse = o.astype(np.float64), lse.astype(np.float64)
    highest = lse.max(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp(lse - np.where(highest == -np.inf, 0, highest))
        total = weights.sum(axis=0)
        weighted = np.where(np.isneginf(lse)[..., None], 0, o * weights[..., None]).sum(axis=0)
        merged = weighted / np.where(total == 0, 1, total)[..., None]
        return merged, np.where(highest == -np.inf, -np.inf, highest + np.log(total))


def assert_close(actual, exact, twin, *, unit, what):
    """Error <= 2 x the twin's error + a rounding floor. Where the exact result is not finite, the
    same or NaN: float32 may turn a tiny weight times infinity into 0 times infinity.

    `unit` is the size of what was summed: float32 sums of it lose a few of its last bits, also
    where the twin had luck or the sum came out small.
    """
    eps = EPS[str(actual.dtype)]
    actual = actual.astype(np.float64)
    assert actual.shape == exact.shape
    finite = np.isfinite(exact)
    lost = ~finite & ~np.isnan(actual) & (actual != exact)
    assert not lost.any(), f"{what}: {lost.sum()} of {np.sum(~finite)} NaN or infinities are lost"
    made = finite & ~np.isfinite(actual)
    assert not made.any(), f"{what}: {made.sum()} finite values are NaN or infinite"
    actual, exact, twin = (np.where(finite, x, 0) for x in (actual, exact, twin))
    if not exact.size:
        return
    floor = eps * np.abs(exact).max() / 2 + 4 * EPS_FLOAT32 * unit
    budget = 2 * np.abs(twin - exact).max() + floor
    error = np.abs(actual - exact)
    worst = np.unravel_index(error.argmax(), error.shape)
    assert error[worst] <= budget, (
        f"{what}: error {error[worst]:.3g} over the budget {budget:.3g} at {worst}: "
        f"expected {exact[worst]:.6g}, got {actual[worst]:.6g}"
    )
