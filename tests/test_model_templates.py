"""Chat templates: conversations become ids as the template writes them.

The oracle is the template's text of the whole conversation, history and message.
"""
import copy
import json
import random
from functools import partial

import pytest
from tokenizers import (AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors,
                        trainers)
from transformers import PreTrainedTokenizerFast

import model as M
from colbench import read_action
from conftest import dialogue, plain_ids, turns_of as turns_in_record

# The documented formats. name: (control tokens, the beginning of text first; template; end of turn)
TEMPLATES = {
    "llama3": (["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
                "<|end_of_text|>"],
               "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
               "{% set system = messages[0]['content'] %}"
               "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
               "<|start_header_id|>system<|end_header_id|>\n\n"
               "Today Date: 26 Jul 2024\n\n{{ system }}<|eot_id|>"
               "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
               "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
               "{% if add_generation_prompt %}"
               "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
               "<|eot_id|>"),
    # Qwen3's <think> and </think> are no special tokens.
    "qwen3": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
              "{% set ns = namespace(last=0) %}"
              "{% for m in messages %}"
              "{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
              "{% for m in messages %}{% set content = m['content'] %}{% set thought = '' %}"
              "{% if m['role'] == 'assistant' and '</think>' in content %}"
              "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
              "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
              "<|im_start|>{{ m['role'] }}\n"
              "{% if m['role'] == 'assistant' and loop.index0 > ns.last"
              " and (loop.last or thought) %}"
              "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ content }}<|im_end|>\n{% endfor %}"
              "{% if add_generation_prompt %}<|im_start|>assistant\n"
              "{% if enable_thinking is defined and enable_thinking is false %}"
              "<think>\n\n</think>\n\n{% endif %}"
              "{% endif %}", "<|im_end|>"),
    "mistral": (["<s>", "</s>", "[INST]", "[/INST]"],
                "{{ bos_token }}{% for m in messages %}"
                "{% if m['role'] == 'user' %}[INST] {{ m['content'] }}[/INST]"
                "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}", "</s>"),
}
EOS = {"llama3": "<|end_of_text|>", "qwen3": "<|endoftext|>", "mistral": "</s>"}

WORDS = ["", " ", "  ", "\n", "\n\n", "\r\n", "\t", "a", "fee", " fee", "def f(x):\n    return x",
         "\u00e9", "e\u0301", "\u0301", "\U0001f642", "\u00a0", "\u2581", "<|", "|>", "<", ">", "[",
         "</think>", "\ue000", "\ue0001\ue001", "\ue0020\ue003", "I WANT TO ANSWER:", "A", "FEE"]


def spelled(random_, words):
    return "".join(random_.choices(words, k=random_.randrange(12)))


def tokenizer_of(name, size=0):
    """A BPE with a family's template and control tokens. It adds a BOS, as Llama's does.

    size: of the vocabulary; 0: it merges nothing.
    """
    control, template, _ = TEMPLATES[name]
    t = Tokenizer(models.BPE(unk_token="?"))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    random_ = random.Random(0)
    text = [spelled(random_, WORDS) + f">\n{name}<|\n\n" for _ in range(300)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator(text, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet,
                                                    special_tokens=["?"], show_progress=False))
    how = {"normalized": False}
    t.add_special_tokens([AddedToken(token, **how) for token in control])
    t.add_tokens([AddedToken(token, normalized=True) for token in ["  ", "<think>", "</think>"]])
    bos = {}
    if name != "qwen3":
        bos = {"bos_token": AddedToken(control[0], **how)}
        t.post_processor = processors.TemplateProcessing(
            f"{control[0]} $A", special_tokens=[(control[0], t.token_to_id(control[0]))])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=t, **bos,
                                        eos_token=AddedToken(EOS[name], **how))
    tokenizer.chat_template = template
    return tokenizer


def chat_of(tokenizer):
    return M.Chat(tokenizer, "no folder")


# --- what is written ------------------------------------------------------------------------------

