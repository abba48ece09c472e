"""What the trainers' steps and scores cost, beside other ways to compute the same.

    python tests/bench_train.py                                   # some minutes of one core
    torchrun --nproc_per_node=2 tests/bench_train.py --jobs dpo critic --repeats 5

Records of the paper's shape: a task has four trajectories of six turns, a turn 16 candidates and
four pairs; texts are random words. The trainers' own functions read them and make the batches. A
step is the body of the trainers' loop: pack, forward, loss, backward. Jobs are the trainers' losses
("dpo 24": pairs of a trajectory, "dpo 96": of a task), and scoring, log-probs of all 17 actions a
turn without gradient. Rivals read the same pairs and have the same weights:

official   a pair is a batch of two padded sequences, all logits, pi_ref on it at every step
kv cache   scoring: a prompt once, with a KV cache; then all its actions in one padded batch, with
           the head on actions alone

time, least, most: of repeats in turn, the slowest rank's CPU time over that of ours, which includes
pi_ref's share, by the epochs that it serves. tokens: the same of computed tokens, those of plan.py,
with a backward pass as two forwards; of_bound is time / tokens. differs: the relative difference of
losses and gradients, or of log-probs, as whole vectors. Exits with 1 if it is more than 1e-4.
"""
import contextlib
import functools
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TQDM_DISABLE"] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import toy  # noqa: E402
import train_critic  # noqa: E402
import train_policy  # noqa: E402
from model import (action_logps, batches, gathered, head_logps, load, score,  # noqa: E402
                   turns_in)
from plan import count_tokens, plan  # noqa: E402
from timing import in_turn, parser, ratio, show  # noqa: E402
from utils import (RANK, WORLD, fail, from_rank_0, init_distributed, leave_group,  # noqa: E402
                   sum_over_ranks)

#               module, flags, pairs a step, epochs that pi_ref's log-probs serve
JOBS = {"dpo": (train_policy, [], 8, 1),
        "dpo 24": (train_policy, [], 24, 1),
        "dpo 96": (train_policy, [], 96, 1),
        "mtdpo": (train_policy, ["--loss", "mtdpo"], 8, 4),
        "rft": (train_policy, ["--loss", "rft"], 8, 4),
        "critic": (train_critic, ["--held_out", "0"], 8, 4)}
#           width, MLP, layers, heads, KV heads, head size, vocabulary, tied
SHAPES = {"tiny": (64, 128, 1, 2, 1, 32, 2048, True),
          "small": (384, 1024, 2, 6, 2, 64, 2048, False),
          "1b": (2048, 8192, 16, 32, 8, 64, 128256, True),
          "3b": (3072, 8192, 28, 24, 8, 128, 128256, True),
          "8b": (4096, 14336, 32, 32, 8, 128, 128256, False)}
WORDS, TURNS, CANDIDATES, TREE_TOKENS = 1700, 6, 16, 16384


def get_args():
    p = parser(__doc__, repeats=3)
    usual = [*(job for job in JOBS if job != "dpo 96"), "scoring"]
    p.add_argument("--jobs", nargs="+", choices=[*JOBS, "scoring"], default=usual)
    p.add_argument("--shape", choices=SHAPES, default="small", help="of the model: random weights")
    return p.parse_args()


# --- data and models ------------------------------------------------------------------------------

def make_data(folder, tasks, shape):
    """Writes records.jsonl and a model with random weights, whose tokenizer has a token a word.

    Returns the folder.
    """
    r = random.Random(0)

    def text(low, high):
        return "".join(f" w{r.randrange(WORDS)}" for _ in range(r.randint(low, high)))

    with open(f"{folder}/records.jsonl", "w") as f:
        for n in range(tasks):
            task = {"id": str(n), "problem_description": text(300, 500),
                    "ground_truth": text(100, 450)}
            for reward in (1.0, 1.0, 0.6, 0.2):
                history = [{"role": "user", "content": task["problem_description"]}]
                for _ in range(TURNS):
                    candidates = [{"output": text(20, 100), "advantage": r.random()}
                                  for _ in range(CANDIDATES)]
                    history.append({"role": "assistant", "content": text(20, 100),
                                    "candidates": candidates})
                    history.append({"role": "user", "content": text(60, 160)})
                f.write(json.dumps({"task": task, "reward": reward,
                                    "dialogue_history": history[:-1]}) + "\n")
    words = "".join(f" w{n}" for n in range(WORDS)) * 2  # a tokenizer wants to see a word twice
    says = [{"dialogue_history": [{"role": "assistant", "content": words}]}]
    toy.tiny(says, 0, r" ?\w+|\W")[1].save_pretrained(folder)
    width, mlp, layers, heads, kv, size, vocab, tied = SHAPES[shape]
    config = LlamaConfig(vocab_size=vocab, hidden_size=width, intermediate_size=mlp, head_dim=size,
                         num_hidden_layers=layers, num_attention_heads=heads,
                         num_key_value_heads=kv, tie_word_embeddings=tied, pad_token_id=0,
                         max_position_embeddings=16384, initializer_range=width ** -0.5)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        lm = LlamaForCausalLM(config)
    lm.to(torch.bfloat16 if torch.cuda.is_available() else None).save_pretrained(folder)
    return folder


