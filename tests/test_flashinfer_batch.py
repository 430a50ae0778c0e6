# SPDX-License-Identifier: Apache-2.0
"""Wrappers with FlashInfer's names, for batches, against the reference on the CPU."""

import dataclasses

import pytest

from flashinfer_cases import Batch, Case, poisoned, workspace

torch = pytest.importorskip("torch")

import flashplan as fp  # noqa: E402
from flashplan import flashinfer  # noqa: E402

QO_LENS, KV_LENS = [1, 7, 0, 3, 4, 2], [30, 7, 9, 1, 0, 64]
CASES = [
    Case(),
    Case(causal=True),
    Case(causal=True, layout="HND"),
    Case(causal=True, cache="one", page_size=8),
    Case(cache="one", layout="HND"),
    Case(causal=True, cache="tokens", page_size=1),
    Case(cache="tokens", page_size=1, layout="HND"),
    Case(causal=True, window_left=5),
    Case(window_left=0),
    Case(causal=True, logits_soft_cap=2.0, sm_scale=0.7),
    Case(heads=(6, 1), dims=(64, 32), causal=True),
    Case(pos_encoding_mode="ROPE_LLAMA", causal=True),
    Case(pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=500.0),
    Case(dtype="bfloat16", causal=True, index_dtype="int64"),
    Case(dtype="float16", kv_dtype="float8_e4m3fn", scales=(1.5, 0.5, 2.0), causal=True),
    Case(scales=(None, 0.5, 3.0)),
]
MASKED = [
    Case(mask="bool"),
    Case(mask="packed"),
    Case(mask="bool", causal=True),  # causal has no effect
    Case(mask="packed", window_left=6, causal=True),
]
every = pytest.mark.parametrize("case", CASES + MASKED, ids=str)


def planned_pages(batch, wrapper=None, **changed):
    case = batch.case
    if wrapper is None:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(torch), case.layout)
    arguments = case.options() | batch.shape_arguments() | batch.mask_arguments()
    wrapper.plan(
        batch.ends(batch.qo_lens),
        *batch.page_table(),
        *case.heads,
        case.dims[0],
        case.page_size,
        case.dims[1],
        **arguments | {"causal": case.causal} | changed,
    )
    return wrapper


def planned_ragged(batch, wrapper=None, **changed):
    case = batch.case
    if wrapper is None:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(torch))
    arguments = case.options() | batch.shape_arguments() | batch.mask_arguments()
    wrapper.plan(
        batch.ends(batch.qo_lens),
        batch.ends(batch.kv_lens),
        *case.heads,
        *case.dims,
        **arguments | {"causal": case.causal} | changed,
    )
    return wrapper


def planned_decode(batch, wrapper=None, **changed):
    case = batch.case
    if wrapper is None:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(torch), case.layout)
    wrapper.plan(
        *batch.page_table(),
        *case.heads,
        case.dims[0],
        case.page_size,
        **case.options() | batch.shape_arguments() | changed,
    )
    return wrapper


@every
def test_paged(rng, case):
    batch = Batch(torch, rng, case, QO_LENS, KV_LENS)
    wrapper = planned_pages(batch)
    q, cache = batch.joined(batch.q), batch.pages()
    batch.check(*wrapper.run(q, cache, return_lse=True, **batch.scales()))
    batch.check(wrapper.run(q, cache, **batch.scales()))


