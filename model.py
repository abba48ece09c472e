"""What both trainers share: records to turns to pairs, the log-probs of turns, and an update.

A `Turn` is what the agent read, its prompt, and what it wrote, its action. Both are strings with
one character per token, chr(id), because strings sort, slice, compare and hash fast, and take 2 or
4 bytes per token. Every loss and score is a function of the log-probs that `forward` returns.

Letters in shapes: T tokens of a tree, A tokens of all its actions, S the same but with shared
tokens counted once, L tokens of one action, K keys of all segments, H query heads, D head size, V
vocabulary size. Dropout is always off, in training too.

The sections of this file, first the method:

    records to turns         the turns of a record, as the policy, the critic and pi_ref read them
    turns to pairs           which trajectories of a task are compared; held-out tasks
    the tree of turns        the tokens of many turns, each shared prefix once
    attention over segments  the attention that transformers' layers call
    log-probs of turns       one forward over a tree; forward and backward over many, on all ranks
    batches                  the order of training, means over a batch, the clipped gradient

A reader of the method may skip the rest:

    each rank's share        splits turns into parts of equal size
    loading and sharding     a model ready to train or to score, by FSDP2
    model files              what a Hugging Face folder must have, and hashes of its weights
    proofs                   tests, at each start, that the log-probs are those of transformers
    chat templates           dialogues to token ids
    saving, checkpoints      Hugging Face folders; optimizer state for any number of processes
"""
import functools
import glob
import hashlib
import json
import math
import os
import re
import sys
from array import array
from bisect import bisect_left
from itertools import accumulate, chain, product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict,
                                                     get_state_dict, set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy,
                                    OffloadPolicy, fully_shard)
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import (AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer,
                          GenerationConfig)
from transformers.utils import logging

from colbench import (THOUGHT_END, THOUGHT_START, hidden_information, read_records, task_id,
                      with_hidden)
from utils import (RANK, WORLD, add_warning, digest, drop_checkpoints, fail,
                   fail_on_error, print_warnings, progress, rng, say, sum_over_ranks, writing)

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:  # use torch's own kernel
    flash_attn_varlen_func = None

logging.set_verbosity_error()
logging.disable_progress_bar()

MAX_KEYS = 2 ** 19  # of a tree: 11 GB in a backward pass with 32 query and 8 KV heads of size 128
MAX_LOGITS = {"cpu": 2 ** 24, "cuda": 2 ** 27}  # logits per chunk: 64 MB or 512 MB in fp32


# --- records to turns -----------------------------------------------------------------------------

class Turn(NamedTuple):
    """Prompt and action, one character per token; neither is empty."""
    prompt: str
    action: str


def packed(ids):
    """Packs token ids into a string, the form in which turns hold them; map(ord, s) unpacks it."""
    return "".join(map(chr, ids))


class Action(NamedTuple):
    """A message or candidate of the agent, and what the models read of it."""
    fields: dict     # those of the record
    turn: Turn       # what pi reads; None if it is too long
    ref_turn: Turn   # what pi_ref reads, whose prompt may be another one


class Trajectory(NamedTuple):
    """An episode: its record, and the agent's messages with their candidates as turns."""
    task: str      # the task's id
    record: dict
    actions: list  # [[Action]]: for each message of the agent, it and its candidates

    def turns(self):
        """Returns the turns of the agent's messages, in order; () if one of them is too long.

        Those that --max_tokens has truncated are left out, because they have no end token.
        """
        turns = [message.turn for message, *_ in self.actions if not message.fields.get("cut")]
        return () if None in turns else tuple(turns)

    def sort_key(self):
        """Returns a key to sort by, so that pairs do not depend on which episode ended first."""
        return self.task, self.record.get("sample", 0), self.record.get("meta", {}).get("seed", 0)


def turn_actions(record):
    """Yields (history, [message, *its candidates]) for each message of the agent."""
    history = record["dialogue_history"]
    for t, message in enumerate(history):
        if message["role"] == "assistant":
            yield history[:t], [message, *message.get("candidates", ())]


def read_trajectories(args, *fields, pi_reads_hidden, ref_reads_hidden):
    """Returns [Trajectory] of stdin. fields: those that a record must have.

    pi_reads_hidden, ref_reads_hidden: see read_actions. Actions that have more than --max_length
    tokens with their prompt are too long.
    """
    records = [*read_records(sys.stdin, "dialogue_history", *fields)]
    _, chat, max_context = find_model(args.model)
    longest = min(args.max_length, max_context)
    trajectories = []
    for record in records:
        task = task_id(record["task"])
        if pi_reads_hidden and not hidden_information(record["task"]):
            add_warning("records without hidden information for the critic", f"the task {task}")
        with fail_on_error(f"--model's chat template rejects the task {task}"):
            actions = [read_actions(chat, record, history, messages, longest,
                                    pi_reads_hidden=pi_reads_hidden,
                                    ref_reads_hidden=ref_reads_hidden)
                       for history, messages in turn_actions(record)]
        for action in chain(*actions):
            if action.turn is None:
                add_warning(f"turns exceed {longest} tokens (--max_length or --model's limit): "
                            "they get no score, and their trajectories no pairs",
                            f"the task {task}")
        trajectories.append(Trajectory(task, record, actions))
    print_warnings()
    return trajectories


