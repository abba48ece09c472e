"""Models, chat templates, and the one primitive of the method: log-probs of actions, over a tree of shared prefixes.

A turn is (prompt_ids, action_ids): what the agent read and what it wrote, as tuples of token ids.
Critic scores, DPO, multi-turn DPO, fine-tuning, ranking and best-of-N are all functions of
`action_logps(model, turns)`.

Candidates of a turn share their history, turns of a trajectory extend one another, trajectories of a task share the
task. So `pack` sorts the sequences, which is depth-first order of their prefix tree, and lays every shared prefix out
once. Attention then runs over `runs`, stretches of new tokens that see their own path from the root.
"""
import functools
import glob
import importlib.util
import json
import math
import os
import re
import struct
import warnings
import weakref
from array import array
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from jinja2.exceptions import TemplateError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import (AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText,
                          AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast)
from transformers.utils import logging

from utils import (RANK, WORLD, barrier, digest, drop_checkpoints, fail, from_rank_0, max_over_ranks, fail_on_error,
                   progress, reading, remove, rng, sum_over_ranks, writing)

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process may read weights, too
logging.set_verbosity_error()
logging.disable_progress_bar()
SIDE = 28  # pixels of a picture's token: patches of 14, merged by two
PICTURE = 1 << 20  # ids from here on are tokens of picture id - PICTURE: so no prefix is shared by unlike pictures
TURN = 0  # under this key, which no JSON has, a trainer keeps the turn of a message or a candidate
COUNT = {"computed": 0, "unshared": 0}  # tokens that went through the model, and would have without sharing


# --- the tree ---------------------------------------------------------------------------------------------------------

class Tree(NamedTuple):
    ids: torch.Tensor     # (T,) token ids, depth first
    pos: torch.Tensor     # (T,) depth: the position in every sequence that holds the token
    parent: torch.Tensor  # (T,) flat index of the token before it on its path; its hidden state predicts the token
    runs: "Runs"          # stretches of new tokens; each attends to its own path from the root
    actions: list         # per turn, (L,) flat indices of its action's tokens, on the CPU
    unshared: int         # tokens of the turns laid out one by one


class Runs:
    """Stretches of new tokens. A plain class: of what layers are given FSDP walks through every list and named tuple."""

    def __init__(self, paths, q, kv, device):
        ends = lambda lengths: torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        self.paths = paths.to(device)     # flat indices of each run's path, root to its last token, one after another
        self.q, self.kv = q, kv           # lists: tokens of each run; tokens of its path, of which its own are the last
        self.cu_q, self.cu_kv = ends(q), ends(kv)  # (runs + 1,) where each begins, and the end: as flash attention wants


def common_prefix(a, b):
    """Length of the common prefix of two lists, by binary search over slices (each compared in C)."""
    lo, hi = 0, min(len(a), len(b))
    while lo < hi:
        mid = (lo + hi + 1) // 2
        lo, hi = (mid, hi) if a[lo:mid] == b[lo:mid] else (lo, mid - 1)
    return lo


def pack(turns, device="cpu", with_prompts=False):
    """The prefix tree of turns [(prompt_ids, action_ids)] as one packed sequence. No prompt or action may be empty.

    with_prompts: a turn's `actions` are all its tokens, those of its prompt, too.
    """
    seqs = [[*prompt, *action] for prompt, action in turns]
    ids, pos, parent, runs, actions = [], [], [], [], [None] * len(turns)
    path, before = array("q"), []
    for i in sorted(range(len(turns)), key=seqs.__getitem__):
        seq, shared = seqs[i], common_prefix(before, seqs[i])
        start, end = len(ids), len(ids) + len(seq) - shared
        if runs and shared == len(before) and runs[-1][1] == start:
            runs[-1][1] = end  # it extends the last run: one longer run serves both
        elif end > start:
            runs.append([start, end, None])
        ids += seq[shared:]
        pos += range(shared, len(seq))
        parent += [path[shared - 1] if shared else -1, *range(start, end - 1)][:end - start]
        path = path[:shared] + array("q", range(start, end))
        if end > start:
            runs[-1][2] = path
        first = 0 if with_prompts else len(turns[i][0])
        actions[i] = torch.frombuffer(path, dtype=torch.long)[first:]
        before = seq
    starts, ends, paths = zip(*runs)
    runs = Runs(torch.cat([torch.frombuffer(path, dtype=torch.long) for path in paths]),
                [end - start for start, end in zip(starts, ends)], list(map(len, paths)), device)
    as_tensor = lambda x: torch.tensor(x, device=device)
    return Tree(as_tensor(ids), as_tensor(pos), as_tensor(parent), runs, actions, sum(map(len, seqs)))


def token_counts():
    """COUNT of all ranks together, and how many times fewer tokens sharing made of it."""
    computed, unshared = map(int, sum_over_ranks(*COUNT.values()))
    return {"computed": computed, "unshared": unshared, "sharing": unshared / max(1, computed)}


def tree_size(turns):
    """(tokens, keys): how many tokens `pack(turns)` computes, and how many keys they attend to in all."""
    seqs = sorted([*prompt, *action] for prompt, action in turns)
    shared = [0, *map(common_prefix, seqs, seqs[1:])]
    upto = lambda n: n * (n + 1) // 2
    return sum(map(len, seqs)) - sum(shared), sum(upto(len(s)) for s in seqs) - sum(map(upto, shared))


