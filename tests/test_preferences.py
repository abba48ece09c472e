"""Preferences: the forms that become records, what is refused, and what a trainer makes of them."""
import json
import shutil

import pytest

import model as M
import train_critic
import train_policy
from conftest import dialogue, records, script, succeed, turns_of
from model import Pair
from test_train import prepared

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
    "a prompt beside whole sides": (
        {"prompt": [RIVER], "chosen": CHOSEN, "rejected": REJECTED}, []),
    "UltraFeedback": ({"prompt": "Name a river.", "prompt_id": "a1", "chosen": CHOSEN,
                       "rejected": REJECTED, "messages": CHOSEN, "score_chosen": 8.5}, []),
    "UltraFeedback with a system text": (
        {"prompt": "Name a river.", "chosen": [SYSTEM, *CHOSEN], "rejected": [SYSTEM, *REJECTED]},
        [SYSTEM]),
    "texts": ({"prompt": "Name a river.", "chosen": "The Elbe.", "rejected": "Water."}, []),
    "HH": ({"chosen": TEXT + "The Elbe.", "rejected": TEXT + "Water."}, []),
    "Orca": ({"system": "Be brief.", "question": "Name a river.", "chosen": "The Elbe.",
              "rejected": "Water."}, [SYSTEM]),
    "ShareGPT": ({"conversations": [SHARE("system", "Be brief."), SHARE("human", "Name a river.")],
                  "chosen": SHARE("gpt", "The Elbe."), "rejected": SHARE("gpt", "Water.")},
                 [SYSTEM]),
    "Axolotl": ({"messages": [RIVER], "chosen": ELBE, "rejected": WATER}, []),
    "ms-swift": ({"messages": CHOSEN, "rejected_response": "Water."}, []),
    "Alpaca": ({"instruction": "Name a river.", "input": "", "chosen": "The Elbe.",
                "rejected": "Water."}, []),
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


def convert(lines, *flags):
    """The records that the converter makes of the lines."""
    return records(succeed(CONVERT, *flags, stdin=lines).stdout)


def test_every_form_becomes_two_records():
    got = convert([line for line, _ in FORMS.values()])
    for number, form in enumerate(FORMS, 1):
        pair, before = got[2 * number - 2:2 * number], FORMS[form][1]
        sides = [before + CHOSEN, before + REJECTED]
        assert [r["dialogue_history"] for r in pair] == sides, form
        assert [r["reward"] for r in pair] == [1, 0]
        assert [r["task"]["id"] for r in pair] == [f"of line {number}"] * 2
    assert len(got) == 2 * len(FORMS)


def test_a_thought_and_a_begun_answer_go_where_they_belong():
    begun = {"role": "assistant", "content": "The answer"}
    line = {"prompt": [RIVER, begun], "chosen": " is no.", "rejected": " is yes."}
    thought = {**ELBE, "reasoning_content": "A river.\n"}
    got = convert([line, {"prompt": [RIVER], "chosen": [thought], "rejected": [WATER]}],
                  "--thinking", 1)
    assert got[0]["dialogue_history"][1]["content"] == "The answer is no."
    assert got[2]["dialogue_history"][1]["content"] == "<think>\nA river.\n</think>\n\nThe Elbe."
    assert [r["meta"] for r in got] == [{"thinking": 1}] * 4


GOOD = {"chosen": CHOSEN, "rejected": REJECTED}
NO_FORM = {
    "its columns are prompt, completion, label": {"prompt": "a", "completion": "b", "label": True},
    "a part of content is not text": {"prompt": [{**RIVER, "content": [{"text": None}]}],
                                     "chosen": "b", "rejected": "c"},
    "for tools see TRL": {"tools": [{}], "prompt": "a", "chosen": "b", "rejected": "c"},
    "every message has the same weight": {"prompt": "a", "chosen": [{**ELBE, "weight": 0}],
                                          "rejected": "c"},
    "is not text": {"prompt": [{**RIVER, "content": [{"type": "image"}]}], "chosen": "b",
                   "rejected": "c"},
    "unknown role": {"prompt": [{"role": "tool", "content": "4"}], "chosen": "b", "rejected": "c"},
    "other messages than the prompt": {"prompt": "Name a lake.", "chosen": CHOSEN,
                                       "rejected": REJECTED},
    "chosen and rejected are the same": {"chosen": CHOSEN, "rejected": CHOSEN},
    "chosen has two messages of the assistant in a row": {**GOOD, "chosen": [*CHOSEN, WATER]},
    "starts with the assistant": {"prompt": [ELBE, RIVER], "chosen": "b", "rejected": "c"},
    "rejected has no message of the assistant": {**GOOD, "rejected": [RIVER]},
    "not a JSON object": [1]}


@pytest.mark.parametrize("message", NO_FORM)
def test_another_form_is_named_by_its_line(message):
    good = FORMS["HH"][0]
    done = script(CONVERT, stdin=[good, NO_FORM[message]])
    assert done.returncode and message in done.stderr and "stdin, line 2: " in done.stderr


