"""Preferences: the forms that become records, what is refused, and what a trainer makes of them."""
import json
import random
import re
import shutil
from unittest.mock import patch

import pytest

import model as M
import train_critic
import train_policy
from colbench import agent_messages, first_message
from conftest import (agent_texts, change_json, dialogue, key_of, lines, read_by, records, script,
                      stdin_of, turns_of)
from experiments import preferences
from model import Pair

RIVER, ELBE, WATER = dialogue("Name a river.", "The Elbe.")[0], *(
    {"role": "assistant", "content": text} for text in ("The Elbe.", "Water."))
SYSTEM = {"role": "system", "content": "Be brief."}
CHOSEN, REJECTED = [RIVER, ELBE], [RIVER, WATER]
SHARE = lambda who, text: {"from": who, "value": text}
PART = lambda m: {**m, "content": [{"type": "text", "text": m["content"][:5]},
                                   {"type": "text", "text": m["content"][5:]}]}
TEXT = "\n\nHuman: Name a river.\n\nAssistant: "
FORMS = {  # name: (a line of it, what stands before the user's message)
    "messages": ({"prompt": [SYSTEM, RIVER], "chosen": [ELBE], "rejected": [WATER]}, [SYSTEM]),
    "whole sides": ({"chosen": CHOSEN, "rejected": REJECTED}, []),
    "UltraFeedback": ({"prompt": "Name a river.", "prompt_id": "a1", "chosen": CHOSEN,
                       "rejected": REJECTED, "messages": CHOSEN, "score_chosen": 8.5}, []),
    "texts": ({"prompt": "Name a river.", "chosen": "The Elbe.", "rejected": "Water."}, []),
    "HH": ({"chosen": TEXT + "The Elbe.", "rejected": TEXT + "Water."}, []),
    "Orca": ({"system": "Be brief.", "question": "Name a river.", "chosen": "The Elbe.",
              "rejected": "Water."}, [SYSTEM]),
    "ShareGPT": ({"conversations": [SHARE("system", "Be brief."), SHARE("human", "Name a river.")],
                  "chosen": SHARE("gpt", "The Elbe."), "rejected": SHARE("gpt", "Water.")},
                 [SYSTEM]),
    "Axolotl": ({"messages": [RIVER], "chosen": ELBE, "rejected": WATER}, []),
    "ms-swift": ({"messages": CHOSEN, "rejected_response": "Water."}, []),
    "ms-swift with a message": ({"messages": CHOSEN, "rejected_response": [WATER]}, []),
    "ms-swift's dialogues": ({"messages": CHOSEN, "rejected_messages": REJECTED}, []),
    "ms-swift's dialogues with a system text": (
        {"system": "Be brief.", "messages": CHOSEN, "rejected_messages": REJECTED}, [SYSTEM]),
    "Alpaca": ({"instruction": "Name a river.", "input": "", "history": [],
                "chosen": "The Elbe.", "rejected": "Water."}, []),
    "parts": ({"prompt": [PART(RIVER)], "chosen": [PART(ELBE)], "rejected": [PART(WATER)]}, []),
    "JSON in strings": ({"chosen": json.dumps(CHOSEN), "rejected": json.dumps(REJECTED)}, []),
    "a begun answer": ({"prompt": [RIVER, {"role": "assistant", "content": ""}],
                        "chosen": [ELBE], "rejected": [WATER]}, []),
    "a system text twice": (
        {"system": "Be brief.", "prompt": [SYSTEM, RIVER], "chosen": [ELBE], "rejected": [WATER]},
        [SYSTEM]),
    "nulls": ({"prompt": None, "system": None, "tools": None, "chosen": CHOSEN,
               "rejected": [{**m, "tool_calls": None} for m in REJECTED]}, []),
    "other names of roles": (
        {"chosen": [SHARE("Human", "Name a river."), SHARE("Assistant", "The Elbe.")],
         "rejected": [SHARE("user", "Name a river."), SHARE("bot", "Water.")]}, [])}
CONVERT = "tests/experiments/preferences.py"


def convert(given, *flags):
    """The records that the converter makes of lines."""
    made, args = [], preferences.get_args([*map(str, flags)])
    with stdin_of(given), patch.object(preferences, "open_stdout", lambda: made.append):
        preferences.main(args)
    return records(lines(made))


