"""Stage 1: a turn-level critic that may read the hidden information, trained on pairs of trajectories of one task.

    A(o_t, a_t, c) = 1/L_t sum_l log [ pi(a_t^l | o_t, a_t^<l, c) / pi_ref(a_t^l | o_t, a_t^<l, c) ]           (eq. 3)
    loss = -log sigmoid( beta sum_t A(o_t+, a_t+, c) - beta sum_t A(o_t-, a_t-, c) )  + nll_coef NLL(tau+)     (eq. 2)

tau+ has the higher reward of the two, pi starts as pi_ref, c stands in front of the conversation. Afterwards every
message and every candidate is scored, and the records go on to stdout with `advantage`. --head names the rivals:

logratio    eq. 3
regression  A is a linear head on the mean of all token states of (c, o_t, a_t); eq. 2 without NLL
value       so is the logit of the trajectory's success, learned by binary cross-entropy on every turn of the pairs
gain        nothing is trained: how much a_t raises the mean log-prob, under --model, of the reference as the answer

A --model that sees (Qwen2-VL, Qwen2.5-VL) is shown the pages of frontend tasks, the agent's and c, as pictures.

    python train_critic.py --model runs/base --out runs/critic < trajectories.jsonl > scored.jsonl
    torchrun --nproc_per_node=8 train_critic.py --resume 1 --out runs/critic < trajectories.jsonl > scored.jsonl
    python train_critic.py --score 1 --out runs/critic < more.jsonl > more-scored.jsonl     # by a finished critic
    for b in 0.1 0.3 1; do python train_critic.py --beta $b --out runs/critic$b < trajectories.jsonl > $b.jsonl; done
"""
from utils import (SIGNALS, Log, digest, drop_checkpoints, fail, finite, from_rank_0, join, lr_at, machine_flags,
                   open_stdout, parser, progress, read_jsonl, rng, run, say, summed, writing)

import json
import os
import sys
from itertools import islice

import torch
import torch.nn.functional as F

from colbench import (ANSWER, agent_messages, browser_flags, each_drawn, extract_page, hidden_information, kind_of,
                      read_action, task_id)

HEADS = "regression", "value"  # those with a head of their own


def get_args(argv=None):
    p = parser(__doc__)
    p.add_argument("--model", default="meta-llama/Llama-3.1-8B-Instruct", help="pi_ref, and where pi starts")
    p.add_argument("--out", required=True, help="new directory for the critic and its metrics.jsonl")
    # pairs
    p.add_argument("--pairs", choices=["best", "all"], default="best",
                   help="best: a task's best trajectory, where it is solved, against each worse one; all: every pair")
    p.add_argument("--margin", type=float, default=0.1, help="rewards of an `all` pair differ, and by at least this")
    p.add_argument("--held_out", type=float, default=0.1, help="share of the tasks kept out, to report accuracy on")
    # objective
    p.add_argument("--beta", type=float, default=0.1)
    p.add_argument("--nll_coef", type=float, default=0.01, help="weight of the chosen trajectory's NLL per token")
    p.add_argument("--normalize", choices=["turn", "trajectory", "none"], default="turn",
                   help="mean log-ratio of each turn (eq. 3), one mean a trajectory (released code), or plain sums")
    p.add_argument("--hidden_info", type=int, choices=[0, 1], default=1, help="0: it reads what the agent reads")
    p.add_argument("--ref_context", choices=["hidden", "agent"], default="hidden",
                   help="whether pi_ref reads c, too (eq. 3), or what the agent reads (released code)")
    p.add_argument("--head", choices=["logratio", *HEADS, "gain"], default="logratio",
                   help="what A is, see above; --model need be the agent's for logratio alone")
    p.add_argument("--score", type=int, choices=[0, 1], default=0,
                   help="1: score stdin with the finished critic in --out, a stream of any length; nothing is trained")
    p.add_argument("--picture_tokens", type=int, default=1024, help="a model that sees: of a page's picture, at most")
    # optimization
    p.add_argument("--lr", type=float, default=2e-7, help="peak learning rate")
    p.add_argument("--batch_size", type=int, default=8, help="pairs a step")
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--clip", type=float, default=1.0, help="gradient norm is clipped here")
    p.add_argument("--seed", type=int, default=0)
    machine_flags(p)
    browser_flags(p)
    return p.parse_args(argv)


