"""Collect episodes: an agent talks with a human for several turns, then submits an answer.

    python collect.py --human http://localhost:8000/v1 -k 4 < tasks.jsonl > episodes.jsonl
    ... | python collect.py --human human.py --agent https://api.openai.com/v1 | ...
    ... | python collect.py --human human.py --candidates 16 | python colbench.py grade > all.jsonl
    ... | python collect.py --human human.py --best_of 4 --critic runs/critic > guided.jsonl
    ... | python collect.py --human human.py -k 4 --resume episodes.jsonl >> episodes.jsonl

human.py defines reply(task, history), which returns the human's next message. An episode is written
as soon as it ends. A record that already has a dialogue gets candidates for its agent's messages.

Below the flags, EpisodeRunner is the method: run_episode, and sample_turn with its candidates. Then
come files, sampling parameters, models in this process (the critic; batches of transformers),
clients of servers, an LLM human, --resume, and the queue of all episodes.

Left out on purpose: lock-step rollouts, where episodes wait for the slowest human; rewards, which
the next stage adds; and paged attention and several GPUs, for which --engine takes a vLLM server.
"""
import asyncio
import base64
import fcntl
import functools
import inspect
import json
import math
import os
import re
import runpy
import sys
import traceback
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import openai
import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from colbench import (ANSWER, OUTPUT, RECORD, Episode, Renderer, RenderError,
                      agent_messages, answered, clean_shape, environment, environments,
                      human_prompt, read_records, settings, task_id, task_kind, without_thinking)
from model import (find_model, load, load_lm, read_actions, reference_logps, turn_actions,
                   turn_logps, weights_digest)
from train_critic import advantage, check_pi_ref, read_critic
from utils import (USAGE, cpus, digest, fail, fail_on_error, open_stdout, parser, private_copy,
                   positive, print_warnings, progress, rng, run, say, version)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# --- flags ----------------------------------------------------------------------------------------

def get_args(argv=None):
    # A new flag tells two runs apart, unless colbench.MAY_DIFFER names it.
    p = parser(__doc__, "%(prog)s [flags] < tasks.jsonl > trajectories.jsonl")
    g = p.add_argument_group("episodes")
    g.add_argument("--model", default="meta-llama/Llama-3.1-8B-Instruct", help="the agent")
    g.add_argument("--agent", metavar="WHO", help="instead of --model, to evaluate it: "
                   "https://.../v1 of a chat model (key: AGENT_API_KEY, else OPENAI_API_KEY), "
                   "fixed:TEXT, or a FILE.py that defines act(task, history), which may be async")
    g.add_argument("--agent_params", type=json.loads, default="{}", metavar="JSON", help="the chat "
                   "model's request parameters, besides --temperature, --top_p and --max_tokens; "
                   "see --human_params")
    g.add_argument("-k", type=positive, default=1, help="episodes per task")
    g.add_argument("--max_turns", type=positive, default=10, help="most agent messages per "
                   "episode; the last is the answer")
    g.add_argument("--concurrency", type=positive, default=256, help="episodes to run at once")
    g.add_argument("--resume", metavar="FILE", help="skip the episodes that FILE has; a last line "
                   "that is truncated is removed")
    g = p.add_argument_group("human")
    g.add_argument("--human", metavar="WHO", help="https://.../v1 of an LLM (key: OPENAI_API_KEY), "
                   "fixed:TEXT, or a FILE.py that defines reply(task, history); unless that is "
                   "async, all other episodes wait for it")
    g.add_argument("--human_params", type=json.loads, default="{}", metavar="JSON", help="the "
                   "LLM's request parameters, besides temperature 0 and max_tokens 1024; null "
                   'removes one, "model" chooses one of several')
    add_sampling_flags(p)
    add_engine_flags(p)
    args = p.parse_args(argv)
    check_args(args)
    return args


def add_sampling_flags(p):
    g = p.add_argument_group("sampling")
    g.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    g.add_argument("--top_p", type=float, default=1.0,
                   help="nucleus sampling: total probability to keep")
    g.add_argument("--max_tokens", type=positive, default=1024, help="most tokens per message")
    g.add_argument("--thinking", type=int, default=0, choices=[0, 1],
                   help="1: let a reasoning model think, unseen by the human")
    g.add_argument("--seed", type=int, default=0, help="random seed of a --model; with "
                   "transformers, sampling repeats up to rounding")
    g.add_argument("--candidates", type=int, default=0,
                   help="alternative messages to sample per turn, not sent; 16 for stage 2")
    g.add_argument("--candidates_share", type=float, default=1.0,
                   help="share of the episodes that get candidates")
    g.add_argument("--best_of", type=positive, default=1,
                   help="messages to sample per turn; the one that --critic scores highest is sent")
    g.add_argument("--critic", metavar="WHO", help="--out of train_critic.py, a model (the --model "
                   "itself is the untrained critic), or a FILE.py with advantages(task, history, "
                   "actions); it sees the reference, so this is no fair test of the agent")


