"""Prompts are tokenized part by part: the ids of the whole, by several kinds of tokenizers."""
import itertools
import random
from array import array

import pytest
from tokenizers import (AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        trainers)
from transformers import PreTrainedTokenizerFast

import model as M
from conftest import dialogue
from test_model import TEMPLATES

WORDS = ["", " ", "  ", "\n", "\n\n", "\r\n", "\t", "a", "fee", " fee", "def f(x):\n    return x",
         "\u00e9", "e\u0301", "\u0301", "\U0001f642", "\u00a0", "\u2581", "<|", "|>", "<", ">", "[",
         "</think>", "\ue000", "\ue0001\ue001", "\ue0020\ue003", "I WANT TO ANSWER:", "A", "FEE"]
CUTS = {}, {"rstrip": True}  # how the control tokens are added
NO_CUTS = "lstrip", "single_word", "normalized"


def spelled(random_, words):
    return "".join(random_.choices(words, k=random_.randrange(12)))


def trained(name, kind, how):
    """A small BPE of a family's template, of a kind of pre-tokenizer or normalizer."""
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
    t.train_from_iterator(text, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet,
                                                    special_tokens=["?"], show_progress=False))
    how = {"normalized": False, **how}
    t.add_special_tokens([AddedToken(token, **how) for token in control])
    t.add_tokens([AddedToken(token, normalized=True) for token in ["  ", "<think>", "</think>"]])
    bos = {} if name == "qwen3" else {"bos_token": AddedToken(control[0], **how)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=t, **bos,
                                        eos_token=AddedToken(control[1], **how))
    tokenizer.chat_template = template
    return tokenizer


def whole(tokenizer, text):
    return array("q", tokenizer(text, add_special_tokens=False)["input_ids"])


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
                m.setattr(M, "template_ids", whole)
                assert ids == M.render(tokenizer, messages[:t], thinking), messages[:t]
    text = tokenizer.apply_chat_template(dialogue("a", "b"), tokenize=False)
    assert (len(list(filter(None, M.cuts(tokenizer).split(text)))) > 1) == cut


@pytest.mark.parametrize("kind", ["bytes", "bytes after a space", "whole texts", "first word",
                                  "each text"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_ids_of_the_parts_are_those_of_the_whole(name, kind, monkeypatch):
    for how in CUTS:
        check(trained(name, kind, how), monkeypatch, cut=True)


@pytest.mark.parametrize("how", NO_CUTS)
def test_where_a_token_looks_around_itself_nothing_is_cut(how, monkeypatch):
    for name in TEMPLATES:
        check(trained(name, "whole texts", {how: True}), monkeypatch, cut=False)


def test_no_cut_inside_another_token(monkeypatch):
    tokenizer = trained("qwen3", "bytes", {})
    tokenizer.add_tokens([AddedToken("\n<|im_s", normalized=False)])
    assert not M.cuts(tokenizer).match("<|im_start|>")
    check(tokenizer, monkeypatch, cut=True)


def test_a_part_is_tokenized_once(tiny_dir):
    tokenizer, messages = M.find_model(tiny_dir)[1], dialogue(*(f"part {n}" for n in range(9)))
    M.render(tokenizer, messages[:7])
    before = M.part_ids.cache_info().misses
    M.render(tokenizer, messages)
    assert M.part_ids.cache_info().misses - before <= 2  # the two messages that are new