def converted(line, *flags):
    """The records of one line, in this process."""
    row = json.loads(json.dumps(line))
    return preferences.records(row, preferences.get_args([*map(str, flags)]))


def test_every_form_becomes_two_records_whose_ids_come_from_the_content():
    ids = {}  # {whether with the system message: ids of the records}
    for form, (line, before) in FORMS.items():
        pair, sides = converted(line), [before + CHOSEN, before + REJECTED]
        assert [r["dialogue_history"] for r in pair] == sides, form
        assert [r["reward"] for r in pair] == [1, 0]
        assert pair[0]["task"] == pair[1]["task"] and pair[0]["comparison"] == pair[1]["comparison"]
        keys = [(key_of(r), r["comparison"]) for r in pair]
        assert ids.setdefault(bool(before), keys) == keys != ids.get(not before), form
    assert len(convert([line for line, _ in FORMS.values()])) == 4  # the others are the same


@pytest.mark.parametrize("seed", range(3))
def test_converted_files_that_are_joined_have_the_pairs_of_their_lines(seed, tiny_dir):
    """No pair crosses two lines, and no prompt is both trained on and held out."""
    r = random.Random(seed)
    prompts, answers = ["Name a river.", "A lake?", "A fruit?"], ["a", "b", "c", "d"]
    wanted = {(r.choice(prompts), *r.sample(answers, 2)) for _ in range(12)}
    rows = [dict(zip(("prompt", "chosen", "rejected"), pair)) for pair in sorted(wanted)]
    r.shuffle(rows)
    cut = r.randrange(len(rows))
    given = convert(rows[:cut] + rows[:2][:cut]) + convert(rows[cut:])  # the first ones come again
    assert len({key_of(record) for record in given}) == len(given) == 2 * len(rows)
    chat = M.find_model(tiny_dir)[1]
    reading = {turn: (record["dialogue_history"][0]["content"], *agent_texts(record))
               for record in given for turn in turns_of(chat, record)}
    for trainer in (train_policy, train_critic):
        flags = ["--loss", "mtdpo"] if trainer is train_policy else []
        flags += ["--model", tiny_dir, "--held_out", 0.4] + r.choice([[], ["--min_gap", 0]])
        groups, held = read_by(given, trainer, *flags)
        parts = [[(reading[pair.chosen[0]], reading[pair.rejected[0]]) for pair in part]
                 for part in ([pair for group in groups for pair in group], held)]
        assert sorted((prompt, a, b) for (prompt, a), (_, b) in sum(parts, [])) == sorted(wanted)
        trained_on, held_out = ({chosen[0] for chosen, _ in part} for part in parts)
        assert trained_on and held_out and not trained_on & held_out
        r.shuffle(given)
        assert read_by(given, trainer, *flags) == (groups, held)


STRUCTURE = [json.dumps(ELBE), json.dumps(CHOSEN), json.dumps(SHARE("gpt", "The Elbe.")), "[]", "4",
             "Assistant: The Elbe.", TEXT + "The Elbe.", "Human: hi", "</think> is a tag", "null"]


@pytest.mark.parametrize("column", ["prompt", "question", "instruction"])
def test_text_that_looks_like_messages_is_text(column):
    """Beside a prompt, unless --dialogues 1 declares otherwise."""
    for texts in zip(STRUCTURE, STRUCTURE[1:] + STRUCTURE[:1], STRUCTURE[2:] + STRUCTURE[:2]):
        prompt, *sides = texts
        pair = converted(dict(zip((column, "chosen", "rejected"), texts)))
        assert [r["dialogue_history"] for r in pair] == [dialogue(prompt, side) for side in sides]


def test_dialogues_in_text_are_parsed_where_that_is_declared_and_else_counted(capsys):
    """HH-RLHF also comes with a column for the prompt."""
    line = {"prompt": TEXT, "chosen": " The Elbe.", "rejected": json.dumps([WATER])}
    convert([line])
    said = capsys.readouterr().err
    assert "2 texts look like dialogues and are read as plain text (--dialogues 1 parses" in said
    made = convert([line], "--dialogues", 1)
    assert [agent_texts(r) for r in made] == [[" The Elbe."], ["Water."]]
    assert all(r["dialogue_history"][0] == RIVER for r in made) and not capsys.readouterr().err