def add_engine_flags(p):
    g = p.add_argument_group("engine")
    g.add_argument("--engine", metavar="URL", help="http://host:port/v1 of a vLLM server "
                   "(--logprobs-mode processed_logprobs), many times as fast on a GPU; without it, "
                   "transformers")
    g.add_argument("--max_batch_tokens", type=positive, default=65536,
                   help="most tokens in transformers' batch, with padding")
    g.add_argument("--dtype", default="auto", choices=["auto", "bf16", "fp32"],
                   help="of transformers; auto: bf16 on a GPU, fp32 on a CPU")
    g.add_argument("--timeout", type=float, default=1800.0,
                   help="seconds for a request to a server, with its retries")
    g.add_argument("--retries", type=int, default=8, help="how often to retry a request to a "
                   "server; 8 retries take about a minute")


def check_args(args):
    """Exits if flags would silently give wrong episodes, or episodes without an end."""
    if not (args.temperature >= 0 and 0 < args.top_p <= 1):  # NaN, too
        fail("--temperature must be at least 0, and --top_p in (0, 1]")
    if not args.temperature and (args.candidates or args.best_of > 1):
        fail("--temperature 0 makes all --candidates and --best_of of a turn the same message")
    if (args.best_of > 1) != bool(args.critic):
        fail("--best_of (2 or more) and --critic need each other; give both or neither")
    if args.agent and (args.candidates or args.critic):
        fail("--candidates and --best_of need a --model that samples, not an --agent")


# --- an episode -----------------------------------------------------------------------------------

class ContextFull(ValueError):
    """The dialogue leaves no room in the model's context for another message."""


