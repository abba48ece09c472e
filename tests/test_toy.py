"""The functions of toy.py, bare and in English, and of toy_pages.py: what they make up."""
import itertools
import random
import re
from contextlib import closing

import pytest
import torch

import colbench
import collect
import model
import toy
import toy_pages
from colbench import ANSWER, Grader, agent_messages, fill, read_action
from conftest import demos, plain_ids
from toy import DETAILS, SPLITS, WORLDS, asked_for, slots_of

ENGLISH = WORLDS["english"]


def take(n, split="train", seed=0, world="slots", **knobs):
    """So many tasks of a world of toy, or of toy_pages."""
    of = toy_pages if world == "pages" else toy
    knobs |= {"seed": seed} if of is toy_pages else {"seed": seed, "world": world}
    args = of.get_args(["tasks", *(str(x) for k, v in knobs.items() for x in ("--" + k, v))])
    return list(itertools.islice(of.tasks(split, args), n))


def said(task, message):
    return toy.reply(task, [{"role": "assistant", "content": message}])


def numbers_in(text):
    """All numbers above 1 in a text."""
    return [int(n) for n in re.findall(r"[1-9]\d*", text)]


# --- tasks ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("world", [*WORLDS, "pages"])
def test_splits_share_no_task_and_the_seed_decides(world):
    drawn = [take(300, split, seed, world, usual=0.3) for seed, split in enumerate(SPLITS)]
    for field in "id", "ground_truth":
        of = [{t[field] for t in made} for made in drawn]
        assert min(map(len, of)) > 130 and len(set.union(*of)) == sum(map(len, of))
    assert take(50, "val", 3, world) == take(50, "val", 3, world) != take(50, "val", 4, world)


def values_of(code, tests):
    space = {}
    exec(code, space)  # our own code
    return [eval(test, space) for test in tests.values()]


@pytest.mark.parametrize("world", WORLDS)
def test_every_other_value_of_a_slot_fails_a_test(world):
    for task in (t for split in SPLITS for t in take(20, split, 7, world, max_slots=5)):
        code, tests = task["ground_truth"], task["test_cases"]
        assert len(tests) == 10 == len(set(tests.values()))
        right = values_of(code, tests)
        assert None not in right
        for name, value in slots_of(code).items():
            for other in map(str, WORLDS[world].details[name].values):
                wrong = code.replace(f"{name}={value}", f"{name}={other}", 1)
                assert (values_of(wrong, tests) == right) == (other == value), (wrong, tests)
        assert not numbers_in(task["problem_description"])  # the agent must ask


# --- the human ------------------------------------------------------------------------------------

@pytest.mark.parametrize("hidden, message, reply", [
    ({}, "what is the rate?", "rate=3"), ({}, "op, rate?", "op=max"),
    ({}, "rates?", "i do not know"), ({}, "what is the fee?", "i do not know"),
    ({"hidden_information": "def f(x, rate=8): ..."}, "the rate?", "rate=8")])
def test_the_human(hidden, message, reply):
    code = "def f(x, rate=3, op=max): return x"
    assert said({"problem_description": "p", "ground_truth": code, **hidden}, message) == reply


def test_the_human_tells_one_number_and_never_code():
    """Whatever it hears: its own questions, words of the code, and the code itself."""
    r = random.Random(0)
    words = [*DETAILS, *"def return x total = min( max( price? fee, what is the code".split()]
    for task in take(60, world="english", max_slots=5):
        code, values = task["ground_truth"], slots_of(task["ground_truth"])
        heard = [code, f"{ANSWER} {code}", *code.splitlines()]
        heard += [" ".join(r.choices(words, k=r.randrange(12))) for _ in range(20)]
        heard += [fill(q, unit="day") for detail in DETAILS.values() for q in detail.questions]
        for message in heard:
            reply, slot = said(task, message), asked_for(ENGLISH, message)
            assert collect.redact(reply, task) == reply and not set("=()_:") & set(reply)
            assert numbers_in(reply) == ([int(values[slot])] if slot in values else []), message
            assert slot in values or reply in ENGLISH.unknown
            assert reply == said(task, message)  # the same each time


