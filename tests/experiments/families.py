"""Which families of chat models can be trained: makes a tiny one of each that transformers knows.

    python tests/experiments/families.py > families.md     # some minutes, nothing is downloaded

Each has random weights, is saved, and loaded by model.load, which compares the packed forward with
the model's own. Prints a table row for each that could be made small: its model_type and "right",
or why it is refused.
"""
import contextlib
import os
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
         "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


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


def verdict(lm, tokenizer):
    """"right", or why model.load refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            lm.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            M.load(folder)
            return "right"
        except SystemExit as e:
            return str(e).removeprefix("error: ").replace(repr(folder), "it")
        except Exception as e:  # its own forward fails, or it is of another form
            return f"{type(e).__name__}: {str(e).splitlines()[0][:90]}" if str(e) else repr(e)


def main():
    demos = [{"dialogue_history": [{"role": "assistant", "content": "a b a b"}]}]
    _, tokenizer = tiny(demos)
    print("| family | verdict |\n|---|---|")
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with contextlib.redirect_stderr(open(os.devnull, "w")):
            lm = small(name, len(tokenizer))
            said = lm and verdict(lm, tokenizer)
        if said:
            print(f"| {name} | {said} |", flush=True)


if __name__ == "__main__":
    main()