def read_actions(chat, record, history, messages, longest=math.inf, *, pi_reads_hidden,
                 ref_reads_hidden):
    """Returns [Action] of messages or candidates after a history.

    longest: the most tokens of a turn. pi_reads_hidden, ref_reads_hidden: does the prompt of that
    model include the hidden information? The prompt is all in which their turns differ.
    """
    thinking = record.get("meta", {}).get("thinking", 0)  # the setting it was sampled with

    def read_prompt(reads_hidden):
        hidden = hidden_information(record["task"]) if reads_hidden else ""
        dialogue = with_hidden(history, hidden) if hidden else history
        return packed(chat.prompt_ids(dialogue, thinking))

    prompt = read_prompt(pi_reads_hidden)
    ref_prompt = prompt if ref_reads_hidden == pi_reads_hidden else read_prompt(ref_reads_hidden)
    actions = []
    for message in messages:
        ids = packed(chat.action_ids(message, history, thinking))
        if len(prompt) + len(ids) <= longest:
            actions.append(Action(message, Turn(prompt, ids), Turn(ref_prompt, ids)))
        else:
            actions.append(Action(message, None, None))
    return actions


# --- turns to pairs -------------------------------------------------------------------------------

class Pair(NamedTuple):
    """What a loss compares: two trajectories of a task, or two candidates of a turn."""
    chosen: tuple                # (Turn, ...) of the better one; a candidate has one turn
    rejected: tuple = ()         # of the worse one; empty for --loss rft
    chosen_score: float = 0.0    # by which it is ranked: a trajectory's reward, see candidate_pairs
    rejected_score: float = 0.0


def comparable_groups(trajectories):
    """Returns [(task id, [Trajectory])] of those that have turns, sorted.

    A group has the trajectories of a task; or, of converted preferences, those of one comparison.
    """
    groups = {}
    for t in sorted(trajectories, key=Trajectory.sort_key):
        if t.turns():
            groups.setdefault((t.task, t.record.get("comparison")), []).append(t)
    return [(task, group) for (task, _), group in groups.items()]


def trajectory_pairs(trajectories, min_gap):
    """Returns {task id: [Pair of its trajectories]} of those tasks that have a pair.

    min_gap: see pairs_in_group. Both trainers learn from these pairs, and measure accuracy on them.
    """
    pairs_by_task = {}
    for task, group in comparable_groups(trajectories):
        if pairs := pairs_in_group(group, min_gap):
            pairs_by_task.setdefault(task, []).extend(pairs)
    return pairs_by_task


def pairs_in_group(group, min_gap):
    """Returns [Pair] of trajectories of a task.

    min_gap None: the first solved one with every unsolved one; else any two whose rewards differ by
    at least min_gap.
    """
    if min_gap is None:
        solved = [t for t in group if t.record["reward"] >= 1]
        unsolved = [t for t in group if t.record["reward"] < 1]
        compared = product(solved[:1], unsolved)
    else:
        compared = [(a, b) for a, b in product(group, group)
                    if a.record["reward"] > b.record["reward"]
                    and a.record["reward"] - b.record["reward"] > min_gap - 1e-9]
    pairs = [Pair(better.turns(), worse.turns(), better.record["reward"], worse.record["reward"])
             for better, worse in compared]
    return [pair for pair in pairs if pair.chosen != pair.rejected]


def hold_out(tasks, share, seed):
    """Shuffles tasks; returns (training tasks, held out), with at least one to train on."""
    if not 0 <= share <= 1:
        fail("--held_out must be from 0 to 1")
    tasks = list(tasks)
    rng("held out", seed).shuffle(tasks)
    n_held = min(math.ceil(share * len(tasks) - 1e-9), len(tasks) - 1)  # 0.07 of 100 is 7
    return tasks[n_held:], tasks[:n_held]


# --- the tree of turns ----------------------------------------------------------------------------

def common_prefix(a, b):
    """Returns the length of the common prefix of two strings, by bisection: slices are fast."""
    shorter = range(min(len(a), len(b)))
    return bisect_left(shorter, True, key=lambda n: not b.startswith(a[:n + 1]))


def sorted_with_prefix_lengths(turns):
    """Yields (turn, its tokens, length of the prefix shared with the previous turn), sorted."""
    previous = ""
    for turn in sorted(turns, key=lambda turn: turn.prompt + turn.action):
        seq = turn.prompt + turn.action
        yield turn, seq, common_prefix(previous, seq)
        previous = seq