def tree_tokens(turns):
    """How many tokens `pack(turns)` computes."""
    return tree_size(turns)[0]


# --- attention over runs ----------------------------------------------------------------------------------------------

class Gather(torch.autograd.Function):
    """x[index], whose gradient is summed in fp32: in bf16 a prefix that 100 branches share would lose 1 % of it."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x[index]

    @staticmethod
    def backward(ctx, grad):
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(ctx.rows, *grad.shape[1:], dtype=wide, device=grad.device)
        return total.index_add_(0, ctx.saved_tensors[0], grad.to(wide)).to(grad.dtype), None


def tree_attention(kernel, module, query, key, value, attention_mask, scaling=None, runs=None, **kwargs):
    """Attention of a packed tree, as transformers' AttentionInterface wants it, by a kernel for many short sequences.

    query (1, H, T, D), key and value (1, KV, T, D) to (1, T, H, D). Every run is one sequence: its tokens as queries,
    its path as keys, and a causal mask aligned at the end, since its own tokens are the path's last.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, D)
    return kernel(q, Gather.apply(k, runs.paths), Gather.apply(v, runs.paths), runs, scaling)[None], None


def sdpa_kernel(q, k, v, runs, scale):
    """One scaled_dot_product_attention a run: the reference, and the form for the CPU."""
    by_run = lambda x, lengths: (y.transpose(0, 1)[None] for y in x.split(lengths))  # (1, heads, length, D) each
    out = [F.scaled_dot_product_attention(*run, attn_mask=end_aligned(n, m, q.device), is_causal=n == m, scale=scale,
                                          enable_gqa=True)
           for *run, n, m in zip(by_run(q, runs.q), by_run(k, runs.kv), by_run(v, runs.kv), runs.q, runs.kv)]
    return torch.cat(out, 2)[0].transpose(0, 1)


def end_aligned(q, kv, device):
    """(q, kv) causal mask in which the last query sees every key; None for q = kv, where is_causal means the same."""
    return None if q == kv else torch.ones(q, kv, dtype=torch.bool, device=device).tril(kv - q)


def torch_kernel(q, k, v, runs, scale):
    from torch.nn.attention.varlen import varlen_attn
    return varlen_attn(q, k, v, runs.cu_q, runs.cu_kv, max(runs.q), max(runs.kv), scale=scale, window_size=(-1, 0),
                       enable_gqa=q.shape[1] != k.shape[1])


def flash_kernel(q, k, v, runs, scale):
    from flash_attn import flash_attn_varlen_func
    return flash_attn_varlen_func(q, k, v, runs.cu_q, runs.cu_kv, max(runs.q), max(runs.kv), softmax_scale=scale,
                                  causal=True)


for name, kernel in (("sdpa", sdpa_kernel), ("torch", torch_kernel), ("flash", flash_kernel)):
    AttentionInterface.register("tree_" + name, functools.partial(tree_attention, kernel))


def pick_attention(name, device, dtype):
    """The kernel behind --attention: flash needs a GPU, 16 bits and its package, torch the first two."""
    fit, installed = device.type == "cuda" and dtype != torch.float32, importlib.util.find_spec("flash_attn")
    if name == "auto":
        return "sdpa" if not fit else "flash" if installed else "torch"
    if name != "sdpa" and not fit:
        fail(f"--attention {name} needs a GPU and --dtype bf16; sdpa runs everywhere")
    if name == "flash" and not installed:
        fail("--attention flash needs the package flash-attn (pip install flash-attn --no-build-isolation); "
             "torch's own kernel is --attention torch")
    return name


# --- the forward ------------------------------------------------------------------------------------------------------

def head_logps(hidden, weight, targets):
    """log softmax(hidden @ weight.T)[targets], (N,), in fp32 or better. Checkpointed: no (N, vocab) logits are kept."""
    logits = F.linear(hidden, weight)
    return -F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets, reduction="none")


