# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from flashplan import _core
from flashplan.compiled import not_traced
from flashplan.handles import new_handle
from flashplan.outputs import given_or_new
from flashplan.rope_config import rope_arguments
from flashplan.types import KvDType, Stream, Tensor, TensorT
from flashplan.values import to_bool, to_dtype, to_float, to_int


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding: which dims of a head are rotated, and by which angles.

    Pair i of the rotary_dim / 2 pairs is rotated by position * theta^(-2 i / rotary_dim) radians,
    changed by `scaling`.

    Args:
        theta: base of the angles; above 1.
        scale: how many times longer the context is than the model was first trained on; at least
            1e-6.
        rotary_dim: how many dims of a head are rotated, the first ones: even, at most 512; default:
            all.
        interleaved: pairs are dims (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2).
        scaling: "linear" divides all frequencies by `scale`; "llama3" (Llama 3.1) only those of
            wavelengths near original_length and above it; "yarn" (Peng et al., 2023) only those
            that make few rotations in original_length.
        original_length: "llama3", "yarn": number of positions that the model was first trained on.
        low_freq_factor, high_freq_factor: "llama3": wavelengths above original_length /
            low_freq_factor are scaled, below original_length / high_freq_factor they are not.
        beta_fast, beta_slow: "yarn": dims of fewer rotations than beta_slow are scaled, of more
            than beta_fast they are not. If all dims make more rotations than beta_fast (a small
            theta with a long original_length), none is scaled; transformers then scales all.
        truncate: "yarn": whether the two dims at which scaling begins and ends are rounded,
            outwards; gpt-oss does not round them.
        attention_factor: with "yarn" or `frequencies`: factor of cos and sin, a normal float32 > 0;
            default: with "yarn" 1 + ln(scale) / 10 for scale > 1, else 1.
        mscale, mscale_all_dim: "yarn": DeepSeek's form of attention_factor, m(mscale) /
            m(mscale_all_dim) with m(x) = 1 + x ln(scale) / 10. Both or none, and not together with
            attention_factor.
        frequencies: rotary_dim / 2 numbers from 0 to 1e6, radians per position of each pair
            (LongRoPE); not together with theta, scale and scaling.

    It can be pickled and copied.

    Raises:
        ValueError, TypeError: a value has the wrong type, scaling is none of the three, or
            arguments exclude each other. Ranges are checked by the calls that take a Rope, since
            they know the head dim.

    Examples:
        >>> fp.Rope(theta=500000.0, scaling="llama3", scale=8.0).scaling
        'llama3'
    """

    theta: float = 10000.0
    scale: float = 1.0
    rotary_dim: int | None = None
    interleaved: bool = False
    scaling: str = "linear"
    original_length: float = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    frequencies: Sequence[float] | None = None

    @staticmethod
    def from_config(config: Any, layer_type: str | None = None, length: int | None = None) -> Rope:
        """Reads the rotation of a model of Hugging Face transformers from its configuration.

        Args:
            config: the model's configuration, such as `LlamaConfig`; if it is nested, its text
                configuration.
            layer_type: needed if layers rotate in different ways: the type of layers, such as
                "sliding_attention" of Gemma 3.
            length: for "longrope" and "dynamic", whose frequencies depend on it: the longest
                sequence, in tokens; default: the length that the model was first trained on.

        Raises:
            ValueError: layer_type is missing, or none that the model has.
            UnsupportedError: a kind of rotation that a Rope can not express, such as that of
                several coordinates for each token (MRoPE).
        """
        return Rope(**rope_arguments(config, layer_type, length))

    def __post_init__(self) -> None:
        if self.frequencies is not None:
            numbers = tuple(to_float("rope.frequencies", x) for x in self.frequencies)
            object.__setattr__(self, "frequencies", numbers)
        self._native  # noqa: B018 - wrong arguments raise here
        self._handle  # noqa: B018 - torch.compile can read it, but not make it

    def __reduce__(self) -> tuple[type[Rope], tuple[Any, ...]]:
        return Rope, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @functools.cached_property
    def _handle(self) -> int:
        return new_handle(self)

    @functools.cached_property
    def _native(self) -> _core.Rope:
        core = _core.Rope()
        for name in ("theta", "scale", "original_length", "low_freq_factor", "high_freq_factor"):
            setattr(core, name, to_float(f"rope.{name}", getattr(self, name)))
        core.beta_fast = to_float("rope.beta_fast", self.beta_fast)
        core.beta_slow = to_float("rope.beta_slow", self.beta_slow)
        if self.rotary_dim is not None:
            core.rotary_dim = to_int("rope.rotary_dim", self.rotary_dim)
            if core.rotary_dim < 2:
                raise ValueError(f"rope.rotary_dim: expected >= 2, got {core.rotary_dim}")
        core.interleaved = to_bool("rope.interleaved", self.interleaved)
        scalings = {scaling.name: scaling for scaling in _core.RopeScaling}
        if not isinstance(self.scaling, str) or self.scaling not in scalings:
            expected = ", ".join(map(repr, scalings))
            raise ValueError(f"rope.scaling: expected one of {expected}, got {self.scaling!r}")
        core.scaling = scalings[self.scaling]
        core.truncate = to_bool("rope.truncate", self.truncate)
        if self.frequencies is not None:
            for name in ("theta", "scale", "scaling"):
                if getattr(self, name) != getattr(Rope, name):
                    raise ValueError(
                        f"rope.{name}: expected none beside frequencies, got {getattr(self, name)}"
                    )
            core.set_frequencies(self.frequencies)
        factor = self._attention_factor()
        if factor is not None:
            core.attention_factor = to_float("rope.attention_factor", factor)
            if not core.attention_factor > 0:
                raise ValueError(f"rope.attention_factor: expected > 0, got {factor}")
        return core

    def _attention_factor(self) -> float | None:
        if self.mscale is None and self.mscale_all_dim is None:
            return self.attention_factor
        if self.attention_factor is not None:
            raise ValueError(
                f"rope.attention_factor: expected none beside mscale, got {self.attention_factor}"
            )
        factors = []
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is None:
                raise ValueError(f"rope.{name}: expected a number, as the other one is, got None")
            by_scale = math.log(self.scale) if self.scale > 1 else 0.0
            factors.append(1 + 0.1 * to_float(f"rope.{name}", value) * by_scale)
        return factors[0] / factors[1]


@not_traced("call flashplan.torch.apply_rope")
def apply_rope(
    q: TensorT,
    k: TensorT,
    positions: Tensor,
    rope: Rope | None = None,
    *,
    cos_sin_cache: Tensor | None = None,
    interleaved: bool = False,
    out_q: TensorT | None = None,
    out_k: TensorT | None = None,
    out_dtype: KvDType | None = None,
    q_scale: float | Tensor = 1.0,
    k_scale: float | Tensor = 1.0,
    stream: Stream | None = None,
) -> tuple[TensorT, TensorT]:
    """Rotates queries and keys by the positions of their tokens, in float32.

    Args:
        q: [tokens, num_qo_heads, head_dim] float32, float16 or bfloat16 (also as uint16 memory).
        k: [tokens, num_kv_heads, head_dim] of q's dtype.
        positions: [tokens] int32 or int64, within ±2^40: beyond, angles are wrong by more than 1e-4
            radians. They are checked on the CPU.
        rope: which dims are rotated, and by which angles; or
        cos_sin_cache: [positions, rotary_dim] float32, a table like FlashInfer's: row p has the
            cosines of all rotary_dim / 2 pairs at position p, then their sines. rotary_dim is even,
            and at most 512. Positions outside of the table are an error on the CPU; on a GPU their
            tokens are not rotated.
        interleaved: with cos_sin_cache: pairs are dims (2 i, 2 i + 1) instead of (i, i +
            rotary_dim / 2).
        out_q, out_k: shaped like q and k, written; q and k themselves, or memory apart from all
            arguments; default: new tensors in q's framework.
        out_dtype: q's, float8_e4m3fn or float8_e5m2; default: q's. 8-bit results are those of
            `quantize_fp8` of the rotated q and k. It also says what outputs of uint8 store.
        q_scale, k_scale: with 8-bit results: q and k are divided by these, normal numbers > 0 or
            float32 tensors [1] or [num_kv_heads] on q's device. The num_qo_heads / num_kv_heads
            neighbouring heads of q that belong to one kv head share its scale.
        stream: as in `Attention`; default: the current one of q's framework. None on the CPU.

    Returns:
        (q, k), rotated.

    Raises:
        ValueError, TypeError: an argument is malformed. Nothing was written.

    Examples:
        >>> q = k = np.ones((1, 1, 2), np.float32)
        >>> rotated, _ = fp.apply_rope(q, k, np.array([1], np.int32), fp.Rope())  # by 1 radian
        >>> rotated.ravel()  # cos(1) - sin(1), cos(1) + sin(1)
        array([-0.301..., 1.381...], dtype=float32)
    """
    is_interleaved = to_bool("interleaved", interleaved)
    if cos_sin_cache is not None and rope is not None:
        raise TypeError("rope: expected None beside cos_sin_cache, got a Rope")
    if cos_sin_cache is None:
        if not isinstance(rope, Rope):
            raise TypeError(f"rope: expected a Rope, got {type(rope).__name__}")
        if is_interleaved:
            raise ValueError(
                "interleaved: expected False beside a Rope, which has its own, got True"
            )
    stored = None if out_dtype is None else to_dtype("out_dtype", out_dtype)
    name = None if stored is None else stored.name
    rotated_q, finish_q = given_or_new(out_q, q, dtype=name)
    rotated_k, finish_k = given_or_new(out_k, k, dtype=name)
    results = (rotated_q, rotated_k, stored, q_scale, k_scale, stream)
    if rope is None:
        _core.apply_rope_table(q, k, positions, cos_sin_cache, is_interleaved, *results)
    else:
        _core.apply_rope(q, k, positions, rope._native, *results)
    return finish_q(rotated_q), finish_k(rotated_k)
