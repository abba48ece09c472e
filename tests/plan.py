"""What a run of a trainer would take, before GPUs are rented: it trains nothing.

    python tests/plan.py train_policy.py --gpus 8 --batch_size 32 < scored.jsonl
    python tests/plan.py train_critic.py --gpus 8 --model runs/base < trajectories.jsonl

The trainer's own functions read stdin and make the batches. tokens of all steps: computed;
slowest_rank, those of each step's slowest GPU times the number of GPUs. reference_tokens and
critic_tokens, the turns that pi_ref and the trained critic score, are computed once.
hours: at 400 TFLOP/s a GPU, 6 for each weight and token in training, 2 without gradient, and 2
where layers are recomputed, 2 where trees are.
gb_a_gpu: fp32 weights, gradients and AdamW's moments. Activations come on top.
"""
import argparse
import json
import sys
from importlib import import_module
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from model import all_batches, deal, find_model, in_order, turns_in  # noqa: E402
from utils import fail  # noqa: E402


def count_tokens(turns):
    """The tokens of the turns' tree."""
    return sum(len(seq) - shared for _, seq, shared in in_order(turns))


def plan(args, gpus, config, steps, reference, scored=()):
    """The dict of a run with a trainer's flags on so many GPUs. steps: [[Pair]].

    reference: the turns that the reference reads; scored: those that the trained critic judges.
    """
    if not steps:
        fail("there are no steps to take")
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    parameters = sum(p.numel() for p in lm.parameters())

    def tokens_of(turns):
        return list(map(count_tokens, deal(turns, args.tree_tokens, gpus)))

    computed = slowest = flops = 0
    for batch in steps:
        tokens = tokens_of(turns_in(batch))
        trees = len(tokens) // gpus
        computed += sum(tokens)
        longest = gpus * max(sum(tokens[n:n + trees]) for n in range(0, len(tokens), trees))
        slowest += longest
        flops += longest * (6 + 2 * (args.recompute != 0) + 2 * (trees > 1))
    of_reference, of_critic = sum(tokens_of(reference)), sum(tokens_of(scored))
    flops += 2 * (of_reference + of_critic)
    at_rest = 0 if args.offload else 16 * parameters / gpus
    return {"gpus": gpus, "parameters": parameters, "steps": len(steps),
            "tokens": {"computed": computed, "slowest_rank": slowest},
            "reference_tokens": of_reference, "critic_tokens": of_critic,
            "hours": float(f"{parameters * flops / 400e12 / gpus / 3600:.3g}"),
            "gb_a_gpu": float(f"{at_rest / 1e9:.3g}")}


def read(name, args):
    """(the model's config, [[Pair]], turns of the reference, turns to score) of stdin."""
    trainer = import_module(name)
    if name == "train_critic":
        _, (ref_of, groups, _) = trainer.prepare(args)
        turns, scored = list(ref_of.values()), list(ref_of)
    else:
        groups, held = trainer.prepare(args)
        scored = []
        turns = turns_in(chain(*groups, held)) if args.loss != "rft" else []
    return find_model(args.model)[2], groups, turns, scored


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, usage="%(prog)s TRAINER [--gpus N] [flags]",
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("trainer", choices=["train_critic.py", "train_policy.py"])
    p.add_argument("--gpus", type=int, default=1)
    own, flags = p.parse_known_args(argv)
    name = own.trainer.removesuffix(".py")
    args = import_module(name).get_args([*flags, "--out", "none"])
    config, groups, reference, scored = read(name, args)
    steps = all_batches(groups, args.batch_size, args.epochs, args.seed)
    print(json.dumps(plan(args, own.gpus, config, steps, reference, scored)))


if __name__ == "__main__":
    main()
