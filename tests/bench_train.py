"""Benchmarks the trainers' steps and scores against other implementations, and compares results.

    python tests/bench_train.py                                   # some minutes of one core
    torchrun --nproc_per_node=2 tests/bench_train.py --jobs dpo critic --repeats 5
    torchrun --nproc_per_node=8 tests/bench_train.py --out rows.json            # one GPU per rank
    python tests/bench_train.py --shapes 1b                       # five minutes of an H100
    python tests/bench_train.py --shapes tiny --ways 01 11 10     # a rehearsal on a CPU

The data has the paper's shape: four trajectories per task, six turns per trajectory, 16 candidates
and four pairs per turn. Texts are random words, weights are random. The trainers' own functions
read the records and make the batches; on GPUs a batch has a job's number of pairs for every rank.
Jobs are the trainers' losses ("dpo 24": a batch of a whole trajectory, "dpo 96": of a whole task),
and scoring, the log-probs of all 17 actions per turn without gradient. If a row fails, it holds the
error, and the script lists all failed rows at the end and exits with status 1.

matmul     TFLOP/s of large matrix products, the peak that of_peak refers to
oracle     relative errors of log-probs and gradients against separate forwards in fp32: of the tree
           in 16 bits (on a CPU: 32), and of separate forwards in 16 bits, which should be similar
load       loads the model, with --compile C --recompute R ("C1 R0"), and pi_ref
JOB        the body of the trainers' loop, without the optimizer: seconds of the first run, in which
           torch compiles; tokens per second and rank; share of the peak (6 FLOPs per weight and
           token); on a GPU peak memory, and plan.py's prediction. The first of --ways also has a
           rival: the released procedure on the same pairs and weights, which makes each pair a
           batch of two padded sequences, computes all logits, and runs pi_ref at every step
scoring    tokens per second of two trajectories

time, least, most: the rival's seconds over ours (median, minimum, maximum of the repeats), in CPU
time on a CPU, of the slowest rank. Ours includes pi_ref's time, divided by the epochs that reuse
its log-probs. bound: the same ratio of computed tokens, a backward pass counted as two forwards.
differs: relative difference of losses and gradients, as whole vectors; in fp32, a row fails if it
exceeds 1e-4.
"""
import contextlib
import functools
import gc
import json
import os
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TQDM_DISABLE"] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import toy  # noqa: E402
import train_critic  # noqa: E402
import train_policy  # noqa: E402
from model import (Turn, all_batches, backward, forward, load, turn_logps,  # noqa: E402
                   turns_in)
from plan import count_tokens, plan  # noqa: E402
from timing import parser, ratio, show, time_alternately  # noqa: E402
from utils import RANK, WORLD, fail, from_rank_0, init_distributed, sum_over_ranks  # noqa: E402

#               module, flags, pairs per step, epochs that reuse pi_ref's log-probs
JOBS = {"dpo": (train_policy, [], 8, 1),
        "dpo 24": (train_policy, [], 24, 1),
        "dpo 96": (train_policy, [], 96, 1),
        "mtdpo": (train_policy, ["--loss", "mtdpo"], 8, 4),
        "rft": (train_policy, ["--loss", "rft"], 8, 4),
        "critic": (train_critic, ["--held_out", "0"], 8, 4)}
#           width, MLP, layers, heads, KV heads, head size, vocabulary, tied embeddings
SHAPES = {"tiny": (64, 128, 1, 2, 1, 32, 2048, True),
          "small": (384, 1024, 2, 6, 2, 64, 2048, False),
          "1b": (2048, 8192, 16, 32, 8, 64, 128256, True),
          "3b": (3072, 8192, 28, 24, 8, 128, 128256, True),
          "8b": (4096, 14336, 32, 32, 8, 128, 128256, False)}
WORDS, TURNS, CANDIDATES, TREE_TOKENS = 1700, 6, 16, 16384
GPU = torch.cuda.is_available()


def get_args():
    p = parser(__doc__, repeats=3)
    jobs = ["dpo 24", "critic", "dpo 96"] if GPU else [job for job in JOBS if job != "dpo 96"]
    p.add_argument("--jobs", nargs="+", choices=[*JOBS, "scoring"], default=[*jobs, "scoring"])
    p.add_argument("--shapes", nargs="+", choices=SHAPES,
                   default=["1b", "8b", "3b"] if GPU else ["small"])
    p.add_argument("--ways", nargs="+", default=["01", "11", "10"] if GPU else ["00"],
                   help="the digits of --compile and --recompute")
    p.add_argument("--tasks", type=int, default=8 * WORLD if GPU else 8)
    p.add_argument("--out", help="file to write the rows to, as JSON")
    return p.parse_args()


