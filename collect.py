"""Plays episodes: an agent talks with a human and hands in an answer.

    python collect.py --human http://localhost:8000/v1 -k 4 < tasks.jsonl > episodes.jsonl
    ... | python collect.py --human human.py --candidates 16 | python colbench.py grade > all.jsonl
    ... | python collect.py --human human.py --best_of 4 --critic runs/critic > guided.jsonl
    ... | python collect.py --human human.py -k 4 --resume episodes.jsonl >> episodes.jsonl

human.py defines reply(task, history), the human's answer to the last message.
Each episode is written as it ends. Draws are functions of (seed, task, sample, turn). Others in a
batch change logits by rounding, and so rarely a text. A record that has a dialogue already gets
candidates only.
"""
from utils import (digest, fail, fail_on_error, flag, open_stdout, parser, progress, read_jsonl,
                   rng, run, say, version)

import asyncio
import atexit
import base64
import inspect
import itertools
import json
import math
import os
import runpy
import subprocess
import sys
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from importlib.util import find_spec
from types import SimpleNamespace

from colbench import (NOT_SEEN, GraderError, NoReference, Renderer, RenderError, agent_messages,
                      answers, browser_flag, environment, first_message, hidden_information,
                      human_prompt, kind_of, needs, read_action, redact, task_id, without_thinking)


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] < tasks.jsonl > trajectories.jsonl")
    g = p.add_argument_group("episodes")
    flag(g, "model", "meta-llama/Llama-3.1-8B-Instruct", "the agent", metavar="DIR")
    flag(g, "-k", 1, "episodes of each task", least=1)
    flag(g, "max_turns", 10, "the agent's messages; the last one is its answer", least=1)
    flag(g, "concurrency", 256, "episodes at once, for each vllm copy or server", least=1)
    flag(g, "resume", None, "skip the episodes in FILE; if its last line is cut, drop that",
         metavar="FILE")
    g = p.add_argument_group("human")
    flag(g, "human", None, "http://host:port/v1[,...] of an LLM, fixed:TEXT, or a FILE.py with "
         "reply(task, history)", metavar="WHO")
    flag(g, "human_model", None, "the LLM's name, if a server has several", metavar="NAME")
    flag(g, "human_tokens", None, "longest reply of the LLM, else 150 for 400 characters",
         kind=int, least=1)
    g = p.add_argument_group("sampling")
    flag(g, "temperature", 1.0, "0: greedy")
    flag(g, "top_p", 1.0, "draw each token from the likeliest that sum up to P", metavar="P")
    flag(g, "max_tokens", 1024, "longest message", least=1)
    flag(g, "thinking", 0, "1: let a model think that can; nobody sees it", choices=[0, 1])
    flag(g, "seed", 0, "of all draws")
    flag(g, "candidates", 0, "alternatives drawn at every turn; stage 2 wants 16")
    flag(g, "candidates_share", 1.0, "share of the episodes that get candidates")
    flag(g, "best_of", 1, "messages drawn; the critic's favourite is sent", least=1)
    flag(g, "critic", None, "--out of train_critic.py, or a FILE.py with advantages(task, history, "
         "actions); READS THE REFERENCE", metavar="WHO")
    flag(g, "prior", 0.0, "--best_of: choose by score + prior * log-prob")
    g = p.add_argument_group("engine")
    flag(g, "engine", "auto", "transformers, vllm (auto: on a GPU), or http://...,http://... of it",
         metavar="E")
    flag(g, "max_batch_tokens", 65536, "transformers: tokens at once, and kept")
    flag(g, "dtype", "auto", "transformers; auto: bf16 on a GPU, fp32 on a CPU",
         choices=["auto", "bf16", "fp32"])
    flag(g, "tensor_parallel", 1, "vllm: GPUs of one copy of the model", least=1)
    flag(g, "data_parallel", 1, "vllm: copies", least=1)
    flag(g, "max_model_len", None, "vllm: longest context, else the model's", kind=int, least=1)
    flag(g, "timeout", 1800.0, "http://: seconds until a request is made again")
    flag(g, "retries", 8, "http://: of a request, over about a minute where a server is down")
    browser_flag(p)
    args = p.parse_args(argv)
    if (args.best_of > 1) != bool(args.critic):
        fail("--best_of N and --critic go together")
    if not 0 < args.top_p <= 1:
        fail(f"--top_p {args.top_p}: give a share above 0, at most 1")
    if args.engine not in ("auto", "transformers", "vllm") and not http(args.engine):
        fail(f"--engine {args.engine!r}: give auto, transformers, vllm, or http://host:port/v1")
    return args