# --- the loss ---------------------------------------------------------------------------------------------------------

def advantage(logps, ref_logps, normalize):
    """A of one action, eq. 3: (L,) log-probs under pi and pi_ref to a scalar; a sum where normalize is "none"."""
    ratio = logps - ref_logps
    return ratio.sum() if normalize == "none" else ratio.mean()


def trajectory_score(logps, ref_logps, normalize):
    """The sum over turns of eq. 2: lists of (L_t,) log-probs to a scalar."""
    if normalize == "trajectory":
        return advantage(torch.cat(logps), torch.cat(ref_logps), normalize)
    return sum(advantage(p, r, normalize) for p, r in zip(logps, ref_logps))


def critic_loss(chosen, rejected, ref_chosen, ref_rejected, beta, nll_coef, normalize):
    """(loss, margin) of one pair, eq. 2: each argument is a trajectory's list of (L_t,) log-probs."""
    margin = trajectory_score(chosen, ref_chosen, normalize) - trajectory_score(rejected, ref_rejected, normalize)
    margin = beta * margin
    return -F.logsigmoid(margin) - nll_coef * torch.cat(chosen).mean(), margin


def value_loss(chosen, rejected):
    """(loss, margin) of one pair whose turns, lists of (1,) logits, tell whether their trajectory is the better one."""
    right, wrong = torch.cat(chosen), torch.cat(rejected)
    return torch.cat([F.softplus(-right), F.softplus(wrong)]).mean(), right.mean() - wrong.mean()


# --- pairs and batches ------------------------------------------------------------------------------------------------

def trajectory_pairs(records, mode, margin, usable=lambda i: True):
    """{task id: [(i, j)]}: records i and j are of one task, i has the higher reward. By task, never by position."""
    tasks = {}
    for i, r in enumerate(records):
        if usable(i):
            tasks.setdefault(task_id(r["task"]), []).append(i)
    reward = lambda i: records[i]["reward"]
    pairs = {}
    for task, rows in tasks.items():
        if mode == "best":
            best = max(rows, key=reward)
            pairs[task] = [(best, j) for j in rows if reward(best) >= 1 and reward(j) < reward(best)]
        else:
            pairs[task] = [(i, j) for i in rows for j in rows if 0 < reward(i) - reward(j) >= margin]
    return {task: p for task, p in pairs.items() if p}


def batches(groups, batch_size, *seed):
    """Batches of an epoch, a function of the seed alone: groups are shuffled and stay together, they share prefixes."""
    groups = list(groups)
    rng("order", *seed).shuffle(groups)
    flat = [example for group in groups for example in group]
    return [flat[i:i + batch_size] for i in range(0, len(flat), batch_size)]


def draw(args, records):
    """{page: PNG file in --out/pictures} of all that a critic which sees is shown: the agent's pages and the wanted."""
    folder, pages = os.path.join(args.out, "pictures"), {}
    for r in records:
        if kind_of(r["task"]) == "frontend":
            said = [x for m in agent_messages(r) for x in (m["content"], m.get("output"), *(
                c.get("output") for c in m.get("candidates", ())))]
            for page in filter(None, map(extract_page, [*said, hidden_information(r["task"])])):
                pages[page] = os.path.join(folder, digest(page) + ".png")
    os.makedirs(folder, exist_ok=True)
    new = [page for page, file in pages.items() if not os.path.exists(file)]
    if new:
        save = lambda renderer, page: renderer.save(page, pages[page])
        for _ in progress("drawing pages", each_drawn(args, save, new), len(new)):
            pass
    drawn = {page: file for page, file in pages.items() if os.path.exists(file)}
    if len(drawn) < len(pages):
        say(f"{len(pages) - len(drawn)} of {len(pages)} pages can't be drawn and are not shown")
    return drawn


