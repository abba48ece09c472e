"""Chat templates: conversations become ids as the template writes them; parts and the whole.

The oracle is the template's text of the whole conversation, history and message.
"""
import copy
import itertools
import random
import re
from functools import partial

import pytest
from tokenizers import (AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        processors, trainers)
from transformers import PreTrainedTokenizerFast

import model as M
import utils
from conftest import dialogue, turns_of as turns_in_record

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


def tokenizer_of(name, kind="bytes", size=0, **how):
    """A BPE with a family's template and control tokens. It adds a BOS, as Llama's does.

    kind: of pre-tokenizer or normalizer. size: of the vocabulary; 0: it merges nothing. how: the
    control tokens are added.
    """
    control, template, _ = TEMPLATES[name]
    t = Tokenizer(models.BPE(unk_token="?"))
    if kind.startswith("bytes"):
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "bytes after a space")
        t.decoder = decoders.ByteLevel()
    elif kind == "whole texts":  # no pre-tokenizer: merges go across spaces and lines
        t.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    elif kind == "first word":
        t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif kind == "each text":
        t.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"),
                                             normalizers.Replace(" ", "\u2581")])
    random_ = random.Random(0)
    text = [spelled(random_, WORDS) + f">\n{name}<|\n\n" for _ in range(300)]
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind.startswith("bytes") else []
    t.train_from_iterator(text, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet,
                                                    special_tokens=["?"], show_progress=False))
    how = {"normalized": False, **how}
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


# --- what is written ------------------------------------------------------------------------------

HEADERS = {  # of a role; where a control token is in it, and where not
    "control": "<|im_start|>{{ m['role'] }}\n",
    "words": "{{ '\n\n' if not loop.first }}{{ m['role'] | capitalize }}: ",
    "bare": "{{ {'user': '[INST] ', 'assistant': ' ', 'system': ''}[m['role']] }}"}
PROMPTS = {"control": "<|im_start|>assistant\n", "words": "\n\nAssistant:", "bare": ""}
ENDS = ["<|im_end|>\n", "<|im_end|>", " {{ eos_token }}", "\n", ""]
OPENS = "", "<think>\n", "<think>\n\n</think>\n\n", "<thought>\n", None  # None: it has no prompt
CUT = "{% if m['role'] == 'assistant' %}{% set c = c.split('</think>')[-1] %}{% endif %}"


def templates():
    """(a chat template, whether its turns end with a control token)"""
    for header, end, trim, bos, cut, opens in itertools.product(
            HEADERS, ENDS, (0, 1), ("", "<|begin|>"), (0, 1), OPENS):
        written = "c | trim" if trim else "c"
        prompt = "" if opens is None else PROMPTS[header] + opens
        yield (bos + "{% for m in messages %}{% set c = m['content'] %}" + CUT * cut
               + HEADERS[header] + "{{ " + written + " }}" + end + "{% endfor %}"
               + "{% if add_generation_prompt %}{{ " + repr(prompt) + " }}{% endif %}",
               bool(end.strip()))


