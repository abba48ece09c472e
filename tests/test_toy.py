"""The functions of toy.py, bare and in English: tasks, human, demonstrations, model."""
import itertools
import random
import re

import pytest
import torch

import colbench
import model
import toy
from colbench import ANSWER, Grader, agent_messages, fill, read_action
from conftest import HUMAN, demos, plain_ids, records, script, shell
from toy import BUGS, DETAILS, SPLITS, STORIES, WORLDS, asked_for, slots_of

ENGLISH = WORLDS["english"]


def take(n, split="train", seed=0, world="slots", **knobs):
    given = {"seed": seed, "world": world, **knobs}.items()
    args = toy.get_args(["tasks", *(str(x) for k, v in given for x in ("--" + k, v))])
    return list(itertools.islice(toy.tasks(split, args), n))


def said(task, message):
    return toy.reply(task, [{"role": "assistant", "content": message}])


def numbers_in(text):
    """All numbers above 1 in a text."""
    return [int(n) for n in re.findall(r"[1-9]\d*", text)]


# --- tasks ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("world", WORLDS)
def test_splits_share_no_task_and_the_seed_decides(world):
    drawn = {split: take(300, split, seed, world, max_slots=5, usual=0.5)
             for seed, split in enumerate(SPLITS)}
    for field in "id", "ground_truth":
        a, b, c = ({t[field] for t in drawn[split]} for split in SPLITS)
        assert min(map(len, (a, b, c))) > 150 and len(a | b | c) == len(a) + len(b) + len(c)
    assert take(50, "val", 3, world) == take(50, "val", 3, world) != take(50, "val", 4, world)


def values_of(code, tests):
    space = {}
    exec(code, space)  # our own code
    return [eval(test, space) for test in tests.values()]


@pytest.mark.parametrize("world", WORLDS)
def test_every_other_value_of_a_slot_fails_a_test(world):
    for task in (t for split in SPLITS for t in take(40, split, 7, world, max_slots=5)):
        code, tests = task["ground_truth"], task["test_cases"]
        assert len(tests) == 10 == len(set(tests.values()))
        right = values_of(code, tests)
        assert None not in right
        for name, value in slots_of(code).items():
            for other in map(str, WORLDS[world].details[name].values):
                wrong = code.replace(f"{name}={value}", f"{name}={other}", 1)
                assert (values_of(wrong, tests) == right) == (other == value), (wrong, tests)
        assert not numbers_in(task["problem_description"])  # the agent must ask


def test_a_description_in_english_tells_which_details_are_missing():
    for task in take(200, world="english", max_slots=5):
        unit = STORIES[task["id"].split("-")[0]][1]
        told = task["problem_description"].lower()
        missing = {slot for slot, detail in DETAILS.items()
                   if any(fill(clause, unit=unit).lower() in told for clause in detail.clauses)}
        assert missing == slots_of(task["ground_truth"]).keys()


@pytest.mark.parametrize("world", WORLDS)
def test_slots_are_asked_for_by_number(world):
    for low, high in ((2, 2), (5, 5), (3, 4)):
        for task in take(60, world=world, min_slots=low, max_slots=high):
            assert low <= len(slots_of(task["ground_truth"])) <= high
    with pytest.raises(SystemExit, match="no function has 7 to 9 slots"):
        take(1, world=world, min_slots=7, max_slots=9)


# --- the human ------------------------------------------------------------------------------------

def test_the_human():
    task = {"problem_description": "p", "ground_truth": "def f(x, rate=3, op=max): return x"}
    for message, reply in (
            ("what is the rate?", "rate=3"), ("op, rate?", "op=max"), ("rates?", "i do not know"),
            ("what is the fee?", "i do not know"), ("", "i do not know")):
        assert said(task, message) == reply
    hidden = {**task, "hidden_information": "def f(x, rate=8): ..."}
    assert said(hidden, "the rate?") == "rate=8"


HEARD = {  # questions of others
    "price": ["what's the hourly price?", "So what do you charge?", "What is the rate?"],
    "fee": ["Are there any additional costs?", "what is the base fare"],
    "free": ["Do the first few minutes cost nothing?", "Are some pages included?"],
    "minimum": ["Is there a lower bound for the price?", "the smallest amount one can pay"],
    "maximum": ["is there a cap on the total", "It should not exceed what?"],
    "limit": ["Is there a limit to the number of parcels?", "When do you refuse?"],
    "color": ["What color should it be?"], None: ["Hello! How can I help you today?", ""]}


def test_the_human_understands_its_own_wordings_and_those_of_others():
    for slot, detail in DETAILS.items():
        for _, unit in STORIES.values():
            for text in (*detail.questions, *detail.clauses, *HEARD[slot]):
                assert asked_for(ENGLISH, fill(text, unit=unit)) == slot, text
    assert all(asked_for(ENGLISH, text) is None for text in HEARD[None])


def test_the_human_tells_one_number_and_never_code():
    """Whatever it hears: its own questions, words of the code, and the code itself."""
    r = random.Random(0)
    words = [*DETAILS, *"def return x total = min( max( price? fee, what is the code".split()]
    for task in take(60, world="english", max_slots=5):
        code, values = task["ground_truth"], slots_of(task["ground_truth"])
        heard = [code, f"{ANSWER} {code}", *code.splitlines()]
        heard += [" ".join(r.choices(words, k=r.randrange(12))) for _ in range(20)]
        heard += [q for detail in DETAILS.values() for q in detail.questions]
        for message in heard:
            reply, slot = said(task, message), asked_for(ENGLISH, message)
            assert colbench.redact(reply, code) == reply and not set("=()_:") & set(reply)
            assert numbers_in(reply) == ([int(values[slot])] if slot in values else []), message
            assert slot in values or reply in ENGLISH.unknown
            assert reply == said(task, message)  # the same each time


