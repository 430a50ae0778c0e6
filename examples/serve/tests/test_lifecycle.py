# SPDX-License-Identifier: Apache-2.0
"""Clients that go away, many at once, a full queue, Ctrl-C, servers that can not start."""

import re
import resource
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from openai import APIError, RateLimitError

from server_process import COMMAND, ENVIRONMENT
from tiny_model import MAX_TOKENS

LONG = {"prompt": "the", "max_tokens": MAX_TOKENS - 10, "ignore_eos": True}


def open_stream(server, body=LONG, begins=True):
    """A stream of which the client reads no more than the begin."""
    client = httpx.Client(base_url=server.url, timeout=60)
    request = client.build_request("POST", "/v1/completions", json=body | {"stream": True})
    response = client.send(request, stream=True)
    assert response.status_code == 200
    lines = response.iter_lines()
    if begins:
        next(lines)
    client.lines = lines  # which close the connection when they go
    return client


@pytest.mark.parametrize("streams", [False, True])
def test_requests_of_clients_that_go_away_are_aborted(tiny, streams):
    before = tiny.metrics()["flashplan_disconnects_total"]
    if streams:
        client = open_stream(tiny, LONG | {"n": 3})
        tiny.wait_for(lambda metrics: metrics["flashplan_sequences_running"] == 3)
        client.close()
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{tiny.url}/v1/completions", json=LONG, timeout=1)
    tiny.wait_until_idle()
    tiny.wait_for(lambda metrics: metrics["flashplan_disconnects_total"] == before + 1)


def test_many_clients_at_once(tiny):
    """Each gets what it would get alone, streamed or not; half of them go away."""
    arguments = {"model": "tiny", "max_tokens": 60, "extra_body": {"ignore_eos": True}}

    def text_of(seed, streams):
        got = tiny.openai.completions.create(
            prompt=f"the {seed % 5}", seed=seed, stream=streams, **arguments
        )
        return "".join(c.choices[0].text for c in got) if streams else got.choices[0].text

    alone = [text_of(seed, False) for seed in range(8)]
    with ThreadPoolExecutor(40) as pool:
        leaving = [pool.submit(open_stream, tiny, LONG | {"seed": i}) for i in range(20)]
        staying = [pool.submit(text_of, i % 8, i % 3 == 0) for i in range(80)]
        for client in leaving:
            client.result().close()
        assert [text.result() for text in staying] == alone * 10
    tiny.wait_until_idle()


def test_full_queues(start):
    server = start("--max-batch-size", "2", "--max-queue", "1", "--num-pages", "8192")
    clients = [open_stream(server) for _ in range(2)]
    clients.append(open_stream(server, begins=False))
    server.wait_for(lambda metrics: metrics["flashplan_sequences_waiting"] == 1)
    with pytest.raises(RateLimitError) as refused:
        server.openai.completions.create(model="tiny", prompt="the")
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.response.headers["retry-after"] == "1"
    for client in clients:
        client.close()
    server.wait_until_idle()
    assert server.openai.completions.create(model="tiny", prompt="the").choices


def test_interrupts_let_requests_finish(start):
    server = start("--grace", "60")
    text = ""
    body = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    stream = server.openai.completions.create(model="tiny", prompt="the", stream=True, **body)
    for i, chunk in enumerate(stream):
        if i == 3:
            server.interrupt()
        text += chunk.choices[0].text
    assert chunk.choices[0].finish_reason == "length"
    assert server.wait() == 0
    assert "stopped" in server.log
    assert "Traceback" not in server.log


@pytest.mark.parametrize("num_interrupts", [1, 2])
def test_interrupts_end_what_takes_too_long(start, num_interrupts):
    server = start("--grace", "1" if num_interrupts == 1 else "60")
    body = {"max_tokens": MAX_TOKENS // 4, "extra_body": {"ignore_eos": True}}
    stream = server.openai.completions.create(
        model="tiny", prompt="the" * 5000, stream=True, n=8, **body
    )
    next(stream)
    for _ in range(num_interrupts):
        server.interrupt()
        time.sleep(0.2)
    with pytest.raises(APIError, match="shutting down"):
        list(stream)
    assert server.wait(seconds=30) == 0
    assert "Traceback" not in server.log


def test_idle_servers_stop_at_once(start):
    server = start("--grace", "60")
    server.interrupt()
    assert server.wait(seconds=30) == 0
    assert "Traceback" not in server.log


def failed_start(*options, **limits):
    pipes = {"capture_output": True, "text": True}
    done = subprocess.run([*COMMAND, *options], env=ENVIRONMENT, timeout=60, **pipes, **limits)
    assert done.returncode in (1, 2)  # argparse's
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_starts_that_fail(tiny_model, tmp_path):
    assert "config.json: no such file" in failed_start("--model", str(tmp_path))
    model = ("--model", str(tiny_model), "--port", "0")
    assert "no-such.so" in failed_start(*model, "--library", str(tmp_path / "no-such.so"))
    assert "num_pages: expected at least 1, got 0" in failed_start(*model, "--num-pages", "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        failure = failed_start("--model", str(tiny_model), "--port", port)
    assert f"--host 127.0.0.1 --port {port}: Address already in use" in failure
    assert "--host no.such.host.invalid" in failed_start(*model, "--host", "no.such.host.invalid")
    for name, value in (("--port", "65536"), ("--max-queue", "-1"), ("--grace", "-1")):
        assert f"got {value}" in failed_start(*model, name, value)
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))}
    failure = failed_start(*model, "--num-pages", str(1 << 24), **limit)
    assert re.search(r"no memory for \d{11} bytes", failure)
