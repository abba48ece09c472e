"""Plays episodes: an agent talks with a human and hands in an answer.

    python collect.py --human http://localhost:8000/v1 -k 4 < tasks.jsonl > episodes.jsonl
    ... | python collect.py --human human.py --candidates 16 | python colbench.py grade > all.jsonl
    ... | python collect.py --human human.py --best_of 4 --critic runs/critic > guided.jsonl
    ... | python collect.py --human human.py -k 4 --resume episodes.jsonl >> episodes.jsonl

human.py defines reply(task, history), the human's answer to the last message.
An episode is written as it ends. With transformers the agent's draws are functions of (seed, task,
sample, turn): only the rounding of logits depends on the batch, and it rarely changes a text. A
record that has a dialogue is not played again: the agent's messages get candidates.
"""
from utils import (fail, fail_on_error, flag, open_stdout, parser, print_warnings, progress,
                   read_jsonl, rng, run, say, version)

import asyncio
import base64
import inspect
import itertools
import json
import math
import os
import runpy
import sys
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from types import SimpleNamespace
from urllib.request import getproxies

from colbench import (NOT_SEEN, GraderError, Renderer, RenderError, answered, cpus,
                      environment, first_message, human_prompt, is_answer, kind_of, needs,
                      read_action, redact, task_id, without_thinking)


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] < tasks.jsonl > trajectories.jsonl")
    g = p.add_argument_group("episodes")
    flag(g, "model", "meta-llama/Llama-3.1-8B-Instruct", "the agent", metavar="MODEL")
    flag(g, "-k", 1, "episodes of each task", least=1)
    flag(g, "max_turns", 10, "the agent's messages; the last one is its answer", least=1)
    flag(g, "concurrency", 256, "episodes at once", least=1)
    flag(g, "resume", None, "skip the episodes in FILE, and drop its last line if a kill cut it",
         metavar="FILE")
    g = p.add_argument_group("human")
    flag(g, "human", None, "https://.../v1 of an LLM (key: OPENAI_API_KEY), fixed:TEXT, or a "
         "FILE.py with reply(task, history), async if it is slow", metavar="WHO")
    flag(g, "human_params", "{}", "parameters of the LLM, besides temperature 0, max_tokens 1024; "
         'null leaves one out, "model" names one of several models', metavar="JSON")
    g = p.add_argument_group("sampling")
    flag(g, "temperature", 1.0, "0: greedy")
    flag(g, "top_p", 1.0, "draw each token from the likeliest that sum up to this", least=1e-6,
         most=1)
    flag(g, "max_tokens", 1024, "longest message", least=1)
    flag(g, "thinking", 0, "1: let a reasoning model think, unseen by the human", choices=[0, 1])
    flag(g, "seed", 0, "of all draws")
    flag(g, "candidates", 0, "alternatives drawn at every turn; stage 2 wants 16")
    flag(g, "candidates_share", 1.0, "share of the episodes that get candidates", most=1)
    flag(g, "best_of", 1, "messages drawn; the critic's favourite is sent", least=1)
    flag(g, "critic", None, "--out of train_critic.py, or a FILE.py with advantages(task, history, "
         "actions); it READS THE REFERENCE", metavar="WHO")
    flag(g, "logprob_weight", 0.0, "--best_of: send the highest advantage + this * log-prob")
    g = p.add_argument_group("engine")
    flag(g, "engine", None, "http://host:port/v1 of a vLLM server (--logprobs-mode "
         "processed_logprobs), many times as fast on a GPU; not given: transformers", metavar="URL")
    flag(g, "max_batch_tokens", 65536, "transformers: tokens at once, and cached")
    flag(g, "dtype", "auto", "transformers; auto: bf16 on a GPU, fp32 on a CPU",
         choices=["auto", "bf16", "fp32"])
    flag(g, "timeout", 1800.0, "seconds until a request to a server is made again")
    flag(g, "retries", 8, "times to repeat a server's failed request; 8 take about a minute")
    args = p.parse_args(argv)
    with fail_on_error("--human_params is no JSON object"):
        args.human_params = dict(json.loads(args.human_params))
    if (args.best_of > 1) != bool(args.critic):
        fail("--best_of N and --critic go together")
    return args


if __name__ == "__main__":
    ARGS = get_args()  # before the slow imports: --help and a wrong flag answer at once

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from model import (actions_of, check_generation_prompt, common_prefix, find_model, load, load_lm,
                   render, sdpa_kernel, stop_ids, weights_digest)
