# SPDX-License-Identifier: Apache-2.0
"""The kernel's sources are what NVRTC can take: a variant of the user's own, without nvcc or a GPU.

NVRTC comes from PyPI (nvidia-cuda-nvrtc).
"""

import ctypes
import os
import pathlib
from importlib import metadata

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# Every other key, and weights of a sigmoid instead of softmax (FlashSigmoid).
SOURCE = """
#include "kernels/device/attention.h"

using namespace flashplan;
using namespace flashplan::device;

struct SigmoidOfEveryOtherKey : Standard {
  static constexpr bool kUseSoftmax = false;
  static constexpr bool kTransformsQuery = true;
  static constexpr bool kTransformsKey = true;
  static constexpr bool kTransformsValue = true;
  static constexpr bool kTransformsLogits = true;
  static constexpr bool kMasksLogits = true;
  static constexpr bool kTransformsOutput = true;

  explicit FLASHPLAN_DEVICE SigmoidOfEveryOtherKey(const AttentionParams& params)
      : Standard(params), scale(params.variant.logits_scale) {}
  FLASHPLAN_DEVICE float logit(float product, const LogitPosition& at) const {
    return 1.0F / (1.0F + exp2f(at.qo_head - product * scale * kLog2e));
  }
  FLASHPLAN_DEVICE bool visible(const LogitPosition& at) const {
    return (at.key - at.query) % 2 == 0;
  }
  FLASHPLAN_DEVICE float query(float x, const ElementPosition& at) const { return x + at.dim; }
  FLASHPLAN_DEVICE float key(float x, const ElementPosition& at) const { return x + at.token; }
  FLASHPLAN_DEVICE float value(float x, const ElementPosition& at) const { return x + at.head; }
  FLASHPLAN_DEVICE float output(float x, const ElementPosition& at) const {
    return at.token + at.head + at.dim == 0 ? -x : x;
  }

  float scale;
};

using Kernel =
    Traits<DType::kBFloat16, DType::kBFloat16, HEAD_DIM, HEAD_DIM, SigmoidOfEveryOtherKey>;
"""
KERNEL = b"attention_kernel<Kernel>"

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


def compiled(nvrtc, architecture, head_dim, source=SOURCE, kernel=KERNEL):
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


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_90a"])
def test_a_variant_of_the_user_compiles(nvrtc, architecture, head_dim):
    worked, log, cubin = compiled(nvrtc, architecture, head_dim)
    assert worked, log
    assert log == ""  # no warnings
    assert cubin.startswith(b"\x7fELF")


def test_the_hopper_kernel_compiles(nvrtc):
    worked, log, cubin = compiled(nvrtc, "sm_90a", 128, HOPPER_SOURCE, HOPPER_KERNEL)
    assert worked, log
    assert log == ""
    assert cubin.startswith(b"\x7fELF")