class Tree:
    """The prefix tree of turns with non-empty prompts and actions, in depth-first order.

    Turns share prefixes: candidates have the same history, each turn of a trajectory extends the
    one before, and all trajectories of a task start with its description. The tree stores each
    shared prefix once, without padding. Sorted turns are in depth-first order:

        turns   a b c | d       ids        a  b  c  d  e  f  x
                a b c | e f     pos        0  1  2  3  3  4  2    position in its sequence
                a b   | x       parent    -1  0  1  2  2  4  1    index of the token before it
                                segments  [a  b  c  d][e  f][x]

    A segment is a stretch of consecutive tokens of one path. Attention computes it as one sequence,
    whose keys are all tokens of its path from the root: [e f] has the keys a b c e f.
    A plain class, because FSDP would search a tuple or dataclass for tensors to move.
    """

    def __init__(self, turns, device="cpu"):
        ids, pos, parent = [], [], []
        segments = []  # [(number of queries, path)]
        path = array("q")  # flat indices of a turn's tokens
        action_of = {}  # {turn: flat indices of its action}
        for turn, seq, shared in sorted_with_prefix_lengths(turns):
            queries = len(seq) - shared
            path = path[:shared] + array("q", range(len(ids), len(ids) + queries))
            ids += map(ord, seq[shared:])
            pos += range(shared, len(seq))
            parent += [path[i - 1] if i else -1 for i in range(shared, len(seq))]
            if segments and shared == len(segments[-1][1]):  # the turn extends the last segment
                queries += segments.pop()[0]
            segments.append((queries, path))
            action_of[turn] = torch.tensor(path)[len(turn.prompt):]
        scored, index = torch.cat([action_of[turn] for turn in turns]).unique(return_inverse=True)

        tensor = functools.partial(torch.as_tensor, dtype=torch.long, device=device)
        self.ids = tensor(ids)        # (T,) token ids in depth-first order
        self.pos = tensor(pos)        # (T,) depth, which is the position id
        self.parent = tensor(parent)  # (T,) flat index of the previous token, -1 for the first
        self.scored = tensor(scored)  # (S,) unique flat indices of all actions' tokens
        self.index = tensor(index)    # (A,) scored[index] are the actions' tokens, in turn order
        self.q = [queries for queries, _ in segments]  # number of a segment's queries; sum: T
        self.kv = [len(path) for _, path in segments]  # number of its keys, its path's; sum: K
        self.paths = torch.cat([tensor(path) for _, path in segments])  # (K,) the keys' indices
        self.cu_q, self.cu_kv = (  # (segments + 1,) cumulative lengths, for FlashAttention
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
            for lengths in (self.q, self.kv))


# --- attention over segments ----------------------------------------------------------------------