from train_critic import advantages, critic_turns, finished_flags, reference_logps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPISODE_FLAGS = ("temperature", "top_p", "max_turns", "max_tokens", "thinking", "seed", "best_of",
                 "critic", "logprob_weight")  # all episodes of a file have the same ones
COMPUTE = ThreadPoolExecutor(1)  # one thread for all models, so that coroutines go on meanwhile
TREE_TOKENS = 16384  # of a tree that the critic computes at once
ROOM = 32  # tokens of an action for which there is room at first; when full, the room doubles


class EpisodeError(Exception):
    """Why one episode fails. The others go on; fail() ends the run."""


class ContextFull(EpisodeError):
    """A dialogue is longer than the model reads."""


# --- an episode -----------------------------------------------------------------------------------

class Players:
    """The agent, the human and the critic. Human and critic may be async.

        await engine(prompt_ids, keys, max_new)  [(token_ids, logprobs)], a message for each key
        reply(task, history)                     the human's text
        critic(task, history, actions)           an advantage for each action

    A message is drawn by rng(*key); its key begins with (seed, task id, sample). token_ids are at
    most max_new, and the last one is in `stop`, unless max_new cut them. logprobs are those after
    --temperature and --top_p.
    """

    def __init__(self, args):
        self.args, self.critic, self.totals = args, None, Counter()
        folder, self.tokenizer, config = find_model(args.model)
        config = config.get_text_config()
        self.max_context = getattr(config, "max_position_embeddings", None) or math.inf
        check_generation_prompt(self.tokenizer)
        self.stop = stop_ids(self.tokenizer)
        names = "model", "human", "human_params", *EPISODE_FLAGS
        self.meta = {name: getattr(args, name) for name in names}
        self.meta |= {"model_weights": weights_digest(folder), "version": version()}

    async def load(self):
        """Asks the servers for their models, then loads ours; returns self."""
        args, human = self.args, self.args.human or ""
        if human.startswith(("http://", "https://")):
            llm = LLM(args)
            if "model" not in llm.body:
                await llm.find_served_model()
            self.reply = llm.reply
        elif human.startswith("fixed:"):
            self.reply = lambda task, history: human.removeprefix("fixed:")
        elif human:
            self.reply = load_function(human, "reply")
        if args.engine:
            self.engine = VllmEngine(args, self.stop)
            await self.engine.find_served_model()
            if self.engine.body["model"] != args.model:
                say(f"{args.engine} serves {self.engine.body['model']}, taken for {args.model}")
            self.max_context = min(self.max_context, self.engine.max_context)
        else:
            self.engine = TransformersEngine(args, self.stop)
            if DEVICE == "cuda":
                say("transformers samples; a vLLM server is many times as fast: --engine")
        if args.critic and args.critic.endswith(".py"):
            self.critic = load_function(args.critic, "advantages")
        elif args.critic:
            self.critic = Critic(args).advantages
        return self

    async def play(self, task, sample):
        """Plays one episode; returns the new fields of its record."""
        max_turns, key = self.args.max_turns, (self.args.seed, task_id(task), sample)
        n_candidates = self.candidates_per_turn(key)
        history = [first_message(task, max_turns)]
        for turn in range(max_turns):
            try:
                message = await self.act(task, history, (*key, turn), n_candidates)
            except ContextFull:
                if turn == 0:
                    raise
                history.pop()  # the human's reply: a dialogue ends with the agent's message
                break
            message["content"], final = read_action(message["output"], last=turn == max_turns - 1)
            history.append(message)
            if final is not None:
                break
            history.append({"role": "user", "content": await self.human(task, history)})
        answer = environment(task).final_answer(history, final)
        return {"sample": sample, "dialogue_history": history, "answer": answer or "",
                "answered": is_answer(message), "meta": self.meta}

    async def add_candidates(self, record, sample):
        """Draws candidates for a dialogue's messages; returns the new fields of its record.

        `meta` has their settings under "candidates", beside those of the dialogue.
        """
        key = self.args.seed, task_id(record["task"]), sample
        n_candidates = self.candidates_per_turn(key)
        for turn, (history, (message, *_)) in enumerate(actions_of(record)):
            message.pop("candidates", None)  # another model's
            if n_candidates:
                _, message["candidates"] = await self.draw(history, (*key, turn), 0, n_candidates)
        meta = {"thinking": self.args.thinking, "candidates": self.meta}
        return {"sample": sample, "answered": answered(record), "meta": meta}

    def candidates_per_turn(self, key):
        """--candidates in --candidates_share of the episodes, else 0. key: (seed, task, sample)."""
        has_candidates = rng("share", *key).random() < self.args.candidates_share
        return self.args.candidates if has_candidates else 0

    async def act(self, task, history, key, n_candidates):
        """The agent's next message, its content still None. key: (seed, task id, sample, turn)."""
        actions, candidates = await self.draw(history, key, self.args.best_of, n_candidates)
        best = actions[0]
        if self.critic:
            scores = await call(self.critic, task, history, actions)
            if len(scores) != len(actions) or not all(map(math.isfinite, scores)):
                raise EpisodeError(f"the critic's scores of {len(actions)} messages are {scores}")
            values = [score + self.args.logprob_weight * sum(action["logprobs"])
                      for score, action in zip(scores, actions)]
            best = actions[values.index(max(values))]
        message = {"role": "assistant", "content": None, **best}
        if candidates:
            message["candidates"] = candidates
        return message

    async def draw(self, history, key, n_actions, n_candidates):
        """Draws the agent's next message several times; returns (actions, candidates).

        An action keeps the log-probs of its tokens, a candidate their sum.
        """
        keys = [(*key, j) for j in range(n_actions)]
        keys += [(*key, "candidate", j) for j in range(n_candidates)]
        with fail_on_error("this --model's chat template does not take the agent's prompt"):
            prompt = render(self.tokenizer, history, self.args.thinking)
        max_new = min(self.args.max_tokens, self.max_context - len(prompt))
        if max_new <= 0:
            raise ContextFull(f"the dialogue has {len(prompt)} tokens, and the model takes "
                              f"{self.max_context}")
        if self.args.temperature:
            drawn = await self.engine(prompt, keys, max_new)
        else:  # all are the same, and vLLM draws no more than one
            drawn = await self.engine(prompt, keys[:1], max_new) * len(keys)
        texts = self.tokenizer.batch_decode([ids for ids, _ in drawn], skip_special_tokens=True)
        actions = []
        for text, (ids, logprobs) in zip(texts, drawn):
            finite = all(x is not None and abs(x) < 1000 for x in logprobs)  # -9999: minus inf.
            if not finite or len(logprobs) != len(ids):
                raise EpisodeError("log-probs are missing, NaN or infinite: are the weights sound?")
            if max(ids) >= len(self.tokenizer):
                raise EpisodeError(f"token {max(ids)} is not of --model: has the engine another?")
            action = {"output": text, "token_ids": ids, "logprobs": [round(x, 6) for x in logprobs]}
            cut = ids[-1] not in self.stop
            if cut:
                action["cut"] = True
            self.totals.update(actions=1, cut=cut)
            actions.append(action)
        candidates = actions[n_actions:]
        for candidate in candidates:
            candidate["logprob"] = round(sum(candidate.pop("logprobs")), 6)
        return actions[:n_actions], candidates

    async def human(self, task, history):
        """The human's reply to the last message, cut to the length that the task's kind allows."""
        reply = await call(self.reply, task, history)
        if not isinstance(reply, str):
            raise EpisodeError(f"the human's reply is no text: {reply!r}")
        reply = reply.encode(errors="replace").decode()  # no tokenizer takes a lone surrogate
        return reply[:environment(task).reply_chars]


