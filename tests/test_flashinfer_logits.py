# SPDX-License-Identifier: Apache-2.0
"""Pipelines with FlashInfer's names: distributions in float64, fused operators, errors."""

import numpy as np
import pytest

import sampling_cases

torch = pytest.importorskip("torch")

from flashplan import flashinfer  # noqa: E402
from flashplan.flashinfer.logits_processor import (  # noqa: E402
    CompileError,
    Compiler,
    FusionRule,
    LegalizationError,
    LogitsPipe,
    LogitsProcessor,
    MinP,
    Op,
    ParameterizedOp,
    Sample,
    Softmax,
    TaggedTensor,
    Temperature,
    TensorType,
    TopK,
    TopP,
    compile_pipeline,
    legalize_processors,
    operators,
)
from flashplan.flashinfer.logits_processor.legalization import infer_initial_type  # noqa: E402

DRAWS, VOCAB, ROWS = 20_000, 40, 6
LOGITS, PROBS = TensorType.LOGITS, TensorType.PROBS
# Steps behind Softmax, and the filters that they mean.
PIPES = [
    ([TopK()], {"top_k": 7}),
    ([TopP()], {"top_p": 0.7}),
    ([MinP()], {"min_p": 0.1}),
    ([TopK(), TopP()], {"top_k": 9, "top_p": 0.8}),
    ([TopP(), MinP()], {"top_p": 0.8, "min_p": 0.1}),
    ([], {}),
]


def rows_of_logits(rng, batch_size=ROWS):
    return torch.from_numpy(rng.standard_normal((batch_size, VOCAB)) * 2).float()


def as_tensors(filters, batch_size):
    return {name: torch.full((batch_size,), value) for name, value in filters.items()}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("in_tensors", [False, True])
@pytest.mark.parametrize(("steps", "filters"), PIPES)
def test_probabilities(rng, steps, filters, in_tensors, compiled):
    logits = rows_of_logits(rng)
    pipe = LogitsPipe([Temperature(), Softmax(), *steps], compile=compiled)
    assert pipe.initial_type is LOGITS
    parameters = filters | {"temperature": 0.7}
    if in_tensors:
        parameters = as_tensors(parameters, ROWS)
    got = pipe(logits, **parameters).numpy()
    for row, found in zip(logits.numpy(), got):
        if "top_p" in filters and "min_p" in filters:
            first = sampling_cases.distribution(row, 0.7, top_p=0.8)
            expected = sampling_cases.distribution(first, min_p=0.1, from_probs=True)
        else:
            expected = sampling_cases.distribution(row, 0.7, **filters)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("steps", "filters"), PIPES)
def test_drawn_tokens(rng, steps, filters, compiled):
    logits = rows_of_logits(rng, 1)
    probs = torch.softmax(logits, -1).expand(DRAWS, -1)
    pipe = LogitsPipe([*steps, Sample()], compile=compiled, input_type=PROBS)
    tokens = pipe(probs, **filters)
    assert tokens.dtype == torch.int32
    if "top_p" in filters and "min_p" in filters:
        first = sampling_cases.distribution(logits[0].numpy(), top_p=0.8)
        expected = sampling_cases.distribution(first, min_p=0.1, from_probs=True)
    else:
        expected = sampling_cases.distribution(logits[0].numpy(), **filters)
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert sampling_cases.chi_square(counts, expected) < 6


FUSED = [
    ([TopK(), Sample()], "top_k_sampling_from_probs", {"top_k": 7}),
    ([TopP(), Sample()], "top_p_sampling_from_probs", {"top_p": 0.7}),
    ([MinP(), Sample()], "min_p_sampling_from_probs", {"min_p": 0.1}),
    ([Sample(deterministic=False)], "sampling_from_probs", {}),
]


@pytest.mark.parametrize(("steps", "name", "filters"), FUSED)
def test_tokens_of_the_functions(rng, steps, name, filters):
    """With the generator, the seed, and the rows that are given."""
    probs = torch.softmax(rows_of_logits(rng), -1)
    indices = torch.arange(60, dtype=torch.int64) % ROWS
    pipe = LogitsPipe(steps, input_type=PROBS)
    assert len(pipe.compiled_ops) == 1
    for named in ({"generator": None}, {"seed": 5, "offset": 3}):
        if "generator" in named:
            first, again = (torch.Generator().manual_seed(5) for _ in range(2))
            expected = getattr(flashinfer, name)(probs, **filters, indices=indices, generator=first)
            got = pipe(probs, **filters, indices=indices, generator=again)
        else:
            expected = getattr(flashinfer, name)(probs, **filters, indices=indices, **named)
            got = pipe(probs, **filters, indices=indices, **named)
        assert got.dtype == torch.int64
        assert torch.equal(got, expected)


