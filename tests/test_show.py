"""show.py: what it marks is what a trainer trains, and the rest is what the model reads."""
import io
import re
import sys
from itertools import chain

import pytest
from transformers import AutoTokenizer

import train_critic
import train_policy
from colbench import agent_messages
from conftest import demos, metrics, read_by, script, stdin_of, steps, succeed, train
from experiments import show

SHOW = "tests/experiments/show.py"
HEADING = re.compile(r"^--- pair (\d+) of (\d+), (\w+): (\d+) messages, (\d+) trained tokens ---\n",
                     re.M)


def shown(stdout):
    """[(heading's fields, text)] of show.py's stdout."""
    headings = [*HEADING.finditer(stdout)]
    ends = [m.start() for m in headings[1:]] + [len(stdout)]
    return [(m.groups(), stdout[m.end():end].removesuffix("\n\n"))
            for m, end in zip(headings, ends)]


def rendered(tokenizer, history):
    return tokenizer.apply_chat_template(history, tokenize=False)


def test_demonstrations_are_those_of_transformers_with_each_message_marked(tiny_dir):
    """Without marks it is the template's text; marked are the agent's messages and their ends."""
    given, tokenizer = demos(8), AutoTokenizer.from_pretrained(tiny_dir)
    done = succeed(SHOW, "train_policy.py", "--loss", "rft", "--all", 1, "--model", tiny_dir,
                   stdin=given)
    want = {rendered(tokenizer, r["dialogue_history"]): r["dialogue_history"] for r in given}
    sides = shown(done.stdout)
    assert len(sides) == len(given) == len(want)
    for number, ((i, n, side, messages, trained), text) in enumerate(sides, 1):
        marks = re.findall(r"\[\[(.*?)\]\]", text, re.S)
        history = want.pop(re.sub(r"\[\[|\]\]", "", text))
        agent = [m["content"] + "<|end|>" for m in history if m["role"] == "assistant"]
        assert (int(i), int(n), side, int(messages)) == (number, len(given), "chosen", len(agent))
        assert marks == agent
        ids = [tokenizer(mark, add_special_tokens=False)["input_ids"] for mark in marks]
        assert int(trained) == sum(map(len, ids))


def test_both_sides_are_those_of_the_trainers_pairs(ranked, tiny_dir):
    """Of the critic, which reads the reference, and of the policy, whose pairs are candidates."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    for trainer, flags in ((train_critic, ["--held_out", 0.4]), (train_policy, [])):
        flags = [*flags, "--model", tiny_dir]
        done = succeed(SHOW, trainer.__name__ + ".py", *flags, stdin=ranked)
        pairs = [*chain(*read_by(ranked, trainer, *flags)[0])]  # those held out are left out
        want = [(side, turns) for pair in pairs
                for side, turns in (("chosen", pair.chosen), ("rejected", pair.rejected))]
        got = shown(done.stdout)
        assert sorted((side, int(trained)) for (*_, side, _, trained), _ in got) == sorted(
            (side, sum(len(turn.action) for turn in turns)) for side, turns in want)
        assert done.stdout.count("Hidden reference:") >= len(got) * (trainer is train_critic)
        marks = [mark for _, text in got for mark in re.findall(r"\[\[.*?\]\]", text, re.S)]
        texts = (tokenizer.decode([*map(ord, turn.action)]) for _, turns in want for turn in turns)
        printable = ("".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
                     for text in texts)
        assert sorted(marks) == sorted(f"[[{text}]]" for text in printable)


def test_text_that_looks_like_a_mark_or_an_escape_is_text(tiny_dir):
    (given,) = demos(1)
    given["dialogue_history"][0]["content"] += " \x1b[32mgreen\x9b31m"
    done = succeed(SHOW, "train_policy.py", "--loss", "rft", "--all", 1, "--model", tiny_dir,
                   stdin=[given])
    assert "\x1b" not in done.stdout and "\x9b" not in done.stdout
    assert "?[32mgreen?31m" in done.stdout


def test_a_prompt_that_drops_earlier_text_is_said_to_differ(tiny_dir, tmp_path):
    """As templates do that cut thoughts out of earlier messages."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "m['content']", "m['content'].split('</think>')[-1]")
    assert "split" in tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path)
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes(open(f"{tiny_dir}/{name}", "rb").read())
    given = next(r for r in demos(50) if len(agent_messages(r)) == 2)
    agent_messages(given)[0]["output"] = "why?</think>" + agent_messages(given)[0]["content"]
    agent_messages(given)[0]["content"] = agent_messages(given)[0]["output"]
    done = script(SHOW, "train_policy.py", "--loss", "rft", "--all", 1, "--model", tmp_path,
                  stdin=[given])
    assert "... the next prompt shares" in done.stdout, done.stderr


