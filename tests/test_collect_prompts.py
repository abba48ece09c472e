"""Prompts are tokenized part by part: the ids of the whole, by several kinds of tokenizers."""
import itertools
import random
import re

import pytest
from tokenizers import AddedToken

import model as M
from conftest import dialogue
from test_model import TEMPLATES, WORDS, spelled, tokenizer_of

CUTS = {}, {"rstrip": True}  # how the control tokens are added
NO_CUTS = "lstrip", "single_word", "normalized"


def check(tokenizer, monkeypatch, cut):
    """Growing dialogues of hostile text: the ids of the parts, and those of the whole text.

    cut: whether a conversation of two messages has more than one part.
    """
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    words, random_ = WORDS + added + [text[1:] for text in added], random.Random(1)
    for _ in range(12):
        messages = dialogue(*(spelled(random_, words) for _ in range(7)))
        for t, thinking in itertools.product((1, 3, 5, 7), (0, 1)):
            ids = M.render(tokenizer, messages[:t], thinking)
            with monkeypatch.context() as m:
                m.setattr(M, "cuts", lambda tokenizer: re.compile(M.CUT))
                assert ids == M.render(tokenizer, messages[:t], thinking), messages[:t]
    text = tokenizer.apply_chat_template(dialogue("a", "b"), tokenize=False)
    assert (len(list(filter(None, M.cuts(tokenizer).split(text)))) > 1) == cut


@pytest.mark.parametrize("kind", ["bytes", "bytes after a space", "whole texts", "first word",
                                  "each text"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_ids_of_the_parts_are_those_of_the_whole(name, kind, monkeypatch):
    for how in CUTS:
        check(tokenizer_of(name, kind, 500, **how), monkeypatch, cut=True)


@pytest.mark.parametrize("how", NO_CUTS)
def test_where_a_token_looks_around_itself_nothing_is_cut(how, monkeypatch):
    for name in TEMPLATES:
        check(tokenizer_of(name, "whole texts", 500, **{how: True}), monkeypatch, cut=False)


def test_no_cut_between_tokens_that_begin_alike(monkeypatch):
    """Gemma's tokens of several newlines."""
    tokenizer = tokenizer_of("qwen3", "bytes", 500)
    tokenizer.add_tokens([AddedToken("\n" * n, normalized=False) for n in (1, 2, 3)])
    check(tokenizer, monkeypatch, cut=True)


def test_a_part_is_tokenized_once(tiny_dir):
    tokenizer, messages = M.find_model(tiny_dir)[1], dialogue(*(f"part {n}" for n in range(9)))
    M.render(tokenizer, messages[:7])
    before = M.part_ids.cache_info().misses
    M.render(tokenizer, messages)
    assert M.part_ids.cache_info().misses - before <= 2  # the two messages that are new