class EpisodeRunner:
    """Runs episodes. It calls these functions, of which `engine` is async and the others may be:

        await engine(prompt_ids, keys, max_new)  [(token_ids, logprobs)], one message per key
        act(task, history)                       instead of the engine: the message of --agent
        reply(task, history)                     the human's reply
        critic(task, history, actions)           one advantage per action

    A key names a message and seeds it; it starts with (seed, task id, sample, turn). A message has
    at most max_new tokens, the last of them in chat.stop unless it is truncated. Its log-probs are
    those of the distribution that is sampled (see sampling_logps).
    """

    def __init__(self, args, kinds=None):
        """kinds: see run_meta. load() sets what depends on models, agent and human."""
        self.args, self.meta = args, run_meta(args, kinds)
        self.engine = self.act = self.reply = self.critic = None
        self.chat = self.max_context = None  # of --model
        self.opening = ""  # see model.Chat

    async def run_episode(self, task, sample):
        """Runs one episode; returns the new fields of its record."""
        episode = Episode(task, self.args.max_turns, self.opening)
        while not episode.ended:
            key = self.args.seed, task_id(task), sample, episode.turn
            try:
                message = await self.next_message(task, episode.history, key)
            except ContextFull:
                if episode.turn == 0:
                    raise
                episode.abandon()
                break
            episode.act(message)
            if not episode.ended:
                reply = await call_user_function(self.reply, task, episode.history)
                if not isinstance(reply, str):
                    raise ValueError(f"reply() must return text, not {reply!r}")
                episode.reply(reply)
        return {"sample": sample, **episode.fields(), "meta": self.meta}

    async def next_message(self, task, history, key):
        """Returns the agent's next message, for Episode.act. key: (seed, task id, sample, turn)."""
        if self.act:
            message = await call_user_function(self.act, task, history)
            if not isinstance(message, str):
                clean_shape(message, RECORD["dialogue_history"][0], "act()'s message")
                if "output" not in message:
                    raise ValueError("act()'s message has no output")
            return message
        actions, candidates = await self.sample_turn(history, key, self.args.best_of)
        message = actions[0]
        if self.critic:
            message = await self.best_action(task, history, actions)
        if candidates:
            message["candidates"] = candidates
        return message

    async def best_action(self, task, history, actions):
        """Returns the action to which the critic gives the highest advantage."""
        advantages = [*await call_user_function(self.critic, task, history, actions)]
        if len(advantages) != len(actions) or not all(map(math.isfinite, advantages)):
            raise ValueError(f"a critic must give {len(actions)} finite numbers, not {advantages}")
        return actions[advantages.index(max(advantages))]

    async def sample_turn(self, history, key, n_actions):
        """Samples n_actions messages and the turn's candidates; returns two lists of actions."""
        keys = [(*key, j) for j in range(n_actions)]
        if rng("share", *key[:3]).random() < self.args.candidates_share:  # for a whole episode
            keys += [(*key, "candidate", j) for j in range(self.args.candidates)]
        if not keys:
            return [], []
        prompt = self.chat.prompt_ids(history, self.args.thinking)
        max_new = min(self.args.max_tokens, self.max_context - len(prompt))
        if max_new <= 0:
            raise ContextFull(f"the context is full: {len(prompt)} of {self.max_context} tokens")
        sampled = await self.engine(prompt, keys, max_new)
        n_tokens = [len(ids) for ids, _ in sampled]
        USAGE.get().update(agent_prompt_tokens=len(prompt),
                           agent_completion_tokens=sum(n_tokens[:n_actions]),
                           candidates_completion_tokens=sum(n_tokens[n_actions:]))
        actions = [self.as_action(ids, logprobs) for ids, logprobs in sampled]
        candidates = actions[n_actions:]
        for candidate in candidates:  # only the sum, to save space
            candidate["logprob"] = round(sum(candidate.pop("logprobs")), 6)
        return actions[:n_actions], candidates

    def as_action(self, ids, logprobs):
        """Returns sampled tokens as an action (see colbench.ACTION)."""
        if not all(abs(x) < 1000 for x in logprobs):  # NaN, too; vLLM's -inf is -9999
            raise ValueError("log-probs are NaN or infinite; check the weights")
        if max(ids) >= len(self.chat.tokenizer):
            raise ValueError(f"token {max(ids)} is not in --model's vocabulary; does --engine "
                             "serve another model?")
        action = {"output": self.chat.decode(ids), "token_ids": ids,
                  "logprobs": [round(x, 6) for x in logprobs]}
        if ids[-1] not in self.chat.stop:
            action["cut"] = True
        return action

    async def add_candidates(self, record, sample):
        """Gives a dialogue's messages new candidates; returns the new fields of its record."""
        key = self.args.seed, task_id(record["task"]), sample
        for turn, (history, actions) in enumerate(turn_actions(record)):
            message = actions[0]
            message.pop("candidates", None)  # of an earlier run, perhaps of another model
            with suppress(ContextFull):
                _, candidates = await self.sample_turn(history, (*key, turn), 0)
                if candidates:
                    message["candidates"] = candidates
        meta = {"thinking": self.args.thinking, "candidates_meta": self.meta}  # beside the old meta
        return {"sample": sample, "answered": answered(record), "meta": meta}

    # loading

    async def load(self):
        """Asks servers which model they serve, and loads local models; returns self."""
        args = self.args
        if not args.agent:
            self.load_chat()
        if args.human:
            params = {"temperature": 0, "max_tokens": 1024, **args.human_params}
            self.reply = await self.load_role("human", "reply", llm_reply, params)
        if args.agent:
            params = {"temperature": args.temperature, "top_p": args.top_p,
                      "max_tokens": args.max_tokens, **args.agent_params}
            self.act = await self.load_role("agent", "act", llm_message, params)
        elif args.engine:
            server = Server(args, "engine", args.engine, vllm_params(args, self.chat.stop))
            self.max_context = min(self.max_context, await server.choose_model(args.model))
            self.engine = server.complete
        else:
            self.engine = TransformersEngine(args, self.chat.stop)
        if args.critic and args.critic.endswith(".py"):
            self.critic = load_function(args.critic, "advantages")
        elif args.critic:
            self.critic = Critic(args).advantages
        return self

    def load_chat(self):
        """Loads the chat template of --model."""
        args = self.args
        folder, self.chat, self.max_context = find_model(args.model, weights=not args.engine)
        self.opening = self.chat.opening(args.thinking)
        if not args.engine or os.path.isdir(args.model):  # else the weights need not be here
            self.meta["model_weights"] = weights_digest(folder)

    async def load_role(self, role, function, llm_function, params):
        """Returns what plays the --agent or --human: a file's function, or llm_function's server.

        role: "agent" or "human". params: of the server's requests; null removes one.
        """
        who = getattr(self.args, role)
        if who.startswith(("http://", "https://")):
            params = {name: value for name, value in params.items() if value is not None}
            server = Server(self.args, role, who, params)
            if "model" not in server.body:
                await server.choose_model()
            self.meta[f"{role}_model"] = server.body["model"]
            return functools.partial(llm_function, server)
        if who.startswith("fixed:"):
            return lambda task, history: who.removeprefix("fixed:")
        if who.endswith(".py"):
            return load_function(who, function)
        fail(f"--{role} {who}: give the http://host:port/v1 of an LLM, fixed:TEXT or FILE.py")


# --- files with act(), reply() or advantages() ----------------------------------------------------

def load_function(file, name):
    """Returns the function `name` that a Python file defines; it may be async."""
    sys.path.append(os.path.dirname(os.path.abspath(file)))  # so that it can import its neighbours
    namespace = runpy.run_path(file)
    if name not in namespace:
        fail(f"{file} defines no {name}()")
    return namespace[name]


async def call_user_function(function, *args):
    """Calls an agent, human or critic, which may be async, with copies, which it may change.

    While a function that is not async runs, all other episodes wait.
    """
    result = function(*private_copy(args))
    return await result if inspect.isawaitable(result) else result


# --- sampling -------------------------------------------------------------------------------------
#
# Another parameter, such as min_p, is a flag and some lines here: for vLLM and for transformers.

def vllm_params(args, stop):
    """Returns the parameters of requests to --engine."""
    return {"temperature": args.temperature, "top_p": args.top_p, "top_k": 0, "min_p": 0,
            "repetition_penalty": 1, "stop_token_ids": sorted(stop), "skip_special_tokens": False,
            "logprobs": 0, "return_token_ids": True}


