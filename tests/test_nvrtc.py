# SPDX-License-Identifier: Apache-2.0
"""The kernel's sources are what NVRTC can take: a variant of the user's own, without nvcc or a GPU.

NVRTC comes from PyPI (nvidia-cuda-nvrtc).
"""

import os
import subprocess
import sys
from importlib import metadata

import pytest

import flashplan as fp
from flashplan._core import DType
from flashplan.nvrtc import find_nvrtc
from variant_cases import VARIANTS


@pytest.fixture(scope="module")
def nvrtc():
    try:
        metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:
        if os.environ.get("CI"):
            raise
        pytest.skip("nvidia-cuda-nvrtc is not installed")


@pytest.fixture
def gpu_code(nvrtc, monkeypatch, tmp_path):
    """A variant's cubin, by the way that Attention takes. Optimised little, to be quick."""
    monkeypatch.setenv("FLASHPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASHPLAN_NVRTC_FLAGS", "--Ofast-compile=max")
    find_nvrtc()

    def compile_for(variant, architecture, head_dim=64, **options):
        dtype = DType.bfloat16
        arguments = {"q_dtype": dtype, "kv_dtype": dtype, "softcap": False} | options
        dims = {"head_dim_qk": head_dim, "head_dim_vo": head_dim}
        return variant._core.gpu_code(architecture, **dims | arguments)

    return compile_for


@pytest.mark.parametrize(
    ("name", "architecture", "options"),
    [
        ("elements", "90a", {"head_dim": 128, "kv_dtype": DType.float8_e4m3fn}),
        ("biased", "80", {}),
        ("prefix_lm", "86", {"softcap": True}),
        ("biased", "90a", {"head_dim": 128, "few_rows_alone": True}),
        ("elements", "86", {"head_dim": 256, "few_rows_alone": True}),
        ("sigmoid", "90a", {"head_dim": 256}),
    ],
)
def test_a_variant_of_the_user_compiles(gpu_code, tmp_path, name, architecture, options):
    variant = VARIANTS[name].variant
    cubin = gpu_code(variant, architecture, **options)
    assert variant._core.compile_log() == ""  # no warnings
    assert cubin.startswith(b"\x7fELF")
    (file,) = tmp_path.iterdir()
    changed = file.stat().st_mtime_ns
    assert gpu_code(variant, architecture, **options) == cubin  # from the cache
    assert [file] == list(tmp_path.iterdir())
    assert file.stat().st_mtime_ns >= changed


@pytest.mark.parametrize(
    ("place", "bodies"),
    [
        ("logits(2): error", {"logits": "float y = x;\nreturn nonsense;"}),
        ("mask(1): error", {"mask": "return key <= quary;"}),
        ("value(4): error", {"value": "if (dim)\n  return x;\n"}),
    ],
)
def test_the_compiler_shows_the_users_own_lines(gpu_code, place, bodies):
    variant = fp.Variant("broken", **bodies)
    with pytest.raises(ValueError, match=r"^variant: .*\"broken\"") as caught:
        gpu_code(variant, "90a")
    assert f"broken.{place}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "rope"),
    [("biased", fp.Rope()), ("elements", fp.Rope(rotary_dim=6, interleaved=True))],
)
def test_rotations_compile(gpu_code, name, rope):
    variant = VARIANTS[name].variant
    assert gpu_code(variant, "80", rope=rope._native).startswith(b"\x7fELF")
    assert variant._core.compile_log() == ""


@pytest.mark.parametrize(
    ("name", "head_dim", "rope"),
    [("biased", 128, fp.Rope()), ("ends", 64, fp.Rope(rotary_dim=6, interleaved=True))],
)
def test_rotations_compile_for_hopper(gpu_code, monkeypatch, name, head_dim, rope):
    """Optimised as for users: the log would say that products wait for each other."""
    monkeypatch.delenv("FLASHPLAN_NVRTC_FLAGS")
    variant = VARIANTS[name].variant
    cubin = gpu_code(variant, "90a", head_dim, family="sm90", rope=rope._native)
    assert cubin.startswith(b"\x7fELF")
    assert variant._core.compile_log() == ""


def test_every_function_is_there(gpu_code):
    functions = (
        "exp(x) + exp2(x) + log(x) + log2(x) + tanh(x) + sqrt(x) + rsqrt(x) + pow(x, 2) + sin(x) + "
        "cos(x) + erf(x) + floor(x) + ceil(x) + abs(-x) + abs(-3) + min(x, 2) + max(2, x) + "
        "min(4, 5) + infinity()"
    )
    assert gpu_code(fp.Variant("all", output=f"return {functions};"), "80")


def test_nvrtc_of_another_place(nvrtc):
    """In a process of its own: what is loaded stays."""
    program = (
        "import flashplan as fp\n"
        "from flashplan import _core\n"
        "try:\n"
        "    fp.variants.alibi._core.gpu_code('80', *[_core.DType.float16] * 2, 64, 64, False)\n"
        "except fp.UnsupportedError as error:\n"
        "    print(error)\n"
    )
    environment = os.environ | {"FLASHPLAN_NVRTC": "/nonexistent.so"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("variant: expected NVRTC for a GPU (pip install")
    assert "/nonexistent.so" in done.stdout


@pytest.mark.parametrize(("name", "head_dim"), [("ends", 64), ("biased", 128), ("sigmoid", 64)])
def test_the_hopper_kernel_takes_all_but_keys_and_values(gpu_code, monkeypatch, name, head_dim):
    """Optimised as for users: the log would say that products wait for each other."""
    monkeypatch.delenv("FLASHPLAN_NVRTC_FLAGS")
    variant = VARIANTS[name].variant
    assert gpu_code(variant, "90a", head_dim, family="sm90").startswith(b"\x7fELF")
    assert variant._core.compile_log() == ""
