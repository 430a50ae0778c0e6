# SPDX-License-Identifier: Apache-2.0
"""The names and defaults that programs outside this repository rely on."""

import inspect
import os
import pathlib
import platform
import re
import subprocess
import sys
import warnings

import numpy
import pytest

import flashplan as fp
from flashplan import _core, options
from flashplan.filtering import FilterOptions
from flashplan.options import Options, to_cuda_device
from flashplan.sampling import SampleOptions
from flashplan.speculative import VerifyOptions

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
    "custom_mask": False,
    "shared_kv": False,
    "topk": None,
    "softmax_scale": None,
    "softcap": 0.0,
    "variant": None,
    "rope": None,
    "kv_layout": "NHD",
    "max_batch_size": 256,
    "max_qo_tokens": 8192,
    "device": None,
    "workspace": None,
    "num_ctas": None,
    "batch_invariant": False,
    "lse_base2": False,
    "kernels": None,
}


def defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.name != "self"}


def test_attention_signature():
    assert defaults(fp.Attention) == ATTENTION


def test_options_that_are_passed_on_are_those_of_attention():
    """They are listed for type checkers, and checked by name."""
    positional = {"num_qo_heads", "num_kv_heads", "head_dim"}
    names = set(ATTENTION) - positional - {"workspace"}
    assert set(Options.__annotations__) == names
    assert set(fp.Attention(1, 1, 8, device="cpu").options) == names | positional
    for function in (fp.is_supported, fp.workspace_bytes):
        for typo in ("typo", "workspace"):
            with pytest.raises(TypeError, match=f"^{typo}: expected an option .*page_size"):
                function(1, 1, 8, **{typo: None})


@pytest.mark.parametrize(
    ("function", "options", "others"),
    [
        (
            fp.sample,
            SampleOptions,
            {"logits", "return_logprobs", "logprobs", "top_logprobs", "top_out"},
        ),
        (fp.filtered_probs, FilterOptions, {"logits", "out"}),
        (
            fp.speculative_verify,
            VerifyOptions,
            {"draft_tokens", "draft_probs", "target_probs"},
        ),
    ],
)
def test_keywords_of_overloads_are_those_of_the_function(function, options, others):
    parameters = inspect.signature(function).parameters.values()
    types = {p.name: p.annotation for p in parameters if p.name not in others}
    assert types == {name: t.__forward_arg__ for name, t in options.__annotations__.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": None, "q_dtype": "float16", "causal": False, "softcap": 30.0},
        {"kv_dtype": "float8_e5m2", "kv_layout": "HND", "window_left": 7, "num_ctas": 3},
        {"o_dtype": "float32", "softmax_scale": 0.3, "batch_invariant": True, "page_size": 1},
        {"max_batch_size": 3, "max_qo_tokens": 5},
        {"lse_base2": True, "kernels": "general"},
    ],
)
def test_options_are_read_back(options):
    """As what makes the same object, with every default filled in."""
    dims = 8 if "kv_dtype" in options else (8, 16)
    attn = fp.Attention(4, 2, dims, device="cpu", **options)
    given = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": dims, "device": "cpu"} | options
    if "softmax_scale" in given:
        given["softmax_scale"] = pytest.approx(given["softmax_scale"])  # as a float32
    assert {name: attn.options[name] for name in given} == given
    again = fp.Attention(**attn.options)
    assert again.options == attn.options
    assert eval(repr(attn), {"Attention": fp.Attention}).options == attn.options
    assert None not in [attn.options[name] for name in ("kv_dtype", "o_dtype", "softmax_scale")]
    assert again.workspace_bytes == attn.workspace_bytes == fp.workspace_bytes(**attn.options)


def test_kernels_of_the_cpu_are_general():
    assert fp.Attention(4, 2, 64, device="cpu", kernels="general").options["kernels"] == "general"
    with pytest.raises(fp.UnsupportedError, match="^kernels: expected general .*, got hopper"):
        fp.Attention(4, 2, 64, device="cpu", kernels="hopper")
    supported, reason = fp.is_supported(4, 2, 64, device="cpu", kernels="hopper")
    assert not supported
    assert reason.startswith("kernels: ")


def test_workspace_bytes_raises_as_attention_does():
    with pytest.raises(ValueError, match="^num_qo_heads: "):
        fp.workspace_bytes(0, 1, 8, device="cpu")
    with pytest.raises(fp.UnsupportedError, match="^q_dtype: "):
        fp.workspace_bytes(1, 1, 8, q_dtype="int32", device="cpu")


def test_a_typed_program_runs(torch):
    """What type checkers accept; see check_types.py."""
    program = pathlib.Path(__file__).parent / "typed/accepted.py"
    subprocess.run([sys.executable, program], check=True)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (fp.Attention.plan, "qo_indptr kv_lens kv_indptr shared_prefixes mask_begin stream"),
        (
            fp.find_shared_prefixes,
            "qo_indptr kv_lens page_size block_table page_indptr page_indices",
        ),
        (
            fp.Attention.run,
            "q k v k_tail block_table page_indptr page_indices kv_lens topk_indices topk_lens mask "
            "sinks out lse "
            "return_lse q_scale k_scale v_scale stream pdl variant_arguments",
        ),
        (
            fp.append_paged_kv,
            "k v k_cache v_cache indptr kv_lens block_table page_indptr page_indices slot_mapping "
            "batch_indices positions "
            "kv_layout kv_dtype k_scale v_scale stream",
        ),
        (
            fp.rope_append_paged_kv,
            "q k v k_cache v_cache indptr kv_lens rope block_table page_indptr page_indices "
            "kv_layout kv_dtype k_scale v_scale out_q stream",
        ),
        (
            fp.apply_penalties,
            "logits history history_lens repetition presence frequency stream",
        ),
        (
            fp.speculative_verify,
            "draft_tokens draft_probs target_probs draft_parents seed offset out num_accepted "
            "nodes status stream",
        ),
        (fp.merge_states, "o_a lse_a o_b lse_b out lse base2 stream"),
    ],
)
def test_argument_names(function, names):
    assert list(defaults(function)) == names.split()


