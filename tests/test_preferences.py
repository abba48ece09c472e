"""Preferences: the form that the trainer reads, what it refuses, and the forms that become it."""
import json
import shutil

import pytest

import model as M
import train_critic
import train_policy
from conftest import dialogue, records, script, succeed
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
    "ours": ({"prompt": [SYSTEM, RIVER], "chosen": [ELBE], "rejected": [WATER]}, [SYSTEM]),
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


def test_every_form_becomes_the_one_that_the_trainer_reads():
    got = records(succeed(CONVERT, stdin=[line for line, _ in FORMS.values()]).stdout)
    for form, made in zip(FORMS, got, strict=True):
        before = FORMS[form][1]
        assert made["chosen"] == before + CHOSEN and made["rejected"] == before + REJECTED, form


def test_a_thought_and_a_begun_answer_go_where_they_belong():
    begun = {"role": "assistant", "content": "The answer"}
    line = {"prompt": [RIVER, begun], "chosen": " is no.", "rejected": " is yes."}
    thought = {**ELBE, "reasoning_content": "A river.\n"}
    got = records(succeed(CONVERT, "--thinking", 1, stdin=[
        line, {"prompt": [RIVER], "chosen": [thought], "rejected": [WATER]}]).stdout)
    assert got[0]["chosen"][1:] == [{"role": "assistant", "content": "The answer is no."}]
    assert got[1]["chosen"][1]["content"] == "<think>\nA river.\n</think>\n\nThe Elbe."
    assert [r["meta"] for r in got] == [{"thinking": 1}] * 2


NO_FORM = {
    "its columns are prompt, completion, label": {"prompt": "a", "completion": "b", "label": True},
    "a part of content is no text": {"prompt": [{**RIVER, "content": [{"text": None}]}],
                                     "chosen": "b", "rejected": "c"},
    "tools are not supported": {"tools": [{}], "prompt": "a", "chosen": "b", "rejected": "c"},
    "all the assistant's messages": {"prompt": "a", "chosen": [{**ELBE, "weight": 0}],
                                        "rejected": "c"},
    "is no text": {"prompt": [{**RIVER, "content": [{"type": "image"}]}], "chosen": "b",
                   "rejected": "c"},
    "unknown role": {"prompt": [{"role": "tool", "content": "4"}], "chosen": "b", "rejected": "c"},
    "other messages than the prompt": {"prompt": "Name a lake.", "chosen": CHOSEN,
                                       "rejected": REJECTED}}


@pytest.mark.parametrize("message", NO_FORM)
def test_another_form_is_named_by_its_line(message):
    good = FORMS["HH"][0]
    done = script(CONVERT, stdin=[good, NO_FORM[message]])
    assert done.returncode and message in done.stderr and "stdin, line 2: " in done.stderr


GOOD = {"chosen": CHOSEN, "rejected": REJECTED}


@pytest.fixture
def groups_of(tiny_dir, monkeypatch):
    """groups_of(lines): the pairs that a trainer, usually of preferences, makes of them."""
    def make(given, *flags, model=tiny_dir, trainer=train_policy):
        loss = ["--loss", "mtdpo"] if trainer is train_policy else []
        return prepared(monkeypatch, given, trainer, *loss, "--model", model, *flags)
    return make


NOT_OURS = {  # what train_policy.py says
    "prompt is not a list": FORMS["UltraFeedback"][0],
    "chosen is not a list": FORMS["HH"][0],
    "neither a record nor a preference": FORMS["ms-swift"][0],
    "chosen and rejected are the same": {"chosen": CHOSEN, "rejected": CHOSEN},
    "would be read twice": FORMS["a prompt beside whole sides"][0],
    "two messages of the assistant": FORMS["a begun answer"][0],
    "role of system, user and assistant": {"chosen": [{**RIVER, "role": "Human"}, ELBE],
                                           "rejected": REJECTED},
    "content is not text": FORMS["parts"][0],
    "starts with the assistant": {"chosen": [ELBE]},
    "chosen has no message of the assistant": {**GOOD, "chosen": [RIVER]},
    "rejected has no message of the assistant": {**GOOD, "prompt": [RIVER], "chosen": [ELBE],
                                                 "rejected": None},
    "lacks content, or a role": {**GOOD, "rejected": [{"role": "tool", "content": "?"}]}}