# --- data and models ------------------------------------------------------------------------------

def make_data(folder, tasks, shape):
    """Writes records.jsonl and a random model, whose tokens are words; returns the folder."""
    r = random.Random(0)

    def text(low, high):
        return "".join(f" w{r.randrange(WORDS)}" for _ in range(r.randint(low, high)))

    with open(f"{folder}/records.jsonl", "w") as f:
        for n in range(tasks):
            task = {"id": str(n), "problem_description": text(300, 500),
                    "agent_prompt": "{problem_description}", "ground_truth": text(100, 450)}
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
    words = "".join(f" w{n}" for n in range(WORDS)) * 2  # toy.tiny keeps words that occur twice
    records = [{"dialogue_history": [{"role": "assistant", "content": words}]}]
    toy.tiny_model(records, 0, r" ?\w+|\W")[1].save_pretrained(folder)
    torch.manual_seed(0)
    with torch.device("cuda" if GPU else "cpu"):
        lm = LlamaForCausalLM(config_of(shape))
    lm.to(torch.bfloat16 if GPU else None).save_pretrained(folder)
    return folder


def config_of(shape):
    """Returns the config of a model of one of SHAPES."""
    width, mlp, layers, heads, kv, size, vocab, tied = SHAPES[shape]
    return LlamaConfig(vocab_size=vocab, hidden_size=width, intermediate_size=mlp, head_dim=size,
                       num_hidden_layers=layers, num_attention_heads=heads,
                       num_key_value_heads=kv, tie_word_embeddings=tied, pad_token_id=0,
                       max_position_embeddings=16384, initializer_range=width ** -0.5)


@functools.cache
def read_groups(job, folder):
    """Returns [[Pair]] as the job's trainer reads them; for scoring, the critic's turns."""
    module, flags, _, _ = JOBS["critic" if job == "scoring" else job]
    args = module.get_args(["--model", folder, "--out", folder, *flags])
    with open(f"{folder}/records.jsonl") as f, patch("sys.stdin", f):
        trajectories = module.read(args)
    if job == "scoring":
        return list(module.ref_turns(trajectories))
    ref_logps = [{}] if module is train_policy else []  # no job has --logprob_weight
    return module.make_pairs(args, trajectories, *ref_logps)[0]


@torch.no_grad()
def load_perturbed(folder, device, compile=0, recompute=0):
    """Loads a model like a trainer, and moves its weights a little away from pi_ref's."""
    flags = SimpleNamespace(offload=0, compile=compile, recompute=recompute)
    model, _ = load(folder, device, "auto", flags, train=True)
    for n, p in enumerate(model.parameters()):
        own = p.to_local() if hasattr(p, "to_local") else p  # each shard has its own noise
        generator = torch.Generator(own.device).manual_seed(1000 * RANK + n)
        own.add_(torch.empty_like(own).normal_(0, own.std(), generator=generator), alpha=0.1)
    return model


# --- steps: each computes gradients and returns the loss ------------------------------------------

def loss_of(job, pairs, logps, ref, batch):
    """Returns the part of these pairs in the loss of a batch. logps, ref: {turn: (L,)}."""
    module, flags, _, _ = JOBS[job]
    args = module.get_args(["--out", "x", *flags])

    def size(pairs):
        tokens = sum(len(action) for pair in pairs for _, action in pair.chosen)
        return tokens if job == "rft" else len(pairs)

    batch_loss = train_critic.critic_loss if job == "critic" else train_policy.LOSSES[args.loss]
    return batch_loss(args, pairs, logps, ref)[0] * size(pairs) / size(batch)


def our_step(model, job, batch, ref):
    """Runs a step like the trainers. The loss is the same on all ranks."""
    logps, computed = forward(model, turns_in(batch), TREE_TOKENS)
    loss = loss_of(job, batch, logps, ref, batch)
    loss.backward()
    backward(model, computed)
    return loss.item()


@contextlib.contextmanager
def without_trees(*models):
    """Makes the models' forward map padded ids (B, T) to log-probs (B, T-1), not a Tree."""
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
    """Returns (B, T) ids, padded on the right, where a causal mask hides the padding."""
    length = max(map(len, seqs))
    return torch.tensor([[*map(ord, seq), *[0] * (length - len(seq))] for seq in seqs],
                        device=device)


