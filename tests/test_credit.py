"""Clients that score messages without a critic: tests/experiments/credit.py."""
import re
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import ROOT, actions, dialogue, records, succeed
from model import turn_actions

sys.path.insert(0, f"{ROOT}/tests/experiments")
import credit  # noqa: E402

CREDIT = "tests/experiments/credit.py"


def test_progress_is_the_gain_in_the_references_log_prob(rewarded, tiny_dir):
    """As a plain loop over transformers' forwards finds it, which writes the prompts itself."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    lm = AutoModelForCausalLM.from_pretrained(tiny_dir).eval()

    def mean_logp(messages, reference):
        prompt = "<|begin|>" + "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages)
        texts = prompt + "<|assistant|>", f"I WANT TO ANSWER:\n{reference}<|end|>"
        prompt, y = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        with torch.no_grad():
            logps = lm(torch.tensor([prompt + y])).logits[0].log_softmax(-1)
        return sum(logps[len(prompt) - 1 + i, token].item() for i, token in enumerate(y)) / len(y)

    done = succeed(CREDIT, "--by", "progress", "--model", tiny_dir, stdin=rewarded)
    scored = records(done.stdout)
    assert len(scored) == len(rewarded)
    for before, r in zip(rewarded, scored):
        history, reference = r["dialogue_history"], r["task"]["ground_truth"]
        for t in range(1, len(history), 2):
            start = mean_logp(history[:t], reference)
            assert history[t]["advantage"] == pytest.approx(
                mean_logp(history[:t + 2], reference) - start, abs=1e-4)
            for c in history[t]["candidates"]:
                message = {"role": "assistant", "content": c["output"].strip()}
                gain = mean_logp([*history[:t], message], reference) - start
                assert c["advantage"] == pytest.approx(gain, abs=1e-4)
        for x in actions(r):
            del x["advantage"]
        del r["value"]
        assert r == before  # nothing else has changed
    assert re.search("^0 of .* no advantage\\nthe critic orders", done.stderr, re.M)


@pytest.mark.parametrize("reply, informative", [
    ("rate=4", True), ("It is 4 per day.", True), ("I do not mind.", False), ("which rate?", False),
    ("I don’t mind the rate. The fee is 3.5", True), ("I can't say, 3 or 4", False),
    ("I do not know the fee but the rate is 4", True), ("[...]", False), ("", False),
    ("The RATE, in f!", False), ("Either is fine, up to you: 4 or 5", False)])
def test_a_reply_is_informative_if_it_has_a_new_word_that_is_no_refusal(reply, informative):
    history = dialogue("write f: the rate in euros", "which rate is it per day?")
    assert credit.is_informative(reply, history) == informative


def test_reaction_gives_candidates_the_replies_that_the_same_text_got(tiny_dir):
    """In the task's episodes; asking again is worth -1, an answer 0, what nobody asked nothing."""
    task = {"id": "a", "kind": "backend", "problem_description": "write f", "ground_truth": "def f"}
    answer = "I WANT TO ANSWER:\ndef f"
    asked = dialogue("write f", "rate?", "4", "color?", "i do not know", "rate?", "4", answer)
    other = dialogue("write f", "cap?", "9", "fee?", "5", "last?")
    for history, texts in ((asked, ["cap?", "color?", "rate?", answer, "what?"]),
                           (other, ["rate?", "cap?"])):
        for m in history[1::2]:
            m["candidates"] = [{"output": text} for text in texts]
    given = [{"task": task, "sample": i, "dialogue_history": history, "reward": 1.0 - i,
              "meta": {"max_turns": 4}} for i, history in enumerate((asked, other))]
    given.append({**given[1], "task": {**task, "id": "b"}, "meta": {"max_turns": 3}})
    done = succeed(CREDIT, "--by", "reaction", "--model", tiny_dir, stdin=given)
    found = [[[x["advantage"] for x in found] for _, found in turn_actions(r)]
             for r in records(done.stdout)]
    assert found == [
        [[1, 1, -1, 1, 0, None], [-1, 1, -1, -1, 0, None], [-1, 1, -1, -1, 0, None],
         [0, 0, 0, 0, 0, 0]],
        [[1, 1, 1], [1, 1, -1], [0, 1, -1]],
        [[1, None, 1], [1, None, -1], [0, 0, 0]]]
    assert done.stderr.startswith("5 of 42 messages and candidates got no advantage")
