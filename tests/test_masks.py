# SPDX-License-Identifier: Apache-2.0
"""Masks of bits: what pack_mask() writes, and what a tree of draft tokens must give."""

import numpy as np
import pytest

import flashplan as fp
import reference
from case import Case
from frameworks import NumPy, bits
from inputs import make_inputs, random_tree
from solve import run_arguments


@pytest.mark.parametrize(
    "shape", [(0, 0), (3, 0), (0, 5), (1, 1), (4, 31), (4, 32), (5, 33), (2, 200)]
)
def test_pack_mask(shape, seed):
    bools = np.random.default_rng(seed).integers(2, size=shape).astype(bool)
    words = fp.pack_mask(bools)
    assert words.shape == (shape[0], -(-shape[1] // 32))
    assert words.dtype == np.uint32
    assert np.array_equal(reference.unpacked_mask(words, 0, shape[1]), bools)
    assert not reference.unpacked_mask(words, 0, 32 * words.shape[1])[:, shape[1] :].any()


def test_pack_mask_takes_any_bools(torch):
    bools = [[True, False, True], [False, False, True]]
    for same in (bools, np.array(bools).T.copy().T, torch.tensor(bools)):
        assert fp.pack_mask(same).tolist() == [[5], [4]]


def test_a_full_mask_changes_no_bit(seed):
    case = Case((40, 3, 1), (40, 700, 80), window_left=90, num_ctas=5)
    inputs = make_inputs(case, seed)
    args, kwargs = run_arguments(case, inputs, NumPy())
    results = []
    for custom_mask in (False, True):
        attn = fp.Attention(**case.options() | {"custom_mask": custom_mask})
        attn.plan(*inputs.plan_args())
        mask = {"mask": fp.pack_mask(np.ones((44, 40), bool))} if custom_mask else {}
        results.append(attn.run(*args, **kwargs, **mask, return_lse=True))
    for actual, wanted in zip(*results, strict=True):
        assert np.array_equal(bits(actual), bits(wanted))


def test_a_tree_gives_each_path_what_it_gets_alone(seed):
    """The last node of a path sees what it would see at the end of a request of this path."""
    rng = np.random.default_rng(seed)
    case = Case((12,), (50,), page_size=None, q_dtype="float32")
    inputs = make_inputs(case, seed)
    tree = random_tree(rng, 12)
    attn = fp.Attention(**case.options() | {"custom_mask": True})
    attn.plan(*inputs.plan_args())
    o, lse = attn.run(inputs.q, inputs.k, inputs.v, mask=fp.pack_mask(tree), return_lse=True)
    alone = fp.Attention(**case.options())
    for node in range(12):
        path = np.flatnonzero(tree[node])
        keys = [*range(38), *(38 + path)]
        alone.plan([0, len(path)], [len(keys)])
        o_path, lse_path = alone.run(
            inputs.q[path], inputs.k[keys], inputs.v[keys], return_lse=True
        )
        np.testing.assert_allclose(o[node], o_path[-1], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lse[node], lse_path[-1], rtol=1e-5)


def test_values_of_keys_that_bits_hide_do_not_matter(seed):
    """Not even NaN, for a row that sees no key of a tile."""
    case = Case((2,), (100,), page_size=None, q_dtype="float32")
    inputs = make_inputs(case, seed)
    inputs.v[40:] = np.nan
    seen = np.zeros((2, 100), bool)
    seen[:, :40] = True
    attn = fp.Attention(**case.options() | {"custom_mask": True})
    attn.plan(*inputs.plan_args(), mask_begin=[0])
    o = attn.run(inputs.q, inputs.k, inputs.v, mask=fp.pack_mask(seen))
    alone = fp.Attention(**case.options() | {"causal": False})
    alone.plan([0, 2], [40])
    wanted = alone.run(inputs.q, inputs.k[:40], inputs.v[:40])
    np.testing.assert_allclose(o, wanted, rtol=1e-5, atol=1e-6)