def official_step(model, job, batch, ref_model):
    """Runs a step like the released code, pair by pair, each rank with its shard of the batch."""
    total = 0.0
    for pair in batch[RANK::WORLD]:
        sides = [side for side in pair[:2] if side]
        ids = pad([side[-1][0] + side[-1][1] for side in sides], model.device)

        def transformers_logps(rows):
            return {(prompt, action): row[len(prompt) - 1:][:len(action)].cpu()
                    for row, side in zip(rows, sides) for prompt, action in side}

        with without_trees(model, ref_model):
            with torch.no_grad():
                ref = transformers_logps(ref_model(ids)) if job != "rft" else {}
            loss = loss_of(job, [pair], transformers_logps(model(ids)), ref, batch)
            loss.backward()
        total += loss.item()
    return sum_over_ranks(total)


def official_tokens(batch):
    """Returns the tokens of official_step's forwards: each pair padded to its longer side."""
    total = 0
    for pair in batch:
        lengths = [count_tokens(side) for side in (pair.chosen, pair.rejected) if side]
        total += len(lengths) * max(lengths)
    return total


# --- measuring ------------------------------------------------------------------------------------

def clock():
    """Returns CPU seconds on a CPU, and wall seconds on a GPU."""
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() if GPU else time.process_time()


def max_over_ranks(number):
    """Returns the maximum of a number over all ranks, which must all call this."""
    number = torch.tensor(float(number))
    if WORLD > 1:
        dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()


def timed(functions, repeats):
    """Returns {name: [seconds of the slowest rank, per repeat]} for {name: function}."""
    seconds, _ = time_alternately(functions, repeats, clock)
    return {name: list(map(max_over_ranks, times)) for name, times in seconds.items()}


def difference(ours, theirs):
    """Returns ||ours - theirs|| / ||ours|| of two lists of tensors, over all ranks' shards."""
    def norm(tensors):
        return sum_over_ranks(sum(x.double().norm().item() ** 2 for x in tensors)) ** 0.5

    return norm(x.double() - y.double() for x, y in zip(ours, theirs)) / norm(ours)


def difference_of_steps(model, pi_ref, job, batch, ref):
    """Returns the difference of our and the official loss or gradients, whichever is larger."""
    def run(step, ref_or_model):
        model.zero_grad()
        loss = step(model, job, batch, ref_or_model)
        shards = [getattr(p.grad, "to_local", lambda p=p: p.grad)() for p in model.parameters()]
        return torch.tensor([loss]), shards

    ours, theirs = run(our_step, ref), run(official_step, pi_ref)
    return max(difference(ours[:1], theirs[:1]), difference(ours[1], theirs[1]))


def expected_gb(planned):
    """Returns plan.py's peak memory, without AdamW's moments, but with pi_ref in 16 bits."""
    moments = 8e-9 * planned["trained"] / planned["gpus"]
    return planned["peak_gb_per_gpu"] - moments + 2e-9 * planned["parameters"]


