"""What a run of a trainer would take, before GPUs are rented: it trains nothing.

    python tests/plan.py train_policy.py --gpus 8 --batch_size 32 < scored.jsonl
    python tests/plan.py train_critic.py --gpus 8 --model runs/base < trajectories.jsonl

The trainer's own functions read stdin and make the batches. tokens of all steps: computed;
slowest_rank, those of each step's slowest GPU times the number of GPUs. reference_tokens and
critic_tokens, the turns that pi_ref and the trained critic score, are computed once.
hours: at 400 TFLOP/s a GPU, 6 for each weight and token in training, 2 without gradient, and 2
where layers are recomputed, 2 where trees are.
gb_a_gpu: fp32 weights, gradients and AdamW's moments. peak_gb_a_gpu: the most that a step takes, in
bf16, with the activations of the largest tree. --recompute 0, where it fits, is a sixth faster;
compiled it takes less. It is null for a model that is computed turn by turn, whose tokens are more,
too, and where numbers decide what is computed.
"""
import argparse
import json
import sys
import weakref
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import model as M  # noqa: E402
from model import all_batches, find_model, in_order, partition, turns_in  # noqa: E402
from utils import fail, say  # noqa: E402


def count_tokens(turns):
    """The tokens of the turns' tree."""
    return sum(len(seq) - shared for _, seq, shared in in_order(turns))


# --- the peak of memory: a step on meta tensors, which have shapes but no numbers -----------------