SWIFT = [SYSTEM, *dialogue("Hi", "Hello", "Name a river.", "The Elbe.")]
EMPTY, THANKS = {**RIVER, "content": ""}, {**RIVER, "content": "Thanks!"}
BEGUN, QUIET = {"role": "assistant", "content": "The answer"}, {**ELBE, "content": ""}
DIALOGUES = {  # name: (a line, its chosen dialogue, its rejected one)
    "a history stands before the prompt": (
        {"system": "Be brief.", "instruction": "Name a river.", "input": "In Saxony.",
         "history": [["Hi", "Hello"], ["So", "Yes?"]], "chosen": "The Elbe.", "rejected": "No."},
        *([SYSTEM, *dialogue("Hi", "Hello", "So", "Yes?", "Name a river.\n\nIn Saxony.", answer)]
          for answer in ("The Elbe.", "No."))),
    "ms-swift's earlier answers are in both": (
        {"messages": SWIFT, "rejected_response": "Water."}, SWIFT, [*SWIFT[:-1], WATER]),
    "so are those of its dialogues": (
        {"messages": SWIFT, "rejected_messages": [*SWIFT[:-1], WATER]}, SWIFT,
        [*SWIFT[:-1], WATER]),
    "an answer that the prompt begins goes on": (
        {"prompt": [RIVER, BEGUN], "chosen": " is no.", "rejected": " is yes."},
        [RIVER, {**BEGUN, "content": "The answer is no."}],
        [RIVER, {**BEGUN, "content": "The answer is yes."}]),
    "a thought stands before its answer": (
        {"prompt": [RIVER], "chosen": [{**ELBE, "reasoning_content": "A river.\n"}],
         "rejected": [WATER]},
        [RIVER, {**ELBE, "content": "<think>\nA river.\n</think>\n\nThe Elbe."}], REJECTED),
    "empty messages and last words of the user are kept": (
        {"prompt": [EMPTY], "chosen": [QUIET, THANKS], "rejected": [WATER]},
        [EMPTY, QUIET, THANKS], [EMPTY, WATER])}


@pytest.mark.parametrize("name", DIALOGUES)
def test_a_line_becomes_two_dialogues(name):
    line, *sides = DIALOGUES[name]
    chosen, rejected = converted(line, "--thinking", 1)
    assert [chosen["dialogue_history"], rejected["dialogue_history"]] == sides
    assert (chosen["reward"], rejected["reward"]) == (1, 0)
    assert chosen["task"] == rejected["task"] and chosen["comparison"] == rejected["comparison"]
    assert chosen["meta"] == rejected["meta"] == {"thinking": 1}


def test_dropped_columns_and_repeated_lines_are_named_once():
    line = {"score": 8.5, "source": "x", "note": "", "n": 0, "images": [], "context_length": 9,
            "chosen": [RIVER, {**ELBE, "name": "Al"}], "rejected": REJECTED}
    other = {**GOOD, "rejected": [RIVER, {**WATER, "content": "?"}]}
    done = script(CONVERT, stdin=[line, GOOD, {**line, "score": 1}, other])
    assert len(records(done.stdout)) == 4
    assert sorted(done.stderr.splitlines()) == [
        "2 lines are dropped, as they repeat an earlier one (the first: stdin, line 2)",
        "2 times the column 'context_length' is dropped (the first: 9)",
        "2 times the column 'n' is dropped (the first: 0)",
        "2 times the column 'score' is dropped (the first: 8.5)",
        "2 times the column 'source' is dropped (the first: 'x')",
        "2 times the field 'name' is dropped (the first: 'Al')"]


def test_chats_become_demonstrations(tiny_dir):
    chats = [{"messages": CHOSEN, "source": "x"}, {"messages": REJECTED},
             {"conversations": [SHARE("system", "Be brief."), SHARE("human", "Name a river."),
                                SHARE("gpt", "The Elbe.")]}]
    given = convert(chats)
    want = [CHOSEN, REJECTED, [SYSTEM, *CHOSEN]]
    assert [r["dialogue_history"] for r in given] == want and "comparison" not in given[0]
    assert [r["reward"] for r in given] == [1, 1, 1]
    assert len({key_of(r) for r in given}) == 3 and len({key_of(r)[0] for r in given}) == 2
    chat = M.find_model(tiny_dir)[1]
    turns = sorted(turn for r in given for turn in turns_of(chat, r))
    groups, _ = read_by(given, train_policy, "--loss", "rft", "--model", tiny_dir)
    assert M.turns_in(pair for group in groups for pair in group) == turns and len(turns) == 3


