"""Predicts the time and memory of a training run from its data and flags, without training.

    python tests/plan.py train_policy.py --gpus 8 --batch_size 32 < scored.jsonl
    python tests/plan.py train_critic.py --gpus 8 --model runs/base < trajectories.jsonl

The trainer's own functions read stdin and make the batches; a model on the meta device, which has
shapes but no data, runs the step with the largest tree. Prints one line of JSON:

    tokens            all steps: computed, and slowest_rank (each step's slowest GPU, times GPUs)
    reference_tokens, critic_tokens     scored once by pi_ref and by the learned critic
    hours             at 400 TFLOP/s per GPU. FLOPs per weight and token: 6 in training, 2 more if
                      layers are recomputed, 2 more if trees are, 2 without gradient
    gb_per_gpu        fp32 weights, gradients and AdamW's moments
    peak_gb_per_gpu   peak of a step in bf16; less with torch.compile. null if operations depend on
                      data, or the model is computed turn by turn, which takes more tokens, too
--recompute 0 is a sixth faster if it fits in memory.

    python tests/plan.py collect.py --tasks 10000 -k 4 --human_model DIR < sample.jsonl

predicts the tokens that an LLM human reads and writes in a collection, from episodes of a smaller
one with the same agent, human and flags. --human_model is the LLM's tokenizer and chat template.
Thoughts, redacted quotes, repeated requests and cached prompts are not considered.
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
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

import model as M  # noqa: E402
from colbench import environment, read_records  # noqa: E402
from collect import human_prompt  # noqa: E402
from model import (all_batches, find_model, load, partition,  # noqa: E402
                   sorted_with_prefix_lengths, turns_in)
from utils import fail, fail_on_error, say  # noqa: E402


def count_tokens(turns):
    """Returns the number of tokens in the turns' tree."""
    return sum(len(seq) - shared for _, seq, shared in sorted_with_prefix_lengths(turns))


# --- peak memory: a step on meta tensors ----------------------------------------------------------

class Memory(TorchDispatchMode):
    """Counts the bytes of meta tensors that are created inside: `now`, and their `peak`."""

    def __init__(self, ignored):
        super().__init__()
        self.now = self.peak = 0
        self.sizes = {x.untyped_storage()._cdata: 0 for x in ignored}  # {storage: bytes}

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
    """Creates the same tensors as FlashAttention-2. q: (T, H, D), k and v: (K, KV, D)."""

    @staticmethod
    def forward(ctx, q, k, v, runs):
        out, logsumexp = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.runs = runs
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, _, _ = ctx.saved_tensors
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None
        tokens, *rest = q.shape
        buffers = [q.new_empty(tokens + 128 * ctx.runs, *rest, dtype=torch.float32)]
        if q.shape[1] > k.shape[1]:  # key and value gradients per query head
            buffers += [x.new_empty(len(x), *rest) for x in (k, v)]
        del buffers
        return gradients