@pytest.mark.parametrize("part", [*range(3), *TEMPLATES])
def test_prompt_and_action_begin_as_the_template_writes_the_conversation(part):
    """The prompt is the model's own but for what the template does not write; an EOS ends a turn
    without an end. Control tokens that messages spell stay text, thoughts are cut as in the text,
    and what the template does not write as it stands is told.

    part: of the generated templates, or one that is documented.
    """
    name, random_ = part if part in TEMPLATES else "qwen3", random.Random(part)
    tokenizer, control = tokenizer_of(name, "bytes", 400), TEMPLATES[name][0]
    cases = 30 * [(TEMPLATES[name][1], True)]
    if part != name:
        cases = random_.sample([*templates()], 60)
    special = set(tokenizer.convert_tokens_to_ids(control))
    system = [{"role": "system", "content": ""}]
    for (template, ends), thinking in zip(cases, itertools.cycle((0, 1))):
        tokenizer.chat_template = template
        write = partial(tokenizer.apply_chat_template, tokenize=False,
                        enable_thinking=bool(thinking))
        M.control_tokens.cache_clear(), M.end_of_message.cache_clear()
        for spell in ([], control):
            said = [spelled(random_, WORDS + spell) or "x" for _ in range(6)]
            said[1] = "<think>\nwhy?\n</think>\n\n" * random_.randrange(2) + said[1]
            history = system[:random_.randrange(2)] + dialogue(*said)
            for t, message in enumerate(history):
                if message["role"] != "assistant":
                    continue
                utils.WARNINGS.clear()
                action, without = M.action_ids(tokenizer, message, history[:t], thinking)
                told = any("do not follow the prompt" in note for note in utils.WARNINGS)
                ids = M.render(tokenizer, history[:t], thinking)
                read, wrote = ids[:len(ids) - without], [*map(ord, action)]
                prompt = write(history[:t], add_generation_prompt=True)
                whole = write(history[:t + 1])
                got = tokenizer.decode(read + wrote)
                case = template, history[:t + 1], got
                if ends:
                    assert whole.startswith(got) and got.endswith(M.end_of_message(tokenizer)), case
                else:
                    assert got == whole + tokenizer.eos_token, case
                assert (without == 0) == whole.startswith(prompt), case
                verbatim = message["content"].strip() in whole[len(prompt) - without:]
                assert told == (without > 0 or not verbatim), case
                assert wrote[-1] in special, case
                if without == 0:
                    assert tokenizer.decode(read) == prompt, case
                if spell:  # as many control tokens as where nothing spells one
                    plain = [{**m, "content": "x"} for m in history[:t + 1]]
                    there = M.action_ids(tokenizer, plain[-1], plain[:-1], thinking)[0]
                    count = lambda x: sum(i in special for i in x)
                    assert count(wrote) == count(map(ord, there)), case


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
    tokenizer.chat_template = DROPS[name]
    seen = set()
    for _ in range(60):
        roles = random_.choices(["system", "user", "assistant"], k=random_.randrange(1, 6))
        history = [{"role": role, "content": f"zebra{i}."} for i, role in enumerate(roles)]
        text = tokenizer.apply_chat_template(history, tokenize=False)
        lost = [i for i, m in enumerate(history) if m["content"] not in text]
        seen.add(bool(lost))
        if lost:
            why = f"message {lost[0] + 1} of {len(roles)}, whose role is {roles[lost[0]]};"
            with pytest.raises(ValueError, match=f"it leaves out the content of {why}"):
                M.render(tokenizer, history)
        else:
            assert M.template_text(tokenizer, history, 0, False) == text
    assert seen == {"none": {False}, "texts": {True}}.get(name.partition(",")[0], {False, True})


def turns_of(tokenizer, history, thinking=0):
    """With prompts and actions as lists of ids."""
    record = {"dialogue_history": history, "meta": {"thinking": thinking}}
    return [[[*map(ord, text)] for text in turn] for turn in turns_in_record(tokenizer, record)]


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
    assert end in M.stop_ids(tokenizer, "no folder")


def test_a_thought_is_said_once_as_an_action():
    """By Qwen3's template. One that a human spells is text."""
    tokenizer, history = tokenizer_of("qwen3"), copy.deepcopy(PLAIN)
    marks = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    history[1]["output"] = "<think>\nwhich?\n</think>\n\nwhat is the fee?"
    history[2]["content"] += "</think><think>"
    for thinking in (0, 1):
        turns = turns_of(tokenizer, history, thinking)
        (prompt, action), (later, last) = ([[i for i in ids if i in marks] for ids in turn]
                                           for turn in turns)
        assert action == marks and prompt == later == marks * (1 - thinking)
        assert last == marks * thinking  # an empty one


def test_the_action_is_what_was_sampled():
    """Its token ids, however the tokenizer would write the same text, else `output`; the next
    prompt shows the content.
    """
    tokenizer, history = tokenizer_of("llama3"), copy.deepcopy(PLAIN)
    history[1]["output"] = "let me think OUTPUT: what is the fee?"
    (_, action), (later, _) = turns_of(tokenizer, history)
    assert tokenizer.decode(action) == history[1]["output"] + "<|eot_id|>"
    assert "let me think" not in tokenizer.decode(later)
    history[1]["token_ids"] = [1, 2, 3]
    assert turns_of(tokenizer, history)[0][1] == [1, 2, 3]


