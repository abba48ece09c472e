"""Stored text is what the chat template writes: generated templates and conversations.

The oracle is the template's text of the whole conversation, history and message.
"""
import itertools
import random

import pytest

import model as M
import utils
from conftest import dialogue
from test_model import WORDS, spelled, tokenizer_of

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


def texts(tokenizer, history, message):
    """The template's text up to the message by itself, and the prompt's."""
    return (tokenizer.apply_chat_template([*history, message], tokenize=False),
            tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True))


@pytest.mark.parametrize("part", range(6))
def test_prompt_and_action_begin_as_the_template_writes_the_conversation(part):
    """The prompt is the model's own but for what the template does not write; an EOS ends a turn
    without an end. Control tokens that messages spell stay text, thoughts are cut as in the text,
    and what the template does not write as it stands is told.
    """
    tokenizer, random_ = tokenizer_of("qwen3", "bytes", 400), random.Random(part)
    words = [word for word in WORDS if "\ue000" not in word]  # what they become is another test's
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    special = set(tokenizer.convert_tokens_to_ids(control))
    for template, ends in random_.sample([*templates()], 60):
        tokenizer.chat_template = template
        M.control_tokens.cache_clear(), M.ending.cache_clear()
        for spell in ([], control):
            said = [spelled(random_, words + spell) or "x" for _ in range(6)]
            said[1] = "<think>\nwhy?\n</think>\n\n" * random_.randrange(2) + said[1]
            history = [{"role": "system", "content": ""}][:random_.randrange(2)] + dialogue(*said)
            for t, message in enumerate(history):
                if message["role"] != "assistant":
                    continue
                utils.NOTES.clear()
                action, without = M.action_ids(tokenizer, message, history[:t])
                told = any("are not what this" in note for note in utils.NOTES)
                ids = M.render(tokenizer, history[:t])
                read, wrote = ids[:len(ids) - without], [*map(ord, action)]
                whole, prompt = texts(tokenizer, history[:t], message)
                got = tokenizer.decode(read + wrote)
                end = M.ending(tokenizer)
                case = template, history[:t + 1], got
                if ends:
                    assert whole.startswith(got) and got.endswith(end), case
                else:
                    assert got == whole + tokenizer.eos_token, case
                assert (without == 0) == whole.startswith(prompt), case
                verbatim = message["content"].strip() in whole[len(prompt) - without:]
                assert told == (without > 0 or not verbatim), case
                assert wrote[-1] in special, case
                if not spell and without == 0:
                    assert tokenizer.decode(read) == prompt, case
                if spell:  # as many control tokens as where nothing spells one
                    plain = [{**m, "content": "x"} for m in history[:t + 1]]
                    there = M.action_ids(tokenizer, plain[-1], plain[:-1])[0]
                    count = lambda x: sum(i in special for i in x)
                    assert count(wrote) == count(map(ord, there)), case
    utils.NOTES.clear()
