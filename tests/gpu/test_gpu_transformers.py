# SPDX-License-Identifier: Apache-2.0
"""`generate_batch` of transformers with flashplan's attention, in CUDA graphs."""

import copy

import pytest

import flashplan as fp
from batching_cases import FULL, MODELS, NEW_TOKENS, batched_tokens, make_model, make_prompts
from gpu_cases import DEVICE

pytestmark = pytest.mark.gpu

# The logits have a standard deviation of one or two. Bfloat16 errs by up to a hundredth of it, and
# attention to one key fewer chooses tokens that are one below the largest logit, or more.
LARGEST_GAP = 0.2


@pytest.fixture
def model(request, bridge, torch, seed):
    pytest.importorskip("transformers", "5.23", reason="other internals of generate_batch")
    return make_model(torch, request.param, seed, head_dim=64).to(DEVICE, torch.bfloat16)


@pytest.fixture
def prompts(torch, random):
    return make_prompts(torch, random)


def gaps(torch, reference, prompts, outputs):
    """How far below the largest logit the reference has each token that was chosen."""
    for prompt, output in zip(prompts, outputs):
        assert len(output) == NEW_TOKENS
        ids = torch.tensor([prompt + output], device=reference.device)
        logits = reference(ids).logits[0, len(prompt) - 1 : -1]
        yield logits.amax(-1) - logits.gather(-1, ids[0, len(prompt) :, None])[:, 0]


@pytest.fixture
def counts(torch, monkeypatch):
    """The numbers of graphs captured and replayed, and of runs that read pages."""
    numbers = {"captured": 0, "replayed": 0, "paged": 0}
    capture, replay = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.replay
    run = fp.Attention.run

    def count(name, function):
        def counted(*arguments, **options):
            numbers[name] += name != "paged" or options.get("block_table") is not None
            return function(*arguments, **options)

        return counted

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", count("captured", capture))
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", count("replayed", replay))
    monkeypatch.setattr(fp.Attention, "run", count("paged", run))
    return numbers


@pytest.mark.parametrize("model", MODELS, indirect=True)
@pytest.mark.parametrize(
    ("has_graphs", "is_asynchronous"), [(True, True), (True, False), (False, False)]
)
def test_generates_what_eager_attention_does(
    torch, bridge, model, prompts, counts, has_graphs, is_asynchronous
):
    reference = copy.deepcopy(model).float()
    reference.set_attn_implementation("eager")
    model.set_attn_implementation(bridge.register())
    outputs = batched_tokens(
        model,
        prompts,
        max_requests_per_batch=8,
        use_cuda_graph=has_graphs,
        use_async_batching=is_asynchronous,
    )
    assert model.config._attn_implementation == bridge.NAME
    assert (counts["paged"] > 0) == (model.config.model_type in FULL)
    # A few steps capture graphs, which the others replay.
    assert counts["replayed"] >= NEW_TOKENS // 2 if has_graphs else counts["captured"] == 0
    below = torch.cat(list(gaps(torch, reference, prompts, outputs)))
    assert below.max() < LARGEST_GAP
    assert (below == 0).float().mean() > 0.8