def sampling_logps(args, logits):
    """Returns the log-probs of the distribution to sample from, (R, V), given a model's logits."""
    logps = (logits.float() / (args.temperature or 1)).log_softmax(-1)  # (R, V)
    if args.top_p < 1 and args.temperature:
        ordered, tokens = logps.sort(descending=True)
        tail = ordered.exp().cumsum(-1) - ordered.exp() >= args.top_p  # (R, V), in sorted order
        tail = torch.zeros_like(tail).scatter(-1, tokens, tail)  # in the vocabulary's order
        logps = logps.masked_fill(tail, -math.inf).log_softmax(-1)
    return logps


def sample_tokens(args, logits, generators):
    """Samples a token per row of logits, (R, V); returns tokens and log-probs, both (R,)."""
    logps = sampling_logps(args, logits)
    if args.temperature:
        # inverse transform sampling: u is uniform in [0, 1), also after rounding to fp32
        u = torch.tensor([[g.random() * (1 - 2 ** -24)] for g in generators], device=logits.device)
        cdf = logps.exp().cumsum(-1)  # (R, V)
        token = torch.searchsorted(cdf, u * cdf[:, -1:], right=True)  # (R, 1)
        token = token.clamp(max=cdf.shape[1] - 1)  # NaN logits give an index past the end
    else:
        token = logps.argmax(-1, keepdim=True)
    return token[:, 0], logps.gather(1, token)[:, 0]


# --- models in this process -----------------------------------------------------------------------

TREE_TOKENS = 16384  # most tokens per forward of the critic
COMPUTE_THREAD = ThreadPoolExecutor(1)  # of TransformersEngine; the event loop goes on meanwhile


class Critic:
    """The --critic as pi, with pi_ref and its context as in its training.

    A model that train_critic.py has not trained is compared with --model, which reads no hidden
    information. So --model itself is the untrained critic.
    """

    def __init__(self, args):
        flags = read_critic(args.critic).get("args", {})
        pi_ref = flags.get("model", args.model)
        check_pi_ref(args.critic, pi_ref)
        self.ref_reads_hidden = flags.get("ref_context") == "hidden"
        self.thinking = args.thinking
        self.pi, self.chat = load(args.critic, DEVICE, args.dtype)
        self.pi_ref, _ = load(pi_ref, DEVICE, args.dtype)

    def advantages(self, task, history, actions):
        record = {"task": task, "meta": {"thinking": self.thinking}}
        read = read_actions(self.chat, record, history, actions, pi_reads_hidden=True,
                            ref_reads_hidden=self.ref_reads_hidden)
        ref_turn_of = {action.turn: action.ref_turn for action in read}
        ref_logps = reference_logps(self.pi_ref, ref_turn_of, TREE_TOKENS, label=None)
        logps = turn_logps(self.pi, list(ref_logps), TREE_TOKENS)
        return [advantage(logps[x.turn], ref_logps[x.turn]).item() for x in read]


class Request(NamedTuple):
    """Messages to sample after a prompt. The result is the engine's, see EpisodeRunner."""
    prompt: tuple  # token ids
    rows: list     # [Row]
    size: int      # most tokens of a row, with the prompt
    result: asyncio.Future


class Row:
    """A message that is being sampled. key: see EpisodeRunner."""

    def __init__(self, key, max_new):
        self.rng, self.max_new = rng(*key), max_new
        self.ids, self.logps, self.ended = [], [], False