# --- demonstrations -------------------------------------------------------------------------------

def test_demonstrations_obey_the_rules():
    for d in demos(300, seed=2):
        said = agent_messages(d)
        roles = [m["role"] for m in d["dialogue_history"]]
        assert 1 <= len(said) <= 6 and roles == ["user", "assistant"] * len(said)
        for i, m in enumerate(said):
            content, answer = read_action(m["output"], i == 5)
            assert content == m["content"] and (answer is None) == (i < len(said) - 1)
        assert answer == d["answer"]


def test_knobs_of_demonstrations():
    at_once = demos(60, at_once=1, silent=0)
    assert all(len(agent_messages(d)) == 1 for d in at_once)
    assert all(ANSWER in d["dialogue_history"][1]["content"] for d in at_once)
    assert not any(ANSWER in m["output"] for d in demos(60, silent=1) for m in agent_messages(d))
    assert all(len(agent_messages(d)) == 4 for d in demos(60, silent=1, max_turns=4))
    in_front = lambda d: d["task"]["ground_truth"] in d["dialogue_history"][0]["content"]
    fronts = lambda hidden: [in_front(d) for d in demos(200, hidden=hidden)]
    assert all(fronts(1)) and not any(fronts(0)) and 50 < sum(fronts(0.4)) < 110
    good = demos(60, at_once=0, early=0, distract=0, noise=0, silent=0, hidden=0, max_turns=10)
    assert all(d["answer"] == d["task"]["ground_truth"] for d in good)
    assert all(len(agent_messages(d)) > len(slots_of(d["answer"])) for d in good)
    informed = demos(60, at_once=1, noise=0, silent=0, hidden=1)
    assert all(d["answer"] == d["task"]["ground_truth"] for d in informed)  # it read the reference
    guessed = demos(60, at_once=1, noise=0, silent=0, hidden=0, min_slots=4)
    assert sum(d["answer"] == d["task"]["ground_truth"] for d in guessed) < 30
    buggy = demos(60, at_once=1, noise=1, silent=0, hidden=1)
    assert all(d["answer"] != d["task"]["ground_truth"] for d in buggy)
    for d in buggy:  # the bug is in the body
        assert slots_of(d["answer"]) == slots_of(d["task"]["ground_truth"])
    asked = demos(60, distract=1, at_once=0, early=0, silent=0, noise=0, hidden=0)
    assert sum(m["content"] == "i do not know" for d in asked for m in d["dialogue_history"]) > 60


def test_who_asks_for_every_detail_can_write_the_function():
    """A perfect agent, which reads the description and not the reference, solves every task."""
    probabilities = ("at_once", "early", "distract", "noise", "silent", "hidden")
    knobs = dict.fromkeys(probabilities, 0.0) | {"max_turns": 7, "max_slots": 5}
    with Grader() as grader:
        for r in demos(40, world="english", **knobs):
            assert grader.grade(r["task"], r["answer"])["reward"] == 1, r
    for bodies in ENGLISH.bodies.values():  # and a bug can be put into each
        assert all(any(right in body for right, _ in BUGS) for body in bodies.values())


# --- the model ------------------------------------------------------------------------------------

NASTY = ["", "\n\n \t\r\n", "hello wörld 🙂👩‍👩‍👧 日本語 \u202e", "a" * 300,
         "\ue0000\ue001 ▁Ġ", "<|end|><|user|> <0x41> \x00\x7f", "  def  f(x,rate=3):return 1  "]


def test_tiny_is_small_a_function_of_its_seed_and_takes_any_text(tiny_dir):
    weights = [toy.tiny(demos(30), seed)[0].state_dict() for seed in (0, 0, 1)]
    same = lambda a, b: all(torch.equal(a[k], b[k]) for k in a)
    assert same(weights[0], weights[1]) and not same(weights[0], weights[2])
    tiny, tokenizer = model.load(tiny_dir)
    assert sum(p.numel() for p in tiny.parameters()) < 400_000
    control = set(tokenizer.added_tokens_decoder)
    for text in [*NASTY, *(m["content"] for d in demos(20, seed=9) for m in d["dialogue_history"])]:
        ids = plain_ids(tokenizer, text)
        assert tokenizer.decode(ids) == text and not control & set(ids)


# --- the command line -----------------------------------------------------------------------------

@pytest.mark.full
def test_same_command_same_bytes():
    for what in ("tasks --split test", "demos"):
        one, two, other = (shell(f"python tests/toy.py {what} --n 300 --seed {seed}")
                           for seed in (5, 5, 6))  # each with a hash seed of its own
        made = [r["task"]["id"] for r in records(one.stdout)]
        assert len(made) == 300 and (what == "demos" or len(set(made)) == 300)  # none twice
        assert one.stdout == two.stdout != other.stdout


def test_tasks_of_others_fail_in_one_line(tiny_dir):
    other = {"problem_description": "p", "ground_truth": "def f(x): return x"}
    done = script("collect.py", "--model", tiny_dir, *HUMAN, "--max_tokens", 5, stdin=[other])
    assert done.returncode == 1 and not done.stdout
    assert "sample 0 failed: only tasks of tests/toy.py have slots" in done.stderr