def upcast(x):
    """Casts to fp32; leaves fp64 alone."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def tree_attention(module, query, key, value, attention_mask, scaling=None, tree=None,
                   sliding_window=None, **kwargs):
    """Computes attention over a tree; the signature is that of transformers' AttentionInterface.

    Maps query (1, H, T, D), key and value (1, KV heads, T, D) to (1, T, H, D). The kernel gets each
    segment as one sequence, whose queries are the segment's tokens and whose keys are its path.
    Causal mask and sliding window are aligned at the end, since a segment is the end of its path.
    """
    unsupported = attention_mask, kwargs.get("s_aux"), kwargs.get("softcap")
    if tree is None or any(x is not None for x in unsupported):
        # choose_attention catches this, and the model is then computed turn by turn
        raise ValueError("it needs a tree, and supports no mask, attention sinks or softcap")
    window = sliding_window - 1 if sliding_window else -1  # number of earlier keys; -1: all
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, D)
    k, v = k[tree.paths], v[tree.paths]  # (K, heads, D)
    kernel = flash_kernel if flash_supports(q, v) else sdpa_kernel
    return kernel(q, k, v, tree, scaling, window)[None], None  # (1, T, H, D), no weights


def sdpa_kernel(q, k, v, tree, scale, window):
    """Falls back to one scaled_dot_product_attention per segment, in fp32, without FlashAttention.

    On a CPU, fp32 is faster than bf16 in the backward pass. Uses only tree.q and tree.kv.
    """
    out, dtype = [], q.dtype
    q, k, v = (upcast(x).transpose(0, 1)[None] for x in (q, k, v))  # (1, heads, T or K, D)
    by_segment = zip(q.split(tree.q, 2), k.split(tree.kv, 2), v.split(tree.kv, 2))
    for q, k, v in by_segment:
        queries, keys = q.shape[2], k.shape[2]
        mask = None  # or (queries, keys)
        if queries < keys or window >= 0:  # else is_causal is equivalent
            mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
            if window >= 0:
                mask = mask.triu(keys - queries - window)
        out.append(F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True))
    return torch.cat(out, 2)[0].transpose(0, 1).to(dtype)  # (T, H, D)


def flash_supports(q, v):
    """Returns whether FlashAttention supports q and v: their device, dtype and head sizes."""
    size = q.shape[-1]
    return (q.is_cuda and q.dtype != torch.float32
            and v.shape[-1] <= size <= 256 and size % 8 == 0)


def flash_kernel(q, k, v, tree, scale, window):
    """Runs FlashAttention, from the package flash-attn if it is installed, else from torch."""
    v_size = v.shape[-1]
    if v_size < q.shape[-1]:  # DeepSeek's values are narrower than its keys
        v = F.pad(v, (0, q.shape[-1] - v_size))
    lengths = tree.cu_q, tree.cu_kv, max(tree.q), max(tree.kv)
    if flash_attn_varlen_func:
        out = flash_attn_varlen_func(q, k, v, *lengths, softmax_scale=scale, causal=True,
                                     window_size=(window, 0))
    else:  # for FlashAttention-3 call torch.nn.attention.activate_flash_attention_impl("FA3")
        out = varlen_attn(q, k, v, *lengths, scale=scale, window_size=(window, 0), enable_gqa=True)
    return out[..., :v_size]  # (T, H, D)


AttentionInterface.register("tree", torch.compiler.disable(tree_attention))  # its shapes vary


# --- log-probs of turns ---------------------------------------------------------------------------
#
# The way of a log-prob in a training step, and of its gradient back:
#
#     turns -> partition: parts -> Tree -> TreeLM on a rank -> forward: log-probs on all -> loss
#     weights' gradient <- backward: a rank's own trees <- loss.backward(): log-probs' gradient

def head_logps(hidden, weight, bias, targets, config):
    """Returns the log-probs of targets (N,) given hidden states (N, width), in fp32 or fp64."""
    logits = upcast(F.linear(hidden, weight, bias))  # (N, V)
    if factor := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * factor
    if divisor := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / divisor
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = cap * torch.tanh(logits / cap)
    return -F.cross_entropy(logits, targets, reduction="none")


class TreeLM(torch.nn.Module):
    """A transformers causal LM that scores a Tree, or only single turns if not `supports_trees`.

    FSDP wraps this module, not the LM, because head_logps uses the LM head's weight, which FSDP
    gathers only for the forward of the module that it wraps.
    """

    def __init__(self, lm, device=None):
        super().__init__()
        self.lm = lm.eval()
        self.device = torch.device(device or lm.device)
        self.dtype = lm.dtype
        self.config = lm.config.get_text_config()
        self.head_logps = head_logps  # shard() may compile it
        # whether a forward takes any tree; else only one turn, with the LM's own attention
        self.supports_trees = False

    def layers(self):
        """Returns the transformer layers: the ModuleList with the most weights."""
        lists = [m for m in self.lm.modules() if isinstance(m, torch.nn.ModuleList)]
        return [*max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))]

    def forward(self, tree):
        """Returns the log-probs of the actions, (A,), in turn order."""
        previous, targets = tree.parent[tree.scored], tree.ids[tree.scored]  # (S,), (S,)
        if not self.supports_trees:
            out = self.lm(input_ids=tree.ids[None], use_cache=False, logits_to_keep=previous)
            logps = -F.cross_entropy(upcast(out.logits[0]), targets, reduction="none")
            return logps[tree.index]
        inputs = {"input_ids": tree.ids[None], "position_ids": tree.pos[None]}
        states = self.lm.model(**inputs, tree=tree, use_cache=False).last_hidden_state[0]
        hidden = states[previous]  # (T, width) to (S, width)
        head = self.lm.lm_head
        # chunked, and recomputed in the backward pass, to bound the memory of the logits
        chunk = max(1, MAX_LOGITS[self.device.type] // self.config.vocab_size)
        logps = [checkpoint(self.head_logps, part, head.weight, head.bias, ids, self.config,
                            use_reentrant=False)
                 for part, ids in zip(hidden.split(chunk), targets.split(chunk))]
        return torch.cat(logps)[tree.index]  # actions may share tokens


class Computed(NamedTuple):
    """What forward() leaves for backward()."""
    flat: torch.Tensor  # all turns' log-probs on the CPU; loss.backward() ends here
    trees: list         # [(a tree of this rank, its log-probs (A,), where they begin in flat)]


def forward(model, turns, tree_tokens=math.inf, label=None):
    """Returns ({turn: (L,) log-probs of its action given its prompt}, Computed).

    All ranks must call this with the same turns. Each computes a share of the trees, and gets the
    log-probs of the others. They are on the CPU, in fp32 or fp64. Of several trees no graph is
    kept, so that only one tree's activations are in memory.
    tree_tokens: see partition. label: of a progress bar.
    """
    training = torch.is_grad_enabled()
    parts = partition(turns, tree_tokens if model.supports_trees else 0)
    n_trees = len(parts) // WORLD  # the same number on each rank, as all join every collective
    mine = range(RANK * n_trees, (RANK + 1) * n_trees)  # indices of this rank's parts
    lengths = [sum(len(turn.action) for turn in part) for part in parts]
    by_part = [torch.zeros(length) for length in lengths]
    trees = []
    for n in progress(label, mine) if label else mine:
        tree = Tree(parts[n], model.device)
        with torch.set_grad_enabled(training and n_trees == 1):
            logps = model(tree)
        by_part[n] = logps.detach().cpu()
        if training:
            trees.append((tree, logps, sum(lengths[:n])))
    flat = torch.cat(by_part)  # 0 where other ranks have computed
    if WORLD > 1:
        dist.all_reduce(flat)
    flat.requires_grad_(training)
    in_order = list(chain(*parts))
    # of a part's copies, the last one's log-probs are used, so the others get no gradient
    of_turn = dict(zip(in_order, flat.split([len(turn.action) for turn in in_order])))
    return {turn: of_turn[turn] for turn in turns}, Computed(flat, trees)


def backward(model, computed):
    """Adds to the weights' gradient what loss.backward() has left at the log-probs of forward().

    Each of several trees is computed once more. Each rank adds the gradient of its own trees, and
    FSDP sums them. Returns the number of tokens of this rank's trees, without copies.
    """
    n_tokens = 0
    for tree, logps, start in computed.trees:
        if len(computed.trees) > 1:
            logps = model(tree)
        gradient = computed.flat.grad[start:start + len(logps)]
        logps.backward(gradient.to(logps.device))
        if gradient.any():  # a copy has none
            n_tokens += len(tree.ids)
    return n_tokens


@torch.no_grad()
def turn_logps(model, turns, tree_tokens, label=None):
    """Returns {turn: (L,) log-probs} without gradient, see forward."""
    if not turns:
        return {}
    logps, _ = forward(model, turns, tree_tokens, label)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # else an optimizer created next would get the gathered weights
    return logps


def reference_logps(model, ref_turn_of, tree_tokens, label="pi_ref"):
    """Returns {turn: (L,) log-probs under pi_ref}. ref_turn_of: {pi's turn: pi_ref's turn}."""
    logps = turn_logps(model, list(ref_turn_of.values()), tree_tokens, label)
    return {turn: logps[ref_turn] for turn, ref_turn in ref_turn_of.items()}


# --- batches --------------------------------------------------------------------------------------

def turns_in(pairs):
    """Returns the unique turns of some pairs, sorted."""
    return sorted({turn for pair in pairs for turn in (*pair.chosen, *pair.rejected)})


def all_batches(groups, batch_size, epochs, seed):
    """Returns all batches of a run, [[Pair]]. groups: [(task id, [Pair])].

    Each epoch shuffles the groups; a group's pairs stay adjacent. A batch may begin or end within a
    group.
    """
    batches = []
    for epoch in range(epochs):
        order = list(groups)
        rng("order", seed, epoch).shuffle(order)
        pairs = [pair for _, group in order for pair in group]
        batches += [pairs[i:i + batch_size] for i in range(0, len(pairs), batch_size)]
    return batches


def pair_accuracy(difference):
    """Returns 1 if a pair's chosen side has the larger value, else 0, and 1/2 for a tie.

    difference: chosen less rejected value, in which rounding makes a tie's sign arbitrary.
    """
    return (difference.round(decimals=4).sign() + 1) / 2


def mean_over_pairs(pair_loss):
    """Decorates the loss of a pair: makes it the loss of a batch of pairs.

    pair_loss(args, pair, logps, ref_logps) returns (loss, {metric: scalar}). Decorated, it takes a
    list of pairs instead of one, and returns the means of both.
    """
    @functools.wraps(pair_loss)
    def batch_loss(args, pairs, logps, ref_logps):
        results = [pair_loss(args, pair, logps, ref_logps) for pair in pairs]
        losses, metrics = zip(*results)
        return sum(losses) / len(losses), {
            name: fmean(torch.as_tensor(of_pair[name]).item() for of_pair in metrics)
            for name in metrics[0]}
    return batch_loss


def measure(args, model, batch_loss, held_out, ref_logps):
    """Returns {"held_out_loss": its mean over the pairs in held_out, "held_out_" + metric: ...}."""
    logps = turn_logps(model, turns_in(held_out), args.tree_tokens)
    loss, metrics = batch_loss(args, held_out, logps, ref_logps)
    return {f"held_out_{name}": value for name, value in {"loss": loss.item(), **metrics}.items()}


def make_optimizer(model, lr):
    """Returns AdamW over the model's weights."""
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0,
                             fused=True)