def test_joint_filters(rng):
    """Both see all probabilities, in a compiled pipeline."""
    probs = torch.softmax(rows_of_logits(rng, 200), -1)
    pipe = LogitsPipe([TopK(joint_topk_topp=True), TopP(), Sample()], input_type=PROBS)
    assert "compiled_ops=[FusedProbsTopKTopPSampleOp]" in repr(pipe)
    numbers = {"seed": 5, "offset": 3}
    expected = flashinfer.top_k_top_p_sampling_from_probs(
        probs, 9, 0.5, filter_apply_order="joint", **numbers
    )
    assert torch.equal(pipe(probs, top_k=9, top_p=0.5, **numbers), expected)
    in_turn = LogitsPipe([TopK(), TopP(), Sample()], input_type=PROBS)
    assert "compiled_ops=[ProbsTopKOp -> FusedProbsTopPSampleOp]" in repr(in_turn)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9])
def test_filters_in_turn(rng, top_p):
    """top_k_top_p_sampling_from_... draws the tokens of a pipeline that has one filter after the
    other, as FlashInfer's does."""
    logits = rows_of_logits(rng, 200)
    numbers = {"seed": 5, "offset": 3}
    expected = flashinfer.top_k_top_p_sampling_from_logits(logits, 15, top_p, **numbers)
    masked = LogitsPipe([TopK()], input_type=LOGITS)(logits, top_k=15)
    pipe = LogitsPipe([Softmax(), TopP(), Sample()])
    assert torch.equal(pipe(masked, top_p=top_p, **numbers), expected)
    probs = torch.softmax(logits, -1)
    expected = flashinfer.top_k_top_p_sampling_from_probs(probs, 15, top_p, **numbers)
    in_turn = LogitsPipe([TopK(), TopP(), Sample()], input_type=PROBS)
    assert torch.equal(in_turn(probs, top_k=15, top_p=top_p, **numbers), expected)


def test_logits(rng):
    logits = rows_of_logits(rng)
    expected = flashinfer.top_k_mask_logits(logits, 5)
    pipe = LogitsPipe([TopK()], input_type=LOGITS)
    assert torch.equal(pipe(logits, top_k=5), expected)
    assert torch.equal(pipe(TaggedTensor.logits(logits), top_k=5), expected)
    halved = LogitsPipe([Temperature()])(logits, temperature=2.0)
    torch.testing.assert_close(halved, logits / 2)
    draws = LogitsPipe([TopK(), Sample()], input_type=LOGITS)
    expected = flashinfer.sampling_from_logits(expected, seed=5, offset=3)
    assert torch.equal(draws(logits, top_k=5, seed=5, offset=3), expected)


def test_parameters_of_steps(rng):
    """A call's parameters come before those with which a step was made."""
    probs = torch.softmax(rows_of_logits(rng), -1)
    for pipe in (
        LogitsPipe([TopK(top_k=2), Sample()], input_type=PROBS),
        LogitsPipe([TopK(top_k=2)], input_type=PROBS),
    ):
        assert torch.equal(pipe(probs, seed=5, offset=3), pipe(probs, top_k=2, seed=5, offset=3))
    kept = LogitsPipe([TopK(top_k=2)], input_type=PROBS)
    assert (kept(probs) > 0).sum() == 2 * ROWS
    assert (kept(probs, top_k=3) > 0).sum() == 3 * ROWS


WRONG = [
    ([Temperature()], {}, "Required parameter 'temperature' not provided for TemperatureOp"),
    ([Temperature()], {"temperature": 0.0}, "Temperature must be positive float .* got 0.0"),
    ([Temperature(), Softmax()], {"temperature": 1}, "Temperature must be positive float .* got 1"),
    ([Softmax(), TopK()], {"top_k": 0}, "top_k must be a positive integer .* got 0"),
    ([Softmax(), TopK(), Sample()], {"top_k": 0.5}, "top_k must be a positive integer .* got 0.5"),
    ([Softmax(), TopP()], {"top_p": 1.5}, r"top_p must be float in \(0, 1\] .* got 1.5"),
    ([Softmax(), TopP(), Sample()], {"top_p": 0}, r"top_p must be float in \(0, 1\] .* got 0"),
    ([Softmax(), MinP()], {"min_p": 0}, r"min_p must be float in \(0, 1\] .* got 0"),
    ([Softmax(), TopK()], {"top_k": torch.ones(2, 2)}, "top_k: Expected a 1D tensor .* 2D tensor"),
]


@pytest.mark.parametrize(("steps", "parameters", "message"), WRONG)
def test_wrong_parameters(rng, steps, parameters, message):
    pipe = LogitsPipe(steps)
    with pytest.raises(ValueError, match=rf"Error executing operator \d+ \(\w+\): {message}"):
        pipe(rows_of_logits(rng), **parameters)


class Twice(LogitsProcessor):
    """Softmax, back to logits, and softmax again."""

    def legalize(self, input_type):
        return [operators.SoftmaxOp(), Log(), operators.SoftmaxOp()]


class Log(ParameterizedOp):
    IN, OUT = PROBS, LOGITS

    def __call__(self, tensor, **kwargs):
        return TaggedTensor(tensor.data.log(), self._validate_input_type(tensor))


