"""Plays episodes: an agent talks with a human and hands in an answer, which is graded.

    colbench.py tasks | python collect.py --model runs/base -k 4 > trajectories.jsonl
    ... | python collect.py --model runs/base -k 4 --candidates 16 > trajectories.jsonl
    ... | python collect.py --model runs/base --best_of 4 --critic runs/critic > guided.jsonl
    ... | python collect.py --model runs/base -k 4 --resume all.jsonl >> all.jsonl

Many episodes run at once; each is written as it ends. Every draw is a function of (seed, task,
sample, turn). The other episodes change it by rounding only: after a kill and --resume log-probs
differ by about 1e-6, and rarely a text. Records that have a dialogue already get candidates only.
"""
from utils import (Endpoint, EndpointError, descendants, fail, open_stdout, parser, progress,
                   read_jsonl, rng, run, say, skip_bad_flag, version, watchdog)

import asyncio
import atexit
import base64
import contextlib
import functools
import itertools
import math
import os
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import SimpleNamespace

from colbench import (NOT_SEEN, GraderError, NoReference, RenderError, environment, first_message,
                      hidden_information, human_prompt, judge, kind_of, needs, page_flags,
                      read_action, redact, task_id, without_thinking)


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] < tasks.jsonl > trajectories.jsonl")
    g = p.add_argument_group("episodes")
    g.add_argument("--model", default="meta-llama/Llama-3.1-8B-Instruct", help="the agent")
    g.add_argument("-k", type=int, default=1, help="episodes of each task")
    g.add_argument("--max_turns", type=int, default=10, metavar="N",
                   help="the agent's messages; the last one is its answer")
    g.add_argument("--agent_prompt", metavar="FILE", help="the agent's first message, with "
                   "{problem_description}, {max_turns}, {ANSWER} and {OUTPUT}")
    g.add_argument("--concurrency", type=int, default=256, metavar="N",
                   help="episodes under way at once, for each vllm copy or engine's address")
    g.add_argument("--resume", metavar="FILE",
                   help="skip the episodes in FILE, and drop its last line if that is cut off")
    skip_bad_flag(g)
    g = p.add_argument_group("human")
    g.add_argument("--human", default="scripted", help="scripted: the built-in one; fixed:TEXT: "
                   "always says TEXT; http://host:port/v1[,http://...]: an LLM at temperature 0")
    g.add_argument("--human_model", help="the LLM's name, if the servers have several")
    g.add_argument("--human_prompt", metavar="FILE", help="what the LLM reads, with "
                   "{problem_description}, {hidden_information} and {dialogue}")
    g.add_argument("--human_tokens", type=int, metavar="N",
                   help="longest reply of the LLM, else 150 for 400 characters, where it is cut")
    g.add_argument("--human_leak", choices=["count", "redact"], default="count",
                   help="count the replies that quote hidden code; redact: cut it out, too")
    g = p.add_argument_group("sampling")
    g.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    g.add_argument("--top_p", type=float, default=1.0, metavar="P", help="of each token, draw from "
                   "the likeliest that sum up to P; log-probs are of what is drawn from")
    g.add_argument("--max_tokens", type=int, default=1024, metavar="N", help="longest message")
    g.add_argument("--thinking", type=int, choices=[0, 1], default=0,
                   help="1: let a model think whose chat template can; nobody sees the thought")
    g.add_argument("--seed", type=int, default=0)
    g.add_argument("--candidates", type=int, default=0, metavar="N",
                   help="alternatives drawn at every turn; stage 2 wants 16")
    g.add_argument("--candidates_share", type=float, default=1.0,
                   help="share of the episodes that get candidates")
    g.add_argument("--best_of", type=int, default=1, metavar="N",
                   help="messages drawn at every turn; the critic's favourite is sent")
    g.add_argument("--critic", help="--out of train_critic.py, or http://host:port/v1 of an LLM; "
                   "it READS HIDDEN INFORMATION, so this is no fair policy")
    g.add_argument("--prior", type=float, default=0,
                   help="--best_of: choose by score + prior * log-prob")
    g = p.add_argument_group("engine")
    g.add_argument("--engine", default="auto", help="transformers, vllm, or http://host:port/v1"
                   "[,http://...] of vLLM servers; auto: vllm if it and a GPU are there")
    g.add_argument("--max_batch_tokens", type=int, default=65536, metavar="N",
                   help="transformers: prompt tokens in a batch")
    g.add_argument("--tensor_parallel", type=int, default=1, metavar="N",
                   help="vllm: GPUs of one copy of the model")
    g.add_argument("--data_parallel", type=int, default=1, metavar="N", help="vllm: copies")
    g.add_argument("--max_model_len", type=int, metavar="N",
                   help="vllm: longest context, else the model's")
    g.add_argument("--in_flight", type=int, default=64, metavar="N",
                   help="requests at once to one server of --human or --critic")
    g.add_argument("--timeout", type=float, default=120,
                   help="seconds of a request, of an engine's for each draw")
    g.add_argument("--retries", type=int, default=8, help="of a request, over about a minute")
    g = p.add_argument_group("grading")
    g.add_argument("--rules", choices=["honest", "official"], default="honest",
                   help="the grader's rules, see colbench.py")
    g.add_argument("--unsafe", type=int, choices=[0, 1], default=0,
                   help="1: grade even without a sandbox")
    page_flags(p)
    args = p.parse_args(argv)
    if (args.best_of > 1) != bool(args.critic):
        fail("--best_of N and --critic DIR go together")
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
from transformers import DynamicCache

