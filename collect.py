"""Plays episodes: the agent talks to a human over several turns and hands in an answer, which is graded.

    colbench.py tasks | python collect.py --model runs/base -k 4 > trajectories.jsonl
    ... | python collect.py --model runs/base -k 4 --candidates 16 > trajectories.jsonl    # alternatives for stage 2
    ... | python collect.py --model runs/base --best_of 4 --critic runs/critic > guided.jsonl
    ... | python collect.py --model runs/base -k 4 --resume all.jsonl >> all.jsonl          # go on after a kill

An episode is a coroutine, and none waits for another: engine, critic and human serve whoever asks. Episodes are written
as they finish. Each draw is a function of (seed, task, sample, turn), not of its company in a batch
but for rounding: after a kill and --resume batches have other company, so log-probs differ by some
1e-6 from those of a run without a kill, and a text does where that decides a draw, which is rare.
Records that already have a dialogue only get candidates.
"""
from utils import (Endpoint, EndpointError, watchdog, fail, descendants, open_stdout, parser, progress,
                   read_jsonl, rng, run, say, skip_bad_flag, version)

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

from colbench import (NOT_SEEN, GraderError, NoReference, RenderError, environment, first_message,
                      hidden_information, human_prompt, judge, kind_of, needs, page_flags, read_action,
                      redact, without_thinking, task_id)


def get_args(argv=None):
    p = parser(__doc__)
    p.add_argument("--model", default="meta-llama/Llama-3.1-8B-Instruct", help="the agent")
    p.add_argument("-k", type=int, default=1, help="episodes a task")
    p.add_argument("--max_turns", type=int, default=10, help="messages of the agent; the last one is its answer")
    p.add_argument("--human", default="scripted", help="scripted: that of the built-in tasks, of pages one who names "
                   "the largest difference in what is drawn; fixed:TEXT: says TEXT; "
                   "http://host:port/v1[,http://...]: a chat model, at temperature 0")
    p.add_argument("--human_model", help="its name, where those servers serve several")
    p.add_argument("--human_prompt", help="file: what it reads, with {problem_description}, "
                   "{hidden_information} and {dialogue}")
    p.add_argument("--human_leak", choices=["count", "redact"], default="count",
                   help="replies that quote lines of the hidden code are counted; or the lines cut out, too")
    p.add_argument("--agent_prompt", help="file: the agent's first message, with "
                   "{problem_description}, {max_turns}, {ANSWER} and {OUTPUT}")
    # sampling
    p.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    p.add_argument("--max_tokens", type=int, default=1024, help="of one message")
    p.add_argument("--thinking", type=int, choices=[0, 1], default=0,
                   help="1: leave models whose chat template knows thinking to it; the human never sees it")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--candidates", type=int, default=0, help="alternatives to sample at every turn (stage 2 wants 16)")
    p.add_argument("--candidates_share", type=float, default=1.0, help="share of the episodes that get candidates")
    p.add_argument("--best_of", type=int, default=1, help="actions sampled a turn; the critic's best one is sent")
    p.add_argument("--critic", help="directory of train_critic.py, or http://host:port/v1 of an LLM that judges; it "
                   "READS HIDDEN INFORMATION: no policy comparison")
    p.add_argument("--prior", type=float, default=0,
                   help="--best_of: the best by score + prior * its log-prob when sampled, as in train_policy.py")
    # engine
    p.add_argument("--engine", default="auto", help="transformers, vllm, or http://host:port/v1[,http://...]: vLLM "
                   "servers of --model; auto: vllm where it and a GPU are there, else transformers")
    p.add_argument("--tensor_parallel", type=int, default=1, help="vllm: GPUs a copy of the model is spread over")
    p.add_argument("--data_parallel", type=int, default=1, help="vllm: copies of the model")
    p.add_argument("--max_model_len", type=int, help="vllm: longest context; not given: the model's")
    p.add_argument("--max_batch_tokens", type=int, default=65536, help="transformers: context held at once")
    p.add_argument("--in_flight", type=int, default=64, help="requests under way at each http server")
    p.add_argument("--timeout", type=float, default=120, help="seconds a request to an http server may take")
    p.add_argument("--retries", type=int, default=8, help="of a request to http servers, over about a minute")
    # running
    page_flags(p)
    skip_bad_flag(p)
    p.add_argument("--concurrency", type=int, default=256, help="episodes under way at once")
    p.add_argument("--resume", metavar="FILE", help="skip the episodes in FILE; a cut-off last line is dropped from it")
    p.add_argument("--rules", choices=["honest", "official"], default="honest", help="of the grader, see colbench.py")
    p.add_argument("--unsafe", type=int, choices=[0, 1], default=0, help="1: grade even where no sandbox is to be had")
    return p.parse_args(argv)