def load_function(file, name):
    """The function of this name that a Python file defines; it may be async."""
    sys.path.append(os.path.dirname(os.path.abspath(file)))  # for what it imports
    with fail_on_error(file):
        defined = runpy.run_path(file)
    return defined.get(name) or fail(f"{file} defines no {name}()")


async def call(function, *args):
    """Calls human or critic. None or a ValueError fails the episode; an OSError ends the run."""
    try:
        result = function(*args)
        result = await result if inspect.isawaitable(result) else result
    except ValueError as e:
        raise EpisodeError(e) from None
    except (OSError, GraderError) as e:  # of a connection, a browser
        fail(f"human or critic: {type(e).__name__}: {e}")
    if result is None:
        raise EpisodeError("human or critic gives nothing")
    return result


# --- servers --------------------------------------------------------------------------------------

class Endpoint:
    """An OpenAI-compatible server. Its API key is the environment's variable KEY."""
    KEY, HINT = "OPENAI_API_KEY", ""  # HINT: what may help if it refuses a request

    def __init__(self, url, args, body):
        """body: what all requests share."""
        import openai
        os.environ["no_proxy"] = getproxies().get("no", "") + ",localhost,127.0.0.1,::1"
        self.url, self.body = url, body
        self.client = openai.AsyncOpenAI(
            base_url=url, api_key=os.environ.get(self.KEY, "none"),
            max_retries=args.retries, timeout=openai.Timeout(args.timeout, connect=30))
        self.answered, self.failed = False, 0  # any request; how many failed in a row

    async def find_served_model(self):
        """Sets body["model"] and max_context. Of several models the body must name one."""
        with fail_on_error(f"{self.url} lists no models (an address ends in /v1)"):
            client = self.client.with_options(max_retries=0)
            reply = await client.get("/models", cast_to=object)
            served = {model["id"]: model.get("max_model_len") for model in reply["data"]}
        name = [*served][0] if len(served) == 1 else self.body.get("model")
        if name not in served:
            fail(f"{self.url} serves {', '.join(served) or 'no model'}, not {name}; "
                 """--human_params '{"model": "NAME"}' names the human's""")
        self.body["model"], self.max_context = name, served[name] or math.inf

    async def request(self, path, read, **body):
        """read(reply) of a request. read() raises a ValueError if it can't use the reply.

        A failed request is an EpisodeError. The 16th in a row ends the run: of requests to a server
        that is down, or of any before its first answer.
        """
        down = False
        try:
            reply = await self.client.post(path, cast_to=object, body={**self.body, **body})
            result = read(reply)
        except (LookupError, TypeError, AttributeError):
            error = "the reply is not that of an OpenAI-compatible server"
        except Exception as e:
            refused = isinstance(e, ValueError) or getattr(e, "status_code", 0) in (400, 413, 422)
            down = not refused
            error = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
            error += self.HINT if refused else ""
        else:
            self.answered, self.failed = True, 0
            return result
        self.failed += down or not self.answered
        if self.failed >= 16:
            fail(f"{self.url}: {error}; --resume FILE goes on from what was finished")
        raise EpisodeError(f"{self.url}: {error}")


