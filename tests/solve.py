# SPDX-License-Identifier: Apache-2.0
"""Runs a Case with flashplan, in any framework, with outputs and a workspace full of NaN."""

import functools
import zlib

import numpy as np

import flashplan as fp
import poison
import reference
from inputs import make_inputs

FEW_NUMBERS = 32  # elements of o for each query


@functools.lru_cache(maxsize=1)
def problem(case, seed):
    """(inputs, exact, twin): inputs of a case, and the results of the reference and its twin."""
    inputs = make_inputs(case, [seed, zlib.crc32(str(case).encode())])
    return inputs, *solution(case, inputs)


def solution(case, inputs):
    """(exact, twin): the results of the reference and its twin for inputs of a case.

    The twin of a few numbers may err little by luck: it errs at least by two standard deviations of
    what the rounding of weights to the dtype of products costs.

    The twin of changed queries or keys is, for each result, that one of two which errs more: its
    logits are rounded too, or the changed tensors alone. A kernel errs as the latter, and the
    rounding of logits may happen to make up for it.
    """
    requests = inputs.requests(case.kv_layout)
    options = case.reference_options() | inputs.scales(case)
    options |= {"masks": inputs.masks(case), "sinks": inputs.sinks}
    options["arguments"] = inputs.variant_arguments
    exact = reference.batch_attention(inputs.q, requests, inputs.qo_indptr, **options)
    twin = reference.batch_attention(
        inputs.q, requests, inputs.qo_indptr, **options, dtype=case.product_dtype
    )
    if case.rope or case.variant:
        second = reference.batch_attention(
            inputs.q,
            requests,
            inputs.qo_indptr,
            **options,
            dtype="float32",
            stored_dtype=case.product_dtype,
        )
        with np.errstate(invalid="ignore"):  # infinity - infinity
            twin = [
                np.where(np.abs(b - x) > np.abs(a - x), b, a)
                for x, a, b in zip(exact, twin, second, strict=True)
            ]
    if case.num_qo_heads * case.head_dims[1] < FEW_NUMBERS:
        spread, _ = reference.batch_attention(
            inputs.q, requests, inputs.qo_indptr, **options, spread=True
        )
        deviation = reference.EPS[case.product_dtype] / 12**0.5 * spread
        error = twin[0] - exact[0]
        least = np.copysign(np.maximum(np.abs(error), 2 * deviation), error)
        twin = (exact[0] + least, twin[1])
    if case.lse_base2:
        exact, twin = ((o, lse / np.log(2)) for o, lse in (exact, twin))
    return exact, (twin[0].astype(case.output_dtype), twin[1])


def run_arguments(case, inputs, framework):
    """(positional, keyword) arguments of Attention.run()."""
    tables = {name: framework.tensor(table) for name, table in inputs.other_tensors().items()}
    scales = {
        name: framework.tensor(scale) if isinstance(scale, np.ndarray) else scale
        for name, scale in inputs.scales(case).items()
    }
    own = inputs.variant_arguments or {}
    scales |= {name: x for name, x in own.items() if isinstance(x, float)}
    return [framework.tensor(x) for x in (inputs.q, inputs.k, inputs.v)], tables | scales


class Runner:
    """An Attention of a case in a workspace of the exact size."""

    def __init__(self, case, **overrides):
        self.case = case
        self.options = case.options() | overrides
        self.workspace = self._workspace(fp.workspace_bytes(**self.options))
        self.attn = fp.Attention(**self.options, workspace=self.workspace.memory)

    def _workspace(self, num_bytes):
        return poison.Workspace(num_bytes)

    def run(self, inputs, framework):
        """(o, lse) as NumPy arrays, from one plan and one run into poisoned outputs."""
        self.workspace.poison()
        self.attn.plan(*inputs.plan_args(), **inputs.plan_options())
        run = self.run_into if framework.writable else self.run_returning
        o, lse = run(inputs, framework)
        self.workspace.assert_canaries()
        return o, lse

    def run_into(self, inputs, framework):
        case, rows = self.case, inputs.qo_indptr[-1]
        strided = case.memory == "strided"
        spare = len(inputs.q) - rows
        o = poison.Canary(
            (rows + spare, case.num_qo_heads, case.head_dims[1]), case.output_dtype, strided
        )
        lse = poison.Canary((rows + spare, case.num_qo_heads), np.float32, strided)
        args, kwargs = run_arguments(case, inputs, framework)
        out, out_lse = framework.tensor(o.view), framework.tensor(lse.view)
        if not case.has_lse:
            out_lse[:rows] = 0.0  # as the reference
        result = self.attn.run(*args, **kwargs, out=out, lse=out_lse if case.has_lse else None)
        assert result is out
        framework.fetch(o.view, out)
        framework.fetch(lse.view, out_lse)
        o.assert_only_written(rows)
        lse.assert_only_written(rows)
        return o.view[:rows], lse.view[:rows]

    def run_returning(self, inputs, framework):
        args, kwargs = run_arguments(self.case, inputs, framework)
        if self.case.has_lse:
            o, lse = self.attn.run(*args, **kwargs, return_lse=True)
            assert isinstance(lse, framework.tensor_type)
            lse = framework.array(lse)
        else:
            o = self.attn.run(*args, **kwargs)
            lse = np.zeros((len(o), self.case.num_qo_heads), np.float32)
        assert isinstance(o, framework.tensor_type)
        o = framework.array(o)
        assert str(o.dtype) == self.case.output_dtype
        assert lse.dtype == np.float32
        return o, lse


class CudaRunner(Runner):
    """The same on a GPU."""

    def __init__(self, case, torch, device="cuda:0", **overrides):
        self._torch = torch
        super().__init__(case, device=device, **overrides)

    def _workspace(self, num_bytes):
        return poison.CudaWorkspace(num_bytes, self._torch, self.options["device"])


def assert_correct(case, inputs, exact, twin, o, lse):
    """Compares request by request: the error allowed in one must not hide that of another."""
    v = inputs.v.astype(np.float64)
    largest = np.abs(v[np.isfinite(v)]).max(initial=0) * np.max(inputs.scales(case)["v_scale"])
    empty = np.isneginf(exact[1])
    assert np.array_equal(np.isneginf(lse), empty), "rows without keys differ"
    for r, (begin, end) in enumerate(zip(inputs.qo_indptr, inputs.qo_indptr[1:], strict=False)):
        rows = slice(begin, end)
        finite = np.where(np.isfinite(exact[1][rows]), exact[1][rows], 0)
        logits = 1 + np.abs(finite).max(initial=0)
        if not case.has_lse:  # sums of values, not averages
            logits *= case.kv_lens[r] ** 0.5
        for name, actual, unit in (("o", o, largest * logits), ("lse", lse, logits)):
            i = ("o", "lse").index(name)
            reference.assert_close(
                actual[rows], exact[i][rows], twin[i][rows], unit=unit, what=f"{name}, request {r}"
            )