@pytest.mark.parametrize("case", [c for c in CASES + MASKED if c.layout == "NHD"], ids=str)
def test_ragged(rng, case):
    batch = Batch(torch, rng, case, QO_LENS, KV_LENS)
    wrapper = planned_ragged(batch)
    tensors = [batch.joined(x) for x in (batch.q, batch.k, batch.v)]
    batch.check(*wrapper.run(*tensors, return_lse=True, **batch.scales()))
    batch.check(wrapper.run(*tensors, **batch.scales()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode(rng, case):
    # One query sees all keys, whether causal or not.
    case = dataclasses.replace(case, dims=(64, 64))
    batch = Batch(torch, rng, case, [1] * len(KV_LENS), KV_LENS)
    wrapper = planned_decode(batch)
    q, cache = batch.joined(batch.q), batch.pages()
    batch.check(*wrapper.run(q, cache, return_lse=True, **batch.scales()))
    batch.check(wrapper.run_return_lse(q, cache, **batch.scales())[0])


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("heads", [(4, 2), (6, 3)])
def test_alibi(rng, heads, softcap):
    """The cap is applied after the bias."""
    case = Case(pos_encoding_mode="ALIBI", heads=heads, causal=True)
    batch = Batch(torch, rng, case, [3, 1], [9, 30])
    wrapper = planned_pages(batch, logits_soft_cap=softcap)
    results = wrapper.run(batch.joined(batch.q), batch.pages(), return_lse=True)
    batch.check(*results, softcap=softcap or 0.0)


@pytest.mark.parametrize("q_len", [2, 4])
def test_decode_of_several_rows(rng, q_len):
    """Rows are the last tokens of their request, so the later ones see more keys."""
    case = Case(causal=True)
    batch = Batch(torch, rng, case, [q_len] * 3, [30, 4, 17])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(torch), use_tensor_cores=True)
    planned_decode(batch, wrapper, q_len_per_req=q_len)
    q, cache = batch.joined(batch.q), batch.pages()
    batch.check(*wrapper.run(q, cache, return_lse=True, q_len_per_req=q_len))
    with pytest.raises(ValueError, match=r"q_len_per_req: expected that of plan\(\)"):
        wrapper.run(q, cache, q_len_per_req=1)
    with pytest.raises(ValueError, match=r"q: expected \d+ rows, q_len_per_req = \d+ of plan\(\)"):
        wrapper.run(torch.cat((q, q)), cache)


def test_lse_of_other_bases_and_layouts(rng):
    batch = Batch(torch, rng, Case(causal=True), QO_LENS, KV_LENS)
    wrapper, q, cache = planned_pages(batch), batch.joined(batch.q), batch.pages()
    for lse_base, base2 in (("log2", True), ("ln", False)):
        o, lse = wrapper.run(q, cache, return_lse=True, lse_base=lse_base)
        batch.check(o, lse, base2)
        o, lse = wrapper.run(q, cache, return_lse=True, lse_base=lse_base, lse_layout="HN")
        batch.check(o, lse.t().contiguous(), base2)
        assert lse.is_contiguous()
    for argument in ("lse_base", "lse_layout"):
        with pytest.raises(fp.UnsupportedError, match=f"{argument}: expected one of"):
            wrapper.run(q, cache, return_lse=True, **{argument: "log10"})


@pytest.mark.parametrize("layout", ["NH", "HN"])
def test_outputs_are_written_to_given_tensors(rng, layout):
    batch = Batch(torch, rng, Case(causal=True), QO_LENS, KV_LENS)
    wrapper, q, cache = planned_pages(batch), batch.joined(batch.q), batch.pages()
    out, lse = poisoned(torch, *q.shape), poisoned(torch, *q.shape[:2])
    if layout == "HN":
        lse = lse.t().contiguous()
    results = wrapper.run(q, cache, out=out, lse=lse, return_lse=True, lse_layout=layout)
    assert results[0] is out
    assert results[1] is lse
    batch.check(out, lse if layout == "NH" else lse.t().contiguous())
    alone = poisoned(torch, *q.shape)
    assert wrapper.run(q, cache, out=alone) is alone
    assert torch.equal(out, alone)


@pytest.mark.parametrize("layout", ["NH", "HN"])
def test_lse_is_written_without_return_lse(rng, layout):
    batch = Batch(torch, rng, Case(), QO_LENS, KV_LENS)
    wrapper, q, cache = planned_pages(batch), batch.joined(batch.q), batch.pages()
    lse = poisoned(torch, *q.shape[:2])
    if layout == "HN":
        lse = lse.t().contiguous()
    o = wrapper.run(q, cache, lse=lse, lse_layout=layout)
    batch.check(o, lse if layout == "NH" else lse.t().contiguous())


def test_rows_after_those_of_the_plan(rng):
    """As engines pad their batches: the result has as many rows as q."""
    batch = Batch(torch, rng, Case(causal=True), [1, 3], [9, 20])
    wrapper, q, cache = planned_pages(batch), batch.joined(batch.q), batch.pages()
    o, lse = wrapper.run(torch.cat((q, q)), cache, return_lse=True)
    assert o.shape == (8, 4, 64)
    assert lse.shape == (8, 4)
    batch.check(o[:4], lse[:4])


@pytest.mark.parametrize("make", [planned_pages, planned_ragged, planned_decode])
def test_forward_brings_options_of_its_own(rng, make):
    """plan() does not know them, and those of plan() do not count."""
    is_decode = make is planned_decode
    qo_lens = [1] * len(KV_LENS) if is_decode else QO_LENS
    wrapper = None
    for kv_lens in (KV_LENS, KV_LENS[::-1], [100, *KV_LENS[1:]]):
        batch = Batch(torch, rng, Case(), qo_lens, kv_lens)
        wrapper = make(batch, wrapper, window_left=2, sm_scale=9.0)
        tensors = [batch.joined(batch.q)]
        if make is planned_ragged:
            tensors += [batch.joined(batch.k), batch.joined(batch.v)]
        else:
            tensors.append(batch.pages())
        for window, cap in ((4, None), (-1, 1.5)):  # layers of two kinds
            options = {"window_left": window, "logits_soft_cap": cap, "sm_scale": 0.4}
            batch.case = Case(causal=True, **options)
            if not is_decode:
                options["causal"] = True
            batch.check(*wrapper.forward_return_lse(*tensors, **options))
            batch.check(wrapper.forward(*tensors, **options))
        wrapper.end_forward()


def test_what_is_planned_for_forward(rng, monkeypatch):
    """One plan for each set of options that forward() brings, none for those of plan()."""
    plans = []
    real_plan = fp.Attention.plan

    def plan(attn, *args, **kwargs):
        plans.append(attn.options["window_left"])
        return real_plan(attn, *args, **kwargs)

    monkeypatch.setattr(fp.Attention, "plan", plan)
    wrapper = None
    for step in range(3):
        batch = Batch(torch, rng, Case(causal=True), QO_LENS, KV_LENS)
        wrapper = planned_pages(batch, wrapper)
        for window in (4, 6):
            wrapper.forward(batch.joined(batch.q), batch.pages(), causal=True, window_left=window)
        assert sorted(plans) == ([-1, 4, 6] if step == 0 else [4, 6])
        plans.clear()


def test_lengths_that_change_after_the_plan(rng):
    """A batch that is planned for more options later is that of plan()."""
    for make in (planned_pages, planned_ragged):
        batch = Batch(torch, rng, Case(causal=True), QO_LENS, KV_LENS)
        made = []
        ends = batch.ends
        batch.ends = lambda lens, ends=ends, made=made: made.append(ends(lens)) or made[-1]
        wrapper = make(batch)
        if make is planned_pages:
            rest, kept = [batch.pages()], made[1].clone()
        else:
            rest = [batch.joined(batch.k), batch.joined(batch.v)]
        for tensor in made:
            tensor.zero_()
        if make is planned_pages:
            wrapper._paged_kv_indptr_buf = kept
        batch.case = Case(causal=True, window_left=3)
        batch.check(wrapper.forward(batch.joined(batch.q), *rest, causal=True, window_left=3))


def test_window_of_a_run_is_of_that_run(rng):
    batch = Batch(torch, rng, Case(causal=True), QO_LENS, KV_LENS)
    wrapper, q, cache = planned_pages(batch), batch.joined(batch.q), batch.pages()
    batch.check(wrapper.run(q, cache, window_left=3), window_left=3)
    batch.check(wrapper.run(q, cache))


def test_steps_of_any_size(rng):
    """Batches grow over the bounds of the first one, and shrink again."""
    wrapper = None
    for qo_lens, kv_lens in (
        ([1], [9]),
        ([1] * 9, [3] * 9),
        ([40, 2], [40, 70]),
        ([1], [9]),
        ([], []),
    ):
        batch = Batch(torch, rng, Case(causal=True), qo_lens or [0], kv_lens or [0])
        wrapper = planned_pages(batch, wrapper)
        batch.check(*wrapper.run(batch.joined(batch.q), batch.pages(), return_lse=True))


def test_attributes_that_engines_set(rng):
    """SGLang plans by itself: it sets attributes, and calls the compiled module."""
    case = Case(causal=True, window_left=6, page_size=1)
    wrapper = planned_pages(Batch(torch, rng, Case(page_size=1), [1], [5]))
    batch = Batch(torch, rng, case, QO_LENS, KV_LENS)
    indptr, indices, _ = batch.page_table()
    wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf = indptr, indices
    wrapper._causal, wrapper._window_left = True, 6
    lens = torch.tensor(KV_LENS, dtype=torch.int32)
    before = wrapper._plan_info
    rest = [None] * 13
    wrapper._plan_info = wrapper._cached_module.plan(
        wrapper._float_workspace_buffer,
        wrapper._int_workspace_buffer,
        wrapper._pin_memory_int_workspace_buffer,
        batch.ends(QO_LENS),
        indptr,
        lens,
        *rest,
    )
    assert wrapper._plan_info != before
    batch.check(*wrapper.run(batch.joined(batch.q), batch.pages(), return_lse=True))


@pytest.mark.parametrize("option", [{"fixed_split_size": 4}, {"disable_split_kv": True}])
def test_bits_do_not_depend_on_the_batch(rng, option):
    batch = Batch(torch, rng, Case(), [1], [3000])
    alone = planned_decode(batch, **option).run(batch.joined(batch.q), batch.pages())
    many = Batch(torch, rng, Case(), [1] * 4, [3000, 5, 70, 2000])
    many.q[0], many.k[0], many.v[0] = batch.q[0], batch.k[0], batch.v[0]
    wrapper = planned_decode(many, **option)
    together = wrapper.run(many.joined(many.q), many.pages())
    assert torch.equal(together[:1], alone)
    many.check(together)


@pytest.mark.parametrize("by_variant", [False, True])
def test_sinks(rng, by_variant):
    """As an argument by name, or after the tensors, followed by sm_scale, as the variant has it."""
    batch = Batch(torch, rng, Case(causal=True, sm_scale=0.3), QO_LENS, KV_LENS)
    sinks = torch.randn(4)
    jit_args = [None] * 11 + ["AttentionSink", ""] if by_variant else None
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(torch), jit_args=jit_args)
    planned_pages(batch, wrapper, sm_scale=None if by_variant else 0.3)
    args = (sinks, 0.3) if by_variant else ()
    named = {} if by_variant else {"sinks": sinks}
    results = wrapper.run(batch.joined(batch.q), batch.pages(), *args, return_lse=True, **named)
    batch.check(*results, sinks=sinks.numpy())