class LLM(Endpoint):
    """An LLM that plays the human: it reads the hidden information, and looks at pages."""
    HINT = """ (--human_params '{"max_tokens": 4000, "NAME": null}' leaves NAME out)"""

    def __init__(self, args):
        params = {"temperature": 0, "max_tokens": 1024, **args.human_params}
        given = {name: value for name, value in params.items() if value is not None}
        super().__init__(args.human, args, given)

    @cached_property
    def renderer(self):
        """The browsers that draw pages; the first page starts one."""
        return Renderer(cpus())

    async def reply(self, task, history):
        content = human_prompt(task, history)
        if environment(task).shows_pages:
            try:
                pages = await asyncio.to_thread(self.renderer.pair, task, history[-1]["content"])
            except RenderError as e:
                return NOT_SEEN.format(e)
            content = [{"type": "text", "text": content}]
            for page in pages:
                url = "data:image/png;base64," + base64.b64encode(page["png"]).decode()
                content.append({"type": "image_url", "image_url": {"url": url}})
        text = await self.request("/chat/completions", reply_text,
                                  messages=[{"role": "user", "content": content}])
        return text if environment(task).shows_pages else redact(text, task["ground_truth"])


def reply_text(reply):
    """The text of a chat completion, without its thought."""
    choice = reply["choices"][0]
    text = without_thinking(choice["message"]["content"] or "")
    if not text:
        raise ValueError(f"an empty reply, finish_reason {choice['finish_reason']}")
    return text


class VllmEngine(Endpoint):
    """Samples by a vLLM server, which takes and gives token ids.

    A request has one seed: draw i has the seed of draw 0 plus i. In another batch the same seed may
    give other tokens.
    """
    KEY = "VLLM_API_KEY"

    def __init__(self, args, stop):
        super().__init__(args.engine, args, {
            "model": args.model, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0,
            "min_p": 0, "repetition_penalty": 1, "stop_token_ids": sorted(stop),
            "skip_special_tokens": False, "logprobs": 0, "return_token_ids": True})

    async def __call__(self, prompt, keys, max_new):
        def read(reply):
            outs = reply["choices"]
            if any(out["finish_reason"] not in ("stop", "length") for out in outs):
                raise ValueError("a message is cut off: the server is shutting down")
            if len(outs) != len(keys) or not all(out.get("token_ids") for out in outs):
                raise ValueError("no token_ids for each draw: it takes vLLM 0.10 or newer")
            return [(out["token_ids"], out["logprobs"]["token_logprobs"]) for out in outs]

        return await self.request("/completions", read, prompt=prompt, n=len(keys),
                                  max_tokens=max_new, seed=rng(*keys[0]).getrandbits(31))


# --- models in this process -----------------------------------------------------------------------