@pytest.mark.parametrize("message", NOT_OURS)
def test_what_is_no_preference_is_told_the_form_and_the_converter(message, groups_of):
    with pytest.raises(SystemExit, match="error: stdin, line 2: ") as e:
        groups_of([GOOD, NOT_OURS[message]])
    for part in (message, '{"prompt": [...], "chosen": [...]', CONVERT, "--loss mtdpo"):
        assert part in str(e.value)


@pytest.mark.parametrize("name, value", [
    ("tools", [{}]), ("tool_calls", [{}]), ("system", "Be brief."), ("reasoning_content", "why"),
    ("loss_mask", 0), ("weight", 0.5), ("train", False), ("input", "<|system|>")])
def test_a_field_that_changes_the_meaning_is_refused(name, value, ranked, groups_of):
    """In a line or in a message, of preferences and of records."""
    record, odd = ranked[0], {name: value}
    first, *others = record["dialogue_history"]
    preferences = {**GOOD, **odd}, {**GOOD, "chosen": [RIVER, {**ELBE, **odd}]}
    of_record = {**record, **odd}, {**record, "dialogue_history": [{**first, **odd}, *others]}
    for trainer, lines in ((train_policy, [*preferences, *of_record]), (train_critic, of_record)):
        for line in lines:
            with pytest.raises(SystemExit, match=f"line 2: the field '{name}'"):
                groups_of([GOOD if trainer is train_policy else record, line], trainer=trainer)


def test_names_of_a_records_fields_and_whole_weights_bind_no_preference(groups_of):
    line = {"task": "Coding", "answer": 42, "reward": 7.5, "sample": "a", "tests": [1], "meta": "v",
            "weight": 1, "train": True, "tools": [], "system": "", "prompt": [RIVER],
            "chosen": [{**ELBE, "output": "a draft", "logprobs": {"content": []}}],
            "rejected": [WATER]}
    assert groups_of([line]) == groups_of([GOOD])


def test_it_is_said_which_loss_reads_preferences(groups_of):
    for flags, trainer in ((["--loss", "dpo"], train_policy), ([], train_critic)):
        with pytest.raises(SystemExit, match="stdin, line 1: .*--loss mtdpo"):
            groups_of([GOOD], *flags, trainer=trainer)


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
    assert "are not what" not in capsys.readouterr().err


LONG = {"prompt": [{"role": "user", "content": "a river " * 200}], "chosen": [ELBE],
        "rejected": [WATER]}


def test_what_is_longer_than_the_models_positions_is_left_out(other, groups_of, capsys):
    config = other() / "config.json"
    positions = {"max_position_embeddings": 200}
    config.write_text(json.dumps(json.loads(config.read_text()) | positions))
    assert groups_of([GOOD, LONG], model=config.parent) == groups_of([GOOD])
    said = capsys.readouterr().err
    assert "2 messages and candidates are longer than 200" in said
    assert "the first: the task of line 2" in said


def test_ids_beyond_the_models_embedding_are_refused(other, groups_of):
    model = other()
    tokenizer = M.find_model(str(model))[1]
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(model)
    assert groups_of([GOOD], model=model)
    line = {**GOOD, "chosen": [RIVER, {**ELBE, "content": "The <extra>"}]}
    told = "the task of line 2 has a token beyond the model's embedding of"
    with pytest.raises(SystemExit, match=told):
        groups_of([GOOD, line], model=model)


def test_a_conversation_that_the_template_refuses_is_named_by_its_line(other, groups_of):
    model = other("{{ bos_token }}", "{% if messages[0]['role'] == 'system' %}"
                  "{{ raise_exception('no system') }}{% endif %}{{ bos_token }}")
    with pytest.raises(SystemExit, match="the task of line 2 does not suit this --model's chat "
                                         "template: no system"):
        groups_of([GOOD, {**GOOD, "chosen": [SYSTEM, *CHOSEN]}], model=model)


def test_stored_text_that_a_template_does_not_write_after_its_prompt_is_told(other, groups_of,
                                                                             capsys):
    """With a count and an example."""
    model = other("<|assistant|>{% endif %}", "<|assistant|>why{% endif %}")
    groups_of([GOOD, {**GOOD, "chosen": [RIVER, {**ELBE, "content": "<|end|>"}]}], model=model)
    said = capsys.readouterr().err
    assert "4 stored messages are not what this --model's chat template writes" in said
    assert "1 stored messages spell a control token" in said
