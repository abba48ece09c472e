"""The rules of an episode, ids and kinds of tasks, and ColBench's public files."""
import random
from decimal import Decimal

import pytest

import colbench
from colbench import ANSWER, read_action, task_id
from conftest import DOUBLE, SHARED, lines, records, task

REAL = SHARED / "colbench" / "backend_tasks.jsonl"

THOUGHTS = ["", "I wonder. OUTPUT: ", "I wonder.\nOUTPUT:\n", f"not yet: {ANSWER}? OUTPUT: ",
            f"Too early for {ANSWER} now.\nOUTPUT: ", f"<think>\n{ANSWER} no\n</think>\n\n",
            f"<think>hm, {ANSWER}\n</think>\n"]  # <think> is cut
SENT = [  # what the human is shown, and the answer that it marks
    ("which rate?", None), ("", None), (ANSWER, ""), (f"I know. {ANSWER} code", "code"),
    (f"{ANSWER}\ndef f(x): return x", "def f(x): return x"),
    (f"{ANSWER} a {ANSWER} b", f"a {ANSWER} b"),
    (f"Sure. {ANSWER}\ndef f():\n  print('OUTPUT:', 3)", "def f():\n  print('OUTPUT:', 3)"),
    (f"Enough.\n**{ANSWER}**\nprint('OUTPUT:', 3)", "print('OUTPUT:', 3)"),  # in bold
    (f"**{ANSWER}** def f(x): return x", "def f(x): return x"), (f"{ANSWER} **a**", "**a**"),
    (f"{ANSWER}\n\n    x = 1\n\n    if x:\n        y = 2", "x = 1\n\nif x:\n    y = 2"),
    (f"```python\n{ANSWER} x = 1\n```", "```\n x = 1\n```"),  # in a fence
    ('Is it "I want to answer:" that I write?', None), ("<b>Soon</b> I want to answer:", None),
    ("Shall f cut what is before </think>?", None), ("is <think>a</think> a thought?", None),
    (f"{ANSWER} def f(x): return x.split('</think>')[-1]",
     "def f(x): return x.split('</think>')[-1]"),
    (f"{ANSWER} '<think>x</think>'", "'<think>x</think>'")]


@pytest.mark.parametrize("thought", THOUGHTS)
@pytest.mark.parametrize("content, answer", SENT)
def test_read_action(thought, content, answer):
    """A thought is private. When rounds are over, any message counts as an answer."""
    for output in (thought + content, f"{thought}  {content} \n"):
        assert read_action(output, last=False) == (content, answer)
        assert read_action(output, last=True) == (content, content if answer is None else answer)
    if answer is not None:  # this thought only mentions the marker
        assert read_action(f"{ANSWER}: now?\nOUTPUT: {content}", False) == (content, answer)
    endless = f"<think>\n{thought}{content}".replace("</think>", "")  # it sends nothing
    assert [read_action(endless, last) for last in (False, True)] == [("", None), ("", "")]


WORDS = ANSWER.removesuffix(":")
OPENED, CLOSED = ("", "**", "*", "__", "`", '"', "<b>", "***", "<strong>"), {"<b>": "</b>",
                                                                "<strong>": "</strong>"}


def marker(r):
    """A spelling of ANSWER that any reader understands, and whether code may follow on its line."""
    words = r.choice([WORDS, WORDS.lower(), WORDS.capitalize(), WORDS.title()])
    colon, opened = r.choice([":", " :", "\uff1a", ""]), r.choice(OPENED)
    closed = CLOSED.get(opened, opened)
    text = opened + r.choice([words + colon + closed, words + closed + colon])
    return r.choice(["", "### ", "> ", "- "]) + text, bool(colon)


