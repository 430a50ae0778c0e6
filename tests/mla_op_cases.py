# SPDX-License-Identifier: Apache-2.0
"""What append_mla() and gather_mla() should give, on the CPU and on a GPU."""

import dataclasses

import ml_dtypes
import numpy as np

import flashplan as fp
from inputs import poisoned
from mla_cases import ds_mla_rows, real_keys
from rope_cases import ROPES, rotation

DS_MLA = "fp8_ds_mla"


@dataclasses.dataclass(frozen=True)
class OpCase:
    tokens: int = 37
    dims: tuple[int, int] = (512, 64)
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    pair: bool = False  # the cache in two tensors
    heads: bool = False  # with a dimension of one head
    strided: bool = False
    scale: float = 1.0
    norm: str | None = None  # dtype of the weight
    rope: str | None = None  # of rope_cases.py
    num_heads: int = 0  # of q_pe
    wide_positions: bool = False

    def __str__(self):
        default = OpCase()
        fields = (f.name for f in dataclasses.fields(self))
        texts = (
            f"{n}={getattr(self, n)}" for n in fields if getattr(self, n) != getattr(default, n)
        )
        return "-".join(texts).replace(" ", "") or "default"

    @property
    def stored_dtype(self):
        return (
            np.dtype(np.uint8) if self.kv_dtype == DS_MLA else np.dtype(self.kv_dtype or self.dtype)
        )

    @property
    def row_size(self):
        return 656 if self.kv_dtype == DS_MLA else sum(self.dims)


CASES = [
    OpCase(),
    OpCase(dtype="float32"),
    OpCase(dtype="float16", pair=True),
    OpCase(page_size=1, heads=True),
    OpCase(strided=True),
    OpCase(strided=True, pair=True, norm="bfloat16", rope="plain", num_heads=3),
    OpCase(dims=(512, 0)),
    OpCase(dims=(33, 6), dtype="float16", rope="interleaved", num_heads=2, norm="float32"),
    OpCase(tokens=1, norm="bfloat16"),
    OpCase(norm="float32", rope="interleaved", num_heads=16),
    OpCase(dtype="float32", norm="float32", rope="plain", num_heads=2, wide_positions=True),
    OpCase(rope="plain"),
    OpCase(kv_dtype="float8_e4m3fn", scale=0.07),
    OpCase(kv_dtype="float8_e5m2", scale=0.3, dtype="float16", pair=True),
    OpCase(kv_dtype="float8_e4m3fn", norm="bfloat16", rope="interleaved", num_heads=4, scale=0.02),
    OpCase(kv_dtype=DS_MLA),
    OpCase(kv_dtype=DS_MLA, strided=True, heads=True, page_size=64),
    OpCase(kv_dtype=DS_MLA, norm="bfloat16", rope="interleaved", num_heads=8, tokens=200),
]


@dataclasses.dataclass
class OpInputs:
    kv_c: np.ndarray
    k_pe: np.ndarray | None
    cache: list  # one tensor, or two
    slots: np.ndarray
    weight: np.ndarray | None
    positions: np.ndarray | None
    q_pe: np.ndarray | None
    num_pages: int

    def given_cache(self, tensor=lambda x: x):
        given = [tensor(part) for part in self.cache]
        return given[0] if len(given) == 1 else tuple(given)


def empty_cache(case, num_pages):
    sizes = case.dims if case.pair else (case.row_size,)
    shape = (num_pages, case.page_size, *([1] if case.heads else []))

    def part(size):
        if case.kv_dtype == DS_MLA:
            return np.full((*shape, size + 16 * case.strided), 0xFF, np.uint8)[..., :size]
        return poisoned((*shape, size), case.stored_dtype, case.strided)

    return [part(size) for size in sizes]