class TreeLM(torch.nn.Module):
    """A transformers causal LM as the one forward of the method: a packed tree to numbers of chosen tokens.

    These are log-probs; with a `head` what a linear one makes of their last hidden states. It is what FSDP wraps: the
    head's weight, often the embedding's too, is then used inside the root's own forward.
    """

    def __init__(self, lm, device=None, head=False):
        super().__init__()
        self.lm, self.device, self.dtype = lm.eval(), torch.device(device or lm.device), lm.dtype
        self.config, self.pictures = lm.config.get_text_config(), None
        width = self.config.hidden_size
        self.score = torch.nn.Linear(width, 1, bias=False, device=lm.device) if head else None

    def layers(self):
        """Every transformer layer, that of pictures first."""
        return [*self.lm.model.visual.blocks, *self.lm.model.language_model.layers] if has_vision(self.lm.config) else \
            [*self.lm.model.layers]

    def forward(self, tree, scored, chunk):
        """(N,) numbers of the tokens at the flat indices `scored` (N,); log-probs of `chunk` tokens at a time."""
        at_once = 2 ** 24 if self.device.type == "cpu" else 2 ** 26  # logits: 64 MB, or 256 MB, in fp32
        chunk = chunk or max(64, at_once // self.config.vocab_size)
        if has_vision(self.lm.config):
            inputs, read = self.embed(tree), self.lm.model.language_model
        else:
            inputs, read = {"input_ids": tree.ids[None], "position_ids": tree.pos[None]}, self.lm.model
        hidden = read(**inputs, runs=tree.runs, use_cache=False).last_hidden_state[0]  # (T, width)
        if self.score:
            return hidden[scored].float() @ self.score.weight[0].float()
        hidden, targets = hidden[tree.parent[scored]], tree.ids[scored]
        return torch.cat([checkpoint(head_logps, hidden[i:i + chunk], self.lm.lm_head.weight, targets[i:i + chunk],
                                     use_reentrant=False) for i in range(0, len(scored), chunk)])

    def embed(self, tree):
        """Embeddings and positions of a tree with pictures, each of which is looked at once, however often it is shown.

        All ranks call the vision tower equally often: where a tree has no picture, it looks at an empty one.
        """
        ids, v, grids = tree.ids.tolist(), self.lm.config.vision_config, self.pictures.grids if self.pictures else []
        pos, at = picture_positions(ids, tree.parent.tolist(), grids)
        numbers = sorted({i - PICTURE for i in ids if i >= PICTURE})
        if numbers:
            pixels, sizes = self.pictures.pixels(numbers)
        else:
            pixels = torch.zeros(4, v.in_channels * v.temporal_patch_size * v.patch_size ** 2)
            sizes = torch.tensor([[1, 2, 2]])
        seen = self.lm.model.visual(pixels.to(self.device, self.dtype), grid_thw=sizes.to(self.device)).pooler_output
        first = dict(zip(numbers, accumulate([0, *(math.prod(grids[n]) for n in numbers)])))
        shown = [t for t, i in enumerate(ids) if i >= PICTURE]
        index = [first[ids[t] - PICTURE] + at[t] for t in shown]
        as_tensor = lambda x: torch.tensor(x, dtype=torch.long, device=self.device)
        words = self.lm.get_input_embeddings()(tree.ids.where(tree.ids < PICTURE, 0))
        words = words.index_put((as_tensor(shown),), Gather.apply(seen, as_tensor(index))) + 0 * seen.sum()
        return {"inputs_embeds": words[None], "position_ids": as_tensor(pos).T[:, None]}


def has_vision(config):
    """Whether a model of this config looks at pictures."""
    return hasattr(config, "vision_config")


def picture_positions(ids, parents, grids):
    """Qwen2-VL's positions of a tree's tokens, [(time, row, column)], and each one's index in its picture.

    A word stands after all before it on its path; a picture's tokens after those, by row and column.
    """
    pos, at, after, start = [], [], [], []  # after: the next word's position; start: where the token's picture stands
    for i, parent in zip(ids, parents):
        inside = i >= PICTURE and parent >= 0 and ids[parent] == i
        at.append(at[parent] + 1 if inside else 0)
        start.append(start[parent] if inside else after[parent] if parent >= 0 else 0)
        rows, columns = grids[i - PICTURE] if i >= PICTURE else (1, 1)
        row, column = divmod(at[-1], columns)
        pos.append((start[-1], start[-1] + row, start[-1] + column))
        after.append(start[-1] + max(rows, columns))
    return pos, at


class Pictures:
    """PNG files of pages, as prompts show them to Qwen2-VL: number n is files[n], of grids[n] = (rows, columns) tokens.

    A picture has at most `most` tokens; a larger one is scaled down.
    """

    def __init__(self, path, config, most, files=()):
        """path: the model's directory; files: {page: its file}."""
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen
        self.processor, self.resize = qwen.Qwen2VLImageProcessorPil.from_pretrained(path), qwen.smart_resize
        self.size = {"shortest_edge": 4 * SIDE ** 2, "longest_edge": most * SIDE ** 2}
        self.ends = config.vision_start_token_id, config.vision_end_token_id
        self.numbers, self.files, self.grids = {}, [], []
        for page, file in dict(files).items():
            self.add(page, file)

    def add(self, page, file):
        """Takes a page in, unless it is there already."""
        if page in self.numbers:
            return
        with open(file, "rb") as f:
            width, height = struct.unpack(">16x2I", f.read(24))
        self.numbers[page] = len(self.files)
        self.files.append(file)
        self.grids.append(tuple(x // SIDE for x in self.resize(height, width, SIDE, *self.size.values())))

    def ids(self, page):
        """The ids that show a page's picture; () where it has none."""
        n = self.numbers.get(page)
        return () if n is None else (self.ends[0], *[PICTURE + n] * math.prod(self.grids[n]), self.ends[1])

    def pixels(self, numbers):
        """(patches, pixels of a patch) of these pictures one after another, and their grids (pictures, 3)."""
        from PIL import Image
        images = [Image.open(self.files[n]).convert("RGB") for n in numbers]
        return self.processor(images, size=self.size, return_tensors="pt").values()


def action_logps(model, turns, max_tokens=None, chunk=None):
    """Per-token log-probs of each action given its prompt: (L_i,) fp32 tensors on the CPU, in the order of `turns`.

    Of a model with a regression head its value of each turn, (1,): the mean over all tokens, prompt and action.
    A token shared by several actions is scored once. A tree of more than max_tokens is computed branch by branch, again
    in the backward pass: the same values and gradients in bounded memory. Under torchrun every rank must call it, with
    turns of its own; who has fewer branches fills up, since FSDP's collectives must meet.
    """
    parts = branches(turns, max_tokens) if max_tokens else [list(range(len(turns)))]
    rounds = max_over_ranks(len(parts))
    logps, anchor = [None] * len(turns), torch.ones((), requires_grad=True)

    def part_logps(part, anchor):
        tree = pack([turns[i] for i in part], model.device, model.score is not None)
        scored, where = torch.cat(tree.actions).unique(return_inverse=True)
        COUNT["computed"] += len(tree.ids)
        COUNT["unshared"] += tree.unshared
        numbers = model(tree._replace(actions=None), scored.to(model.device), chunk)  # FSDP would move each to the GPU
        numbers = numbers.cpu()[where]  # few: losses are made on the CPU
        if model.score is not None:
            return torch.stack([x.mean() for x in numbers.split([len(a) for a in tree.actions])])
        return numbers

    for n in range(rounds):
        part = parts[min(n, len(parts) - 1)]
        if rounds == 1 or not torch.is_grad_enabled():
            flat = part_logps(part, anchor)
        else:  # without gradient now, and with it when the loss's comes back: each after the next one, for autograd
            flat = anchor = checkpoint(part_logps, part, anchor, use_reentrant=True)  # runs whatever else is ready
        if n < len(parts):
            for i, x in zip(part, flat.split(sizes(model, [turns[i] for i in part]))):
                logps[i] = x
        else:
            logps[0] = logps[0] + 0 * flat.sum()
    return logps


def sizes(model, turns):
    """How many numbers action_logps gives of each turn."""
    return [len(action) if model.score is None else 1 for _, action in turns]


# --- pairs, and batches of bounded memory, as many on every rank ----------------------------------

class Pair(NamedTuple):
    """One example of a loss: two trajectories of a task, or two candidates of a turn."""
    chosen: tuple         # the turns, (prompt_ids, action_ids), of the better one
    rejected: tuple = ()  # those of the worse one; fine-tuning has none
    gap: float = 0.0      # how much better it is, in reward; a candidate, in what ranks candidates


def turns_in(pairs):
    """The turns of some pairs, each once."""
    return sorted({turn for pair in pairs for turn in (*pair.chosen, *pair.rejected)})


def batches(groups, batch_size, *seed):
    """One epoch's batches of pairs, a function of the seed; a group's pairs stay together."""
    groups = list(groups)
    rng("order", *seed).shuffle(groups)
    pairs = [pair for group in groups for pair in group]
    return [pairs[i:i + batch_size] for i in range(0, len(pairs), batch_size)]


def branches(turns, max_tokens):
    """Indices of turns in parts [[i, ...]] of at most max_tokens tree tokens, or one turn, neighbours together."""
    parts, size, before = [], max_tokens, []
    for i in sorted(range(len(turns)), key=turns.__getitem__):
        seq = [*turns[i][0], *turns[i][1]]
        new = len(seq) - common_prefix(before, seq)
        if size + new > max_tokens:
            parts.append([])
            size, new = 0, len(seq)
        parts[-1].append(i)
        size, before = size + new, seq
    return parts


def micro_batches(pairs, max_tokens):
    """The pairs in parts, halved until a part's tree has at most max_tokens, or is of one pair."""
    if len(pairs) == 1 or tree_tokens(turns_in(pairs)) <= max_tokens:
        return [pairs]
    half = len(pairs) // 2
    return [*micro_batches(pairs[:half], max_tokens), *micro_batches(pairs[half:], max_tokens)]


def deal(parts):
    """This rank's share of a step's micro-batches, [(part, weight)], each of weight 1.

    Every rank gets the same number, of similar sizes: the largest parts are halved until they can
    be shared out evenly. Where no part can be halved, the last one is added with weight 0.
    """
    if WORLD == 1:
        return [(part, 1.0) for part in parts]
    sized = lambda part: (tree_tokens(turns_in(part)), part)
    parts = [sized(part) for part in parts]
    while len(parts) % WORLD and max(len(part) for _, part in parts) > 1:
        big = max((x for x in parts if len(x[1]) > 1), key=lambda x: x[0])
        parts.remove(big)
        half = len(big[1]) // 2
        parts += [sized(big[1][:half]), sized(big[1][half:])]
    parts = [part for _, part in sorted(parts, key=lambda x: -x[0])]
    fillers = [(parts[-1], 0.0)] * (-len(parts) % WORLD)
    return ([(part, 1.0) for part in parts] + fillers)[RANK::WORLD]


@torch.no_grad()
def score(model, turns, max_tokens, what="scoring"):
    """action_logps of any number of turns, without gradient, in trees of at most max_tokens, by all ranks together."""
    parts, logps = branches(turns, max_tokens), [torch.zeros(n) for n in sizes(model, turns)]
    for n in progress(what, range(RANK, len(parts) + -len(parts) % WORLD, WORLD)):
        part = parts[min(n, len(parts) - 1)]  # every rank as often
        for i, x in zip(part, action_logps(model, [turns[i] for i in part])):
            logps[i] = x if n < len(parts) else logps[i]
    if isinstance(model, FSDPModule):
        model.reshard()  # else the root's weights stay gathered, and an optimizer made now would not hold its shards
    if WORLD > 1 and turns:
        dist.all_reduce(flat := torch.cat(logps))
        logps = list(flat.split([len(x) for x in logps]))
    return logps


# --- turns: chat templates in, token ids out --------------------------------------------------------------------------

@functools.cache
def control_tokens(tokenizer):
    """Tokens that steer the model: the special ones, and others that the template spells (Qwen3's <think>)."""
    return [t.content for t in tokenizer.added_tokens_decoder.values()
            if t.special or t.content.strip() and t.content in tokenizer.chat_template]


def render(tokenizer, messages, thinking=0):
    """Token ids of a conversation up to where the assistant's next message starts.

    The template's own control tokens are the only ones: one that is spelled out inside a message stays plain text.
    thinking: 1 leaves templates that know `enable_thinking` to their models' thinking, 0 switches it off. What a
    message has under PICTURE, a key that no data can have, are ids that stand after its content as they are.
    """
    control = ["\ue000", "\ue002", *control_tokens(tokenizer)]
    spelled = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))))
    hide = lambda text: spelled.sub(lambda m: f"\ue000{control.index(m[0])}\ue001", text)
    said = [{"role": m["role"], "content": hide(m["content"]) + f"\ue002{t}\ue003" * bool(m.get(PICTURE))}
            for t, m in enumerate(messages)]
    try:
        text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True,
                                             enable_thinking=bool(thinking))
    except TemplateError as e:
        fail(f"this --model's chat template takes no such conversation, {' '.join(m['role'] for m in said)}: {e}")
    ids, plain = [], lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    parts = re.split("([\ue000\ue002])(\\d+)[\ue001\ue003]", text)  # text, what is hidden, its index, text, ...
    for before, what, n in zip(parts[::3], [*parts[1::3], None], [*parts[2::3], None]):
        ids += plain(before)
        if what == "\ue000":
            ids += plain(control[int(n)][:1]) + plain(control[int(n)][1:])
        elif what:
            ids += messages[int(n)][PICTURE]
    return ids


