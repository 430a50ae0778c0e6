# SPDX-License-Identifier: Apache-2.0
"""Random valid calls of every function that takes tensors, and the checks of their results."""

import random

import ml_dtypes
import numpy as np

import flashplan as fp
import reference
import solve
from case import Case
from frameworks import bits
from misuse.capsules import EIGHT_BIT_FLOATS, FLOATS, dtype_fields
from misuse.finding import Finding, check_refusal, is_of_the_caller
from misuse.memory import Placed, place, place_bytes

ERRORS = (Exception, KeyboardInterrupt)


class Call:
    """A valid call. `tensors` may be replaced one by one, by tensors in other memory or by objects
    that only look like them."""

    related = {}  # argument -> other arguments that a refusal may name instead
    written = ()
    in_place = ()  # pairs (output, input) that may be the same memory
    optional = ("workspace",)  # of the tensors
    numbers = ()  # arguments that may be no tensors, besides stream
    parameters = ()  # tensors that may be numbers
    dtypes = {}  # of tensors that may have several, in the form of dtype_fields()
    read_whole = ()  # tensors that are read to an end which no other argument has to agree with

    def __init__(self, rng):
        self.rng = rng
        self.tensors: dict[str, Placed] = {}
        self.options = {}

    def place(self, name, array):
        self.tensors[name] = place(array, self.rng)

    def array(self, name):
        return self.tensors[name].array

    def arguments(self):
        return {name: placed.array for name, placed in self.tensors.items()} | self.options

    def may_have(self, name, dtype):
        """Whether the call is valid, perhaps with other values, if only this dtype changes."""
        return dtype in [dtype_fields(self.array(name).dtype), *self.dtypes.get(name, ())]

    def names(self, *arguments):
        """The names with which a refusal of these arguments may begin."""
        return {name for a in arguments for name in (a, *self.related.get(a, ()))}

    def invoke(self, **changes):
        raise NotImplementedError

    def verify(self):
        """Raises Finding if an output differs from the reference."""
        raise NotImplementedError

    def pages(self):
        return {id(p.pages): p.pages for p in self.tensors.values()}.values()

    def snapshot(self):
        return [(pages, pages.bytes.copy()) for pages in self.pages()]

    def written_part(self, name):
        return self.array(name)

    def assert_only_written(self, before, names):
        for pages, content in before:
            expected = content
            for name in names:
                array = self.written_part(name)
                if self.tensors[name].pages is not pages or array.size == 0:
                    continue
                offset = array.ctypes.data - pages.address
                dtype = np.dtype(f"u{array.itemsize}")
                window = np.ndarray(array.shape, dtype, expected[offset:], strides=array.strides)
                window[...] = array.view(dtype)
            if not np.array_equal(pages.bytes, expected):
                at = int(np.flatnonzero(pages.bytes != expected)[0])
                what = "outside of the outputs" if names else "although it was refused"
                raise Finding(f"{type(self).__name__} wrote {what}: byte {at} of a tensor's pages")

    def judge(self, changes, arguments, must_refuse=False, foreign=False):
        """Makes the call with `changes`. A refusal must name one of `arguments`."""
        before = self.snapshot()
        try:
            self.invoke(**changes)
        except ERRORS as error:
            if not (foreign and is_of_the_caller(error)):
                check_refusal(error, self.names(*arguments))
            self.assert_only_written(before, ())
            return False
        if must_refuse:
            raise Finding(f"{type(self).__name__} accepted a wrong {' or '.join(arguments)}")
        self.assert_only_written(before, self.written)
        self.verify()
        return True


def pick(rng, *values):
    return values[int(rng.integers(len(values)))]