class Batcher:
    """Computes requests of many coroutines together, in steps.

    The first request starts a step. The step waits until no more come: batches are full, and the
    same in each run. Then compute(new) runs in the thread COMPUTE. It starts the new requests, and
    must set the `result` of at least one under way. While others are left, the next step follows.
    """

    def __init__(self):
        self.waiting, self.under_way = [], []  # requests
        self.step = None  # the asyncio task of the step

    async def submit(self, **fields):
        """The result of a request with these fields."""
        request = SimpleNamespace(result=None, **fields)
        self.waiting.append(request)
        while request.result is None:
            self.step = self.step or asyncio.ensure_future(self.take_step())
            await self.step
        return request.result

    async def take_step(self):
        before = 0  # the others run on, until a round of them adds no request
        while before != len(self.waiting):
            before = len(self.waiting)
            await asyncio.sleep(0)
        new = self.admit()
        self.under_way += new
        await asyncio.get_running_loop().run_in_executor(COMPUTE, self.compute, new)
        self.under_way = [request for request in self.under_way if request.result is None]
        self.step = asyncio.ensure_future(self.take_step()) if self.under_way else None

    def admit(self):
        """Takes from the waiting requests those that start now."""
        new, self.waiting = self.waiting, []
        return new


class Critic(Batcher):
    """The critic in a finished --out of train_critic.py."""

    def __init__(self, args):
        super().__init__()
        flags = finished_flags(args.critic)
        self.ref_reads_c, self.thinking = flags.ref_context == "hidden", args.thinking
        self.pi, self.tokenizer = load(args.critic, DEVICE, "auto")
        self.pi_ref, _ = load(flags.model, DEVICE, "auto")

    async def advantages(self, task, history, actions):
        record = {"task": task, "meta": {"thinking": self.thinking}}
        turns = critic_turns(self.tokenizer, record, history, actions, pi_reads_c=True,
                             ref_reads_c=self.ref_reads_c)
        return await self.submit(turns=turns)

    def compute(self, new):
        ref_turn_of = dict(pair for request in new for pair in request.turns)
        ref_logps = reference_logps(self.pi_ref, ref_turn_of, TREE_TOKENS)
        values = advantages(self.pi, ref_logps, TREE_TOKENS)
        for request in new:
            request.result = [values[turn] for turn, _ in request.turns]


