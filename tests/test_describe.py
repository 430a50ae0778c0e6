# SPDX-License-Identifier: Apache-2.0
"""describe() of a plan, and the timeline that notebooks show."""

import gc
import html.parser
import logging
import re
import subprocess
import sys
import weakref

import pytest

import flashplan as fp
from batches import DECODE
from case import Case
from inputs import indptr


def test_describe_names_what_a_person_asks_for():
    attn = fp.Attention(**Case(**DECODE, num_ctas=3).options())
    plan = attn.plan(indptr(DECODE["qo_lens"]), list(DECODE["kv_lens"]))
    text = plan.describe()
    assert plan.kernel_name in text
    assert re.search(r"\b3 (queues|CTAs)\b", text)
    assert re.search(rf"\b{len(DECODE['qo_lens'])} requests\b", text)
    assert re.search(rf"\b{len(plan.work_tiles)} work tiles\b", text)
    assert max(map(len, text.splitlines())) <= 100
    tokens = sum(DECODE["qo_lens"])
    assert repr(plan).startswith(
        f"<Plan of {tokens} query tokens in 3 queues of {plan.kernel_name};"
    )


def test_the_log_says_what_was_made_and_planned(caplog):
    caplog.set_level(logging.DEBUG, logger="flashplan")
    attn = fp.Attention(**Case(**DECODE).options())
    plan = attn.plan(indptr(DECODE["qo_lens"]), list(DECODE["kv_lens"]))
    assert {record.name for record in caplog.records} == {"flashplan"}
    made, planned = caplog.messages
    assert made == f"made {attn!r} with {attn.workspace_bytes} bytes of workspace"
    assert planned == f"planned: {plan.describe()}"
    alive = weakref.ref(attn)
    del attn, plan
    gc.collect()
    assert alive() is None  # although pytest keeps the records


def test_a_refused_plan_is_not_logged(caplog):
    attn = fp.Attention(**Case(**DECODE).options())
    caplog.set_level(logging.DEBUG, logger="flashplan")
    with pytest.raises(ValueError, match="^kv_lens"):
        attn.plan([0, 1], [-1])
    assert not caplog.messages


class SilentPlan:
    """Plans nothing, and has no describe()."""

    def plan(self, *arguments):
        pass


def test_nothing_is_logged_or_described_unless_asked_for(caplog):
    """The text is not even made, since that takes longer than planning."""
    caplog.set_level(logging.INFO, logger="flashplan")
    attn = fp.Attention(**Case(**DECODE).options())
    attn._plan = SilentPlan()
    attn.plan(indptr(DECODE["qo_lens"]), list(DECODE["kv_lens"]))
    assert not caplog.messages
    program = (
        "import flashplan as fp\n"
        "fp.Attention(1, 1, 8, q_dtype='float32', device='cpu').plan([0, 1], [9])\n"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (child.returncode, child.stdout, child.stderr) == (0, "", "")


class _Html(html.parser.HTMLParser):
    """Checks that every element is closed in its turn."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("lens", [DECODE["kv_lens"], (5000, 3), ()])
def test_html_is_a_well_formed_timeline(lens):
    attn = fp.Attention(**Case((1,) * len(lens), lens, num_ctas=3).options())
    page = _Html()
    page.feed(attn.plan(list(range(len(lens) + 1)), list(lens))._repr_html_())
    page.close()
    assert not page.open
    assert "svg" in page.seen
    assert "queue 0: request 0, keys 0 to" in page.text or not lens


@pytest.mark.parametrize(("num_ctas", "shown"), [(1, 1), (64, 64), (200, 64)])
def test_the_timeline_says_what_it_shows(num_ctas, shown):
    """How many queues of how many, what the line is, and which colour is which request."""
    lens = [3000] + [40] * 11
    attn = fp.Attention(**Case((1,) * 12, tuple(lens), num_ctas=num_ctas).options())
    plan = attn.plan(list(range(13)), lens)
    page = _Html()
    page.feed(plan._repr_html_())
    assert f"{shown} of {num_ctas} queues" in page.text
    longest = max(plan.cta_costs) * num_ctas / sum(plan.cta_costs)
    assert f"longest queue: {longest:.2f} of it" in page.text
    names = re.findall(r"^request \d+$", page.text, re.MULTILINE)
    assert names == [f"request {i}" for i in range(8)]
    assert "4 more requests" in page.text
