# SPDX-License-Identifier: Apache-2.0
"""Arrays of lengths and page ids that change while a run on the CPU reads them, as those of an
engine do that prepares its next step too early. A variant's body stands in for the other thread, so
that the change always comes between the first tile of keys and the second one."""

import numpy as np
import pytest

import flashplan as fp

QO_LENS = [1, 3, 1]
KV_LENS = np.int32([9, 20, 33])
PAGE_SIZE = 4
NUM_PAGES = 20


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch):
    monkeypatch.setenv("FLASHPLAN_CXXFLAGS", "-O1")


@pytest.fixture(autouse=True)
def one_thread():
    before = fp.get_num_threads()
    fp.set_num_threads(1)
    yield
    fp.set_num_threads(before)


# Writes over `target`, of which it gets a pointer to const.
MEDDLER = fp.Variant(
    "meddler",
    mask="for (int i = 0; i < count; ++i) const_cast<int*>(target)[i] = value;\nreturn true;",
    tensors={"target": "int32"},
    scalars={"count": 0, "value": 0},
)


def run_changing(name, value, csr, rng):
    """The result of a run in which all of `name` becomes `value`, and that of an equal run in which
    nothing changes."""
    attn = fp.Attention(
        4,
        2,
        8,
        page_size=PAGE_SIZE,
        q_dtype="float32",
        device="cpu",
        max_batch_size=4,
        variant=MEDDLER,
    )
    attn.plan(np.cumsum([0, *QO_LENS]), KV_LENS + 5)
    q = rng.standard_normal((sum(QO_LENS), 4, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, NUM_PAGES, PAGE_SIZE, 2, 8)).astype(np.float32)
    arrays = {"kv_lens": KV_LENS.copy()}
    if csr:
        counts = -(-KV_LENS // PAGE_SIZE)
        arrays["page_indptr"] = np.cumsum([0, *counts]).astype(np.int32)
        arrays["page_indices"] = rng.integers(0, NUM_PAGES, counts.sum(), np.int32)
    else:
        arrays["block_table"] = rng.integers(0, NUM_PAGES, (3, 10), np.int32)
    expected = attn.run(q, k, v, **arrays, target=np.zeros(1, np.int32))
    target = arrays[name]
    actual = attn.run(q, k, v, **arrays, target=target.reshape(-1), count=target.size, value=value)
    assert np.all(target == value)
    return actual, expected


@pytest.mark.parametrize("csr", [False, True])
@pytest.mark.parametrize("value", [-1, 2, 2**30])
def test_lengths_are_those_that_were_checked(rng, csr, value):
    actual, expected = run_changing("kv_lens", value, csr, rng)
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("value", [-(2**30), 2**30])
def test_rows_of_a_table_are_those_that_were_checked(rng, value):
    actual, expected = run_changing("page_indptr", value, True, rng)
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("name", ["block_table", "page_indices"])
@pytest.mark.parametrize("value", [-(2**30), 2**30])
def test_page_ids_lead_nowhere_out_of_the_cache(rng, name, value):
    actual, _ = run_changing(name, value, name == "page_indices", rng)
    assert np.isfinite(actual).all()
