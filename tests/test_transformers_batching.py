# SPDX-License-Identifier: Apache-2.0
"""Continuous batching of transformers with flashplan: `generate_batch` beside `generate`."""

import pytest

import flashplan as fp
from batching_cases import (
    FULL,
    MODELS,
    NEW_TOKENS,
    PREFIX,
    batched_tokens,
    make_model,
    make_prompts,
)


@pytest.fixture
def model(request, bridge, torch, seed):
    return make_model(torch, request.param, seed)


@pytest.fixture
def prompts(torch, random):
    return make_prompts(torch, random)


def expected_tokens(torch, model, prompts):
    """Of each prompt alone, with transformers' own attention."""
    model.set_attn_implementation("eager")
    return [
        model.generate(
            torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, disable_compile=True
        )[0, len(ids) :].tolist()
        for ids in prompts
    ]


@pytest.fixture
def calls(monkeypatch):
    """(plans, runs): whether the runs of Attention read pages; how many plans there were."""
    plans, runs = [], []
    plan, run = fp.Attention.plan, fp.Attention.run

    def spy_run(attn, *arguments, **options):
        runs.append(options.get("block_table") is not None)
        return run(attn, *arguments, **options)

    monkeypatch.setattr(fp.Attention, "plan", lambda *a, **k: plans.append(a) or plan(*a, **k))
    monkeypatch.setattr(fp.Attention, "run", spy_run)
    return plans, runs


@pytest.mark.parametrize("model", MODELS, indirect=True)
@pytest.mark.parametrize("shares", [True, False])
def test_generates_what_generate_does(torch, bridge, model, prompts, calls, shares):
    expected = expected_tokens(torch, model, prompts)
    model.set_attn_implementation(bridge.register())
    assert batched_tokens(model, prompts, allow_block_sharing=shares) == expected
    plans, runs = calls
    assert model.config._attn_implementation == bridge.NAME
    # One plan for each kind of layer in each step.
    kinds = len(set(getattr(model.config, "layer_types", None) or [""]))
    assert len(runs) == 3 * len(plans) // kinds
    assert set(runs) == ({True, False} if model.config.model_type in FULL else {False})


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_shared_prefixes_are_computed_once(torch, bridge, model, prompts, calls):
    """transformers takes prompts in any order. Without short ones the first step computes the whole
    prefix, whichever of the long ones comes first."""
    model.set_attn_implementation(bridge.register())
    prompts = [ids for ids in prompts if len(ids) > PREFIX]
    assert len(prompts) == 2
    tokens = []
    for shares in (True, False):
        calls[0].clear()
        batched_tokens(model, prompts, allow_block_sharing=shares)
        tokens.append(sum(qo_indptr[-1] for _, qo_indptr, _ in calls[0]))
    assert tokens[0] <= tokens[1] - PREFIX


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_replayed_graphs_compute_what_was_planned(torch, bridge, model, prompts, monkeypatch):
    """With graphs that call the model again with the captured tensors, where no plan is allowed."""
    from transformers.generation.continuous_batching import initialization, model_runner

    graphs, captured = [], []
    plan = fp.Attention.plan

    class Graph:
        def __init__(self, compute, arguments):
            self.compute, self.arguments = compute, arguments
            graphs.append(self)

        def replay(self):
            captured.append(self)
            try:
                self.compute(*self.arguments)
            finally:
                captured.remove(self)
            self.was_replayed = True

        def reset(self):
            pass

    def capture(runner, compute, stream, *arguments):
        compute(*arguments)
        runner.inputs_and_outputs.set_graph(Graph(compute, arguments))

    def refuse_while_captured(*arguments, **options):
        assert not captured
        return plan(*arguments, **options)

    monkeypatch.setattr(fp.Attention, "plan", refuse_while_captured)
    monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "CUDAGraph")
    monkeypatch.setattr(model_runner, "get_memory_pools", lambda: (None, None))
    monkeypatch.setattr(model_runner.ModelRunner, "_capture_graph", capture)
    expected = expected_tokens(torch, model, prompts)
    model.set_attn_implementation(bridge.register())
    assert batched_tokens(model, prompts, use_async_batching=False) == expected
    replayed = [graph for graph in graphs if hasattr(graph, "was_replayed")]
    # One for prompts, and one for each power of two of decodes where these read pages.
    assert len(replayed) >= (3 if model.config.model_type in FULL else 1)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_is_not_replaced_by_flash_attention(torch, bridge, model, prompts, calls, monkeypatch):
    from transformers.generation.continuous_batching import continuous_api

    for version in (2, 3):
        available = f"is_flash_attn_{version}_available"
        monkeypatch.setattr(continuous_api, available, lambda **_: True)
    model.set_attn_implementation(bridge.register())
    batched_tokens(model, prompts[:1])
    assert calls[1]
    assert model.config._attn_implementation == bridge.NAME


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_other_implementations_stay_as_they_are(torch, bridge, model, prompts, calls):
    bridge.register()
    expected = expected_tokens(torch, model, prompts)
    model.set_attn_implementation("sdpa")
    assert batched_tokens(model, prompts) == expected
    assert not calls[1]


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_registering_again_changes_nothing(bridge, model):
    from transformers.generation.continuous_batching.model_runner import ModelRunner

    bridge.register()
    function = ModelRunner.compute_batch
    bridge.register()
    assert ModelRunner.compute_batch is function


@pytest.mark.parametrize("model", ["llama"], indirect=True)
@pytest.mark.parametrize("absent", ["compute_batch", "ATTN_TYPE_TO_ALLOCATOR"])
def test_unknown_internals_are_refused(torch, bridge, model, prompts, monkeypatch, absent):
    from transformers.generation.continuous_batching import (
        continuous_api,
        initialization,
        model_runner,
    )

    manager = continuous_api.ContinuousBatchingManager
    runner = model_runner.ModelRunner
    monkeypatch.delattr(runner if hasattr(runner, absent) else initialization, absent)
    monkeypatch.setattr(manager, "__init__", manager.__init__)  # put back after this test
    model.set_attn_implementation(bridge.register())
    with pytest.raises(fp.UnsupportedError, match=f"^generate_batch: .* got .*{absent}"):
        batched_tokens(model, prompts)


def test_lengths_outside_of_a_batch_are_refused(torch, bridge):
    """FlashAttention's keywords for packed sequences: without them tokens would see too much."""

    class Layer:
        is_causal = True

    x = torch.ones(1, 2, 4, 16)
    lengths = torch.tensor([0, 1, 4], dtype=torch.int32)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "block_table", "k_cache"):
        with pytest.raises(fp.UnsupportedError, match=f"^{name}: expected none"):
            bridge.attention(Layer(), x, x, x, None, **{name: lengths})