def http(where):
    return (where or "").startswith(("http://", "https://"))


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

from model import (check_generation_prompt, common_prefix, end_of_turn, find_model, load, load_lm,
                   render, score, sdpa_kernel, weights_digest)
from train_critic import advantages, critic_turns, find_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAME = ("temperature", "top_p", "max_turns", "max_tokens", "thinking", "seed", "best_of",
        "prior")  # flags that all episodes of a file share
COMPUTE = ThreadPoolExecutor(1)  # the thread in which models compute
TREE_TOKENS = 16384  # of what the critic reads at once


class EpisodeError(Exception):
    """Why an episode can't go on. The others do."""


class RunError(Exception):
    """Why no episode can go on."""


# --- an episode -----------------------------------------------------------------------------------

class Players:
    """The agent, the human and the critic."""

    def __init__(self, args):
        self.args, self.critic = args, None
        folder, self.tokenizer, _ = find_model(args.model)
        check_generation_prompt(self.tokenizer)
        self.stop = {end_of_turn(self.tokenizer)[-1], self.tokenizer.eos_token_id} - {None}
        self.meta = {name: getattr(args, name) for name in ("model", "human", "critic", *SAME)}
        self.meta |= {"model_weights": weights_digest(folder), "version": version()}

    async def load(self):
        """Loads the models and asks the servers for theirs; returns self."""
        args = self.args
        if http(args.human):
            self.llm = await Endpoint(args.human, args).meet(args.human_model)
            self.reply = self.llm_reply
        elif (args.human or "").startswith("fixed:"):
            self.reply = lambda task, history: args.human.removeprefix("fixed:")
        elif args.human:
            self.reply = function(args.human, "reply")
        if http(args.engine):
            self.engine = await http_engine(args, self.stop)
        elif args.engine == "vllm" or (
                args.engine == "auto" and DEVICE == "cuda" and find_spec("vllm")):
            self.engine = vllm_engine(args, self.stop)
        else:
            self.engine = TransformersEngine(args, self.stop)
        if args.critic and args.critic.endswith(".py"):
            self.critic = function(args.critic, "advantages")
        elif args.critic:
            self.critic = trained_critic(args)
        return self

    @cached_property
    def renderer(self):
        """The browsers of those who look at pages; started by the first page."""
        return Renderer(os.cpu_count(), self.args.browser)

    async def play(self, task, sample):
        """Plays one episode: the fields that its record gets."""
        turns, key = self.args.max_turns, (self.args.seed, task_id(task), sample)
        candidates = self.candidates(key)
        history = [first_message(task, turns)]
        for turn in range(turns):
            message = await self.act(task, history, (*key, turn), candidates)
            message["content"], answer = read_action(message["output"], last=turn == turns - 1)
            history.append(message)
            if answer is not None:
                break
            history.append({"role": "user", "content": await self.human(task, history)})
        answer = environment(task).answer(history, answer)
        return {"sample": sample, "dialogue_history": history, "answer": answer,
                "answered": answers(message), "meta": self.meta}

    async def add_candidates(self, record, sample):
        """Gives the agent's messages of a dialogue candidates: the fields that its record gets.

        In `meta` the candidates' settings stand beside those of the dialogue.
        """
        history, key = record["dialogue_history"], (self.args.seed, task_id(record["task"]), sample)
        agent = [t for t, m in enumerate(history) if m["role"] == "assistant"]
        if candidates := self.candidates(key):
            for turn, t in enumerate(agent):
                drawn = await self.act(record["task"], history[:t], (*key, turn), candidates)
                history[t]["candidates"] = drawn["candidates"]
        answered = bool(agent) and answers(history[agent[-1]])
        meta = {"thinking": self.args.thinking, "candidates": self.meta}
        return {"sample": sample, "answered": record.get("answered", answered), "meta": meta}

    def candidates(self, key):
        """How many candidates each turn of an episode gets."""
        chosen = rng("share", *key).random() < self.args.candidates_share
        return self.args.candidates if chosen else 0

    async def act(self, task, history, key, candidates):
        """The agent's next message, its `content` still None, with so many candidates.

        key: (seed, task id, sample, turn).
        """
        n = self.args.best_of
        draws = [(*key, j) for j in range(n)]
        draws += [(*key, "candidate", j) for j in range(candidates)]
        with fail_on_error("this --model's chat template does not take the agent's prompt"):
            prompt = render(self.tokenizer, history, self.args.thinking)
        if self.args.temperature:
            drawn = await self.engine(prompt, draws)
        else:  # all are the same, and vLLM draws no more than one
            drawn = await self.engine(prompt, draws[:1]) * len(draws)
        texts = self.tokenizer.batch_decode([ids for ids, _ in drawn], skip_special_tokens=True)
        actions = []
        for text, (ids, logprobs) in zip(texts, drawn):
            if not math.isfinite(sum(logprobs)):
                raise EpisodeError("the model's log-probs are NaN or infinite: are its weights "
                                   "sound?")
            sent = len(actions) < n
            likely = {"logprobs": logprobs} if sent else {"logprob": round(sum(logprobs), 6)}
            cut = {} if ids[-1] in self.stop else {"cut": True}
            actions.append({"output": text, "token_ids": ids, **likely, **cut})
        chosen = await self.best(task, history, actions[:n]) if self.critic else actions[0]
        message = {"role": "assistant", "content": None, **chosen}
        if candidates:
            message["candidates"] = actions[n:]
        return message

    async def best(self, task, history, actions):
        """The critic's favourite action."""
        scores = await ask(self.critic, task, history, actions)
        values = [score + self.args.prior * sum(action["logprobs"])
                  for score, action in zip(scores, actions)]
        return actions[values.index(max(values))]

    async def human(self, task, history):
        """The human's reply to the last message."""
        said = await ask(self.reply, task, history)
        return said[:environment(task).reply_chars]

    async def llm_reply(self, task, history):
        """The reply of the LLM, which reads the hidden information and looks at pages."""
        env, content = environment(task), human_prompt(task, history)
        if env.pages:
            try:
                message = history[-1]["content"]
                seen = await asyncio.to_thread(self.renderer.pair, task, message)
            except RenderError as e:
                return NOT_SEEN.format(e)
            urls = ["data:image/png;base64," + base64.b64encode(page["png"]).decode()
                    for page in seen]
            content = [{"type": "text", "text": content},
                       *({"type": "image_url", "image_url": {"url": url}} for url in urls)]
        most = self.args.human_tokens or env.reply_chars * 3 // 8
        said = await self.llm.chat(content, most, key=task_id(task))
        return redact(said, hidden_information(task))