def read_groups(job, folder):
    """The groups of pairs, as the job's trainer reads them; for scoring the critic's turns."""
    module, flags, _, _ = JOBS["critic" if job == "scoring" else job]
    args = module.get_args(["--model", folder, "--out", folder, *flags])
    with open(f"{folder}/records.jsonl") as f, patch("sys.stdin", f):
        if module is train_policy:
            return train_policy.prepare(args)[0]
        _, (ref_of, train, _) = train_critic.prepare(args)
    return list(ref_of) if job == "scoring" else train


@torch.no_grad()
def load_moved(folder, device, **how):
    """model.load's model, for a policy: its weights have moved a little from pi_ref's."""
    model, _ = load(folder, device, **how)
    for n, p in enumerate(model.parameters()):
        own = p.to_local() if hasattr(p, "to_local") else p  # a shard's numbers are its own
        generator = torch.Generator(own.device).manual_seed(1000 * RANK + n)
        own.add_(torch.empty_like(own).normal_(0, own.std(), generator=generator), alpha=0.1)
    return model


# --- steps: each leaves gradients and returns the loss --------------------------------------------

def loss_of(job, pairs, logps, ref, batch):
    """The share of these pairs in the loss of a step, by the trainer. logps, ref: {turn: (L,)}."""
    module, flags, _, _ = JOBS[job]
    args = module.get_args(["--out", "x", *flags])
    size = len(batch)
    if job == "rft":
        size = sum(len(action) for pair in batch for _, action in pair.chosen)
    return sum(module.pair_loss(args, pair, logps, ref)[0] for pair in pairs) / size


def our_step(model, job, batch, ref):
    """As the trainers do it; on all ranks the same loss."""
    turns = turns_in(batch)
    logps = dict(zip(turns, action_logps(model, turns, TREE_TOKENS)))
    loss = loss_of(job, batch, logps, ref, batch)
    loss.backward()
    return loss.item()


@contextlib.contextmanager
def plain(*models):
    """Inside, a model's forward takes padded ids (B, T), without a tree; gives (B, T-1) logps."""
    def forward(model, ids):
        logits = model.lm(input_ids=ids, use_cache=False).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(2, ids[:, 1:, None]).sum(2)  # no view, for FSDP

    kernels = [model.config._attn_implementation for model in models]
    for model in models:
        model.config._attn_implementation = "sdpa"
        model.forward = functools.partial(forward, model)
    yield
    for model, kernel in zip(models, kernels):
        model.config._attn_implementation = kernel
        del model.forward


def pad(seqs, device):
    """(B, T) ids, padded on the right: with a causal mask, nobody sees the padding."""
    length = max(map(len, seqs))
    return torch.tensor([[*map(ord, seq), *[0] * (length - len(seq))] for seq in seqs],
                        device=device)


def official_step(model, job, batch, ref_model):
    """By the released procedure, pair by pair; each rank takes its share of them."""
    total = 0.0
    for pair in batch[RANK::WORLD]:
        sides = [side for side in pair[:2] if side]
        ids = pad([side[-1][0] + side[-1][1] for side in sides], model.device)

        def logps_of(rows):
            return {(prompt, action): row[len(prompt) - 1:][:len(action)].cpu()
                    for row, side in zip(rows, sides) for prompt, action in side}

        with plain(model, ref_model):
            with torch.no_grad():
                ref = logps_of(ref_model(ids)) if job != "rft" else {}
            loss = loss_of(job, [pair], logps_of(model(ids)), ref, batch)
            loss.backward()
        total += loss.item()
    return sum_over_ranks(total)


# --- scores ---------------------------------------------------------------------------------------

@torch.no_grad()
def kv_cache_scores(model, turns):
    """([(L,)] of the turns, how many tokens are computed).

    Each prompt once, then its actions in a padded batch on its KV cache.
    """
    logps, by_prompt, decoder, tokens = {}, {}, model.lm.model, 0
    for prompt, action in turns:
        by_prompt.setdefault(prompt, []).append(action)
    with plain(model):
        for prompt, actions in by_prompt.items():
            first = decoder(input_ids=pad([prompt], model.device), use_cache=True)
            cache, ids = first.past_key_values, pad(actions, model.device)
            for layer in cache.layers:
                layer.keys = layer.keys.expand(len(actions), -1, -1, -1)
                layer.values = layer.values.expand(len(actions), -1, -1, -1)
            rest = decoder(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True)[0]
            tokens += len(prompt) + ids[:, :-1].numel()
            hidden = torch.cat([first[0][:, -1:].expand(len(actions), -1, -1), rest], 1)
            lengths = torch.tensor([len(action) for action in actions], device=ids.device)
            real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
            flat = head_logps(hidden[real], model.lm.lm_head.weight, None, ids[real],
                              model.config).cpu()
            for action, x in zip(actions, flat.split(lengths.tolist())):
                logps[prompt, action] = x
    return [logps[turn] for turn in turns], tokens


