"""Preferences: the form that the trainer reads, what it refuses, and the forms that become it."""
import json
import shutil
from pathlib import Path

import pytest

from conftest import complaint, dialogue, records, script, succeed

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


@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_the_one_that_the_trainer_reads(form):
    line, before = FORMS[form]
    (got,) = records(succeed(CONVERT, stdin=[line]).stdout)
    assert got["chosen"] == before + CHOSEN and got["rejected"] == before + REJECTED


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


def trained(line, tiny_dir, out, *flags):
    return script("train_policy.py", "--loss", "mtdpo", "--model", tiny_dir, "--out", out,
                  "--epochs", 1, *flags, stdin=[{"chosen": CHOSEN, "rejected": REJECTED}, line])


NOT_OURS = {  # what train_policy.py says
    "prompt is not a list": FORMS["UltraFeedback"][0],
    "chosen is not a list": FORMS["HH"][0],
    "neither a record nor a preference": FORMS["ms-swift"][0],
    "chosen and rejected are the same": {"chosen": CHOSEN, "rejected": CHOSEN},
    "would be read twice": FORMS["a prompt beside whole sides"][0],
    "two messages of the assistant": FORMS["a begun answer"][0],
    "role of system, user and assistant": {"chosen": [{**RIVER, "role": "Human"}, ELBE],
                                           "rejected": REJECTED},
    "content is not text": FORMS["parts"][0]}


@pytest.mark.parametrize("message", NOT_OURS)
def test_what_is_no_preference_is_told_the_form_and_the_converter(message, tiny_dir, tmp_path):
    complaint(trained(NOT_OURS[message], tiny_dir, tmp_path / "out"), message, "stdin, line 2: ",
              '{"prompt": [...], "chosen": [...]', CONVERT, "--loss mtdpo")
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize("name, value", [
    ("tools", [{}]), ("tool_calls", [{}]), ("system", "Be brief."), ("reasoning_content", "why"),
    ("loss_mask", 0), ("weight", 0.5), ("train", False), ("input", "<|system|>")])
def test_a_field_that_changes_the_meaning_is_refused(name, value, ranked, tiny_dir, tmp_path):
    """In a line or in a message, of preferences and of records."""
    pair, record = {"chosen": CHOSEN, "rejected": REJECTED}, ranked[0]
    first, *others = record["dialogue_history"]
    for i, line in enumerate([
            {**pair, name: value}, {**pair, "chosen": [RIVER, {**ELBE, name: value}]},
            {**record, name: value},
            {**record, "dialogue_history": [{**first, name: value}, *others]}]):
        complaint(trained(line, tiny_dir, tmp_path / "out"), f"line 2: the field '{name}'")
        if i > 1:
            complaint(script("train_critic.py", "--model", tiny_dir, "--out", tmp_path / "c",
                             stdin=[line]), f"line 1: the field '{name}'")


def test_names_of_a_records_fields_and_whole_weights_bind_no_preference(tiny_dir, tmp_path):
    line = {"task": "Coding", "answer": 42, "reward": 7.5, "sample": "a", "tests": [1], "meta": "v",
            "weight": 1, "train": True, "tools": [], "system": "", "prompt": [RIVER],
            "chosen": [{**ELBE, "output": "a draft", "logprobs": {"content": []}}],
            "rejected": [WATER]}
    losses = []
    for i, line in enumerate([line, {"prompt": [RIVER], "chosen": [ELBE], "rejected": [WATER]}]):
        done = trained(line, tiny_dir, tmp_path / str(i), "--nll_coef", 1)
        assert done.returncode == 0, done.stderr
        losses.append([row["loss"] for row in records(
            (tmp_path / str(i) / "metrics.jsonl").read_text()) if "step" in row])
    assert losses[0] == losses[1]


def test_dpo_says_which_loss_reads_preferences(tiny_dir, tmp_path):
    line = {"chosen": CHOSEN, "rejected": REJECTED}
    done = script("train_policy.py", "--model", tiny_dir, "--out", tmp_path / "x", stdin=[line])
    complaint(done, "stdin, line 1: ", "--loss mtdpo")
    complaint(script("train_critic.py", "--model", tiny_dir, "--out", tmp_path / "y",
                     stdin=[line]), "stdin, line 1: ", "train_policy.py --loss mtdpo")