from model import end_of_turn, find_model, load_lm, render, weights_digest
from train_critic import critic_turns, load_critic, score_turns

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


# --- engines: await engine((prompt_ids, draws)) samples the agent's messages ----------------------
#
# It gives [(token_ids, logprobs)], one per draw. A draw is the key of its randomness, rng(*draw);
# it begins with its episode's (seed, task id, sample). vLLM's are in seed_of.
# token_ids end with a token of `stop` unless max_tokens cut them. logprobs are the sampler's, at
# its temperature and top_p.

class Batcher:
    """await batcher(request): this request's part of work(requests).

    work runs in a thread, on the requests that wait at that moment: as many as have a sum of
    size(request) up to `limit`, but at least one.
    """

    def __init__(self, work, limit, size):
        self.work, self.limit, self.size = work, limit, size
        self.waiting, self.server = [], None

    async def __call__(self, request):
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((request, future))
        if not self.server:
            self.server = asyncio.ensure_future(self.serve())
        return await future

    async def serve(self):
        while self.waiting:
            await self.all_have_asked()
            batch = self.next_batch()
            try:
                results = await asyncio.to_thread(self.work, [request for request, _ in batch])
                for (_, future), result in zip(batch, results):
                    future.set_result(result)
            except Exception as e:
                for _, future in batch:
                    future.set_exception(e)
        self.server = None

    async def all_have_asked(self):
        """Waits while coroutines still add requests: batches are full, and the same every time."""
        before = 0
        while before != len(self.waiting):
            before = len(self.waiting)
            await asyncio.sleep(0)

    def next_batch(self):
        n = total = 0
        for request, _ in self.waiting:
            total += self.size(request)
            if n > 0 and total > self.limit:
                break
            n += 1
        batch, self.waiting = self.waiting[:n], self.waiting[n:]
        return batch


