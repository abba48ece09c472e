"""tests/experiments/lessons.py and choose_critic.py, on scored records made by hand and by chance."""
import itertools
import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest

import train_policy
from colbench import ANSWER
from conftest import dialogue, lines, read_by, records, script, stdin_of, succeed
from experiments import lessons
import model as M
from model import turn_actions

ANSWERED, ASKED = f"{ANSWER}\nx = {{}}", "which {}?"


def message(r, kind, advantage):
    """A candidate or message of a kind, with tokens of its own."""
    text = (ANSWERED if kind == "answer" else ASKED).format(r.random())
    return {"role": "assistant", "content": text, "output": text, "advantage": advantage,
            "token_ids": [r.randrange(5, 60) for _ in range(6)], "logprob": r.gauss(-9, 3),
            **({"cut": True} if kind == "truncated" else {})}


def episode(r, number, turns, reward=0.0):
    """A scored record. turns: for each message, its advantage and its candidates' (kind, A)."""
    history = dialogue("write f(x)")
    for advantage, candidates in turns:
        said = message(r, "question", advantage)
        said["candidates"] = [message(r, *candidate) for candidate in candidates]
        history += [said, {"role": "user", "content": "ok"}]
    return add_value({"task": {"id": number // 2, "problem_description": "f", "ground_truth": "def f(): 0",
                     "test_cases": {"a": "f()"}},
            "sample": number % 2, "dialogue_history": history[:-1], "reward": reward})


def shown(given, *flags):
    """(the numbers that it prints, its messages) for records."""
    done = succeed("tests/experiments/lessons.py", *flags, stdin=given)
    return json.loads(done.stdout), done.stderr


def order(better, worse):
    """A tie counts half."""
    return 0.5 if better == worse else better > worse


def some_episodes(seed, n=12):
    r = random.Random(seed)
    kinds = ["question", "answer", "answer", "truncated"]
    return [episode(r, i, [(r.gauss(0, 1), [(r.choice(kinds), r.gauss(0, 1))
                                            for _ in range(r.randint(0, 7))])
                           for _ in range(r.randint(1, 3))], r.choice([0.0, 0.5, 1.0]))
            for i in range(n)]


@pytest.mark.parametrize("flags", [[], ["--pairs_per_turn", 2, "--seed", 1],
                                   ["--logprob_weight", 0.2, "--pairs_per_turn", 1]])
def test_its_pairs_are_those_that_the_trainer_draws(flags, tiny_dir):
    given, (model, chat) = some_episodes(0, n=20), M.load(tiny_dir)
    for record in given:
        for history, actions in turn_actions(record):
            prompt = M.packed(chat.prompt_ids(history))
            for x in actions:
                x["token_ids"] = chat.text_ids(x["output"] + ("" if "cut" in x else chat.end))
                turn = M.Turn(prompt, M.packed(x["token_ids"]))
                x["logprob"] = M.turn_logps(model, [turn], 9999)[turn].sum().item()
    flags = [*map(str, flags)]
    groups, held_out = read_by(given, train_policy, "--model", tiny_dir, *flags)
    assert not held_out
    trained = {(pair.chosen[0][1], pair.rejected[0][1]) for pairs in groups for pair in pairs}
    drawn = set()
    for record in given:
        for _, (_, *candidates) in turn_actions(record):
            if len(candidates) > 1:
                ranked = lessons.Ranked(lessons.get_args(flags), candidates)
                drawn |= {tuple("".join(map(chr, c["token_ids"])) for c in pair)
                          for pair in ranked.pairs}
    assert len(drawn) > 9 and drawn == trained


def test_the_numbers_are_those_of_a_plain_count():
    given = some_episodes(1, n=40)
    got, _ = shown(given, "--logprob_weight", 0.3)
    spreads, centred = [], []  # of all turns
    for record in given:
        for _, (_, *candidates) in turn_actions(record):
            if len(candidates) > 1:
                pair = np.array([[c["advantage"], 0.3 * c["logprob"]] for c in candidates])
                spreads.append(pair.std(0))
                centred.append(pair - pair.mean(0))
    row = got["by_turn"]["all"]
    assert row["turns"] == len(spreads)
    assert [row["advantage_spread"], row["logprob_spread"]] == pytest.approx(
        np.mean(spreads, 0), abs=6e-4)
    centred = np.concatenate(centred)
    assert row["correlation"] == pytest.approx(np.corrcoef(centred.T)[0, 1], abs=0.05)
    right = n = 0
    for one, other in itertools.permutations(given, 2):
        if one["task"] == other["task"] and one["reward"] == 1 > other["reward"]:
            sums = [sum(m["advantage"] for m in record["dialogue_history"] if "advantage" in m)
                    for record in (one, other)]
            right, n = right + order(*sums), n + 1
    assert n > 3 and (got["ordered"], got["trajectory_pairs"]) == (right, n)
    assert sum(row["pairs"] for turn, row in got["by_turn"].items() if turn != "all") == row["pairs"]


