# SPDX-License-Identifier: Apache-2.0
"""flashplan.flash_attn: packed tensors, rotation in the cache's places, and install()."""

import inspect
import subprocess
import sys

import numpy as np
import pytest

import flashplan as fp
import rope_cases

CACHED = [30, 0, 7]  # keys before the new ones
ENDS = [0, 3, 3, 8]


def normal(torch, random, *shape):
    return torch.randn(shape, generator=random)


def test_packed(torch, random, flash):
    qkv = normal(torch, random, 2, 6, 3, 4, 64)
    q, kv = normal(torch, random, 2, 5, 8, 64), normal(torch, random, 2, 6, 2, 4, 64)
    options = {"causal": True, "softmax_scale": 0.2, "return_softmax_lse": True}
    by_place = (0.0, 0.2, True)  # dropout_p, softmax_scale, causal
    for packed, tensors in (
        (flash.flash_attn_qkvpacked_func, (qkv,)),
        (flash.flash_attn_kvpacked_func, (q, kv)),
    ):
        wanted = flash.flash_attn_func(*tensors[:-1], *tensors[-1].unbind(2), **options)
        for actual, exact in zip(packed(*tensors, **options), wanted):
            assert torch.equal(actual, exact)
        assert torch.equal(packed(*tensors, *by_place), wanted[0])


def test_packed_of_any_lengths(torch, random, flash):
    qkv, kv = normal(torch, random, 8, 3, 4, 64), normal(torch, random, 12, 2, 4, 64)
    ends, ends_k = torch.tensor(ENDS), torch.tensor([0, 5, 5, 12])
    by_place = (0.0, 0.2, True)
    of_qkv = flash.flash_attn_varlen_qkvpacked_func(qkv, ends, 5, *by_place)
    wanted = flash.flash_attn_varlen_func(*qkv.unbind(1), ends, ends, 5, 5, *by_place)
    assert torch.equal(of_qkv, wanted)
    lengths = (ends, ends_k, 5, 7)
    of_kv = flash.flash_attn_varlen_kvpacked_func(qkv[:, 0], kv, *lengths, *by_place)
    wanted = flash.flash_attn_varlen_func(qkv[:, 0], *kv.unbind(1), *lengths, *by_place)
    assert torch.equal(of_kv, wanted)


def test_packed_tensors_of_wrong_shapes(torch, flash):
    x = torch.ones(2, 2, 2)
    for name in ("qkvpacked", "varlen_qkvpacked"):
        function = getattr(flash, f"flash_attn_{name}_func")
        with pytest.raises(ValueError, match=r"^qkv: expected . dimensions, got shape \[2, 2, 2\]"):
            function(x, x, 3)
    for name in ("kvpacked", "varlen_kvpacked"):
        with pytest.raises(ValueError, match=r"^kv: expected . dimensions, got shape \[2, 2, 2\]"):
            getattr(flash, f"flash_attn_{name}_func")(x, x)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary_dim", [64, 32])
@pytest.mark.parametrize(
    ("new", "options"),
    [
        ((1, 1), {"causal": True}),
        ((3, 3), {"causal": True}),
        ((3, 3), {}),
        ((2, 3), {"causal": True, "window_size": (5, -1)}),
        ((3, 2), {"window_size": (5, 0)}),
    ],
)
@pytest.mark.parametrize("paged", [True, False])
def test_rotation(torch, random, flash, interleaved, rotary_dim, new, options, paged):
    """Beside the calls of tensors that were rotated before, in float64."""
    num_queries, num_keys = new
    rope = fp.Rope(rotary_dim=rotary_dim, interleaved=interleaved)
    angles = np.arange(64)[:, None] * rope_cases.frequencies(rope, rotary_dim)[0]
    cos, sin = (torch.from_numpy(f(angles)).float() for f in (np.cos, np.sin))
    q = normal(torch, random, 3, num_queries, 4, 64)
    k, v = (normal(torch, random, 3, num_keys, 2, 64) for _ in range(2))
    shape = (12, 16) if paged else (3, 48)
    k_cache, v_cache = (normal(torch, random, *shape, 2, 64) for _ in range(2))
    table = torch.randperm(12, generator=random, dtype=torch.int32).view(3, 4) if paged else None
    lengths = torch.tensor(CACHED, dtype=torch.int32)
    is_masked = bool(options)
    options = options | {"cache_seqlens": lengths, "block_table": table, "return_softmax_lse": True}

    def turned(x, steps):
        places = np.array(CACHED)[:, None] + steps
        rows = [rope_cases.rotated(a.numpy(), p, rope) for a, p in zip(x, places)]
        return torch.from_numpy(np.stack(rows)).float()

    queries = turned(q, np.arange(num_queries) * is_masked)
    caches = k_cache.clone(), v_cache.clone()
    exact = flash.flash_attn_with_kvcache(
        queries, *caches, turned(k, np.arange(num_keys)), v, **options
    )
    before = q.clone(), k.clone()
    rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    results = flash.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **rotary, **options)
    for actual, expected in zip((*results, k_cache, v_cache), (*exact, *caches)):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])


def test_wrong_rotations(torch, flash):
    q, cache, table = torch.ones(2, 1, 4, 64), torch.ones(2, 16, 2, 64), torch.ones(9, 32)
    new, lengths = torch.ones(2, 1, 2, 64), torch.tensor([3, 4], dtype=torch.int32)
    call, both = flash.flash_attn_with_kvcache, {"rotary_cos": table, "rotary_sin": table}
    with pytest.raises(ValueError, match="^rotary_cos: expected it with rotary_sin, got one"):
        call(q, cache, cache, new, new, table, cache_seqlens=lengths)
    with pytest.raises(ValueError, match="^rotary_cos: expected None without k, got a tensor"):
        call(q, cache, cache, cache_seqlens=lengths, **both)
    with pytest.raises(ValueError, match=r"^rotary_sin: expected 2 dimensions, got shape \[32\]"):
        call(q, cache, cache, new, new, table, table[0], cache_seqlens=lengths)
    ragged = {"cu_seqlens_q": torch.arange(3), "cu_seqlens_k_new": torch.arange(3)}
    rows = new[:, 0], new[:, 0]
    with pytest.raises(fp.UnsupportedError, match="^rotary_cos: .*; rotate ragged q and k by"):
        call(q[:, 0], cache, cache, *rows, cache_seqlens=lengths, **both, **ragged)


INSTALLED = """
import flashplan.flash_attn
flashplan.flash_attn.install()
flashplan.flash_attn.install()  # again
import flash_attn.flash_attn_interface
import flash_attn_interface
from flash_attn import flash_attn_qkvpacked_func
from flash_attn.flash_attn_interface import flash_attn_varlen_func
assert flash_attn is flash_attn_interface is flashplan.flash_attn
import doctest
from flashplan import flash_packed
results = doctest.testmod(flash_packed)
assert (results.failed, results.attempted) == (0, 4)
"""
REFUSED = """
import sys, types
sys.modules["flash_attn_interface"] = types.ModuleType("flash_attn_interface")
import flashplan.flash_attn
try:
    flashplan.flash_attn.install()
except RuntimeError as error:
    assert "a process that has not imported flash_attn_interface, got" in str(error)
else:
    raise SystemExit("was installed over another one")
assert "flash_attn" not in sys.modules
"""


@pytest.mark.parametrize("program", [INSTALLED, REFUSED], ids=["installed", "refused"])
def test_install(flash, program):
    assert inspect.signature(flash.install).parameters == {}
    subprocess.run([sys.executable, "-c", program], check=True)