def plain_ids(tokenizer, text):
    """Token ids of text in which nothing is a special token."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


@functools.cache
def end_of_turn(tokenizer):
    """Token ids with which the template closes an assistant message, up to and with its first control token."""
    mark = "\ue000"
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}],
                                         tokenize=False)
    ids = tokenizer(text.rpartition(mark)[2], add_special_tokens=False)["input_ids"]
    control = [i for i, t in enumerate(ids) if t in tokenizer.added_tokens_decoder]
    return ids[:control[0] + 1] if control else [tokenizer.eos_token_id]


def thinking_flag(record):
    """Whether the record's dialogue was sampled with --thinking 1."""
    return record.get("meta", {}).get("thinking", 0)


def raw_text(message):
    """What the agent wrote in a message or candidate, maybe nothing: `output`, else `content`."""
    return message.get("output") or message.get("content") or ""


def action_ids(tokenizer, message, sampled=True, picture=()):
    """Ids of an action: the stored `token_ids`, what was really sampled; where there are none (demonstrations,
    published data), its raw text and the end of turn.

    sampled=False: a critic judges it as text. It is tokenised anew; picture's ids stand behind it.
    """
    if sampled and message.get("token_ids"):
        if max(message["token_ids"]) >= len(tokenizer):
            fail("token_ids in the records are not of this --model's tokenizer: take the model that sampled them")
        return tuple(message["token_ids"])
    return (*plain_ids(tokenizer, raw_text(message)), *picture, *end_of_turn(tokenizer))