def test_each_kind_is_counted_on_its_side():
    r = random.Random(0)
    turn = [("answer", 3.0), ("question", 2.0), ("truncated", 1.0), ("answer", 0.0)]
    got, said = shown([episode(r, 0, [(0.0, turn)])])
    assert got["by_turn"]["1"] == {
        **got["by_turn"]["all"], "turns": 1, "pairs": 4, "answers_chosen": 50.0, "answers": 50.0,
        "answers_rejected": 50.0, "truncated_upper": 0.0, "truncated_lower": 50.0, "gap": 2.0,
        "advantage_spread": round(math.sqrt(1.25), 3), "logprob_spread": 0.0, "correlation": None}
    assert got["warnings"] == [] and "warning" not in said
    header, first, last = (re.split(r"  +", line.strip()) for line in said.splitlines()[:3])
    assert header == [*lessons.COLUMNS] and first[0] == "1" and last[0] == "all"
    assert len(header) == len(first) == len(last)


RIGHT = [("question", 1.0), ("answer", 0.0)]
CASES = {  # what is wrong: (turns of a solved and of an unsolved episode, flags)
    "never to answer": ([(1.0, RIGHT)], [(0.0, RIGHT)], []),
    "": ([(1.0, RIGHT), (1.0, [("answer", 1.0), ("question", 0.0)])], [(0.0, RIGHT)], []),
    "truncated messages rank higher": ([(1.0, [("truncated", 1.0), ("question", 0.0)])],
                                       [(0.0, [("question", 1.0), ("question", 0.0)])], []),
    "fewer than two thirds": ([(0.0, RIGHT), (0.0, RIGHT[::-1] + [("answer", 2.0)])],
                              [(1.0, [])], [])}


@pytest.mark.parametrize("wrong", CASES)
def test_what_a_policy_should_not_learn_is_warned_of(wrong):
    solved, unsolved, flags = CASES[wrong]
    r = random.Random(0)
    got, said = shown([episode(r, 0, solved, 1.0), episode(r, 1, unsolved)], *flags)
    assert [wrong in text for text in got["warnings"]] == [True] * bool(wrong)
    assert said.count("warning: ") == len(got["warnings"])


def test_an_empty_candidate_is_a_question():
    """collect.py writes no content for candidates, and a model may write nothing."""
    given = episode(random.Random(0), 0, [(0.0, RIGHT)])
    empty, answer = given["dialogue_history"][1]["candidates"]
    empty["output"] = ""
    for candidate in empty, answer:
        del candidate["content"]
    got, _ = shown([given])
    assert got["by_turn"]["1"]["answers"] == 50.0


def test_records_without_scores_are_an_error():
    given = some_episodes(0)
    for record in given:
        for _, actions in turn_actions(record):
            for action in actions:
                del action["advantage"]
    with stdin_of(given), pytest.raises(SystemExit, match="as train_critic.py adds it"):
        lessons.main(lessons.get_args([]))
    assert records(lines(given)) == given


# --- choose_critic.py -----------------------------------------------------------------------------

def scored_again(given, seed):
    """The same episodes with other advantages, of which few values make ties likely."""
    r, given = random.Random(seed), json.loads(json.dumps(given))
    for record in given:
        for _, actions in turn_actions(record):
            for action in actions:
                action["advantage"] = r.choice([-1.0, 0.0, 1.0])
        add_value(record)
    return given


def add_value(record):
    """As train_critic.py does."""
    record["value"] = sum(m["advantage"] for m in record["dialogue_history"] if "advantage" in m)
    return record


def count(given):
    """(pairs ordered right, pairs), of a task's first solved trajectory with each unsolved one."""
    right = n = 0
    for task in {record["task"]["id"] for record in given}:
        sums = {reward: [sum(m["advantage"] for m in record["dialogue_history"] if "advantage" in m)
                         for record in given
                         if record["task"]["id"] == task and (record["reward"] == 1) == reward]
                for reward in (True, False)}
        for other in sums[False] if sums[True] else ():
            right, n = right + order(sums[True][0], other), n + 1
    return right, n


def test_the_critic_that_orders_most_pairs_is_chosen(tmp_path):
    tied, winners = 0, set()
    for seed in range(8):
        given = some_episodes(seed)
        names = [f"{tmp_path}/{seed}-{critic}.jsonl" for critic in "abc"]
        counts = []
        for number, name in enumerate(names):
            scored = scored_again(given, f"{seed} {number}")
            with open(name, "w") as f:
                f.write(lines(random.Random(number).sample(scored, len(scored))
                              if number == 2 else scored))
            counts.append(count(records(Path(name).read_text())))
        done = succeed("tests/experiments/choose_critic.py", *names)
        best = [right for right, _ in counts].index(max(counts)[0])
        assert done.stdout == names[best] + "\n"
        assert done.stderr.splitlines() == [
            f"{name} orders {right:g} of {n} trajectory pairs correctly"
            for name, (right, n) in zip(names, counts)]
        winners.add(best)
        tied += [right for right, _ in counts].count(max(counts)[0]) > 1
    assert tied and len(winners) > 1


@pytest.mark.parametrize("change, error", [
    (lambda given: given[:-1], "do not belong together"),
    (lambda given: given[:-1] + [{**given[-1], "sample": 7}], "do not belong together"),
    (lambda given: [{**record, "reward": 0.0} for record in given], "do not belong together"),
    (lambda given: [{**record, "dialogue_history": dialogue("f", "ask", "reply")}
                    for record in given], "do not belong together"),
    (None, "No such file")])
def test_nothing_is_chosen_of_critics_that_cannot_be_compared(change, error, tmp_path):
    given = some_episodes(0)
    names = [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]
    Path(names[0]).write_text(lines(given))
    if change:
        Path(names[1]).write_text(lines(change(given)))
    done = script("tests/experiments/choose_critic.py", *names)
    assert done.returncode == 1 and done.stdout == "" and error in done.stderr