def small_case(rng, **fixed):
    q_dtype = pick(rng, "float32", "float32", "bfloat16", "float16")
    group_size, num_kv_heads = pick(rng, 1, 2, 3), pick(rng, 1, 2)
    page_size = pick(rng, None, 1, 2, 5, 16)
    size = pick(rng, 1, 2, 3)
    csr = page_size is not None and bool(rng.integers(2))
    values = {
        "qo_lens": tuple(pick(rng, 0, 1, 1, 3, 9) for _ in range(size)),
        "kv_lens": tuple(pick(rng, 0, 1, 7, 16, 40) for _ in range(size)),
        "num_qo_heads": group_size * num_kv_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": pick(rng, 1, 8, 24, (16, 8)),
        "page_size": page_size,
        "q_dtype": q_dtype,
        "kv_dtype": pick(rng, None, None, None, "float8_e4m3fn", "float8_e5m2"),
        "causal": bool(rng.integers(2)),
        "window_left": pick(rng, -1, -1, 0, 5),
        "kv_layout": pick(rng, "NHD", "HND"),
        "num_ctas": pick(rng, None, 1, 3, 20),
        "batch_invariant": bool(rng.integers(4) == 0),
        "csr": csr,
    }
    if rng.integers(4) == 0:
        values["custom_mask"] = "random"
    values["sinks"] = bool(rng.integers(4) == 0)
    values["device_scales"] = pick(rng, None, None, "one", "heads")
    values |= fixed
    if rng.integers(4) == 0 and "planned_lens" not in fixed:
        values["planned_lens"] = tuple(n + pick(rng, 0, 1, 20) for n in values["kv_lens"])
    return Case(**values)


TABLES = ("block_table", "page_indptr", "page_indices")


class Run(Call):
    """Attention.run(), or bind() and a call."""

    related = {
        "k": TABLES,  # which name its pages
        "v": TABLES,
        "page_indptr": ("block_table", "page_indices"),
        "page_indices": ("block_table", "page_indptr"),
        "kv_lens": TABLES,
    }
    written = ("out", "lse")
    optional = ("workspace", "kv_lens", "sinks")
    dtypes = {"sinks": [dtype_fields(dtype) for dtype in (ml_dtypes.bfloat16, "u2")]}
    numbers = parameters = ("k_scale", "v_scale")

    def __init__(self, rng, **fixed):
        super().__init__(rng)
        self.case = small_case(rng, **fixed)
        self.inputs, self.exact, self.twin = solve.problem(self.case, int(rng.integers(2**31)))
        for name in ("q", "k", "v"):
            self.place(name, getattr(self.inputs, name))
        for name, table in self.inputs.other_tensors().items():
            self.place(name, table)
        options = self.case.options()
        if rng.integers(2):
            size = fp.Attention(**options).workspace_bytes
            self.tensors["workspace"] = place_bytes(size)
            options["workspace"] = self.array("workspace")
        self.attn = fp.Attention(**options)
        self.attn.plan(*self.inputs.plan_args(), **self.inputs.plan_options())
        self.binds = bool(rng.integers(4) == 0)
        case, rows = self.case, len(self.inputs.q)
        shape = (rows, case.num_qo_heads, case.head_dims[1])
        self.place("out", np.full(shape, np.nan, case.output_dtype))
        self.place("lse", np.full(shape[:2], np.nan, np.float32))
        scales = self.inputs.scales(case)
        if case.device_scales:
            for name, scale in scales.items():
                self.place(name, scale)
        else:
            self.options = scales

    def arguments(self):
        arguments = super().arguments()
        arguments.pop("workspace", None)
        return arguments

    def invoke(self, **changes):
        arguments = self.arguments() | changes
        if not self.binds:
            return self.attn.run(**arguments)
        result = self.attn.bind(**arguments)()
        if arguments.get("out") is not None:
            return result
        rows = slice(self.num_rows)  # outputs that bind() makes have as many as q
        return tuple(x[rows] for x in result) if isinstance(result, tuple) else result[rows]

    @property
    def num_rows(self):
        return int(self.inputs.qo_indptr[-1])

    def written_part(self, name):
        array = self.array(name)
        return array if name == "workspace" else array[: self.num_rows]

    def assert_only_written(self, before, names):
        if "workspace" in self.tensors:
            names = (*names, "workspace")
        super().assert_only_written(before, names)

    def verify(self):
        o, lse = (self.array(name)[: self.num_rows] for name in ("out", "lse"))
        try:
            solve.assert_correct(self.case, self.inputs, self.exact, self.twin, o, lse)
        except AssertionError as error:
            raise Finding(f"differs from the reference: {self.case}: {error}") from error