def clip_gradient(model):
    """Clips the gradient to a norm of 1, and returns the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()  # if sharded


def check_finite(step, **values):
    """Exits, before the weights are updated, if a value of a step is NaN or infinite."""
    for name, value in values.items():
        if not math.isfinite(value):
            fail(f"step {step}: the {name} is {value}; the weights were not updated. "
                 "Try a lower --lr or --beta, or --dtype fp32")


# --- each rank's share ----------------------------------------------------------------------------

def partition(turns, tree_tokens, world=WORLD):
    """Splits turns into [[turn]], parts of at most tree_tokens tokens unless one turn is longer.

    Every rank gets the same number of consecutive parts, as few as possible. Then bisection finds
    the lowest limit (within 1 %) that needs no more parts, which makes them about equally large.
    Copies of the last part make their number a multiple of the ranks.
    """
    rows = [(turn, len(seq), shared)
            for turn, seq, shared in sorted_with_prefix_lengths(dict.fromkeys(turns))]

    def split(limit):
        """Returns parts of at most `limit` tokens and MAX_KEYS keys, or of a single turn."""
        parts, size, keys = [[]], 0, 0
        for turn, length, shared in rows:
            size += length - shared
            keys += length  # at most: of turns that extend one another, Tree counts the last only
            if parts[-1] and (size > limit or keys > MAX_KEYS):
                parts.append([])
                size = keys = length  # the first turn of a part shares no prefix
            parts[-1].append(turn)
        return parts

    low, high = 0, min(tree_tokens, sum(length - shared for _, length, shared in rows))
    parts = split(high)
    max_parts = math.ceil(len(parts) / world) * world
    while high - low > 1 + high // 100:
        middle = (low + high) // 2
        smaller = split(middle)
        if len(smaller) <= max_parts:
            parts, high = smaller, middle
        else:
            low = middle
    while len(parts) % world:
        parts.append(parts[-1])
    return parts


# --- loading and sharding -------------------------------------------------------------------------

def load(path, device="cpu", dtype="fp32", args=None, train=False):
    """Returns (TreeLM, Chat) of a folder or hub name, after checking its log-probs.

    If trees do not reproduce the log-probs of transformers' own forward, the model is computed turn
    by turn; if that fails too, the program exits. dtype, a value of --dtype, is that of computation
    and of weights, except that weights to `train` are fp32. args: a trainer's flags, to shard the
    model over all ranks, each of which reads the files; None: no sharding.
    """
    path, chat, _ = find_model(path, weights=True)
    device = torch.device(device)
    dtype = pick_dtype(dtype, device)
    model = TreeLM(read_weights(path, dtype, train), device)
    turns = probe_turns(model.config)
    own_logps = own_forward_logps(model, turns)
    choose_attention(model, turns[:2], own_logps, path)
    if args:
        checksum = int(weights_digest(path)[:10], 16)
        if sum_over_ranks(checksum) != WORLD * checksum:
            fail(f"the weights in {path!r} are not the same on all ranks")
        shard(model, dtype, args, train)
    if train:
        model.float()
    if not args or not args.offload:
        model.to(device)
    verify(model, turns, own_logps, path)
    return model, chat


def read_weights(path, dtype, train):
    """Returns the transformers LM of a folder, in `dtype`; one to `train` may keep the files'."""
    as_stored = train and dtype != torch.float32  # so that the files are memory-mapped, not copied
    with fail_on_error(f"the weights in {path!r} can't be read"):
        lm, loading_info = AutoModelForCausalLM.from_pretrained(
            path, dtype="auto" if as_stored else dtype, attn_implementation="eager",
            use_safetensors=True, trust_remote_code=False, output_loading_info=True,
            ignore_mismatched_sizes=True, generation_config=GenerationConfig())
    if wrong := sorted(map(str, chain(*loading_info.values()))):  # missing, unexpected, mismatched
        fail(f"the weights in {path!r} do not match its config.json: {wrong[:3]}")
    return lm