# --- engines: whoever awaits is served, together with all who wait at that moment -------------------------------------

class Batcher:
    """await batcher(request): its part of work(requests), run in a thread for all who wait, up to `limit` by `size`."""

    def __init__(self, work, limit, size=lambda request: 1):
        self.work, self.limit, self.size, self.waiting, self.running = work, limit, size, [], None

    async def __call__(self, request):
        self.waiting.append((request, asyncio.get_running_loop().create_future()))
        self.running = self.running or asyncio.ensure_future(self.serve())
        return await self.waiting[-1][1]

    async def serve(self):
        while self.waiting:
            before = 0
            while before != len(self.waiting):  # let everyone ask who can: fuller batches, and always the same ones
                before = len(self.waiting)
                await asyncio.sleep(0)
            n = room = 0
            while n < len(self.waiting) and (n == 0 or room + self.size(self.waiting[n][0]) <= self.limit):
                room, n = room + self.size(self.waiting[n][0]), n + 1
            batch, self.waiting = self.waiting[:n], self.waiting[n:]
            try:
                results = await asyncio.to_thread(self.work, [request for request, _ in batch])
                for (_, future), result in zip(batch, results):
                    future.set_result(result)
            except Exception as e:
                for _, future in batch:
                    future.set_exception(e)
        self.running = None


def transformers_engine(args, stop):
    """await engine((prompt_ids, draws)): a list of (token_ids, logprobs), one per draw, whose randomness is rng(*draw).

    token_ids end with a token of `stop` unless max_tokens cut them; logprobs are those of the sampler.
    """
    import torch
    from transformers import DynamicCache

    from model import load_lm
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, _ = load_lm(args.model, device)

    @torch.no_grad()
    def sample(requests):
        width = max(len(prompt) for prompt, _ in requests)
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p, _ in requests], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in requests], device=device)
        cache = DynamicCache(config=model.config)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0),
                       past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        rows = torch.tensor([i for i, (_, draws) in enumerate(requests) for _ in draws], device=device)
        cache.batch_select_indices(rows)  # a prompt is read once for all its draws
        logits, mask = logits[rows], mask[rows]
        random = [rng(*draw) for _, draws in requests for draw in draws]
        out = [([], []) for _ in random]
        alive = list(range(len(random)))
        for _ in range(args.max_tokens):
            logps = (logits.double() / (args.temperature or 1)).log_softmax(-1)
            if args.temperature:  # inverse of the cumulative distribution at one uniform number a token
                u = torch.tensor([random[i].random() for i in alive], dtype=torch.double, device=device)
                cdf = logps.exp().cumsum(-1)
                token = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True).clamp(max=cdf.shape[1] - 1)
            else:
                token = logps.argmax(-1, keepdim=True)
            keep = []
            for row, (i, t, logp) in enumerate(zip(alive, token[:, 0].tolist(), logps.gather(1, token)[:, 0].tolist())):
                out[i][0].append(t)
                out[i][1].append(round(logp, 6))
                if t not in stop:
                    keep.append(row)
            if not keep:
                break
            if len(keep) < len(alive):
                kept = torch.tensor(keep, device=device)
                cache.batch_select_indices(kept)
                token, mask, alive = token[kept], mask[kept], [alive[row] for row in keep]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            logits = model(input_ids=token, attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1,
                           past_key_values=cache, use_cache=True).logits[:, -1]
        draws = iter(out)
        return [[next(draws) for _ in keys] for _, keys in requests]

    return Batcher(sample, args.max_batch_tokens, size=lambda request: len(request[0]) * len(request[1]))