def test_a_terminal_has_colours(tiny_dir, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    one, two = demos(2)
    two |= {"task": one["task"], "sample": 1}
    one["reward"], two["reward"] = 1.0, 0.0
    monkeypatch.setattr(sys, "stdout", terminal)
    with stdin_of([one, two]):
        show.main(["train_critic.py", "--held_out", "0", "--model", tiny_dir])
    out = terminal.getvalue()
    for color, record in ((32, one), (31, two)):
        marks = re.findall(rf"\x1b\[{color}m(.*?)\x1b\[0m", out, re.S)
        assert marks == [m["content"] + "<|end|>" for m in agent_messages(record)]
    assert "[[" not in out


def test_errors_are_those_of_the_trainer(tiny_dir):
    done = script(SHOW, "train_critic.py", "--model", tiny_dir, stdin=demos(2))
    assert done.returncode and "error: " in done.stderr.splitlines()[-1]
    assert "Prints what a trainer trains on" in script(SHOW, "runs/critic", "x").stderr


def test_the_pairs_of_all_steps_are_those_that_were_trained(ranked, tiny_dir, tmp_path, capsys):
    """Each epoch's are all of the data's. A step's tokens are those that its row counts."""
    flags = ["--model", tiny_dir, "--batch_size", 5, "--epochs", 2, "--seed", 3]
    out = tmp_path / "out"
    train(ranked, "train_policy.py", *flags, "--out", out)
    pairs = [*chain(*read_by(ranked, train_policy, *flags)[0])]
    found = []
    for step, row in enumerate(steps(out)):
        with stdin_of(ranked):
            args, batch = show.pairs_of_step(str(out), step)
        assert args.seed == 3 and len(batch) <= 5
        turns = {turn for pair in batch for turn in (*pair.chosen, *pair.rejected)}
        prefixes = {(turn.prompt + turn.action)[:n + 1]
                    for turn in turns for n in range(len(turn.prompt + turn.action))}
        assert row["tokens"] == len(prefixes)  # of their tree
        found += batch
    n = len(pairs)
    assert len(found) == 2 * n and sorted(found[:n]) == sorted(found[n:]) == sorted(pairs)
    assert found[:n] != found[n:]
    with stdin_of(ranked):
        show.main([str(out), "1"])
    printed = shown(capsys.readouterr().out)
    assert [int(trained) for (*_, trained), _ in printed] == [
        len(side[0].action) for pair in found[5:10] for side in (pair.chosen, pair.rejected)]

    n = metrics(out)[0]["steps"]  # other steps, runs and data have none
    for run, step, why in ((out, n, f"no step {n}: the run in {out} has {n}, counted from 0"),
                           (tmp_path, 0, f"in {tmp_path} has 0,")):
        with pytest.raises(SystemExit, match=why):
            show.pairs_of_step(str(run), step)
    with pytest.raises(SystemExit, match="stdin is not the data of the run in"):
        with stdin_of(ranked[:-1]):
            show.pairs_of_step(str(out), 0)
