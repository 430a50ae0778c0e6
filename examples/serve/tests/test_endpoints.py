# SPDX-License-Identifier: Apache-2.0
"""What good requests get: choices, seeds, stop strings, log-probabilities, usage, streams."""

import json
import math

import pytest

from serve.text import TokenBytes
from tiny_model import EOS, MAX_TOKENS, make_tokenizer

BYTES = TokenBytes(make_tokenizer())
MESSAGES = [{"role": "user", "content": "Hello, thé!"}]


def complete(server, **arguments):
    arguments = {"model": "tiny", "prompt": "the", "seed": 7, "max_tokens": 40} | arguments
    return server.openai.completions.create(**arguments)


def chat(server, **arguments):
    arguments = {"model": "tiny", "messages": MESSAGES, "seed": 7, "max_tokens": 40} | arguments
    return server.openai.chat.completions.create(**arguments)


def texts(response):
    return [choice.text for choice in response.choices]


def test_models(tiny):
    assert [model.id for model in tiny.openai.models.list()] == ["tiny"]
    model = tiny.http.get("/v1/models/tiny").json()
    assert model["object"] == "model"
    assert model["max_model_len"] == MAX_TOKENS


def test_health(tiny):
    assert tiny.http.get("/health").json() == {"status": "ok"}


def test_choices_differ_and_come_again(tiny):
    response = complete(tiny, n=3)
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert len(set(texts(response))) == 3
    assert texts(complete(tiny, n=3)) == texts(response)
    # Choice i has the seed + i.
    assert texts(complete(tiny, seed=8)) == texts(response)[1:2]
    assert texts(complete(tiny, prompt=["the"] * 3)) == texts(response)
    assert texts(complete(tiny, prompt=["the"] * 2, n=2))[:3] == texts(response)
    assert texts(complete(tiny, seed=None)) != texts(complete(tiny, seed=None))


def test_several_prompts(tiny):
    prompts = ["the", "in the", "é"]
    response = complete(tiny, prompt=prompts, n=2, temperature=0)
    expected = [texts(complete(tiny, prompt=prompt, n=2, temperature=0)) for prompt in prompts]
    assert texts(response) == sum(expected, [])
    tokens = [make_tokenizer().encode(prompt).ids for prompt in prompts]
    assert texts(complete(tiny, prompt=tokens, n=2, temperature=0)) == texts(response)
    assert response.usage.prompt_tokens == sum(map(len, tokens))


@pytest.mark.parametrize(
    "filters",
    [{"temperature": 0}, {"top_p": 0}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1}}],
)
def test_filters_that_leave_the_likeliest_token(tiny, filters):
    assert texts(complete(tiny, seed=1, **filters)) == texts(complete(tiny, temperature=0))


@pytest.mark.parametrize(
    "penalty",
    [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"extra_body": {"repetition_penalty": 9}}],
)
def test_penalties(tiny, penalty):
    assert texts(complete(tiny, temperature=0, **penalty)) != texts(complete(tiny, temperature=0))


def test_lengths_and_ends(tiny):
    long = complete(tiny, max_tokens=300, extra_body={"ignore_eos": True})
    assert long.choices[0].finish_reason == "length"
    assert long.usage.completion_tokens == 300
    # Whatever follows a random seed: some of many samples meet the end of text.
    ended = complete(tiny, n=60, max_tokens=300)
    assert {choice.finish_reason for choice in ended.choices} == {"stop", "length"}
    assert ended.usage.completion_tokens < 60 * 300
    assert ended.usage.total_tokens == ended.usage.completion_tokens + ended.usage.prompt_tokens


def test_completions_have_16_tokens_by_default(tiny):
    body = {"prompt": "the", "ignore_eos": True}
    usage = tiny.http.post("/v1/completions", json=body).json()["usage"]
    assert usage["completion_tokens"] == 16


@pytest.mark.parametrize("streams", [False, True])
def test_stop_strings(tiny, streams):
    arguments = {"n": 4, "max_tokens": 200, "logprobs": 0, "extra_body": {"ignore_eos": True}}
    whole = texts(complete(tiny, **arguments))
    stop = [whole[0][30:33], whole[1][60:61]]
    expected = [min((text.split(string)[0] for string in stop), key=len) for text in whole]
    if streams:
        got = [""] * 4
        for chunk in complete(tiny, **arguments, stop=stop, stream=True):
            got[chunk.choices[0].index] += chunk.choices[0].text
    else:
        response = complete(tiny, **arguments, stop=stop)
        got = texts(response)
        assert response.choices[0].finish_reason == "stop"
        assert response.usage.completion_tokens < 4 * 200
        for choice in response.choices:  # tokens of the stop string are not reported
            assert max(choice.logprobs.text_offset, default=-1) < len(choice.text)
    assert got == expected
    tiny.wait_until_idle()


def test_a_choice_that_stops_is_computed_no_longer(tiny):
    arguments = {"n": 2, "extra_body": {"ignore_eos": True}}
    (stop, _) = (text[20:30] for text in texts(complete(tiny, **arguments)))
    stream = complete(tiny, **arguments, stop=[stop], max_tokens=MAX_TOKENS - 100, stream=True)
    for chunk in stream:
        if chunk.choices[0].finish_reason:
            break
    assert (chunk.choices[0].index, chunk.choices[0].finish_reason) == (0, "stop")
    tiny.wait_for(lambda metrics: metrics["flashplan_sequences_running"] == 1)
    stream.close()
    tiny.wait_until_idle()


