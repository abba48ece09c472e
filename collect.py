"""Plays episodes: an agent talks with a human and hands in an answer, which is graded.

    colbench.py tasks | python collect.py --model runs/base -k 4 > trajectories.jsonl
    ... | python collect.py --model runs/base -k 4 --candidates 16 > trajectories.jsonl
    ... | python collect.py --model runs/base --best_of 4 --critic runs/critic > guided.jsonl
    ... | python collect.py --model runs/base -k 4 --resume all.jsonl >> all.jsonl

Many episodes run at once; each is written as it ends. Every draw is a function of (seed, task,
sample, turn). The other episodes change it by rounding only: after a kill and --resume log-probs
differ by about 1e-6, and rarely a text. Records that have a dialogue already get candidates only.
"""
from utils import (Endpoint, EndpointError, digest, fail, fail_on_error, flag, open_stdout, parser,
                   progress, read_jsonl, rng, run, say, skip_bad_flag, version)

import asyncio
import atexit
import base64
import contextlib
import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import SimpleNamespace

from colbench import (NOT_SEEN, GraderError, NoReference, RenderError, dialogue_text, environment,
                      fill, first_message, hidden_information, human_prompt, kind_of, needs,
                      page_flags, read_action, redact, task_id, ungraded, without_thinking)


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] < tasks.jsonl > trajectories.jsonl")
    g = p.add_argument_group("episodes")
    flag(g, "model", "meta-llama/Llama-3.1-8B-Instruct", "the agent")
    flag(g, "-k", 1, "episodes of each task", least=1)
    flag(g, "max_turns", 10, "the agent's messages; the last one is its answer", least=1)
    flag(g, "agent_prompt", None, "the agent's first message, with {problem_description}, "
         "{max_turns}, {ANSWER} and {OUTPUT}", metavar="FILE")
    flag(g, "concurrency", 256, "episodes at once, for each vllm copy or engine's address",
         least=1)
    flag(g, "resume", None, "skip the episodes in FILE, and drop its last line if that is cut off",
         metavar="FILE")
    skip_bad_flag(g)
    g = p.add_argument_group("human")
    flag(g, "human", "scripted", "scripted: the built-in one; fixed:TEXT: always says TEXT; "
         "http://host:port/v1[,http://...]: an LLM at temperature 0")
    flag(g, "human_model", None, "the LLM's name, if the servers have several")
    flag(g, "human_prompt", None, "what the LLM reads, with {problem_description}, "
         "{hidden_information} and {dialogue}", metavar="FILE")
    flag(g, "human_tokens", None, "longest reply of the LLM, else 150 for 400 characters, where it "
         "is cut", kind=int, least=1)
    g = p.add_argument_group("sampling")
    flag(g, "temperature", 1.0, "0: greedy")
    flag(g, "top_p", 1.0, "of each token, draw from the likeliest that sum up to P; log-probs are "
         "of what is drawn from", metavar="P")
    flag(g, "max_tokens", 1024, "longest message", least=1)
    flag(g, "thinking", 0, "1: let a model think whose chat template can; nobody sees the thought",
         choices=[0, 1])
    flag(g, "seed", 0, "of all draws")
    flag(g, "candidates", 0, "alternatives drawn at every turn; stage 2 wants 16")
    flag(g, "candidates_share", 1.0, "share of the episodes that get candidates")
    flag(g, "best_of", 1, "messages drawn at every turn; the critic's favourite is sent",
         least=1)
    flag(g, "critic", None, "--out of train_critic.py, or http://host:port/v1 of an LLM; it READS "
         "HIDDEN INFORMATION, so this is no fair policy")
    flag(g, "prior", 0.0, "--best_of: choose by score + prior * log-prob")
    g = p.add_argument_group("engine")
    flag(g, "engine", "auto", "transformers, vllm, or http://host:port/v1[,http://...] of vLLM "
         "servers; auto: vllm if it and a GPU are there")
    flag(g, "max_batch_tokens", 65536, "transformers: tokens at once, and kept for next turns")
    flag(g, "dtype", "auto", "transformers: of the model; draws are in fp32; auto: bf16 on a GPU"
         " or a CPU that has it, if the model is not tiny", choices=["auto", "bf16", "fp32"])
    flag(g, "tensor_parallel", 1, "vllm: GPUs of one copy of the model", least=1)
    flag(g, "data_parallel", 1, "vllm: copies", least=1)
    flag(g, "max_model_len", None, "vllm: longest context, else the model's", kind=int, least=1)
    flag(g, "in_flight", 64, "requests at once to one server of --human or --critic", least=1)
    flag(g, "timeout", 120.0, "seconds of a request, of an engine's for each draw")
    flag(g, "retries", 8, "of a request, over about a minute")
    g = p.add_argument_group("grading")
    flag(g, "rules", "honest", "the grader's rules, see colbench.py",
         choices=["honest", "official"])
    page_flags(p)
    args = p.parse_args(argv)
    if (args.best_of > 1) != bool(args.critic):
        fail("--best_of N and --critic go together")
    if not 0 < args.top_p <= 1:
        fail(f"--top_p {args.top_p}: give a share above 0, at most 1")
    if not (args.human == "scripted" or args.human.startswith("fixed:") or http(args.human)):
        fail(f"--human {args.human!r}: give scripted, fixed:TEXT, or http://host:port/v1")
    if args.engine not in ("auto", "transformers", "vllm") and not http(args.engine):
        fail(f"--engine {args.engine!r}: give auto, transformers, vllm, or http://host:port/v1")
    return args


