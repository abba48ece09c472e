"""Collect episodes: an agent talks with a human for several turns, then submits an answer.

    python collect.py --human http://localhost:8000/v1 -k 4 < tasks.jsonl > episodes.jsonl
    ... | python collect.py --human human.py --agent https://api.openai.com/v1 | ...
    ... | python collect.py --human human.py --candidates 16 | python colbench.py grade > all.jsonl
    ... | python collect.py --human human.py --best_of 4 --critic runs/critic > guided.jsonl
    ... | python collect.py --human human.py -k 4 --resume episodes.jsonl >> episodes.jsonl

human.py defines reply(task, history), which returns the human's next message. An episode is written
as soon as it ends. A record that already has a dialogue gets candidates for its agent's messages.

Below the flags, EpisodeRunner is the method: run_episode, and sample_turn with its candidates. A
reader of the method may skip what follows: models in this process (batches, the critic, sampling
with transformers), clients of servers, files with functions of the user, what --resume compares,
and the queue of all episodes.

Left out on purpose: lock-step rollouts, where episodes wait for the slowest human; rewards, which
the next stage adds; and paged attention and several GPUs, for which --engine takes a vLLM server.
"""
from utils import (digest, fail, fail_on_error, flag, inline, open_stdout, parse_json, parser,
                   print_warnings, private_copy, progress, rng, run, say, show_traceback, version)

import asyncio
import base64
import fcntl
import inspect
import json
import math
import os
import re
import runpy
import sys
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from colbench import (ANSWER, ENVIRONMENTS, OUTPUT, RECORD, Episode, Renderer,
                      RenderError, Seen, answered, check_shape, cpus, environment, human_prompt,
                      message_texts, read_records, settings, task_id, task_kind,
                      without_thinking)


# what some flags need, see utils.flag
SAMPLED, LOCAL = "with a model as the agent", "without --engine or --agent"
SERVERS = "with a server as --engine, --agent or --human"


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] < tasks.jsonl > trajectories.jsonl")
    g = p.add_argument_group("episodes")
    flag(g, "model", "meta-llama/Llama-3.1-8B-Instruct", "the agent", metavar="MODEL",
         only="without --agent")
    flag(g, "agent", None, "instead, to evaluate it: https://.../v1 of a chat model (key: "
         "AGENT_API_KEY, else OPENAI_API_KEY), fixed:TEXT, or a FILE.py that defines act(task, "
         "history), which may be async", metavar="WHO")
    flag(g, "agent_params", "{}", "the chat model's request parameters, besides --temperature, "
         "--top_p and --max_tokens; see --human_params", metavar="JSON",
         only="with an address as --agent")
    flag(g, "-k", 1, "episodes per task", least=1)
    flag(g, "max_turns", 10, "most agent messages per episode; the last is the answer", least=1)
    flag(g, "concurrency", 256, "episodes to run at once", least=1)
    flag(g, "resume", None, "skip FILE's episodes; drop its last line if truncated", metavar="FILE")
    g = p.add_argument_group("human")
    flag(g, "human", None, "https://.../v1 of an LLM (key: OPENAI_API_KEY), fixed:TEXT, or a "
         "FILE.py that defines reply(task, history), which may be async", metavar="WHO")
    flag(g, "human_params", "{}", "the LLM's request parameters, besides temperature 0 and "
         'max_tokens 1024; null removes one, "model" chooses one of several', metavar="JSON",
         only="with an LLM as --human")
    add_sampling_flags(p)
    add_engine_flags(p)
    args = p.parse_args(argv)
    check_args(args)
    return args


def add_sampling_flags(p):
    g = p.add_argument_group("sampling")
    flag(g, "temperature", 1.0, "0: greedy", only=SAMPLED)
    flag(g, "top_p", 1.0, "nucleus sampling: total probability to keep", least=1e-6, most=1,
         only="with --temperature above 0")
    flag(g, "max_tokens", 1024, "most tokens per message", least=1, only=SAMPLED)
    flag(g, "thinking", 0, "1: let a reasoning model think, unseen by the human", choices=[0, 1],
         only="without --agent")
    flag(g, "seed", 0, "random seed; with transformers, sampling repeats up to rounding")
    flag(g, "candidates", 0, "alternative messages to sample per turn, not sent; 16 for stage 2",
         only="without --agent")
    flag(g, "candidates_share", 1.0, "share of the episodes that get candidates", most=1,
         only="with --candidates")
    flag(g, "best_of", 1, "messages to sample per turn; the highest-scoring is sent", least=1,
         only="without --agent")
    flag(g, "critic", None, "--out of train_critic.py, or a FILE.py with advantages(task, history, "
         "actions); it sees the reference, so this is no fair test of the agent", metavar="WHO",
         only="without --agent")
    flag(g, "logprob_weight", 0.0, "send the message of the highest advantage + this * log-prob",
         only="with --best_of")


def add_engine_flags(p):
    g = p.add_argument_group("engine")
    flag(g, "engine", None, "http://host:port/v1 of a vLLM server (--logprobs-mode "
         "processed_logprobs), many times as fast on a GPU; default: transformers", metavar="URL",
         only="without --agent")
    flag(g, "max_batch_tokens", 65536, "most tokens in the batch, with padding",
         only=LOCAL)
    flag(g, "dtype", "auto", "auto: bf16 on a GPU, fp32 on a CPU",
         choices=["auto", "bf16", "fp32"], only=LOCAL)
    flag(g, "timeout", 1800.0, "seconds after which a request is retried", only=SERVERS)
    flag(g, "retries", 8, "how often to retry a failed request; 8 retries take about a minute",
         only=SERVERS)