def vllm_engine(args, stop):
    """The same by vLLM in this process. Its seeds do not promise the same tokens in another batch."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        from vllm import AsyncEngineArgs, SamplingParams
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as e:
        fail(f"--engine vllm needs the package vllm ({e}): see requirements.txt")
    # what its CPU build wants: no compiling, room for the cache in bytes, and no chunks, where seeded draws would crash
    cpu = {"dtype": "float32", "enforce_eager": True, "enable_chunked_prefill": False, "kv_cache_memory_bytes": 1 << 28}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=args.model, tensor_parallel_size=args.tensor_parallel, data_parallel_size=args.data_parallel,
        max_model_len=args.max_model_len, enable_prefix_caching=True, logprobs_mode="processed_logprobs",
        generation_config="vllm", disable_log_stats=True, use_tqdm_on_load=False,
        **(cpu if current_platform.is_cpu() else {})))
    guard = watchdog(descendants())  # its processes would outlive a kill of this one, and keep the GPU
    atexit.register(lambda: (llm.shutdown(), guard.kill()))
    numbers = itertools.count()

    async def draw(prompt, key):
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=seed_of(key), logprobs=0,
                                stop_token_ids=sorted(stop), detokenize=False,
                                output_kind=RequestOutputKind.FINAL_ONLY)
        try:
            async for reply in llm.generate({"type": "token", "prompt_token_ids": list(prompt)}, params,
                                            str(next(numbers))):
                out = reply.outputs[0]
        except Exception as e:  # of many kinds: the prompt is too long, the engine has died
            raise EndpointError(f"vllm: {type(e).__name__}: {' '.join(str(e).split())[:200]}") from None
        if out.finish_reason not in ("stop", "length"):
            raise EndpointError(f"vllm: the action was cut off: finish_reason {out.finish_reason}")
        return list(out.token_ids), [round(p[t].logprob, 6) for t, p in zip(out.token_ids, out.logprobs)]

    return all_draws(draw)


async def http_engine(args, stop):
    """The same from vLLM servers, which take and give token ids: prompts reach the model as they are."""
    servers = Endpoint(args.engine, args.in_flight, args.timeout, args.retries)
    name = await servers.model(args.model)

    async def draw(prompt, key):
        async def ask(client):
            reply = await client.completions.create(
                model=name, prompt=list(prompt), temperature=args.temperature, top_p=1, max_tokens=args.max_tokens,
                seed=seed_of(key), logprobs=0,
                extra_body={"top_k": 0, "min_p": 0, "repetition_penalty": 1, "stop_token_ids": sorted(stop),
                            "skip_special_tokens": False, "return_token_ids": True})
            out = reply.choices[0]
            if out.finish_reason not in ("stop", "length"):  # a server that is being ended answers with what it has
                raise ValueError(f"the action was cut off: finish_reason {out.finish_reason}")
            if not getattr(out, "token_ids", None):
                raise ValueError("no token_ids in the reply: it takes a vLLM server of 0.10 or newer")
            return out.token_ids, [round(x, 6) for x in out.logprobs.token_logprobs]
        return await servers(ask)

    return all_draws(draw)


def all_draws(draw):
    """engine((prompt, keys)) of draw(prompt, key), a request each: the server batches them and caches the prompt."""
    async def engine(request):
        return await asyncio.gather(*(draw(request[0], key) for key in request[1]))
    return engine


def seed_of(key):
    return rng(*key).getrandbits(31)


def critic_engine(args, players):
    """await critic(task, history, actions): the actions' advantages."""
    import torch

    from train_critic import critic_turns, load_critic, score_turns
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    critic, tokenizer, models, pictures = load_critic(args.critic, device, dtype=dtype)
    players.critic_sees, folder = bool(pictures), tempfile.TemporaryDirectory()

    def work(requests):
        ref_of = dict(turns for request in requests for turns in request)
        scores = score_turns(critic, models, ref_of, 16384)
        return [[scores[turn] for turn, _ in request] for request in requests]

    batcher = Batcher(work, 1024, size=len)  # `score` cuts the work by tokens itself

    async def advantages(task, history, actions):
        if pictures:
            kind = players.environment(task)
            texts = *(m["content"] for m in history), *(a["output"] for a in actions), hidden_information(task)
            for page in {kind.page(text) for text in texts} - {""}:
                file = await players.wait(kind, kind.picture_file, page, folder.name)
                if file:
                    pictures.add(page, file)
        return await batcher(critic_turns(critic, tokenizer, task, history, actions, args.thinking,
                                          pictures))

    return advantages