def http(where):
    return (where or "").startswith(("http://", "https://"))


if __name__ == "__main__":
    ARGS = get_args()  # a wrong flag is told before anything slow is loaded

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from model import (common_prefix, end_of_turn, find_model, load_lm, refuse_unknown, render,
                   sdpa_kernel, weights_digest)
from train_critic import critic_turns, load_critic, score_turns

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


# --- engines: await engine(prompt_ids, draws) samples the agent's messages ------------------------
#
# It gives [(token_ids, logprobs)], one per draw. A draw is the key of its randomness, rng(*draw);
# it begins with its episode's (seed, task id, sample). vLLM's draw i has the seed of draw 0 plus i.
# token_ids end with a token of `stop` unless max_tokens cut them. logprobs are the sampler's, at
# its temperature and top_p.

class Group:
    """Prompts with n draws each, and the actions that grow behind them, a token a step.

    Row r is the action actions[r], behind the prompt slots[r] // n. Of each layer there are keys
    and values, stacked: shared, (2, prompts, heads, width, size), of the prompts, and own,
    (2, rows, heads, room, size), of the rows.
    """

    def __init__(self, prompts, known, draws):
        """draws[i]: prompt i's actions. known[i]: (n, kept() of a prompt that shares n tokens)."""
        self.known = known
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=DEVICE)
        self.new = [len(prompt) - n for prompt, (n, _) in zip(prompts, known)]
        self.runs = SimpleNamespace(q=self.new, kv=[len(prompt) for prompt in prompts])
        self.n, self.actions = len(draws[0]), [action for of in draws for action in of]
        self.slots = torch.arange(len(self.actions), device=DEVICE)
        self.shared, self.own = [], []
        self.steps = -1  # tokens of the rows that have keys; -1: the prompts are read now
        self.ids = [t for prompt, (n, _) in zip(prompts, known) for t in prompt[n:]]
        self.positions = torch.cat([torch.arange(n, len(prompt), device=DEVICE)
                                    for prompt, (n, _) in zip(prompts, known)])

    def attend(self, layer, q, k, v, scale, left):
        """Attention of the new tokens, (tokens, heads, size). left: as in model.tree_attention."""
        if self.steps < 0:
            return self.read(layer, q, torch.stack([k, v]), scale, left)
        if self.steps == self.own[layer].shape[3]:  # twice the room
            own = self.own[layer]
            self.own[layer] = torch.cat([own, torch.empty_like(own)], 3)
        for own, x in zip(self.own[layer], (k, v)):
            own[:, :, self.steps] = x
        first = max(0, self.steps - left) if left >= 0 else 0
        own_k, own_v = self.own[layer][:, :, :, first:self.steps + 1]
        shared_k, shared_v = self.shared[layer]
        width = shared_k.shape[2]
        q = q.unflatten(1, (k.shape[1], -1))  # (rows, heads of keys, queries of each, size)
        scores = self.rows(self.by_prompt(q) @ shared_k.mT)
        lengths = self.lengths[self.slots // self.n, None]
        at = torch.arange(width, device=DEVICE)
        hidden = at >= lengths
        if left >= 0:
            hidden |= at < lengths + self.steps - left
        scores = scores.masked_fill_(hidden[:, None, None], -math.inf)
        scores = torch.cat([scores, q @ own_k.mT], -1)
        weights = (scores.float() * scale).softmax(-1).to(q.dtype)
        out = self.rows(self.by_prompt(weights[..., :width]) @ shared_v)
        return (out + weights[..., width:] @ own_v).flatten(1, 2)

    def read(self, layer, q, new, scale, left):
        """attend() of the prompts' tokens, as far as they are not known. new: keys and values."""
        paths = [torch.cat([known[layer][:, :n], x], 1) if n else x
                 for x, (n, known) in zip(new.split(self.new, 1), self.known)]
        padded = pad_sequence([x.transpose(0, 1) for x in paths], batch_first=True)
        self.shared.append(padded.permute(2, 0, 3, 1, 4).contiguous())
        self.own.append(new.new_empty(2, len(self.actions), new.shape[2], 32, new.shape[3]))
        return sdpa_kernel(q, *torch.cat(paths, 1), self.runs, scale, left)

    def by_prompt(self, x):
        """(rows, heads, queries, ...) to (prompts, heads, n * queries, ...)."""
        spread = x.new_zeros(len(self.lengths) * self.n, *x.shape[1:])
        spread[self.slots] = x
        return spread.unflatten(0, (-1, self.n)).transpose(1, 2).flatten(2, 3)

    def rows(self, x):
        """by_prompt() back."""
        return x.unflatten(2, (self.n, -1)).transpose(1, 2).flatten(0, 1)[self.slots]

    def kept(self, i):
        """Keys and values of prompt i for a later one: (2, tokens, heads, size) of each layer."""
        return [x[:, i, :, :self.lengths[i]].transpose(1, 2) for x in self.shared]

    def grow(self, tokens):
        """Takes the rows' next tokens; drops rows that have ended, an eighth of them at once."""
        self.steps += 1
        live = [r for r, action in enumerate(self.actions) if not action.ended]
        self.ids = tokens
        if len(live) <= 7 / 8 * len(self.actions):
            self.ids = [tokens[r] for r in live]
            self.actions = [self.actions[r] for r in live]
            live = torch.tensor(live, dtype=torch.long, device=DEVICE)
            slots = self.slots[live]
            prompts, at = (slots // self.n).unique(return_inverse=True)
            self.slots = at * self.n + slots % self.n
            if len(prompts) < len(self.lengths):
                self.lengths = self.lengths[prompts]
                self.shared = [x[:, prompts] for x in self.shared]
            self.own = [x[:, live] for x in self.own]
        self.positions = self.lengths[self.slots // self.n] + self.steps


def attend_in_groups(module, query, key, value, attention_mask, scaling=None, groups=(),
                     sliding_window=None, **kwargs):
    """The engine's attention, in the form that transformers' AttentionInterface wants."""
    if kwargs.get("s_aux") is not None:
        fail("--engine transformers can't compute attention sinks: take vllm")
    left = sliding_window - 1 if sliding_window else -1
    sizes = [len(group.ids) for group in groups]
    parts = zip(*(x[0].transpose(0, 1).split(sizes) for x in (query, key, value)))
    out = [group.attend(module.layer_idx, *part, scaling, left)
           for group, part in zip(groups, parts)]
    return torch.cat(out)[None], None


AttentionInterface.register("groups", attend_in_groups)


class TransformersEngine:
    """Samples by transformers in this process.

    All actions under way grow by a token in one forward, in which requests join as others end.
    A prompt is read once for all its draws, and of an episode's next one only what is new.
    """

    def __init__(self, args, stop):
        self.lm, _ = load_lm(args.model, DEVICE, args.dtype)
        refuse_unknown(args.model, self.lm.config)
        self.lm.set_attn_implementation("groups")
        self.args, self.stop = args, stop
        config = self.lm.config.get_text_config()
        self.longest = getattr(config, "max_position_embeddings", None) or math.inf
        self.waiting, self.under_way, self.groups = [], [], []  # requests, requests, Groups
        self.server = None  # the task that serves them
        self.kept = {}  # episode: (its last prompt, Group.kept of it); the latest one comes last

    async def __call__(self, prompt, draws):
        if len(prompt) >= self.longest:
            raise EndpointError(f"the conversation has {len(prompt)} tokens, and the model takes "
                                f"{self.longest}")
        actions = [SimpleNamespace(rng=rng(*draw), ids=[], logps=[], ended=False) for draw in draws]
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append(SimpleNamespace(prompt=prompt, episode=draws[0][:3], actions=actions,
                                            answer=answer))
        if not self.server:
            self.server = asyncio.ensure_future(self.serve())
        return await answer

    async def serve(self):
        """Samples while there are requests, in a thread; answers each as its actions end."""
        while self.waiting or self.under_way:
            before = 0
            while before != len(self.waiting):  # until all have asked: batches are full, and the
                before = len(self.waiting)      # same every time
                await asyncio.sleep(0)
            try:
                new = self.admit()
                self.under_way += new
                await asyncio.to_thread(self.sample, new)
            except Exception as e:
                for request in self.under_way:
                    request.answer.set_exception(e)
                self.under_way, self.groups = [], []
            for request in self.ended():
                request.answer.set_result([(action.ids, action.logps)
                                           for action in request.actions])
                self.under_way.remove(request)
        self.server = None

    def ended(self):
        """The requests under way all of whose actions have ended."""
        return [r for r in self.under_way if all(action.ended for action in r.actions)]

    def admit(self):
        """Takes from the waiting requests those that begin now, at least one if none is under way.

        Until they are a fifth of all actions they wait: groups are few and large.
        """
        actions = sum(len(request.actions) for request in self.waiting)
        if 4 * actions < sum(len(group.ids) for group in self.groups):
            return []
        new, room = [], self.args.max_batch_tokens
        for group in self.groups:
            room -= group.lengths.sum().item() + len(group.ids) * max(32, group.steps)
        for request in self.waiting:
            room -= len(request.prompt) + 32 * len(request.actions)
            if room < 0 and (new or self.groups):
                break
            new.append(request)
        del self.waiting[:len(new)]
        return new

    @torch.no_grad()
    def sample(self, new):
        """Begins new requests; samples until one under way has ended."""
        by_prompt, by_number = {}, {}
        for request in new:
            by_prompt.setdefault(tuple(request.prompt), []).append(request)
        for prompt, requests in by_prompt.items():
            actions = [action for request in requests for action in request.actions]
            by_number.setdefault(len(actions), []).append((prompt, requests, actions))
        for alike in by_number.values():
            self.begin(*zip(*alike))
        while sum(len(prompt) for prompt, _ in self.kept.values()) > self.args.max_batch_tokens:
            del self.kept[next(iter(self.kept))]
        while not self.ended():
            logits = self.forward(self.groups).split([len(group.ids) for group in self.groups])
            for group, part in zip(self.groups, logits):
                group.grow(self.draw(part, group.actions))
            self.groups = [group for group in self.groups if group.actions]

    def begin(self, prompts, requests, actions):
        """Reads prompts that have as many actions each, in one forward; draws the first tokens."""
        known = [self.known(prompt, of[0].episode) for prompt, of in zip(prompts, requests)]
        group = Group(prompts, known, actions)
        last = torch.tensor([*itertools.accumulate(group.new)], device=DEVICE) - 1
        logits = self.forward([group], last).repeat_interleave(group.n, 0)
        group.known = None
        for i, prompt in enumerate(prompts):
            for request in requests[i]:
                self.kept.pop(request.episode, None)
                self.kept[request.episode] = prompt, group.kept(i)
        group.grow(self.draw(logits, group.actions))
        if group.actions:
            self.groups.append(group)

    def known(self, prompt, episode):
        """(tokens, Group.kept) of a kept prompt that begins as this one, of any episode."""
        latest = next(reversed(self.kept.values()), None)
        before, layers = self.kept.get(episode, latest) or ((), None)
        return min(common_prefix(before, prompt), len(prompt) - 1), layers

    def forward(self, groups, at=0):
        """(rows, vocabulary) logits of all tokens, or of those at the indices `at`."""
        ids = torch.tensor([t for group in groups for t in group.ids], device=DEVICE)
        positions = torch.cat([group.positions for group in groups])
        return self.lm(input_ids=ids[None], position_ids=positions[None], use_cache=False,
                       groups=groups, logits_to_keep=at).logits[0]

    def draw(self, logits, actions):
        """Draws the next token of each action that goes on; returns all, 0 for the others."""
        tokens = [0] * len(actions)
        live = [r for r, action in enumerate(actions) if not action.ended]
        for at in range(0, len(live), 64):  # a vocabulary is large
            rows = live[at:at + 64]
            token, logp = self.choose(logits[rows], [actions[r].rng for r in rows])
            for r, t, p in zip(rows, token[:, 0].tolist(), logp[:, 0].tolist()):
                tokens[r], action = t, actions[r]
                action.ids.append(t)
                action.logps.append(round(p, 6))
                action.ended = t in self.stop or len(action.ids) == self.args.max_tokens
        return tokens

    def choose(self, logits, generators):
        """(rows, 1) tokens and their log-probs."""
        temperature, top_p = self.args.temperature, self.args.top_p
        logps = (logits.float() / (temperature or 1)).log_softmax(-1)
        if not temperature:
            token = logps.argmax(-1, keepdim=True)
            return token, logps.gather(1, token)
        if top_p < 1:
            ordered, tokens = logps.sort(descending=True)
            beyond = ordered.exp().cumsum(-1) - ordered.exp() >= top_p
            logps = logps.masked_fill(beyond.scatter(-1, tokens, beyond), -math.inf).log_softmax(-1)
        # invert the cumulative distribution at a uniform number, in fp32 still below 1
        u = torch.tensor([[g.random() * (1 - 2 ** -24)] for g in generators], device=DEVICE)
        cdf = logps.exp().cumsum(-1)
        token = torch.searchsorted(cdf, u * cdf[:, -1:], right=True)
        token = token.clamp(max=cdf.shape[1] - 1)  # beyond it where logits are NaN
        return token, logps.gather(1, token)


def vllm_engine(args, stop):
    """Samples by vLLM in this process. Another batch may change its tokens, whatever the seed."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        from vllm import AsyncEngineArgs, SamplingParams
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM
        import psutil  # comes with it
    except ImportError as e:
        fail(f"--engine vllm needs the package vllm ({e}): see requirements.txt")
    options = dict(tensor_parallel_size=args.tensor_parallel, max_model_len=args.max_model_len,
                   data_parallel_size=args.data_parallel, logprobs_mode="processed_logprobs",
                   generation_config="vllm", enable_prefix_caching=True, disable_log_stats=True,
                   use_tqdm_on_load=False)
    if current_platform.is_cpu():  # chunked prefill crashes seeded draws there
        options |= dict(dtype="float32", enforce_eager=True, enable_chunked_prefill=False,
                        kv_cache_memory_bytes=1 << 28)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=args.model, **options))
    # its processes would outlive a kill and keep the GPU; a pipe closes however this one ends
    its = [str(process.pid) for process in psutil.Process().children(recursive=True)]
    guard = subprocess.Popen(["sh", "-c", 'read line; kill -9 "$@"', "sh", *its],
                             stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
                             start_new_session=True)

    def end():
        llm.shutdown()
        llm.shutdown = lambda: None  # __del__ calls it again, when vllm's modules are gone
        guard.kill()

    atexit.register(end)
    numbers = itertools.count()
    homes = {}  # episode: the rank of the copy that has its prefix in its cache

    async def engine(prompt, draws):
        params = SamplingParams(n=len(draws), seed=rng(*draws[0]).getrandbits(31),
                                temperature=args.temperature, top_p=args.top_p,
                                max_tokens=args.max_tokens, stop_token_ids=sorted(stop),
                                logprobs=0, flat_logprobs=True, detokenize=False,
                                output_kind=RequestOutputKind.FINAL_ONLY)
        home = homes.setdefault(draws[0][:3], len(homes) % args.data_parallel)
        try:
            async for reply in llm.generate({"type": "token", "prompt_token_ids": prompt}, params,
                                            str(next(numbers)), data_parallel_rank=home):
                outs = reply.outputs
        except Exception as e:  # of many kinds: the prompt is too long, the engine has died
            why = " ".join(str(e).split())[:200]
            raise EndpointError(f"vllm: {type(e).__name__}: {why}") from None
        return [(list(out.token_ids), [round(x, 6) for x in out.logprobs.logprobs])
                for out in outs]

    return engine


async def http_engine(args, stop):
    """Samples by vLLM servers, which take and give token ids.

    They queue the requests, one for each episode, so --timeout is for each of a turn's draws.
    """
    timeout = args.timeout * (args.best_of + args.candidates)
    servers = Endpoint(args.engine, args.concurrency, timeout, args.retries)
    fixed = {"model": await servers.model(args.model), "temperature": args.temperature,
             "top_p": args.top_p, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "logprobs": 0,
             "max_tokens": args.max_tokens, "stop_token_ids": sorted(stop),
             "skip_special_tokens": False, "return_token_ids": True}

    async def engine(prompt, draws):
        seed = rng(*draws[0]).getrandbits(31)
        body = {**fixed, "prompt": prompt, "seed": seed, "n": len(draws)}

        async def ask(client):  # completions.create would check the reply number by number
            reply = await client.post("/completions", cast_to=object, body=body)
            drawn = []
            for out in reply["choices"]:
                if out["finish_reason"] not in ("stop", "length"):  # the server is shutting down
                    raise ValueError(f"message cut off: finish_reason {out['finish_reason']}")
                if not out.get("token_ids"):
                    raise ValueError("no token_ids in the reply: it takes vLLM 0.10 or newer")
                ids, logprobs = out["token_ids"], out["logprobs"]["token_logprobs"]
                if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
                    raise ValueError("token_ids in the reply are no token ids")
                if len(logprobs) != len(ids):
                    raise ValueError(f"{len(logprobs)} logprobs of {len(ids)} token_ids")
                drawn.append((ids, [round(x, 6) for x in logprobs]))
            if len(drawn) != len(draws):
                raise ValueError(f"{len(drawn)} draws instead of {len(draws)}")
            return drawn
        return await servers(ask, draws[0][:3])

    return engine


def trained_critic(args):
    """(critic, its Pictures or None) of a finished run of train_critic.py.

    await critic(task, history, actions) gives the actions' advantages.
    """
    critic, tokenizer, models, pictures = load_critic(args.critic, DEVICE, dtype="auto")
    lock, waiting = asyncio.Lock(), []  # requests: (turns with what pi_ref reads, their scores)

    async def advantages(task, history, actions):
        asked = critic_turns(critic, tokenizer, task, history, actions, args.thinking, pictures)
        scores = []
        waiting.append((asked, scores))
        async with lock:
            if not scores:  # no other request has scored it along with its own
                await asyncio.sleep(0)  # others ask, too
                batch = waiting.copy()
                waiting.clear()
                ref_of = dict(pair for turns, _ in batch for pair in turns)
                score_of = await asyncio.to_thread(score_turns, critic, models, ref_of, 16384)
                for turns, of_turns in batch:
                    of_turns += [score_of[turn] for turn, _ in turns]
        return scores

    return advantages, pictures


JUDGE_PROMPT = """An assistant works for a colleague who wants something that it can't see. It \
finds out by talking to them, and hands it in at the end.

What the colleague wants:
{hidden_information}

The conversation so far:
{dialogue}

Two messages that the assistant might send next:
A: {a}

B: {b}

Which one brings it nearer to handing in exactly what is wanted? Reply with one letter, A or B."""


async def judge(servers, model, task, history, actions):
    """[advantage] of messages by an LLM: the share of comparisons that each wins.

    In a circle, each is compared with the next as A, and with the one before as B. Of equal texts
    both win half. servers: an Endpoint. EndpointError if no server gives a verdict.
    """
    async def wins(a, b):
        """1 if a wins against b, 0 if b wins, 0.5 if they are equal."""
        if a == b:
            return 0.5
        prompt = fill(JUDGE_PROMPT, hidden_information=hidden_information(task),
                      dialogue=dialogue_text(history), a=a, b=b)

        async def ask(client):
            reply = await client.chat.completions.create(
                model=model, temperature=0, seed=0, max_tokens=1024,
                messages=[{"role": "user", "content": prompt}])
            text = without_thinking(reply.choices[0].message.content or "")
            letters = set(re.findall(r"\b[AB]\b", text))
            if len(letters) != 1:  # "A better one is B" says nothing sure
                raise ValueError("not one of A and B in the reply")
            return float(letters == {"A"})
        return await servers(ask)

    texts = [read_action(action["output"], False)[0] for action in actions]
    won = await asyncio.gather(*map(wins, texts, texts[1:] + texts[:1]))
    return [(won[i] + 1 - won[i - 1]) / 2 for i in range(len(texts))]


# --- an episode -----------------------------------------------------------------------------------

class Players:
    """What an episode talks to: the agent, the human, the critic, and its task's environment."""

    def __init__(self, args):
        self.args, self.drawn, self.cut = args, 0, 0
        self.environments, self.opened = {}, contextlib.ExitStack()
        self.threads = ThreadPoolExecutor(2 * os.cpu_count())  # where a call waits for others
        self.agent_prompt = read_file("--agent_prompt", args.agent_prompt)
        self.human_prompt = read_file("--human_prompt", args.human_prompt)

    async def load(self):
        """Loads the models and asks the servers for theirs; returns self."""
        args = self.args
        if http(args.human):
            self.humans = Endpoint(args.human, args.in_flight, args.timeout, args.retries)
            self.human_model = await self.humans.model(args.human_model)
        self.concurrency = args.concurrency * args.data_parallel * len(args.engine.split(","))
        directory, self.tokenizer, _ = find_model(args.model)
        self.weights = weights_digest(directory)  # None where only servers have them
        self.stop = stop = {end_of_turn(self.tokenizer)[-1], self.tokenizer.eos_token_id}
        vllm = args.engine == "vllm" or args.engine == "auto" and CUDA and find_spec("vllm")
        if http(args.engine):
            self.engine = await http_engine(args, stop)
        elif vllm:
            self.engine = vllm_engine(args, stop)
        else:
            self.engine = TransformersEngine(args, stop)
        self.critic = self.pictures = None
        if http(args.critic):
            judges = Endpoint(args.critic, args.in_flight, args.timeout, args.retries)
            self.critic = functools.partial(judge, judges, await judges.model())
        elif args.critic:
            self.critic, self.pictures = trained_critic(args)
            self.folder = tempfile.TemporaryDirectory()
        return self

    def environment(self, task):
        """The environment of a task's kind, opened at its first use."""
        kind = kind_of(task)
        if kind not in self.environments:
            pictures = http(self.args.human) or bool(self.pictures)
            env = environment(task)(self.args, os.cpu_count(), pictures)
            self.environments[kind] = self.opened.enter_context(env)
        return self.environments[kind]

    async def call(self, env, method, *args):
        """method(*args) of an environment, in a thread where it may wait for a browser."""
        return await self.in_thread(method, *args) if env.drawn else method(*args)

    async def in_thread(self, method, *args):
        return await asyncio.get_running_loop().run_in_executor(self.threads, method, *args)

    def render(self, history):
        return render(self.tokenizer, history, self.args.thinking)

    async def act(self, task, history, key, candidates):
        """The agent's next message, its `content` still None, with so many candidates.

        key: (seed, task id, sample, turn).
        """
        n = self.args.best_of
        draws = [(*key, j) for j in range(n)]
        draws += [(*key, "candidate", j) for j in range(candidates)]
        prompt = self.render(history)
        if self.args.temperature:
            drawn = await self.engine(prompt, draws)
        else:  # all are the same, and vLLM draws no more than one
            drawn = await self.engine(prompt, draws[:1]) * len(draws)
        texts = self.tokenizer.batch_decode([ids for ids, _ in drawn], skip_special_tokens=True)
        actions = []
        for text, (ids, logprobs) in zip(texts, drawn):
            total = sum(logprobs)
            if not math.isfinite(total):
                raise EndpointError("the model's log-probs are NaN or infinite: "
                                    "are its weights sound?")
            action = {"output": text, "token_ids": ids, "logprobs": logprobs}
            if len(actions) >= n:
                action = {"output": text, "token_ids": ids, "logprob": round(total, 6)}
            if ids[-1] not in self.stop:
                action["cut"] = True
            actions.append(action)
        self.drawn += len(actions)
        self.cut += sum("cut" in action for action in actions)
        chosen = await self.best(task, history, actions[:n]) if self.critic else actions[0]
        message = {"role": "assistant", "content": None, **chosen}
        if candidates:
            message["candidates"] = actions[n:]
        return message

    async def best(self, task, history, actions):
        """The critic's favourite action."""
        if self.pictures:
            await self.show_critic(task, history, actions)
        scores = await self.critic(task, history, actions)
        values = [score + self.args.prior * sum(action["logprobs"])
                  for score, action in zip(scores, actions)]
        return actions[values.index(max(values))]

    async def show_critic(self, task, history, actions):
        """Adds the pages of all that the critic will read to its pictures."""
        env = self.environment(task)
        texts = [m["content"] for m in history] + [a["output"] for a in actions]
        for page in map(env.page, [*texts, hidden_information(task)]):
            if page and page not in self.pictures.numbers:
                file = await self.call(env, env.picture_file, page, self.folder.name)
                if file:
                    self.pictures.add(page, file)

    async def human(self, task, history):
        """The human's reply to the last message."""
        who, _, text = self.args.human.partition(":")
        if who == "fixed":
            return text[:environment(task).reply_chars]
        env, message = self.environment(task), history[-1]["content"]
        try:
            if who == "scripted":
                return await self.call(env, env.scripted_human, task, message)
            pictures = await self.call(env, env.shown, task, message)
        except NoReference:
            raise
        except RenderError as e:
            return NOT_SEEN.format(e)
        prompt = human_prompt(task, history, self.human_prompt)
        reply = await self.llm_reply(prompt, pictures, env.reply_chars)
        return redact(reply, hidden_information(task))

    async def llm_reply(self, prompt, pictures, limit):
        """What an LLM says, cut at `limit` characters; pictures: PNG files as bytes."""
        content = prompt
        if pictures:
            content = [{"type": "text", "text": prompt}]
            for png in pictures:
                url = "data:image/png;base64," + base64.b64encode(png).decode()
                content.append({"type": "image_url", "image_url": {"url": url}})

        async def ask(client):
            completion = await client.chat.completions.create(
                model=self.human_model, messages=[{"role": "user", "content": content}],
                temperature=0, seed=0, max_tokens=self.args.human_tokens or limit * 3 // 8)
            reply = without_thinking(completion.choices[0].message.content or "")
            if not reply:
                raise ValueError("an empty reply")
            whole = reply.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return whole[:limit]  # without lone surrogates, which no tokenizer takes
        return await self.humans(ask)

    async def play(self, task, sample):
        """Plays one episode: {"sample", "dialogue_history", "answer"}."""
        turns, key = self.args.max_turns, (self.args.seed, task_id(task), sample)
        candidates = self.candidates(key)
        history = [first_message(task, turns, self.agent_prompt)]
        for turn in range(turns):
            message = await self.act(task, history, (*key, turn), candidates)
            message["content"], answer = read_action(message["output"], last=turn == turns - 1)
            history.append(message)
            if answer is not None:
                break
            history.append({"role": "user", "content": await self.human(task, history)})
        answer = environment(task).answer(history, answer)
        return {"sample": sample, "dialogue_history": history, "answer": answer}

    async def add_candidates(self, record, sample):
        """Gives the agent's messages of a dialogue candidates, in place: {"sample"}."""
        history, key = record["dialogue_history"], (self.args.seed, task_id(record["task"]), sample)
        agent = [t for t, m in enumerate(history) if m["role"] == "assistant"]
        if candidates := self.candidates(key):
            for turn, t in enumerate(agent):
                drawn = await self.act(record["task"], history[:t], (*key, turn), candidates)
                history[t]["candidates"] = drawn["candidates"]
        return {"sample": sample}

    def candidates(self, key):
        """How many candidates each turn of an episode gets."""
        chosen = rng("share", *key).random() < self.args.candidates_share
        return self.args.candidates if chosen else 0


def read_file(flag, path):
    """The text of a flag's file, or None without one."""
    if path:
        with fail_on_error(f"{flag} {path}"), open(path, encoding="utf-8") as f:
            return f.read()


# --- all episodes ---------------------------------------------------------------------------------

def finished_episodes(path, skip_bad):
    """({(task id, sample)}, {name: [its values]} of `meta` that must stay) of a file's episodes.

    A last line that is cut off is dropped from the file, which may be missing.
    """
    keys, metas, last = set(), {}, b""
    fields = "task.problem_description", "task.ground_truth", "sample"

    def whole_lines(f):
        nonlocal last
        for last in f:
            if last.endswith(b"\n") or is_json(last):
                yield last

    if not path or not os.path.exists(path):
        return keys, metas
    with fail_on_error(f"--resume {path}"), open(path, "rb+") as f:
        lines = whole_lines(f)
        first = next(lines, None)
        records = itertools.chain([first], lines) if first else []
        for r in read_jsonl(records, fields, path, skip_bad) if first else ():
            keys.add((task_id(r["task"]), r["sample"]))
            meta = r.get("meta", {})
            meta = meta.get("candidates", meta)
            for name in meta.keys() & {"model_weights", *Run.SAME}:
                values = metas.setdefault(name, [])
                if meta[name] not in values:
                    values.append(meta[name])
        end = f.seek(0, os.SEEK_END)
        if last and not last.endswith(b"\n"):
            if is_json(last):
                f.write(b"\n")
            elif last.startswith(b"{"):
                f.truncate(end - len(last))
            else:
                fail(f"--resume {path}: its last line is no record")
    return keys, metas


def is_json(line):
    try:
        return bool(json.loads(line))
    except ValueError:
        return False


class Run:
    """The episodes of stdin's tasks: read, played, graded, written, in that order."""

    SAME = ("temperature", "top_p", "max_turns", "max_tokens", "thinking", "seed", "best_of",
            "prior", "rules")  # flags that all episodes of a file share
    META = ("model", "human", "critic", *SAME)

    def __init__(self, args, emit, players, done):
        self.args, self.emit, self.players, self.done = args, emit, players, done
        self.done_before = len(done)
        self.meta = {flag: getattr(args, flag) for flag in self.META}
        self.meta |= {"model_weights": players.weights, "version": version()}
        self.times_read, self.totals, self.error = Counter(), Counter(), None
        self.tasks = {}  # id: digest of its texts
        self.played = asyncio.Queue()  # of records that are being graded

    async def all(self):
        with self.players.opened:
            await asyncio.gather(self.play_all(), self.write())

    def jobs(self):
        """Yields (record, sample) of the episodes to play.

        A bad line ends the input. Episodes under way are finished first, then self.error is told.
        """
        try:
            for record in read_jsonl(sys.stdin, needs(to_grade=True), skip_bad=self.args.skip_bad):
                for sample in self.samples(record):
                    yield record, sample
        except SystemExit as e:
            self.error = e

    def samples(self, record):
        """Completes a record's task; yields the numbers of its samples that are still to play."""
        task = record["task"]
        record["task"] = task = {"kind": kind_of(task), **task, "id": task_id(task)}
        text = digest([task["problem_description"], task["ground_truth"]])
        if self.tasks.setdefault(task["id"], text) != text:
            fail(f"two unlike tasks of stdin have the id {task['id']}")
        n, samples = self.times_read[task["id"]], range(self.args.k)
        self.times_read[task["id"]] += 1
        if "dialogue_history" in record:
            samples = [record.get("sample", n)]  # published dialogues have no number
            if not self.args.candidates:
                fail(f"task {task['id']} has a dialogue already: give --candidates, or cut it out")
            if "reward" not in record and "answer" not in record:
                fail(f"task {task['id']} has a dialogue without reward and without answer to grade")
        if "dialogue_history" not in record or "reward" not in record:
            self.players.environment(task)  # what can't be opened ends the program before the play
        for sample in samples:
            key = task["id"], sample
            if key not in self.done:
                self.done.add(key)
                yield sample
            elif n > 0:
                self.totals["repeated"] += 1

    async def play_all(self):
        jobs = self.jobs()
        await asyncio.gather(*(self.play(jobs) for _ in range(self.players.concurrency)))
        self.played.put_nowait(None)

    async def play(self, jobs):
        """Plays one job after another.

        An episode that fails is not written. No reply is made up; --resume plays it again.
        """
        for record, sample in jobs:
            try:
                if "dialogue_history" in record:
                    new = await self.players.add_candidates(record, sample)
                else:
                    record = ungraded(record)
                    new = await self.players.play(record["task"], sample)
            except (EndpointError, NoReference) as e:
                self.totals["failed"] += 1
                if self.totals["failed"] <= 3:
                    say(f"task {record['task']['id']}, sample {sample} failed: {e}")
                continue
            new["meta"] = self.meta_of(record)
            self.played.put_nowait(asyncio.ensure_future(self.grade({**record, **new})))

    def meta_of(self, record):
        """The `meta` of an episode. A dialogue that was there keeps its own beside that of its new
        candidates, whose prompts are rendered by --thinking.
        """
        meta = record.get("meta", {})
        if "dialogue_history" not in record:
            return {**meta, **self.meta}
        meta = {**meta, "thinking": self.args.thinking, "candidates": self.meta}
        return meta if "reward" in record else {**meta, "rules": self.args.rules}

    async def grade(self, record):
        if "reward" not in record:
            grade = self.players.environment(record["task"]).grade
            record |= await self.players.in_thread(grade, record["task"], record["answer"])
        return record

    async def write(self):
        """Writes the episodes in the order in which they ended, whatever grading takes."""
        bar = progress("episodes")
        while graded := await self.played.get():
            record = await graded
            self.emit(record)
            bar.update()
            self.totals["episodes"] += 1
            self.totals["reward"] += record["reward"]
            self.totals["solved"] += record["reward"] == 1
            self.totals["tokens"] += sum(len(m.get("token_ids", ()))
                                         for m in record["dialogue_history"])

    def summary(self):
        """Says how it went; raises the error that ends the program, if there is one."""
        totals, environments = self.totals, self.players.environments.values()
        n = max(1, totals["episodes"])
        reward = " and ".join(env.reward_name for env in environments) or "reward"
        parts = [f"{totals['episodes']} episodes ({self.done_before} done before): "
                 f"{reward} {100 * totals['reward'] / n:.1f} %, "
                 f"success {100 * totals['solved'] / n:.1f} %, "
                 f"{totals['tokens'] / n:.0f} tokens each"]
        if cut := self.players.cut:
            parts.append(f"{100 * cut / self.players.drawn:.1f} % of actions cut at --max_tokens "
                         f"{self.args.max_tokens}")
        say("; ".join(parts + [env.grader_line() for env in environments]))
        if totals["repeated"]:
            say(f"{totals['repeated']} episodes of tasks that stdin repeats were left out")
        if totals["failed"] and not self.error:
            fail(f"{totals['failed']} episodes failed and were not written; --resume FILE plays "
                 "them again")
        if self.error:
            raise self.error


async def collect(args, emit):
    """Plays all episodes, and says how it went."""
    done, metas = finished_episodes(args.resume, args.skip_bad)
    for name in Run.SAME:
        for value in metas.get(name, ()):
            if value != getattr(args, name):
                fail(f"--resume {args.resume} holds episodes with --{name} {value}, not "
                     f"{getattr(args, name)}: give the same flags, or another file")
    players = await Players(args).load()
    weights = set(metas.get("model_weights", ())) - {None}
    if players.weights and weights - {players.weights}:
        fail(f"--resume {args.resume} holds episodes of other weights than those at --model "
             f"{args.model}: take the old weights, or another file")
    episodes = Run(args, emit, players, done)
    await episodes.all()
    episodes.summary()


def main(args):
    try:
        asyncio.run(collect(args, open_stdout()))
    except GraderError as e:
        fail(e)


if __name__ == "__main__":
    run(main, ARGS)