def test_workspaces(rng):
    """Too small ones are not used; others can take their place."""
    batch = Batch(torch, rng, Case(causal=True), QO_LENS, KV_LENS)
    for num_bytes in (16, 4 << 20):
        small = torch.zeros(num_bytes, dtype=torch.uint8)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(small)
        planned_pages(batch, wrapper)
        batch.check(wrapper.run(batch.joined(batch.q), batch.pages()))
        ints = torch.zeros(64, dtype=torch.uint8)
        wrapper.reset_workspace_buffer(workspace(torch)[16:], ints)
        batch.check(wrapper.run(batch.joined(batch.q), batch.pages()))
    shape = (*batch.case.heads, 64, batch.case.page_size)
    sizes = wrapper.workspace_size(batch.ends(QO_LENS), *batch.page_table(), *shape)
    assert sizes[0] > 1000
    assert sizes[1] == 16
    with pytest.raises(ValueError, match="float_workspace_buffer must be 16-byte aligned"):
        wrapper.reset_workspace_buffer(workspace(torch)[1:], ints)
    with pytest.raises(ValueError, match="float_workspace_buffer must be 16-byte aligned"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(torch)[8:])


def test_queries_of_8_bits(rng):
    """Their scale multiplies the logits; outputs are of o_data_type."""
    options = {"dtype": "float8_e4m3fn", "scales": (0.5, 2.0, 3.0), "causal": True}
    batch = Batch(torch, rng, Case(**options), QO_LENS, KV_LENS)
    wrapper = planned_pages(batch, o_data_type=torch.float32)
    q, cache = batch.joined(batch.q), batch.pages()
    o, lse = wrapper.run(q, cache, return_lse=True, **batch.scales())
    assert o.dtype == torch.float32
    o64, lse64 = batch.expected()
    torch.testing.assert_close(o.double(), torch.from_numpy(o64), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), torch.from_numpy(lse64), rtol=1e-5, atol=1e-5)