def use_vllm(engine):
    """--engine auto: vLLM where it is installed and a GPU is there."""
    import torch
    return engine == "vllm" or engine == "auto" and torch.cuda.is_available() and bool(find_spec("vllm"))


def http(where):
    return where.startswith(("http://", "https://"))


def read_file(args, flag):
    """The text of the file that a flag names, or None."""
    try:
        return open(getattr(args, flag), encoding="utf-8").read() if getattr(args, flag) else None
    except OSError as e:
        fail(f"--{flag} {getattr(args, flag)}: {e.strerror}")


# --- an episode -------------------------------------------------------------------------------------------------------

class Players:
    """The agent, the human, and maybe a critic: what an episode talks to."""

    async def make(self, args):
        """Loads them all; returns self."""
        from model import end_of_turn, find_model, render, weights_digest
        self.args, self.leaks, self.critic_sees = args, 0, False
        self.environments, self.opened = {}, contextlib.ExitStack()
        self.threads = ThreadPoolExecutor(2 * os.cpu_count())
        self.agent_prompt, self.human_prompt = (read_file(args, flag) for flag in ("agent_prompt", "human_prompt"))
        if http(args.human):
            self.humans = Endpoint(args.human, args.in_flight, args.timeout, args.retries)
            self.human_model = await self.humans.model(args.human_model)
        directory, self.tokenizer, _ = find_model(args.model)
        self.render = lambda history: render(self.tokenizer, history, args.thinking)
        stop = {end_of_turn(self.tokenizer)[-1], self.tokenizer.eos_token_id}
        if http(args.engine):
            self.engine = await http_engine(args, stop)
        else:
            self.engine = (vllm_engine if use_vllm(args.engine) else transformers_engine)(args, stop)
        self.weights = weights_digest(directory)  # None where only servers have them
        self.critic = critic_engine(args, self) if args.critic and not http(args.critic) else None
        if args.critic and not self.critic:
            judges = Endpoint(args.critic, args.in_flight, args.timeout, args.retries)
            self.critic = functools.partial(judge, judges, await judges.model())
        return self

    def environment(self, task):
        """The environment of a task's kind, opened when first asked for."""
        kind = kind_of(task)
        if kind not in self.environments:
            looks = http(self.args.human) or self.critic_sees
            opened = environment(task)(self.args, os.cpu_count(), looks)
            self.environments[kind] = self.opened.enter_context(opened)
        return self.environments[kind]

    async def human(self, task, history):
        """The human's reply to the last message of the history, cut at the kind's reply_chars."""
        who, _, text = self.args.human.partition(":")
        message, limit = history[-1]["content"], environment(task).reply_chars
        if who == "fixed":
            return text[:limit]
        kind = self.environment(task)
        try:
            if who == "scripted":
                return await self.wait(kind, kind.scripted_human, task, message)
            prompt = human_prompt(task, history, self.human_prompt)
            shown = await self.wait(kind, kind.shown, task, message)
            if shown:
                urls = [f"data:image/png;base64,{base64.b64encode(png).decode()}" for png in shown]
                prompt = [{"type": "text", "text": prompt},
                          *({"type": "image_url", "image_url": {"url": url}} for url in urls)]
        except NoReference as e:
            raise EndpointError(str(e)) from None
        except RenderError as e:
            return NOT_SEEN.format(e)

        async def ask(client):
            reply = (await client.chat.completions.create(
                model=self.human_model, messages=[{"role": "user", "content": prompt}], temperature=0, seed=0,
                max_tokens=limit)).choices[0].message.content
            reply = without_thinking(reply or "")
            if not reply:
                raise ValueError("an empty reply")
            return reply[:limit]
        reply = await self.humans(ask)
        clean, leaks = redact(reply, hidden_information(task))
        self.leaks += bool(leaks)
        return clean if self.args.human_leak == "redact" else reply

    async def wait(self, kind, method, *args):
        """method(*args) of an environment; where it draws, in threads that the engine leaves."""
        if not kind.drawn:
            return method(*args)
        return await asyncio.get_running_loop().run_in_executor(self.threads, method, *args)

    def text(self, token_ids):
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    async def act(self, task, history, key, candidates):
        """The agent's next message, `content` still open, with candidates. key: (seed, task id, sample, turn)."""
        prompt = self.render(history)
        draws = [(*key, j) for j in range(self.args.best_of)] + [(*key, "candidate", j) for j in range(candidates)]
        drawn = await self.engine((prompt, draws))
        if not all(map(math.isfinite, (x for _, logprobs in drawn for x in logprobs))):
            raise EndpointError("the model's log-probs are NaN or infinite: are its weights sound?")
        actions, drawn = drawn[:self.args.best_of], drawn[self.args.best_of:]
        actions = [{"output": self.text(ids), "token_ids": ids, "logprobs": logprobs} for ids, logprobs in actions]
        best = 0
        if self.critic:
            scores = await self.critic(task, history, actions)
            best = max(range(len(scores)), key=lambda i: scores[i] + self.args.prior * sum(actions[i]["logprobs"]))
        message = {"role": "assistant", "content": None, **actions[best]}
        if drawn:
            message["candidates"] = [{"output": self.text(ids), "token_ids": ids, "logprob": round(sum(logprobs), 6)}
                                     for ids, logprobs in drawn]
        return message

    async def play(self, task, sample):
        """One episode: {"sample", "dialogue_history", "answer"}."""
        a, history = self.args, [first_message(task, self.args.max_turns, self.agent_prompt)]
        key = (a.seed, task_id(task), sample)
        candidates = a.candidates if self.wants_candidates(key) else 0
        for turn in range(a.max_turns):
            message = await self.act(task, history, (*key, turn), candidates)
            message["content"], answer = read_action(message["output"], turn == a.max_turns - 1)
            history.append(message)
            if answer is not None:
                break
            history.append({"role": "user", "content": await self.human(task, history)})
        answer = environment(task).answer(history, answer)
        return {"sample": sample, "dialogue_history": history, "answer": answer}

    async def add_candidates(self, record, sample):
        """Candidates for every turn of a dialogue that exists already."""
        history, turn, key = record["dialogue_history"], 0, (self.args.seed, task_id(record["task"]), sample)
        for t, message in enumerate(history if self.wants_candidates(key) else ()):
            if message["role"] == "assistant":
                drawn = await self.act(record["task"], history[:t], (*key, turn), self.args.candidates)
                message["candidates"], turn = drawn["candidates"], turn + 1
        return {"sample": sample}

    def wants_candidates(self, key):
        return rng("share", *key).random() < self.args.candidates_share


