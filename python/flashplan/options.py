# SPDX-License-Identifier: Apache-2.0
"""The names and defaults of the options. Checks options, and converts them for the core."""

from __future__ import annotations

import os
import warnings
from typing import Any, TypedDict

from flashplan import _core
from flashplan.nvrtc import find_nvrtc
from flashplan.rope import Rope
from flashplan.types import Device, FloatDType, KernelGroup, KvDType, KvLayout, MlaDType
from flashplan.values import DTYPES, MLA_DTYPES, is_hnd, to_bool, to_dtype, to_float, to_int
from flashplan.variant import Variant

# Files of which one exists if NVIDIA's driver is loaded: the first on Linux, the second in WSL.
GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")


class Options(TypedDict, total=False):
    """The keyword arguments of `Attention`, except workspace."""

    page_size: int | None
    q_dtype: KvDType
    kv_dtype: MlaDType | None
    o_dtype: FloatDType | None
    causal: bool
    window_left: int
    custom_mask: bool
    shared_kv: bool
    topk: int | None
    softmax_scale: float | None
    softcap: float
    variant: Variant | None
    rope: Rope | None
    kv_layout: KvLayout
    max_batch_size: int
    max_qo_tokens: int
    device: Device | None
    num_ctas: int | None
    batch_invariant: bool
    lse_base2: bool
    kernels: KernelGroup | None


def to_cuda_device(device: Any) -> int | None:
    """The index of a CUDA device, None for the CPU. By default the first GPU, if there is one.

    `device`: a name, or a device of PyTorch, CuPy or JAX.
    """
    if device is None:
        if _core.cuda_device_count():
            return 0
        if not _core.built_for_cuda() and any(map(os.path.exists, GPU_FILES)):
            _warn_of_unused_gpu()
        return None
    text = str(device)
    if hasattr(device, "id"):  # a device of CuPy, which are all GPUs, or of JAX
        platform = getattr(device, "platform", "gpu")
        index = getattr(device, "local_hardware_id", None)
        text = "cpu" if platform == "cpu" else f"cuda:{device.id if index is None else index}"
    kind, _, index = text.partition(":")
    if kind == "cpu" and index in ("", "0"):
        return None
    if kind == "cuda" and (index == "" or (index.isascii() and index.isdigit())):
        return to_int("device", int(index or 0))
    raise ValueError(f"device: expected 'cpu', 'cuda' or 'cuda:<index>', got {device!r}")


_has_warned = False


def _warn_of_unused_gpu() -> None:
    """Warns once per process that there is a GPU which this build can not use."""
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    warnings.warn(
        "flashplan uses the CPU although there is a GPU: this build has no CUDA kernels "
        "(flashplan.show_config() says why). Install the wheel for CUDA, or build one where nvcc "
        "is: pip install . -C cmake.define.FLASHPLAN_CUDA=ON. device='cpu' silences this warning.",
        RuntimeWarning,
        stacklevel=5,  # names the line that calls Attention()
    )


def to_head_dims(head_dim: Any) -> tuple[int, int]:
    """Reads the option head_dim, an int or a pair. Returns (qk, vo)."""
    if not isinstance(head_dim, tuple | list):
        qk = vo = to_int("head_dim", head_dim)
    elif len(head_dim) == 2:
        qk, vo = (to_int("head_dim", dim) for dim in head_dim)
    else:
        raise ValueError(f"head_dim: expected an int or (qk, vo), got {head_dim!r}")
    if min(qk, vo) < 1:
        raise ValueError(f"head_dim: expected >= 1, got {head_dim!r}")
    return qk, vo