# --- measuring ------------------------------------------------------------------------------------

def clock(device):
    """Seconds: CPU time, on a GPU wall time."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def max_over_ranks(number):
    """The largest number of all ranks, which must all call this."""
    number = torch.tensor(float(number))
    if WORLD > 1:
        dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()


def timed(device, ways, repeats):
    """in_turn, with seconds of the slowest rank."""
    seconds, gave = in_turn(ways, repeats, functools.partial(clock, device))
    return {name: list(map(max_over_ranks, times)) for name, times in seconds.items()}, gave


def difference(ours, theirs):
    """Norm of the difference of two lists of tensors, over that of the first."""
    def norm(tensors):
        return sum(x.double().norm().item() ** 2 for x in tensors) ** 0.5

    return norm(x.double() - y.double() for x, y in zip(ours, theirs)) / norm(ours)


def row(name, seconds, ours, tokens, differs):
    """A row. seconds, ours: of each repeat; tokens: the rival's over ours."""
    middle, least, most = ratio(seconds, ours)
    return {"row": f"{name}, {WORLD} ranks", "tokens": tokens, "time": middle, "least": least,
            "most": most, "of_bound": middle / tokens, "differs": differs}


def tokens_of_step(job, config, batch, turns):
    """Tokens of the released procedure over those of our slowest rank, by plan.py.

    It computes two sequences a pair, the turns of a side in one, padded to the longer one.
    """
    module, flags, _, epochs = JOBS[job]
    planned = plan(module.get_args(["--out", "x", *flags]), WORLD, config, [batch], turns)
    ours = 3 * planned["tokens"]["slowest_rank"] + planned["reference_tokens"] / epochs
    theirs = 0
    for pair in batch:
        lengths = [count_tokens(side) for side in (pair.chosen, pair.rejected) if side]
        theirs += len(lengths) * max(lengths)
    return theirs * (4 if turns else 3) / ours


def compare_steps(model, ref_model, job, batch, repeats):
    """The row of a step of a job."""
    turns = turns_in(batch) if job != "rft" else []
    ref = dict(zip(turns, score(ref_model, turns, TREE_TOKENS)))

    def step(way, *args):
        """[loss, gradient, ...]; the model has no gradients any more."""
        got = [torch.tensor(way(model, job, batch, *args))]
        got += [gathered(p.grad) for p in model.parameters()]
        model.zero_grad()
        return got

    ways = {"ours": functools.partial(step, our_step, ref),
            "official": functools.partial(step, official_step, ref_model),
            "pi_ref": functools.partial(score, ref_model, turns, TREE_TOKENS)}
    ways["official"]()  # to warm up
    seconds, gave = timed(model.device, ways, repeats)
    share = 1 / JOBS[job][3]
    ours = [a + share * b for a, b in zip(seconds["ours"], seconds["pi_ref"])]
    tokens = tokens_of_step(job, model.config, batch, turns)
    differs = max(difference(gave["ours"][part], gave["official"][part])
                  for part in (slice(1), slice(1, None)))
    return row(f"{job}, official", seconds["official"], ours, tokens, differs)


def compare_scoring(model, turns, repeats):
    """The row of log-probs of these turns, beside the KV cache."""
    ways = {"ours": functools.partial(score, model, turns, TREE_TOKENS),
            "kv cache": functools.partial(kv_cache_scores, model, turns)}
    seconds, gave = timed(model.device, ways, repeats)
    theirs, tokens = gave["kv cache"]
    return row("scoring, kv cache", seconds["kv cache"], seconds["ours"],
               tokens / count_tokens(turns), difference(gave["ours"], theirs))


def measure(args, folder, device):
    """Rows of all jobs. Scoring takes two trajectories, on one rank."""
    model, (ref_model, _) = load_moved(folder, device, recompute=0), load(folder, device)
    for job in args.jobs:
        if job != "scoring":
            batch = batches(read_groups(job, folder), JOBS[job][2], seed=(0, 0))[0]
            yield compare_steps(model, ref_model, job, batch, args.repeats)
        elif WORLD == 1:
            some = read_groups(job, folder)[:2 * TURNS * (CANDIDATES + 1)]
            yield compare_scoring(ref_model, some, args.repeats)


def main():
    args = get_args()
    torch.set_num_threads(1)
    device, rows = init_distributed(), []
    with tempfile.TemporaryDirectory() as folder:
        folder = from_rank_0(lambda: make_data(folder, 8, args.shape))
        for line in measure(args, folder, device):
            rows.append(line)
            show(line)
    leave_group()
    wrong = [r["row"] for r in rows if not r["differs"] < 1e-4]
    if wrong:
        fail(f"not the same work: {wrong}")


if __name__ == "__main__":
    main()