class TransformersEngine:
    """Samples with transformers in this process: a forward reads one token of all messages.

    The batch has a row for each message that is being sampled. A prompt is read once, then its keys
    and values are copied into the rows of its messages. Ended rows leave the batch, and those of
    new requests join. A step ends when a request does.

    The same key gives the same message unless rounding, which depends on the batch, flips a token:
    with SmolLM2-135M this happens to about one message in ten, and more often to long ones.

    Shapes: R rows, W tokens of the longest row, P prompts, L tokens of the longest, V vocabulary,
    H query heads, KV key-value heads, D head size. Padding is at the left.
    """

    def __init__(self, args, stop):
        self.lm, _ = load_lm(args.model, DEVICE, args.dtype)
        self.lm.set_attn_implementation("grouped")
        self.args, self.stop = args, stop
        self.waiting, self.running = [], []  # requests
        self.stepping = None  # the task that computes steps
        self.rows = []  # the batch
        self.mask = self.cache = None  # (R, W), 0 for padding; the rows' keys and values

    async def __call__(self, prompt, keys, max_new):
        rows = [Row(key, max_new) for key in keys]
        result = asyncio.get_running_loop().create_future()
        self.waiting.append(Request(tuple(prompt), rows, len(prompt) + max_new, result))
        if self.stepping is None or self.stepping.done():
            self.stepping = asyncio.create_task(self.run_steps())
        return await result

    async def run_steps(self):
        """Computes steps until no request is left; an error reaches all episodes that wait."""
        loop = asyncio.get_running_loop()
        try:
            while self.waiting or self.running:
                if self.waiting:
                    # Let the episodes to which the last step gave a result submit their next
                    # request, so that batches are full, and the same in each run. Only an episode
                    # whose human waits, as for a server, joins a later step.
                    await asyncio.sleep(0)
                new = self.admit()
                self.running += new
                ended = await loop.run_in_executor(COMPUTE_THREAD, self.compute, new)
                for request in ended:
                    request.result.set_result([(row.ids, row.logps) for row in request.rows])
                self.running = [r for r in self.running if not r.result.done()]
        except Exception as e:
            for request in self.waiting + self.running:
                request.result.set_exception(e)
            self.waiting, self.running, self.rows = [], [], []

    def admit(self):
        """Removes and returns the waiting requests that fit, at least one if none is running."""
        # Wait until the new messages are a quarter of the batch, so that prompts are read together.
        # Ended rows count as long as they are in the batch (see drop_ended_rows).
        if sum(len(request.rows) for request in self.waiting) < len(self.rows) / 4:
            return []
        new = []
        while self.waiting:
            batch = [*self.running, *new, self.waiting[0]]
            tokens = max(r.size for r in batch) * sum(len(r.rows) for r in batch)  # at most
            if len(batch) > 1 and tokens > self.args.max_batch_tokens:
                break
            new.append(self.waiting.pop(0))
        return new

    @torch.no_grad()
    def compute(self, new):
        """Starts the new requests, then samples a token per row until requests are complete.

        Returns these.
        """
        if new:
            self.read_prompts(new)
        while True:
            ended = [r for r in self.running if all(row.ended for row in r.rows)]
            if ended:
                return ended
            self.read_last_tokens()

    def read_prompts(self, new):
        """Adds the new requests' rows to the batch, and samples their first tokens."""
        prompts = [*dict.fromkeys(request.prompt for request in new)]  # P different ones
        index = {prompt: i for i, prompt in enumerate(prompts)}
        padded = pad_sequence([*map(torch.tensor, prompts)], True, -1, "left").to(DEVICE)
        mask, cache = (padded >= 0).long(), DynamicCache()  # (P, L)
        positions = (mask.cumsum(1) - 1).clamp(0)  # (P, L)
        logits = self.lm(input_ids=padded.clamp(0), attention_mask=mask, logits_to_keep=1,
                         position_ids=positions, past_key_values=cache).logits[:, 0]
        prompt_of = [index[request.prompt] for request in new for _ in request.rows]
        cache.batch_select_indices(prompt_of)
        mask = mask[prompt_of]
        if self.rows:  # join those that are running
            mask = join(self.mask[..., None], mask[..., None])[..., 0]
            for layer, old in zip(cache.layers, self.cache.layers):
                layer.keys = join(old.keys, layer.keys)
                layer.values = join(old.values, layer.values)
        rows = [row for request in new for row in request.rows]
        self.rows, self.mask, self.cache = self.rows + rows, mask, cache
        self.append_tokens(logits[prompt_of], rows)

    def read_last_tokens(self):
        """Reads the last token of each row, and samples the next one."""
        ids = torch.tensor([[row.ids[-1]] for row in self.rows], device=DEVICE)
        is_live = torch.tensor([[not row.ended] for row in self.rows], device=DEVICE)
        self.mask = pad(self.mask, (0, 1), value=1)  # (R, W)
        # position 0 for ended rows, because their own may exceed the model's maximum
        positions = (self.mask.sum(1, True) - 1) * is_live  # (R, 1)
        logits = self.lm(input_ids=ids, attention_mask=self.mask, position_ids=positions,
                         past_key_values=self.cache).logits[:, 0]  # (R, V)
        self.append_tokens(logits, self.rows)

    def append_tokens(self, logits, rows):
        """Samples the next token of each row that has not ended, from its logits."""
        live = [i for i, row in enumerate(rows) if not row.ended]
        tokens, logps = sample_tokens(self.args, logits[live], [rows[i].rng for i in live])
        for i, token, logp in zip(live, tokens.tolist(), logps.tolist()):
            row = rows[i]
            row.ids.append(token)
            row.logps.append(logp)
            row.ended = token in self.stop or len(row.ids) == row.max_new
        self.drop_ended_rows()

    def drop_ended_rows(self):
        """Drops ended rows of the batch, and padding, once that frees an eighth of it."""
        kept = [i for i, row in enumerate(self.rows) if not row.ended]
        first = self.mask[kept].any(0).long().argmax()  # before it, all kept rows have padding
        if self.mask[kept, first:].numel() <= 7 / 8 * self.mask.numel():
            self.rows = [self.rows[i] for i in kept]
            self.mask = self.mask[kept, first:]
            for layer in self.cache.layers:
                layer.keys = layer.keys[kept, :, first:]
                layer.values = layer.values[kept, :, first:]


def join(a, b):
    """Joins the rows of a and b, (rows, ..., tokens, size), padded at the left to equal lengths."""
    longest = max(a.shape[-2], b.shape[-2])
    return torch.cat([pad(x, (0, 0, longest - x.shape[-2], 0)) for x in (a, b)])