@pytest.mark.parametrize("name", TEMPLATES)
def test_a_stored_message_follows_the_prompt_and_ends_as_the_template_ends_it(name):
    """Control tokens that messages spell stay text."""
    tokenizer, random_ = tokenizer_of(name, 400), random.Random(name)
    chat = chat_of(tokenizer)
    control, _, end = TEMPLATES[name]
    special = set(tokenizer.convert_tokens_to_ids(control))
    for _ in range(60):
        said = [spelled(random_, WORDS + control) or "x" for _ in range(4)]
        for t in (1, 3):
            history, thinking = dialogue(*said[:t]), random_.randrange(2)
            plain = dialogue(*["x"] * t)
            prompt, of_plain = (chat.prompt_ids(h, thinking) for h in (history, plain))
            message = {"role": "assistant", "content": said[t]}
            action = chat.action_ids(message, history, thinking)
            count = lambda ids: sum(i in special for i in ids)
            assert count(prompt) == count(of_plain) and count(action) == 1
            assert action[-1] == tokenizer.convert_tokens_to_ids(end)
            if not any(token in "".join(said) for token in control):
                write = partial(tokenizer.apply_chat_template, tokenize=False,
                                enable_thinking=bool(thinking))
                text = write(history, add_generation_prompt=True)
                assert tokenizer.decode(prompt) == text
                whole, got = write([*history, message]), tokenizer.decode(action)
                if whole.startswith(text) and said[t].strip() in whole:
                    assert text + got == whole[:whole.rindex(end) + len(end)]
                else:
                    assert got == said[t] + end


def test_a_lone_surrogate_becomes_a_question_mark():
    """Tokenizers can't encode it, but JSON may spell it; a pair of them is one character."""
    tokenizer = tokenizer_of("llama3")
    chat = chat_of(tokenizer)
    history = dialogue(json.loads(r'"a\ud800 \ud83d\ude42"'))
    assert "a? 🙂<|eot_id|>" in tokenizer.decode(chat.prompt_ids(history))
    ids = chat.action_ids({"output": "\udc00b"}, history)
    assert tokenizer.decode(ids) == "?b<|eot_id|>"


STORED = {"content": "the fee?"}
SAID = {"content": "the fee?", "output": "<think>\nwhy\n</think>\n\nthe fee?"}
THOUGHT = {"content": SAID["output"]}
OPENS = "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize("name, thinking, action, end_of_prompt, text", [
    ("mistral", 0, STORED, "[/INST]", " the fee?</s>"),
    ("llama3", 0, STORED, "assistant<|end_header_id|>\n\n", "the fee?<|eot_id|>"),
    ("qwen3", 0, STORED, OPENS + "\n</think>\n\n", "the fee?<|im_end|>"),
    ("qwen3", 1, STORED, "assistant\n", "<think>\n\n</think>\n\nthe fee?<|im_end|>"),
    ("qwen3", 1, SAID, "assistant\n", SAID["output"] + "<|im_end|>"),
    ("qwen3", 1, THOUGHT, "assistant\n", SAID["output"] + "<|im_end|>"),
    ("r1", 1, STORED, OPENS, "</think>the fee?<|im_end|>"),
    ("r1", 1, SAID, OPENS, SAID["output"] + "<|im_end|>"),
    ("cut", 1, SAID, "assistant\n", SAID["output"] + "<|im_end|>")])
def test_a_stored_message_is_read_as_its_template_writes_it(name, thinking, action, end_of_prompt,
                                                            text):
    """Where that writes another prompt, or cuts the thought, its own text follows the prompt."""
    tokenizer, history = tokenizer_of(name if name in TEMPLATES else "qwen3"), dialogue("write f")
    if name in ("r1", "cut"):
        tokenizer.chat_template = (
            "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'].split('</think>')"
            "[-1] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
            + ("<think>\n" if name == "r1" else "") + "{% endif %}")
    record = {"dialogue_history": [*history, {"role": "assistant", **action}]}
    [[prompt, wrote]] = turns_of(tokenizer, record["dialogue_history"], thinking)
    assert tokenizer.decode(prompt).endswith(end_of_prompt) and tokenizer.decode(wrote) == text


