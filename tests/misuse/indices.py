# SPDX-License-Identifier: Apache-2.0
"""Values of index tensors: page ids, real lengths and slots, some of which no query sees."""

import numpy as np

import flashplan as fp
from misuse import note
from misuse.calls import TABLES, Run, pick
from misuse.data_calls import CheckData
from misuse.finding import Finding, Skip, kind

INT32 = np.iinfo(np.int32)


def wrong_id(rng, num_pages):
    ids = (-1, INT32.max, INT32.min, num_pages, num_pages + int(rng.integers(100)))
    return pick(rng, *ids)


def places_of(case, tables):
    """[(index, is_seen)] of the page ids in a table: whether a query of a request sees a key there.

    Masks, and causality beside a window, hide no page.
    """
    counts = np.diff(tables["page_indptr"]) if case.csr else [tables["block_table"].shape[1]] * 99
    places = []
    for request, (qo_len, kv_len) in enumerate(zip(case.qo_lens, case.kv_lens)):
        first = max(kv_len - qo_len - case.window_left, 0) if case.window_left >= 0 else 0
        seen = range(first // case.page_size, -(-kv_len // case.page_size)) if qo_len else ()
        for column in range(counts[request]):
            row = (tables["page_indptr"][request] + column,) if case.csr else (request, column)
            places.append((tuple(map(int, row)), column in seen))
    return places


def text_of(name, index):
    return f"{name}[{', '.join(map(str, index))}]: "


def assert_names(call, name, index, value):
    """The call raises ValueError with the place and the value."""
    before = call.snapshot()
    try:
        call.invoke()
    except ValueError as error:
        text = str(error)
        if not (text.startswith(text_of(name, index)) and text.endswith(f", got {value}")):
            raise Finding(
                f"another refusal than of {name}{list(index)} = {value}: {text}"
            ) from error
        call.assert_only_written(before, ())
        return
    raise Finding(f"accepted {name}{list(index)} = {value}")


def tables_in(call):
    return {name: call.array(name) for name in TABLES if name in call.tensors}


@kind("page ids", weight=4)
def page_ids(rng):
    """Ids that no query sees do no harm; one that a query sees is refused by name."""
    size = pick(rng, 1, 2, 3, 5)
    qo_lens = tuple(pick(rng, 0, 1, 1, 3, 9, 40) for _ in range(size))
    kv_lens = tuple(pick(rng, 0, 1, 7, 16, 40, 90) for _ in range(size))
    call = Run(rng, qo_lens=qo_lens, kv_lens=kv_lens, page_size=pick(rng, 1, 2, 5, 16),
               window_left=pick(rng, -1, 0, 3, 20, 60))  # fmt: skip
    case, tables, num_pages = call.case, tables_in(call), len(call.inputs.k)
    name = "page_indices" if case.csr else "block_table"
    ids, places = tables[name], places_of(case, tables)
    for index, is_seen in places:
        if not is_seen:
            ids[index] = wrong_id(rng, num_pages)
    note(f"page ids that no query sees, {case}")
    if not call.judge({}, []):
        raise Finding(f"ids that no query sees were refused: {case}")
    seen = [index for index, is_seen in places if is_seen]
    if not seen:
        return
    index = pick(rng, *seen)
    ids[index] = value = wrong_id(rng, num_pages)
    note(f"{name}{list(index)} = {value}, {case}")
    assert_names(call, name, index, value)
    if case.planned_lens is None:
        try:
            fp.check_device_data(call.attn, **tables, num_pages=num_pages)
        except ValueError as error:
            if not str(error).startswith(text_of(name, index)):
                raise Finding(f"check_device_data: another refusal: {error}") from error
        else:
            raise Finding(f"check_device_data accepted {name}{list(index)} = {value}")


@kind("device data", weight=2)
def device_data(rng):
    """check_device_data() takes right values, and names a wrong one."""
    call = CheckData(rng)
    case, num_pages = call.case, call.options["num_pages"]
    note(f"right values, {case}")
    if not call.judge({}, []):
        raise Finding(f"check_device_data refused right values: {case}")
    if "kv_lens" in call.tensors:
        name, index = "kv_lens", (int(rng.integers(len(case.kv_lens))),)
        more = case.kv_lens[index[0]] + 1
        value = pick(rng, -1, INT32.min, INT32.max, more)
    elif "slot_mapping" in call.tensors:
        name, index = "slot_mapping", (int(rng.integers(7)),)
        value = pick(rng, -2, num_pages * case.page_size, 2**40, -(2**63))
    else:
        name = "page_indices" if case.csr else "block_table"
        places = places_of(case, tables_in(call))
        for hidden in (index for index, is_seen in places if not is_seen):
            call.array(name)[hidden] = wrong_id(rng, num_pages)
        if not call.judge({}, []):
            raise Finding(f"check_device_data refused ids that no query sees: {case}")
        seen = [index for index, is_seen in places if is_seen]
        if not seen:
            raise Skip
        index, value = pick(rng, *seen), wrong_id(rng, num_pages)
    call.array(name)[index] = value
    note(f"{name}{list(index)} = {value}, {case}")
    assert_names(call, name, index, value)


@kind("real lengths", weight=2)
def real_lengths(rng):
    """run() takes lengths above the planned ones as these, and negative ones as 0."""
    size = pick(rng, 1, 2, 4)
    planned = tuple(pick(rng, 0, 1, 16, 40, 200) for _ in range(size))
    kv_lens = tuple(pick(rng, 0, n, int(rng.integers(n + 1))) for n in planned)
    call = Run(rng, kv_lens=kv_lens, qo_lens=tuple(pick(rng, 0, 1, 3) for _ in range(size)),
               planned_lens=planned, window_left=pick(rng, -1, 0, 5, 30))  # fmt: skip
    lens = call.array("kv_lens")
    for request, (length, most) in enumerate(zip(kv_lens, planned)):
        if length == most:
            lens[request] = pick(rng, length, length + 1, INT32.max)
        elif length == 0:
            lens[request] = pick(rng, 0, -1, INT32.min)
    note(f"kv_lens = {lens.tolist()}, {call.case}")
    if not call.judge({}, []):
        raise Finding(f"real lengths were refused: {lens.tolist()}, {call.case}")