def check_args(args):
    """Parses the JSON flags, and exits if flags do not fit together."""
    for name in ("human_params", "agent_params"):
        with fail_on_error(f"--{name} is not a JSON object"):
            setattr(args, name, parse_json(getattr(args, name)))
        if not isinstance(getattr(args, name), dict):
            fail(f"--{name} is not a JSON object")
    if (args.best_of > 1) != bool(args.critic):
        fail("--best_of (2 or more) and --critic need each other; give both or neither")
    if not args.temperature and (args.candidates or args.best_of > 1):
        fail("--temperature 0 makes all --candidates and --best_of of a turn the same message")
    if not args.temperature and args.k > 1:
        say("warning: with --temperature 0 only the human can make the episodes of a task differ")


if __name__ == "__main__":
    ARGS = get_args()  # before importing torch, so that --help and flag errors are instant

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from model import (find_model, load, load_lm, pi_and_ref_turns, reference_logps, render, score,
                   stop_ids, think_prefix, turn_actions, weights_digest)
from train_critic import advantage, check_pi_ref, get_args as critic_args

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# --- an episode -----------------------------------------------------------------------------------

class EpisodeError(Exception):
    """Fails one episode; the others continue. (fail() ends the whole run.)"""


class ContextFull(EpisodeError):
    """The dialogue leaves no room in the model's context for another message."""


class EpisodeRunner:
    """Runs episodes. Calls these functions, of which the engine is async and the others may be:

        await engine(prompt_ids, keys, max_new)  [(token_ids, logprobs)], one message per key
        act(task, history)                       instead of the engine: the message of --agent
        reply(task, history)                     the human's reply
        critic(task, history, actions)           one advantage per action

    A key starts with (seed, task id, sample), and seeds its message. A message has at most max_new
    tokens, the last of them in `stop` unless it is truncated. Its log-probs are those of the
    sampling distribution, after --temperature and --top_p.
    """

    def __init__(self, args):
        self.args = args
        self.act = self.critic = None  # load() sets the functions
        self.totals = Counter()
        self.servers = {}  # {"agent" or "human": Endpoint}
        self.resumed = []  # the settings of the episodes in the --resume file
        self.meta = run_meta(args)
        self.opening = ""  # see model.think_prefix
        if not args.agent:
            self.load_tokenizer()

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
                episode.reply(await self.human_reply(task, episode.history))
        return {"sample": sample, **episode.fields(), "meta": self.meta}

    async def next_message(self, task, history, key):
        """Returns the agent's next message, a dict. key: (seed, task id, sample, turn)."""
        if self.act:
            message = checked_message(await call_user_function(self.act, task, history))
            self.totals.update(actions=1, truncated=bool(message.get("cut")))
            return message
        actions, candidates = await self.sample_turn(history, key, self.args.best_of)
        message = actions[0]
        if self.critic:
            message = await self.best_action(task, history, actions)
        if candidates:
            message["candidates"] = candidates
        return message

    async def best_action(self, task, history, actions):
        """Returns the action with the highest advantage + --logprob_weight * log-prob."""
        scores = await call_user_function(self.critic, task, history, actions)
        if len(scores) != len(actions) or not all(map(math.isfinite, scores)):
            raise EpisodeError(f"a critic must give {len(actions)} finite scores, not {scores}")
        values = [score + self.args.logprob_weight * sum(action["logprobs"])
                  for score, action in zip(scores, actions)]
        return actions[values.index(max(values))]

    async def sample_turn(self, history, key, n_actions):
        """Samples n_actions messages and the turn's candidates; returns two lists of actions."""
        keys = [(*key, j) for j in range(n_actions)]
        if rng("share", *key[:3]).random() < self.args.candidates_share:  # for a whole episode
            keys += [(*key, "candidate", j) for j in range(self.args.candidates)]
        if not keys:
            return [], []
        with fail_on_error("--model's chat template rejects the agent's prompt"):
            prompt = render(self.tokenizer, history, self.args.thinking)
        max_new = min(self.args.max_tokens, self.max_context - len(prompt))
        if max_new <= 0:
            raise ContextFull(f"the context is full: {len(prompt)} of {self.max_context} tokens")
        sampled = await self.engine(prompt, keys, max_new)
        actions = [self.as_action(ids, logprobs) for ids, logprobs in sampled]
        candidates = actions[n_actions:]
        for candidate in candidates:  # only the sum, to save space
            candidate["logprob"] = round(sum(candidate.pop("logprobs")), 6)
        return actions[:n_actions], candidates

    def as_action(self, ids, logprobs):
        """Returns sampled tokens as an action (see colbench.ACTION); EpisodeError if unusable."""
        finite = all(x is not None and abs(x) < 1000 for x in logprobs)  # vLLM's -inf is -9999
        if not finite or len(logprobs) != len(ids):
            raise EpisodeError("log-probs are missing, NaN or infinite; check the weights")
        if max(ids) >= len(self.tokenizer):
            raise EpisodeError(f"token {max(ids)} is not in --model's vocabulary; does --engine "
                               "serve another model?")
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        action = {"output": text, "token_ids": ids, "logprobs": [round(x, 6) for x in logprobs]}
        if ids[-1] not in self.stop:
            action["cut"] = True
        self.totals.update(actions=1, truncated="cut" in action)
        return action

    async def human_reply(self, task, history):
        """Returns the human's reply to the last message."""
        reply = await call_user_function(self.reply, task, history)
        if not isinstance(reply, str):
            raise EpisodeError(f"the human's reply is not a string: {reply!r}")
        return reply

    async def add_candidates(self, record, sample):
        """Samples candidates for a dialogue's messages; returns the new fields of its record."""
        key = self.args.seed, task_id(record["task"]), sample
        for turn, (history, actions) in enumerate(turn_actions(record)):
            message = actions[0]
            message.pop("candidates", None)  # of an earlier run, perhaps of another model
            _, candidates = await self.sample_turn(history, (*key, turn), 0)
            if candidates:
                message["candidates"] = candidates
        meta = {"thinking": self.args.thinking, "candidates": self.meta}  # merged into the old meta
        return {"sample": sample, "answered": answered(record), "meta": meta}

    # loading, and --resume

    def load_tokenizer(self):
        """Loads the tokenizer of --model, and reads what the episodes need of its configuration."""
        args = self.args
        folder, self.tokenizer, config = find_model(args.model)
        config = config.get_text_config()
        self.max_context = getattr(config, "max_position_embeddings", None) or math.inf
        with fail_on_error(f"the chat template of --model {args.model} can't be used"):
            self.stop = stop_ids(self.tokenizer, folder)
            self.opening = think_prefix(self.tokenizer, args.thinking)
        self.meta["model_weights"] = weights_digest(folder)

    async def load(self):
        """Asks servers which model they serve, then loads the local models; returns self."""
        args = self.args
        if args.human:
            self.reply = await self.load_role("human", args.human, ChatHuman, "reply")
        if args.agent:
            self.act = await self.load_role("agent", args.agent, ChatAgent, "act")
        self.check_resumed()  # now that the servers have named their models
        if args.engine:
            self.engine = self.servers["agent"] = VllmEngine(args, self.stop)
            await self.engine.find_served_model()
            if self.engine.body["model"] != args.model:
                say(f"{args.engine} serves {self.engine.body['model']}, assumed to be {args.model}")
            self.max_context = min(self.max_context, self.engine.max_context)
        elif not args.agent:
            self.engine = TransformersEngine(args, self.stop)
        if args.critic and args.critic.endswith(".py"):
            self.critic = load_function(args.critic, "advantages")
        elif args.critic:
            self.critic = Critic(args).advantages
        return self

    async def load_role(self, role, who, chat_model, name):
        """Returns the function `name` of `who`, which is the --human or --agent."""
        if who.startswith(("http://", "https://")):
            server = self.servers[role] = chat_model(self.args)
            self.meta[f"{role}_model"] = await server.model_name()
            return getattr(server, name)
        if who.startswith("fixed:"):
            return lambda task, history: who.removeprefix("fixed:")
        if who.endswith(".py"):
            return load_function(who, name)
        fail(f"--{role} {who}: give the http://host:port/v1 of an LLM, fixed:TEXT or FILE.py")

    def check_resumed(self):
        """Fails if the --resume file's episodes differ in a setting that both sides have."""
        for name, new in settings(self.meta).items():
            for old in self.resumed:
                if old.get(name, new) != new:
                    fail(f"--resume {self.args.resume} holds episodes with {name} {old[name]}, not "
                         f"{new}; use the same flags, files and weights, or another file")