@pytest.fixture
def groups_of(tiny_dir, monkeypatch):
    """groups_of(lines): the pairs that train_policy.py makes of preferences."""
    def make(given, model=tiny_dir):
        flags = "--loss", "mtdpo", "--model", model
        return prepared(monkeypatch, convert(given), train_policy, *flags)
    return make


@pytest.mark.parametrize("before", [[], [SYSTEM]])
def test_a_pair_has_all_messages_of_the_assistant(before, tiny_dir, groups_of):
    tokenizer = M.find_model(tiny_dir)[1]
    prompt, *chosen = dialogue("write pay(x)", "what is the rate?", "rate=3 <|end|>", "def ...")
    sides = chosen, chosen[-1:]
    line = {"prompt": [*before, prompt], "chosen": sides[0], "rejected": sides[1]}
    want = [tuple(turns_of(tokenizer, {"dialogue_history": line["prompt"] + side}))
            for side in sides]
    assert list(map(len, want)) == [2, 1]
    assert groups_of([line]) == [[Pair(*want, gap=1.0)]]


def test_empty_messages_and_last_words_of_the_user_are_kept():
    empty, thanks = {**RIVER, "content": ""}, {**RIVER, "content": "Thanks!"}
    line = {"prompt": [empty], "chosen": [{**ELBE, "content": ""}, thanks], "rejected": [WATER]}
    sides = [r["dialogue_history"] for r in convert([line])]
    assert sides == [line["prompt"] + line[side] for side in ("chosen", "rejected")]


def test_a_trainer_names_the_converter(tiny_dir, monkeypatch):
    for trainer in (train_policy, train_critic):
        with pytest.raises(SystemExit, match=f"stdin, line 1: .*{CONVERT}.*--loss mtdpo"):
            prepared(monkeypatch, [GOOD], trainer, "--model", tiny_dir)


@pytest.mark.parametrize("name, value", [
    ("tools", [{}]), ("tool_calls", [{}]), ("system", "Be brief."), ("reasoning_content", "why"),
    ("loss_mask", 0), ("weight", 0.5), ("train", False), ("input", "<|system|>")])
def test_a_records_field_that_changes_the_meaning_is_refused(name, value, ranked, tiny_dir,
                                                             monkeypatch):
    """In the record or in a message of it."""
    record, odd = ranked[0], {name: value}
    first, *others = record["dialogue_history"]
    of_message = {**record, "dialogue_history": [{**first, **odd}, *others]}
    for trainer in (train_policy, train_critic):
        for line in ({**record, **odd}, of_message):
            with pytest.raises(SystemExit, match=f"line 2: the field '{name}'"):
                prepared(monkeypatch, [record, line], trainer, "--model", tiny_dir)


def test_names_of_a_records_fields_and_whole_weights_bind_no_preference():
    line = {"task": "Coding", "answer": 42, "reward": 7.5, "sample": "a", "tests": [1], "meta": "v",
            "weight": 1, "train": True, "tools": [], "system": "", "prompt": [RIVER],
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
    config = other() / "config.json"
    positions = {"max_position_embeddings": 200}
    config.write_text(json.dumps(json.loads(config.read_text()) | positions))
    assert groups_of([GOOD, LONG], model=config.parent) == groups_of([GOOD])
    said = capsys.readouterr().err
    assert "2 turns exceed 200 tokens" in said
    assert "the first: the task of line 2" in said


def test_ids_beyond_the_models_embedding_are_refused(other, groups_of):
    model = other()
    tokenizer = M.find_model(str(model))[1]
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(model)
    assert groups_of([GOOD], model=model)
    line = {**GOOD, "chosen": [RIVER, {**ELBE, "content": "The <extra>"}]}
    told = "the task of line 2 has a token id outside --model's vocabulary"
    with pytest.raises(SystemExit, match=told):
        groups_of([GOOD, line], model=model)


def test_a_conversation_that_the_template_refuses_is_named_by_its_line(other, groups_of):
    model = other("{{ bos_token }}", "{% if messages[0]['role'] == 'system' %}"
                  "{{ raise_exception('no system') }}{% endif %}{{ bos_token }}")
    with pytest.raises(SystemExit, match="--model's chat template rejects the task of line 2: no "
                                         "system"):
        groups_of([GOOD, {**GOOD, "chosen": [SYSTEM, *CHOSEN]}], model=model)


def test_stored_text_that_a_template_does_not_write_after_its_prompt_is_told(other, groups_of,
                                                                             capsys):
    """With a count and an example."""
    model = other("<|assistant|>{% endif %}", "<|assistant|>why{% endif %}")
    groups_of([GOOD, {**GOOD, "chosen": [RIVER, {**ELBE, "content": "<|end|>"}]}], model=model)
    said = capsys.readouterr().err
    assert "4 stored messages do not follow the prompt verbatim" in said
    assert "1 stored messages contain a control token" in said
