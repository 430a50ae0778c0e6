# SPDX-License-Identifier: Apache-2.0
"""Descriptions of variants that are refused, before any compiler sees them."""

import inspect

import pytest

import flashplan as fp

BODY = {"logits": "return x;"}
BAD = [
    ("name number", TypeError, "name", (3, BODY)),
    ("name empty", ValueError, "name", ("", BODY)),
    ("name path", ValueError, "name", ("a/b", BODY)),
    ("name quoted", ValueError, "name", ('a"b', BODY)),
    ("name keyword", ValueError, "name", ("class", BODY)),
    ("name of two underscores", ValueError, "name", ("a__b", BODY)),
    ("name long", ValueError, "name", ("a" * 65, BODY)),
    ("no body", ValueError, "logits", ("v", {})),
    ("body number", TypeError, "mask", ("v", {"mask": 1})),
    ("body with NUL", ValueError, "NUL", ("v", {"mask": "return true;\0"})),
    ("body with a macro", ValueError, "mask.*#", ("v", {"mask": "#define A A A\nreturn true;"})),
    ("body with a digraph", ValueError, "mask.*%:", ("v", {"mask": "%:define A\nreturn true;"})),
    ("softmax number", TypeError, "softmax", ("v", BODY | {"softmax": 1})),
    ("tensors list", TypeError, "tensors", ("v", BODY | {"tensors": ["a"]})),
    (
        "tensors dtype",
        TypeError,
        "tensors.*'a'.*float16",
        ("v", BODY | {"tensors": {"a": "float16"}}),
    ),
    ("tensors digit", ValueError, "tensors", ("v", BODY | {"tensors": {"1a": "int32"}})),
    ("tensors number", TypeError, "tensors", ("v", BODY | {"tensors": {1: "int32"}})),
    (
        "tensors input",
        ValueError,
        "tensors.*qo_len",
        ("v", BODY | {"tensors": {"qo_len": "int32"}}),
    ),
    ("tensors function", ValueError, "tensors.*exp", ("v", BODY | {"tensors": {"exp": "int32"}})),
    ("tensors defined", ValueError, "tensors", ("v", BODY | {"tensors": {"defined": "int32"}})),
    (
        "tensors of our functions",
        ValueError,
        "tensors.*library.*flashplan_logits",
        ("v", BODY | {"tensors": {"flashplan_logits": "int32"}}),
    ),
    (
        "scalars of our macros",
        ValueError,
        "scalars.*library.*FLASHPLAN_DEVICE",
        ("v", BODY | {"scalars": {"FLASHPLAN_DEVICE": 1.0}}),
    ),
    (
        "tensors run",
        ValueError,
        "tensors.*kv_lens",
        ("v", BODY | {"tensors": {"kv_lens": "int32"}}),
    ),
    (
        "nine tensors",
        ValueError,
        "tensors",
        ("v", BODY | {"tensors": dict.fromkeys("abcdefghi", "int32")}),
    ),
    ("scalars text", TypeError, "a", ("v", BODY | {"scalars": {"a": "b"}})),
    ("scalars keyword", ValueError, "scalars.*int", ("v", BODY | {"scalars": {"int": 1.0}})),
    (
        "scalars of a tensor",
        ValueError,
        "scalars.*tensor",
        ("v", BODY | {"tensors": {"a": "int32"}, "scalars": {"a": 1.0}}),
    ),
    (
        "nine scalars",
        ValueError,
        "scalars",
        ("v", BODY | {"scalars": dict.fromkeys("abcdefghi", 0)}),
    ),
]


@pytest.mark.parametrize("error, match, arguments", [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_descriptions_that_can_not_be(error, match, arguments):
    name, others = arguments
    with pytest.raises(error, match=match):
        fp.Variant(name, **others)


def test_no_name_is_an_argument_of_run():
    """In Python they would be given to run() twice."""
    for name in set(inspect.signature(fp.Attention.run).parameters) - {"variant_arguments"}:
        with pytest.raises(ValueError, match=f"tensors: .*{name}"):
            fp.Variant("v", **BODY, tensors={name: "int32"})
        with pytest.raises(ValueError, match=f"scalars: .*{name}"):
            fp.Variant("v", **BODY, scalars={name: 1.0})