def make_options(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int | tuple[int, int],
    *,
    page_size: int | None = 16,
    q_dtype: KvDType = "bfloat16",
    kv_dtype: MlaDType | None = None,
    o_dtype: FloatDType | None = None,
    causal: bool = True,
    window_left: int = -1,
    custom_mask: bool = False,
    shared_kv: bool = False,
    topk: int | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    variant: Variant | None = None,
    rope: Rope | None = None,
    kv_layout: KvLayout = "NHD",
    max_batch_size: int = 256,
    max_qo_tokens: int = 8192,
    device: Device | None = None,
    num_ctas: int | None = None,
    batch_invariant: bool = False,
    lse_base2: bool = False,
    kernels: KernelGroup | None = None,
) -> _core.Options:
    """Checks the options of `Attention`, and converts them to the core's class."""
    options = _core.Options()
    options.num_qo_heads = to_int("num_qo_heads", num_qo_heads)
    options.num_kv_heads = to_int("num_kv_heads", num_kv_heads)
    options.head_dim_qk, options.head_dim_vo = to_head_dims(head_dim)
    if page_size is not None:
        options.page_size = to_int("page_size", page_size)
        if options.page_size < 1:
            raise ValueError(
                f"page_size: expected >= 1, or None for ragged k and v, got {page_size}"
            )
    options.q_dtype = to_dtype("q_dtype", q_dtype)
    options.kv_dtype = options.q_dtype
    if kv_dtype is not None:
        options.kv_dtype = to_dtype("kv_dtype", kv_dtype, MLA_DTYPES if shared_kv else DTYPES)
    if o_dtype is not None:
        options.o_dtype = to_dtype("o_dtype", o_dtype)
    elif not options.q_dtype.name.startswith("float8"):  # for 8-bit queries the core chooses
        options.o_dtype = options.q_dtype
    options.causal = to_bool("causal", causal)
    options.window_left = to_int("window_left", window_left)
    options.custom_mask = to_bool("custom_mask", custom_mask)
    options.shared_kv = to_bool("shared_kv", shared_kv)
    if topk is not None:
        options.topk = to_int("topk", topk)
        if options.topk < 1:
            raise ValueError(f"topk: expected >= 1, or None for all keys, got {topk}")
    if softmax_scale is not None:
        options.softmax_scale = to_float("softmax_scale", softmax_scale)
    options.softcap = number = to_float("softcap", softcap)
    if number != 0 and options.softcap == 0:  # rounded to 0, which would turn the softcap off
        raise ValueError(f"softcap: expected 0 or a normal float32 > 0, got {softcap}")
    if variant is not None:
        if not isinstance(getattr(variant, "_core", None), _core.Variant):
            raise TypeError(f"variant: expected a Variant, got {type(variant).__name__}")
        options.variant = variant._core
    if rope is not None:
        if not isinstance(getattr(rope, "_native", None), _core.Rope):
            raise TypeError(f"rope: expected a Rope, got {type(rope).__name__}")
        options.rope = rope._native
    options.hnd = is_hnd(kv_layout)
    options.max_batch_size = to_int("max_batch_size", max_batch_size)
    options.max_qo_tokens = to_int("max_qo_tokens", max_qo_tokens)
    options.cuda_device = to_cuda_device(device)
    if (variant is not None or rope is not None) and options.cuda_device is not None:
        find_nvrtc()
    if num_ctas is not None:
        options.num_ctas = to_int("num_ctas", num_ctas)
        if options.num_ctas < 1:
            raise ValueError(f"num_ctas: expected >= 1, got {num_ctas}")
    options.batch_invariant = to_bool("batch_invariant", batch_invariant)
    options.lse_base2 = to_bool("lse_base2", lse_base2)
    if kernels is not None:
        if kernels not in ("general", "hopper"):
            raise ValueError(f"kernels: expected 'general', 'hopper' or None, got {kernels!r}")
        options.kernels = getattr(_core.KernelGroup, kernels)
    return options


def options_from(
    num_qo_heads: int, num_kv_heads: int, head_dim: int | tuple[int, int], options: Options
) -> _core.Options:
    """Calls make_options() with a caller's keyword arguments. TypeError for an unknown name."""
    for name in options:
        if name not in Options.__annotations__:
            known = ", ".join(Options.__annotations__)
            raise TypeError(f"{name}: expected an option ({known}), got an unknown one")
    return make_options(num_qo_heads, num_kv_heads, head_dim, **options)


def options_dict(
    options: _core.Options, variant: Variant | None, rope: Rope | None
) -> dict[str, Any]:
    """The keyword arguments of `Attention` that give these options, with this variant and rope."""
    device = options.cuda_device
    head_dims = (options.head_dim_qk, options.head_dim_vo)
    return {
        "num_qo_heads": options.num_qo_heads,
        "num_kv_heads": options.num_kv_heads,
        "head_dim": head_dims[0] if head_dims[0] == head_dims[1] else head_dims,
        "page_size": options.page_size or None,
        "q_dtype": options.q_dtype.name,
        "kv_dtype": options.kv_dtype.name,
        "o_dtype": options.o_dtype.name,
        "causal": options.causal,
        "window_left": options.window_left,
        "custom_mask": options.custom_mask,
        "shared_kv": options.shared_kv,
        "topk": options.topk or None,
        "softmax_scale": options.softmax_scale,
        "softcap": options.softcap,
        "variant": variant,
        "rope": rope,
        "kv_layout": "HND" if options.hnd else "NHD",
        "max_batch_size": options.max_batch_size,
        "max_qo_tokens": options.max_qo_tokens,
        "device": "cpu" if device is None else f"cuda:{device}",
        "num_ctas": options.num_ctas,
        "batch_invariant": options.batch_invariant,
        "lse_base2": options.lse_base2,
        "kernels": None if options.kernels == _core.KernelGroup.all else options.kernels.name,
    }