class TransformersEngine(Batcher):
    """Samples by transformers in this process.

    A prompt is read once for all its draws, and of an episode's next prompt only the new part.
    Then each forward reads one token of every action under way. New requests join as others end.
    """

    def __init__(self, args, stop):
        super().__init__()
        self.lm, _ = load_lm(args.model, DEVICE, args.dtype)
        self.lm.set_attn_implementation("engine")
        self.args, self.stop = args, stop
        self.batches = []  # of actions under way
        self.cache = {}  # {episode: (its last prompt, keys and values of it)}; the latest is last

    async def __call__(self, prompt, keys, max_new):
        actions = [SimpleNamespace(rng=rng(*key), ids=[], logps=[], max_new=max_new, ended=False)
                   for key in keys]
        return await self.submit(prompt=prompt, episode=keys[0][:3], actions=actions)

    def admit(self):
        """Takes the waiting requests that find room, at least one if no batch is under way.

        They wait until they have a quarter as many actions as the batches, so that batches are few
        and large.
        """
        waiting = sum(len(request.actions) for request in self.waiting)
        if waiting < sum(len(batch.actions) for batch in self.batches) / 4:
            return []
        new = []
        room = self.args.max_batch_tokens - sum(batch.tokens() for batch in self.batches)
        for request in self.waiting:
            room -= len(request.prompt) + ROOM * len(request.actions)
            if room < 0 and (new or self.batches):
                break
            new.append(request)
        del self.waiting[:len(new)]
        return new

    @torch.no_grad()
    def compute(self, new):
        """Starts new requests; draws a token of every action at a time, until a request ends."""
        by_prompt = defaultdict(list)  # {prompt: [request]}
        for request in new:
            by_prompt[tuple(request.prompt)].append(request)
        by_size = defaultdict(list)  # {number of actions: [a prompt's requests]}
        for same in by_prompt.values():
            by_size[sum(len(request.actions) for request in same)].append(same)
        for prompts in by_size.values():
            self.start_batch(prompts)
        while sum(len(prompt) for prompt, _ in self.cache.values()) > self.args.max_batch_tokens:
            del self.cache[next(iter(self.cache))]  # the oldest
        while not (ended := [r for r in self.under_way if all(a.ended for a in r.actions)]):
            logits = self.forward(self.batches).split([len(batch.ids) for batch in self.batches])
            for batch, part in zip(self.batches, logits):
                self.append_tokens(part, batch.actions)
                batch.advance()
            self.batches = [batch for batch in self.batches if batch.actions]
        for request in ended:
            request.result = [(action.ids, action.logps) for action in request.actions]

    def start_batch(self, prompts):
        """Reads prompts in one forward, and draws the first tokens of their actions.

        prompts[i]: the requests with prompt i. All prompts have the same number of actions.
        """
        firsts = [same[0] for same in prompts]
        prefill = Prefill([r.prompt for r in firsts], [self.cached_prefix(r) for r in firsts])
        last = torch.tensor([*itertools.accumulate(prefill.n_new)], device=DEVICE) - 1
        logits = self.forward([prefill], last)
        for i, same in enumerate(prompts):
            for request in same:
                self.cache.pop(request.episode, None)  # the new entry becomes the last
                self.cache[request.episode] = request.prompt, [kv[i] for kv in prefill.kv]
        batch = DecodeBatch(prefill, [[a for r in same for a in r.actions] for same in prompts])
        self.append_tokens(logits.repeat_interleave(batch.n, 0), batch.actions)
        batch.advance()
        if batch.actions:
            self.batches.append(batch)

    def cached_prefix(self, request):
        """(n, layers) for Prefill: the first n tokens are those of a prompt whose keys are kept.

        That is its episode's last prompt, else the latest of all. One token is always new.
        """
        latest = next(reversed(self.cache.values()), ((), None))
        before, layers = self.cache.get(request.episode, latest)
        return min(common_prefix(before, request.prompt), len(request.prompt) - 1), layers

    def forward(self, parts, at=0):
        """(tokens, vocabulary) logits of a Prefill or DecodeBatches. at: token indices; 0: all."""
        ids = torch.tensor([t for part in parts for t in part.ids], device=DEVICE)
        positions = torch.cat([part.positions for part in parts])
        return self.lm(input_ids=ids[None], position_ids=positions[None], use_cache=False,
                       parts=parts, logits_to_keep=at).logits[0]

    def append_tokens(self, logits, actions):
        """Draws the next token of each action that has not ended. logits: (actions, vocabulary)."""
        live = [row for row, action in enumerate(actions) if not action.ended]
        for at in range(0, len(live), 64):  # 64 rows at a time: a vocabulary is large
            rows = live[at:at + 64]
            token, logp = self.sample(logits[rows], [actions[row].rng for row in rows])
            for row, t, p in zip(rows, token[:, 0].tolist(), logp[:, 0].tolist()):
                action = actions[row]
                action.ids.append(t)
                action.logps.append(p)
                action.ended = t in self.stop or len(action.ids) == action.max_new

    def sample(self, logits, generators):
        """A token for each row of logits, and its log-prob; both are (rows, 1)."""
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
        token = token.clamp(max=cdf.shape[1] - 1)  # NaN logits give an index past the vocabulary
        return token, logps.gather(1, token)


class Prefill:
    """One forward over the new tokens of prompts; keeps the keys and values of whole prompts.

    prefixes[i] = (n, layers): the first n tokens of prompt i are not new. Their keys and values
    are layers[layer][:, :n]. kv[layer][i]: those of prompt i, (2, tokens, heads, size).
    """

    def __init__(self, prompts, prefixes):
        self.prefixes, self.kv = prefixes, []
        self.lengths = [len(prompt) for prompt in prompts]
        self.n_new = [len(prompt) - n for prompt, (n, _) in zip(prompts, prefixes)]
        self.ids = [t for prompt, (n, _) in zip(prompts, prefixes) for t in prompt[n:]]
        self.positions = torch.cat([torch.arange(n, len(prompt), device=DEVICE)
                                    for prompt, (n, _) in zip(prompts, prefixes)])

    def attend(self, layer, q, k, v, scale, window):
        """Attention of the new tokens, (tokens, heads, size), each to its prompt up to itself."""
        new = torch.stack([k, v]).split(self.n_new, 1)
        self.kv.append([torch.cat([layers[layer][:, :n] if n else x[:, :0], x], 1)
                        for x, (n, layers) in zip(new, self.prefixes)])
        runs = SimpleNamespace(q=self.n_new, kv=self.lengths)
        return sdpa_kernel(q, *torch.cat(self.kv[-1], 1), runs, scale, window)