class Bench:
    """The rows for one shape: each method that rows() yields returns a dict of figures."""

    def __init__(self, args, device, folder):
        self.args, self.device, self.folder = args, device, folder
        self.dtype = torch.bfloat16 if GPU else torch.float32
        self.model = self.pi_ref = None  # sharded as in training; full_tensor, in 16 bits

    def batch(self, job):
        pairs = JOBS[job][2] * (WORLD if GPU else 1)
        return all_batches(read_groups(job, self.folder), pairs, epochs=1, seed=0)[0]

    def matmul(self):
        n = 8192 if GPU else 512
        a = torch.randn(n, n, device=self.device, dtype=self.dtype)
        seconds = timed({"": lambda: [a @ a for _ in range(10)]}, 1 + self.args.repeats)[""]
        self.peak = 10 * 2 * n ** 3 / min(seconds)
        name = torch.cuda.get_device_name() if GPU else "CPU"
        return {"tflops": self.peak / 1e12, "device": name, "ranks": WORLD}

    def oracle(self):
        turns = [Turn(prompt[-512:], action) for job in ("dpo 24", "critic")
                 for prompt, action in turns_in(self.batch(job))[:6]]

        def results(dtype, separate):
            """Returns ([log-probs], [gradients]). separate: one forward per turn, no tree."""
            model, _ = load(self.folder, self.device, dtype)
            if separate:
                with without_trees(model):
                    logps = [model(pad([p + a], self.device))[0, len(p) - 1:] for p, a in turns]
            else:
                by_turn, computed = forward(model, turns)
                logps = [by_turn[turn] for turn in turns]
            logps = torch.cat(logps)
            logps.mean().backward()
            if not separate:
                backward(model, computed)
            return [logps.detach().cpu()], [p.grad for p in model.parameters()]

        expected, errors = results("fp32", True), {}
        for name, separate in (("tree", False), ("separate", True)):
            for what, x, y in zip(("logps", "gradients"), expected, results("auto", separate)):
                errors[f"{name}_{what}"] = difference(x, y)
        return errors

    def load(self, compile, recompute):
        self.model, self.recompute = None, str(recompute)
        start = time.perf_counter()
        self.model = load_perturbed(self.folder, self.device, compile, recompute)
        seconds = time.perf_counter() - start
        if not self.pi_ref:
            self.pi_ref = load(self.folder, self.device, "auto")[0].requires_grad_(False)
        return {"seconds": seconds}

    def step(self, job, with_rival):
        batch, epochs = self.batch(job), JOBS[job][3]
        turns = turns_in(batch) if job != "rft" else []
        ref = turn_logps(self.pi_ref, turns, TREE_TOKENS)

        def run(step, ref_or_model):
            self.model.zero_grad()
            return step(self.model, job, batch, ref_or_model)

        functions = {"ours": functools.partial(run, our_step, ref)}
        start = time.perf_counter()
        functions["ours"]()  # warm-up
        first = time.perf_counter() - start
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        functions["ours"]()
        gb = GPU and torch.cuda.max_memory_allocated() / 1e9
        if with_rival:
            functions["official"] = functools.partial(run, official_step, self.pi_ref)
            functions["pi_ref"] = functools.partial(turn_logps, self.pi_ref, turns, TREE_TOKENS)
            functions["official"]()  # warm-up
        seconds = timed(functions, self.args.repeats)
        fastest = min(seconds["ours"])
        module, flags, _, _ = JOBS[job]
        args = module.get_args(["--out", "x", "--recompute", self.recompute, *flags])
        planned = plan(args, WORLD, self.model.config, [batch], turns)
        tokens = planned["tokens"]
        flops = 6 * planned["parameters"] * tokens["slowest_rank"] / WORLD
        figures = {"pairs": len(batch), "seconds": fastest, "first": first,
                   "tokens_a_second": tokens["computed"] / WORLD / fastest,
                   "of_peak": flops / fastest / self.peak}
        if GPU:
            figures |= {"peak_gb": max_over_ranks(gb), "expected_gb": expected_gb(planned)}
        if with_rival:
            ours = [a + b / epochs for a, b in zip(seconds["ours"], seconds["pi_ref"])]
            our_tokens = 3 * tokens["slowest_rank"] + planned["reference_tokens"] / epochs
            bound = official_tokens(batch) * (4 if turns else 3) / our_tokens
            differs = difference_of_steps(self.model, self.pi_ref, job, batch, ref)
            median, least, most = ratio(seconds["official"], ours)
            figures |= {"time": median, "least": least, "most": most, "bound": bound,
                        "differs": differs}
        return figures

    def scoring(self):
        turns = read_groups("scoring", self.folder)[:2 * TURNS * (CANDIDATES + 1)]  # 2 trajectories
        run = functools.partial(turn_logps, self.pi_ref, turns, TREE_TOKENS)
        fastest = min(timed({"": run}, 1 + self.args.repeats)[""])
        return {"seconds": fastest, "tokens_a_second": count_tokens(turns) / fastest}

    def rows(self):
        """Yields (name, method that measures the row, *its arguments)."""
        yield "matmul", self.matmul
        if WORLD == 1:
            yield "oracle", self.oracle
        for way in self.args.ways:
            compile, recompute = map(int, way)
            name = f"C{compile} R{recompute}"
            yield f"load {name}", self.load, compile, recompute
            for job in (job for job in self.args.jobs if job in JOBS):
                rival = way == self.args.ways[0] and job != "dpo 96"
                yield f"{job} {name}", self.step, job, rival
        if WORLD == 1 and "scoring" in self.args.jobs:
            yield "scoring", self.scoring


def main(args):
    if not GPU:
        torch.set_num_threads(1)
    device, rows = init_distributed(), []
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            _, folder = from_rank_0(lambda: (None, make_data(folder, args.tasks, shape)))
            for name, measure, *parameters in Bench(args, device, folder).rows():
                row = {"row": f"{shape} {name}"}
                try:
                    row |= measure(*parameters)
                    if not GPU and not row.get("differs", 0) < 1e-4:
                        row["error"] = "the rival's results differ"
                except (Exception, SystemExit) as e:
                    traceback.print_exc()
                    row["error"] = f"{type(e).__name__}: {e}".splitlines()[0]
                rows.append(row)
                show(row)
                if args.out and RANK == 0:
                    Path(args.out).write_text(json.dumps(rows, indent=1))
                sum_over_ranks(0)  # so that all ranks begin the next row together
                gc.collect()
                torch.cuda.empty_cache()
        del measure  # frees the models before those of the next shape are loaded
        torch.compiler.reset()
    torch.distributed.destroy_process_group()
    if failed := [f"{row['row']} ({row['error']})" for row in rows if "error" in row]:
        fail(f"{len(failed)} of {len(rows)} rows failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main(get_args())