def make_op_inputs(case, seed):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        full = rng.standard_normal((*shape[:-1], shape[-1] + 8 * case.strided), np.float32)
        return full.astype(case.dtype)[..., : shape[-1]]

    latent, tail = case.dims
    num_pages = case.tokens // case.page_size + 3
    slots = rng.permutation(num_pages * case.page_size)[: case.tokens].astype(np.int64)
    if case.tokens > 1:
        slots[rng.random(case.tokens) < 0.2] = -1
    kv_c = (normal(case.tokens + 2, latent).astype(np.float32) * 3).astype(case.dtype)
    kv_c = kv_c[:, :latent]
    inputs = OpInputs(
        kv_c,
        normal(case.tokens + 2, tail) if tail else None,
        [],
        slots,
        None,
        None,
        None,
        num_pages,
    )
    inputs.cache = empty_cache(case, num_pages)
    if case.norm:
        inputs.weight = (1 + rng.standard_normal(latent, np.float32) / 4).astype(case.norm)
    if case.rope:
        kind = np.int64 if case.wide_positions else np.int32
        inputs.positions = rng.integers(0, 5000, case.tokens + 2).astype(kind)
    if case.num_heads:
        inputs.q_pe = normal(case.tokens + 2, case.num_heads, tail)
    return inputs


def append_options(case, inputs, tensor=lambda x: x):
    options = {"slot_mapping": tensor(inputs.slots)}
    if case.scale != 1:
        options["scale"] = case.scale
    for name, x in (("norm_weight", inputs.weight), ("positions", inputs.positions)):
        if x is not None:
            options[name] = tensor(x)
    if case.rope:
        options["rope"] = fp.Rope(**ROPES[case.rope])
    return options


def new_keys(case, inputs):
    """(latent dims, rotated dims, q_pe), each rounded to the dtype of tokens; from float64."""
    latent = inputs.kv_c[: case.tokens].astype(np.float64)
    if case.norm:
        mean_square = np.mean(latent**2, axis=1, keepdims=True)
        latent = latent / np.sqrt(mean_square + 1e-6) * inputs.weight.astype(np.float64)
    tail = np.zeros((case.tokens, 0))
    q_pe = None
    if inputs.k_pe is not None:
        tail = inputs.k_pe[: case.tokens].astype(np.float64)
    if case.num_heads:
        q_pe = inputs.q_pe[: case.tokens].astype(np.float64)
    if case.rope:
        rotate, positions = rotation(case.rope), inputs.positions[: case.tokens]
        tail = rotate(tail[:, None], positions)[:, 0]
        q_pe = rotate(q_pe, positions) if case.num_heads else None
    return tuple(None if x is None else x.astype(case.dtype) for x in (latent, tail, q_pe))


def expected_rows(case, latent, tail):
    """Keys as the cache stores them, [tokens, row_size]."""
    keys = np.concatenate([latent, tail], axis=1)
    if case.kv_dtype == DS_MLA:
        return ds_mla_rows(keys)
    if case.kv_dtype is None and case.scale == 1:
        return keys
    with np.errstate(over="ignore"):
        keys = keys.astype(np.float32) / np.float32(case.scale)
        if case.kv_dtype:
            largest = float(ml_dtypes.finfo(case.kv_dtype).max)
            keys = np.clip(keys, -largest, largest)
    return keys.astype(case.stored_dtype)


def stored_rows(case, cache):
    """The rows of a cache by slot, [slots, row_size]."""
    parts = [part.reshape(-1, part.shape[-1]) for part in cache]
    return np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]


def as_numbers(case, rows):
    """Stored rows as float64, for comparisons."""
    return real_keys(rows) if case.kv_dtype == DS_MLA else rows.astype(np.float64)


# Half a step of the last bit, of what may round in another direction, relative to a value.
STEP = {
    "float32": 2.0**-22,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
    DS_MLA: 2.0**-3,
}


def assert_rows(case, actual, wanted):
    """The same up to one step of the last bit; where nothing is computed, the same bits."""
    if not case.norm and not case.rope:
        assert np.array_equal(actual.view(np.uint8), np.ascontiguousarray(wanted).view(np.uint8))
        return
    actual, wanted = as_numbers(case, actual), as_numbers(case, wanted)
    step = STEP[case.kv_dtype or case.dtype]
    floor = (
        1e-5
        + (2.0**-9 if case.kv_dtype == "float8_e4m3fn" else 0)
        + (2.0**-16 if case.kv_dtype == "float8_e5m2" else 0)
    )
    if case.kv_dtype == DS_MLA:
        floor = np.abs(wanted).max() / 448 / 256
    error = np.abs(actual - wanted)
    assert np.all(error <= step * np.abs(wanted) + floor)
    if case.dtype != "float32":
        assert np.mean(error > 0) < 0.05, "more than roundings differ"
