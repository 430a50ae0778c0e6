# SPDX-License-Identifier: Apache-2.0
"""The version of a wheel: that of the public header, and FLASHPLAN_WHEEL as its local part."""

import os
import pathlib
import re

HEADER = pathlib.Path(__file__).parent.parent / "include/flashplan/flashplan.h"


def dynamic_metadata(_settings, _project):
    numbers = re.findall(r"#define FLASHPLAN_VERSION_[A-Z]+ (\d+)", HEADER.read_text())
    local = os.environ.get("FLASHPLAN_WHEEL")
    return {"version": ".".join(numbers) + (f"+{local}" if local else "")}