SHOWN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
DROPS = {  # templates that leave out messages, or none
    "none": "{% for m in messages %}" + SHOWN + "{% endfor %}",
    "system": "{% for m in messages %}{% if m['role'] != 'system' %}" + SHOWN
              + "{% endif %}{% endfor %}",
    "system, but the first": "{% for m in messages %}{% if m['role'] != 'system' or loop.first %}"
                             + SHOWN + "{% endif %}{% endfor %}",
    "all but the last three": "{% for m in messages[-3:] %}" + SHOWN + "{% endfor %}",
    "assistant": "{% for m in messages %}{% if m['role'] != 'assistant' %}" + SHOWN
                 + "{% endif %}{% endfor %}",
    "texts": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for p in m['content'] %}"
             "{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
             "{% endfor %}",
    "system if it does not end with the user": (
        "{% for m in messages %}{% if m['role'] != 'system' or messages[-1]['role'] == 'user' %}"
        + SHOWN + "{% endif %}{% endfor %}"),
    # the system message as a part of the next one; contents as JSON
    "one of two systems": (
        "{% set ns = namespace(before='') %}{% for m in messages %}"
        "{% if m['role'] == 'system' %}{% set ns.before = m['content'] %}{% else %}"
        "[{{ m['role'] }}] {{ ns.before }} {{ m['content'] }}<|im_end|>"
        "{% set ns.before = '' %}{% endif %}{% endfor %}{{ ns.before }}"),
    "none, as JSON": "{{ messages | tojson }}<|im_end|>"}


@pytest.mark.parametrize("name", DROPS)
def test_a_dialogue_of_which_the_template_leaves_out_a_message_is_refused(name):
    """The oracle is the text by transformers alone. The agent or the critic would not read it."""
    tokenizer, random_ = tokenizer_of("qwen3"), random.Random(name)
    chat, seen = chat_of(tokenizer), set()
    tokenizer.chat_template = DROPS[name]
    chat.template = M.STRFTIME_NOW + DROPS[name]
    for _ in range(60):
        roles = random_.choices(["system", "user", "assistant"], k=random_.randrange(1, 6))
        history = [{"role": role, "content": f"zebra{i}."} for i, role in enumerate(roles)]
        text = tokenizer.apply_chat_template(history, tokenize=False)
        lost = [i for i, m in enumerate(history) if m["content"] not in text]
        seen.add(bool(lost))
        if lost:
            why = f"message {lost[0] + 1} of {len(roles)}, whose role is {roles[lost[0]]};"
            with pytest.raises(ValueError, match=f"it leaves out the content of {why}"):
                chat.prompt_ids(history)
        else:
            assert chat.template_text(history, 0, False) == text
    assert seen == {"none": {False}, "texts": {True}}.get(name.partition(",")[0], {False, True})


def turns_of(tokenizer, history, thinking=0):
    """With prompts and actions as lists of ids."""
    record = {"dialogue_history": history, "meta": {"thinking": thinking}}
    turns = turns_in_record(chat_of(tokenizer), record)
    return [[[*map(ord, text)] for text in turn] for turn in turns]


PLAIN = dialogue("write f(x): the price", "what is the fee?", "fee=3",
                 "I WANT TO ANSWER:\ndef f(x): return 'é🙂' + x")


@pytest.mark.parametrize("name", TEMPLATES)
def test_later_prompts_extend_earlier_turns(name):
    """So that these share a tree."""
    tokenizer = tokenizer_of(name)
    (prompt, action), (later, _) = turns_of(tokenizer, PLAIN)
    if name == "qwen3":  # an empty thought stands before a new message alone
        prompt = prompt[:-len(tokenizer("<think>\n\n</think>\n\n")["input_ids"])]
    assert later[:len(prompt) + len(action)] == prompt + action
    end = tokenizer.convert_tokens_to_ids(TEMPLATES[name][2])
    assert end in chat_of(tokenizer).stop


def test_a_thought_is_said_once_as_an_action():
    """By Qwen3's template."""
    tokenizer, history = tokenizer_of("qwen3"), copy.deepcopy(PLAIN)
    marks = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    history[1]["output"] = "<think>\nwhich?\n</think>\n\nwhat is the fee?"
    with pytest.raises(ValueError, match="a stored thought needs"):
        turns_of(tokenizer, history, 0)
    (prompt, action), (later, last) = ([[i for i in ids if i in marks] for ids in turn]
                                       for turn in turns_of(tokenizer, history, 1))
    assert action == marks and not prompt and not later and last == marks  # an empty one