def shard(model, dtype, args, train):
    """Compiles and recomputes layers as the flags say, then shards them with FSDP2.

    They compute in dtype, and gradients are summed in fp32. Nothing is sharded on one rank that
    has nothing to cast or to offload.
    """
    model.dtype = dtype
    gpu = model.device.type == "cuda"
    recompute, compiled = args.recompute, args.compile
    if recompute is None:
        recompute = gpu
    if compiled is None:
        compiled = gpu and model.supports_trees
    layers = model.layers()
    if compiled:
        model.head_logps = torch.compile(head_logps, dynamic=True)
    for layer in layers:
        if compiled:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if recompute and train:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    if WORLD == 1 and not args.offload and (dtype == torch.float32 or not train):
        return  # there is nothing to shard, to cast or to offload
    mesh = init_device_mesh(model.device.type, (WORLD,))
    offloading = CPUOffloadPolicy(pin_memory=gpu) if args.offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offloading)
        if WORLD > 1:  # sum gradients, not average: losses are divided by the global count already
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def load_lm(path, device, dtype="fp32"):
    """Returns (transformers LM, Chat) to sample with. dtype: see `load`."""
    model, chat = load(path, device, dtype)
    if not model.supports_trees:  # collect.py's attention and cache would be wrong, too
        fail(f"sampling from {path!r} without a server is not supported, because of its layers or "
             "attention: give a vLLM server by --engine")
    model.lm.set_attn_implementation("eager")  # some families have no "sdpa"
    return model.lm, chat


def pick_dtype(name, device):
    """Returns the torch.dtype of --dtype; auto is bf16 on a GPU and fp32 on a CPU."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" else "fp32"
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]


def run_facts(args, device, trajectories):
    """Returns what a run that is resumed must have in common with this command, beside flags."""
    folder, *_ = find_model(args.model, weights=True)
    return {"data_hash": data_hash(trajectories), "model_weights": weights_digest(folder),
            "dtype": str(pick_dtype(args.dtype, device))}


def data_hash(trajectories):
    """Returns a hash of what was read of a trainer's records, whatever their order."""
    return digest(sorted(digest([t.record, t.turns()]) for t in trajectories))


# --- model files ----------------------------------------------------------------------------------

MODEL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*.jinja"]


def find_model(path, weights=False):
    """Returns (folder, Chat, most tokens of a context) of a Hugging Face folder or hub name.

    Fails if there is none. Weights are downloaded from the hub only if `weights` is true.
    """
    folder = path
    with fail_on_error(f"no model at {path!r}"):
        if not os.path.isdir(path):
            from huggingface_hub import snapshot_download
            wanted = [*MODEL_FILES, "*.safetensors"] if weights else MODEL_FILES
            folder = snapshot_download(path, allow_patterns=wanted)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    with fail_on_error(f"the chat template of {path!r} can't be used"):
        chat = Chat(tokenizer, folder)
    max_context = getattr(config.get_text_config(), "max_position_embeddings", None)
    return folder, chat, max_context or math.inf


@functools.cache  # a trainer asks twice for its --model
def weights_digest(folder):
    """Returns a short hash of every byte of the safetensors files in a folder; None without any."""
    hashes = []
    for name in sorted(glob.glob("*.safetensors", root_dir=folder)):
        with open(os.path.join(folder, name), "rb") as f:
            hashes.append((name, hashlib.file_digest(f, "sha256").digest()))
    return digest(hashes) if hashes else None


# --- proofs ---------------------------------------------------------------------------------------

def probe_turns(config):
    """Returns three turns: two with a common prompt, and one to test a sliding window.

    The third exceeds a window of up to 2048 tokens. A wider one is not tested, because load may
    compute these turns on a CPU.
    """
    first = config.vocab_size // 2  # an id far from special tokens
    window = min(getattr(config, "sliding_window", None) or 0, 2048)
    turns = []
    for length, action in (8, (5, 6, 7, 8)), (8, (9, 6, 5, 4)), (window + 8, (3, 2, 1)):
        prompt = packed(first + i % 11 for i in range(length))
        turns.append(Turn(prompt, packed(first + i for i in action)))
    return turns


def own_forward_logps(model, turns):
    """Returns the turns' log-probs, (A,), by transformers' own forward, turn by turn."""
    with torch.no_grad():
        return torch.cat([model(Tree([turn])) for turn in turns])


def choose_attention(model, turns, own_logps, path):
    """Switches to tree attention, if that reproduces the turns' own_logps; else warns."""
    if can_support_trees(model.config):
        model.supports_trees = True
        try:
            model.lm.set_attn_implementation("tree")
            logps, leak = logps_and_leak(model, turns)
            # a leak shows that layers other than attention mix the paths
            if not leak and agree(logps, own_logps[:len(logps)], model.dtype):
                return
        except Exception as e:  # any, such as AttributeError: GPT-2 has no lm.model
            say(f"warning: tree attention fails: {type(e).__name__}: {e}")
    model.supports_trees = False
    model.lm.set_attn_implementation("eager")
    say(f"warning: {path} does not support trees: it runs turn by turn and repeats prefixes")