def turns_of(tokenizer, record):
    """[(prompt_ids, action_ids)] of the assistant messages in a record's dialogue_history, in order."""
    history = record["dialogue_history"]
    return [(tuple(render(tokenizer, history[:t], thinking_flag(record))), action_ids(tokenizer, m))
            for t, m in enumerate(history) if m["role"] == "assistant"]


# --- loading, sharding, saving ----------------------------------------------------------------------------------------

def find_model(path, weights=False):
    """(directory, tokenizer, config) of a Hugging Face directory or hub name, or one line on why not.

    From the hub it fetches the weights only where they are asked for.
    """
    try:
        if not os.path.isdir(path):
            from huggingface_hub import snapshot_download
            wanted = ["*.json", "*.jinja", "*.model", *["*.safetensors"] * weights]
            path = snapshot_download(path, allow_patterns=wanted)
        config, tokenizer = (x.from_pretrained(path, trust_remote_code=False) for x in (AutoConfig, AutoTokenizer))
    except (OSError, ValueError) as e:
        fail(f"no model at {path!r}: {str(e).splitlines()[0]}")
    if weights and not glob.glob(os.path.join(glob.escape(path), "*.safetensors")):
        fail(f"no weights at {path!r}: only safetensors files are read")
    if not tokenizer.chat_template:
        fail(f"the tokenizer of {path!r} has no chat template: take the instruction-tuned model")
    return path, tokenizer, config