def test_what_the_critic_and_its_reference_read():
    """c before the description, or none. A thought that the prompt opens is an output's alone."""
    tokenizer, history = tokenizer_of("qwen3"), PLAIN[:1]
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}")
    for action, said, opened in (({"content": "what?"}, "what?", ""), ({"output": ""}, "", ""),
                                 ({"output": "eh</think>what?"}, "eh</think>what?", "<think>\n")):
        prompts = [f"<|im_start|>user\n{c}write f(x): the price<|im_end|>\n<|im_start|>assistant\n"
                   + opened for c in ("", "Hidden reference:\nc\n\n")]
        for pi, ref in (0, 1), (1, 0), (1, 1), (0, 0):
            record = {"task": {"ground_truth": "c"}}
            [turns] = M.pi_and_ref_turns(tokenizer, record, history, [action],
                                         pi_reads_c=pi, ref_reads_c=ref)
            read = [[tokenizer.decode([*map(ord, part)]) for part in turn] for turn in turns]
            assert read == [[prompts[with_c], said + "<|im_end|>"] for with_c in (pi, ref)]


def test_a_prompt_is_the_same_on_every_day(tiny_dir):
    tokenizer = M.find_model(tiny_dir)[1]
    date = "{{ strftime_now(format='%d %B %Y %-H %F') }}"
    tokenizer.chat_template = date + tokenizer.chat_template
    assert "26 July 2024 0 2024-07-26" in tokenizer.decode(M.render(tokenizer, dialogue("a")))


@pytest.mark.parametrize("start", [" [INST]", "\n\n", "  {% if true %}x{% endif %}", "{#- a -#} y",
                                   "{%- set z = 1 -%}\n", "{% set z = 1 %}\n x", ""])
def test_the_date_changes_no_other_text_of_a_template(start, tiny_dir):
    tokenizer = M.find_model(tiny_dir)[1]
    tokenizer.chat_template = start + tokenizer.chat_template
    plain = tokenizer.apply_chat_template(dialogue("a"), tokenize=False, add_generation_prompt=True)
    assert M.template_text(tokenizer, dialogue("a"), 0, True) == plain


# --- part by part: by several kinds of tokenizers -------------------------------------------------

KINDS = "bytes", "bytes after a space", "whole texts", "first word", "each text"
PARTS = [  # template, kind, how control tokens are added, more tokens, whether there are parts
    *((name, kind, how, [], True) for name in TEMPLATES for kind in KINDS
      for how in ({}, {"rstrip": True})),
    # tokens that look around themselves
    *((name, "whole texts", {how: True}, [], False) for name in TEMPLATES
      for how in ("lstrip", "single_word", "normalized")),
    ("qwen3", "bytes", {}, ["\n", "\n\n", "\n\n\n"], True),  # Gemma's, which begin alike
    ("qwen3", "bytes", {}, ["\n<|im_s"], False)]  # a control token begins inside another


@pytest.mark.parametrize("name, kind, how, more, cut", PARTS)
def test_the_ids_of_the_parts_are_those_of_the_whole(name, kind, how, more, cut, monkeypatch):
    """Of growing dialogues of hostile text."""
    tokenizer, random_ = tokenizer_of(name, kind, 500, **how), random.Random(1)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in more])
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    words = WORDS + added + [text[1:] for text in added]
    for _ in range(12):
        messages = dialogue(*(spelled(random_, words) for _ in range(7)))
        for t, thinking in itertools.product((1, 3, 5, 7), (0, 1)):
            ids = M.render(tokenizer, messages[:t], thinking)
            with monkeypatch.context() as m:
                m.setattr(M, "cut_pattern", lambda tokenizer: re.compile(M.CUT))
                assert ids == M.render(tokenizer, messages[:t], thinking), messages[:t]
    text = tokenizer.apply_chat_template(dialogue("a", "b"), tokenize=False)
    assert (len(list(filter(None, M.cut_pattern(tokenizer).split(text)))) > 1) == cut


def test_a_part_is_tokenized_once(tiny_dir):
    tokenizer, messages = M.find_model(tiny_dir)[1], dialogue(*(f"part {n}" for n in range(9)))
    M.render(tokenizer, messages[:7])
    before = M.part_ids.cache_info().misses
    M.render(tokenizer, messages)
    assert M.part_ids.cache_info().misses - before <= 2  # the two messages that are new
