"""Tests which model families can be trained, on a tiny random model of each in transformers.

    python tests/experiments/families.py > families.md     # four minutes on one core, no downloads

Each model is saved, and loaded by model.load. The table says whether it is computed as a tree or
turn by turn, and its largest errors against separate forwards of the transformers model: of
log-probs, relative to the largest log-prob or 1, and of a loss's gradients, relative to the largest
one. For a rejected family it says why. A family that can be encoder or decoder is a decoder here.
"""
import collections
import contextlib
import os
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toy import tiny_model
import model as M
import test_model

SIZES = {**test_model.SIZES, "hidden_size": 64, "num_hidden_layers": 4, "num_key_value_heads": 4}


def small(name, vocabulary):
    """Returns a random model of a family, or None if the family can't be made small."""
    make = lambda: test_model.small(name, sizes=SIZES, vocab_size=vocabulary)
    try:
        with torch.device("meta"):
            lm = make()
        if sum(p.numel() for p in lm.parameters()) > 3e7:
            return None
        torch.manual_seed(0)
        return make()
    except Exception:  # any kind: the family does not support these sizes
        return None


def errors(model, lm, vocabulary):
    """Returns the largest relative errors of (log-probs, gradients)."""
    turns = test_model.some_turns(range(3, vocabulary))  # no special tokens
    got, want = test_model.by_tree(model, turns), test_model.separate(lm, turns)
    x, y = torch.cat(got), torch.cat(want)
    logp_error = ((x - y).abs().max() / y.abs().max().clamp(min=1)).item()
    got, want = test_model.gradients(model, got), test_model.gradients(lm, want)
    assert all((got[name] is None) == (want[name] is None) for name in got.keys() | want.keys())
    used = [name for name in want if want[name] is not None]
    largest = max(want[name].abs().max() for name in used)
    return logp_error, max((got[name] - want[name]).abs().max() / largest for name in used).item()


def verdict(lm, tokenizer):
    """Returns ("tree" or "turn by turn", *errors), or (why the family is rejected,)."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            lm.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            model, _ = M.load(folder)
            own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
            way = "tree" if model.supports_trees else "turn by turn"
            return way, *errors(model, own, len(tokenizer))
        except SystemExit as e:
            return str(e).removeprefix("error: ").replace(repr(folder), "it"),
        except Exception as e:  # it can't be saved or loaded in the usual way
            return f"{type(e).__name__}: {str(e).splitlines()[0][:90]}" if str(e) else repr(e),


def main():
    demos = [{"dialogue_history": [{"role": "assistant", "content": "a b a b"}]}]
    _, tokenizer = tiny_model(demos)
    print("| family | computed by | log-probs | gradients |\n|---|---|---|---|")
    ways, right, wrong = collections.Counter(), 0, 0
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with contextlib.redirect_stderr(open(os.devnull, "w")):
            lm = small(name, len(tokenizer))
            way, *error = verdict(lm, tokenizer) if lm else (None,)
        if way:
            ways[way if error else "rejected"] += 1
            right += bool(error) and max(error) < 1e-5
            wrong += bool(error) and not max(error) < 1e-5
            print(f"| {name} | {way} |", *(f"{x:.1g} |" for x in error), flush=True)
    print(f"{ways.total()} families, {right} exact to 1e-5, {wrong} not: {dict(ways)}")


if __name__ == "__main__":
    main()
