# SPDX-License-Identifier: Apache-2.0
"""Bad requests get a status of 4xx and OpenAI's error object, and the server goes on."""

import json

import pytest

from serve.protocol import MAX_PROMPTS
from tiny_model import MAX_TOKENS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
PROMPT = {"prompt": "Hello", "max_tokens": 2}

# endpoint, what differs from a good request, `param` of the error, a part of its message
BAD_ARGUMENTS = [
    (CHAT, {"messages": None}, "messages", "Field required"),
    (CHAT, {"messages": []}, "messages", "at least 1 item"),
    (CHAT, {"messages": "Hello"}, "messages", "valid list"),
    (CHAT, {"messages": [{"content": "Hello"}]}, "messages", "messages.0.role: Field required"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages", "'developer'"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages", "valid string"),
    (CHAT, {"messages": [{"role": "user", "content": "a\ud800"}]}, "messages", "character at 1"),
    (COMPLETIONS, {"prompt": ["a", "\ud800"]}, "prompt", "half a character at 0"),
    (CHAT, {"messages": [{"role": "user", "content": "refuse me"}]}, "messages", "refuses"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages",
        "messages.0.content: expected a text, or a list of parts of the type text",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages",
        "a text, or",
    ),
    (CHAT, {"model": 5}, "model", "valid string"),
    (CHAT, {"\ud800": 1}, None, ""),
    (CHAT, {"tools": []}, "tools", "Unrecognized request argument: tools"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    (CHAT, {"max_completion_tokens": "9"}, "max_completion_tokens", "valid integer"),
    (CHAT, {"max_tokens": MAX_TOKENS}, "messages", "maximum context length is 32768 tokens"),
    (CHAT, {"top_logprobs": 2}, None, "top_logprobs needs logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    (CHAT, {"stream_options": {"include_usage": True}}, None, "stream_options needs stream"),
    (CHAT, {"stream": True, "stream_options": {"x": 1}}, "stream_options", "Unrecognized"),
    (CHAT, {"stream": 1}, "stream", "valid boolean"),
    (CHAT, {"n": 0}, "n", "greater than or equal to 1"),
    (CHAT, {"n": 129}, "n", "less than or equal to 128"),
    (CHAT, {"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    (CHAT, {"temperature": "warm"}, "temperature", "valid number"),
    (CHAT, {"top_p": 1.1}, "top_p", "less than or equal to 1"),
    (CHAT, {"top_k": -2}, "top_k", "greater than or equal to -1"),
    (CHAT, {"min_p": 2}, "min_p", "less than or equal to 1"),
    (CHAT, {"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
    (CHAT, {"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    (CHAT, {"seed": 2**63}, "seed", "less than or equal to"),
    (CHAT, {"seed": 1.5}, "seed", "valid integer"),
    (CHAT, {"stop": [1]}, "stop", "valid string"),
    (CHAT, {"stop": ["a"] * 17}, "stop", "at most 16 items"),
    (COMPLETIONS, {"prompt": None}, "prompt", "Field required"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "at least one token"),
    (COMPLETIONS, {"prompt": []}, "prompt", "a list of 1 to 64 of these"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", "at least one token"),
    (COMPLETIONS, {"prompt": {"text": "Hello"}}, "prompt", "a text, token ids, or a list"),
    (COMPLETIONS, {"prompt": ["Hello", 5]}, "prompt", "texts or lists of token ids"),
    (COMPLETIONS, {"prompt": [True]}, "prompt", "texts or lists of token ids"),
    (COMPLETIONS, {"prompt": ["x"] * (MAX_PROMPTS + 1)}, "prompt", "1 to 64"),
    (COMPLETIONS, {"prompt": [272]}, "prompt", "token ids below 272"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", "token ids below 272"),
    (COMPLETIONS, {"prompt": [5] * MAX_TOKENS}, "prompt", "got 32768"),
    (COMPLETIONS, {"prompt": "x" * MAX_TOKENS}, "prompt", "got 32768"),
    (COMPLETIONS, {"prompt": "x" * 10**6}, "prompt", "got more"),
    (COMPLETIONS, {"max_tokens": MAX_TOKENS - 4}, "prompt", "got 32769 (5 in the prompt"),
    (COMPLETIONS, {"logprobs": True}, "logprobs", "valid integer"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs", "less than or equal to 20"),
    (COMPLETIONS, {"echo": True}, "echo", "False"),
    (COMPLETIONS, {"suffix": "x"}, "suffix", "Unrecognized"),
    (COMPLETIONS, {"best_of": 2}, None, "best_of must equal n"),
    (COMPLETIONS, {"prompt": ["a"] * 64, "n": 128}, "n", "at most 320 choices"),
]


def post(server, endpoint, content):
    headers = {"Content-Type": "application/json"}
    return server.http.post(endpoint, content=content, headers=headers)


def expect_error(response, status, param, part, code=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert part in error["message"]
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("endpoint", "change", "param", "part"), BAD_ARGUMENTS)
def test_bad_arguments(tiny, endpoint, change, param, part):
    body = (HELLO if endpoint == CHAT else PROMPT) | change
    code = "context_length_exceeded" if "context length" in part or "got" in part else None
    expect_error(post(tiny, endpoint, json.dumps(body)), 400, param, part, code)


def test_numbers_that_json_does_not_know(tiny):
    body = '{"prompt": "x", "temperature": NaN}'
    expect_error(post(tiny, COMPLETIONS, body), 400, "temperature", "finite number")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1", b"{'a': 1}", b"\xff\xfe", b"null", b"5", b"[" * 10**5]
)
def test_bodies_that_are_no_objects(tiny, content):
    expect_error(post(tiny, CHAT, content), 400, None, "")


def test_bodies_that_are_not_called_json(tiny):
    response = tiny.http.post(CHAT, content=json.dumps(HELLO))
    expect_error(response, 400, None, "The Content-Type must be application/json.")


def test_null_means_the_default(tiny):
    names = ("n", "stop", "temperature", "top_p", "seed", "stream", "stream_options", "logprobs")
    response = tiny.http.post(CHAT, json=HELLO | dict.fromkeys(names))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_unknown_models(tiny, endpoint):
    body = (HELLO if endpoint == CHAT else PROMPT) | {"model": "gpt-\ud8005"}
    response = post(tiny, endpoint, json.dumps(body))
    expect_error(response, 404, "model", "does not exist", "model_not_found")


def test_unknown_paths_and_methods(tiny):
    expect_error(tiny.http.get("/v1/nothing"), 404, None, "GET /v1/nothing")
    expect_error(tiny.http.get(CHAT), 405, None, "Method Not Allowed")
    model = tiny.http.get("/v1/models/nothing")
    expect_error(model, 404, "model", "does not exist", "model_not_found")


def test_nothing_is_left_of_bad_requests(tiny):
    """After some prompts of a request were accepted, the last one is refused."""
    prompts = [[5] * 10, [5] * MAX_TOKENS]
    assert tiny.http.post(COMPLETIONS, json={"prompt": prompts}).status_code == 400
    tiny.wait_until_idle()