def can_support_trees(config):
    """Returns False for longrope and for layers that the short turns of `load` can't test."""
    rope = str(getattr(config, "rope_parameters", None))
    types = set(getattr(config, "layer_types", None) or ())
    return "'longrope'" not in rope and not types - {"full_attention", "sliding_attention"}


@torch.enable_grad()
def logps_and_leak(model, turns):
    """Returns ((A,) log-probs of actions in a tree, whether one depends on tokens off its path).

    One of the last turn is tested. It depends on the tokens at whose embeddings its gradient is not
    0. turns must be sorted.
    """
    tree, embedded = Tree(turns), []
    embeddings = model.lm.get_input_embeddings()
    with embeddings.register_forward_hook(lambda module, args, out: embedded.append(out)):
        logps = model(tree)
    gradient = torch.autograd.grad(logps[-2], embedded)[0].flatten(0, -2)  # (T, width)
    leaks = gradient.ne(0).any(-1)  # (T,)
    own_path = tree.paths[-tree.kv[-1]:]  # of the last turn
    leaks[own_path[:-2]] = False  # the second last token may depend on those before it
    return logps.detach(), leaks.any().item()


def verify(model, turns, own_logps, path):
    """Exits if the model, ready for use, does not reproduce the turns' own_logps."""
    logps = torch.cat([*turn_logps(model, turns, math.inf).values()])
    if not agree(logps, own_logps, model.dtype):
        error = (logps - own_logps).abs().mean()
        fail(f"the log-probs of {path!r} differ by {error:.2g} on average from those of its own "
             "forward in transformers")


def agree(logps, own_logps, dtype):
    """Returns whether log-probs agree; 16 bits may round large logits by 0.5 on average."""
    return (logps - own_logps).abs().mean() < (0.5 if dtype.itemsize == 2 else 1e-3)


# --- chat templates -------------------------------------------------------------------------------

# a dialogue to find what the template writes before and after a message of the assistant
MARK = "\ue000"
PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}]
# for templates that print the date, so that prompts stay equal; a macro, because transformers 5.22
# turns Python functions into text; the newline is trimmed
TODAY = "26 Jul 2024"
STRFTIME_NOW = f"{{%- macro strftime_now(format) -%}}{TODAY}{{%- endmacro %}}\n"
# gpt-oss's special tokens between the channels of a message; it alone has a token <|channel|>
CHANNEL_MARKS = {"<|start|>", "<|message|>", "<|end|>"}