def test_the_human_of_pages_names_the_difference():
    (task,) = take(1, world="pages")
    right = toy_pages.page_slots(task["ground_truth"])
    for slot, values in toy_pages.PAGE_VALUES.items():
        for value in set(values) - {right[slot]}:
            page = fill(toy_pages.PAGE_TEXT, theme="school", **{**right, slot: value})
            reply = toy_pages.reply(task, [{"content": page}])
            assert {slot, right[slot]} <= {*re.findall(r"\w+", reply)}
            assert reply.endswith(f", not {value}")


# --- demonstrations -------------------------------------------------------------------------------

@pytest.mark.parametrize("of", [toy, toy_pages])
def test_demonstrations_obey_the_rules(of):
    for d in demos(300, seed=2, of=of):
        messages = agent_messages(d)
        roles = [m["role"] for m in d["dialogue_history"]]
        assert 1 <= len(messages) <= 6 and roles == ["user", "assistant"] * len(messages)
        for i, m in enumerate(messages):
            content, answer = read_action(m["output"], i == 5)
            assert content == m["content"] and (answer is None) == (i < len(messages) - 1)
        kind = colbench.environment(d["task"])
        assert d["answer"] == kind.final_answer(d["dialogue_history"], answer)


def test_the_toy_is_that_of_the_results():
    """RESULTS.md's numbers are of a toy with these defaults."""
    want = {"n": 8000, "seed": 0, "usual": 0.0, "max_turns": 6, "at_once": 0.15, "early": 0.3,
            "distract": 0.15, "noise": 0.04, "silent": 0.12, "hidden": 0.4, "world": "slots",
            "min_slots": 2, "max_slots": 4}
    assert {**vars(toy.get_args(["demos"])), "command": 0} == {**want, "command": 0}
    got = vars(toy.get_args(["tasks"]))
    assert (got["n"], got["usual"], got["split"]) == (500, 0.65, "train")


PERFECT = {**dict.fromkeys(("at_once", "early", "distract", "noise", "silent", "hidden"), 0),
           "max_turns": 10}


def right(d):
    return d["answer"] == d["task"]["ground_truth"]


def marked(d):
    """The number of the message that hands in an answer; 0 if there is none."""
    return next((n for n, m in enumerate(agent_messages(d), 1) if ANSWER in m["output"]), 0)


def reads_it(d):
    return d["task"]["ground_truth"] in d["dialogue_history"][0]["content"]


@pytest.mark.parametrize("of", [toy, toy_pages])
@pytest.mark.parametrize("knobs, fact, share", [
    ({}, right, 1), ({}, reads_it, 0), ({"hidden": 1}, reads_it, 1), ({"silent": 1}, marked, 0),
    ({"at_once": 1}, lambda d: marked(d) == 1, 1), ({"noise": 1, "hidden": 1}, right, 0)])
def test_knobs_of_demonstrations(of, knobs, fact, share):
    """Where no other knob is turned."""
    assert sum(map(fact, demos(60, of=of, **PERFECT | knobs))) == 60 * share


def test_who_asks_for_every_detail_can_write_the_function():
    """A perfect agent, which reads the description and not the reference, solves every task."""
    with closing(Grader()) as grader:
        for r in demos(40, world="english", **PERFECT | {"max_turns": 7, "max_slots": 5}):
            assert grader.grade(r["task"], r["answer"])["reward"] == 1, r


# --- the model ------------------------------------------------------------------------------------

NASTY = ["", "\n\n \t\r\n", "hello wörld 👩‍👩‍👧 日本語", "▁Ġ <|end|><|user|> <0x41> \x00\x7f"]


def test_tiny_is_small_a_function_of_its_seed_and_takes_any_text(tiny_dir):
    weights = [toy.tiny_model(demos(30), seed)[0].state_dict() for seed in (0, 0, 1)]
    same = lambda a, b: all(torch.equal(a[k], b[k]) for k in a)
    assert same(weights[0], weights[1]) and not same(weights[0], weights[2])
    tiny, chat = model.load(tiny_dir)
    tokenizer = chat.tokenizer
    assert sum(p.numel() for p in tiny.parameters()) < 400_000
    control = set(tokenizer.added_tokens_decoder)
    for text in [*NASTY, *(m["content"] for d in demos(20, seed=9) for m in d["dialogue_history"])]:
        ids = plain_ids(tokenizer, text)
        assert tokenizer.decode(ids) == text and not control & set(ids)