def judged(critic, tokenizer, task, history, actions, thinking=0, pictures=None):
    """[(turn, reference turn)] of actions after a history: their log-probs, or the first one's value, tell A.

    critic: head, hidden_info and ref_context, as critic.json holds them; actions: messages or candidates.
    """
    from model import action_ids, as_read, end_of_turn, plain_ids, raw, render
    c, sampled = hidden_information(task), critic["head"] == "logratio"
    read = lambda history, c=None: tuple(render(tokenizer, as_read(history, c, pictures), thinking))
    if critic["head"] == "gain":
        goal = c if kind_of(task) == "frontend" else f"{ANSWER}\n{c}"
        goal, before = (*plain_ids(tokenizer, goal), *end_of_turn(tokenizer)), read(history)
        says = lambda a: {"role": "assistant", "content": read_action(raw(a), False)[0]}
        return [((read([*history, says(a)]), goal), (before, goal)) for a in actions]
    prompt = read(history, c if critic["hidden_info"] else None)
    ref_prompt = prompt if critic["ref_context"] == "hidden" else read(history)
    ids = [action_ids(tokenizer, a, sampled, pictures) for a in actions]
    return [((prompt, a), (ref_prompt, a)) for a in ids]


def turns_judged(critic, tokenizer, records, max_length, pictures):
    """([(turn, reference turn)], of, how many were too long) of the records' messages and candidates, see prepare."""
    from model import thinks
    turns, of, long = [], [], 0
    for r in records:
        of.append([])
        for t, message in enumerate(r["dialogue_history"]):
            if message["role"] != "assistant":
                continue
            of[-1].append([])
            for both in judged(critic, tokenizer, r["task"], r["dialogue_history"][:t],
                               [message, *message.get("candidates", ())], thinks(r), pictures):
                fits = max(len(prompt) + len(action) for prompt, action in both) <= max_length
                of[-1][-1].append(len(turns) if fits else None)
                turns += [both] * fits
                long += not fits
    if long:
        say(f"{long} of {len(turns) + long} turns are longer than --max_length and left out")
    return turns, of, long


def scored(records, of, advantages):
    """Yields the records with the advantages of their messages and candidates."""
    for r, at in zip(records, of):
        for message, ks in zip(agent_messages(r), at):
            for said, k in zip((message, *message.get("candidates", ())), ks):
                said.pop("advantage", None)  # of whoever scored it before
                if k is not None:
                    said["advantage"] = advantages[k]
        yield r


def needed(record, reward=True):
    """What a trainer needs of a record, for read_jsonl."""
    if "dialogue_history" in record and not agent_messages(record):
        raise ValueError("the agent says nothing in dialogue_history")
    return ("task.problem_description", "task.ground_truth", "dialogue_history", *["reward"] * reward)


def prepare(args, records):
    """Reads stdin into records; returns (turns, ref_turns, of, train, held, too_long, pictures).

    of[i][t] holds the indices in turns of record i's t-th message and of its candidates, None for one too long; train
    and held are pairs by task; pictures is {page: PNG file}, None for a model that sees none.
    """
    from model import Pictures, open_directory, sees
    records.extend(read_jsonl(sys.stdin, needed, skip_bad=args.skip_bad))
    path, tokenizer, config = open_directory(args.model)
    pictures = None
    if sees(config) and not args.dry_run:
        pictures = Pictures(path, config, args.picture_tokens, draw(args, records))
    turns, of, long = turns_judged(vars(args), tokenizer, records, args.max_length, pictures)
    turns, ref_turns = map(list, zip(*turns)) if turns else ([], [])
    pairs = trajectory_pairs(records, args.pairs, args.margin, lambda i: all(at[0] is not None for at in of[i]))
    if args.head == "gain":  # all pairs tell how good it is
        args.held_out = 1
    elif not pairs:
        fail(f"no pairs in {len(records)} trajectories: no task has a solved and a worse one (--pairs all --margin 0 "
             "takes whatever differs; collect.py -k draws more per task)")
    held = {t: p for t, p in pairs.items() if rng("held out", args.seed, t).random() < args.held_out}
    train = {t: p for t, p in pairs.items() if t not in held}
    if not train and args.head != "gain":
        fail(f"--held_out {args.held_out} keeps all {len(held)} tasks with pairs out of training")
    return turns, ref_turns, of, train, held, long, pictures and dict(zip(pictures.numbers, pictures.files))