class Nothing(LogitsProcessor):
    def legalize(self, input_type):
        return []


class Misfit(LogitsProcessor):
    """Says that it takes probabilities, and has an operator for logits."""

    def legalize(self, input_type):
        return [operators.TemperatureOp()]


WRONG_PIPES = [
    ([], {}, "Pipeline cannot be empty"),
    ([TopK(), Sample()], {}, "Cannot infer input type: TopK can accept both LOGITS and PROBS"),
    ([Softmax(), Temperature()], {}, r"Failed to legalize processor 1 \(Temperature\): .*PROBS"),
    ([TopP()], {"input_type": LOGITS}, "TopP can only be applied to PROBS, got LOGITS"),
    ([Softmax(), Sample(), TopK()], {}, "TopK can only be applied to LOGITS or PROBS, got INDICES"),
    ([Softmax(), Softmax()], {}, "Softmax can only be applied to LOGITS, got PROBS"),
    ([Nothing()], {"input_type": LOGITS}, "Processor Nothing produced no ops"),
    ([Twice()], {"input_type": LOGITS}, "Multiple Softmax operators found"),
    ([Softmax(), Misfit()], {}, r"Type mismatch at operator 1 \(TemperatureOp\)"),
]


@pytest.mark.parametrize(("steps", "options", "message"), WRONG_PIPES)
def test_wrong_pipes(steps, options, message):
    with pytest.raises(ValueError, match=message):
        LogitsPipe(steps, **options)


def test_wrong_operators(rng):
    sample, softmax = operators.ProbsSampleOp(), operators.SoftmaxOp()
    for ops, message in (
        ([], "Cannot compile empty operator list"),
        ([sample, sample], "Type mismatch at operator 1"),
    ):
        with pytest.raises(CompileError, match=message):
            compile_pipeline(ops)

    class FromIndices(Log):
        IN, OUT = TensorType.INDICES, PROBS

    with pytest.raises(CompileError, match=r"First operator \(FromIndices\) cannot accept"):
        compile_pipeline([FromIndices()])
    with pytest.raises(CompileError, match="No operator may follow one that outputs Indices"):
        compile_pipeline([sample, FromIndices()])
    with pytest.raises(LegalizationError, match="Cannot legalize empty processor list"):
        legalize_processors([])
    assert infer_initial_type([Softmax()]) is LOGITS
    with pytest.raises(ValueError, match="SoftmaxOp cannot accept input type PROBS"):
        softmax(TaggedTensor.probs(rows_of_logits(rng)))

    class Untyped(Log):
        IN = None

    with pytest.raises(ValueError, match="Operator Untyped must define IN and OUT tensor types"):
        Untyped()
    with pytest.raises(ValueError, match="Expected: INDICES"):
        FromIndices()(TaggedTensor.probs(torch.ones(1, 1)))


def test_own_rules_and_checks(rng):
    """Rules of larger prio come first, and each new operator may be fused again."""

    class Fused(operators.FusedTemperatureSoftmaxOp):
        pass

    rule = FusionRule(
        (operators.TemperatureOp, operators.SoftmaxOp), lambda ops: True, lambda ops: Fused(), 200
    )
    logits = rows_of_logits(rng)
    pipe = LogitsPipe([Temperature(), Softmax()], custom_fusion_rules=[rule])
    assert [type(op) for op in pipe.compiled_ops] == [Fused]
    torch.testing.assert_close(
        pipe(logits, temperature=0.5), torch.softmax(logits.double() / 0.5, -1).float()
    )

    def refuse(ops):
        raise CompileError(f"{len(ops)} operators")

    with pytest.raises(ValueError, match="Pipeline creation failed: 2 operators"):
        LogitsPipe([Temperature(), Softmax()], custom_validity_checks=[refuse])
    later = LogitsPipe([Temperature(), Softmax()], compile=False)
    assert later.compiled_ops is None
    assert repr(later).endswith("ops=[TemperatureOp -> SoftmaxOp], compiled_ops=[])")
    with pytest.raises(ValueError, match="Compilation failed: 2 operators"):
        later.compile(custom_validity_checks=[refuse])
    later.compile()
    assert len(later.compiled_ops) == 1
    prios = [rule.prio for rule in Compiler().fusion_rules]
    assert prios == sorted(prios, reverse=True)


def test_names(rng):
    tagged = TaggedTensor.indices(torch.tensor([3, 5]))
    assert torch.equal(torch.add(tagged, 1), torch.tensor([4, 6]))
    assert (tagged.shape, tagged.size(0), tagged.dtype) == ((2,), 2, torch.int64)
    assert tagged.device == torch.device("cpu")
    assert repr(tagged).startswith("TaggedTensor(type=INDICES, shape=torch.Size([2])")
    assert repr(LOGITS) == "TensorType.LOGITS"
    assert repr(TopK(top_k=3)) == "TopK(joint_topk_topp=False, top_k=3)"
    assert repr(operators.TopPOp()) == "TopPOp(PROBS -> PROBS)"
    assert issubclass(ParameterizedOp, Op)