def test_a_marker_is_found_in_any_spelling_and_once_if_it_is_written_twice():
    """Before it stands a thought, a draft, or nothing; after it code in any form."""
    r = random.Random("markers")
    for _ in range(3000):
        spelled, ends_by_colon = marker(r)
        code = r.choice(["def f(x):\n    return 2 * x", "```python\ndef f(x): return 2 * x\n```",
                         "def f(x):\n    print('OUTPUT:', x)", "x = {'a': 1}"])
        before = r.choice(["", "I know enough.\n", "I know enough. OUTPUT: ", "<think>no</think>",
                           f"{marker(r)[0]} let me check first.\n" if r.random() < 0.5 else ""])
        if "let me check" in before and WORDS + ":" not in before:
            before = f"{ANSWER} let me check first.\n"
        text = before + spelled + r.choice(["\n", " \n", "\n\n", *[" "] * ends_by_colon]) + code
        assert read_action(text, last=False)[1] == code, text
        spelled = r.choice([WORDS.lower(), WORDS.capitalize()])
        asked = (f"{r.choice(['so', 'Before'])} {spelled}{r.choice([' soon, but', ':', chr(10)])} "
                 "which rate?")
        assert read_action(asked, last=False) == (asked, None)


THINKING = {  # what stands around a thought
    "<think>": "</think>", "<thinking>": "</thinking>", "<thought>": "</thought>",
    "<reasoning>": "</reasoning>", "<seed:think>": "</seed:think>", "[THINK]": "[/THINK]",
    "<|channel>thought\n": "<channel|>",
    "<|channel|>analysis<|message|>": "<|end|><|start|>assistant<|channel|>final<|message|>"}


def test_of_markers_within_a_line_the_first_counts():
    text = 'Sure. I WANT TO ANSWER: def f(): return "I WANT TO ANSWER: no"'
    assert read_action(text, last=False)[1] == 'def f(): return "I WANT TO ANSWER: no"'


def test_a_thought_is_removed_whatever_its_marks():
    """Also if the server's prompt has opened it; and a marker within it ends no episode."""
    r = random.Random("thoughts")
    for _ in range(1000):
        start, end = r.choice([*THINKING.items()])
        parts = ["the fee is 11", "\n", f"{ANSWER} no", "OUTPUT: ", "a < b"]
        thought = "".join(r.choices(parts, k=4))
        said = r.choice(["The rate is 2.", "which rate?", f"{ANSWER}\ndef f(x): return 2 * x", ""])
        text = r.choice(["", "\n"]) + start + thought + end + r.choice(["", "\n\n"]) + said
        assert colbench.without_thinking(text) == said
        assert colbench.without_thinking(thought + end + said) == said
        assert colbench.without_thinking(start + thought) == ""
        assert colbench.without_thinking(said) == said
        answer = said.partition(ANSWER)[2].strip() if ANSWER in said else None
        assert read_action(text, last=False) == (said, answer)
        asked = f"is {start}a{end} a thought?"
        assert read_action(asked, last=False)[0] == colbench.without_thinking(asked) == asked
    # this would take a day if it were quadratic
    assert colbench.without_thinking(" " * 10 ** 6 + "</think>a") == "a"


def test_first_message_takes_braces_as_they_are():
    odd = {**DOUBLE, "problem_description": "a {dict} {ANSWER} {problem_description} {0}"}
    text = colbench.first_message(odd, 7)["content"]
    assert text.endswith(odd["problem_description"]) and "You have 7 messages" in text
    own = {**odd, "agent_prompt": "{max_turns} of {dict}: {problem_description}"}
    assert colbench.first_message(own, 7)["content"].startswith("7 of {dict}: a {dict}")


