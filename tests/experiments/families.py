"""Which families of chat models can be trained: makes a tiny one of each that transformers knows.

    python tests/experiments/families.py > families.md     # some minutes, nothing is downloaded

Each has random weights, is saved, and loaded by model.load. The table tells whether it is computed
by the tree or turn by turn, and the largest errors beside separate forwards of the transformers
model: of log-probs, as a share of the largest of them, if that is above 1, and of a loss's
gradients, as a share of the largest. Or it tells why the family is refused. What can be an encoder
or a decoder is a decoder.
"""
import collections
import contextlib
import os
import random
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toy import tiny
import model as M

SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
         "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
         "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
         "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "sliding_window": 6,
         "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
         "is_decoder": True, "causal": True, "rotary_dim": 16, "default_language": "en_XX",
         "attn_layer_period": 2, "attn_layer_offset": 1, "attn_layer_indices": [1, 3],
         "attention_multiplier": 0.25, "rescale_every": 2}


def small(name, vocabulary):
    """A model of a family with random weights, or None if it can't be made small."""
    try:
        known = AutoConfig.for_model(name)
        sizes = {key: value for key, value in SIZES.items() if hasattr(known, key)}
        config = AutoConfig.for_model(name, **sizes, vocab_size=vocabulary)
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(config)
        if sum(p.numel() for p in lm.parameters()) > 3e7:
            return None
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception:  # of many kinds: the family takes no such sizes
        return None


def some_turns(vocabulary):
    """Turns of a few lengths with common prompts, of ids that are no special tokens."""
    r = random.Random(1)
    ids = lambda n: M.packed(r.randrange(3, vocabulary) for _ in range(n))
    root, a, b, c = ids(9), ids(5), ids(12), ids(8)
    return [(root, a), (root, b), (root, a[:2] + c), (root + a + c, b), (root + a + c, c)]


def separate(lm, turns):
    """The oracle: log-probs of the actions by an unpadded forward of the transformers LM a turn."""
    logps = []
    for prompt, action in turns:
        ids = torch.tensor([[*map(ord, prompt + action)]])
        rows = lm(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1:-1].log_softmax(-1)
        logps.append(rows[range(len(action)), ids[0, len(prompt):]])
    return logps


def gradients(lm, logps):
    """Of a sum in which every token has its own weight."""
    flat = torch.cat(logps)
    (flat * torch.sin(torch.arange(len(flat)) + 1.0)).sum().backward()
    return {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}


def errors(model, lm, turns):
    """The largest errors of log-probs and of gradients, as shares."""
    got, want = M.action_logps(model, turns), separate(lm, turns)
    x, y = torch.cat(got), torch.cat(want)
    value = ((x - y).abs().max() / y.abs().max().clamp(min=1)).item()
    got, want = gradients(model.lm, got), gradients(lm, want)
    assert got.keys() == want.keys()
    largest = max(g.abs().max() for g in want.values())
    return value, max((got[name] - want[name]).abs().max() / largest for name in want).item()


def verdict(lm, tokenizer):
    """("tree" or "turn by turn", error of log-probs, of gradients), or (why it is refused,)."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            lm.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            model, _ = M.load(folder)
            own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
            way = "tree" if model.takes_trees else "turn by turn"
            return way, *errors(model, own, some_turns(len(tokenizer)))
        except SystemExit as e:
            return str(e).removeprefix("error: ").replace(repr(folder), "it"),
        except Exception as e:  # it is saved or loaded otherwise
            return f"{type(e).__name__}: {str(e).splitlines()[0][:90]}" if str(e) else repr(e),


def main():
    demos = [{"dialogue_history": [{"role": "assistant", "content": "a b a b"}]}]
    _, tokenizer = tiny(demos)
    print("| family | computed by | log-probs | gradients |\n|---|---|---|---|")
    ways, right, wrong = collections.Counter(), 0, 0
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with contextlib.redirect_stderr(open(os.devnull, "w")):
            lm = small(name, len(tokenizer))
            way, *found = verdict(lm, tokenizer) if lm else (None,)
        if way:
            ways[way if found else "refused"] += 1
            right += bool(found) and max(found) < 1e-5
            wrong += bool(found) and not max(found) < 1e-5
            print(f"| {name} | {way} |", *(f"{x:.1g} |" for x in found), flush=True)
    print(f"{ways.total()} families, {right} right to 1e-5, {wrong} not: {dict(ways)}")


if __name__ == "__main__":
    main()