def grouped_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """transformers' "sdpa", which copies the keys for each query head if rows are padded.

    This one does not, which makes a step two to four times as fast.
    query: (R, H, T, D); key, value: (R, KV, W, D). Returns ((R, T, H, D), no weights).
    """
    if query.shape[2] > 1:  # prompts
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling,
                                      **kwargs)
    groups = query.unflatten(1, (key.shape[1], -1))[:, :, :, 0]  # (R, KV, H / KV, D)
    out = scaled_dot_product_attention(groups, key, value, attention_mask, scale=scaling)
    return out.flatten(1, 2)[:, None], None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)


# --- servers --------------------------------------------------------------------------------------

API_KEYS = {"agent": ["AGENT_API_KEY", "OPENAI_API_KEY"], "human": ["OPENAI_API_KEY"],
            "engine": ["VLLM_API_KEY"]}  # environment variables; the first that is set counts


class Server:
    """A client of an OpenAI-compatible server, for two kinds of requests: chat and complete.

    body: the fields that all requests share.
    """

    def __init__(self, args, role, url, body):
        self.role, self.name, self.body = role, without_secrets(url), body
        self.timeout = args.timeout
        key = next(filter(None, map(os.environ.get, API_KEYS[role])), "none").strip()
        # a redirect could carry the key and the hidden information to another host
        self.client = openai.AsyncOpenAI(
            base_url=url, api_key=key, max_retries=args.retries,
            timeout=openai.Timeout(args.timeout, connect=30),
            http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False))

    async def choose_model(self, wanted=None):
        """Sets body["model"] to the wanted one, or to the only one that is served.

        Returns the length of its context, if the server reports it.
        """
        try:
            reply = await self.client.get("/models", cast_to=object)
            served = {model["id"]: model.get("max_model_len") for model in reply["data"]}
        except Exception as e:
            fail(f"{self.name}/models has no list of models (does the address end in /v1?): {e}")
        name = [*served][0] if len(served) == 1 else wanted
        if wanted not in (None, name):
            say(f"{self.name} serves {name}, which is taken for --model {wanted}")
        if name not in served:
            fail(f"{self.name} serves {', '.join(served)}; choose one by --human_params or "
                 "--agent_params, or for --engine by --model")
        self.body["model"] = name
        return served[name] or math.inf

    async def post(self, path, **body):
        """Returns the server's reply to a request; OSError if there is none."""
        try:
            async with asyncio.timeout(self.timeout):
                return await self.client.post(path, cast_to=object, body={**self.body, **body})
        except TimeoutError:
            raise OSError(f"{self.name}: no reply within --timeout") from None
        except openai.OpenAIError as e:
            raise OSError(f"{self.name}: {str(e.__cause__ or e)[:300]}") from None

    async def chat(self, messages):
        """Returns the message that a chat model sends, without thoughts (see colbench.ACTION)."""
        reply = await self.post("/chat/completions", messages=messages)
        usage = reply.get("usage") or {}
        n_read, n_written = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
        # which model replied, because a router may choose another one than was asked for
        USAGE.get().update({f"{self.role}_replies_by_{reply.get('model')}": 1,
                            f"{self.role}_prompt_tokens": n_read,
                            f"{self.role}_completion_tokens": n_written,
                            f"{self.role}_replies_without_tokens": int(n_read == 0)})
        choice = reply["choices"][0]
        reason, text = choice["finish_reason"], choice["message"]["content"] or ""
        text = without_thinking(text)
        if not text or reason in ("content_filter", "error"):
            raise ValueError(f"the reply is empty or incomplete: {reason}")
        message = {"output": text}
        if reason in ("length", "max_tokens"):
            message["cut"] = True
        if n_written:
            message["completion_tokens"] = n_written
        return message

    async def complete(self, prompt, keys, max_new):
        """Samples with a vLLM server: see EpisodeRunner's engine. All texts go as token ids.

        vLLM takes one seed per request, and seeds message i with seed + i. In another batch the
        same seed may give other tokens.
        """
        reply = await self.post("/completions", prompt=prompt, n=len(keys), max_tokens=max_new,
                                seed=rng(*keys[0]).getrandbits(31))
        reasons = [choice["finish_reason"] for choice in reply["choices"]]
        if len(reasons) != len(keys) or {*reasons} - {"stop", "length"}:
            raise ValueError(f"messages are missing or incomplete: {reasons}")
        return [(choice["token_ids"], choice["logprobs"]["token_logprobs"])
                for choice in reply["choices"]]


def without_secrets(address):
    """Returns an address without user, password and query; other texts as they are."""
    return re.sub(r"^(https?://)(?:[^/?]*@)?([^?]*).*", r"\1\2", address)


async def llm_message(server, task, history):
    """Returns the message of a chat model as the agent, which reads only roles and contents."""
    return await server.chat([{"role": m["role"], "content": m["content"]} for m in history])