# --- a critic that is there already -----------------------------------------------------------------------------------

def read_critic(folder, device, *how, **sharding):
    """(critic.json's dict, tokenizer, models, pictures) of a --out; `how` and `sharding` as of model.load.

    models: the critic's, and where A compares two log-probs the reference. pictures: None for one that does not see.
    """
    from model import Pictures, load, open_directory, sees
    try:
        with open(os.path.join(folder, "critic.json")) as f:
            critic = {"head": "logratio", "ref_context": "hidden", **json.load(f)}
    except (OSError, ValueError) as e:
        fail(f"no critic in {folder}: critic.json: {getattr(e, 'strerror', e)}; name the --out of a train_critic.py "
             "that has finished")
    trained, has_head = critic["head"] != "gain", critic["head"] in HEADS
    path, tokenizer, config = open_directory(folder if trained else critic["ref"])
    models = [load(path, device, *how, head=has_head, **sharding)[0]]
    if not has_head:  # gain compares two readings of one model
        models.append(load(critic["ref"], device, *how, **sharding)[0] if trained else models[0])
    pictures = Pictures(path, config, critic["picture_tokens"]) if sees(config) else None
    for model in models:
        model.pictures = pictures
    return critic, tokenizer, models, pictures


def advantages(critic, models, both, max_tokens):
    """A of each (turn, reference turn), a list of floats."""
    from model import score
    if not both:
        return []
    found = [score(model, turns, max_tokens) for model, turns in zip(models, map(list, zip(*both)))]
    return [advantage(p, *(ref or [torch.zeros(1)]), critic["normalize"]).item() for p, *ref in zip(*found)]


def score_stream(args, emit, device):
    """--score 1: some records at a time, so that the memory does not grow with their number."""
    from model import machine
    critic, tokenizer, models, pictures = read_critic(args.out, device, args.attention, **machine(args, device))
    stream, records, bad = read_jsonl(sys.stdin, lambda r: needed(r, reward=False), skip_bad=args.skip_bad), [], []

    def some():
        records.clear()  # they stay on rank 0
        try:
            records.extend(islice(stream, 64))
        except SystemExit as e:  # a bad line: those before it are scored first
            bad.append(e)
        if bad and not records:
            raise bad[0]
        drawn = draw(args, records) if pictures else {}
        for page, file in drawn.items():
            page in pictures.numbers or pictures.add(page, file)
        return *turns_judged(critic, tokenizer, records, args.max_length, pictures)[:2], drawn

    while True:
        both, of, drawn = from_rank_0(some)
        if not of:
            return
        for page, file in drawn.items():
            page in pictures.numbers or pictures.add(page, file)
        for r in scored(records, of, advantages(critic, models, both, args.max_tokens)):
            emit(r)


# --- training ---------------------------------------------------------------------------------------------------------