async def ask(function, *args):
    """What human or critic gives; None or a ValueError ends the episode."""
    try:
        given = function(*args)
        given = await given if inspect.isawaitable(given) else given
    except ValueError as e:
        raise EpisodeError(e) from None
    if given is None:
        raise EpisodeError(f"{function.__name__}() gives nothing")
    return given


def trained_critic(args):
    """The critic in a finished --out of train_critic.py.

    await critic(task, history, actions) gives the actions' advantages.
    """
    base, ref_context = find_reference(args.critic)
    pi, tokenizer = load(args.critic, DEVICE, "auto")
    pi_ref, _ = load(base, DEVICE, "auto")
    waiting, lock, step = {}, asyncio.Lock(), None

    def score_turns(ref_of):
        ref = score(pi_ref, list(ref_of.values()), TREE_TOKENS)
        return advantages(pi, dict(zip(ref_of, ref)), TREE_TOKENS)

    async def score_waiting():
        nonlocal step
        async with lock:  # while others are scored, more requests come, which this one takes along
            work = partial(score_turns, dict(waiting))
            waiting.clear()
            step = None
            return await asyncio.get_running_loop().run_in_executor(COMPUTE, work)

    async def judged(task, history, actions):
        turns = critic_turns(tokenizer, task, history, actions, args.thinking, True,
                             ref_context == "hidden")
        nonlocal step
        waiting.update(turns)
        step = step or asyncio.ensure_future(score_waiting())
        scores = await step
        return [scores[turn] for turn, _ in turns]

    return judged


