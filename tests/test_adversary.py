# SPDX-License-Identifier: Apache-2.0
"""What tests/adversary.py takes for a mistake is one."""

import time
import warnings

import pytest

from misuse import calls, data_calls, row_calls, sampling_calls, sharing
from misuse.capsules import EIGHT_BIT_FLOATS, FLOATS, INTS, Exporter
from misuse.finding import Finding

CALLS = (
    calls.Run, calls.Append, calls.AppendSlots, calls.RopeAppend, calls.Merge, calls.MergeStack,
    data_calls.CheckData,
    row_calls.RmsNorm, row_calls.AddRmsNorm, row_calls.AddRmsNormTo, row_calls.LayerNorm,
    row_calls.Gated,
    sampling_calls.Softmax, sampling_calls.Sample, sampling_calls.Verify, sampling_calls.Penalties,
)  # fmt: skip


@pytest.mark.parametrize("make", CALLS)
def test_a_dtype_is_wrong_or_one_that_the_tensor_may_have(make, rng):
    """Of dtypes that fit into the tensor's memory, since a wider one would be read beyond it."""
    for _ in range(12):
        call = make(rng)
        for name in sorted(call.tensors.keys() - {"workspace"}):
            array, before = call.array(name), call.snapshot()
            for dtype in FLOATS + EIGHT_BIT_FLOATS + INTS:
                fits = dtype["bits"] <= 8 * array.itemsize
                stands_for_another = dtype["code"] == 1 and dtype["bits"] == 8 * array.itemsize
                if not array.size or not fits or stands_for_another or call.may_have(name, dtype):
                    continue
                with warnings.catch_warnings(), pytest.raises(TypeError):
                    warnings.simplefilter("ignore")
                    call.invoke(**{name: Exporter(array, dtype)})
            call.assert_only_written(before, ())


def test_a_forked_child_that_hangs_shows_where(monkeypatch):
    monkeypatch.setattr(sharing, "WAIT", 0.3)

    def hangs():
        time.sleep(60)

    with pytest.raises(Finding, match="hangs") as finding:
        sharing.in_fork(hangs)
    assert "in hangs" in str(finding.value)