def main(args):
    emit, device, records = open_stdout(), join(), []  # the records stay on rank 0
    if args.score:
        return score_stream(args, emit, device)
    log = None if args.dry_run else Log(args)
    from model import (Pictures, action_logps, base_digest, count, deal, load, machine,
                       micro_batches, open_directory, plan,
                       reference, restore, save, save_checkpoint, score, whole)

    turns, ref_turns, of, train, held, too_long, files = from_rank_0(lambda: prepare(args, records))
    nll_coef = args.nll_coef if args.head == "logratio" else 0  # values have no likelihood
    keys = lambda i: [at[0] for at in of[i]]  # the turns of trajectory i
    used_by = lambda pairs: sorted({k for pair in pairs for i in pair for k in keys(i)})
    turns_in = lambda pairs: [turns[k] for k in used_by(pairs)]

    def objective(pair, logps):
        chosen, rejected, *refs = ([x[k] for k in keys(i)] for x in (logps, ref) for i in pair)
        return value_loss(chosen, rejected) if args.head == "value" else \
            critic_loss(chosen, rejected, *refs, args.beta, nll_coef, args.normalize)

    def accuracy(pairs, logps):
        margins = [objective(pair, logps)[1].item() for p in pairs.values() for pair in p]
        return sum((m > 0) + 0.5 * (m == 0) for m in margins) / len(margins) if margins else None

    steps = [batch for e in range(args.epochs) for batch in batches(train.values(), args.batch_size, args.seed, e)]
    if args.dry_run:
        if not steps:
            fail(f"--dry_run: --head {args.head} trains nothing")
        return emit(plan(args, open_directory(args.model)[2], steps, turns_in, [turns, ref_turns]))
    log.begin(steps=len(steps), pairs=sum(map(len, train.values())), tasks=len(train), too_long=too_long,
              held_out_pairs=sum(map(len, held.values())),
              data=digest([turns, ref_turns, list(train.values())]),
              model_weights=base_digest(args.model))
    model, tokenizer = load(args.model, device, args.attention, head=args.head in HEADS, **machine(args, device))
    if files is not None:
        model.pictures = Pictures(args.model, model.lm.config, args.picture_tokens, files)
    ref = reference(model, ref_turns, args.max_tokens, args.out)  # once: pi_ref is where pi starts
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0,
                                  fused=device.type == "cuda" and not args.offload)
    if steps:
        restore(model, optimizer, log)
    for step in log.steps("critic", len(steps)):
        batch, total, right = steps[step], 0.0, 0.0
        for part, weight in deal(micro_batches(batch, turns_in, args.max_tokens), turns_in):
            logps = dict(zip(used_by(part), action_logps(model, turns_in(part), args.max_tokens)))
            losses, margins = zip(*(objective(pair, logps) for pair in part))
            loss = weight * sum(losses) / len(batch)
            loss.backward()
            total, right = total + loss.item(), right + weight * sum((m > 0).item() for m in margins) / len(batch)
        norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)).item()
        total, right, signal = summed(total, right, SIGNALS.first)
        finite(step, loss=total, grad_norm=norm)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, len(steps), args.lr)
        optimizer.step()
        optimizer.zero_grad()
        log(step=step, loss=total, accuracy=right, grad_norm=norm, lr=group["lr"])
        if signal or args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(model, optimizer, args.out, step + 1)
        if signal:
            SIGNALS.end()
    if steps and not log.trained:
        save(model, tokenizer, args.out)
        log(last=True, trained=len(steps), **count())
    logps = score(model, turns, args.max_tokens, "advantages")
    if not log.finished:
        path = os.path.join(args.out, "critic.json")
        with writing(path), open(path, "w") as f:  # what collect.py --best_of needs to score with it
            json.dump({"ref": os.path.abspath(args.model) if os.path.isdir(args.model) else args.model,
                       **{k: getattr(args, k) for k in ("head", "hidden_info", "ref_context", "normalize",
                                                        "picture_tokens")}}, f)
        log(last=True, finished=len(steps), held_out_accuracy_before=accuracy(held, ref),
            held_out_accuracy=accuracy(held, logps), **count())
    drop_checkpoints(args.out)
    for r in scored(records, of, [advantage(p, r, args.normalize).item() for p, r in zip(logps, ref)]):
        emit(r)


if __name__ == "__main__":
    run(main, get_args())