def test_the_channels_of_gpt_oss_are_parts_of_one_message():
    """The human reads the last channel, and the trainers all tokens."""
    tokenizer, history = tokenizer_of("qwen3"), dialogue("write f")
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
    tokenizer.add_tokens([*marks, "<|call|>", "<|return|>"], special_tokens=True)
    tokenizer.eos_token = "<|return|>"
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m['role'] }}"
        "{% if m['role'] == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m['content'] }}"
        "{% if m['role'] == 'assistant' and loop.last and not add_generation_prompt %}<|return|>"
        "{% else %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}")
    chat = chat_of(tokenizer)
    ends = tokenizer.convert_tokens_to_ids(["<|call|>", "<|return|>"])
    assert chat.stop >= {*ends} and not chat.stop & {*tokenizer.convert_tokens_to_ids(marks)}
    said = "<|channel|>final<|message|>the fee<|return|>"
    ids = chat.text_ids("<|channel|>analysis<|message|>why<|end|><|start|>assistant" + said)
    output = chat.decode(ids)
    assert read_action(output, last=False) == ("the fee", None)
    sampled = {"content": "the fee", "output": output, "token_ids": ids}
    assert chat.action_ids(sampled, history) == ids
    assert chat.action_ids({"content": "the fee"}, history) == chat.text_ids(said)


def test_the_action_is_what_was_sampled():
    """Its token ids, however the tokenizer would write the same text, else `output`; the next
    prompt shows the content.
    """
    tokenizer, history = tokenizer_of("llama3"), copy.deepcopy(PLAIN)
    history[1]["output"] = "let me think OUTPUT: what is the fee?"
    (_, action), (later, _) = turns_of(tokenizer, history)
    assert tokenizer.decode(action) == history[1]["output"] + "<|eot_id|>"
    assert "let me think" not in tokenizer.decode(later)
    history[1] |= {"content": "the fee", "output": "let me think OUTPUT: the fee"}
    letters = [i for c in history[1]["output"] for i in plain_ids(tokenizer, c)]
    history[1]["token_ids"] = letters
    assert turns_of(tokenizer, history)[0][1] == letters  # no end is added


def test_what_the_critic_and_its_reference_read():
    """c before the description, or none. A stored content closes a thought that is open."""
    tokenizer, history = tokenizer_of("qwen3"), PLAIN[:1]
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}")
    for action, said in (({"content": "what?"}, "</think>what?"), ({"output": ""}, ""),
                         ({"content": "<think>eh</think>what?"}, "eh</think>what?"),
                         ({"output": "eh</think>what?"}, "eh</think>what?")):
        prompts = [f"<|im_start|>user\n{c}write f(x): the price<|im_end|>\n<|im_start|>assistant\n"
                   "<think>\n" for c in ("", "Hidden reference:\nc\n\n")]
        for pi, ref in (0, 1), (1, 0), (1, 1), (0, 0):
            record = {"task": {"ground_truth": "c"}, "meta": {"thinking": 1}}
            [(_, *turns)] = M.read_actions(chat_of(tokenizer), record, history, [action],
                                           pi_reads_hidden=pi, ref_reads_hidden=ref)
            read = [[tokenizer.decode([*map(ord, part)]) for part in turn] for turn in turns]
            assert read == [[prompts[with_c], said + "<|im_end|>"] for with_c in (pi, ref)]


def test_a_prompt_is_the_same_on_every_day(tiny_dir):
    tokenizer = M.find_model(tiny_dir)[1].tokenizer
    date = "{{ strftime_now(format='%d %B %Y') }}"
    tokenizer.chat_template = date + tokenizer.chat_template
    assert "26 Jul 2024" in tokenizer.decode(chat_of(tokenizer).prompt_ids(dialogue("a")))


@pytest.mark.parametrize("start", [" [INST]", "\n\n", "  {% if true %}x{% endif %}", "{#- a -#} y",
                                   "{%- set z = 1 -%}\n", "{% set z = 1 %}\n x", ""])
def test_the_date_changes_no_other_text_of_a_template(start, tiny_dir):
    tokenizer = M.find_model(tiny_dir)[1].tokenizer
    tokenizer.chat_template = start + tokenizer.chat_template
    plain = tokenizer.apply_chat_template(dialogue("a"), tokenize=False, add_generation_prompt=True)
    assert chat_of(tokenizer).template_text(dialogue("a"), 0, True) == plain


@pytest.mark.parametrize("special", [True, False])
def test_a_message_is_shown_without_its_end(special):
    """Some vocabularies have the end of a message as an added token that is not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<eos>")
    tokenizer.add_tokens([AddedToken("<end>", special=special, normalized=False)])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}")
    ids = tokenizer("which rate?<end>", add_special_tokens=False)["input_ids"]
    chat = chat_of(tokenizer)
    assert ids[-1] in chat.stop and chat.decode(ids) == "which rate?"
    action = {"output": "which rate?", "token_ids": ids}
    assert chat.action_ids(action, dialogue("pay")) == ids
