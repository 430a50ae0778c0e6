# SPDX-License-Identifier: Apache-2.0
"""Random valid calls of the norms and activations."""

import numpy as np

import flashplan as fp
import row_cases
from misuse.calls import Call, pick
from misuse.capsules import EIGHT_BIT_FLOATS, dtype_fields
from misuse.finding import Finding


class Rows(Call):
    """What has a weight and perhaps a bias for each element of a row, written to `out`."""

    related = {"x": ("weight", "bias", "out"), "weight": ("bias",)}
    written = ("out",)
    in_place = (("out", "x"),)
    optional = ("weight", "bias")
    numbers = ("eps", "scale", "out_dtype")
    dtypes = {"out": EIGHT_BIT_FLOATS}
    names_of_vectors = ("weight",)
    width = 1  # of x, by that of the output

    def __init__(self, rng):
        super().__init__(rng)
        outer = pick(rng, (), (3,), (2, 3), (2, 0), (2, 1, 3))
        self.dtype = pick(rng, "float32", "float16", "bfloat16")
        self.shape = (*outer, pick(rng, 1, 8, 33, 300))
        self.place_rows("x", (*outer, self.width * self.shape[-1]))
        for name in self.names_of_vectors:
            self.place_rows(name, self.shape[-1:])
        if self.names_of_vectors == ("weight",) and self.dtype != "float32":
            self.dtypes = {**self.dtypes, "weight": (dtype_fields("float32"),)}
        if "out" in self.written:
            self.place("out", np.full(self.shape, np.nan, self.dtype))
        self.expected = self.compute(*(self.array(n).copy() for n in self.tensors if n != "out"))

    def place_rows(self, name, shape):
        self.place(name, self.rng.standard_normal(shape, np.float32).astype(self.dtype))

    def verify(self):
        try:
            row_cases.assert_close(self.array(self.written[0]), self.expected, self.dtype)
        except AssertionError as error:
            raise Finding(f"differs from the reference: {type(self).__name__}: {error}") from error


class RmsNorm(Rows):
    """rmsnorm()."""

    numbers = ("eps", "gemma", "scale", "out_dtype")

    def compute(self, x, weight):
        return row_cases.rmsnorm(x, weight, 1e-6)

    def invoke(self, **changes):
        return fp.rmsnorm(**self.arguments() | changes)


class AddRmsNorm(Rows):
    """add_rmsnorm(), which writes its inputs."""

    related = {"x": ("residual", "weight"), "residual": ("x", "weight")}
    written = ("x", "residual")
    in_place = ()
    numbers = ("eps", "gemma", "scale")
    dtypes = {}
    names_of_vectors = ("weight",)

    def place_rows(self, name, shape):
        super().place_rows(name, shape)
        if name == "x":
            super().place_rows("residual", shape)

    def compute(self, x, residual, weight):
        total = (x.astype(np.float32) + residual.astype(np.float32)).astype(self.dtype)
        return row_cases.rmsnorm(total, weight, 1e-6)

    def invoke(self, **changes):
        return fp.add_rmsnorm(**self.arguments() | changes)


class AddRmsNormTo(AddRmsNorm):
    """add_rmsnorm() with an output of its own, which writes x no more."""

    related = dict.fromkeys(("x", "residual"), ("x", "residual", "weight", "out"))
    written = ("out", "residual")
    in_place = (("out", "x"),)
    optional = ("weight", "out")
    numbers = ("eps", "gemma", "scale", "out_dtype")
    dtypes = {"out": EIGHT_BIT_FLOATS}


class LayerNorm(Rows):
    """layernorm()."""

    names_of_vectors = ("weight", "bias")

    def compute(self, x, weight, bias):
        return row_cases.layernorm(x, weight, bias, 1e-5)

    def invoke(self, **changes):
        return fp.layernorm(**self.arguments() | changes)


class Gated(Rows):
    """An activation of the first half of a row, times the second half."""

    in_place = ()
    numbers = ("scale", "out_dtype")
    dtypes = {"out": EIGHT_BIT_FLOATS}
    names_of_vectors = ()
    width = 2
    functions = {
        "silu": fp.silu_and_mul,
        "gelu": fp.gelu_and_mul,
        "gelu_tanh": fp.gelu_tanh_and_mul,
    }

    def compute(self, x):
        self.name = pick(self.rng, *self.functions)
        return row_cases.gated(self.name, x)

    def invoke(self, **changes):
        return self.functions[self.name](**self.arguments() | changes)