def test_task_id_is_given_or_a_hash_of_all_that_the_task_is():
    ids = {0: "0", "0": "0", 5.5: "5.5", 5.0: "5", "x": "x", True: "True", (5,): "(5,)"}
    assert [task_id({**DOUBLE, "id": own}) for own in ids] == [*ids.values()]
    assert task_id(DOUBLE) == task_id(dict(reversed(DOUBLE.items()), kind="backend", id=None))
    others = [{**DOUBLE, name: "x"} for name in (
        "problem_description", "ground_truth", "hidden_information", "test_cases", "agent_prompt",
        "a field of its own")]
    others += [{**DOUBLE, "test_cases": {"test1": "f(2)"}}, {**DOUBLE, "kind": "frontend"},
               {**DOUBLE, "problem_description": "\ud800"}]  # JSON may spell a lone surrogate
    assert len({task_id(t) for t in (DOUBLE, *others)}) == 10


def test_an_empty_hidden_information_hides_nothing_more():
    assert colbench.hidden_information(DOUBLE) == DOUBLE["ground_truth"]
    assert colbench.hidden_information({**DOUBLE, "hidden_information": ""}) == ""
    assert colbench.hidden_information({**DOUBLE, "hidden_information": None}) == (
        DOUBLE["ground_truth"])


def filled_up(rows):
    """The objects as a table has them: each has all keys of all, null where it had none."""
    if not all(isinstance(row, (dict, type(None))) for row in rows):
        return rows
    keys = dict.fromkeys(key for row in rows if row for key in row)
    columns = {key: filled_up([(row or {}).get(key) for row in rows]) for key in keys}
    return [row and {key: columns[key][i] for key in keys} for i, row in enumerate(rows)]


def test_a_round_trip_through_a_table_changes_no_record():
    """Where a row lacks a known key, it comes back with null: also names of tests and verdicts."""
    r = random.Random("table")
    for _ in range(50):
        rows = []
        for i in range(4):
            tests = {f"test{n}": f"f({n})" for n in r.sample(range(9), r.randrange(1, 4))}
            row = {"task": {**DOUBLE, "id": i, "test_cases": tests}, "sample": i,
                   "tests": dict.fromkeys(tests, "pass"), "answer": "a", "reward": 1.0,
                   "meta": {"seed": 1, "model_weights": "a"}, "failure": "no",
                   "comparison": "p"}
            row["task"] |= {"hidden_information": "h", "agent_prompt": "a", "kind": "backend"}
            for part, keys in ((row, ["answer", "reward", "meta", "failure", "comparison"]),
                               (row["task"], ["hidden_information", "agent_prompt", "kind"])):
                for key in r.sample(keys, 2):
                    del part[key]
            rows.append(row)
        given = filled_up(rows)
        assert given != rows
        assert list(colbench.read_records(lines(given).encode().splitlines())) == rows
        for row, odd in zip(rows, given):
            for told in colbench.hidden_information, lambda t: colbench.first_message(t, 3):
                assert told(odd["task"]) == told(row["task"])


def test_a_reward_is_a_number_between_minus_one_and_one():
    """The oracle is exact; JSON may spell a number too large for Python. 0.1 ten times is 1."""
    r = random.Random("rewards")
    spelled = ["1e999", "-1e999", "1" + "0" * 400, "1e-999", "1", "-1", "0"]
    spelled += [f"{r.choice([-1, 0, 1]) + r.choice([-1, 1]) * 10 ** r.uniform(-14, 1)!r}"
                for _ in range(300)]
    ends = {"read": 0, "rounded": 0, "refused": 0}
    for text in spelled:
        exact = Decimal(text)
        nearest = min((-1, 0, 1), key=lambda whole: abs(exact - whole))
        line = lines([{"task": DOUBLE, "reward": "HERE"}]).replace('"HERE"', text).encode()
        read = colbench.read_records([line], source="x.jsonl")
        if abs(exact) > 1 and abs(exact - nearest) > Decimal("1e-9"):
            with pytest.raises(SystemExit, match="error: x.jsonl, line 1: the reward .* is not"):
                next(read)
            ends["refused"] += 1
        else:
            is_near = abs(exact - nearest) < Decimal("1e-9")
            assert next(read)["reward"] == (nearest if is_near else float(text)), text
            ends["rounded" if is_near else "read"] += 1
    assert min(ends.values()) > 20, ends