GOOD = {"chosen": CHOSEN, "rejected": REJECTED}
NO_FORM = {  # what is told: lines, of which all must be refused
    "its columns are": [{"prompt": "a", "completion": "b", "label": True},
                        {"messages": CHOSEN, "label": False},
                        {"messages": CHOSEN, "rejected": "Water."}],
    "is not text": [{"prompt": [{**RIVER, "content": [part]}], "chosen": "b", "rejected": "c"}
                    for part in ({"text": None}, {"type": "image"})],
    "unknown role": [{**GOOD, "prompt": [{"role": "tool", "content": "4"}]}],
    "other messages than the prompt": [{**GOOD, "prompt": "Name a lake."}],
    "chosen and rejected are the same": [{"chosen": CHOSEN, "rejected": CHOSEN}],
    "chosen has two messages of the assistant in a row": [{**GOOD, "chosen": [*CHOSEN, WATER]}],
    "starts with the assistant": [{"prompt": [ELBE, RIVER], "chosen": "b", "rejected": "c"}],
    "has no message of the assistant": [{**GOOD, "rejected": [RIVER]},
                                        {"messages": [RIVER], "rejected_response": "Water."}],
    "is no dialogue, and has no prompt before it": [{"chosen": "The Elbe.", "rejected": "Water."}],
    "'Water.' is not a message": [{"messages": CHOSEN, "rejected_response": ["Water.", "Rain."]}],
    "history has ['a'], which is not": [{"prompt": "a", "history": [["a"]], "chosen": "b",
                                         "rejected": "c"}],
    "may change the prompt or the loss": [
        *({**GOOD, name: value} for name, value in (
            ("history", [["a", "b"]]), ("images", ["cat.png"]), ("Chat-History", "x"),
            ("tools", [{}]), ("weight", 0.5), ("loss", False))),
        *({**GOOD, "chosen": [{**RIVER, "audio": {"path": "a.wav"}}, message]}
          for message in (ELBE, {**ELBE, "weight": 0}, {**ELBE, "tool_calls": [{}]}))],
    "two different system messages": [{"prompt": "a", "system": "Be brief.", "chosen": [
        {**SYSTEM, "content": "Be long."}, {**RIVER, "content": "a"}, ELBE], "rejected": "c"}],
    "not a JSON object": [[1]]}


@pytest.mark.parametrize("message", NO_FORM)
def test_another_form_is_named_by_its_line(message):
    for line in NO_FORM[message]:
        with pytest.raises(SystemExit, match=f"^error: stdin, line 2: .*{re.escape(message)}"):
            convert([FORMS["HH"][0], line])


@pytest.fixture
def groups_of(tiny_dir):
    """groups_of(lines): the pairs that train_policy.py makes of preferences."""
    def make(given, model=tiny_dir):
        return read_by(convert(given), train_policy, "--loss", "mtdpo", "--model", model)[0]
    return make


def test_a_pair_has_all_messages_of_the_assistant(tiny_dir, groups_of):
    chat = M.find_model(tiny_dir)[1]
    prompt, *chosen = dialogue("write pay(x)", "what is the rate?", "rate=3 <|end|>", "def ...")
    sides = chosen, chosen[-1:]
    line = {"prompt": [SYSTEM, prompt], "chosen": sides[0], "rejected": sides[1]}
    want = [tuple(turns_of(chat, {"dialogue_history": line["prompt"] + side}))
            for side in sides]
    assert list(map(len, want)) == [2, 1]
    assert groups_of([line]) == [[Pair(*want, 1.0, 0.0)]]


def test_names_of_a_records_fields_and_whole_weights_bind_no_preference():
    line = {"task": "Coding", "answer": 42, "reward": 7.5, "sample": "a", "tests": [1], "meta": "v",
            "weight": 1, "train": True, "loss": True, "tools": [], "system": "", "prompt": [RIVER],
            "chosen": [{**ELBE, "output": "a draft", "logprobs": {"content": []}}],
            "rejected": [WATER]}
    assert convert([line]) == convert([GOOD])


