# SPDX-License-Identifier: Apache-2.0
"""The kernel's sources are what NVRTC can take: a variant of the user's own, without nvcc or a GPU.

NVRTC comes from PyPI (nvidia-cuda-nvrtc).
"""

import ctypes
import os
import pathlib
import subprocess
import sys
from importlib import metadata

import pytest

import flashplan as fp
from flashplan._core import DType
from flashplan.nvrtc import find_nvrtc
from variant_cases import VARIANTS

ROOT = pathlib.Path(__file__).parent.parent

HOPPER_SOURCE = """
#include "kernels/device/shape.h"
#include "kernels/device/sm90_attention.h"

using namespace flashplan;
using namespace flashplan::device;

using Kernel = Traits<DType::kFloat16, DType::kFloat16, HEAD_DIM, HEAD_DIM, Softcap>;
"""
HOPPER_KERNEL = b"sm90_attention_kernel<Kernel>"

# NVRTC has no C++ standard library; this is the one header of it that device code includes.
CSTDINT = b"""
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;
"""


@pytest.fixture(scope="module")
def nvrtc():
    try:
        files = metadata.files("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:
        if os.environ.get("CI"):
            raise
        pytest.skip("nvidia-cuda-nvrtc is not installed")
    path = next(file for file in files if file.name.startswith("libnvrtc.so."))
    return ctypes.CDLL(str(path.locate()))


def strings(*values):
    return (ctypes.c_char_p * len(values))(*values)


def compiled(nvrtc, architecture, head_dim, source, kernel):
    """(whether it worked, log, cubin)"""
    program, size, name = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_char_p()
    headers, names = strings(CSTDINT), strings(b"cstdint")
    assert not nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"variant.cu", 1, headers, names
    )
    assert not nvrtc.nvrtcAddNameExpression(program, kernel)
    options = [
        f"--gpu-architecture={architecture}",
        "--std=c++20",
        f"--define-macro=HEAD_DIM={head_dim}",
        "--device-as-default-execution-space",  # constexpr functions of public headers
        f"--include-path={ROOT / 'src'}",
        f"--include-path={ROOT / 'include'}",
    ]
    failed = nvrtc.nvrtcCompileProgram(
        program, len(options), strings(*(option.encode() for option in options))
    )
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    cubin = b""
    if not failed:
        assert not nvrtc.nvrtcGetLoweredName(program, kernel, ctypes.byref(name))
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        assert name.value in cubin.raw
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return not failed, log.value.decode(), bytes(cubin)


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


def test_the_hopper_kernel_compiles(nvrtc):
    worked, log, cubin = compiled(nvrtc, "sm_90a", 128, HOPPER_SOURCE, HOPPER_KERNEL)
    assert worked, log
    assert log == ""
    assert cubin.startswith(b"\x7fELF")
