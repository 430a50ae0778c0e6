# SPDX-License-Identifier: Apache-2.0
"""The names and defaults that programs outside this repository rely on."""

import inspect
import os
import re

import pytest

import flashplan as fp

ATTENTION = {
    "num_qo_heads": inspect.Parameter.empty,
    "num_kv_heads": inspect.Parameter.empty,
    "head_dim": inspect.Parameter.empty,
    "page_size": 16,
    "q_dtype": "bfloat16",
    "kv_dtype": None,
    "o_dtype": None,
    "causal": True,
    "window_left": -1,
    "softmax_scale": None,
    "softcap": 0.0,
    "variant": None,
    "kv_layout": "NHD",
    "max_batch_size": 256,
    "max_qo_tokens": 8192,
    "device": None,
    "workspace": None,
    "num_ctas": None,
    "batch_invariant": False,
}


def defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.name != "self"}


def test_attention_signature():
    assert defaults(fp.Attention) == ATTENTION


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (fp.Attention.plan, "qo_indptr kv_lens kv_indptr"),
        (
            fp.Attention.run,
            "q k v block_table page_indptr page_indices out lse return_lse k_scale v_scale stream",
        ),
        (
            fp.append_paged_kv,
            "k v k_cache v_cache indptr kv_lens block_table page_indptr page_indices kv_layout "
            "kv_dtype k_scale v_scale stream",
        ),
    ],
)
def test_argument_names(function, names):
    assert list(defaults(function)) == names.split()


def test_defaults_of_a_machine_without_gpu():
    attn = fp.Attention(32, 8, 128)
    assert isinstance(attn.workspace_bytes, int)
    assert attn.workspace_bytes > 0


def test_every_public_name_is_documented():
    for name in fp.__all__:
        thing = getattr(fp, name)
        if callable(thing):
            assert inspect.getdoc(thing), name
    for name, member in inspect.getmembers(fp.Attention):
        if not name.startswith("_"):
            assert inspect.getdoc(member), name


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", fp.__version__)
    assert fp.__version__ in fp.show_config()


def test_show_config_is_key_value_lines():
    lines = fp.show_config().strip().splitlines()
    assert all(re.match(r"[\w ]+: +\S", line) for line in lines)


def test_num_threads():
    before = fp.get_num_threads()
    assert before == len(os.sched_getaffinity(0))
    fp.set_num_threads(3)
    assert fp.get_num_threads() == 3
    fp.set_num_threads(before)


def test_is_supported():
    assert fp.is_supported(num_qo_heads=32, num_kv_heads=8, head_dim=128, device="cpu") == (
        True,
        "",
    )