def test_defaults():
    """A kernel for the default dtype, on a machine with a GPU and on one without."""
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


def test_show_config_says_why_there_is_no_cuda():
    assert re.search(r"^cuda: (built for \d|not built \(\S.+\)$)", fp.show_config(), re.MULTILINE)


@pytest.mark.skipif(_core.built_for_cuda(), reason="has kernels for GPUs")
def test_a_gpu_that_the_build_has_no_kernels_for_is_named_once(monkeypatch):
    def attention(**options):
        return fp.Attention(1, 1, 8, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention()  # there is no GPU here
        monkeypatch.setattr(options, "GPU_FILES", ("/nowhere", __file__))
        monkeypatch.setattr(options, "_has_warned", False)
        attention(device="cpu")
    with pytest.warns(RuntimeWarning, match="although there is a GPU.*FLASHPLAN_CUDA=ON") as caught:
        attention()
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention()


def test_report_for_bugs():
    """python -m flashplan: the configuration, and what it runs beside; no framework is imported."""
    code = "import runpy, sys; runpy.run_module('flashplan', run_name='__main__')"
    code += "\nassert not {'torch', 'jax', 'cupy'} & set(sys.modules)"
    environment = os.environ | {"FLASHPLAN_MAX_CPU_ISA": "baseline", "CUDA_VISIBLE_DEVICES": ""}
    text = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    lines = text.strip().splitlines()
    assert all(re.match(r"[\w -]+: +\S", line) for line in lines)
    for line in (
        f"version: {fp.__version__}",
        "cpu kernels: cpu_baseline",
        f"numpy: {numpy.__version__}",
        f"python: {platform.python_version()} (CPython)",
        "FLASHPLAN_MAX_CPU_ISA: baseline",
        "CUDA_VISIBLE_DEVICES: (empty)",
    ):
        assert line in lines
    usage = subprocess.check_output([sys.executable, "-m", "flashplan", "--help"], text=True)
    assert usage.startswith("usage: python -m flashplan ") and "bug report" in usage


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"FLASHPLAN_NUM_THREADS": "3", "OMP_NUM_THREADS": "5"}, "3"),
        ({"OMP_NUM_THREADS": "5,2"}, "5"),
        ({"FLASHPLAN_NUM_THREADS": "0", "OMP_NUM_THREADS": "7"}, "7"),
        ({"FLASHPLAN_NUM_THREADS": " 3 "}, "3"),
        ({"FLASHPLAN_NUM_THREADS": "many"}, "1"),
        ({"FLASHPLAN_NUM_THREADS": "3abc"}, "1"),
        ({"FLASHPLAN_NUM_THREADS": "3.5", "OMP_NUM_THREADS": "4"}, "4"),
        ({"FLASHPLAN_NUM_THREADS": "99999999999"}, "1"),
        ({"FLASHPLAN_NUM_THREADS": "", "OMP_NUM_THREADS": "-2"}, "1"),
        ({}, "1"),
    ],
)
def test_num_threads_of_the_environment(environment, expected):
    """Else one for each processor that the process may use."""
    program = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "import flashplan; print(flashplan.get_num_threads())"
    )
    names = ("FLASHPLAN_NUM_THREADS", "OMP_NUM_THREADS")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    output = subprocess.run(
        [sys.executable, "-c", program], env=inherited | environment, capture_output=True, text=True
    )
    assert output.stdout.strip() == expected, output.stderr


def test_num_threads():
    before = fp.get_num_threads()
    assert before == len(os.sched_getaffinity(0))
    fp.set_num_threads(3)
    assert fp.get_num_threads() == 3
    fp.set_num_threads(before)


class DeviceOf:
    """Looks like a device of JAX, or of CuPy where there is no platform."""

    def __init__(self, platform=None):
        self.id = 7
        if platform:
            self.platform, self.local_hardware_id = platform, 1

    def __str__(self):
        return "TFRT_CPU_7"


def test_device_by_name_or_object(torch):
    assert to_cuda_device("cpu") is to_cuda_device(torch.device("cpu")) is None
    assert to_cuda_device("cuda") == 0
    assert to_cuda_device("cuda:3") == to_cuda_device(torch.device("cuda", 3)) == 3
    assert to_cuda_device(DeviceOf()) == 7
    assert to_cuda_device(DeviceOf("gpu")) == 1
    assert to_cuda_device(DeviceOf("cpu")) is None


def test_jax_device(jax):
    assert to_cuda_device(jax.devices("cpu")[0]) is None


def test_is_supported():
    assert fp.is_supported(num_qo_heads=32, num_kv_heads=8, head_dim=128, device="cpu") == (
        True,
        "",
    )