def weights_digest(directory):
    """A short hash of the weights in a directory's safetensors files; None where there are none.

    Of each tensor it takes name, type, shape and 4 KiB at the start, middle and end, so 16 GB cost
    a thousand small reads. It sees training, which moves every tensor, but no edit between these
    places. The number and order of the files do not matter.
    """
    parts = []
    for path in glob.glob(os.path.join(glob.escape(directory), "*.safetensors")):
        with fail_on_error(f"{path} is damaged", ""), open(path, "rb") as f:
            length, = struct.unpack("<Q", f.read(8))
            tensors = json.loads(f.read(length))
            tensors.pop("__metadata__", None)
            for name, tensor in tensors.items():
                begin, end = (8 + length + offset for offset in tensor["data_offsets"])
                what = [name, tensor["dtype"], tensor["shape"]]
                for at in (begin, (begin + end) // 2 - 2048, end - 4096):
                    f.seek(at := max(begin, at))
                    what.append(f.read(min(4096, end - at)))
                parts.append(what)
    return digest(sorted(parts)) if parts else None


def base_digest(path):
    """weights_digest of a --model by directory or hub name, on rank 0 alone."""
    return None if RANK else weights_digest(find_model(path, weights=True)[0])


def load_options(args, device):
    """The flags of utils.machine_flags as `load` and `shard` take them."""
    gpu = device.type == "cuda"
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(args.dtype, torch.bfloat16 if gpu else torch.float32)
    return {"dtype": dtype, "replicate": args.replicate, "offload": args.offload,
            "recompute": gpu if args.recompute is None else args.recompute}


def load_lm(path, device):
    """(transformers causal LM, tokenizer) to sample with."""
    path, tokenizer, _ = find_model(path, weights=True)
    lm = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float32,
                                              trust_remote_code=False, use_safetensors=True)
    return lm.to(device), tokenizer


def load(path, device="cpu", attention="auto", dtype=torch.float32, head=False, **sharding):
    """(TreeLM, tokenizer) to score with, its weights in dtype; with `sharding`, to train: see `shard`.

    The weights go from the safetensors files straight to where they belong: no rank reads what it does not keep.
    """
    path, tokenizer, config = find_model(path, weights=True)
    c, make, vision = config.get_text_config(), AutoModelForCausalLM, {}
    if has_vision(config):
        if config.model_type not in ("qwen2_vl", "qwen2_5_vl"):
            fail(f"{path!r} looks at pictures in a way not known here; Qwen2-VL and Qwen2.5-VL are")
        make, vision = AutoModelForImageTextToText, {"vision_config": "sdpa"}
    if any(t != "full_attention" for t in getattr(c, "layer_types", None) or []) or \
            getattr(c, "final_logit_softcapping", None) or getattr(c, "attn_logit_softcapping", None) or \
            (not getattr(c, "layer_types", None) and getattr(c, "sliding_window", None)):
        fail(f"{path!r} uses sliding windows or soft caps, which the packed forward does not compute")
    device = torch.device(device)
    attention = "tree_" + pick_attention(attention, device, dtype)
    with torch.device("meta"):
        lm = make.from_config(config, dtype=torch.float32 if sharding else dtype,
                              attn_implementation={"text_config": attention, **vision} if vision else attention)
    if os.path.exists(os.path.join(path, "generation_config.json")):
        lm.generation_config = GenerationConfig.from_pretrained(path)
    model = TreeLM(lm, device, head)
    if sharding:
        shard(model, dtype, **sharding)
    model.to_empty(device="cpu" if sharding.get("offload") else device)
    lm.tie_weights()
    for module in lm.modules():
        for name, child in module.named_children():
            if "inv_freq" in child._buffers:  # computed, not stored in files
                with torch.device(device):
                    setattr(module, name, type(child)(config=child.config))
    read_weights(model, path)
    return model, tokenizer


def weights(model):
    """{name in Hugging Face files: parameter}, a tied one once. Qwen2-VL's files name its parts in an older way."""
    in_file = lambda name: name.removeprefix("lm.").replace("model.language_model.", "model.").replace(
        "model.visual.", "visual.")
    return {in_file(name): p for name, p in model.named_parameters()}


def read_weights(model, path):
    """Fills the parameters, wherever they lie, from the safetensors files of a directory; a new head with noise."""
    wanted, reader = weights(model), dcp.HuggingFaceStorageReader(path)
    if model.score is not None and "score.weight" not in reader.read_metadata().state_dict_metadata:
        p = wanted.pop("score.weight")
        new = torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) / p.shape[1] ** 0.5
        with torch.no_grad():
            p.copy_(distribute_tensor(new, p.device_mesh, p.placements) if isinstance(p, DTensor) else new)
    try:
        with torch.no_grad():
            dcp.load({name: p.detach() for name, p in wanted.items()}, storage_reader=reader,
                     no_dist=not dist.is_initialized())
    except Exception as e:
        fail(f"the weights in {path!r} are not those of its config.json: {str(e).splitlines()[-1]}")


