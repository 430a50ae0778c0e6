# SPDX-License-Identifier: Apache-2.0
"""What must hold for any batch, whatever the numbers: found by Hypothesis."""

import dataclasses

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashplan as fp
import reference
from case import Case
from frameworks import NumPy, bits
from inputs import make_inputs, rearranged
from solve import Runner, assert_correct, problem, run_arguments

FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

requests = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 200)) | st.tuples(st.just(1), st.integers(0, 900)),
    min_size=1,
    max_size=6,
)


@st.composite
def cases(draw, **fixed):
    lens = draw(requests)
    page_size = draw(st.sampled_from((None, 1, 2, 7, 16)))
    return Case(
        qo_lens=tuple(qo for qo, _ in lens),
        kv_lens=tuple(kv for _, kv in lens),
        **{
            "num_qo_heads": draw(st.integers(1, 5)) * 2,
            "num_kv_heads": 2,
            "head_dim": draw(st.sampled_from((8, 16, 33))),
            "page_size": page_size,
            "q_dtype": draw(st.sampled_from(("float32", "float16", "bfloat16"))),
            "causal": draw(st.booleans()),
            "window_left": draw(st.sampled_from((-1, -1, 0, 5, 100))),
            "num_ctas": draw(st.sampled_from((1, 2, 5, 17))),
            "csr": page_size is not None and draw(st.booleans()),
        }
        | fixed,
    )


def run(case, inputs):
    return Runner(case).run(inputs, NumPy())


@given(cases(), st.integers(0, 2**31))
@FEW
def test_matches_reference(case, seed):
    inputs, exact, twin = problem(case, seed)
    assert_correct(case, inputs, exact, twin, *run(case, inputs))


def assert_same_in_company(case, inputs, lens, places, seed):
    """Request r of `case`, at places[r] of a batch of `lens`, gives the bits it gave before."""
    expected = run(case, inputs)
    batch, crowd = rearranged(case, inputs, lens, places, seed)
    results = run(batch, crowd)
    for r, place in enumerate(places):
        before = slice(*inputs.qo_indptr[r : r + 2])
        after = slice(*crowd.qo_indptr[place : place + 2])
        for actual, wanted in zip(results, expected, strict=True):
            assert np.array_equal(bits(actual[after]), bits(wanted[before]))


def mix(case, others, random):
    """(lens, places): the requests of the case, in their order, with others in between."""
    lens = list(zip(case.qo_lens, case.kv_lens, strict=True))
    own = sorted(random.sample(range(len(lens) + len(others)), len(lens)))
    mixed, remaining = [], iter(others)
    for place in range(len(lens) + len(others)):
        mixed.append(lens[own.index(place)] if place in own else next(remaining))
    return mixed, own


@given(cases(batch_invariant=True), st.integers(0, 2**31), st.randoms())
@FEW
def test_permuting_requests_permutes_outputs(case, seed, random):
    inputs = make_inputs(case, seed)
    places = random.sample(range(len(case.qo_lens)), len(case.qo_lens))
    lens = [None] * len(places)
    for r, place in enumerate(places):
        lens[place] = (case.qo_lens[r], case.kv_lens[r])
    assert_same_in_company(case, inputs, lens, places, seed)


@given(cases(batch_invariant=True), requests, st.integers(0, 2**31), st.randoms())
@FEW
def test_neighbours_change_nothing(case, neighbours, seed, random):
    inputs = make_inputs(case, seed)
    assert_same_in_company(case, inputs, *mix(case, neighbours, random), seed + 1)


@given(
    cases(batch_invariant=True),
    st.lists(st.tuples(st.just(0), st.integers(0, 50)), min_size=1, max_size=4),
    st.integers(0, 2**31),
    st.randoms(),
)
@FEW
def test_requests_without_queries_change_nothing(case, empty, seed, random):
    inputs = make_inputs(case, seed)
    assert_same_in_company(case, inputs, *mix(case, empty, random), seed + 1)


@given(cases(page_size=4, csr=False), st.integers(0, 2**31), st.randoms())
@FEW
def test_moving_pages_changes_nothing(case, seed, random):
    inputs = make_inputs(case, seed)
    expected = run(case, inputs)
    num_pages = len(inputs.k)
    new_place = np.array(random.sample(range(num_pages + 3), num_pages), np.int32)
    used = inputs.block_table < num_pages
    table = inputs.block_table.copy()
    table[used] = new_place[table[used]]
    caches = []
    for cache in (inputs.k, inputs.v):
        moved = np.full((num_pages + 3, *cache.shape[1:]), np.nan, cache.dtype)
        moved[new_place] = cache
        caches.append(moved)
    moved = dataclasses.replace(inputs, k=caches[0], v=caches[1], block_table=table)
    for actual, wanted in zip(run(case, moved), expected, strict=True):
        assert np.array_equal(bits(actual), bits(wanted))


@given(st.integers(0, 30), st.integers(1, 20), st.integers(0, 2**31))
@FEW
def test_requests_may_share_pages(shared_pages, own_tokens, seed):
    """The same prefix twice in memory or once: the same bits."""
    kv_len = 4 * shared_pages + own_tokens
    case = Case((2, 1), (kv_len, kv_len), page_size=4, head_dim=8)
    inputs = make_inputs(case, seed)
    for cache in (inputs.k, inputs.v):
        prefix = reference.gather_pages(cache, inputs.pages(0), 4 * shared_pages)
        reference.append_pages(cache, prefix, inputs.pages(1), 4 * shared_pages)
    expected = run(case, inputs)
    inputs.block_table[1, :shared_pages] = inputs.block_table[0, :shared_pages]
    for actual, wanted in zip(run(case, inputs), expected, strict=True):
        assert np.array_equal(bits(actual), bits(wanted))


@given(cases(causal=False, window_left=-1, page_size=None), st.integers(0, 2**31), st.data())
@FEW
def test_parts_of_the_keys_merge_to_the_whole(case, seed, data):
    inputs, exact, twin = problem(case, seed)
    cuts = [data.draw(st.integers(0, n)) for n in case.kv_lens]
    attn = fp.Attention(**case.options() | {"o_dtype": "float32"})
    args, kwargs = run_arguments(case, inputs, NumPy())

    def part(begins, ends):
        # kv_indptr places each part; the rows between parts belong to nobody.
        kv_indptr = [b + i for b, i in zip(begins, inputs.kv_indptr, strict=False)]
        kv_lens = [end - begin for begin, end in zip(begins, ends, strict=True)]
        attn.plan(inputs.qo_indptr, kv_lens, [*kv_indptr, int(inputs.kv_indptr[-1])])
        return attn.run(*args, **kwargs, return_lse=True)

    left = part([0] * len(cuts), cuts)
    right = part(cuts, case.kv_lens)
    o, lse = fp.merge_states(*left, *right)
    rows = inputs.qo_indptr[-1]
    assert_correct(case, inputs, exact, twin, o[:rows].astype(case.q_dtype), lse[:rows])