# --- all episodes ---------------------------------------------------------------------------------

def finished_episodes(args, meta):
    """{(task id, sample)} of the episodes in --resume's file, which may be empty.

    A last line that a kill has cut is dropped from the file. Episodes of other weights or SAME
    flags than those in `meta` end the program.
    """
    path, done = args.resume, set()
    if not path:
        return done
    with fail_on_error(f"--resume {path}"), open(path, "rb+") as f:
        *_, last = b"", *deque(f, 1)
        if last.startswith(b"{") and not last.endswith(b"\n"):
            try:
                json.loads(last)
                f.write(b"\n")  # it is whole
            except ValueError:
                f.truncate(f.tell() - len(last))
        f.seek(0)
        fields = "task.problem_description", "task.ground_truth", "sample"
        for r in read_jsonl(f, fields, path) if os.path.getsize(path) else ():
            done.add((task_id(r["task"]), r["sample"]))
            had = r.get("meta", {})
            had = had.get("candidates", had)
            for name in ("model_weights", *SAME):
                if None not in (had.get(name), meta[name]) and had[name] != meta[name]:
                    fail(f"--resume {path} holds episodes with {name} {had[name]}, not "
                         f"{meta[name]}: give the same flags and weights, or another file")
    return done


class Run(Players):
    """The episodes of stdin's tasks."""

    def __init__(self, args, emit):
        super().__init__(args)
        self.emit, self.done = emit, finished_episodes(args, self.meta)
        self.totals, self.error = Counter({"done before": len(self.done)}), None
        self.texts, self.samples_of = {}, Counter()  # of a task id: digest, how many were read

    async def all(self):
        """Plays all episodes, and says how it went."""
        await self.load()
        args, jobs = self.args, self.jobs()
        self.bar = progress(f"episodes of {args.model}")
        n = args.concurrency * args.data_parallel * len(args.engine.split(","))
        await asyncio.gather(*(self.work(jobs) for _ in range(n)))
        self.summary()

    def jobs(self):
        """Yields (record, sample) of the episodes to play."""
        for record in read_jsonl(sys.stdin, needs()):
            for sample in self.samples(record):
                if (record["task"]["id"], sample) not in self.done:
                    yield record, sample

    def samples(self, record):
        """Completes a record's task; returns the numbers of its samples.

        A task that comes again gets further samples, and so does one's next dialogue.
        """
        task = record["task"]
        record["task"] = task = {"kind": kind_of(task), **task, "id": task_id(task)}
        text = digest([task["problem_description"], task["ground_truth"]])
        if self.texts.setdefault(task["id"], text) != text:
            fail(f"two unlike tasks of stdin have the id {task['id']}")
        played = "dialogue_history" in record
        if not played and not self.args.human:
            fail("--human is missing: give the http://host:port/v1 of an LLM, fixed:TEXT, or a "
                 "FILE.py that defines reply(task, history)")
        if played and not self.args.candidates:
            fail(f"task {task['id']} has a dialogue already: give --candidates, or cut it out")
        if "sample" in record and played:
            return [record["sample"]]
        first, n = self.samples_of[task["id"]], 1 if played else self.args.k
        self.samples_of[task["id"]] += n
        return range(first, first + n)

    async def work(self, jobs):
        """Plays one episode after another. An error of the run waits for those under way."""
        try:
            for record, sample in jobs:
                if not self.error:
                    await self.one(record, sample)
        except (RunError, SystemExit) as e:
            self.error = str(e).removeprefix("error: ")

    async def one(self, record, sample):
        """Plays an episode. If it fails, it is not written, and --resume plays it again."""
        try:
            if "dialogue_history" in record:
                new = await self.add_candidates(record, sample)
            else:
                new = await self.play(record["task"], sample)
        except (EpisodeError, NoReference) as e:
            self.totals["failed"] += 1
            if self.totals["failed"] <= 3:
                say(f"task {record['task']['id']}, sample {sample} failed: {e}")
            return
        new["meta"] = {**record.get("meta", {}), **new["meta"]}
        record = {**record, **new}
        self.emit(record)
        self.bar.update()
        actions = [a for m in agent_messages(record) for a in (m, *m.get("candidates", ()))]
        self.totals.update(episodes=1, actions=len(actions),
                           cut=sum("cut" in action for action in actions))

    def summary(self):
        """Says how it went; ends the program by its error, if there was one."""
        totals = self.totals
        cut = 100 * totals["cut"] / max(1, totals["actions"])
        say(f"{totals['episodes']} episodes of {self.args.model} ({totals['done before']} done "
            f"before): {cut:.1f} % of actions cut at --max_tokens {self.args.max_tokens}")
        if self.error:
            fail(self.error)
        if totals["failed"]:
            fail(f"{totals['failed']} episodes failed and were not written; --resume FILE plays "
                 "them again")