# --- models in this process -----------------------------------------------------------------------

COMPUTE_THREAD = ThreadPoolExecutor(1)  # runs all models, so that they don't block the event loop
TREE_TOKENS = 16384  # most tokens per forward of the critic


class Batcher:
    """Batches the requests of many coroutines, and computes them in steps.

    In a step, a subclass's compute(new) starts the new requests, and sets the `result` of at least
    one running request. Steps repeat while there are requests. If compute raises, so does every
    later submit.
    """

    def __init__(self):
        self.waiting, self.running = [], []  # requests
        self.step_end = None  # a future for the end of the step, None while there are no requests

    async def submit(self, **fields):
        """Returns the result of a request that has these fields."""
        request = SimpleNamespace(result=None, **fields)
        self.waiting.append(request)
        if self.step_end is None:
            self.step_end = asyncio.get_running_loop().create_future()
            self.task = asyncio.create_task(self.run_steps())  # asyncio itself keeps no reference
        while request.result is None:
            await self.step_end
        return request.result

    async def run_steps(self):
        """Runs steps until every request has its result."""
        loop = asyncio.get_running_loop()
        while self.waiting or self.running:
            n_waiting = 0  # full and reproducible batches: let coroutines submit until none does
            while n_waiting != len(self.waiting):
                n_waiting = len(self.waiting)
                await asyncio.sleep(0)
            new = self.admit()
            self.running += new
            try:
                await loop.run_in_executor(COMPUTE_THREAD, self.compute, new)
            except Exception as e:
                self.step_end.set_exception(e)
                return
            self.running = [request for request in self.running if request.result is None]
            ended, self.step_end = self.step_end, loop.create_future()
            ended.set_result(None)  # wakes all that submitted; those without a result wait on
        self.step_end = None

    def admit(self):
        """Removes and returns the waiting requests that start now."""
        new, self.waiting = self.waiting, []
        return new


