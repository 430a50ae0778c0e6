# SPDX-License-Identifier: Apache-2.0
"""The plans that flashplan.flash_attn keeps between calls, and for captures."""

import pytest

import flashplan as fp
from flash_cases import arguments_of


def test_remembered_lengths(torch):
    """A copy is reused until the tensor is written to, replaced, or gone."""
    from flashplan.flash_plans import _Copied

    ends = torch.arange(4)
    copied = _Copied((ends,), [[0, 1, 2, 3]])
    assert copied.is_of((ends,))
    assert not copied.is_of((ends, ends))
    assert not copied.is_of((ends.clone(),))
    assert not copied.is_of((ends[:],))
    ends.add_(1)
    assert not copied.is_of((ends,))


def test_a_capture_takes_what_was_planned(torch, flash, monkeypatch):
    """Of the last call with the same shapes, which later calls leave alone."""
    from flashplan import flash_plans, flash_runs

    plans = flash_plans.Plans()
    monkeypatch.setattr(flash_runs, "_plans", plans)
    q, k, v = arguments_of(torch, "flash_attn_with_kvcache")
    call = flash.flash_attn_with_kvcache
    wanted = call(q, k, v)
    capturing = True
    monkeypatch.setattr(flash_plans, "is_capturing", lambda device: capturing)
    with pytest.raises(RuntimeError, match="^q: expected a call with the same shapes and options"):
        call(q, k[:, :9], v[:, :9])
    assert torch.equal(call(q, k, v), wanted)
    (captured,) = (planned for group in plans._captured.values() for planned in group)
    capturing = False
    call(q, k[:, :16:2], v[:, :16:2])
    call(q, k, v)
    assert captured.step == ("equal", 2, 1, 16)
    capturing = True
    assert torch.equal(call(q, k, v), wanted)


def test_a_capture_of_lengths_on_the_host(torch, flash, monkeypatch):
    from flashplan import flash_runs

    rows = arguments_of(torch, "flash_attn_varlen_func")
    flash.flash_attn_varlen_func(*rows)
    monkeypatch.setattr(flash_runs, "is_capturing", lambda device: True)
    with pytest.raises(
        fp.UnsupportedError, match="^cu_seqlens_q: .* while a CUDA graph is captured"
    ):
        flash.flash_attn_varlen_func(*rows)


def test_only_so_many_objects_are_kept(torch, flash, monkeypatch):
    from flashplan import flash_plans, flash_runs

    plans = flash_plans.Plans()
    monkeypatch.setattr(flash_runs, "_plans", plans)
    monkeypatch.setattr(flash_plans, "MAX_KEPT", 3)
    q, k, v = arguments_of(torch, "flash_attn_func")
    for scale in (0.1, 0.2, 0.3, 0.1, 0.4):
        flash.flash_attn_func(q, k, v, softmax_scale=scale)
    assert len(plans._kept) == 3
    assert any(0.1 in key for key in plans._kept)
    assert not any(0.2 in key for key in plans._kept)


def test_all_objects_share_a_workspace(torch, flash, monkeypatch):
    from flashplan import flash_plans, flash_runs

    plans = flash_plans.Plans()
    monkeypatch.setattr(flash_runs, "_plans", plans)
    q, k, v = arguments_of(torch, "flash_attn_func")
    with torch.inference_mode():
        for scale in (0.1, 0.2):
            flash.flash_attn_func(q, k, v, softmax_scale=scale)
    (workspace,) = plans._workspaces.values()
    assert not workspace.is_inference()
    assert len(plans._kept) == 2