# --- all episodes -----------------------------------------------------------------------------------------------------

def done_already(path, skip_bad):
    """({(task id, sample)}, {digest of the agent's weights}) of a file of finished episodes.

    A last line that was cut off is dropped from it.
    """
    keys, weights = set(), set()

    def whole_lines(f):
        for line in f:
            if line.endswith(b"\n"):
                yield line
            else:
                f.truncate(f.tell() - len(line))
    try:
        with open(path, "rb+") as f:
            lines = whole_lines(f)
            first = [line for line in [next(lines, None)] if line]
            need = "task.problem_description", "task.ground_truth", "sample"
            lines = itertools.chain(first, lines)
            records = read_jsonl(lines, need, path, skip_bad) if first else ()
            for r in records:
                keys.add((task_id(r["task"]), r["sample"]))
                weights.add(r.get("meta", {}).get("model_weights"))
    except FileNotFoundError:
        pass
    except OSError as e:
        fail(f"--resume {path}: {e.strerror}")
    return keys, weights - {None}


async def collect(args, emit):
    seen = Counter()
    done, weights = done_already(args.resume, args.skip_bad) if args.resume else (set(), set())
    before = len(done)
    players = await Players().make(args)
    if players.weights and weights - {players.weights}:
        fail(f"--resume {args.resume} holds episodes of other weights than those at --model "
             f"{args.model}: take the old weights, or another file")
    meta = {k: getattr(args, k) for k in ("model", "human", "temperature", "max_turns", "thinking", "seed", "best_of",
                                          "critic", "prior", "rules")}
    meta |= {"model_weights": players.weights, "version": version()}
    threads = ThreadPoolExecutor(os.cpu_count())
    finished = asyncio.Queue()
    bar, trouble, totals = progress("episodes"), [], Counter()

    def jobs():
        try:
            for record in read_jsonl(sys.stdin, needs(to_grade=True), skip_bad=args.skip_bad):
                record["task"] = {"kind": kind_of(record["task"]), **record["task"], "id": task_id(record["task"])}
                played, n = "dialogue_history" in record, seen[record["task"]["id"]]
                if not (played and "reward" in record):
                    players.environment(record["task"])
                if played and not args.candidates:
                    fail(f"task {record['task']['id']} has a dialogue already: give --candidates, or cut it out")
                seen[record["task"]["id"]] += 1
                for sample in [record.get("sample", n)] if played else range(args.k):  # published ones aren't numbered
                    if (key := (record["task"]["id"], sample)) not in done:
                        done.add(key)
                        yield record, sample
                    elif n:
                        totals["repeated"] += 1
        except SystemExit as e:  # a bad line ends the input; what is under way is finished and written first
            trouble.append(e)

    async def player(jobs):
        for record, sample in jobs:
            played = "dialogue_history" in record
            try:
                new = await (players.add_candidates(record, sample) if played else players.play(record["task"], sample))
            except EndpointError as e:  # never a made-up reply: the episode is not written, and --resume plays it again
                totals["failed"] += 1
                if totals["failed"] <= 3:
                    say(f"task {record['task']['id']}, sample {sample} failed: {e}")
                continue
            new["meta"] = {**record.get("meta", {}), **meta}
            finished.put_nowait(asyncio.ensure_future(graded({**record, **new})))

    async def graded(record):
        if "reward" not in record:
            grade = players.environment(record["task"]).grade
            record |= await asyncio.get_running_loop().run_in_executor(
                threads, grade, record["task"], record["answer"])
        return record

    async def writer():
        while (record := await finished.get()) is not None:  # in the order the dialogues ended, whatever grading takes
            record = await record
            emit(record)
            bar.update()
            totals["episodes"] += 1
            totals["reward"] += record["reward"]
            totals["solved"] += record["reward"] == 1
            totals["tokens"] += sum(len(m.get("token_ids", ())) for m in record["dialogue_history"])

    async def players_then_end(jobs):
        await asyncio.gather(*(player(jobs) for _ in range(args.concurrency)))
        finished.put_nowait(None)

    with players.opened:
        await asyncio.gather(players_then_end(jobs()), writer())
    n, kinds = max(1, totals["episodes"]), players.environments.values()
    what = " and ".join(kind.reward_name for kind in kinds) or "reward"
    say("; ".join([f"{totals['episodes']} episodes ({before} done before): "
                   f"{what} {100 * totals['reward'] / n:.1f} %, "
                   f"success {100 * totals['solved'] / n:.1f} %, "
                   f"{totals['tokens'] / n:.0f} tokens each", *(k.grader_line() for k in kinds)]))
    if players.leaks:
        cut = "cut out" if args.human_leak == "redact" else "--human_leak redact cuts it out"
        say(f"the human quoted hidden code in {players.leaks} replies ({cut})")
    if totals["repeated"]:
        say(f"{totals['repeated']} episodes of tasks that stdin repeats were left out")
    if totals["failed"]:
        trouble.append(SystemExit(f"error: {totals['failed']} episodes failed and were not written; "
                                  "--resume FILE plays them again"))
    return trouble


def main(args):
    if (args.best_of > 1) != bool(args.critic):
        fail("--best_of N and --critic DIR go together")
    if args.human != "scripted" and not args.human.startswith("fixed:") and not http(args.human):
        fail(f"--human {args.human!r}: give scripted, fixed:TEXT, or http://host:port/v1")
    if args.engine not in ("auto", "transformers", "vllm") and not http(args.engine):
        fail(f"--engine {args.engine!r}: give auto, transformers, vllm, or http://host:port/v1")
    try:
        trouble = asyncio.run(collect(args, open_stdout()))
    except GraderError as e:
        fail(e)
    for error in trouble:  # raised outside the event loop, which would print its tasks
        raise error


if __name__ == "__main__":
    run(main, get_args())