def main(args):
    try:
        asyncio.run(Run(args, open_stdout()).all())
    except (GraderError, RunError) as e:
        fail(e)


# --- servers --------------------------------------------------------------------------------------

class Endpoint:
    """OpenAI-compatible servers of one model. The API key comes from the environment.

    Requests of one key go to one server, which has their prompts' beginning in its cache. The
    client repeats a request that fails; then the others get it, and the server is their last
    choice until it answers again.
    """

    def __init__(self, urls, args):
        """urls: "http://host:port/v1", several with commas between."""
        import openai
        self.errors = openai.OpenAIError, ConnectionError
        options = {"api_key": os.environ.get("OPENAI_API_KEY", "none"), "max_retries": args.retries,
                   "timeout": openai.Timeout(args.timeout, connect=30)}
        self.clients = [openai.AsyncOpenAI(base_url=url, **options) for url in urls.split(",")]
        self.answered, self.down = 0, set()  # requests, clients

    async def meet(self, wanted=None, alias=False):
        """Asks for the model's name: `wanted`, or the only one that is served. Returns self.

        alias: 1 if the only one may be `wanted` under another name.
        """
        async def names(client):
            reply = await client.with_options(max_retries=0).models.list()
            return [model.id for model in reply.data]
        try:
            served = await self(names)
        except EpisodeError as e:  # no such server
            raise RunError(e) from None
        self.model = served[0] if len(served) == 1 and (alias or not wanted) else wanted
        if self.model not in served:
            fail(f"{self.clients[0].base_url} serves {', '.join(served)}, not {wanted or 'one'}")
        return self

    async def __call__(self, request, key=None):
        """await request(client), of a server that answers.

        EpisodeError: this request is wrong, or its reply of no use. If no server answered it, nor
        any other request in that time, the program ends.
        """
        answered, order = self.answered, rng(key).sample(self.clients, len(self.clients))
        for client in sorted(order, key=self.down.__contains__):
            try:
                reply = await request(client)
            except Exception as e:
                why = f"{client.base_url}: {type(e).__name__}: {' '.join(str(e).split())[:200]}"
                wrong = getattr(e, "status_code", 0) in (400, 413, 422)
                if wrong or not isinstance(e, self.errors):
                    raise EpisodeError(why) from None
                self.down.add(client)
            else:
                self.answered += 1
                self.down.discard(client)
                return reply
        if self.answered == answered:
            raise RunError(why + "; --resume FILE goes on from what was finished")
        raise EpisodeError(why)

    async def chat(self, content, max_tokens, key):
        """The model's reply to a user's message at temperature 0, without its thought."""
        async def ask(client):
            completion = await client.chat.completions.create(
                model=self.model, messages=[{"role": "user", "content": content}],
                temperature=0, seed=0, max_tokens=max_tokens)
            reply = without_thinking(completion.choices[0].message.content or "")
            if not reply:
                raise ValueError("an empty reply")
            return reply.encode(errors="replace").decode()  # no tokenizer takes a lone surrogate
        return await self(ask, key)