def test_published_tasks_without_a_kind_are_recognised_and_an_unknown_kind_is_not():
    page = task("def f(): return '<html>'", "f()")
    for kind, published in (("backend", page), ("backend", {"ground_truth": "def f(): return 1"}),
                            ("frontend", {"ground_truth": "<BODY>a"}),
                            ("frontend", {"ground_truth": "a", "kind": "frontend"})):
        assert colbench.environment(published) is colbench.environments()[kind]
    with pytest.raises(ValueError, match="unknown task.kind 'words'; known kinds: backend"):
        colbench.environment({**DOUBLE, "kind": "words"})


@pytest.mark.full
@pytest.mark.skipif(not REAL.exists(), reason="no ../shared/colbench/backend_tasks.jsonl")
def test_check_finds_the_real_tasks_that_cannot_be_graded(grading):
    """A missing module, a file written, random numbers, a clock that only a default reads."""
    tasks = records(REAL.read_text(encoding="utf-8"))
    kept, told, _ = grading(tasks, command="check")
    assert [r["task"] for r in kept] == [
        t for line, t in enumerate(tasks, 1) if line not in (215, 236, 265, 466)]
    assert told.count(" dropped: ") == 4


# --- the rules of an episode ----------------------------------------------------------------------

@pytest.mark.parametrize("opening", ["", "<think>"])
def test_an_episode_alternates_until_an_answer_or_the_last_turn(opening):
    """Texts are generated; what must come of them is known from how they were."""
    r = random.Random(0)
    for _ in range(300):
        kind, max_turns = r.choice(["backend", "frontend"]), r.randrange(1, 5)
        task = {"kind": kind, "problem_description": "p", "ground_truth": "g"}
        episode = colbench.Episode(task, max_turns, opening)
        want, answer = [colbench.first_message(task, max_turns)], None
        limit = {"backend": 400, "frontend": 1000}[kind]
        pages = []
        for turn in range(max_turns):
            assert not episode.ended and episode.turn == turn and answer is None
            thought = r.choice(["so</think>", f"{ANSWER} x</think>"]) if opening else ""
            shown = r.choice(["which \udc80 rate?", "", f"<html>{turn}</html>", "hm"])
            if r.random() < 0.3:
                shown, answer = f"{ANSWER} {shown} .", f"{shown} .".strip()
            elif turn == max_turns - 1:
                answer = shown
            output = thought + shown
            fields = r.choice([{}, {"output": output, "cut": True, "role": "user", "content": "!"},
                               {"output": output, "token_ids": [1]}])
            episode.act(fields or output)
            shown, answer = (text and text.replace("\udc80", "?") for text in (shown, answer))
            want.append({**fields, "role": "assistant", "content": shown,
                         "output": output.replace("\udc80", "?")})
            pages += [f"<html>{turn}</html>"] * ("<html>" in shown)
            if answer is not None:
                break
            text = r.choice(["rate=4", "\ud83d", "so " * 500])
            episode.reply(text)
            want.append({"role": "user", "content": text.replace("\ud83d", "?")[:limit]})
        assert episode.ended and episode.history == want
        if kind == "frontend":
            answer = (pages or [""])[-1]
        assert episode.fields() == {"dialogue_history": want, "answer": answer,
                                    "answered": ANSWER in want[-1]["content"]}


def test_an_episode_without_room_for_another_message_ends_with_the_agents_last():
    task = {"kind": "frontend", "problem_description": "p", "ground_truth": "g"}
    episode = colbench.Episode(task, 5)
    episode.act("<html>1</html>")
    episode.reply("larger")
    episode.abandon()
    assert episode.ended and len(episode.history) == 2
    assert episode.fields()["answer"] == "<html>1</html>" and not episode.fields()["answered"]
