"""Broken JSON lines into every stage: one clear line that names the place, or a counted skip; never a traceback.

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
from conftest import lines

SEED = int(os.environ.get("FUZZ_SEED", 0))
JUNK = (True, False, -1, 7, 1.5, 10 ** 30, float("nan"), float("inf"), "", "x", "\ud800", "\x00\x1b[2J", "<html>" * 9,
        "y" * 300_000, [], {}, [[]], [None], ["a", 1], {"a": None}, {"role": "user"}, {"role": "wizard", "content": "x"})


def places(x, path=()):
    """The paths of all values in x, nested ones, too."""
    yield from [path] if path else []
    for key, value in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ():
        yield from places(value, (*path, key))


def broken_value(r, record):
    """A value of the record, at any depth, is replaced, nulled, or taken away."""
    record = json.loads(json.dumps(record))
    *path, key = r.choice(list(places(record)))
    at = record
    for k in path:
        at = at[k]
    kind = r.randrange(4)
    if kind == 0:
        del at[key]
    else:
        at[key] = None if kind == 1 else r.choice(JUNK)
    return json.dumps(record).encode()


def broken_line(r, line):
    """The bytes of a line, cut, damaged, or with what JSON allows and nobody expects."""
    at = r.randrange(1, len(line))
    return r.choice((
        lambda: line[:at], lambda: line[at:], lambda: line[:at] + b"\xff\xfe" + line[at:], lambda: line + line,
        lambda: line[:at] + b"\x00" + line[at:], lambda: b"", lambda: b"   ", lambda: b"null", lambda: b"[1, 2]",
        lambda: b"\xef\xbb\xbf" + line, lambda: b"[" * 100_000, lambda: b'{"a":' * 500 + b"1" + b"}" * 500,
        lambda: b'{"task": 5, ' + line[1:], lambda: line[:-1] + b', "task": {}}', lambda: line[:-1] + b', "sample": 1}',
        lambda: b'{"x": ' + b"1" * 5000 + b", " + line[1:], lambda: line.decode().encode("utf-16")))()


def damaged(r, given):
    """(JSON lines as bytes, the line that is broken): one of the records is, or the file as a whole is odd."""
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
    """Episodes that every stage takes: two a task, one of them solved, with candidates and advantages, short."""
    rs = sorted(map(json.loads, collected.splitlines()), key=lambda r: (r["task"]["id"], r["sample"]))[:4]
    for r in rs:
        r["reward"] = 1.0 if r["sample"] == 0 else 0.3
        r["dialogue_history"] = r["dialogue_history"][:4]
        r["task"]["test_cases"] = dict(list(r["task"]["test_cases"].items())[:1])
        for m in r["dialogue_history"]:
            m["content"] = m["content"][:60]
            if m["role"] == "assistant":
                m["candidates"] = m["candidates"][:2]
                for x in (m, *m["candidates"]):
                    x["token_ids"], x["output"] = x["token_ids"][:3], x["output"][:60]
                m["logprobs"] = m["logprobs"][:3]
                for n, c in enumerate(m["candidates"]):
                    c["advantage"] = n - 0.5
    return rs


STAGES = {  # module, flags, cases, what it reads of an episode
    "evaluate": (evaluate, ["--bootstrap", "0"], 1100, None),
    "report": (evaluate, ["--bootstrap", "0", "--html", "HTML"], 200, None),
    "grade": (colbench, ["grade", "--workers", "1"], 100, None),
    "check": (colbench, ["check", "--workers", "1"], 40, lambda r: {"task": r["task"]}),
    "collect": (collect, ["--model", "MODEL", "--max_tokens", "2", "--max_turns", "2"], 80,
                lambda r: {"task": r["task"]}),
    "candidates": (collect, ["--model", "MODEL", "--max_tokens", "2", "--candidates", "2"], 80, None),
    "critic": (train_critic, ["--model", "MODEL", "--out", "OUT", "--epochs", "1", "--held_out", "0"], 150, None),
    "dpo": (train_policy, ["--model", "MODEL", "--out", "OUT", "--batch_size", "64", "--mix", "0.5"], 150, None),
    "rft": (train_policy, ["--model", "MODEL", "--out", "OUT", "--loss", "rft", "--epochs", "1"], 100, None)}


@pytest.mark.parametrize("stage", STAGES)
def test_no_input_gets_past_or_breaks_a_stage(stage, good, tiny_dir, tmp_path, monkeypatch, capfd):
    module, flags, cases, read = STAGES[stage]
    load_lm = cache(model.load_lm)
    monkeypatch.setattr(model, "load_lm", load_lm)
    said = {"ended": 0, "done": 0, "skipped": 0}
    for n in range(cases):
        r = random.Random(f"{SEED} {stage} {n}")
        (data, line), skip, out = damaged(r, [read(x) if read else x for x in good]), n % 2, []
        names = {"MODEL": tiny_dir, "OUT": str(tmp_path / str(n)), "HTML": str(tmp_path / "report.html")}
        monkeypatch.setattr(module, "open_stdout", lambda: lambda x: out.append(json.dumps(x)))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        error = ""
        try:
            module.main(module.get_args([*(names.get(f, f) for f in flags), "--skip_bad", str(skip)]))
        except SystemExit as e:
            error = str(e.code)
        case = f"{stage} {n}: {data[:3000]!r}"
        err = capfd.readouterr().err
        skipped = re.search(r"(\d+) of (\d+) lines of stdin are no such records and were skipped", err)
        assert "Traceback" not in err, case
        said["ended" if error else "skipped" if skipped else "done"] += 1
        if error:
            assert error.startswith("error: ") and "\n" not in error and len(error) < 500, (error[:999], case)
            named = re.match(r"error: stdin, line (\d+): .+ \(--skip_bad 1 leaves such lines out\)$", error)
            assert int(named[1]) == line and not skip if named else ", line " not in error, (error, case)
        elif module is not evaluate and stage not in ("dpo", "rft", "check"):
            there, lost = data.count(b"\n") + (not data.endswith(b"\n")), int(skipped[1]) if skipped else 0
            twice = re.search(r"(\d+) episodes of tasks that stdin repeats", err)
            lost += int(twice[1]) if twice else 0
            assert len(out) == there - lost, case
    assert said["ended"] and said["done"] and (said["skipped"] or stage == "rft"), said


def test_a_null_is_a_field_that_is_not_there(good):
    record = json.loads(json.dumps(good[0])) | {"meta": None, "answer": None}
    record["dialogue_history"][1] |= {"candidates": None, "logprobs": None}
    (read,) = utils.read_jsonl([json.dumps(record | {"of another": None}).encode()])
    assert "meta" not in read and "answer" not in read and read["of another"] is None
    assert not {"candidates", "logprobs"} & read["dialogue_history"][1].keys()


def test_a_line_of_50_mb_is_a_record_like_any_other(good, monkeypatch, capsys):
    big = {**good[0], "note": "x" * 50_000_000}
    out = []
    monkeypatch.setattr(evaluate, "open_stdout", lambda: out.append)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines([big, good[1]]).encode())))
    evaluate.main(evaluate.get_args([]))
    assert out[0]["episodes"] == 2
