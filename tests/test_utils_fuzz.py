"""Broken JSON lines into every stage: one line says what is wrong, and where.

Every case is a function of (SEED, stage, number), so a failing one can be run again by its id.
"""
import copy
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
from colbench import agent_messages
from conftest import key_of

SEED = int(os.environ.get("FUZZ_SEED", 0))
JUNK = (True, False, -1, 7, 1.5, 10 ** 30, float("nan"), float("inf"),
        "", "x", "\ud800", "\x00\x1b[2J", "<html>" * 9, "y" * 300_000,
        [], {}, [[]], [None], ["a", 1], {"a": None}, {"role": "user"},
        {"role": "wizard", "content": "x"})


def parts(x):
    """Yields (a dict or list in x, one of its keys), nested ones, too."""
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
        yield x, key
        if isinstance(value, (dict, list)):
            yield from parts(value)


def broken_value(r, record):
    """A value of the record, at any depth, is replaced, nulled, or taken away."""
    record = copy.deepcopy(record)
    at, key = r.choice(list(parts(record)))
    at[key] = r.choice([None, r.choice(JUNK), r.choice(JUNK)])
    if r.random() < 0.25:
        del at[key]
    return json.dumps(record).encode()


def broken_line(r, line):
    """The bytes of a line, cut, damaged, or with what JSON allows and nobody expects."""
    at = r.randrange(1, len(line))
    return r.choice([
        line[:at], line + line, b"   ", b"[1, 2]", b"[" * 100_000,
        line[:at] + b"\xff\xfe" + line[at:],
        line[:at] + b"\x00" + line[at:],
        line[:-1] + b', "task": {}}',
        b'{"x": ' + b"1" * 5000 + b", " + line[1:],
        line.decode().encode("utf-16")])


def damaged(r, given):
    """(JSON lines as bytes, the number of the broken line); or the file as a whole is odd."""
    rows = [json.dumps(x).encode() for x in given]
    i, kind = r.randrange(len(rows)), r.random()
    if kind < 0.6:
        rows[i] = broken_value(r, given[i])
    elif kind < 0.9:
        rows[i] = broken_line(r, rows[i])
    elif kind < 0.97:
        rows.insert(i, rows[i])  # the same key twice
    data = b"\n".join(rows)
    return data + b"\n" * (kind < 0.97), i + 1


TRAIN = ["--model", "MODEL", "--out", "OUT"]
STAGES = {  # module, flags, cases
    "evaluate": (evaluate, [], 1100),
    "grade": (colbench, ["grade", "--workers", "1"], 100),
    "check": (colbench, ["check", "--workers", "1"], 40),
    "collect": (collect, ["--model", "MODEL", "--human", "fixed:no", "--max_tokens", "2",
                          "--max_turns", "2"], 80),
    "candidates": (collect, ["--model", "MODEL", "--max_tokens", "2", "--candidates", "2"], 80),
    "critic": (train_critic, [*TRAIN, "--epochs", "1", "--held_out", "0"], 150),
    "dpo": (train_policy, [*TRAIN, "--batch_size", "64", "--mix", "0.5"], 150),
    "rft": (train_policy, [*TRAIN, "--loss", "rft", "--epochs", "1"], 100)}


@pytest.fixture
def good(ranked):
    """Short episodes that every stage takes: of two tasks a solved one and a worse one."""
    some = sorted(ranked, key=key_of)[:4]
    for r in some:
        r["dialogue_history"] = r["dialogue_history"][:4]
        for m in agent_messages(r):
            del m["candidates"][2:]
    return some


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_no_input_gets_past_or_breaks_a_stage(stage, good, tiny_dir, tmp_path, monkeypatch, capfd):
    module, flags, cases = STAGES[stage]
    monkeypatch.setattr(model, "load_lm", cache(model.load_lm))
    given, ends = good, {"error": 0, "done": 0}
    if stage in ("check", "collect"):
        given = [{"task": record["task"]} for record in good]
    for n in range(cases):
        r = random.Random(f"{SEED} {stage} {n}")
        data, line = damaged(r, given)
        names, out, error = {"MODEL": tiny_dir, "OUT": str(tmp_path / str(n))}, [], ""
        monkeypatch.setattr(module, "open_stdout", lambda: lambda x: out.append(json.dumps(x)),
                            raising=False)  # train_policy.py writes no records
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        try:
            module.main(module.get_args([names.get(flag, flag) for flag in flags]))
        except SystemExit as e:
            error = str(e.code)
        case = f"{stage} {n}: {data[:3000]!r}"
        assert "Traceback" not in capfd.readouterr().err, case
        ends["error" if error else "done"] += 1
        if error:  # one line; if it names lines of stdin, the broken one is among them
            assert error.startswith("error: ") and "\n" not in error and len(error) < 500, case
            named = re.findall(r"stdin, line (\d+)", error)
            assert not named or str(line) in named, (error, case)
            assert not [*tmp_path.glob(f"{n}/*")], case
        elif stage in ("grade", "collect", "candidates", "critic"):  # a record for each line
            assert len(out) == sum(bool(line.strip()) for line in data.split(b"\n")), case
    assert ends["error"] and ends["done"], ends


def test_a_null_is_a_field_that_is_not_there(good):
    record = good[0] | {"meta": None, "answer": None, "of another": None}
    record["dialogue_history"][1] |= {"candidates": None, "logprobs": None}
    (read,) = colbench.read_records([json.dumps(record).encode()])
    assert "meta" not in read and "answer" not in read and read["of another"] is None
    assert not {"candidates", "logprobs"} & read["dialogue_history"][1].keys()


@pytest.mark.parametrize("text, message", [
    *((text, f"not JSON .{re.escape(text)} is not a finite number")  # also where it only passes
      for text in ("NaN", "Infinity", "-Infinity")),
    ('0}, "task": {"kind": ["words"]', "task.kind is not text"),
    ('0}, "reward": "1", "x": {"y": 0', "reward is not a number"),
    ('0}, "sample": 0.5, "x": {"y": 0', "sample is not an integer"),
    ('0}, "meta": {"seed": "a"', "meta.seed is not an integer"),
    ('0}, "answered": 1, "x": {"y": 0', "answered is not true or false"),
    *((f'0}}, "dialogue_history": [{{"content": "", "role": "user", {text}}}], "x": {{"y": 0',
       re.escape(f"dialogue_history[0].{what}")) for text, what in (
        ('"token_ids": [3, 0.5]', "token_ids[1] is not an integer"),
        ('"logprobs": [0, null]', "logprobs[1] is not a number"),
        ('"advantage": "1"', "advantage is not a number"),
        ('"candidates": [{"logprob": "0"}]', "candidates[0].logprob is not a number")))])
def test_what_a_record_may_not_hold_is_named(text, message):
    line = '{"of another": {"x": HERE}}'.replace("HERE", text)
    with pytest.raises(SystemExit, match=f"stdin, line 1: {message}"):
        list(colbench.read_records([line.encode()]))
