"""Broken JSON lines into every stage: one line says what is wrong, and where.

Every case is a function of (SEED, stage, number), so a failing one can be run again by its id.
"""
import io
import json
import os
import random
import re
import sys
from functools import cache

import pytest

import colbench
import collect
import evaluate
import model
import train_critic
import train_policy
import utils
from conftest import key_of, records

SEED = int(os.environ.get("FUZZ_SEED", 0))
JUNK = (True, False, -1, 7, 1.5, 10 ** 30, float("nan"), float("inf"),
        "", "x", "\ud800", "\x00\x1b[2J", "<html>" * 9, "y" * 300_000,
        [], {}, [[]], [None], ["a", 1], {"a": None}, {"role": "user"},
        {"role": "wizard", "content": "x"})


def places(x, path=()):
    """The paths of all values in x, nested ones, too."""
    if path:
        yield path
    children = {dict: dict.items, list: enumerate}.get(type(x), lambda x: ())(x)
    for key, value in children:
        yield from places(value, (*path, key))


def broken_value(r, record):
    """A value of the record, at any depth, is replaced, nulled, or taken away."""
    record = json.loads(json.dumps(record))
    *path, key = r.choice(list(places(record)))
    at = record
    for k in path:
        at = at[k]
    at[key] = r.choice([None, r.choice(JUNK), r.choice(JUNK)])
    if r.random() < 0.25:
        del at[key]
    return json.dumps(record).encode()


def broken_line(r, line):
    """The bytes of a line, cut, damaged, or with what JSON allows and nobody expects."""
    at = r.randrange(1, len(line))
    return r.choice([
        line[:at], line[at:], line + line, b"   ", b"[1, 2]",
        line[:at] + b"\xff\xfe" + line[at:],
        line[:at] + b"\x00" + line[at:],
        b"\xef\xbb\xbf" + line,
        b"[" * 100_000,
        b'{"a":' * 500 + b"1" + b"}" * 500,
        b'{"task": 5, ' + line[1:],
        line[:-1] + b', "task": {}}',
        b'{"x": ' + b"1" * 5000 + b", " + line[1:],
        line.decode().encode("utf-16")])


def damaged(r, given):
    """(JSON lines as bytes, the number of the broken line); or the file as a whole is odd."""
    rows, end = [json.dumps(x).encode() for x in given], b"\n"
    i, kind = r.randrange(len(rows)), r.random()
    if kind < 0.6:
        rows[i] = broken_value(r, given[i])
    elif kind < 0.9:
        rows[i] = broken_line(r, rows[i])
    elif kind < 0.93:
        rows.insert(i, rows[i])  # the same key twice
    elif kind < 0.95:
        end = b"\r\n"
    elif kind < 0.97:
        rows = []
    data = b"".join(row + end for row in rows)
    return data[:-1] if kind >= 0.97 else data, i + 1  # at last: no newline at the end


@pytest.fixture(scope="module")
def good(collected):
    """Short episodes that every stage takes: two a task, one of them solved, with advantages."""
    rs = sorted(records(collected), key=key_of)[:4]
    for r in rs:
        r["reward"] = 1.0 if r["sample"] == 0 else 0.3
        r["dialogue_history"] = r["dialogue_history"][:4]
        r["task"]["test_cases"] = dict(list(r["task"]["test_cases"].items())[:1])
        for m in r["dialogue_history"]:
            m["content"] = m["content"][:60]
        for m in colbench.agent_messages(r):
            m["candidates"], m["logprobs"] = m["candidates"][:2], m["logprobs"][:3]
            for n, x in enumerate((m, *m["candidates"])):
                x["token_ids"], x["output"] = x["token_ids"][:3], x["output"][:60]
                x["advantage"] = n - 1.5
    return rs


def only_task(record):
    return {"task": record["task"]}


TRAIN = ["--model", "MODEL", "--out", "OUT"]
STAGES = {  # module, flags, cases, what it reads of an episode
    "evaluate": (evaluate, ["--bootstrap", "0"], 1100, None),
    "grade": (colbench, ["grade", "--workers", "1"], 100, None),
    "check": (colbench, ["check", "--workers", "1"], 40, only_task),
    "collect": (collect, ["--model", "MODEL", "--human", "fixed:no", "--max_tokens", "2",
                          "--max_turns", "2"], 80, only_task),
    "candidates": (collect, ["--model", "MODEL", "--max_tokens", "2", "--candidates", "2"], 80,
                   None),
    "critic": (train_critic, [*TRAIN, "--epochs", "1", "--held_out", "0"], 150, None),
    "dpo": (train_policy, [*TRAIN, "--batch_size", "64", "--mix", "0.5"], 150, None),
    "rft": (train_policy, [*TRAIN, "--loss", "rft", "--epochs", "1"], 100, None)}


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_no_input_gets_past_or_breaks_a_stage(stage, good, tiny_dir, tmp_path, monkeypatch, capfd):
    module, flags, cases, read = STAGES[stage]
    load_lm = cache(model.load_lm)
    monkeypatch.setattr(model, "load_lm", load_lm)
    given, ends = [read(record) for record in good] if read else good, {"error": 0, "done": 0}
    for n in range(cases):
        r = random.Random(f"{SEED} {stage} {n}")
        data, line = damaged(r, given)
        names, out, error = {"MODEL": tiny_dir, "OUT": str(tmp_path / str(n))}, [], ""
        monkeypatch.setattr(module, "open_stdout", lambda: lambda x: out.append(json.dumps(x)))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        try:
            module.main(module.get_args([names.get(flag, flag) for flag in flags]))
        except SystemExit as e:
            error = str(e.code)
        case = f"{stage} {n}: {data[:3000]!r}"
        assert "Traceback" not in capfd.readouterr().err, case
        ends["error" if error else "done"] += 1
        if error:
            check_error(error, line, case)
        elif stage in ("grade", "collect", "candidates", "critic"):  # a record for each line
            assert len(out) == sum(bool(line.strip()) for line in data.split(b"\n")), case
    assert ends["error"] and ends["done"], ends


def check_error(error, line, case):
    """It is one line; if it names a line of stdin, that is the broken one."""
    assert error.startswith("error: ") and "\n" not in error and len(error) < 500, (error, case)
    named = re.match(r"error: stdin, line (\d+): ", error)
    assert int(named[1]) == line if named else ", line " not in error, (error, case)


def test_a_null_is_a_field_that_is_not_there(good):
    record = json.loads(json.dumps(good[0])) | {"meta": None, "answer": None}
    record["dialogue_history"][1] |= {"candidates": None, "logprobs": None}
    (read,) = utils.read_jsonl([json.dumps(record | {"of another": None}).encode()])
    assert "meta" not in read and "answer" not in read and read["of another"] is None
    assert not {"candidates", "logprobs"} & read["dialogue_history"][1].keys()


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_can_not_be_written_is_refused_as_it_is_read(good, text):
    """Also in a field that only passes through."""
    line = json.dumps(good[0] | {"of another": {"x": ["HERE"]}}).replace('"HERE"', text)
    with pytest.raises(SystemExit, match=f"line 1: not JSON .{re.escape(text)} is not a finite"):
        list(utils.read_jsonl([line.encode()]))