class Memory(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside: `now`, and the `peak` so far."""

    def __init__(self, known):
        super().__init__()
        self.now = self.peak = 0
        self.sizes = {x.untyped_storage()._cdata: 0 for x in known}  # {storage: its bytes}

    def add(self, size):
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if torch.is_tensor(x) and x.is_meta:
                storage = x.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.sizes:
                    self.sizes[key] = size
                    self.add(size)
                    weakref.finalize(storage, lambda key=key: self.add(-self.sizes.pop(key)))
        return out


class FlashMemory(torch.autograd.Function):
    """What FlashAttention-2 makes and keeps: q (T, heads, D), k and v (K, their heads, D)."""

    @staticmethod
    def forward(ctx, q, k, v, runs):
        out, log_sums = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.runs = runs
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, _, _ = ctx.saved_tensors
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None
        tokens, *rest = q.shape
        sums = [q.new_empty(tokens + 128 * ctx.runs, *rest, dtype=torch.float32)]
        if q.shape[1] > k.shape[1]:  # gradients of keys and values by query head
            sums += [x.new_empty(len(x), *rest) for x in (k, v)]
        del sums
        return gradients


def reduce_gradients(parameters, memory, share):
    """As FSDP does: once all of them are there, it sums them over ranks in fp32.

    share: of the sum, which a rank keeps; 0 if it has room for it already.
    """
    size, ready = numel(parameters), []

    def hook(p):
        ready.append(p)
        if len(ready) == len(parameters):
            memory.add(4 * size)
            memory.add(4 * size * (share - 1))
            for p in parameters:
                p.grad = None

    for p in parameters:
        p.register_post_accumulate_grad_hook(hook)


def peak_bytes(args, gpus, model, turns, several):
    """The most that a rank of so many holds in a step, whose largest tree is of these turns.

    model: of `without_numbers`. several: whether the rank has other trees, too. Then each is
    computed again in the backward pass.
    """
    if not M.may_take_trees(model.config):
        raise ValueError("it is computed turn by turn")
    model.lm.set_attn_implementation("tree")
    layers = [list(layer.parameters()) for layer in model.layers()]
    of_layers = set(chain(*layers))
    rest = [p for p in model.parameters() if p not in of_layers]  # embedding, last norm, head
    trained, frozen = by_training(model.parameters())

    memory = Memory([*model.parameters(), *model.buffers()])
    share = 0 if args.offload else 1 / gpus
    # fp32 weights, two moments, the other trees' gradient
    memory.add(((12 + 4 * several) * numel(trained) + 2 * numel(frozen)) * share)
    memory.add(2 * (numel(rest) + 2 * max(map(numel, layers))))  # gathered in bf16: two layers
    for parameters in (*layers, rest):
        reduce_gradients(by_training(parameters)[0], memory, 0 if several else share)
    if args.recompute != 0:
        for layer in model.layers():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    calls = []

    def flash(q, k, v, cu_q, *more, **settings):
        calls.append(len(cu_q) - 1)
        return FlashMemory.apply(q, k, v, calls[-1])

    on_gpu = {"flash_takes": lambda q, v: True, "flash_attn_varlen_func": flash,
              "MAX_LOGITS": {"meta": M.MAX_LOGITS["cuda"]}}
    with patch.multiple(M, **on_gpu), memory:
        tree, anchor = M.Tree(turns, "meta"), torch.ones((), requires_grad=True)
        if several:
            logps = checkpoint(M.tree_logps, model, tree, anchor, use_reentrant=True)
        else:
            logps = M.tree_logps(model, tree)
        if len(calls) != len(layers):
            raise ValueError("it has layers without attention: it is computed turn by turn")
        logps.sum().backward()
    return memory.peak


def without_numbers(config):
    """A TreeLM in bf16, of shapes alone."""
    with torch.device("meta"):
        model = M.TreeLM(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
        # after lora.diff: M.add_lora(model)
    return model


def numel(parameters):
    """How many numbers they have."""
    return sum(p.numel() for p in parameters)


def by_training(parameters):
    """(those that are trained, those that are frozen)"""
    parameters = list(parameters)
    return ([p for p in parameters if p.requires_grad],
            [p for p in parameters if not p.requires_grad])


# --- the plan -------------------------------------------------------------------------------------

def plan(args, gpus, config, steps, reference, scored=()):
    """The dict of a run with a trainer's flags on so many GPUs. steps: [[Pair]].

    reference: the turns that the reference reads; scored: those that the trained critic judges.
    """
    if not steps:
        fail("there are no steps to take")
    model = without_numbers(config)
    trained, frozen = map(numel, by_training(model.parameters()))

    def deal_to_gpus(turns):
        """(the parts, the tokens of each)"""
        parts = partition(turns, args.tree_tokens, gpus)
        return parts, list(map(count_tokens, parts))

    computed = slowest = flops = 0
    largest = (0, [], False)  # (tokens of a tree, its turns, whether its rank has several)
    for batch in steps:
        parts, tokens = deal_to_gpus(turns_in(batch))
        trees = len(tokens) // gpus
        computed += sum(tokens)
        longest = gpus * max(sum(tokens[n:n + trees]) for n in range(0, len(tokens), trees))
        slowest += longest
        flops += longest * (6 + 2 * (args.recompute != 0) + 2 * (trees > 1))
        for part, size in zip(parts, tokens):
            largest = max(largest, (size, part, trees > 1))
    of_reference, of_critic = (sum(deal_to_gpus(turns)[1]) for turns in (reference, scored))
    flops += 2 * (of_reference + of_critic)
    at_rest = 0 if args.offload else (16 * trained + 2 * frozen) / gpus
    try:
        peak = float(f"{peak_bytes(args, gpus, model, *largest[1:]) / 1e9:.3g}")
    except Exception as e:  # of many kinds: the model is not built as today's chat models are
        say(f"no peak of memory can be told, and tokens are those of trees: {e}")
        peak = None
    return {"gpus": gpus, "parameters": trained + frozen, "trained": trained, "steps": len(steps),
            "tokens": {"computed": computed, "slowest_rank": slowest},
            "reference_tokens": of_reference, "critic_tokens": of_critic,
            "hours": float(f"{(trained + frozen) * flops / 400e12 / gpus / 3600:.3g}"),
            "gb_a_gpu": float(f"{at_rest / 1e9:.3g}"),
            "peak_gb_a_gpu": peak}


def read(name, args):
    """(the model's config, [[Pair]], turns of the reference, turns to score) of stdin."""
    trainer = import_module(name)
    if name == "train_critic":
        _, (ref_of, pairs_of, _) = trainer.prepare(args)
        groups = list(pairs_of.values())
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
    if own.gpus < 1:
        p.error("--gpus must be 1 or more")
    name = own.trainer.removesuffix(".py")
    args = import_module(name).get_args([*flags, "--out", "none"])
    config, groups, reference, scored = read(name, args)
    steps = all_batches(groups, args.batch_size, args.epochs, args.seed)
    print(json.dumps(plan(args, own.gpus, config, steps, reference, scored)))


if __name__ == "__main__":
    main()
