# SPDX-License-Identifier: Apache-2.0
"""One valid call of every function, to be made wrong one argument at a time."""

import dataclasses

import numpy as np

import flashplan as fp
import poison
from case import Case
from frameworks import NumPy, bits
from inputs import make_inputs
from solve import run_arguments

PAGED = Case((3, 1), (9, 6), head_dim=8, page_size=4, q_dtype="float32")
RAGGED = Case((3, 1), (9, 6), head_dim=8, page_size=None, q_dtype="float32")
MASKED = dataclasses.replace(PAGED, custom_mask="random")


class Scene:
    def __init__(self):
        self.options = PAGED.options()
        self.inputs = make_inputs(PAGED, seed=0)
        self.attn = self._planned(PAGED, self.inputs)
        self.masked_inputs = make_inputs(MASKED, seed=0)
        self.masked_attn = self._planned(MASKED, self.masked_inputs)
        self.ragged_inputs = make_inputs(RAGGED, seed=0)
        self.ragged_attn = self._planned(RAGGED, self.ragged_inputs)
        self.out = poison.Canary((4, 4, 8), np.float32)
        self.lse = poison.Canary((4, 4), np.float32)
        self.written = [self.out.buffer, self.lse.buffer, self.inputs.k, self.inputs.v]
        self.before = [bits(x).copy() for x in self.written]
        self.expected = self._good_results()

    @staticmethod
    def _planned(case, inputs):
        attn = fp.Attention(**case.options())
        attn.plan(*inputs.plan_args())
        return attn

    def _good_results(self):
        results = []
        for case, attn, inputs in (
            (PAGED, self.attn, self.inputs),
            (RAGGED, self.ragged_attn, self.ragged_inputs),
            (MASKED, self.masked_attn, self.masked_inputs),
        ):
            args, kwargs = run_arguments(case, inputs, NumPy())
            results += attn.run(*args, **kwargs, return_lse=True)
        return [bits(x) for x in results]

    def assert_unharmed(self):
        """Checks that nothing was written, and that the objects still give right results."""
        for now, before in zip(self.written, self.before, strict=True):
            assert np.array_equal(bits(now), before), "a refused call wrote to its output"
        for now, before in zip(self._good_results(), self.expected, strict=True):
            assert np.array_equal(now, before), "a refused call changed a later result"

    # Each method is a valid call; keyword arguments replace some of its own.

    def attention(self, **changes):
        return fp.Attention(**self.options | changes)

    def plan(self, **changes):
        arguments = {"qo_indptr": [0, 3, 4], "kv_lens": [9, 6]} | changes
        return self.attn.plan(**arguments)

    def plan_ragged(self, **changes):
        arguments = {"qo_indptr": [0, 3, 4], "kv_lens": [9, 6], "kv_indptr": [0, 9, 15]} | changes
        return self.ragged_attn.plan(**arguments)

    def plan_masked(self, **changes):
        arguments = {"qo_indptr": [0, 3, 4], "kv_lens": [9, 6], "mask_begin": [6, 5]} | changes
        return self.masked_attn.plan(**arguments)

    def run_masked(self, **changes):
        i = self.masked_inputs
        arguments = {"q": i.q, "k": i.k, "v": i.v, "block_table": i.block_table, "mask": i.mask}
        outputs = {"out": self.out.view, "lse": self.lse.view}
        return self.masked_attn.run(**arguments | outputs | changes)

    def run(self, **changes):
        i = self.inputs
        arguments = {"q": i.q, "k": i.k, "v": i.v, "block_table": i.block_table}
        outputs = {"out": self.out.view, "lse": self.lse.view}
        return self.attn.run(**arguments | outputs | changes)

    def bind(self, **changes):
        i = self.inputs
        return self.attn.bind(i.q, i.k, i.v, block_table=i.block_table, **changes)

    def run_csr(self, **changes):
        csr = {
            "block_table": None,
            "page_indptr": np.array([0, 3, 5], np.int32),
            "page_indices": np.array([0, 1, 2, 3, 4], np.int32),
        }
        return self.run(**csr | changes)

    def run_ragged(self, **changes):
        i = self.ragged_inputs
        arguments = {"q": i.q, "k": i.k, "v": i.v}
        outputs = {"out": self.out.view, "lse": self.lse.view}
        return self.ragged_attn.run(**arguments | outputs | changes)

    def check(self, **changes):
        arguments = {"block_table": self.inputs.block_table, "num_pages": 9}
        return fp.check_device_data(self.attn, **arguments | changes)

    def check_ragged(self, **changes):
        arguments = {"kv_lens": integers(9, 6)}
        return fp.check_device_data(self.ragged_attn, **arguments | changes)

    def append(self, **changes):
        i = self.inputs
        arguments = {
            "k": np.ones((3, 2, 8), np.float32),
            "v": np.ones((3, 2, 8), np.float32),
            "k_cache": i.k,
            "v_cache": i.v,
            "indptr": np.array([0, 2, 3], np.int32),
            "kv_lens": np.array([9, 6], np.int32),
            "block_table": i.block_table,
        }
        return fp.append_paged_kv(**arguments | changes)

    def append_csr(self, **changes):
        csr = {
            "block_table": None,
            "page_indptr": np.array([0, 3, 5], np.int32),
            "page_indices": np.array([0, 1, 2, 3, 4], np.int32),
        }
        return self.append(**csr | changes)

    def append_slots(self, **changes):
        lengths = {"indptr": None, "kv_lens": None, "block_table": None}
        return self.append(**lengths | {"slot_mapping": int64(8, -1, 21)} | changes)

    def append_positions(self, **changes):
        places = {"batch_indices": integers(0, 1, 1), "positions": integers(8, 4, 5)}
        return self.append(**{"indptr": None, "kv_lens": None} | places | changes)

    def rope_append(self, **changes):
        i = self.inputs
        arguments = {
            "q": zeros(4, 4, 8),
            "k": np.ones((4, 2, 8), np.float32),
            "v": np.ones((4, 2, 8), np.float32),
            "k_cache": i.k,
            "v_cache": i.v,
            "indptr": integers(0, 2, 4),
            "kv_lens": integers(9, 6),
            "rope": fp.Rope(),
            "block_table": i.block_table,
            "out_q": self.out.view,
        }
        return fp.rope_append_paged_kv(**arguments | changes)

    def merge(self, **changes):
        state = {
            "o_a": zeros(4, 4, 8),
            "lse_a": zeros(4, 4),
            "o_b": zeros(4, 4, 8),
            "lse_b": zeros(4, 4),
        } | changes
        states = [state.pop(name) for name in ("o_a", "lse_a", "o_b", "lse_b")]
        return fp.merge_states(*states, **{"out": self.out.view, "lse": self.lse.view} | state)

    def merge_stacked(self, o, lse, **changes):
        return fp.merge_states(o, lse, **{"out": self.out.view, "lse": self.lse.view} | changes)

    def rmsnorm(self, **changes):
        arguments = {"x": zeros(4, 4, 8), "weight": zeros(8), "out": self.out.view}
        return fp.rmsnorm(**arguments | changes)

    def layernorm(self, **changes):
        arguments = {"x": zeros(4, 4, 8), "weight": zeros(8), "bias": zeros(8)}
        return fp.layernorm(**arguments | {"out": self.out.view} | changes)

    def add_rmsnorm(self, **changes):
        arguments = {"x": self.out.view, "residual": zeros(4, 4, 8), "weight": zeros(8)}
        return fp.add_rmsnorm(**arguments | changes)

    def gather(self, **changes):
        arguments = {"x": zeros(9, 8), "indices": integers(0, 8, 3, 3), "out": self.out.view[0]}
        return fp.gather_rows(**arguments | changes)

    def rope(self, **changes):
        arguments = {"q": zeros(4, 4, 8), "k": zeros(4, 2, 8), "positions": integers(0, 1, 2, 3)}
        outputs = {"out_q": self.out.view, "out_k": zeros(4, 2, 8)}
        return fp.apply_rope(**arguments | {"rope": fp.Rope()} | outputs | changes)

    def table(self, **changes):
        return self.rope(**{"rope": None, "cos_sin_cache": zeros(9, 8)} | changes)

    def sample(self, **changes):
        return fp.sample(**{"logits": zeros(4, 8), "out": integers(0, 0, 0, 0)} | changes)

    def filtered(self, **changes):
        return fp.filtered_probs(**{"logits": zeros(4, 8), "out": zeros(4, 8)} | changes)

    def mask(self, **changes):
        return fp.top_k_mask(**{"logits": zeros(4, 8), "top_k": 3, "out": zeros(4, 8)} | changes)

    def sample_probs(self, probabilities):
        return self.sample(logits=probabilities, from_probs=True)

    def penalties(self, **changes):
        arguments = {
            "logits": self.out.view[0],
            "history": int64([1, 2], [3, 4], [5, 6], [7, 0]),
            "history_lens": integers(2, 0, 1, 2),
            "repetition": 1.5,
        }
        return fp.apply_penalties(**arguments | changes)

    def verify(self, **changes):
        arguments = {
            "draft_tokens": int64([1, 2, 3], [4, 5, 6]),
            "draft_probs": np.full((2, 3, 8), 0.125, np.float32),
            "target_probs": np.full((2, 4, 8), 0.125, np.float32),
            "out": zeros(2, 4, dtype=np.int32),
            "num_accepted": integers(0, 0),
        }
        return fp.speculative_verify(**arguments | changes)

    def softmax(self, **changes):
        return fp.softmax(**{"logits": zeros(4, 8), "out": self.out.view[0, :, :8]} | changes)

    def silu(self, **changes):
        return fp.silu_and_mul(**{"x": zeros(4, 4, 16), "out": self.out.view} | changes)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def half(*shape):
    return zeros(*shape, dtype=np.float16)


def integers(*values, dtype=np.int32):
    return np.array(values, dtype)


def int64(*values):
    return integers(*values, dtype=np.int64)


def read_only(array):
    array = array.view()
    array.flags.writeable = False
    return array


def sharing(*shape, step=None):
    """A view whose rows begin `step` elements apart, so that neighbouring rows share elements."""
    strides = [4 * (step or shape[-1] // 2)] * (len(shape) - 1) + [4]
    return np.lib.stride_tricks.as_strided(zeros(999), shape, strides)


def table_beyond(num_pages):
    """A block_table with the page id `num_pages`; the cache has 9 pages."""
    return integers([0, 1, 2], [num_pages, 0, 8])