class Append(Call):
    """append_paged_kv()."""

    related = {
        "page_indptr": ("block_table", "page_indices"),
        "page_indices": ("block_table", "page_indptr"),
        "k_cache": ("k", "v", "v_cache", *TABLES),
        "v_cache": ("v", *TABLES),
        "kv_lens": ("indptr", "block_table", "page_indptr"),
        "indptr": ("kv_lens", "k", "v"),
    }
    written = ("k_cache", "v_cache")
    numbers = ("k_scale", "v_scale", "kv_layout", "kv_dtype")
    parameters = ("k_scale", "v_scale")

    def __init__(self, rng, **fixed):
        super().__init__(rng)
        page_size = pick(rng, 1, 2, 5, 16)
        self.case = case = small_case(rng, **{"page_size": page_size} | fixed)
        self.inputs, _, _ = solve.problem(case, int(rng.integers(2**31)))
        new = [int(rng.integers(0, n + 1)) for n in case.kv_lens]
        self.indptr = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        for name, dim in zip(("k", "v"), case.head_dims):
            rows = rng.standard_normal((self.indptr[-1] + 2, case.num_kv_heads, dim), np.float32)
            self.place(name, rows.astype(case.q_dtype))
        self.place("k_cache", self.inputs.k)
        self.place("v_cache", self.inputs.v)
        self.place("indptr", self.indptr)
        self.place("kv_lens", self.inputs.kv_lens)
        for name, table in self.inputs.tables().items():
            self.place(name, table)
        self.expected = [cache.copy() for cache in (self.inputs.k, self.inputs.v)]
        for cache, name in zip(self.expected, ("k", "v")):
            for r, kv_len in enumerate(case.kv_lens):
                rows = self.array(name)[self.indptr[r] : self.indptr[r + 1]]
                pages = self.inputs.pages(r)
                reference.append_pages(cache, rows, pages, kv_len, case.kv_layout)
        self.options = {"kv_layout": case.kv_layout}
        self.dtypes = dict.fromkeys(self.written, EIGHT_BIT_FLOATS)
        if self.array("k_cache").itemsize == 1:  # which rows of any float dtype may go into
            self.dtypes = dict.fromkeys(("k", "v", *self.written), FLOATS + EIGHT_BIT_FLOATS)

    def invoke(self, **changes):
        return fp.append_paged_kv(**self.arguments() | changes)

    def verify(self):
        for name, expected in zip(self.written, self.expected):
            if not np.array_equal(bits(self.array(name)), bits(expected)):
                raise Finding(f"differs from the reference: {name} after an append, {self.case}")