class Chat:
    """A tokenizer with its chat template: dialogues to token ids, and sampled ids to text.

    end: the text that ends a message: template text up to an added token, else EOS.
    end_ids: {id} by which a model ends a message: the last of `end`, and every EOS.
    stop: {id} at which sampling stops: end_ids, and special tokens but those of thoughts. A message
    is shown without them, so nothing after the first of them may count.

    In all methods, thinking=0 switches thinking off, if the template has `enable_thinking`.
    """

    def __init__(self, tokenizer, folder):
        """folder: of the model, for its configs. ValueError if the template can't be used."""
        self.tokenizer = tokenizer
        self.template = STRFTIME_NOW + tokenizer.get_chat_template()
        special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()
                   if token.special}
        self.special = any_of(special.values())
        self.end = self.find_end()
        ids = [self.text_ids(self.end)[-1], tokenizer.eos_token_id]
        for name in "config.json", "generation_config.json":
            path = Path(folder, name)
            eos = json.loads(path.read_bytes()).get("eos_token_id") if path.exists() else None
            ids += eos if isinstance(eos, list) else [eos]
        self.end_ids = {i for i in ids if i is not None and 0 <= i < len(tokenizer)}
        inside = CHANNEL_MARKS if "<|channel|>" in special.values() else ()
        self.stop = self.end_ids | {
            i for i, text in special.items() if text not in inside
            and not THOUGHT_START.fullmatch(text) and not THOUGHT_END.fullmatch(text)}

    def find_end(self):
        """Returns the text that ends a message. ValueError if its start or end is left open."""
        before, _, after = self.template_text(PROBE, 0, add_prompt=False).rpartition(MARK)
        bare, prompt = (self.template_text(PROBE[:1], 0, add) for add in (False, True))
        header = before.removeprefix(bare)
        if prompt == bare and header.strip():  # the model would have to guess the header
            raise ValueError(f"it has no generation prompt: add {header!r}")
        added = any_of(t.content for t in self.tokenizer.added_tokens_decoder.values())
        found = added.search(after)
        end = after[:found.end()] if found else self.tokenizer.eos_token
        if not end:
            raise ValueError("no added token ends a message, and there is no EOS")
        return end

    def prompt_ids(self, messages, thinking=0):
        """Returns the token ids of a dialogue as a prompt for the assistant's next message."""
        return self.text_ids(self.template_text(messages, thinking, add_prompt=True))

    def action_ids(self, action, history, thinking=0):
        """Returns the token ids of an action, which follow the whole prompt.

        They are the sampled ids, if there are any and they decode to the action's text. Otherwise
        they are those of the text, to which the end of a message is added.
        """
        text, ids = self.action_text(action, thinking), action.get("token_ids")
        if ids and self.decode_to(ids, text):
            return ids
        if ids:
            add_warning("messages or candidates have token_ids of another text, or a special token "
                        "among them: their text is read", repr(text[:60]))
        text = self.text_after_prompt(text, history, thinking)
        if self.end in text:
            text = text[:text.rindex(self.end)]
        return self.text_ids(text + self.end)

    def decode(self, ids):
        """Returns the text of sampled ids, without those at which sampling stops."""
        return self.tokenizer.decode([i for i in ids if i not in self.stop])

    def opening(self, thinking):
        """Returns "<think>" if the prompt opens a thought, which outputs continue, or ""."""
        bare, prompt = (self.template_text(PROBE[:1], thinking, add) for add in (False, True))
        thought = prompt.removeprefix(bare).rpartition("</think>")[2]
        return "<think>" if "<think>" in thought else ""

    def action_text(self, action, thinking):
        """Returns an action's output; or its content, if it has no output or somebody edited it.

        The content closes a thought that the prompt opens.
        """
        content = action.get("content", "")
        if "output" in action and action["output"].strip().endswith(content.strip()):
            return action["output"]
        opening = self.opening(thinking)
        if not opening:
            return content
        return content.removeprefix(opening) if "</think>" in content else "</think>" + content

    def decode_to(self, ids, text):
        """Returns whether sampled ids decode to a text, and sampling stops at none but the last."""
        return (all(0 <= i < len(self.tokenizer) for i in ids) and not self.stop & {*ids[:-1]}
                and self.decode(ids).strip() == text.strip())

    def text_after_prompt(self, text, history, thinking):
        """Returns what follows the prompt in the template's text of a dialogue that ends in `text`.

        If the template writes another prompt there, or not the whole text (it may drop a thought),
        returns the text itself.
        """
        prompt = self.template_text(history, thinking, add_prompt=True)
        dialogue = [*history, {"role": "assistant", "content": text}]
        written = self.template_text(dialogue, thinking, add_prompt=False)
        if written.startswith(prompt) and self.plain_text(text.strip()) in written:
            return written.removeprefix(prompt)
        if text.startswith("<think>") and not thinking:  # the prompt may have closed an empty one
            raise ValueError('a stored thought needs "meta": {"thinking": 1} in its record')
        return self.plain_text(text)

    def template_text(self, messages, thinking, add_prompt):
        """Returns the template's text of a dialogue, on the day TODAY.

        add_prompt: whether to append the generation prompt, which opens the assistant's next
        message. ValueError if the template rejects the dialogue or leaves out a message, but for
        its thought.
        """
        plain = [{"role": m["role"], "content": self.plain_text(m["content"])} for m in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                plain, chat_template=self.template, tokenize=False,
                add_generation_prompt=add_prompt, enable_thinking=bool(thinking))
        except Exception as e:  # a template is a program, which may raise any error
            raise ValueError(str(e) or type(e).__name__) from e
        for i, m in enumerate(plain, 1):
            if m["content"].rpartition("</think>")[2].strip() not in text:
                raise ValueError(f"it leaves out the content of message {i} of {len(plain)}, whose "
                                 f"role is {m['role']}; use another template, or no such message")
        return text

    def plain_text(self, text):
        """Returns a text with a space inside what would become a special token, like <|im_end|>.

        Only the template writes these. Lone surrogates, which JSON may spell, become "?".
        """
        text = text.encode(errors="replace").decode()
        return self.special.sub(lambda match: match[0][0] + " " + match[0][1:], text)

    def text_ids(self, text):
        """Returns the token ids of a text."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def any_of(tokens):
    """Returns a regex that matches these texts of tokens, but those of a single character."""
    longest_first = sorted((t for t in tokens if len(t.strip()) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


# --- saving ---------------------------------------------------------------------------------------

def save(model, chat, out):
    """Writes a Hugging Face folder: weights in model.dtype, and all ids that end a message."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model.lm, options=options)  # empty on ranks other than 0
    if RANK:
        return
    lm = model.lm
    # tied weights once; buffers keep their dtype
    weights = {name: state[name].to(model.dtype) for name, _ in lm.named_parameters()}
    buffers = {name: state[name] for name, _ in lm.named_buffers() if name in state}
    lm.generation_config = GenerationConfig(eos_token_id=sorted(chat.end_ids))
    lm.save_pretrained(out, state_dict=weights | buffers)
    lm.config.dtype = model.dtype  # of the weights in the files, not of those in training
    lm.config.save_pretrained(out)
    chat.tokenizer.save_pretrained(out)


# --- checkpoints ----------------------------------------------------------------------------------

def training_state(model, optimizer):
    """Returns all that training changes, as torch.distributed.checkpoint stores it."""
    weights, moments = get_state_dict(model, optimizer)
    return {"weights": weights, "moments": moments}


def save_checkpoint(model, optimizer, out, step):
    """Writes out/checkpoint-STEP atomically, then removes the previous checkpoint."""
    with writing(os.path.join(out, f"checkpoint-{step}")) as part:
        dcp.save(training_state(model, optimizer), checkpoint_id=part)
    drop_checkpoints(out, keep=step)
    sum_over_ranks(0)  # wait, so that no rank ends the program while rank 0 still writes


def load_checkpoint(model, optimizer, out, step):
    """Loads out/checkpoint-STEP, if step is not 0; removes all others."""
    drop_checkpoints(out, keep=step)  # a kill may leave others, or partial ones
    if step:
        state = training_state(model, optimizer)
        dcp.load(state, checkpoint_id=os.path.join(out, f"checkpoint-{step}"))
        set_state_dict(model, optimizer, model_state_dict=state["weights"],
                       optim_state_dict=state["moments"])