# --- an LLM human ---------------------------------------------------------------------------------
#
# It reads the hidden information, and sees web pages. The agent sees only what it says in its own
# name, without quotes of the reference.

# A speaker's name at the start of a line, such as "You: ", "**Assistant:** " or "### Human:"
SPEAKER = re.compile(
    r"^ ?(?:[#>]+ )?[*_\[]*(?:the |ai )?(?:you|user|human|colleague|assistant|agent|ai)[*_\]]*:"
    r"[*_]*(?!\w)", re.M | re.I)


async def llm_reply(server, task, history):
    """Returns the reply of a chat model as the human."""
    env, content = environment(task), human_prompt(task, history)
    if env.shows_pages:
        try:
            pages = await asyncio.to_thread(renderer().render_pair, task, history[-1]["content"])
        except RenderError as e:
            return f"i can't see your page: {e}"
        content = [{"type": "text", "text": content}]
        for page in pages:
            url = "data:image/png;base64," + base64.b64encode(page["png"]).decode()
            content.append({"type": "image_url", "image_url": {"url": url}})
    message = await server.chat([{"role": "user", "content": content}])
    own = first_speech(message["output"])
    if not own:
        raise ValueError("the reply is only a speaker's name")
    reply = own if env.shows_pages else redact(own, task)
    # truncation matters only if it is in the part that the agent reads
    if "cut" in message and message["output"].endswith(own) and len(reply) < env.reply_chars:
        raise ValueError("the reply is truncated: start a new file with other --human_params, such "
                         'as {"max_tokens": 4000}')
    return reply


@functools.cache
def renderer():
    """Returns the Renderer of all episodes, which is started for the first page."""
    return Renderer(cpus())


def first_speech(reply):
    """Returns the first text between speakers' names: an LLM may continue the whole dialogue.

    Of "You: yes.\nAssistant: why?\nYou: so" that is "yes."
    """
    return next((text.strip() for text in SPEAKER.split(reply) if text.strip()), "")


def redact(reply, task):
    """Replaces lines of the reference that the reply quotes by "[...]", however they are spaced.

    A quote is of one line or of several in sequence, and has 12 or more characters. A task's own
    hidden information may be quoted: it has the facts that the human is asked for.
    """
    lines = ["".join(line.split()) for line in task["ground_truth"].split("\n") if line.strip()]
    bare, quotes = "".join(reply.split()), []
    for start in range(len(lines)):
        for end in range(start + 1, len(lines) + 1):
            quote = "".join(lines[start:end])
            if quote not in bare:
                break
            if len(quote) >= 12:
                quotes.append(quote)
    for quote in sorted(quotes, key=len, reverse=True):
        reply = re.sub(r"\s*".join(map(re.escape, quote)), "[...]", reply)
    return reply


# --- --resume -------------------------------------------------------------------------------------

def run_meta(args, kinds=None):
    """Returns what determines episodes: flags, files by their hashes, and prompts.

    kinds: of tasks, whose prompts count; by default all.
    """
    meta = settings(vars(args))
    if args.agent:  # these do not reach it, so they must not tell two of its runs apart
        del meta["model"], meta["seed"]
    for name in ("agent", "human", "critic"):
        if meta[name]:
            meta[name] = fingerprint(meta[name])
    of_kinds = [environments()[kind] for kind in sorted(kinds or environments())]
    prompts = [(ANSWER, OUTPUT, env.agent_prompt, env.human_prompt) for env in of_kinds]
    return meta | {"version": version(), "prompts": digest(prompts)}


def fingerprint(who):
    """Returns a file's or folder's name with a hash of its content; an address without password."""
    if not os.path.exists(who):
        return without_secrets(who)
    content = weights_digest(who) if os.path.isdir(who) else digest(Path(who).read_bytes())
    return f"{Path(who).name} {content}"


def open_to_resume(path):
    """Opens the --resume file, and locks it until it is closed. Removes a truncated last line."""
    with fail_on_error(f"--resume {path}"):
        f = open(path, "rb+")
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of two runs, both would append
    last = b""
    for last in f:
        pass
    if last.startswith(b"{") and not last.endswith(b"\n"):  # a kill has truncated it
        f.truncate(f.tell() - len(last))
    f.seek(0)
    return f


def finished_episodes(f, meta, tasks):
    """Returns {(task id, sample)} of the episodes in an open --resume file. tasks: of read_jobs.

    Exits if its episodes differ from this run's `meta` in a setting that both have.
    """
    done, new = set(), settings(meta)
    if not os.path.getsize(f.name):  # read_records would refuse it
        return done
    for r in read_records(f, "sample", source=f.name, tasks=tasks, with_failed=True):
        if "failed" not in r:
            done.add((task_id(r["task"]), r["sample"]))
        old = r.get("meta", {})
        old = settings(old.get("candidates_meta", old))  # if add_candidates wrote it
        for name in new.keys() & old.keys():
            if old[name] != new[name]:
                fail(f"--resume {f.name} holds episodes with {name} {old[name]}, not {new[name]}; "
                     "use the same flags, files and weights, or another file")
    return done