def transformers_engine(args, stop):
    """Samples by transformers in this process."""
    lm, _ = load_lm(args.model, DEVICE)

    def read(prompts):
        """(cache, mask, logits of the next token) of prompts, padded on the left."""
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        ids = [[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts)]
        mask = [[0] * pad + [1] * len(prompt) for pad, prompt in zip(padding, prompts)]
        ids, mask = torch.tensor(ids, device=DEVICE), torch.tensor(mask, device=DEVICE)
        cache = DynamicCache(config=lm.config)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = lm(input_ids=ids, attention_mask=mask, position_ids=positions,
                    past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return cache, mask, logits[:, -1]

    def choose(logits, generators):
        """(rows, 1) tokens and their log-probs."""
        logps = (logits.double() / (args.temperature or 1)).log_softmax(-1)
        if args.temperature and args.top_p < 1:
            ordered, tokens = logps.sort(descending=True)
            beyond = ordered.exp().cumsum(-1) - ordered.exp() >= args.top_p
            beyond = beyond.scatter(-1, tokens, beyond)
            logps = logps.masked_fill(beyond, -math.inf).log_softmax(-1)
        if args.temperature:  # invert the cumulative distribution at a uniform number
            u = torch.tensor([[g.random()] for g in generators], dtype=torch.double, device=DEVICE)
            cdf = logps.exp().cumsum(-1)
            token = torch.searchsorted(cdf, u * cdf[:, -1:], right=True)
            token = token.clamp(max=cdf.shape[1] - 1)
        else:
            token = logps.argmax(-1, keepdim=True)
        return token, logps.gather(1, token)

    @torch.no_grad()
    def sample(requests):
        cache, mask, logits = read([prompt for prompt, _ in requests])
        rows = [i for i, (_, draws) in enumerate(requests) for _ in draws]
        rows = torch.tensor(rows, device=DEVICE)
        cache.batch_select_indices(rows)  # a prompt is read once for all its draws
        mask, logits = mask[rows], logits[rows]
        generators = [rng(*draw) for _, draws in requests for draw in draws]
        samples = [([], []) for _ in generators]
        alive = list(range(len(samples)))
        for _ in range(args.max_tokens):
            token, logp = choose(logits, [generators[i] for i in alive])
            for i, t, p in zip(alive, token[:, 0].tolist(), logp[:, 0].tolist()):
                samples[i][0].append(t)
                samples[i][1].append(round(p, 6))
            keep = [row for row, i in enumerate(alive) if samples[i][0][-1] not in stop]
            if not keep:
                break
            if len(keep) < len(alive):
                alive = [alive[row] for row in keep]
                keep = torch.tensor(keep, device=DEVICE)
                cache.batch_select_indices(keep)
                token, mask = token[keep], mask[keep]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            positions = mask.sum(1, keepdim=True) - 1
            logits = lm(input_ids=token, attention_mask=mask, position_ids=positions,
                        past_key_values=cache, use_cache=True).logits[:, -1]
        samples = iter(samples)
        return [list(itertools.islice(samples, len(draws))) for _, draws in requests]

    def size(request):
        prompt, draws = request
        return len(prompt) * len(draws)

    return Batcher(sample, args.max_batch_tokens, size)


def vllm_engine(args, stop):
    """Samples by vLLM in this process. Another batch may change its tokens, whatever the seed."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        from vllm import AsyncEngineArgs, SamplingParams
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM
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
    guard = watchdog(descendants())  # its processes would outlive a kill and keep the GPU

    def end():
        llm.shutdown()
        llm.shutdown = lambda: None  # __del__ calls it again, when vllm's modules are gone
        guard.kill()

    atexit.register(end)
    numbers = itertools.count()
    replicas = [SimpleNamespace(rank=rank, waiting=0) for rank in range(args.data_parallel)]
    homes = {}  # episode: the replica that has its prefix in its cache

    async def engine(request):
        prompt, draws = request
        seed, n = seed_of(draws, args)
        params = SamplingParams(n=n, temperature=args.temperature, top_p=args.top_p, seed=seed,
                                max_tokens=args.max_tokens, stop_token_ids=sorted(stop),
                                logprobs=0, flat_logprobs=True, detokenize=False,
                                output_kind=RequestOutputKind.FINAL_ONLY)
        home = homes.setdefault(draws[0][:3], min(replicas, key=lambda r: r.waiting))
        home.waiting += 1
        try:
            async for reply in llm.generate({"type": "token", "prompt_token_ids": prompt}, params,
                                            str(next(numbers)), data_parallel_rank=home.rank):
                outs = reply.outputs
        except Exception as e:  # of many kinds: the prompt is too long, the engine has died
            why = " ".join(str(e).split())[:200]
            raise EndpointError(f"vllm: {type(e).__name__}: {why}") from None
        finally:
            home.waiting -= 1
        drawn = [(list(out.token_ids), [round(x, 6) for x in out.logprobs.logprobs])
                 for out in outs]
        return drawn * (len(draws) // n)

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

    async def engine(request):
        prompt, draws = request
        seed, n = seed_of(draws, args)

        async def ask(client):  # completions.create would check the reply number by number
            body = {**fixed, "prompt": prompt, "seed": seed, "n": n}
            reply = await client.post("/completions", cast_to=object, body=body)
            drawn = []
            for out in reply["choices"]:
                if out["finish_reason"] not in ("stop", "length"):  # the server is shutting down
                    raise ValueError(f"message cut off: finish_reason {out['finish_reason']}")
                if not out.get("token_ids"):
                    raise ValueError("no token_ids in the reply: it takes vLLM 0.10 or newer")
                logprobs = [round(x, 6) for x in out["logprobs"]["token_logprobs"]]
                drawn.append((out["token_ids"], logprobs))
            if len(drawn) != n:
                raise ValueError(f"{len(drawn)} draws instead of {n}")
            return drawn
        drawn = await servers(ask, draws[0][:3])
        return drawn * (len(draws) // n)

    return engine


def seed_of(draws, args):
    """(seed, n) of the one request to vLLM for a turn's draws: draw i is that of seed + i.

    At temperature 0, where all draws are the same, vLLM wants n = 1.
    """
    return rng(*draws[0]).getrandbits(31), len(draws) if args.temperature else 1


def trained_critic(args):
    """(critic, its Pictures or None) of a finished run of train_critic.py.

    await critic(task, history, actions) gives the actions' advantages.
    """
    dtype = torch.bfloat16 if CUDA else torch.float32
    critic, tokenizer, models, pictures = load_critic(args.critic, DEVICE, dtype=dtype)

    def work(requests):
        ref_of = dict(pair for request in requests for pair in request)
        scores = score_turns(critic, models, ref_of, 16384)
        return [[scores[turn] for turn, _ in request] for request in requests]

    batcher = Batcher(work, 1024, size=len)  # score_turns splits the turns by their tokens

    async def advantages(task, history, actions):
        turns = critic_turns(critic, tokenizer, task, history, actions, args.thinking, pictures)
        return await batcher(turns)

    return advantages, pictures


# --- an episode -----------------------------------------------------------------------------------

class Players:
    """What an episode talks to: the agent, the human, the critic, and its task's environment."""

    def __init__(self, args):
        self.args, self.leaks, self.drawn, self.cut = args, 0, 0, 0
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
            self.engine = transformers_engine(args, stop)
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
        draws = [(*key, j) for j in range(self.args.best_of)]
        draws += [(*key, "candidate", j) for j in range(candidates)]
        drawn = await self.engine((self.render(history), draws))
        totals = [sum(logprobs) for _, logprobs in drawn]
        if not all(map(math.isfinite, totals)):
            raise EndpointError("the model's log-probs are NaN or infinite: are its weights sound?")
        texts = self.tokenizer.batch_decode([ids for ids, _ in drawn], skip_special_tokens=True)
        actions, others = [], []
        for (ids, logprobs), text, total in zip(drawn, texts, totals):
            if len(actions) < self.args.best_of:
                actions.append({"output": text, "token_ids": ids, "logprobs": logprobs})
            else:
                others.append({"output": text, "token_ids": ids, "logprob": round(total, 6)})
        for action in actions + others:
            self.drawn += 1
            if action["token_ids"][-1] not in self.stop:
                self.cut += 1
                action["cut"] = True
        action = await self.best(task, history, actions) if self.critic else actions[0]
        message = {"role": "assistant", "content": None, **action}
        if others:
            message["candidates"] = others
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
        redacted, leaks = redact(reply, hidden_information(task))
        if leaks:
            self.leaks += 1
        return redacted if self.args.human_leak == "redact" else reply

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
            return reply[:limit]
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
    if not path:
        return None
    try:
        with open(path, encoding="utf-8") as f:
            return f.read()
    except OSError as e:
        fail(f"{flag} {path}: {e.strerror}")


# --- all episodes ---------------------------------------------------------------------------------

def finished_episodes(path, skip_bad):
    """({(task id, sample)}, {digest of the agent's weights}) of the episodes in a file.

    A last line that is cut off is dropped from the file, which may be missing.
    """
    keys, weights = set(), set()
    fields = "task.problem_description", "task.ground_truth", "sample"
    try:
        with open(path, "rb+") as f:
            whole = sum(len(line) for line in f if line.endswith(b"\n"))
            f.truncate(whole)
            f.seek(0)
            if whole:
                for r in read_jsonl(f, fields, path, skip_bad):
                    keys.add((task_id(r["task"]), r["sample"]))
                    weights.add(r.get("meta", {}).get("model_weights"))
    except FileNotFoundError:
        pass
    except OSError as e:
        fail(f"--resume {path}: {e.strerror}")
    return keys, weights - {None}


class Run:
    """The episodes of stdin's tasks: read, played, graded, written, in that order."""

    META = ("model", "human", "temperature", "top_p", "max_turns", "thinking", "seed", "best_of",
            "critic", "prior", "rules")

    def __init__(self, args, emit, players, done):
        self.args, self.emit, self.players, self.done = args, emit, players, done
        self.done_before = len(done)
        self.meta = {flag: getattr(args, flag) for flag in self.META}
        self.meta |= {"model_weights": players.weights, "version": version()}
        self.times_read, self.totals, self.error = Counter(), Counter(), None
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
        has_dialogue, n = "dialogue_history" in record, self.times_read[task["id"]]
        if not has_dialogue or "reward" not in record:
            self.players.environment(task)  # what can't be opened ends the program before the play
        if has_dialogue and not self.args.candidates:
            fail(f"task {task['id']} has a dialogue already: give --candidates, or cut it out")
        self.times_read[task["id"]] += 1
        samples = range(self.args.k)
        if has_dialogue:  # published dialogues have no number
            samples = [record.get("sample", n)]
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
                    new = await self.players.play(record["task"], sample)
            except (EndpointError, NoReference) as e:
                self.totals["failed"] += 1
                if self.totals["failed"] <= 3:
                    say(f"task {record['task']['id']}, sample {sample} failed: {e}")
                continue
            new["meta"] = {**record.get("meta", {}), **self.meta}
            graded = asyncio.ensure_future(self.grade({**record, **new}))
            self.played.put_nowait(graded)

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
            history = record["dialogue_history"]
            self.totals["episodes"] += 1
            self.totals["reward"] += record["reward"]
            self.totals["solved"] += record["reward"] == 1
            self.totals["tokens"] += sum(len(m.get("token_ids", ())) for m in history)

    def summary(self):
        """Says how it went; returns the error that ends the program, or None."""
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
        if self.players.leaks:
            redacts = self.args.human_leak == "redact"
            cut = "cut out" if redacts else "--human_leak redact cuts it out"
            say(f"the human quoted hidden code in {self.players.leaks} replies ({cut})")
        if totals["repeated"]:
            say(f"{totals['repeated']} episodes of tasks that stdin repeats were left out")
        if totals["failed"] and not self.error:
            self.error = SystemExit(f"error: {totals['failed']} episodes failed and were not "
                                    "written; --resume FILE plays them again")
        return self.error


async def collect(args, emit):
    """Plays all episodes; returns the error that ends the program, or None."""
    done, weights = set(), set()
    if args.resume:
        done, weights = finished_episodes(args.resume, args.skip_bad)
    players = await Players(args).load()
    if players.weights and weights - {players.weights}:
        fail(f"--resume {args.resume} holds episodes of other weights than those at --model "
             f"{args.model}: take the old weights, or another file")
    episodes = Run(args, emit, players, done)
    await episodes.all()
    return episodes.summary()


def main(args):
    try:
        error = asyncio.run(collect(args, open_stdout()))
    except GraderError as e:
        fail(e)
    if error:  # raised here, since the event loop would print its tasks
        raise error


if __name__ == "__main__":
    run(main, ARGS)
