"""Plays episodes: the agent talks to a human over several turns and hands in an answer, which is graded.

    colbench.py tasks | python collect.py --model runs/base -k 4 > trajectories.jsonl
    ... | python collect.py --model runs/base -k 4 --candidates 16 > trajectories.jsonl    # alternatives for stage 2
    ... | python collect.py --model runs/base --best_of 4 --critic runs/critic > guided.jsonl
    ... | python collect.py --model runs/base -k 4 --resume all.jsonl >> all.jsonl          # go on after a kill

An episode is a coroutine, and none waits for another: engine, critic and human serve whoever asks. Episodes are written
as they finish. Each draw is a function of (seed, task, sample, turn), not of its company in a batch (but for rounding).
Records that already have a dialogue only get candidates.
"""
import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from colbench import (Grader, GraderError, REPLY_CHARS, first_message, hidden_information, read_action,
                      scripted_human, task_id, with_hidden)
from utils import fail, open_stdout, parser, progress, read_jsonl, rng, run, version


def get_args(argv=None):
    p = parser(__doc__)
    p.add_argument("--model", default="meta-llama/Llama-3.1-8B-Instruct", help="the agent")
    p.add_argument("-k", type=int, default=1, help="episodes a task")
    p.add_argument("--max_turns", type=int, default=10, help="messages of the agent; the last one is its answer")
    p.add_argument("--human", default="scripted", help="scripted: that of the built-in tasks; fixed:TEXT: says TEXT")
    p.add_argument("--agent_prompt", help="file: the agent's first message, with {problem_description} and {max_turns}")
    # sampling
    p.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    p.add_argument("--max_tokens", type=int, default=1024, help="of one message")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--candidates", type=int, default=0, help="alternatives to sample at every turn (stage 2 wants 16)")
    p.add_argument("--candidates_share", type=float, default=1.0, help="share of the episodes that get candidates")
    p.add_argument("--best_of", type=int, default=1, help="actions sampled a turn; the critic's best one is sent")
    p.add_argument("--critic", help="directory of train_critic.py; it READS HIDDEN INFORMATION: no policy comparison")
    # running
    p.add_argument("--concurrency", type=int, default=256, help="episodes under way at once")
    p.add_argument("--max_batch_tokens", type=int, default=65536, help="context the transformers engine holds at once")
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


def transformers_engine(model, tokenizer, args):
    """Batcher of (prompt_ids, draws): a list of (token_ids, logprobs), one per draw, whose randomness is rng(*draw).

    token_ids end with the end-of-turn token unless max_tokens cut them; logprobs are those of the sampler.
    """
    import torch
    from transformers import DynamicCache
    from model import end_of_turn
    stop = {end_of_turn(tokenizer)[-1], tokenizer.eos_token_id}
    device = model.device

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


def critic_engine(path):
    """(Batcher of [(prompt_ids, action_ids), ...] to their advantages, whether prompts carry hidden information)."""
    import torch

    from model import load, score
    from train_critic import advantage
    try:
        with open(os.path.join(path, "critic.json")) as f:
            critic = json.load(f)
    except OSError:
        fail(f"--critic {path}: no critic.json there; name a directory that train_critic.py made")
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    (model, _), (ref, _) = load(path, device, dtype=dtype), load(critic["ref"], device, dtype=dtype)

    def work(requests):
        turns = [turn for request in requests for turn in request]
        scores = iter([advantage(p, r, critic["normalize"]).item()
                       for p, r in zip(score(model, turns, 16384), score(ref, turns, 16384))])
        return [[next(scores) for _ in request] for request in requests]

    return Batcher(work, 1024, size=len), critic["hidden_info"]  # `score` cuts the work by tokens itself


# --- an episode -------------------------------------------------------------------------------------------------------