class AppendSlots(Append):
    """append_paged_kv() to slots, of which some are -1."""

    related = {
        "k_cache": ("k", "v", "v_cache", "slot_mapping"),
        "v_cache": ("v", "slot_mapping"),
        "slot_mapping": ("k", "v", "indptr"),
        "k": ("slot_mapping",),
        "v": ("slot_mapping",),
    }

    def __init__(self, rng, **fixed):
        super().__init__(rng, **fixed)
        for name in ("indptr", "kv_lens", *self.inputs.tables()):
            del self.tensors[name]
        page_size = self.case.page_size
        slots = []
        for r, kv_len in enumerate(self.case.kv_lens):
            new_len = self.indptr[r + 1] - self.indptr[r]
            keys = np.arange(kv_len - new_len, kv_len)
            slots += [self.inputs.pages(r)[key // page_size] * page_size + key % page_size
                      for key in keys]  # fmt: skip
        self.place("slot_mapping", np.array([*slots, -1], np.int64))


class RopeAppend(Append):
    """rope_append_paged_kv()."""

    related = Append.related | {
        "k_cache": ("q", "k", "v", "v_cache", *TABLES),
        "k": ("q", "v", "rope", "v_cache", "out_q"),
        "indptr": ("kv_lens", "q", "k", "v"),
        "q": ("out_q", "k"),
    }
    written = ("k_cache", "v_cache", "out_q")
    in_place = (("out_q", "q"),)
    numbers = ("k_scale", "v_scale", "kv_layout", "kv_dtype", "rope")

    def __init__(self, rng):
        super().__init__(rng, head_dim=pick(rng, 2, 8, 24, (16, 8)))
        shape = (len(self.array("k")), self.case.num_qo_heads, self.case.head_dims[0])
        self.place("q", rng.standard_normal(shape, np.float32).astype(self.case.q_dtype))
        self.place("out_q", np.full(shape, np.nan, self.case.q_dtype))
        positions = np.zeros(len(self.array("k")), np.int32)
        for r, kv_len in enumerate(self.case.kv_lens):
            own = slice(*self.indptr[r : r + 2])
            positions[own] = np.arange(kv_len - (own.stop - own.start), kv_len)
        self.dtypes = {}  # q and k have one dtype, and so have the caches
        self.rope = fp.Rope(interleaved=bool(rng.integers(2)))
        rotated = fp.apply_rope(self.array("q"), self.array("k"), positions, self.rope)
        self.expected = [*(cache.copy() for cache in (self.inputs.k, self.inputs.v)), rotated[0]]
        for cache, rows in zip(self.expected, (rotated[1], self.array("v"))):
            for r, kv_len in enumerate(self.case.kv_lens):
                own = rows[slice(*self.indptr[r : r + 2])]
                pages = self.inputs.pages(r)
                reference.append_pages(cache, own, pages, kv_len, self.case.kv_layout)

    def invoke(self, **changes):
        return fp.rope_append_paged_kv(**self.arguments() | {"rope": self.rope} | changes)

    def written_part(self, name):
        array = self.array(name)
        return array[: self.indptr[-1]] if name == "out_q" else array

    def verify(self):
        for name, expected in zip(self.written, self.expected):
            actual = self.written_part(name)
            if not np.array_equal(bits(actual), bits(expected[: len(actual)])):
                raise Finding(f"differs from the reference: {name} after both, {self.case}")


class Merge(Call):
    """merge_states() of two states."""

    related = {
        "o_a": ("o_b", "out", "lse_a", "lse_b", "lse"),
        "lse_a": ("o_a", "lse_b"),
        "lse_b": ("o_b",),
    }
    written = ("out", "lse")
    in_place = (("out", "o_a"), ("out", "o_b"), ("lse", "lse_a"), ("lse", "lse_b"))
    num_states = 2

    def __init__(self, rng):
        super().__init__(rng)
        count = self.num_states
        shape = (pick(rng, 0, 1, 3), pick(rng, 1, 2, 3), pick(rng, 1, 8, 33))
        dtype = pick(rng, "float32", "float16", "bfloat16")
        self.o = rng.standard_normal((count, *shape), np.float32).astype(dtype)
        self.lse = 5 * rng.standard_normal((count, *shape[:2]), np.float32)
        empty = rng.random(self.lse.shape) < 0.2
        self.o[empty], self.lse[empty] = 0, -np.inf
        self.place_states()
        self.place("out", np.full(shape, np.nan, dtype))
        self.place("lse", np.full(shape[:2], np.nan, np.float32))

    def place_states(self):
        for i, state in enumerate("ab"):
            self.place(f"o_{state}", self.o[i])
            self.place(f"lse_{state}", self.lse[i])

    def invoke(self, **changes):
        return fp.merge_states(**self.arguments() | changes)

    def verify(self):
        exact, exact_lse = reference.merge_states(self.o, self.lse)
        o, lse = self.array("out"), self.array("lse")
        eps = reference.EPS[str(o.dtype)]
        error = np.abs(o.astype(np.float64) - exact)
        right = (error <= eps * np.abs(exact) + 1e-5).all()
        finite = np.isfinite(exact_lse)
        right &= np.array_equal(lse[~finite], exact_lse[~finite])
        right &= np.allclose(lse[finite], exact_lse[finite], rtol=1e-6, atol=1e-5)
        if not right:
            raise Finding("differs from the reference: merged states")


class MergeStack(Merge):
    """merge_states() of a stack."""

    num_states = 4
    related = {"o_a": ("lse_a", "out", "lse"), "lse_a": ("o_a", "lse")}

    def place_states(self):
        self.place("o_a", self.o)
        self.place("lse_a", self.lse)


def python_random(rng):
    return random.Random(int(rng.integers(2**31)))
