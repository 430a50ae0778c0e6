# SPDX-License-Identifier: Apache-2.0
"""check_device_data() raises what run() and append_paged_kv() raise on the CPU for such data."""

import numpy as np
import pytest

import flashplan as fp
from frameworks import NumPy

NUM_PAGES = 23
WRONG_IDS = (-1, 2**31 - 1, -(2**31), NUM_PAGES)
WRONG_SLOTS = (-2, 2**40, -(2**63))
QO_LENS, KV_LENS = np.array([1, 7, 0, 3]), np.array([90, 33, 20, 12])


def outcome(call):
    """The type and text of the error that a call raises; "" if it raises none."""
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Problem:
    """A planned batch on the CPU, and page tables that are right."""

    def __init__(self, rng, page_size, window_left=-1, csr=False):
        self.rng = rng
        self.options = {
            "num_qo_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "page_size": page_size,
            "window_left": window_left,
        }
        self.plan_args = np.concatenate([[0], np.cumsum(QO_LENS)]), KV_LENS + 10
        self.attn = fp.Attention(**self.options, q_dtype="float32", device="cpu")
        self.attn.plan(*self.plan_args)
        self.q = rng.standard_normal((QO_LENS.sum(), 4, 8), np.float32)
        self.caches = rng.standard_normal((2, NUM_PAGES, page_size, 2, 8), np.float32)
        counts = -(-(KV_LENS + 10) // page_size)
        table = rng.integers(0, NUM_PAGES, (4, counts.max() + 1)).astype(np.int32)
        self.tables = {"block_table": table}
        if csr:
            ids = np.concatenate([row[:n] for row, n in zip(table, counts)])
            begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
            self.tables = {"page_indptr": begins, "page_indices": ids}

    def spoiled_tables(self):
        """Tables with wrong ids in places that queries see, or not; sometimes a wrong indptr."""
        tables = {name: table.copy() for name, table in self.tables.items()}
        ids = tables.get("block_table", tables.get("page_indices")).reshape(-1)
        places = self.rng.integers(0, len(ids), self.rng.integers(1, 4))
        ids[places] = self.rng.choice(WRONG_IDS, len(places))
        if "page_indptr" in tables and self.rng.integers(4) == 0:
            tables["page_indptr"][self.rng.integers(0, 5)] = self.rng.choice([-1, 0, 7, 10**6])
        return tables

    def outcome_of_run(self, **data):
        return outcome(lambda: self.attn.run(self.q, *self.caches, **data))

    def outcome_of_append(self, slots):
        rows = np.ones((len(slots), 2, 8), np.float32)
        caches = self.caches.copy()
        return outcome(lambda: fp.append_paged_kv(rows, rows, *caches, slot_mapping=slots))


def outcome_of_check(attn, framework, **data):
    """That of check_device_data() with tensors of a framework."""
    tensors = {name: framework.tensor(array) for name, array in data.items()}
    return outcome(lambda: fp.check_device_data(attn, num_pages=NUM_PAGES, **tensors))


def assert_tables_are_judged_alike(problem, attn, framework):
    """Many tables, right ones and wrong ones, with and without real lengths."""
    assert outcome_of_check(attn, framework, **problem.tables) == ""
    found = set()
    for _ in range(60):
        data = problem.spoiled_tables()
        if problem.rng.integers(2):
            data["kv_lens"] = problem.rng.integers(0, KV_LENS + 11).astype(np.int32)
        expected = problem.outcome_of_run(**data)
        assert outcome_of_check(attn, framework, **data) == expected
        found.add(expected.partition(":")[0])
    assert found == {"", "ValueError"}


def assert_slots_are_judged_alike(problem, attn, framework):
    num_slots = NUM_PAGES * problem.options["page_size"]
    for wrong in (None, num_slots, *WRONG_SLOTS):
        slots = problem.rng.integers(-1, num_slots, 50)
        if wrong is not None:
            slots[problem.rng.integers(0, 50)] = wrong
        expected = problem.outcome_of_append(slots)
        assert bool(expected) == (wrong is not None)
        assert outcome_of_check(attn, framework, slot_mapping=slots) == expected


@pytest.mark.parametrize("csr", [False, True])
@pytest.mark.parametrize(("page_size", "window_left"), [(1, 3), (5, -1), (16, 40), (64, 0)])
def test_tables_are_judged_as_by_run(rng, page_size, window_left, csr, framework):
    problem = Problem(rng, page_size, window_left, csr)
    assert_tables_are_judged_alike(problem, problem.attn, framework)


@pytest.mark.parametrize("page_size", [1, 16])
def test_slots_are_judged_as_by_append(rng, page_size, framework):
    problem = Problem(rng, page_size)
    if framework.name == "jax":
        pytest.skip("JAX has no int64 by default")
    assert_slots_are_judged_alike(problem, problem.attn, framework)


@pytest.mark.parametrize("paged", [False, True])
def test_lengths_that_run_would_replace(rng, paged):
    """Those outside of the plan; the limits themselves are right."""
    problem = Problem(rng, 16)
    attn, data = problem.attn, dict(problem.tables)
    if not paged:
        attn = fp.Attention(**problem.options | {"page_size": None}, device="cpu")
        attn.plan(*problem.plan_args)
        data = {}
    for request, planned in enumerate(KV_LENS + 10):
        for length in (0, planned):
            lengths = KV_LENS.astype(np.int32)
            lengths[request] = length
            assert outcome_of_check(attn, NumPy(), kv_lens=lengths, **data) == ""
        for length in (-1, planned + 1):
            lengths[request] = length
            assert outcome_of_check(attn, NumPy(), kv_lens=lengths, **data) == (
                f"ValueError: kv_lens[{request}]: expected a length in [0, {planned}], the planned "
                f"one, got {length}"
            )


def test_lengths_below_a_shared_prefix():
    attn = fp.Attention(4, 2, 8, q_dtype="float32", device="cpu")
    attn.plan([0, 1, 2], [40, 50], shared_prefixes=[(0, 2, 32)])
    q, cache = np.zeros((2, 4, 8), np.float32), np.zeros((NUM_PAGES, 16, 2, 8), np.float32)
    for lengths in ([33, 50], [32, 50], [40, 20]):
        data = {"kv_lens": np.array(lengths, np.int32), "block_table": np.zeros((2, 4), np.int32)}
        expected = outcome(lambda data=data: attn.run(q, cache, cache, **data))
        assert bool(expected) == (lengths != [33, 50])
        assert outcome_of_check(attn, NumPy(), **data) == expected


def test_the_current_plan_counts(rng):
    """A wrong id that the queries of one batch see, and those of the next one do not."""
    problem = Problem(rng, 16)
    table = problem.tables["block_table"].copy()
    table[3, 1] = NUM_PAGES
    problem.attn.plan([0, 1, 2, 3, 4], [1, 1, 1, 17])
    assert "block_table[3, 1]" in outcome_of_check(problem.attn, NumPy(), block_table=table)
    problem.attn.plan([0, 1, 2, 3, 4], [1, 1, 1, 16])
    assert outcome_of_check(problem.attn, NumPy(), block_table=table) == ""


def test_strided_tables(rng):
    """Rows of a wider table, of which every second one is given."""
    problem = Problem(rng, 16)
    table = problem.tables["block_table"]
    wide = np.full((8, table.shape[1] + 5), -1, np.int32)
    wide[::2, 2 : 2 + table.shape[1]] = table
    view = wide[::2, 2 : 2 + table.shape[1]]
    assert outcome_of_check(problem.attn, NumPy(), block_table=view) == ""
    wide[2, 3] = NUM_PAGES
    assert "block_table[1, 1]" in outcome_of_check(problem.attn, NumPy(), block_table=view)