def recompute_layers(model):
    """Layers keep their inputs alone, and are computed again in the backward pass."""
    for layer in model.layers():
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def shard(model, dtype, replicate=1, offload=0, recompute=0):
    """FSDP2: fp32 weights, gradients and moments spread over all processes, computation in dtype.

    replicate: so many copies of the model, each spread over WORLD / replicate processes (HSDP). offload: weights and
    moments rest in CPU memory. recompute: a layer's activations are computed again in the backward pass, not kept.
    """
    model.dtype = dtype
    if recompute:
        recompute_layers(model)
    if WORLD == 1 and dtype == torch.float32 and not offload:
        return model
    if WORLD % replicate:
        fail(f"--replicate {replicate} does not divide the {WORLD} processes")
    mesh = init_device_mesh(model.device.type, (replicate, WORLD // replicate), mesh_dim_names=("replicate", "shard"))
    how = {"mesh": mesh if replicate > 1 else mesh["shard"],
           "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
           "offload_policy": CPUOffloadPolicy(pin_memory=model.device.type == "cuda") if offload else OffloadPolicy()}
    for module in (*model.layers(), model):
        fully_shard(module, **how)
        module.set_gradient_divide_factor(1.0)  # gradients are summed: each loss is divided by the global count
        module.set_force_sum_reduction_for_comms(True)
    return model


def gathered(tensor):
    """A parameter or gradient gathered from all ranks, which must all call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def save(model, tokenizer, out):
    """Writes a Hugging Face directory: weights as safetensors in the dtype they compute in, tokenizer, template."""
    state = {}
    for name, p in weights(model).items():
        p = gathered(p.detach())
        if RANK == 0:
            state[name] = p.to("cpu", model.dtype)
    with writing(out):
        if RANK == 0:
            model.lm.generation_config.eos_token_id = sorted({end_of_turn(tokenizer)[-1], tokenizer.eos_token_id})
            model.lm.save_pretrained(out, state_dict=state)
            model.lm.config.dtype = model.dtype  # which save_pretrained takes to be that of the fp32 weights
            model.lm.config.save_pretrained(out)
            tokenizer.save_pretrained(out)
            model.pictures and model.pictures.processor.save_pretrained(out)


# --- checkpoints of a run: weights and moments, as sharded safetensors that any number of processes reads -------------

def training_state(model, optimizer, step):
    """{name: tensor} of weights and AdamW's moments, which it makes where the optimizer has not stepped yet."""
    state = {}
    for name, p in weights(model).items():
        at = optimizer.state[p]
        if not at:
            at.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            at["step"] = torch.zeros((), device=p.device if optimizer.defaults["fused"] else "cpu")
        at["step"].fill_(step)
        state |= {name: p.detach(), "exp_avg." + name: at["exp_avg"], "exp_avg_sq." + name: at["exp_avg_sq"]}
    return state


def save_checkpoint(model, optimizer, out, step):
    """Writes out/checkpoint-STEP, complete or not at all, then removes the one before."""
    path = os.path.join(out, f"checkpoint-{step}")
    part, counts = path + ".part", token_counts()
    if RANK == 0:
        remove(part)
    barrier()
    with writing(path, part):
        dcp.save(training_state(model, optimizer, step),
                 storage_writer=dcp.HuggingFaceStorageWriter(part, save_distributed=True))
        if RANK == 0:
            with open(os.path.join(part, "counts.json"), "w") as f:
                json.dump(counts, f)
            for name in os.listdir(part):  # on the disk before the name is: a machine may lose its power
                with open(os.path.join(part, name), "rb") as f:
                    os.fsync(f.fileno())
            os.replace(part, path)
    drop_checkpoints(out, keep=step)
    barrier()  # whoever leaves now leaves it whole


def restore(model, optimizer, log):
    """Puts in place what the run in log's directory had reached: its last checkpoint, or its final model."""
    if log.trained:
        read_weights(model, log.out)
        before = log.trained
    elif log.step:
        path = os.path.join(log.out, f"checkpoint-{log.step}")
        with reading(path), torch.no_grad():
            for file in glob.glob(os.path.join(glob.escape(path), "*.safetensors")):
                safe_open(file, "pt").__exit__(None, None, None)  # it says what is wrong, where torch prints tracebacks
            dcp.load(training_state(model, optimizer, log.step), storage_reader=dcp.HuggingFaceStorageReader(path))
            with open(os.path.join(path, "counts.json")) as f:
                before = json.load(f)
    else:
        return
    COUNT.update({key: 0 if RANK else before[key] for key in COUNT})


def reference_logps(model, turns, max_tokens, out):
    """score() under the weights that training starts from, kept in `out` for a run that resumes."""
    if model.score is not None or not turns:  # a head's values stand for themselves
        return [torch.zeros(1)] * len(turns)
    path = os.path.join(out, "reference.safetensors")
    if from_rank_0(lambda: os.path.exists(path)):
        with reading(path):
            return list(load_file(path)["logps"].split([len(action) for _, action in turns]))
    logps = score(model, turns, max_tokens, "reference")
    if RANK == 0:
        with writing(path, path + ".part"):
            save_file({"logps": torch.cat(logps)}, path + ".part")
            os.replace(path + ".part", path)
    return logps


# --- --dry_run: what a run would take ---------------------------------------------------------------------------------

class ShapesOnly(torch.autograd.Function):
    """What flash attention keeps and returns, without its numbers: the kernel "tree_meta"."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


AttentionInterface.register("tree_meta", functools.partial(
    tree_attention, lambda q, k, v, runs, scale: ShapesOnly.apply(q, k, v)))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors made inside it, but for views of `known` ones: `peak` is the most at once."""

    def __init__(self, known=()):
        super().__init__()
        self.now, self.peak, self.seen = 0, 0, weakref.WeakSet(x.untyped_storage() for x in known)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage()) not in self.seen:
                self.seen.add(storage)
                weakref.finalize(storage, self.free, storage.nbytes())
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
        return out

    def free(self, n):
        self.now -= n


def dry_run(args, config, steps, scored):
    """What a run on args.dry_run GPUs would take, a dict. steps: [[Pair]]; scored: [[turn]].

    FLOPs are 2 a weight and token, 4 L H D a token and key; three times that for a token trained on, and once more
    where layers or branches are computed again; hours are at 400 TFLOP/s a GPU. FSDP sends the weights for both passes
    and the fp32 gradients of each micro-batch; at 300 GB/s. Both rates are guesses of an H100 with NVLink. Memory, GB
    a GPU: fp32 weights, gradients and moments, spread; the root's weights and a layer with its gradients, as FSDP gathers
    them; activations and the head's gradient, counted on the meta device for the largest tree. The total is of these, or
    of when a backward pass ends, with the root's gradients in place of what is gathered and of activations.
    """
    dtype, again = {"fp32": torch.float32}.get(args.dtype, torch.bfloat16), args.recompute != 0
    if has_vision(config):
        fail("--dry_run does not know models that look at pictures")
    if not steps:
        fail("--dry_run: there are no steps to take")
    with torch.device("meta"):
        model = TreeLM(AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="tree_meta"),
                       head=getattr(args, "head", "logratio") != "logratio")
    if again:
        recompute_layers(model)
    width, size = dtype.itemsize, lambda module: sum(p.numel() for p in module.parameters())
    total, layer, c = size(model), size(model.layers()[0]), model.config
    has_head = model.score is not None
    body, head = layer * c.num_hidden_layers, 0 if has_head else c.vocab_size * c.hidden_size
    heads = c.num_attention_heads * (getattr(c, "head_dim", None) or 0) or c.hidden_size
    attend = 4 * c.num_hidden_layers * heads

    flops = tokens = rounds = 0
    largest, most_tokens = None, 0
    for batch in steps:
        parts = [turns_in(part) for part in micro_batches(batch, args.max_tokens)]
        trees = [[[turns[i] for i in b] for b in branches(turns, args.max_tokens)] for turns in parts]
        rounds += -(-sum(map(len, trees)) // args.dry_run)
        for tree, twice in ((tree, len(part) > 1) for part in trees for tree in part):
            (n, keys), actions = tree_size(tree), sum(len(action) for _, action in tree)
            flops += (2 * body * n + attend * keys) * (3 + again + twice) + 2 * head * actions * (4 + twice)
            tokens += n * (1 + twice)
            largest, most_tokens = (tree, n) if n > most_tokens else (largest, most_tokens)
    scoring = [tree_size([turns[i] for i in b]) + (sum(len(turns[i][1]) for i in b),)
               for turns in scored for b in branches(turns, args.max_tokens)]
    flops += sum(2 * body * n + attend * keys + 2 * head * actions for n, keys, actions in scoring)
    sent = (rounds * (2 * width + 4) + -(-len(scoring) // args.dry_run) * width) * total

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))  # FSDP takes it away
    with LiveBytes(model.parameters()) as live:
        tree = pack(largest, "meta")
        n = most_tokens if has_head else len(set(torch.cat(pack(largest).actions).tolist()))
        model(tree, torch.empty(n, dtype=torch.long, device="meta"), None).sum().backward()
    root = total - body
    gb = {"weights_gradients_moments": 16 * total * args.replicate / args.dry_run,
          "gathered": root * width + layer * (3 * width + 4), "activations": live.peak}
    gb["total"] = gb["weights_gradients_moments"] + max(gb["gathered"] + gb["activations"], root * (width + 4))
    short = lambda x: float(f"{x:.3g}")
    return {"gpus": args.dry_run, "parameters": total, "steps": len(steps), "examples": sum(map(len, steps)),
            "training_tokens": tokens, "scoring_tokens": sum(n for n, *_ in scoring), "largest_tree": most_tokens,
            "petaflops": short(flops / 1e15), "hours": {"computing": short(flops / 400e12 / args.dry_run / 3600),
                                                        "sending": short((args.dry_run > 1) * sent / 300e9 / 3600)},
            "gb_a_gpu": {name: short(x / 1e9) for name, x in gb.items()}}


def tiny(records, seed, pieces):
    """(TreeLM, tokenizer): a from-scratch Llama of about 260k parameters.

    pieces: a regex of what is one token, where it stands twice in the records. Other text still
    goes in and out unchanged, byte by byte.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    counts = {}
    for r in records:
        for m in r["dialogue_history"]:
            for piece in re.findall(pieces, m.get("output") or m["content"]):
                counts[piece] = counts.get(piece, 0) + 1
    special = ["<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    vocab = [(t, 0.0) for t in special] + [(f"<0x{b:02X}>", -20.0) for b in range(256)]
    vocab += [(w, -1.0) for w in sorted(counts) if counts[w] > 1]  # equal scores: the fewest pieces win
    t = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    t.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), "isolated")
    t.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    t.add_special_tokens([AddedToken(s, normalized=False) for s in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<|begin|>", eos_token="<|end|>",
                                        pad_token="<|pad|>", clean_up_tokenization_spaces=False,
                                        additional_special_tokens=special[3:])
    tokenizer.chat_template = ("{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>"
                               "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
    torch.manual_seed(seed)
    # the usual initializer_range of 0.02 never learns to copy a slot's value into the code at this size
    config = LlamaConfig(vocab_size=len(vocab), hidden_size=96, intermediate_size=256, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=16384,
                         tie_word_embeddings=True, initializer_range=0.08,
                         bos_token_id=1, eos_token_id=2, pad_token_id=0, attn_implementation="tree_sdpa")
    return TreeLM(LlamaForCausalLM(config)), tokenizer