class Critic(Batcher):
    """A learned critic: the finished --out of train_critic.py."""

    def __init__(self, args):
        super().__init__()
        flags = critic_args(["--score", args.critic])
        check_pi_ref(args.critic, flags.model)
        self.ref_reads_c, self.thinking = flags.ref_context == "hidden", args.thinking
        self.pi, self.tokenizer = load(args.critic, DEVICE, "auto")
        self.pi_ref, _ = load(flags.model, DEVICE, "auto")

    async def advantages(self, task, history, actions):
        record = {"task": task, "meta": {"thinking": self.thinking}}
        turns = pi_and_ref_turns(self.tokenizer, record, history, actions, pi_reads_c=True,
                                 ref_reads_c=self.ref_reads_c)
        return await self.submit(turns=turns)

    def compute(self, new):
        ref_turn_of = dict(pair for request in new for pair in request.turns)
        ref_logps = reference_logps(self.pi_ref, ref_turn_of, TREE_TOKENS)
        logps = score(self.pi, list(ref_logps), TREE_TOKENS)
        for request in new:
            request.result = [advantage(logps[turn], ref_logps[turn]).item()
                              for turn, _ in request.turns]


class TransformersEngine(Batcher):
    """Samples with transformers in this process: a forward reads one token of all messages.

    The batch has a row for each message. A prompt is read once, then its keys and values are copied
    into the rows of its messages. Ended messages leave the batch, and those of new requests join.
    The same key gives the same message unless rounding, which depends on the batch, flips a token:
    with SmolLM2-135M this happens to about one message in ten, and more often to long ones.

    Shapes: R rows, W tokens of the longest row, P prompts, L tokens of the longest, V vocabulary,
    H query heads, KV key-value heads, D head size. Padding is at the left.
    """

    def __init__(self, args, stop):
        super().__init__()
        self.lm, _ = load_lm(args.model, DEVICE, args.dtype)
        self.lm.set_attn_implementation("grouped")
        names = inspect.signature(self.lm.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"  # transformers < 5.24
        self.args, self.stop = args, stop
        self.actions = []  # the action of each row
        self.mask = self.cache = None  # (R, W), 0 for padding; the rows' keys and values

    async def __call__(self, prompt, keys, max_new):
        actions = [SimpleNamespace(rng=rng(*key), ids=[], logps=[], max_new=max_new, ended=False)
                   for key in keys]
        return await self.submit(prompt=tuple(prompt), actions=actions, size=len(prompt) + max_new)

    def admit(self):
        """Removes and returns the waiting requests that fit, at least one if none is running."""
        if sum(len(request.actions) for request in self.waiting) < len(self.actions) / 4:
            return []  # wait until many prompts can be read at once
        new = []
        while self.waiting:
            batch = [*self.running, *new, self.waiting[0]]
            tokens = max(r.size for r in batch) * sum(len(r.actions) for r in batch)  # at most
            if len(batch) > 1 and tokens > self.args.max_batch_tokens:
                break
            new.append(self.waiting.pop(0))
        return new

    @torch.no_grad()
    def compute(self, new):
        """Starts the new requests, then samples a token per action until a request is complete."""
        if new:
            self.read_prompts(new)
        ended = []
        while not ended:
            ended = [r for r in self.running if all(action.ended for action in r.actions)]
            if not ended:
                self.read_last_tokens()
        for request in ended:
            request.result = [(action.ids, action.logps) for action in request.actions]

    def read_prompts(self, new):
        """Adds the new requests' rows to the batch, and samples their first tokens."""
        different = dict.fromkeys(request.prompt for request in new)  # P prompts
        prompts = {prompt: row for row, prompt in enumerate(different)}
        padded = pad_sequence([*map(torch.tensor, prompts)], True, -1, "left").to(DEVICE)
        mask, cache = (padded >= 0).long(), DynamicCache()  # (P, L)
        positions = (mask.cumsum(1) - 1).clamp(0)  # (P, L)
        logits = self.lm(input_ids=padded.clamp(0), attention_mask=mask, logits_to_keep=1,
                         position_ids=positions, **{self.cache_name: cache}).logits[:, 0]
        actions = [action for request in new for action in request.actions]
        prompt_of = [prompts[request.prompt] for request in new for _ in request.actions]
        cache.batch_select_indices(prompt_of)
        mask = mask[prompt_of]
        if self.actions:  # join the rows that are running
            mask = join(self.mask[..., None], mask[..., None])[..., 0]
            for layer, old in zip(cache.layers, self.cache.layers):
                layer.keys = join(old.keys, layer.keys)
                layer.values = join(old.values, layer.values)
        self.actions, self.mask, self.cache = self.actions + actions, mask, cache
        self.append_tokens(logits, prompt_of, actions)

    def read_last_tokens(self):
        """Reads the last token of each row, and samples the next one."""
        ids = torch.tensor([[action.ids[-1]] for action in self.actions], device=DEVICE)
        is_live = torch.tensor([[not a.ended] for a in self.actions], device=DEVICE)
        self.mask = pad(self.mask, (0, 1), value=1)  # (R, W)
        # position 0 for ended rows, because their own may exceed the model's maximum
        positions = (self.mask.sum(1, True) - 1) * is_live  # (R, 1)
        logits = self.lm(input_ids=ids, attention_mask=self.mask, position_ids=positions,
                         **{self.cache_name: self.cache}).logits[:, 0]  # (R, V)
        self.append_tokens(logits, range(len(ids)), self.actions)

    def append_tokens(self, logits, rows, actions):
        """Samples the next token of each action, from its row of logits, if it has not ended."""
        live = [(row, action) for row, action in zip(rows, actions) if not action.ended]
        for start in range(0, len(live), 64):  # 64 rows at a time, to bound memory
            some = live[start:start + 64]
            token, logp = self.sample(logits[[row for row, _ in some]],
                                      [action.rng for _, action in some])
            for (_, action), t, p in zip(some, token[:, 0].tolist(), logp[:, 0].tolist()):
                action.ids.append(t)
                action.logps.append(p)
                action.ended = t in self.stop or len(action.ids) == action.max_new
        self.drop_ended_rows()

    def drop_ended_rows(self):
        """Drops ended rows of the batch, and padding, once that frees an eighth of it."""
        kept = [row for row, action in enumerate(self.actions) if not action.ended]
        first = self.mask[kept].any(0).long().argmax()  # before it, all kept rows have padding
        if self.mask[kept, first:].numel() <= 7 / 8 * self.mask.numel():
            self.actions = [self.actions[row] for row in kept]
            self.mask = self.mask[kept, first:]
            for layer in self.cache.layers:
                layer.keys = layer.keys[kept, :, first:]
                layer.values = layer.values[kept, :, first:]

    def sample(self, logits, generators):
        """Samples a token per row of logits, (R, V); returns tokens and log-probs, (R, 1) each."""
        temperature, top_p = self.args.temperature, self.args.top_p
        logps = (logits.float() / (temperature or 1)).log_softmax(-1)  # (R, V)
        if not temperature:
            token = logps.argmax(-1, keepdim=True)
            return token, logps.gather(1, token)
        if top_p < 1:
            ordered, tokens = logps.sort(descending=True)
            tail = ordered.exp().cumsum(-1) - ordered.exp() >= top_p  # (R, V), in sorted order
            logps = logps.masked_fill(tail.scatter(-1, tokens, tail), -math.inf).log_softmax(-1)
        # inverse transform sampling: u is uniform in [0, 1), also after rounding to fp32
        u = torch.tensor([[g.random() * (1 - 2 ** -24)] for g in generators], device=DEVICE)
        cdf = logps.exp().cumsum(-1)  # (R, V)
        token = torch.searchsorted(cdf, u * cdf[:, -1:], right=True)  # (R, 1)
        token = token.clamp(max=cdf.shape[1] - 1)  # NaN logits give an index past the vocabulary
        return token, logps.gather(1, token)


def join(a, b):
    """Joins the rows of a and b, (rows, ..., tokens, size), padded at the left to equal lengths."""
    longest = max(a.shape[-2], b.shape[-2])
    return torch.cat([pad(x, (0, 0, longest - x.shape[-2], 0)) for x in (a, b)])


def grouped_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """transformers' "sdpa", but it does not copy the keys for each query head of a group.

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

class Endpoint:
    """A client of an OpenAI-compatible server. `usage` counts requests and tokens."""
    KEYS = ["OPENAI_API_KEY"]  # environment variables; the first that is set has the API key
    has_answered = False

    def __init__(self, url, args, body):
        """body: fields that all requests share."""
        import openai  # slow
        self.url, self.body, self.usage = url, body, Counter(requests=0)
        names = [name for name in self.KEYS if os.environ.get(name)]
        self.key_name = names[0] if names else self.KEYS[0]
        key = os.environ.get(self.key_name, "none")
        self.client = openai.AsyncOpenAI(
            base_url=url, api_key=key, max_retries=args.retries,
            timeout=openai.Timeout(args.timeout, connect=30))

    async def find_served_model(self):
        """Sets body["model"] and max_context. If several models are served, body must name one."""
        try:
            reply = await self.client.with_options(max_retries=0).get("/models", cast_to=object)
            served = {model["id"]: model.get("max_model_len") for model in reply["data"]}
        except Exception as e:
            fail(f"{self.url} does not list its models (is the server running, does its address "
                 f"end in /v1, is the key in {self.key_name} right?): {error_text(e)}")
        name = [*served][0] if len(served) == 1 else self.body.get("model")
        if name not in served:
            fail(f"{self.url} serves {', '.join(served) or 'no model'}, not {name}; choose one by "
                 "--human_params or --agent_params, or for --engine by --model")
        self.body["model"], self.max_context = name, served[name] or math.inf

    async def request(self, path, parse, **body):
        """Posts a request and returns parse(reply), which raises ValueError for an unusable reply.

        EpisodeError: the server rejects this request, but has answered others; else OSError.
        """
        try:
            reply = await self.client.post(path, cast_to=object, body={**self.body, **body})
            self.usage.update({"requests": 1, **reported_tokens(reply)})
            result = parse(reply)
            self.has_answered = True
            return result
        except (LookupError, TypeError, AttributeError):
            rejected, error = True, "the reply is not that of an OpenAI-compatible server"
        except Exception as e:
            is_invalid = getattr(e, "status_code", None) in (400, 413, 422)
            rejected, error = is_invalid or isinstance(e, ValueError), error_text(e)
        if rejected and self.has_answered:
            raise EpisodeError(f"{self.url}: {error}")
        raise OSError(f"{self.url}: {error}")


def error_text(e):
    """Returns the type and text of a request's error; the cause of a lost connection."""
    words = str(e.__cause__ or "") or e
    return f"{type(e).__name__}: {' '.join(str(words).split())[:200]}"


def reported_tokens(reply):
    """Returns {"prompt_tokens", "completion_tokens"} of a reply; {} if its server reports none."""
    usage = reply.get("usage") or {}
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens") if usage.get(name)}


class VllmEngine(Endpoint):
    """Samples with a vLLM server. Prompts and messages are sent as token ids.

    vLLM takes one seed per request, and seeds message i with seed + i. In another batch the same
    seed may give other tokens.
    """
    KEYS = ["VLLM_API_KEY"]

    def __init__(self, args, stop):
        super().__init__(args.engine, args, {
            "model": args.model, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0,
            "min_p": 0, "repetition_penalty": 1, "stop_token_ids": sorted(stop),
            "skip_special_tokens": False, "logprobs": 0, "return_token_ids": True})

    async def __call__(self, prompt, keys, max_new):
        def parse(reply):
            choices = reply["choices"]
            if any(c["finish_reason"] not in ("stop", "length") for c in choices):
                raise ValueError("a message was aborted; the server is shutting down")
            if len(choices) != len(keys) or not all(c.get("token_ids") for c in choices):
                raise ValueError("messages or their token_ids are missing; use vLLM 0.10 or newer")
            return [(c["token_ids"], c["logprobs"]["token_logprobs"]) for c in choices]

        return await self.request("/completions", parse, prompt=prompt, n=len(keys),
                                  max_tokens=max_new, seed=rng(*keys[0]).getrandbits(31))


class ChatModel(Endpoint):
    """A chat model as the agent or the human, its `role`."""

    def __init__(self, args, **params):
        """params: of its requests; --agent_params or --human_params replaces or removes them."""
        params |= getattr(args, f"{self.role}_params")
        body = {name: value for name, value in params.items() if value is not None}
        super().__init__(getattr(args, self.role), args, body)

    async def model_name(self):
        """Returns the model's name, from the server unless the parameters have it."""
        if "model" not in self.body:
            await self.find_served_model()
        return self.body["model"]


class ChatAgent(ChatModel):
    """A chat model as the agent, which reads the roles and contents of the dialogue, no more."""
    KEYS, role = ["AGENT_API_KEY", "OPENAI_API_KEY"], "agent"

    def __init__(self, args):
        super().__init__(args, temperature=args.temperature, top_p=args.top_p,
                         max_tokens=args.max_tokens)

    async def act(self, task, history):
        messages = [{"role": m["role"], "content": m["content"]} for m in history]
        return await self.request("/chat/completions", chat_message, messages=messages)


class ChatHuman(ChatModel):
    """A chat model as the human, who reads the hidden information and sees web pages."""
    role = "human"

    def __init__(self, args):
        super().__init__(args, temperature=0, max_tokens=1024)
        self.renderer = None  # created for the first page

    async def reply(self, task, history):
        content = human_prompt(task, history)
        if environment(task).shows_pages:
            self.renderer = self.renderer or Renderer(cpus())
            try:
                answer = history[-1]["content"]
                pages = await asyncio.to_thread(self.renderer.render_pair, task, answer)
            except RenderError as e:
                return RENDER_FAILED_REPLY.format(e)
            content = [{"type": "text", "text": content}]
            for page in pages:
                url = "data:image/png;base64," + base64.b64encode(page["png"]).decode()
                content.append({"type": "image_url", "image_url": {"url": url}})
        text = await self.request("/chat/completions", reply_text,
                                  messages=[{"role": "user", "content": content}])
        text = own_words(text)
        return text if environment(task).shows_pages else redact(text, task)


def chat_message(reply):
    """Returns the agent's message of a chat completion as a dict; ValueError for an empty one.

    It has `output`, the text without thoughts, and `cut` if truncated, as a sampled one does.
    """
    text, cut = completion_text(reply)
    if not text:
        raise ValueError("the reply is truncated in its thoughts: allow more tokens, such as by "
                         "--max_tokens 4000")
    message = {"output": text}
    if cut:
        message["cut"] = True
    if tokens := reported_tokens(reply).get("completion_tokens"):
        message["completion_tokens"] = tokens
    return message


def reply_text(reply):
    """Returns the human's reply of a chat completion; ValueError unless it is whole."""
    text, cut = completion_text(reply)
    if cut:
        raise ValueError("the reply is truncated: allow more tokens, such as by "
                         """--human_params '{"max_tokens": 4000}'""")
    return text


def completion_text(reply):
    """Returns (text without thoughts, is truncated) of a chat completion.

    Raises ValueError if it is empty but not truncated, or if a filter or an error has ended it.
    """
    choice = reply["choices"][0]
    reason, content = choice.get("finish_reason"), choice["message"]["content"] or ""
    # if the server's prompt has opened a thought, the reply has only the end of it, </think>
    text = without_thinking("<think>" + content if "</think>" in content else content)
    cut = reason in ("length", "max_tokens")
    if reason in ("content_filter", "error", "tool_calls") or not text and not cut:
        raise ValueError(f"the reply is empty or incomplete, finish_reason {reason}")
    return text, cut


# --- an LLM human's words -------------------------------------------------------------------------
#
# The agent sees only what an LLM human says in its own name, without quotes of the reference.

RENDER_FAILED_REPLY = "i can't see your page: {}"
# A speaker's name at the start of a line, such as "You: ", "**Assistant:** " or "### Human:".
HUMAN_NAME, AGENT_NAME = (
    re.compile(rf"^ ?(?:[#>]+ )?[*_\[]*(?:the |ai )?(?:{names})[*_\]]*:[*_]*(?!\w)", re.M | re.I)
    for names in ("you|user|human|colleague", "assistant|agent|ai"))


def own_words(reply):
    """Returns what the human says, of a reply that may continue the dialogue of human_prompt.

    Of "You: yes.\nAssistant: why?\nYou: so" that is "yes." If the agent's message comes first, it
    is what follows that.
    """
    own, *others = AGENT_NAME.split(reply.strip())
    texts = HUMAN_NAME.split(own)
    if not own and others:
        texts = HUMAN_NAME.split(others[0])[1:] or others  # some LLMs call themselves an assistant
    return next((text.strip() for text in texts if text.strip()), "")


def redact(reply, task):
    """Replaces lines of the reference that the reply quotes by "[...]", however they are spaced.

    A quote is of one line or of several in sequence, and has 12 or more characters.
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


# --- files with act(), reply() or advantages() ----------------------------------------------------

def load_function(file, name):
    """Returns the function `name` that a Python file defines; it may be async."""
    sys.path.append(os.path.dirname(os.path.abspath(file)))  # so that it can import its neighbours
    with fail_on_error(file):
        namespace = runpy.run_path(file)
    if name not in namespace:
        fail(f"{file} defines no {name}()")
    return namespace[name]


async def call_user_function(function, *args):
    """Calls the agent, human or critic, which may be async, with copies, which it may change.

    While a function that is not async runs, all other episodes wait.
    """
    result = function(*private_copy(args))
    if inspect.isawaitable(result):
        result = await result
    return result


def checked_message(returned):
    """Returns act()'s text or dict as a dict with `output`; raises an error for anything else."""
    message = json.loads(json.dumps(returned, allow_nan=False))
    if isinstance(message, str):
        return {"output": message}
    check_shape(message, RECORD["dialogue_history"][0], "act()'s message")
    if "output" not in message and "content" not in message:
        raise ValueError("act()'s message has no output")
    return {"output": message.get("content"), **message}


# --- --resume and the settings that it compares ---------------------------------------------------

# settings of a sampled agent, which --agent does not have
OF_OWN_MODEL = "model thinking best_of critic logprob_weight candidates_share".split()


def run_meta(args):
    """Returns what determines episodes: flags, files by their hashes, and the kinds' prompts."""
    left_out = OF_OWN_MODEL if args.agent else []
    meta = {name: x for name, x in settings(vars(args)).items() if name not in left_out}
    meta |= {name: fingerprint(meta[name]) for name in ("agent", "human", "critic") if name in meta}
    if not args.agent:
        meta["n_candidates"] = args.candidates  # `candidates` has the settings of later ones
    prompts = [(ANSWER, OUTPUT, kind.agent_prompt, kind.human_prompt)
               for kind in ENVIRONMENTS.values()]
    return meta | {"version": version(), "prompts": digest(prompts)}


def fingerprint(who):
    """Returns a file's or folder's name with a hash of its content; any other `who` unchanged."""
    if not who or not os.path.exists(who):
        return who
    with fail_on_error(who):
        content = weights_digest(who) if os.path.isdir(who) else digest(Path(who).read_bytes())
    return f"{Path(who).name} {content}"


def finished_episodes(path, tasks):
    """Returns (file, {(task id, sample): texts}, [settings]) of the --resume file.

    Removes a truncated last line, and locks the file until it is closed. tasks: see Seen.
    """
    done, different = {}, []
    with fail_on_error(f"--resume {path}"):
        f = open(path, "rb+")
    with fail_on_error(f"--resume {path} is in use by another run"):
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    complete_last_line(f)
    if not os.path.getsize(path):  # read_records would refuse an empty file
        return f, done, different
    for r in read_records(f, "sample", source=path, seen=Seen(tasks), with_failed=True):
        if "failed" not in r:
            done[task_id(r["task"]), r["sample"]] = message_texts(r.get("dialogue_history", ()))
        meta = r.get("meta", {})
        meta = settings(meta.get("candidates", meta))  # if add_candidates wrote it
        if meta not in different:
            different.append(meta)
    return f, done, different


def complete_last_line(f):
    """Removes the last line of a file of records if it is truncated, or adds its newline."""
    last = b""
    for last in f:
        pass
    if last.startswith(b"{") and not last.endswith(b"\n"):
        try:
            json.loads(last)
            f.write(b"\n")  # only its newline is missing
        except ValueError:
            f.truncate(f.tell() - len(last))
    f.seek(0)


def read_jobs(args, done, tasks):
    """Yields (record, sample) of each episode of stdin's tasks; sets the kind and id of its task.

    The episodes of a task are numbered 0, 1, ... An existing dialogue keeps its `sample`, or gets
    the next one that is free. `done`: (task id, sample) of the --resume file; these are yielded,
    too, but a dialogue must be the one that the file has.
    """
    taken = set()  # (task id, sample) of stdin
    for record in read_records(sys.stdin, seen=Seen(tasks)):
        task, name = record["task"], task_id(record["task"])
        record["task"] = {"kind": task_kind(task), **task, "id": name}
        k, sample = args.k, 0
        if "dialogue_history" in record:
            k, sample = 1, record.get("sample", 0)
            check_candidates_flags(args, record)
        elif not args.human:
            fail("--human is missing; --help says what it takes")
        for _ in range(k):
            while (name, sample) in taken:
                sample += 1
            taken.add((name, sample))
            texts = message_texts(record.get("dialogue_history", ()))
            if texts and texts != done.get((name, sample), texts):
                fail(f"task {name}, sample {sample} has another dialogue in {args.resume}")
            yield record, sample


def check_candidates_flags(args, record):
    """Exits if the flags do not fit a record whose dialogue is to get candidates."""
    name, thinking = record["task"]["id"], record.get("meta", {}).get("thinking")
    if not args.candidates:
        fail(f"task {name} already has a dialogue; give --candidates, or remove it")
    if thinking not in (None, args.thinking):
        fail(f"task {name} was sampled with --thinking {thinking}; pass that here, too")


# --- all episodes ---------------------------------------------------------------------------------

MOST_FAILURES = 16  # in a row; they end the run


class Collector:
    """Runs jobs, (record, sample), at most --concurrency at once, and writes episodes as they end.

    Of a failed episode it writes why; --resume runs it again. MOST_FAILURES in a row, not counting
    EpisodeErrors, end the run: no new episode starts, and the running ones finish first.
    """

    def __init__(self, runner, jobs, emit):
        """emit: writes a record."""
        self.runner, self.emit, self.jobs = runner, emit, deque(jobs)
        self.n_written = self.n_failed = self.n_failed_in_a_row = 0
        self.error = None  # the one that ends the run

    async def run(self):
        """Runs the jobs; sets `error` if one of them has ended the run early."""
        args = self.runner.args
        await self.runner.load()
        print_warnings()
        self.bar = progress(f"episodes of {args.agent or args.model}", total=len(self.jobs))
        await asyncio.gather(*(self.worker() for _ in range(args.concurrency)))

    async def worker(self):
        """Runs jobs sequentially until none is left."""
        while self.jobs and not self.error:
            record, sample = self.jobs.popleft()
            try:
                if "dialogue_history" in record:
                    fields = await self.runner.add_candidates(record, sample)
                else:
                    fields = await self.runner.run_episode(record["task"], sample)
            except SystemExit as e:  # of fail()
                self.error = self.error or e
            except Exception as e:
                self.write_failure(record, sample, e)
            else:
                meta = {**record.get("meta", {}), **fields["meta"]}
                self.emit({**record, **fields, "meta": meta})
                self.n_written, self.n_failed_in_a_row = self.n_written + 1, 0
                self.bar.update()

    def write_failure(self, record, sample, e):
        """Writes that an episode failed, unless it is given; prints why, or ends the run."""
        self.n_failed, why = self.n_failed + 1, str(e)
        if not isinstance(e, EpisodeError):
            show_traceback(e)
            self.n_failed_in_a_row += 1
            why = f"{type(e).__name__}: {e}"
        task = record["task"]
        if "dialogue_history" not in record:
            self.emit({"task": task, "sample": sample, "failed": why, "meta": self.runner.meta})
        message = f"task {task['id']}, sample {sample} failed: {why}"
        if self.n_failed_in_a_row >= MOST_FAILURES:
            self.error = self.error or SystemExit(
                f"error: {inline(message)}; it is the {MOST_FAILURES}th failure in a row; rerun "
                "with --resume FILE to continue")
        elif self.n_failed <= MOST_FAILURES:
            say(message)


def print_summary(args, runner, n_written, n_done):
    """Prints what was written, and what the servers did. n_done: episodes in the --resume file."""
    text = f"wrote {n_written} episodes of {args.agent or args.model}"
    if args.resume:
        text += f" ({n_done} more in the --resume file)"
    if runner.totals["truncated"]:
        percent = 100 * runner.totals["truncated"] / runner.totals["actions"]
        text += f": {percent:.1f} % of messages truncated"
    say(text)
    for role, server in runner.servers.items():
        counts = [f"{number} {what.replace('_', ' ')}" for what, number in server.usage.items()]
        say(f"{role}: {', '.join(counts)}")


def main(args):
    """Runs the episodes of stdin's tasks, writes each as it ends, and prints a summary."""
    emit, runner = open_stdout(), EpisodeRunner(args)
    done, tasks = {}, {}
    if args.resume:
        locked, done, runner.resumed = finished_episodes(args.resume, tasks)  # locked until the end
        runner.check_resumed()
    jobs = [(record, sample) for record, sample in read_jobs(args, done, tasks)
            if (record["task"]["id"], sample) not in done]
    collector = Collector(runner, jobs, emit)
    if jobs:
        say(f"running {len(jobs)} episodes of {args.agent or args.model}, at most "
            f"{args.concurrency} at once")
        asyncio.run(collector.run())
    print_warnings()
    print_summary(args, runner, collector.n_written, len(done))
    if collector.error:
        raise collector.error
    if collector.n_failed:
        fail(f"{collector.n_failed} episodes failed; --resume FILE reruns them")


if __name__ == "__main__":
    run(main, ARGS)