# --- models and their templates -------------------------------------------------------------------

@pytest.fixture
def other(tiny_dir, tmp_path):
    """other(old, new, ...): a copy of the tiny model with changes of its chat template's text."""
    def make(*changes):
        model = shutil.copytree(tiny_dir, tmp_path / "m")
        template = model / "chat_template.jinja"
        text = template.read_text()
        for old, new in zip(changes[::2], changes[1::2]):
            assert old in text
            text = text.replace(old, new)
        template.write_text(text)
        return model
    return make


def test_thinking_reaches_preferences(other, groups_of, capsys):
    """By meta.thinking: another prompt."""
    x = "{% if not enable_thinking %}x{% endif %}"
    model = other("<|assistant|>{% endif %}", "<|assistant|>" + x + "{% endif %}",
                  "<|{{ m['role'] }}|>",
                  "<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}" + x + "{% endif %}")
    without, with_ = (groups_of([{**GOOD, "meta": {"thinking": n}}], model=model) for n in (0, 1))
    assert without == groups_of([GOOD], model=model) != with_
    assert "do not follow" not in capsys.readouterr().err


LONG = {"prompt": [{"role": "user", "content": "a river " * 200}], "chosen": [ELBE],
        "rejected": [WATER]}


def test_what_is_longer_than_the_models_positions_is_left_out(other, groups_of, capsys):
    model = other()
    change_json(model / "config.json", max_position_embeddings=200)
    assert groups_of([GOOD, LONG], model=model) == groups_of([GOOD])
    said = capsys.readouterr().err
    assert "2 turns exceed 200 tokens" in said
    assert 'the first: the task "a river a river a river a river' in said


def test_a_conversation_that_the_template_refuses_is_named_by_its_beginning(other, groups_of):
    model = other("{{ bos_token }}", "{% if messages[0]['role'] == 'system' %}"
                  "{{ raise_exception('no system') }}{% endif %}{{ bos_token }}")
    with pytest.raises(SystemExit, match="--model's chat template rejects the task \"Name a "
                                         "river.\" .*: no system"):
        groups_of([GOOD, {**GOOD, "chosen": [SYSTEM, *CHOSEN]}], model=model)


# --- ColBench's published trajectories ------------------------------------------------------------

def published(n, solved):
    """As the code that wrote the file does: two messages of the agent, with their `input`."""
    code = f"def price(x):\n    return x * {n} + {17 * solved}"
    said = [("Let me ask. OUTPUT: What is the rate?", " What is the rate?"),
            (f"I know enough. OUTPUT: I WANT TO ANSWER:\n{code}", f" I WANT TO ANSWER:\n{code}")]
    ask, answer = ({"role": "assistant", "content": content, "output": output, "input": "<s>..."}
                   for output, content in said)
    description = f"I need price{n}(x), the price of x."
    return {"task": {"problem_description": description, "test_cases": {"test1": "price(3)"},
                     "ground_truth": f"def price(x):\n    return x * {n} + 17"},
            "dialogue_history": [{"role": "user", "content": description}, ask,
                                 {"role": "user", "content": f"It is {n}."}, answer],
            "answer": code, "reward": float(solved)}


def test_both_trainers_read_what_a_published_agent_wrote(tiny_dir):
    """After the instructions of a record. The trajectories of a task are not in a row."""
    given = [published(n, solved) for solved in (1, 0) for n in (2, 3)]
    rs = convert(given, "--max_turns", 7)
    assert [r["sample"] for r in rs] == [0, 0, 1, 1]
    for old, new in zip(given, rs, strict=True):
        assert new["dialogue_history"][0] == first_message(new["task"], 7)
        for m, n in zip(agent_messages(old), agent_messages(new), strict=True):
            assert n == {name: m[name] for name in m if name != "input"}
    for trainer, flags, n in ((train_critic, [], 1),  # which holds one task out
                              (train_policy, ["--loss", "mtdpo"], 2),
                              (train_policy, ["--loss", "rft"], 2)):
        groups, _ = read_by(rs, trainer, "--model", tiny_dir, *flags)
        assert sum(map(len, groups)) == n
    given[1]["dialogue_history"][0]["content"] = "Hello"
    with pytest.raises(SystemExit, match="line 2: the first message is not the task's description"):
        convert(given)