class DecodeBatch:
    """P prompts with n actions each. A forward reads the last token of each action, a row.

    Row r is action draw_of[r] of prompt prompt_of[r]. Keys and values of each layer:

        prompt_kv  (2, P, heads, longest prompt, size)  read once for all rows of a prompt
        row_kv     (2, rows, heads, room, size)         of the tokens drawn before

    Rows that have ended leave together, when they are an eighth of all.
    """

    def __init__(self, prefill, actions):
        """prefill: it has read the prompts. actions[i]: those of prompt i."""
        self.n, self.actions = len(actions[0]), list(itertools.chain(*actions))
        self.prompt_of = torch.arange(len(actions), device=DEVICE).repeat_interleave(self.n)
        self.draw_of = torch.arange(self.n, device=DEVICE).repeat(len(actions))
        self.lengths = torch.tensor(prefill.lengths, device=DEVICE)  # (P,)
        padded = (pad_sequence([x.transpose(0, 1) for x in kv], True) for kv in prefill.kv)
        self.prompt_kv = [x.permute(2, 0, 3, 1, 4).contiguous() for x in padded]
        self.row_kv = [x.new_empty(2, len(self.actions), x.shape[2], ROOM, x.shape[4])
                       for x in self.prompt_kv]
        self.last = -1  # index in the actions of the tokens that the next forward reads

    def attend(self, layer, q, k, v, scale, window):
        """Attention of the rows' last tokens, (rows, heads, size), to their prompts and actions."""
        row_kv = self.row_kv[layer]
        if self.last == row_kv.shape[3]:  # the room is full: double it
            row_kv = self.row_kv[layer] = torch.cat([row_kv, torch.empty_like(row_kv)], 3)
        row_kv[:, :, :, self.last] = torch.stack([k, v])
        # the first key that a row sees, counted from its action: the prompt's are below 0
        first = self.last - window if window >= 0 else -math.inf
        row_k, row_v = row_kv[:, :, :, max(0, first):self.last + 1]
        prompt_k, prompt_v = self.prompt_kv[layer]
        width = prompt_k.shape[2]
        key_at, lengths = torch.arange(width, device=DEVICE), self.lengths[self.prompt_of, None]
        masked = (key_at >= lengths) | (key_at < lengths + first)
        q = q.unflatten(1, (k.shape[1], -1))  # (rows, heads of keys, queries of each, size)
        scores = self.from_grid(self.to_grid(q) @ prompt_k.mT)
        scores.masked_fill_(masked[:, None, None], -math.inf)
        scores = torch.cat([scores, q @ row_k.mT], -1)
        weights = (scores.float() * scale).softmax(-1).to(q.dtype)
        out = self.from_grid(self.to_grid(weights[..., :width]) @ prompt_v)
        return (out + weights[..., width:] @ row_v).flatten(1, 2)

    def to_grid(self, x):
        """(rows, heads, queries, ...) to (P, heads, n * queries, ...), 0 for rows that left."""
        grid = x.new_zeros(len(self.lengths), self.n, *x.shape[1:])
        grid[self.prompt_of, self.draw_of] = x
        return grid.transpose(1, 2).flatten(2, 3)

    def from_grid(self, x):
        """(P, heads, n * queries, ...) to (rows, heads, queries, ...)."""
        return x.unflatten(2, (self.n, -1)).transpose(1, 2)[self.prompt_of, self.draw_of]

    def advance(self):
        """Goes on to the tokens just drawn; drops ended rows if they are an eighth of all."""
        self.last += 1
        live = [row for row, action in enumerate(self.actions) if not action.ended]
        if len(live) <= 7 / 8 * len(self.actions):
            self.actions = [self.actions[row] for row in live]
            self.row_kv = [x[:, live] for x in self.row_kv]
            self.draw_of = self.draw_of[live]
            prompts, self.prompt_of = self.prompt_of[live].unique(return_inverse=True)
            if len(prompts) < len(self.lengths):
                self.lengths = self.lengths[prompts]
                self.prompt_kv = [x[:, prompts] for x in self.prompt_kv]
        self.ids = [action.ids[-1] for action in self.actions]
        goes_on = torch.tensor([not action.ended for action in self.actions], device=DEVICE)
        # position 0 for ended rows: their own may be beyond the model's last one
        self.positions = (self.lengths[self.prompt_of] + self.last) * goes_on

    def tokens(self):
        """How many tokens it has room for, of prompts and rows."""
        return (len(self.lengths) * self.prompt_kv[0].shape[3]
                + len(self.actions) * self.row_kv[0].shape[3])


def engine_attention(module, query, key, value, attention_mask, scaling=None, parts=(),
                     sliding_window=None, **kwargs):
    """Attention of each part in turn: (1, heads, tokens, size) to (1, tokens, heads, size)."""
    window = sliding_window - 1 if sliding_window else -1  # keys seen before a token's own; -1: all
    sizes = [len(part.ids) for part in parts]
    qkv_of = zip(*(x[0].transpose(0, 1).split(sizes) for x in (query, key, value)))
    out = [part.attend(module.layer_idx, *qkv, scaling, window)
           for part, qkv in zip(parts, qkv_of)]
    return torch.cat(out)[None], None