def read_jobs(args, tasks):
    """Yields (record, sample) of each episode of stdin's tasks. tasks: see read_records.

    The episodes of a task are numbered 0, 1, ... An existing dialogue keeps its `sample`, or gets
    the next one that is free.
    """
    taken = set()  # (task id, sample) of stdin
    for record in read_records(sys.stdin, tasks=tasks):
        task, name = record["task"], task_id(record["task"])
        record["task"] = {"kind": task_kind(task), **task, "id": name}
        k, sample = args.k, 0
        if record.get("dialogue_history"):
            k, sample = 1, record.get("sample", 0)
            check_candidates_flags(args, record)
        elif not args.human:
            fail("--human is missing; --help says what it takes")
        for _ in range(k):
            while (name, sample) in taken:
                sample += 1
            taken.add((name, sample))
            yield record, sample


def check_candidates_flags(args, record):
    """Exits if the flags do not fit a record whose dialogue is to get candidates."""
    name, thinking = record["task"]["id"], record.get("meta", {}).get("thinking")
    if not args.candidates:
        fail(f"task {name} already has a dialogue; give --candidates, or remove it")
    if thinking not in (None, args.thinking):
        fail(f"task {name} was sampled with --thinking {thinking}; pass that here, too")


# --- all episodes ---------------------------------------------------------------------------------

MOST_FAILURES = 16  # in a row; then no further episode starts


class Collector:
    """Runs jobs, (record, sample), at most --concurrency at once; emits episodes as they end.

    Of a failed episode it writes why; --resume runs it again. Dialogues that are too long do not
    count towards MOST_FAILURES.
    """

    def __init__(self, runner, jobs, emit):
        self.runner, self.emit, self.jobs = runner, emit, deque(jobs)
        self.usage = Counter()
        self.n = Counter()  # of episodes written and failed, of messages and those truncated
        self.n_failed_in_a_row = 0
        self.bar = progress("episodes", total=len(self.jobs))

    async def worker(self):
        """Runs jobs sequentially until none is left."""
        while self.jobs:
            record, sample = self.jobs.popleft()
            usage = Counter()
            USAGE.set(usage)
            try:
                if record.get("dialogue_history"):
                    fields = await self.runner.add_candidates(record, sample)
                else:
                    fields = await self.runner.run_episode(record["task"], sample)
                self.write(record, fields, usage)
            except Exception as e:
                self.write_failure(record, sample, usage, e)
            self.usage += usage

    def write(self, record, fields, usage):
        """Writes an episode. usage: what it has cost in this run."""
        record = {**record, **fields, "usage": usage + Counter(record.get("usage")),
                  "meta": {**record.get("meta", {}), **fields["meta"]}}
        self.emit(record)
        self.n["written"] += 1
        self.n_failed_in_a_row = 0
        self.bar.update()
        for message in agent_messages(record):
            for action in message, *message.get("candidates", ()):
                self.n.update(messages=1, truncated=action.get("cut", False))

    def write_failure(self, record, sample, usage, e):
        """Prints why an episode failed, and writes it, unless its dialogue was given."""
        if not isinstance(e, (OSError, ValueError)):  # it may be a mistake in code
            traceback.print_exception(e)
        task, why = record["task"], f"{type(e).__name__}: {e}"
        say(f"task {task['id']}, sample {sample} failed: {why}")
        if not record.get("dialogue_history"):
            meta = {**record.get("meta", {}), **self.runner.meta}  # as that of a later episode
            self.emit({"task": task, "sample": sample, "failed": why, "usage": usage, "meta": meta})
        self.n["failed"] += 1
        self.n_failed_in_a_row += not isinstance(e, ContextFull)
        if self.n_failed_in_a_row == MOST_FAILURES:
            say(f"{MOST_FAILURES} episodes in a row failed, so no further one starts")
            self.jobs.clear()


async def collect(args, emit):
    """Runs the episodes of stdin's tasks, and writes each as it ends."""
    tasks, done = {}, set()
    jobs = [*read_jobs(args, tasks)]
    kinds = {record["task"]["kind"] for record, _ in jobs}
    runner = await EpisodeRunner(args, kinds).load()
    if args.resume:
        resumed = open_to_resume(args.resume)  # locked until this function returns
        done = finished_episodes(resumed, runner.meta, tasks)
        jobs = [(record, i) for record, i in jobs if (record["task"]["id"], i) not in done]
    collector = Collector(runner, jobs, emit)
    await asyncio.gather(*(collector.worker() for _ in range(args.concurrency)))
    n = collector.n
    print_warnings()  # of the critic
    say(f"wrote {n['written']} episodes ({len(done)} more in the --resume file); "
        f"{100 * n['truncated'] / max(1, n['messages']):.1f} % of messages truncated")
    say(f"usage: {dict(collector.usage)}")
    if n["failed"]:
        fail(f"{n['failed']} episodes failed; --resume FILE reruns them, and what is left")


def main(args):
    asyncio.run(collect(args, open_stdout()))


if __name__ == "__main__":
    run(main, get_args())