# --- engines: await engine(prompt_ids, draws) samples the agent's messages ------------------------
#
# It gives [(token_ids, logprobs)], one per draw. A draw is the key of its randomness, rng(*draw);
# it begins with its episode's (seed, task id, sample). vLLM's draw i has the seed of draw 0 plus i.
# token_ids end with a token of `stop` unless max_tokens cut them. logprobs are the sampler's, at
# its temperature and top_p.

async def http_engine(args, stop):
    """Samples by vLLM servers, which take and give token ids."""
    servers = await Endpoint(args.engine, args).meet(args.model, alias=True)
    fixed = {"model": servers.model, "temperature": args.temperature, "top_p": args.top_p,
             "top_k": 0, "min_p": 0, "repetition_penalty": 1, "logprobs": 0,
             "max_tokens": args.max_tokens, "stop_token_ids": sorted(stop),
             "skip_special_tokens": False, "return_token_ids": True}

    async def engine(prompt, draws):
        seed = rng(*draws[0]).getrandbits(31)
        body = {**fixed, "prompt": prompt, "seed": seed, "n": len(draws)}

        async def ask(client):  # completions.create would check the reply number by number
            outs = (await client.post("/completions", cast_to=object, body=body))["choices"]
            if any(out["finish_reason"] not in ("stop", "length") for out in outs):
                raise ConnectionError("a message is cut off: the server is shutting down")
            if len(outs) != len(draws) or not all(out.get("token_ids") for out in outs):
                raise ValueError("no token_ids for each draw: it takes vLLM 0.10 or newer")
            return [(out["token_ids"], [round(x, 6) for x in out["logprobs"]["token_logprobs"]])
                    for out in outs]
        return await servers(ask, draws[0][:3])

    return engine