def count_reduction(parameters, memory, share):
    """Makes `memory` count FSDP's sum over ranks, in fp32, once these have all their gradients.

    share: the part of the sum that a rank keeps; 0 if that is already counted.
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
    """Returns the peak memory of a rank in bytes, in a step whose largest tree has these turns.

    model: a meta_model. several: whether the rank has more trees, which then are computed twice.
    """
    if not M.can_support_trees(model.config):
        raise ValueError("the model is computed turn by turn")
    model.supports_trees = True
    model.lm.set_attn_implementation("tree")
    layers = [list(layer.parameters()) for layer in model.layers()]
    in_layers = set(chain(*layers))
    rest = [p for p in model.parameters() if p not in in_layers]  # embedding, last norm, head
    trained, frozen = trained_and_frozen(model.parameters())

    memory = Memory([*model.parameters(), *model.buffers()])
    share = 0 if args.offload else 1 / gpus
    # fp32 weights and two moments; the gradient of the other trees
    memory.add(((12 + 4 * several) * numel(trained) + 2 * numel(frozen)) * share)
    memory.add(2 * (numel(rest) + 2 * max(map(numel, layers))))  # gathered in bf16: also two layers
    for parameters in (*layers, rest):
        count_reduction(trained_and_frozen(parameters)[0], memory, 0 if several else share)
    if args.recompute != 0:
        for layer in model.layers():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    calls = []  # number of runs of each

    def flash(q, k, v, cu_q, *more, **settings):
        calls.append(len(cu_q) - 1)
        return FlashMemory.apply(q, k, v, calls[-1])

    like_gpu = {"flash_supports": lambda q, v: True, "flash_attn_varlen_func": flash,
              "MAX_LOGITS": {"meta": M.MAX_LOGITS["cuda"]}}
    with patch.multiple(M, **like_gpu), memory:
        logps = model(M.Tree(turns, "meta"))
        if len(calls) != len(layers):
            raise ValueError("layers without attention: the model is computed turn by turn")
        logps.sum().backward()
    return memory.peak


def meta_model(config):
    """Returns a bf16 TreeLM on the meta device."""
    with torch.device("meta"):
        model = M.TreeLM(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
        # after lora.diff: M.add_lora(model)
    return model


def numel(parameters):
    """Returns the total number of elements."""
    return sum(p.numel() for p in parameters)


def trained_and_frozen(parameters):
    """Splits parameters into (trained, frozen)."""
    parameters = list(parameters)
    return ([p for p in parameters if p.requires_grad],
            [p for p in parameters if not p.requires_grad])


# --- the plan -------------------------------------------------------------------------------------

def plan(args, gpus, config, batches, ref_turns, critic_turns=()):
    """Returns the prediction as a dict. args: the trainer's flags. batches: [[Pair]].

    ref_turns, critic_turns: the turns that pi_ref and the learned critic score.
    """
    model = meta_model(config)
    trained, frozen = map(numel, trained_and_frozen(model.parameters()))

    def partition_over_gpus(turns):
        """Returns (parts, number of tokens of each part)."""
        parts = partition(turns, args.tree_tokens, gpus)
        return parts, list(map(count_tokens, parts))

    computed = slowest = flops = 0
    largest = (0, [], False)  # (tokens of a tree, its turns, whether its rank has several)
    for batch in batches:
        parts, tokens = partition_over_gpus(turns_in(batch))
        trees = len(tokens) // gpus
        computed += sum(tokens)
        in_step = gpus * max(sum(tokens[n:n + trees]) for n in range(0, len(tokens), trees))
        slowest += in_step
        flops += in_step * (6 + 2 * (args.recompute != 0) + 2 * (trees > 1))
        for part, size in zip(parts, tokens):
            largest = max(largest, (size, part, trees > 1))
    reference_tokens, critic_tokens = (sum(partition_over_gpus(turns)[1])
                                       for turns in (ref_turns, critic_turns))
    flops += 2 * (reference_tokens + critic_tokens)
    state_bytes = 0 if args.offload else (16 * trained + 2 * frozen) / gpus
    try:
        peak = float(f"{peak_bytes(args, gpus, model, *largest[1:]) / 1e9:.3g}")
    except Exception as e:  # any kind, as the model may have any architecture
        say(f"warning: can't predict peak memory, and token counts assume shared prefixes: {e}")
        peak = None
    return {"gpus": gpus, "parameters": trained + frozen, "trained": trained, "steps": len(batches),
            "tokens": {"computed": computed, "slowest_rank": slowest},
            "reference_tokens": reference_tokens, "critic_tokens": critic_tokens,
            "hours": float(f"{(trained + frozen) * flops / 400e12 / gpus / 3600:.3g}"),
            "gb_per_gpu": float(f"{state_bytes / 1e9:.3g}"),
            "peak_gb_per_gpu": peak}


def read_stdin(name, args):
    """Returns (the model's config, groups of pairs, turns for pi_ref, turns for the critic)."""
    trainer = import_module(name)
    trajectories, critic_turns = trainer.read(args), []
    if name == "train_critic":
        groups, _ = trainer.make_pairs(args, trajectories)
        ref_turn_of = trainer.ref_turns(trajectories)
        ref_turns, critic_turns = list(ref_turn_of.values()), list(ref_turn_of)
    else:
        model = load(args.model)[0] if args.logprob_weight else None
        ref_logps = trainer.candidate_logps(args, trajectories, model)
        groups, held = trainer.make_pairs(args, trajectories, ref_logps)
        pairs = chain(*(pairs for _, pairs in groups), held)
        ref_turns = {*turns_in(pairs), *ref_logps} if args.loss != "rft" else []
    config = AutoConfig.from_pretrained(find_model(args.model)[0])
    return config, groups, ref_turns, critic_turns


def human_plan(flags):
    """Returns the prediction for collect.py as a dict. Reads the sample's records from stdin."""
    p = argparse.ArgumentParser(usage="plan.py collect.py --tasks N --human_model DIR [-k N] "
                                "[--price_in P --price_out P: dollars per million tokens]")
    p.add_argument("--human_model", required=True)
    p.add_argument("--tasks", type=int, required=True)
    p.add_argument("-k", type=int, default=1)
    for name in ("--price_in", "--price_out"):
        p.add_argument(name, type=float, default=0.0)
    args = p.parse_args(flags)
    tokenizer = find_model(args.human_model)[1].tokenizer

    def count(text):
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    samples = read = written = 0
    for r in read_records(sys.stdin, "dialogue_history"):
        task, history = r["task"], r["dialogue_history"]
        if environment(task).shows_pages:
            fail("can't predict the tokens of a web page's screenshot")
        samples += 1
        for t, message in enumerate(history):
            if message["role"] == "user" and t and history[t - 1]["role"] == "assistant":  # a reply
                request = [{"role": "user", "content": human_prompt(task, history[:t])}]
                with fail_on_error("--human_model's chat template rejects the human's prompt"):
                    read += count(tokenizer.apply_chat_template(
                        request, tokenize=False, add_generation_prompt=True))
                written += count(message["content"]) + 1  # with the end token
    n = args.tasks * args.k / samples
    dollars = n * (read * args.price_in + written * args.price_out) / 1e6
    return {"episodes": args.tasks * args.k, "read_per_episode": read / samples,
            "written_per_episode": written / samples, "read": round(n * read),
            "written": round(n * written), "dollars": float(f"{dollars:.3g}") or None}


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, usage="%(prog)s TRAINER [--gpus N] [flags]",
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("trainer", choices=["train_critic.py", "train_policy.py", "collect.py"])
    p.add_argument("--gpus", type=int, default=1)
    own, flags = p.parse_known_args(argv)
    if own.gpus < 1:
        p.error("--gpus must be 1 or more")
    if own.trainer == "collect.py":
        return print(json.dumps(human_plan(flags)))
    name = own.trainer.removesuffix(".py")
    args = import_module(name).get_args([*flags, "--out", "none"])
    config, groups, ref_turns, critic_turns = read_stdin(name, args)
    batches = all_batches(groups, args.batch_size, args.epochs, args.seed)
    print(json.dumps(plan(args, own.gpus, config, batches, ref_turns, critic_turns)))


if __name__ == "__main__":
    main()