def test_thinking_reaches_preferences(tiny_dir, tmp_path):
    """By meta.thinking: another prompt, another loss."""
    model = shutil.copytree(tiny_dir, tmp_path / "m")
    template = Path(model, "chat_template.jinja")
    template.write_text(template.read_text().replace(
        "<|assistant|>{% endif %}",
        "<|assistant|>{% if not enable_thinking %}x{% endif %}{% endif %}").replace(
            "<|{{ m['role'] }}|>", "<|{{ m['role'] }}|>{% if m['role'] == 'assistant' and not "
                                   "enable_thinking %}x{% endif %}"))
    losses = {}
    for thinking in (0, 1, None):
        line = {"chosen": CHOSEN, "rejected": REJECTED} | (
            {} if thinking is None else {"meta": {"thinking": thinking}})
        out = tmp_path / str(thinking)
        done = script("train_policy.py", "--loss", "mtdpo", "--model", model, "--out", out,
                      "--epochs", 1, "--nll_coef", 1, stdin=[line])
        assert done.returncode == 0 and "are not what" not in done.stderr, done.stderr
        losses[thinking] = [row["loss"] for row in records((out / "metrics.jsonl").read_text())
                            if "step" in row]
    assert losses[0] == losses[None] != losses[1]


def test_what_the_model_can_not_take_is_told_before_a_step(tiny_dir, tmp_path):
    """Longer than its positions: left out and counted. Ids beyond its embedding: refused."""
    model = shutil.copytree(tiny_dir, tmp_path / "m")
    config = json.loads(Path(model, "config.json").read_text())
    long = {"prompt": [{"role": "user", "content": "a river " * 200}], "chosen": [ELBE],
            "rejected": [WATER]}
    Path(model, "config.json").write_text(json.dumps({**config, "max_position_embeddings": 200}))
    done = trained(long, model, tmp_path / "out")
    assert done.returncode == 0 and "2 messages and candidates are longer than 200" in done.stderr
    assert "the first: the task of line 2" in done.stderr

    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(model)
    assert trained({**long, "prompt": [RIVER]}, model, tmp_path / "x").returncode == 0
    complaint(trained({**long, "prompt": [RIVER], "chosen": "<extra>"} | {
        "chosen": [{**ELBE, "content": "The <extra>"}]}, model, tmp_path / "y"),
        "the task of line 2 has a token beyond the model's embedding of")


def test_a_conversation_that_the_template_refuses_is_named_by_its_line(tiny_dir, tmp_path):
    model = shutil.copytree(tiny_dir, tmp_path / "m")
    template = Path(model, "chat_template.jinja")
    template.write_text("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}"
                        "{% endif %}" + template.read_text())
    line = {"prompt": [SYSTEM, RIVER], "chosen": [ELBE], "rejected": [WATER]}
    complaint(trained(line, model, tmp_path / "out"), "the task of line 2 does not suit this "
              "--model's chat template: no system")


def test_stored_text_that_a_template_does_not_write_after_its_prompt_is_told(tiny_dir, tmp_path):
    """With a count and an example; collect.py refuses a template without a generation prompt."""
    model = shutil.copytree(tiny_dir, tmp_path / "m")
    template = Path(model, "chat_template.jinja")
    text = template.read_text()
    template.write_text(text.replace("<|assistant|>{% endif %}", "<|assistant|>why{% endif %}"))
    done = trained({"prompt": [RIVER], "chosen": [{**ELBE, "content": "<|end|>"}],
                    "rejected": [WATER]}, model, tmp_path / "out")
    assert done.returncode == 0
    assert "4 stored messages are not what this --model's chat template writes" in done.stderr
    assert "1 stored messages spell a control token" in done.stderr
    template.write_text(text.replace("<|assistant|>{% endif %}", "{% endif %}"))
    complaint(script("collect.py", "--model", model, "--human", "fixed:x", stdin=[
        {"task": {"problem_description": "a", "ground_truth": "def f(): pass"}}]),
        "has no generation prompt, which would be '<|assistant|>'")