def vllm_engine(args, stop):
    """Samples by vLLM in this process. Another batch may change its tokens, whatever the seed."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # torch was asked for a GPU: no fork now
    try:
        from vllm import AsyncEngineArgs, SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM
        import psutil  # comes with it
    except ImportError as e:
        fail(f"--engine vllm needs the package vllm ({e}): see requirements.txt")
    options = dict(tensor_parallel_size=args.tensor_parallel, max_model_len=args.max_model_len,
                   data_parallel_size=args.data_parallel, logprobs_mode="processed_logprobs",
                   generation_config="vllm", enable_prefix_caching=True, disable_log_stats=True,
                   use_tqdm_on_load=False)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=args.model, **options))
    # its processes would outlive a kill and keep the GPU; a pipe closes however this one ends
    its = [str(process.pid) for process in psutil.Process().children(recursive=True)]
    subprocess.Popen(["sh", "-c", 'read line; kill -9 "$@"', "sh", *its], stdin=subprocess.PIPE,
                     stderr=subprocess.DEVNULL, start_new_session=True)
    atexit.register(llm.shutdown)

    async def engine(prompt, draws):
        params = SamplingParams(n=len(draws), seed=rng(*draws[0]).getrandbits(31),
                                temperature=args.temperature, top_p=args.top_p,
                                max_tokens=args.max_tokens, stop_token_ids=sorted(stop),
                                logprobs=0, flat_logprobs=True, detokenize=False,
                                output_kind=RequestOutputKind.FINAL_ONLY)
        home = rng(*draws[0][:3]).randrange(args.data_parallel)  # has its prefix in its cache
        try:
            async for reply in llm.generate({"type": "token", "prompt_token_ids": prompt}, params,
                                            str(draws[0]), data_parallel_rank=home):
                outs = reply.outputs
        except Exception as e:  # of many kinds: the prompt is too long, the engine has died
            why = f"vllm: {type(e).__name__}: {' '.join(str(e).split())[:200]}"
            raise (RunError if llm.errored else EpisodeError)(why) from None
        return [(list(out.token_ids), [round(x, 6) for x in out.logprobs.logprobs])
                for out in outs]

    return engine


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
        n = self.lengths[i].item()
        return [x[:, i, :, :n].transpose(1, 2).contiguous() for x in self.shared]

    def grow(self, tokens):
        """Takes the rows' next tokens; drops rows that have ended, an eighth of them at once."""
        self.steps += 1
        live = [r for r, action in enumerate(self.actions) if not action.ended]
        if len(live) <= 7 / 8 * len(self.actions):
            tokens = [tokens[r] for r in live]
            self.actions = [self.actions[r] for r in live]
            slots = self.slots[live]
            prompts, at = (slots // self.n).unique(return_inverse=True)
            self.slots = at * self.n + slots % self.n
            if len(prompts) < len(self.lengths):
                self.lengths = self.lengths[prompts]
                self.shared = [x[:, prompts] for x in self.shared]
            self.own = [x[:, live] for x in self.own]
        self.ids = tokens
        self.positions = self.lengths[self.slots // self.n] + self.steps


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


class TransformersEngine:
    """Samples by transformers in this process.

    All actions under way grow by a token in one forward, in which requests join as others end.
    A prompt is read once for all its draws, and of an episode's next one only what is new.
    """

    def __init__(self, args, stop):
        self.lm, _ = load_lm(args.model, DEVICE, args.dtype)
        self.lm.set_attn_implementation("groups")
        self.args, self.stop = args, stop
        config = self.lm.config.get_text_config()
        self.longest = getattr(config, "max_position_embeddings", None) or math.inf
        self.waiting, self.under_way, self.groups = [], [], []  # requests, requests, Groups
        self.step = None  # the asyncio task that samples for all requests
        self.kept = {}  # episode: (its last prompt, Group.kept of it); the latest one comes last

    async def __call__(self, prompt, draws):
        if len(prompt) >= self.longest:
            raise EpisodeError(f"the conversation has {len(prompt)} tokens, and the model takes "
                               f"{self.longest}")
        most = min(self.args.max_tokens, self.longest - len(prompt))
        actions = [SimpleNamespace(rng=rng(*draw), ids=[], logps=[], most=most, ended=False)
                   for draw in draws]
        request = SimpleNamespace(prompt=prompt, episode=draws[0][:3], actions=actions, live=True)
        self.waiting.append(request)
        while request.live:
            self.step = self.step or asyncio.ensure_future(self.take_step())
            await self.step
        return [(action.ids, action.logps) for action in actions]

    async def take_step(self):
        """Samples, in a thread, until a request's actions have ended."""
        before = 0
        while before != len(self.waiting):  # until all have asked: batches are full, and the
            before = len(self.waiting)      # same every time
            await asyncio.sleep(0)
        new = self.admit()
        await asyncio.get_running_loop().run_in_executor(COMPUTE, self.sample, new)
        self.step = asyncio.ensure_future(self.take_step()) if self.under_way else None

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
        """Begins new requests; samples until one has ended."""
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
        self.under_way += new
        while not (ended := [r for r in self.under_way if all(a.ended for a in r.actions)]):
            logits = self.forward(self.groups).split([len(group.ids) for group in self.groups])
            for group, part in zip(self.groups, logits):
                group.grow(self.draw(part, group.actions))
            self.groups = [group for group in self.groups if group.actions]
        for request in ended:
            request.live = False
            self.under_way.remove(request)

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
                action.ended = t in self.stop or len(action.ids) == action.most
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


if __name__ == "__main__":
    run(main, ARGS)
