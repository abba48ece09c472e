"""Plays episodes: an agent talks with a human and hands in an answer.

    python collect.py --human http://localhost:8000/v1 -k 4 < tasks.jsonl > episodes.jsonl
    ... | python collect.py --human human.py --candidates 16 | python colbench.py grade > all.jsonl
    ... | python collect.py --human human.py --best_of 4 --critic runs/critic > guided.jsonl
    ... | python collect.py --human human.py -k 4 --resume episodes.jsonl >> episodes.jsonl

human.py defines reply(task, history), the human's answer to the last message.
Each episode is written as it ends. A message depends on (seed, task, sample, turn) alone, but for
the rounding of logits, which others in a batch change, and which rarely changes a text. A record
that has a dialogue already gets candidates only.
"""
from utils import (fail, fail_on_error, flag, open_stdout, parser, progress, read_jsonl, rng, run,
                   say, version)

import asyncio
import base64
import inspect
import itertools
import json
import math
import os
import runpy
import sys
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from types import SimpleNamespace
from urllib.request import getproxies

from colbench import (NOT_SEEN, GraderError, Renderer, RenderError, answered, browser_flag, cpus,
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
    flag(g, "human_params", "{}", "of a request to the LLM, which has temperature 0 and max_tokens "
         '1024: {"max_tokens": null} leaves one out, "model" names one of several', metavar="JSON")
    g = p.add_argument_group("sampling")
    flag(g, "temperature", 1.0, "0: greedy")
    flag(g, "top_p", 1.0, "draw each token from the likeliest that sum up to this", least=1e-6,
         most=1)
    flag(g, "max_tokens", 1024, "longest message", least=1)
    flag(g, "thinking", 0, "1: let a reasoning model think, unseen by the human",
         choices=[0, 1])
    flag(g, "seed", 0, "of all draws")
    flag(g, "candidates", 0, "alternatives drawn at every turn; stage 2 wants 16")
    flag(g, "candidates_share", 1.0, "share of the episodes that get candidates", most=1)
    flag(g, "best_of", 1, "messages drawn; the critic's favourite is sent", least=1)
    flag(g, "critic", None, "--out of train_critic.py, or a FILE.py with advantages(task, history, "
         "actions); READS THE REFERENCE", metavar="WHO")
    flag(g, "logprob_weight", 0.0, "--best_of: choose by score + this * log-prob")
    g = p.add_argument_group("engine")
    flag(g, "engine", None, "http://host:port/v1 of a vLLM server, many times as fast on a GPU; "
         "not given: transformers", metavar="URL")
    flag(g, "max_batch_tokens", 65536, "transformers: tokens at once, and cached")
    flag(g, "dtype", "auto", "transformers; auto: bf16 on a GPU, fp32 on a CPU",
         choices=["auto", "bf16", "fp32"])
    flag(g, "timeout", 1800.0, "seconds until a request to a server is made again")
    flag(g, "retries", 8, "of a request to a server: 8 take about a minute")
    browser_flag(p)
    args = p.parse_args(argv)
    with fail_on_error("--human_params is no JSON object"):
        args.human_params = dict(json.loads(args.human_params))
    if (args.best_of > 1) != bool(args.critic):
        fail("--best_of N and --critic go together")
    return args


def function(file, name):
    """The function of this name that a Python file defines; it may be async."""
    sys.path.append(os.path.dirname(os.path.abspath(file)))  # for what it imports
    with fail_on_error(file):
        defined = runpy.run_path(file)
    return defined.get(name) or fail(f"{file} defines no {name}()")


if __name__ == "__main__":
    ARGS = get_args()  # a wrong flag is told before anything slow is loaded

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from model import (actions_of, check_generation_prompt, common_prefix, end_of_turn, find_model,
                   load, load_lm, render, sdpa_kernel, weights_digest)
from train_critic import advantages, critic_turns, finished_flags, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAME = ("temperature", "top_p", "max_turns", "max_tokens", "thinking", "seed", "best_of",
        "critic", "logprob_weight")  # flags that all episodes of a file share
COMPUTE = ThreadPoolExecutor(1)  # the thread in which models compute
TREE_TOKENS = 16384  # in one tree of the critic's
ROOM = 32  # tokens for which an action's keys have room at first; it doubles


class EpisodeError(Exception):
    """Why one episode fails. The others go on; fail() ends the run."""


class ContextFull(EpisodeError):
    """A conversation is longer than the model reads."""


# --- an episode -----------------------------------------------------------------------------------

class Players:
    """The agent, the human and the critic."""

    def __init__(self, args):
        self.args, self.critic, self.totals = args, None, Counter()
        folder, self.tokenizer, config = find_model(args.model)
        config = config.get_text_config()
        self.longest = getattr(config, "max_position_embeddings", None) or math.inf
        check_generation_prompt(self.tokenizer)
        self.stop = {end_of_turn(self.tokenizer)[-1], self.tokenizer.eos_token_id} - {None}
        names = "model", "human", "human_params", *SAME
        self.meta = {name: getattr(args, name) for name in names}
        self.meta |= {"model_weights": weights_digest(folder), "version": version()}

    async def load(self):
        """Asks the servers for their models, then loads ours; returns self."""
        args, human = self.args, self.args.human or ""
        if human.startswith("http"):
            llm = LLM(args)
            if "model" not in llm.body:
                await llm.meet()
            self.reply = llm.reply
        elif human.startswith("fixed:"):
            self.reply = lambda task, history: human.removeprefix("fixed:")
        elif human:
            self.reply = function(human, "reply")
        if args.engine:
            self.engine = await VllmEngine(args, self.stop).meet()
            self.longest = min(self.longest, self.engine.longest)
        else:
            self.engine = TransformersEngine(args, self.stop)
            if DEVICE == "cuda":
                say("transformers samples; a vLLM server is many times as fast: --engine")
        if args.critic and args.critic.endswith(".py"):
            self.critic = function(args.critic, "advantages")
        elif args.critic:
            self.critic = Critic(args).advantages
        return self

    async def play(self, task, sample):
        """Plays one episode; returns the new fields of its record."""
        turns, key = self.args.max_turns, (self.args.seed, task_id(task), sample)
        n_candidates = self.n_candidates(key)
        history = [first_message(task, turns)]
        for turn in range(turns):
            try:
                message = await self.act(task, history, (*key, turn), n_candidates)
            except ContextFull:
                if turn == 0:
                    raise
                history.pop()  # a reply that the agent can't read
                break
            message["content"], answer = read_action(message["output"], last=turn == turns - 1)
            history.append(message)
            if answer is not None:
                break
            history.append({"role": "user", "content": await self.human(task, history)})
        answer = environment(task).final_answer(history, answer)
        return {"sample": sample, "dialogue_history": history, "answer": answer or "",
                "answered": is_answer(message), "meta": self.meta}

    async def add_candidates(self, record, sample):
        """Gives the agent's messages of a dialogue candidates; returns its record's new fields.

        In `meta` the candidates' settings stand beside those of the dialogue.
        """
        key = self.args.seed, task_id(record["task"]), sample
        n_candidates = self.n_candidates(key)
        for turn, (history, (message, *_)) in enumerate(actions_of(record)):
            message.pop("candidates", None)  # another model's
            if n_candidates:
                _, message["candidates"] = await self.draw(history, (*key, turn), 0, n_candidates)
        meta = {"thinking": self.args.thinking, "candidates": self.meta}
        return {"sample": sample, "answered": answered(record), "meta": meta}

    def n_candidates(self, key):
        """How many candidates each turn of an episode gets. key: (seed, task id, sample)."""
        chosen = rng("share", *key).random() < self.args.candidates_share
        return self.args.candidates if chosen else 0

    async def act(self, task, history, key, n_candidates):
        """The agent's next message, its `content` still None.

        key: (seed, task id, sample, turn).
        """
        actions, candidates = await self.draw(history, key, self.args.best_of, n_candidates)
        chosen = actions[0]
        if self.critic:
            scores = await ask(self.critic, task, history, actions)
            if len(scores) != len(actions) or not all(map(math.isfinite, scores)):
                raise EpisodeError(f"the critic's scores of {len(actions)} messages are {scores}")
            values = [score + self.args.logprob_weight * sum(action["logprobs"])
                      for score, action in zip(scores, actions)]
            chosen = actions[values.index(max(values))]
        message = {"role": "assistant", "content": None, **chosen}
        if candidates:
            message["candidates"] = candidates
        return message

    async def draw(self, history, key, n_actions, n_candidates):
        """(actions, candidates) after a history. Candidates keep the sum of their log-probs."""
        draws = [(*key, j) for j in range(n_actions)]
        draws += [(*key, "candidate", j) for j in range(n_candidates)]
        with fail_on_error("this --model's chat template does not take the agent's prompt"):
            prompt = render(self.tokenizer, history, self.args.thinking)
        most = min(self.args.max_tokens, self.longest - len(prompt))
        if most <= 0:
            raise ContextFull(f"the conversation has {len(prompt)} tokens, and the model takes "
                              f"{self.longest}")
        if self.args.temperature:
            drawn = await self.engine(prompt, draws, most)
        else:  # all are the same, and vLLM draws no more than one
            drawn = await self.engine(prompt, draws[:1], most) * len(draws)
        texts = self.tokenizer.batch_decode([ids for ids, _ in drawn], skip_special_tokens=True)
        actions = []
        for text, (ids, logprobs) in zip(texts, drawn):
            numbers = [round(x, 6) for x in logprobs if x is not None and abs(x) < 1000]
            if len(numbers) != len(ids):  # servers write -9999 for minus infinity
                raise EpisodeError("log-probs are missing, NaN or infinite: are the weights sound?")
            if max(ids) >= len(self.tokenizer):
                raise EpisodeError(f"token {max(ids)} is not of --model: has the engine another?")
            action = {"output": text, "token_ids": ids, "logprobs": numbers}
            if cut := ids[-1] not in self.stop:
                action["cut"] = True
            self.totals.update(actions=1, cut=cut)
            actions.append(action)
        candidates = actions[n_actions:]
        for candidate in candidates:
            candidate["logprob"] = round(sum(candidate.pop("logprobs")), 6)
        return actions[:n_actions], candidates

    async def human(self, task, history):
        """The human's reply to the last message."""
        said = await ask(self.reply, task, history)
        if not isinstance(said, str):
            raise EpisodeError(f"the human's reply is no text: {said!r}")
        return said[:environment(task).reply_chars]


async def ask(function, *args):
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


class Batcher:
    """Collects what coroutines ask for, and computes it together in one thread.

    Who asks awaits self.step, the asyncio task that computes; the first one starts it. A step waits
    until nobody adds a request, computes, and starts the next while requests are under way.
    compute(new) begins requests, and sets the `result` of at least one of those under way.
    """

    def __init__(self):
        self.waiting, self.under_way = [], []  # requests
        self.step = None  # the asyncio task that computes for all

    async def ask(self, **what):
        """The result of a request with these fields."""
        request = SimpleNamespace(result=None, **what)
        self.waiting.append(request)
        while request.result is None:
            self.step = self.step or asyncio.ensure_future(self.take_step())
            await self.step
        return request.result

    async def take_step(self):
        before = 0
        while before != len(self.waiting):  # until all have asked: batches are full, and the
            before = len(self.waiting)      # same every time
            await asyncio.sleep(0)
        new = self.admit()
        self.under_way += new
        await asyncio.get_running_loop().run_in_executor(COMPUTE, self.compute, new)
        self.under_way = [request for request in self.under_way if request.result is None]
        self.step = asyncio.ensure_future(self.take_step()) if self.under_way else None

    def admit(self):
        """Takes from the waiting requests those that begin now."""
        new, self.waiting = self.waiting, []
        return new


class Critic(Batcher):
    """The critic in a finished --out of train_critic.py.

    await critic.advantages(task, history, actions) gives those of the actions.
    """

    def __init__(self, args):
        super().__init__()
        flags = finished_flags(args.critic)
        self.ref_reads_c, self.thinking = flags.ref_context == "hidden", args.thinking
        self.pi, self.tokenizer = load(args.critic, DEVICE, "auto")
        self.pi_ref, _ = load(flags.model, DEVICE, "auto")

    async def advantages(self, task, history, actions):
        turns = critic_turns(self.tokenizer, task, history, actions, self.thinking,
                             pi_reads_c=True, ref_reads_c=self.ref_reads_c)
        return await self.ask(turns=turns)

    def compute(self, new):
        ref_turn_of = dict(pair for request in new for pair in request.turns)
        ref = reference(self.pi_ref, ref_turn_of, TREE_TOKENS)
        values = advantages(self.pi, ref, TREE_TOKENS)
        for request in new:
            request.result = [values[turn] for turn, _ in request.turns]


# --- all episodes ---------------------------------------------------------------------------------

def finished_episodes(path, meta):
    """{(task id, sample)} of the episodes in --resume's file, which may be empty.

    A last line that a kill has cut is dropped from the file. Episodes of other weights or SAME
    flags than those in `meta` end the program.
    """
    done = set()
    with fail_on_error(f"--resume {path}"), open(path, "rb+") as f:
        line = b""
        for line in f:
            pass
        if line.startswith(b"{") and not line.endswith(b"\n"):
            try:
                json.loads(line)
                f.write(b"\n")  # it is whole
            except ValueError:
                f.truncate(f.tell() - len(line))
        f.seek(0)
        for r in read_jsonl(f, needs("sample"), path) if os.path.getsize(path) else ():
            done.add((task_id(r["task"]), r["sample"]))
            old = r.get("meta", {})
            old = old.get("candidates", old)  # those of add_candidates
            for name in ("model_weights", *SAME):
                if old.get(name, meta[name]) != meta[name]:
                    fail(f"--resume {path} holds episodes with {name} {old[name]}, not "
                         f"{meta[name]}: give the same flags and weights, or another file")
    return done


def read_jobs(args, done):
    """Yields (record, sample) of the episodes to play; completes the records' tasks.

    A task that comes again goes on with its sample numbers, and so does its next dialogue.
    """
    next_sample, taken = {}, set()  # {task id: sample}; (task id, sample)
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

    One that fails is not written: --resume plays it again. After an error that ends the run no new
    episode begins, and those under way end first.
    """
    players = Players(args)
    done = finished_episodes(args.resume, players.meta) if args.resume else set()
    jobs, totals, errors = read_jobs(args, done), players.totals, []

    async def one(record, sample):
        try:
            if "dialogue_history" in record:
                new = await players.add_candidates(record, sample)
            else:
                new = await players.play(record["task"], sample)
        except EpisodeError as e:
            totals["failed"] += 1
            if totals["failed"] <= 3:
                say(f"task {record['task']['id']}, sample {sample} failed: {e}")
            return
        new["meta"] = {**record.get("meta", {}), **new["meta"]}
        emit({**record, **new})
        bar.update()
        totals["episodes"] += 1

    async def work(queue):
        try:
            for record, sample in queue:
                await one(record, sample)
        except SystemExit as e:
            errors.append(e)
            jobs.close()  # no other begins

    if first := next(jobs, None):  # a wrong line or flag ends the program before models load
        await players.load()
        bar = progress(f"episodes of {args.model}")
        queue = itertools.chain([first], jobs)  # each worker takes the next one when it is free
        await asyncio.gather(*(work(queue) for _ in range(args.concurrency)))
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


# --- servers --------------------------------------------------------------------------------------

class Endpoint:
    """An OpenAI-compatible server. Its API key is the environment's variable KEY."""
    KEY = "OPENAI_API_KEY"

    def __init__(self, url, args, body, hint=""):
        """body: what all requests share. hint: what may help where one is refused."""
        import openai
        os.environ["no_proxy"] = getproxies().get("no", "") + ",localhost,127.0.0.1,::1"
        self.url, self.body, self.hint = url, body, hint
        self.client = openai.AsyncOpenAI(
            base_url=url, api_key=os.environ.get(self.KEY, "none"),
            max_retries=args.retries, timeout=openai.Timeout(args.timeout, connect=30))
        self.answered, self.failed = 0, set()  # requests; tasks of those since the last answer

    async def meet(self):
        """Finds the served model's name; of several the body must name one. Returns self."""
        with fail_on_error(f"{self.url} lists no models (an address ends in /v1)"):
            client = self.client.with_options(max_retries=0)
            reply = await client.get("/models", cast_to=object)
            served = {model["id"]: model.get("max_model_len") for model in reply["data"]}
        name = [*served][0] if len(served) == 1 else self.body.get("model")
        if name not in served:
            fail(f"{self.url} serves {', '.join(served) or 'no model'}, not {name}; "
                 """--human_params '{"model": "NAME"}' names the human's""")
        self.body["model"], self.longest = name, served[name] or math.inf
        return self

    async def ask(self, path, task, read, **body):
        """read(reply) of a request. EpisodeError: it is refused, or its reply can't be used.

        The run ends after failures of 8 tasks in a row, or if no request was answered while the
        client repeated this one.
        """
        answered = self.answered
        try:
            reply = await self.client.post(path, cast_to=object, body={**self.body, **body})
            result = read(reply)
        except Exception as e:
            refused = getattr(e, "status_code", 0) in (400, 413, 422)
            malformed = isinstance(e, (LookupError, TypeError, AttributeError))
            useless = isinstance(e, ValueError)  # says read
            down = not (refused or malformed or useless)
            text = " ".join(str(e).split())[:200]
            if malformed:
                text = "the reply is not that of an OpenAI-compatible server"
            why = f"{self.url}: {type(e).__name__}: {text}{'' if down else self.hint}"
            self.failed.add(task)
            if (down and self.answered == answered) or len(self.failed) >= 8:
                fail(why + "; --resume FILE goes on from what was finished")
            raise EpisodeError(why) from None
        self.answered += 1
        self.failed.clear()
        return result


class LLM(Endpoint):
    """An LLM that plays the human: it reads the hidden information, and looks at pages."""

    def __init__(self, args):
        params = {"temperature": 0, "max_tokens": 1024, **args.human_params}
        given = {name: value for name, value in params.items() if value is not None}
        hint = """ (--human_params '{"max_tokens": 4000, "NAME": null}' sets one, leaves out one)"""
        super().__init__(args.human, args, given, hint)
        self.browser = args.browser

    @cached_property
    def renderer(self):
        """The browsers of those who look at pages; the first page starts one."""
        return Renderer(cpus(), self.browser)

    async def reply(self, task, history):
        content = human_prompt(task, history)
        if environment(task).shows_pages:
            try:
                message = history[-1]["content"]
                seen = await asyncio.to_thread(self.renderer.pair, task, message)
            except RenderError as e:
                return NOT_SEEN.format(e)
            content = [{"type": "text", "text": content}]
            for page in seen:
                url = "data:image/png;base64," + base64.b64encode(page["png"]).decode()
                content.append({"type": "image_url", "image_url": {"url": url}})
        reply = await self.ask("/chat/completions", task_id(task), said,
                               messages=[{"role": "user", "content": content}])
        return reply if environment(task).shows_pages else redact(reply, task["ground_truth"])


def said(reply):
    """What a chat model's reply says, without its thought."""
    choice = reply["choices"][0]
    text = without_thinking(choice["message"]["content"] or "")
    if not text:
        raise ValueError(f"an empty reply, finish_reason {choice['finish_reason']}")
    return text.encode(errors="replace").decode()  # no tokenizer takes a lone surrogate


# --- engines: await engine(prompt_ids, draws, most) samples the agent's messages ------------------
#
# It gives [(token_ids, logprobs)], one per draw. A draw is the key of its randomness, rng(*draw);
# it begins with its episode's (seed, task id, sample). vLLM's draw i has the seed of draw 0 plus i.
# token_ids are at most `most`, and end with a token of `stop` unless that cut them. logprobs are
# the sampler's, at its temperature and top_p.

class VllmEngine(Endpoint):
    """Samples by a vLLM server, which takes and gives token ids.

    Another batch may change its tokens, whatever the seed.
    """
    KEY = "VLLM_API_KEY"

    def __init__(self, args, stop):
        super().__init__(args.engine, args, {
            "model": args.model, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0,
            "min_p": 0, "repetition_penalty": 1, "stop_token_ids": sorted(stop),
            "skip_special_tokens": False, "logprobs": 0, "return_token_ids": True})

    async def __call__(self, prompt, draws, most):
        def read(reply):
            outs = reply["choices"]
            if any(out["finish_reason"] not in ("stop", "length") for out in outs):
                raise ConnectionError("a message is cut off: the server is shutting down")
            if len(outs) != len(draws) or not all(out.get("token_ids") for out in outs):
                raise ValueError("no token_ids for each draw: it takes vLLM 0.10 or newer")
            return [(out["token_ids"], (out["logprobs"] or {}).get("token_logprobs") or [])
                    for out in outs]

        return await self.ask("/completions", draws[0][1], read, prompt=prompt, n=len(draws),
                              max_tokens=most, seed=rng(*draws[0]).getrandbits(31))


class Reading:
    """Prompts that one forward reads: the keys and values of their tokens.

    cached[i]: (n, layers): of prompt i's first n tokens there are keys and values already, (2,
    tokens, heads, size) in each layer.
    """

    def __init__(self, prompts, cached):
        self.cached, self.kv = cached, []  # kv[layer][i]: prompt i's
        self.lengths = [len(prompt) for prompt in prompts]
        self.new = [len(prompt) - n for prompt, (n, _) in zip(prompts, cached)]
        self.ids = [t for prompt, (n, _) in zip(prompts, cached) for t in prompt[n:]]
        self.positions = torch.cat([torch.arange(n, len(prompt), device=DEVICE)
                                    for prompt, (n, _) in zip(prompts, cached)])

    def attend(self, layer, q, k, v, scale, left):
        """Attention of the new tokens, (tokens, heads, size). left: as in model.tree_attention."""
        new = torch.stack([k, v]).split(self.new, 1)
        self.kv.append([torch.cat([layers[layer][:, :n] if n else x[:, :0], x], 1)
                        for x, (n, layers) in zip(new, self.cached)])
        runs = SimpleNamespace(q=self.new, kv=self.lengths)
        return sdpa_kernel(q, *torch.cat(self.kv[-1], 1), runs, scale, left)


class Group:
    """P prompts with n draws each: rows, the actions under way, which grow by a token a forward.

    Row r is draw draw_of[r] of prompt prompt_of[r]. Keys and values of each layer:

        prompt_kv  (2, P, heads, longest prompt, size)  a prompt's rows read it together
        row_kv     (2, rows, heads, room, size)         of what the rows have drawn

    Rows that have ended leave, an eighth of all at a time.
    """

    def __init__(self, reading, draws):
        """reading: of the prompts. draws[i]: the n actions of prompt i."""
        self.n, self.actions = len(draws[0]), list(itertools.chain(*draws))
        self.prompt_of = torch.arange(len(draws), device=DEVICE).repeat_interleave(self.n)
        self.draw_of = torch.arange(self.n, device=DEVICE).repeat(len(draws))
        self.lengths = torch.tensor(reading.lengths, device=DEVICE)  # of the prompts
        padded = (pad_sequence([x.transpose(0, 1) for x in kv], True) for kv in reading.kv)
        self.prompt_kv = [x.permute(2, 0, 3, 1, 4).contiguous() for x in padded]
        self.row_kv = [x.new_empty(2, len(self.actions), x.shape[2], ROOM, x.shape[4])
                       for x in self.prompt_kv]
        self.step = -1  # the place in its action of the token that the next forward reads

    def attend(self, layer, q, k, v, scale, left):
        """Attention of the rows' last tokens, (rows, heads, size), to their prompts and actions."""
        if self.step == self.row_kv[layer].shape[3]:  # twice the room
            row_kv = self.row_kv[layer]
            self.row_kv[layer] = torch.cat([row_kv, torch.empty_like(row_kv)], 3)
        self.row_kv[layer][:, :, :, self.step] = torch.stack([k, v])
        left = left if left >= 0 else math.inf
        row_k, row_v = self.row_kv[layer][:, :, :, max(0, self.step - left):self.step + 1]
        prompt_k, prompt_v = self.prompt_kv[layer]
        width = prompt_k.shape[2]
        key_at, lengths = torch.arange(width, device=DEVICE), self.lengths[self.prompt_of, None]
        masked = (key_at >= lengths) | (key_at < lengths + self.step - left)
        q = q.unflatten(1, (k.shape[1], -1))  # (rows, heads of keys, queries of each, size)
        scores = self.by_row(self.by_prompt(q) @ prompt_k.mT)
        scores = scores.masked_fill_(masked[:, None, None], -math.inf)
        scores = torch.cat([scores, q @ row_k.mT], -1)
        weights = (scores.float() * scale).softmax(-1).to(q.dtype)
        out = self.by_row(self.by_prompt(weights[..., :width]) @ prompt_v)
        return (out + weights[..., width:] @ row_v).flatten(1, 2)

    def by_prompt(self, x):
        """(rows, heads, queries, ...) to (prompts, heads, n * queries, ...), 0 for rows that left.
        """
        grid = x.new_zeros(len(self.lengths), self.n, *x.shape[1:])
        grid[self.prompt_of, self.draw_of] = x
        return grid.transpose(1, 2).flatten(2, 3)

    def by_row(self, x):
        """by_prompt() back."""
        return x.unflatten(2, (self.n, -1)).transpose(1, 2)[self.prompt_of, self.draw_of]

    def grow(self):
        """Goes on to the tokens just drawn; drops rows that have ended, an eighth at once."""
        self.step += 1
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
        # a row that has ended may be beyond the model's positions
        self.positions = (self.lengths[self.prompt_of] + self.step) * goes_on

    def tokens(self):
        """How many tokens it has room for, of prompts and rows."""
        return (len(self.lengths) * self.prompt_kv[0].shape[3]
                + len(self.actions) * self.row_kv[0].shape[3])


def attend_in_groups(module, query, key, value, attention_mask, scaling=None, groups=(),
                     sliding_window=None, **kwargs):
    """The engine's attention, in the form that transformers' AttentionInterface wants."""
    left = sliding_window - 1 if sliding_window else -1
    sizes = [len(group.ids) for group in groups]
    parts = zip(*(x[0].transpose(0, 1).split(sizes) for x in (query, key, value)))
    out = [group.attend(module.layer_idx, *part, scaling, left)
           for group, part in zip(groups, parts)]
    return torch.cat(out)[None], None


AttentionInterface.register("groups", attend_in_groups)


class TransformersEngine(Batcher):
    """Samples by transformers in this process.

    All actions under way grow by a token in one forward, in which requests join as others end.
    A prompt is read once for all its draws, and only the new part of an episode's next prompt.
    """

    def __init__(self, args, stop):
        super().__init__()
        self.lm, _ = load_lm(args.model, DEVICE, args.dtype)
        self.lm.set_attn_implementation("groups")
        self.args, self.stop = args, stop
        self.groups = []
        self.cache = {}  # episode: (its last prompt, keys and values of it); the latest comes last

    async def __call__(self, prompt, draws, most):
        actions = [SimpleNamespace(rng=rng(*draw), ids=[], logps=[], most=most, ended=False)
                   for draw in draws]
        return await self.ask(prompt=prompt, episode=draws[0][:3], actions=actions)

    def admit(self):
        """Takes from the waiting requests those that find room, at least one if all have ended.

        Requests wait until they are a fifth of all actions, so that groups are few and large.
        """
        waiting = sum(len(request.actions) for request in self.waiting)
        if waiting < sum(len(group.actions) for group in self.groups) / 4:
            return []
        new = []
        room = self.args.max_batch_tokens - sum(group.tokens() for group in self.groups)
        for request in self.waiting:
            room -= len(request.prompt) + ROOM * len(request.actions)
            if room < 0 and (new or self.groups):
                break
            new.append(request)
        del self.waiting[:len(new)]
        return new

    @torch.no_grad()
    def compute(self, new):
        """Begins new requests; samples until one has ended."""
        by_prompt = defaultdict(list)  # {prompt: requests}
        for request in new:
            by_prompt[tuple(request.prompt)].append(request)
        by_size = defaultdict(list)  # {number of actions: [requests of a prompt]}
        for same in by_prompt.values():
            by_size[sum(len(request.actions) for request in same)].append(same)
        for prompts in by_size.values():
            self.begin(prompts)
        while sum(len(prompt) for prompt, _ in self.cache.values()) > self.args.max_batch_tokens:
            del self.cache[next(iter(self.cache))]
        while not (ended := [r for r in self.under_way if all(a.ended for a in r.actions)]):
            logits = self.forward(self.groups).split([len(group.ids) for group in self.groups])
            for group, part in zip(self.groups, logits):
                self.draw(part, group.actions)
                group.grow()
            self.groups = [group for group in self.groups if group.actions]
        for request in ended:
            request.result = [(action.ids, action.logps) for action in request.actions]

    def begin(self, prompts):
        """Reads the prompts of a group in one forward; draws the first tokens.

        prompts: a list for each, of the requests that have it, with as many actions in all.
        """
        firsts = [same[0] for same in prompts]
        reading = Reading([r.prompt for r in firsts], [self.cached(r) for r in firsts])
        last = torch.tensor([*itertools.accumulate(reading.new)], device=DEVICE) - 1
        logits = self.forward([reading], last)
        for i, same in enumerate(prompts):
            layers = [of_prompt[i] for of_prompt in reading.kv]
            for request in same:
                self.cache.pop(request.episode, None)  # it comes last
                self.cache[request.episode] = request.prompt, layers
        group = Group(reading, [[a for r in same for a in r.actions] for same in prompts])
        self.draw(logits.repeat_interleave(group.n, 0), group.actions)
        group.grow()
        if group.actions:
            self.groups.append(group)

    def cached(self, request):
        """(n, keys and values) of a prompt in the cache whose first n tokens are the request's.

        It is the last one of its episode, else the latest of all.
        """
        latest = next(reversed(self.cache.values()), ((), None))
        before, layers = self.cache.get(request.episode, latest)
        return min(common_prefix(before, request.prompt), len(request.prompt) - 1), layers

    def forward(self, groups, at=0):
        """(rows, vocabulary) logits of all tokens, or of those at the indices `at`."""
        ids = torch.tensor([t for group in groups for t in group.ids], device=DEVICE)
        positions = torch.cat([group.positions for group in groups])
        return self.lm(input_ids=ids[None], position_ids=positions[None], use_cache=False,
                       groups=groups, logits_to_keep=at).logits[0]

    def draw(self, logits, actions):
        """Draws the next token of each action that goes on."""
        live = [row for row, action in enumerate(actions) if not action.ended]
        for at in range(0, len(live), 64):  # a vocabulary is large
            rows = live[at:at + 64]
            token, logp = self.choose(logits[rows], [actions[row].rng for row in rows])
            for row, t, p in zip(rows, token[:, 0].tolist(), logp[:, 0].tolist()):
                action = actions[row]
                action.ids.append(t)
                action.logps.append(p)
                action.ended = t in self.stop or len(action.ids) == action.most

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


if __name__ == "__main__":
    run(main, ARGS)