def test_prompts_of_long_tokens(tiny):
    """More characters than the context has tokens."""
    usage = complete(tiny, prompt=" the" * (MAX_TOKENS // 4 + 1), max_tokens=1).usage
    assert usage.prompt_tokens == MAX_TOKENS // 4 + 1


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
@pytest.mark.parametrize("with_logprobs", [False, True])
def test_streams_are_the_whole_answer_in_pieces(tiny, endpoint, with_logprobs):
    is_chat = endpoint.startswith("chat")
    body = {"messages": MESSAGES} if is_chat else {"prompt": ["the", "in"]}
    body |= {"n": 3, "seed": 11, "max_tokens": 60, "stop": ["\ufffd\ufffd\ufffd"]}
    if with_logprobs:
        body |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    whole = tiny.http.post(f"/v1/{endpoint}", json=body).json()
    stream = body | {"stream": True, "stream_options": {"include_usage": True}}
    response = tiny.http.post(f"/v1/{endpoint}", json=stream)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    joined = [{"text": "", "logprobs": []} for _ in whole["choices"]]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        into = joined[choice["index"]]
        assert "finish_reason" not in into  # nothing comes after the end
        into["text"] += choice["delta"].get("content", "") if is_chat else choice["text"]
        into["logprobs"] += entries_of(choice["logprobs"])
        if choice["finish_reason"]:
            into["finish_reason"] = choice["finish_reason"]
    for into, choice in zip(joined, whole["choices"], strict=True):
        assert into["text"] == (choice["message"]["content"] if is_chat else choice["text"])
        assert into["finish_reason"] == choice["finish_reason"]
        assert into["logprobs"] == entries_of(choice["logprobs"])
        assert bool(into["logprobs"]) == (with_logprobs and into["text"] != "")


def entries_of(logprobs):
    """The tokens of either endpoint, one by one."""
    if logprobs is None:
        return []
    return logprobs["content"] if "content" in logprobs else list(zip(*logprobs.values()))


def test_logprobs_of_chat(tiny):
    whole = chat(tiny, logprobs=True, top_logprobs=20, temperature=0).choices[0]
    entries = whole.logprobs.content
    spelled = b"".join(bytes(entry.bytes) for entry in entries)
    assert spelled.decode(errors="replace") == whole.message.content
    for entry in entries:
        logprobs = [likely.logprob for likely in entry.top_logprobs]
        assert len(logprobs) == 20
        assert logprobs == sorted(logprobs, reverse=True)
        assert entry.logprob == logprobs[0]  # temperature 0 draws the likeliest one
        assert sum(map(math.exp, logprobs)) < 1 + 1e-5


def test_logprobs_of_completions(tiny):
    response = complete(tiny, logprobs=3, n=2)
    for choice in response.choices:
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
        assert all(logprob <= 0 for logprob in logprobs.token_logprobs)
        assert logprobs.text_offset == sorted(logprobs.text_offset)
        for token, offset in zip(logprobs.tokens, logprobs.text_offset):
            if not token.startswith(("bytes:", "<|")):
                # Bytes before it that turn out to be no character become one.
                rest = choice.text[offset:]
                assert rest.removeprefix("\ufffd").startswith(token) or rest.startswith(token)


def test_stop_tokens_have_no_text(tiny):
    body = {"prompt": [5], "n": 60, "max_tokens": 200, "logprobs": 0, "seed": 1}
    choices = tiny.http.post("/v1/completions", json=body).json()["choices"]
    ended = [choice for choice in choices if choice["finish_reason"] == "stop"]
    assert ended
    for choice in ended:
        assert make_tokenizer().id_to_token(EOS) not in choice["logprobs"]["tokens"]


def test_chat_templates(tiny):
    """The prompt is what the template makes of the messages, with special tokens."""
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "Hi", "name": "Ann"},
    ]
    prompt = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    answer = chat(tiny, messages=messages, temperature=0)
    same = complete(tiny, prompt=prompt, temperature=0)
    assert answer.choices[0].message.content == same.choices[0].text
    assert answer.usage.prompt_tokens == len(make_tokenizer().encode(prompt).ids)


def test_metrics_count(tiny):
    before = tiny.metrics()
    complete(tiny, n=2, max_tokens=50, extra_body={"ignore_eos": True})
    tiny.http.post("/v1/completions", content=b"{")
    after = tiny.metrics()

    def grown(name):
        return after[f"flashplan_{name}"] - before.get(f"flashplan_{name}", 0)

    assert grown("generation_tokens_total") == 100
    assert grown("prompt_tokens_total") == 1
    assert grown("responses_total[endpoint=/v1/completions][status=200]") == 1
    assert grown("responses_total[endpoint=/v1/completions][status=400]") == 1
    assert grown("time_to_first_token_seconds_count") == 1
    assert grown("inter_token_latency_seconds_count") == 98
    assert grown("request_seconds_count") == 1
    assert grown("steps_total") >= 50
    assert after["flashplan_pages"] == 4096