AttentionInterface.register("engine", engine_attention)


# --- all episodes ---------------------------------------------------------------------------------

def finished_episodes(path, meta):
    """{(task id, sample)} of the episodes in --resume's file, which may be empty.

    If a kill has cut the last line, the line is dropped from the file. The program ends if an
    episode has other weights or EPISODE_FLAGS than `meta`.
    """
    done = set()
    with fail_on_error(f"--resume {path}"), open(path, "rb+") as f:
        last = b"".join(deque(f, maxlen=1))  # b"" of an empty file
        if last.startswith(b"{") and not last.endswith(b"\n"):
            try:
                json.loads(last)
                f.write(b"\n")  # it is whole
            except ValueError:
                f.truncate(f.tell() - len(last))
        f.seek(0)
        for r in read_jsonl(f, needs("sample"), path) if os.path.getsize(path) else ():
            done.add((task_id(r["task"]), r["sample"]))
            old = r.get("meta", {})
            old = old.get("candidates", old)  # those of add_candidates
            for name in ("model_weights", *EPISODE_FLAGS):
                if old.get(name, meta[name]) != meta[name]:
                    fail(f"--resume {path} holds episodes with {name} {old[name]}, not "
                         f"{meta[name]}: give the same flags and weights, or another file")
    return done


def read_jobs(args, done):
    """Yields (record, sample) of each episode that is not in `done`; its task gets kind and id.

    A task's samples count from 0, and on where the task comes again. A dialogue keeps its own
    `sample`; without one, or if another has it, it gets the next number.
    """
    next_sample = {}  # {task id: the number of its next new episode}
    taken = set()  # (task id, sample) of stdin; `done` has those of --resume's file
    for record in read_jsonl(sys.stdin, needs()):
        task, name = record["task"], task_id(record["task"])
        record["task"] = {"kind": kind_of(task), **task, "id": name}
        first = next_sample.get(name, 0)
        samples = range(first, first + args.k)
        if "dialogue_history" in record:
            sample = record.get("sample", first)
            while (name, sample) in taken:  # of another file, played with another seed
                sample += 1
            samples = [sample]
            thinking = record.get("meta", {}).get("thinking")
            if not args.candidates:
                fail(f"task {name} has a dialogue already: give --candidates, or cut it out")
            if thinking not in (None, args.thinking):
                fail(f"the dialogue of task {name} was played with --thinking {thinking}")
        elif not args.human:
            fail("--human is missing: give the http://host:port/v1 of an LLM, fixed:TEXT, or a "
                 "FILE.py that defines reply(task, history)")
        next_sample[name] = max(first, samples[-1] + 1)
        taken.update((name, sample) for sample in samples)
        for sample in samples:
            if (name, sample) not in done:
                yield record, sample


async def play_all(args, emit):
    """Plays the episodes of stdin's tasks, writes each as it ends, and says how it went.

    An episode that fails is not written: --resume plays it again. After an error that ends the
    run no new episode begins, and those under way end first.
    """
    players = Players(args)
    done = finished_episodes(args.resume, players.meta) if args.resume else set()
    jobs = deque(read_jobs(args, done))  # a wrong line ends the program before models load
    totals, errors = players.totals, []

    async def worker():
        while jobs:
            record, sample = jobs.popleft()
            try:
                if "dialogue_history" in record:
                    new = await players.add_candidates(record, sample)
                else:
                    new = await players.play(record["task"], sample)
            except EpisodeError as e:
                totals["failed"] += 1
                if totals["failed"] <= 3:
                    say(f"task {record['task']['id']}, sample {sample} failed: {e}")
                continue
            except SystemExit as e:
                errors.append(e)
                jobs.clear()
                continue
            new["meta"] = {**record.get("meta", {}), **new["meta"]}
            emit({**record, **new})
            bar.update()
            totals["episodes"] += 1

    if jobs:
        await players.load()
        print_warnings()
        bar = progress(f"episodes of {args.model}", total=len(jobs))
        await asyncio.gather(*(worker() for _ in range(args.concurrency)))
    cut = 100 * totals["cut"] / max(1, totals["actions"])
    say(f"{totals['episodes']} episodes of {args.model} ({len(done)} done before): "
        f"{cut:.1f} % of actions cut at --max_tokens {args.max_tokens}")
    if errors:
        raise errors[0]
    if totals["failed"]:
        fail(f"{totals['failed']} episodes failed and were not written; --resume FILE plays them "
             "again")


def main(args):
    asyncio.run(play_all(args, open_stdout()))


if __name__ == "__main__":
    run(main, ARGS)