class Players:
    """The agent, the human, and maybe a critic: what an episode talks to."""

    def __init__(self, args):
        import torch

        from model import load_lm, render
        self.args = args
        try:
            self.prompt = open(args.agent_prompt, encoding="utf-8").read() if args.agent_prompt else None
        except OSError as e:
            fail(f"--agent_prompt {args.agent_prompt}: {e.strerror}")
        model, self.tokenizer = load_lm(args.model, "cuda" if torch.cuda.is_available() else "cpu")
        self.render = lambda history: render(self.tokenizer, history)
        self.engine = transformers_engine(model, self.tokenizer, args)
        self.critic, self.hidden_info = critic_engine(args.critic) if args.critic else (None, 0)

    async def human(self, task, message):
        kind, _, text = self.args.human.partition(":")
        return (text if kind == "fixed" else scripted_human(task, message))[:REPLY_CHARS]

    def text(self, token_ids):
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    async def act(self, task, history, key, candidates):
        """The agent's next message, `content` still open, with candidates. key: (seed, task id, sample, turn)."""
        prompt = self.render(history)
        draws = [(*key, j) for j in range(self.args.best_of)] + [(*key, "candidate", j) for j in range(candidates)]
        drawn = await self.engine((prompt, draws))
        actions, drawn = drawn[:self.args.best_of], drawn[self.args.best_of:]
        best = 0
        if self.critic:
            if self.hidden_info:
                prompt = self.render(with_hidden(history, hidden_information(task)))
            scores = await self.critic([(tuple(prompt), tuple(ids)) for ids, _ in actions])
            best = max(range(len(scores)), key=scores.__getitem__)
        ids, logprobs = actions[best]
        message = {"role": "assistant", "content": None, "output": self.text(ids), "token_ids": ids,
                   "logprobs": logprobs}
        if drawn:
            message["candidates"] = [{"output": self.text(ids), "token_ids": ids, "logprob": round(sum(logprobs), 6)}
                                     for ids, logprobs in drawn]
        return message

    async def play(self, task, sample):
        """One episode: {"sample", "dialogue_history", "answer"}."""
        a, history = self.args, [first_message(task, self.args.max_turns, self.prompt)]
        key = (a.seed, task_id(task), sample)
        candidates = a.candidates if rng("share", *key).random() < a.candidates_share else 0
        for turn in range(a.max_turns):
            message = await self.act(task, history, (*key, turn), candidates)
            message["content"], answer = read_action(message["output"], turn == a.max_turns - 1)
            history.append(message)
            if answer is not None:
                break
            history.append({"role": "user", "content": await self.human(task, message["content"])})
        return {"sample": sample, "dialogue_history": history, "answer": answer}

    async def add_candidates(self, record):
        """Candidates for every turn of a dialogue that exists already."""
        history, turn = record["dialogue_history"], 0
        key = (self.args.seed, task_id(record["task"]), record.get("sample", 0))
        for t, message in enumerate(history):
            if message["role"] == "assistant":
                drawn = await self.act(record["task"], history[:t], (*key, turn), self.args.candidates)
                message["candidates"], turn = drawn["candidates"], turn + 1
        return {}


# --- all episodes -----------------------------------------------------------------------------------------------------

def done_already(path):
    """The keys (task id, sample) in a file of finished episodes, from which a last line that was cut off is dropped."""
    if not os.path.exists(path):
        return set()
    with open(path, "rb+") as f:
        data = f.read()
        whole = data.rfind(b"\n") + 1
        f.truncate(whole)
    lines = data[:whole].decode().splitlines()
    return {(task_id(r["task"]), r["sample"]) for r in (read_jsonl(lines, ("task", "sample"), path) if lines else ())}


async def collect(args, emit):
    done = done_already(args.resume) if args.resume else set()
    players = Players(args)
    meta = {k: getattr(args, k) for k in ("model", "human", "temperature", "max_turns", "seed", "best_of", "critic",
                                          "rules")} | {"version": version()}
    grader = Grader(rules=args.rules, workers=os.cpu_count(), unsafe=args.unsafe)
    threads = ThreadPoolExecutor(os.cpu_count())
    finished = asyncio.Queue()
    bar, trouble, totals = progress("episodes"), [], {"episodes": 0, "reward": 0.0, "solved": 0, "tokens": 0}

    def jobs():
        try:
            need = "task.problem_description", "task.ground_truth", "task.test_cases"
            for record in read_jsonl(sys.stdin, need):
                record["task"] = {"kind": "backend", **record["task"], "id": task_id(record["task"])}
                played = "dialogue_history" in record
                if played and not args.candidates:
                    fail(f"task {record['task']['id']} has a dialogue already: give --candidates, or cut it out")
                for sample in [record.get("sample", 0)] if played else range(args.k):
                    if (record["task"]["id"], sample) not in done:
                        yield record, sample
        except SystemExit as e:  # a bad line ends the input; what is under way is finished and written first
            trouble.append(e)

    async def player(jobs):
        for record, sample in jobs:
            played = "dialogue_history" in record
            new = await (players.add_candidates(record) if played else players.play(record["task"], sample))
            new["meta"] = {**record.get("meta", {}), **meta}
            finished.put_nowait(asyncio.ensure_future(graded({**record, **new})))

    async def graded(record):
        if "reward" not in record:
            loop = asyncio.get_running_loop()
            record |= await loop.run_in_executor(threads, grader.grade, record["task"], record["answer"])
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

    with grader:
        await asyncio.gather(players_then_end(jobs()), writer())
    n = max(1, totals["episodes"])
    print(f"{totals['episodes']} episodes ({len(done)} done before): tests passed {100 * totals['reward'] / n:.1f} %, "
          f"success {100 * totals['solved'] / n:.1f} %, {totals['tokens'] / n:.0f} tokens each; "
          f"grader: {args.rules} rules, sandbox {grader.level}", file=sys.stderr)
    return trouble


def main(args):
    if (args.best_of > 1) != bool(args.critic):
        fail("--best_of N and --critic DIR go together")
    if args.human != "scripted" and not args.human.startswith("fixed:"):
        fail(f"--human {args.human!r}: give scripted, or fixed:TEXT")
    try:
        trouble = asyncio.run(collect(args, open_stdout()))
    except GraderError as e:
        fail(e)
    for error in trouble:  # raised outside the event loop, which would print its tasks
        raise error


if __name__ == "__main__":
    run(main, get_args())
