# SPDX-License-Identifier: Apache-2.0
"""A call of each function of flashplan.torch other than run(), and of its forms."""

import flashplan as fp

TOKENS, HEADS, KV_HEADS, DIM, VOCAB = 5, 4, 2, 16, 33
ROPE = fp.Rope(theta=500.0)


class Call:
    """A call of a function: its tensors, and what it gets from them.

    Args:
        function: of the name in a module, and tensors to what the module's function returns.
        written: names of tensors that it changes.
    """

    def __init__(self, function, tensors, written=()):
        self.function, self.tensors, self.written = function, tensors, written

    def results(self, module, compile=lambda function: function):
        """What the function returns, and the tensors that it may have changed."""
        given = {name: tensor.clone() for name, tensor in self.tensors.items()}
        returned = compile(lambda tensors: self.function(module, **tensors))(given)
        for name, tensor in given.items():
            if name not in self.written:
                assert tensor.equal(self.tensors[name]), f"{name} was changed"
        returned = returned if isinstance(returned, tuple) else (returned,)
        return [x for x in returned if x is not None] + [given[name] for name in self.written]


def calls(torch, random):
    def draw(*shape):
        return torch.randn(*shape, generator=random)

    def ints(high, *shape, dtype=torch.int32):
        return torch.randint(high, shape, generator=random, dtype=dtype)

    x, weight = draw(TOKENS, DIM), draw(DIM)
    q, k, v = draw(TOKENS, HEADS, DIM), draw(TOKENS, KV_HEADS, DIM), draw(TOKENS, KV_HEADS, DIM)
    positions = ints(90, TOKENS)
    cache = {name: draw(4, 4, KV_HEADS, DIM) for name in ("k_cache", "v_cache")}
    lengths = {
        "indptr": torch.tensor([0, 1, 5], dtype=torch.int32),
        "kv_lens": torch.tensor([7, 4], dtype=torch.int32),
        "block_table": torch.tensor([[3, 1], [0, -1]], dtype=torch.int32),
    }
    new = {"k": k, "v": v}
    logits = draw(TOKENS, VOCAB)
    of_rows = {
        "temperature": 0.5 + torch.rand(TOKENS, generator=random),
        "top_k": 1 + ints(9, TOKENS),
        "top_p": 0.5 + 0.5 * torch.rand(TOKENS, generator=random),
        "min_p": 0.1 * torch.rand(TOKENS, generator=random),
        "seed": ints(10**9, TOKENS, dtype=torch.int64),
        "offset": ints(10**9, TOKENS, dtype=torch.int64),
    }
    history = {
        "history": ints(VOCAB, TOKENS, 6),
        "history_lens": ints(7, TOKENS),
        "repetition": 1 + torch.rand(TOKENS, generator=random),
    }
    states = {"o": draw(3, TOKENS, HEADS, DIM), "lse": draw(3, TOKENS, HEADS)}
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0, 0.25])}
    made = {
        "rmsnorm": Call(
            lambda m, **t: m.rmsnorm(**t, eps=0.1, gemma=True), {"x": x, "weight": weight}
        ),
        "rmsnorm in place": Call(lambda m, x: m.rmsnorm(x, out=x), {"x": x}, ["x"]),
        "add_rmsnorm": Call(
            lambda m, **t: m.add_rmsnorm(**t),
            {"x": x, "residual": draw(TOKENS, DIM), "weight": weight},
            ["x", "residual"],
        ),
        "add_rmsnorm to a tensor": Call(
            lambda m, **t: m.add_rmsnorm(**t),
            {
                "x": x,
                "residual": draw(TOKENS, DIM),
                "out": torch.zeros(TOKENS, DIM),
                "scale": torch.tensor([0.5]),
            },
            ["residual", "out"],
        ),
        "rmsnorm to 8 bits": Call(
            lambda m, **t: m.rmsnorm(**t, out_dtype="float8_e4m3fn", scale=0.5),
            {"x": x, "weight": weight},
        ),
        "layernorm": Call(
            lambda m, **t: m.layernorm(**t), {"x": x, "weight": weight, "bias": draw(DIM)}
        ),
        "rope": Call(
            lambda m, **t: m.apply_rope(**t, rope=ROPE), {"q": q, "k": k, "positions": positions}
        ),
        "rope in place": Call(
            lambda m, q, k, positions: m.apply_rope(q, k, positions, ROPE, out_q=q, out_k=k),
            {"q": q, "k": k, "positions": positions},
            ["q", "k"],
        ),
        "rope of a table": Call(
            lambda m, **t: m.apply_rope(**t, interleaved=True),
            {"q": q, "k": k, "positions": positions, "cos_sin_cache": draw(90, 8)},
        ),
        "append_paged_kv": Call(
            lambda m, **t: m.append_paged_kv(**t),
            {**new, **cache, **lengths, **scales},
            list(cache),
        ),
        "append_paged_kv to slots": Call(
            lambda m, **t: m.append_paged_kv(**t, k_scale=0.5),
            {**new, **cache, "slot_mapping": torch.tensor([7, -1, 2, 9, 15])},
            list(cache),
        ),
        "rope_append_paged_kv": Call(
            lambda m, **t: m.rope_append_paged_kv(**t, rope=ROPE),
            {"q": q, **new, **cache, **lengths, **scales},
            list(cache),
        ),
        "merge_states of a stack": Call(
            lambda m, o, lse: m.merge_states(o, lse, base2=True), states
        ),
        "merge_states": Call(lambda m, o, lse: m.merge_states(o[0], lse[0], o[1], lse[1]), states),
        "softmax": Call(lambda m, logits: m.softmax(logits, 0.5), {"logits": logits}),
        "softmax of rows": Call(
            lambda m, **t: m.softmax(**t),
            {"logits": logits, "temperature": of_rows["temperature"]},
        ),
        "sample": Call(
            lambda m, logits: m.sample(logits, temperature=0.7, top_k=9, top_p=0.9, seed=5),
            {"logits": logits},
        ),
        "sample with parameters of rows": Call(
            lambda m, **t: m.sample(**t, return_logprobs=True), {"logits": logits, **of_rows}
        ),
        "sample into tensors": Call(
            lambda m, **t: m.sample(**t, from_probs=True, seed=3) and None,
            {
                "logits": logits.softmax(-1),
                "out": ints(9, TOKENS),
                "logprobs": draw(TOKENS),
                "status": ints(9, TOKENS),
            },
            ["out", "logprobs", "status"],
        ),
        "sample with the likeliest tokens": Call(
            lambda m, **t: m.sample(**t, top_k=9, top_logprobs=3, logprobs_of="raw"),
            {"logits": logits, "rows": ints(TOKENS, 7)},
        ),
        "sample with joint filters": Call(
            lambda m, logits: m.sample(logits, top_k=9, top_p=0.5, joint=True, seed=2),
            {"logits": logits},
        ),
        "filtered_probs": Call(
            lambda m, logits: m.filtered_probs(logits, top_p=0.8, min_p=0.1), {"logits": logits}
        ),
        "filtered_probs of rows": Call(
            lambda m, **t: m.filtered_probs(**t),
            {
                "logits": logits,
                **{n: t for n, t in of_rows.items() if n not in ("seed", "offset")},
            },
        ),
        "top_k_renorm": Call(
            lambda m, probs: m.top_k_renorm(probs, 5), {"probs": logits.softmax(-1)}
        ),
        "top_p_renorm": Call(
            lambda m, probs: m.top_p_renorm(probs, 0.5), {"probs": logits.softmax(-1)}
        ),
        "top_k_mask": Call(lambda m, logits: m.top_k_mask(logits, 5), {"logits": logits}),
        "apply_penalties": Call(
            lambda m, **t: m.apply_penalties(**t, presence=0.5),
            {"logits": logits, **history},
            ["logits"],
        ),
    }
    for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"):
        made[name] = Call(lambda m, x, name=name: getattr(m, name)(x), {"x": x})
    made["silu_and_mul to 8 bits"] = Call(
        lambda m, x: m.silu_and_mul(x, out_dtype="float8_e4m3fn", scale=0.5), {"x": x}
    )
    made["quantize_fp8"] = Call(lambda m, x: m.quantize_fp8(x, per_head=True), {"x": k})
    made["rope to 8 bits"] = Call(
        lambda m, q_scale, **t: m.apply_rope(
            **t, rope=ROPE, out_dtype="float8_e4m3fn", q_scale=q_scale, k_scale=0.5
        ),
        {"q": q, "k": k, "positions": positions, "q_scale": draw(KV_HEADS).abs() + 1},
    )
    made["quantize_fp8 by a scale"] = Call(
        lambda m, **t: m.quantize_fp8(**t)[0], {"x": k, "scale": draw(1).abs() + 1}
    )
    return made


CALLS = (
    "rmsnorm",
    "rmsnorm in place",
    "add_rmsnorm",
    "add_rmsnorm to a tensor",
    "rmsnorm to 8 bits",
    "layernorm",
    "rope",
    "rope in place",
    "rope of a table",
    "append_paged_kv",
    "append_paged_kv to slots",
    "rope_append_paged_kv",
    "merge_states of a stack",
    "merge_states",
    "softmax",
    "softmax of rows",
    "sample",
    "sample with parameters of rows",
    "sample into tensors",
    "sample with the likeliest tokens",
    "sample with joint filters",
    "filtered_probs",
    "filtered_probs of rows",
    "top_k_renorm",
    "top_p_renorm",
    "top_k_mask",
    "apply_penalties",
    "silu_and_mul",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "silu_and_mul to 8 bits",
    "quantize_fp8",
    "rope to 8 bits",
    "quantize_fp8 by a scale",
)
