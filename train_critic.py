"""Stage 1: the critic. It reads the hidden information c, and learns from pairs of trajectories
which turns were good.

    A(o_t, a_t, c) = 1/L_t sum_l log [ pi(a_t^l | o_t, a_t^<l, c) / pi_ref(...) ]            (eq. 3)
    loss = -log sigmoid( beta sum_t A(o_t+, a_t+, c) - beta sum_t A(o_t-, a_t-, c) )         (eq. 2)
           + nll_coef NLL(tau+)

tau+ and tau- are trajectories of one task, and tau+ has the higher reward. pi starts as pi_ref.
After training every message and every candidate gets its `advantage` A, and the records go on to
stdout. --head names the rivals of eq. 3:

logratio    A is eq. 3
regression  A is a linear head on the mean hidden state of (c, o_t, a_t); eq. 2 without the NLL
value       A is a linear head's logit that the trajectory succeeds, trained by cross-entropy on
            every turn of the pairs

A --model that sees (Qwen2-VL, Qwen2.5-VL) gets the pages of frontend tasks as pictures.

    python train_critic.py --model runs/base --out runs/critic < trajectories.jsonl > scored.jsonl
    torchrun --nproc_per_node=8 train_critic.py --out runs/critic < trajectories.jsonl > scored.jsonl
    python train_critic.py --score 1 --out runs/critic < more.jsonl > scored.jsonl  # trains nothing
    for b in 0.1 1; do python train_critic.py --beta $b --out runs/c$b < in.jsonl > $b.jsonl; done
"""
from utils import (SIGNALS, Log, digest, drop_checkpoints, fail, check_finite, from_rank_0, init_distributed, lr_at,
                   machine_flags, open_stdout, parser, read_jsonl, rng, run, say, sum_over_ranks, writing)

import json
import os
import sys
from itertools import islice

from colbench import (agent_messages, browser_flags, draw_pages, environment, hidden_information,
                      needs, task_id, with_hidden)


def get_args(argv=None):
    p = parser(__doc__)
    p.add_argument("--model", default="meta-llama/Llama-3.1-8B-Instruct",
                   help="pi_ref, and where pi starts")
    p.add_argument("--out", required=True, help="new directory for the model and its metrics.jsonl")
    # pairs
    p.add_argument("--pairs", choices=["best", "all"], default="best",
                   help="best: a task's best trajectory, if solved, and each worse one; all: any 2")
    p.add_argument("--margin", type=float, default=0.1,
                   help="--pairs all: least difference of the two rewards")
    p.add_argument("--held_out", type=float, default=0.1,
                   help="share of the tasks kept out of training, to report accuracy on")
    # what the critic is
    p.add_argument("--head", choices=["logratio", "regression", "value"], default="logratio",
                   help="what A is, see above; --model must be the agent's for logratio only")
    p.add_argument("--normalize", choices=["turn", "trajectory", "none"], default="turn",
                   help="mean log-ratio of a turn (eq. 3), of a trajectory (released code); sums")
    p.add_argument("--hidden_info", type=int, choices=[0, 1], default=1,
                   help="0: the critic reads what the agent reads")
    p.add_argument("--ref_context", choices=["hidden", "agent"], default="hidden",
                   help="pi_ref reads c, too (eq. 3), or what the agent reads (released code)")
    p.add_argument("--picture_tokens", type=int, default=1024,
                   help="a model that sees: the most tokens of a page's picture")
    p.add_argument("--score", type=int, choices=[0, 1], default=0,
                   help="1: score stdin, of any length, with the finished critic in --out")
    # objective
    p.add_argument("--beta", type=float, default=0.1)
    p.add_argument("--nll_coef", type=float, default=0.01,
                   help="weight of the chosen side's NLL per token")
    # optimization
    p.add_argument("--lr", type=float, default=2e-7, help="peak learning rate")
    p.add_argument("--batch_size", type=int, default=8, help="pairs a step")
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    p.add_argument("--seed", type=int, default=0)
    machine_flags(p)
    browser_flags(p)
    return p.parse_args(argv)


if __name__ == "__main__":
    ARGS = get_args()  # a wrong flag is told before anything slow is loaded

import torch
import torch.nn.functional as F

from model import (PICTURE, TURN, Pair, Pictures, action_ids, action_logps, base_digest, batches,
                   token_counts, deal, dry_run, gathered, load, load_options, micro_batches,
                   find_model, raw_text, reference_logps, render, restore, save, save_checkpoint, score,
                   has_vision, thinking_flag, turns_in)


# --- the loss -------------------------------------------------------------------------------------

def advantage(logps, ref_logps, normalize):
    """Eq. 3, one action: (L,) log-probs to a scalar; normalize="none" takes the sum."""
    ratio = logps - ref_logps
    return ratio.sum() if normalize == "none" else ratio.mean()


def trajectory_score(logps, ref_logps, normalize):
    """The sum over turns in eq. 2: lists of (L_t,) log-probs to a scalar."""
    if normalize == "trajectory":
        return advantage(torch.cat(logps), torch.cat(ref_logps), normalize)
    return sum(advantage(p, r, normalize) for p, r in zip(logps, ref_logps))


def critic_loss(chosen, rejected, ref_chosen, ref_rejected, beta, nll_coef, normalize):
    """(loss, margin) of one pair, eq. 2: each side is a trajectory's list of (L_t,) log-probs."""
    margin = beta * (trajectory_score(chosen, ref_chosen, normalize)
                     - trajectory_score(rejected, ref_rejected, normalize))
    return -F.logsigmoid(margin) - nll_coef * torch.cat(chosen).mean(), margin


def value_loss(chosen, rejected):
    """(loss, margin) of one pair: (1,) logits, one a turn, that its trajectory is chosen."""
    chosen, rejected = torch.cat(chosen), torch.cat(rejected)
    loss = torch.cat([F.softplus(-chosen), F.softplus(rejected)]).mean()
    return loss, chosen.mean() - rejected.mean()


# --- data -----------------------------------------------------------------------------------------

def as_read(history, hidden=None, shown=None):
    """A conversation as a critic reads it: `hidden`, the information c, in front of it.

    shown(text): the ids of a text's picture, or (). A picture stands behind the agent's message;
    that of c takes its place, behind the first message.
    """
    if shown:
        history = [{**m, PICTURE: shown(m["content"])} if m["role"] == "assistant" else m
                   for m in history]
        if hidden is not None and (c := shown(hidden)):
            return [{**history[0], PICTURE: c}, *history[1:]]
    return history if hidden is None else with_hidden(history, hidden)


def critic_turns(critic, tokenizer, task, history, actions, thinking=0, pictures=None):
    """[(turn, reference turn)] of actions after a history: the prompts of pi and pi_ref differ.

    critic: {flag: value} of head, hidden_info and ref_context; actions: messages or candidates.
    """
    page = environment(task).page
    shown = (lambda text: pictures.ids(page(text))) if pictures else None

    def prompt(hidden=None):
        return tuple(render(tokenizer, as_read(history, hidden, shown), thinking))

    def action(message):
        if critic["head"] == "logratio":
            return action_ids(tokenizer, message)
        return action_ids(tokenizer, message, False, shown(raw_text(message)) if shown else ())

    seen = prompt(hidden_information(task) if critic["hidden_info"] else None)
    ref_seen = seen if critic["ref_context"] == "hidden" else prompt()
    return [((seen, ids), (ref_seen, ids)) for ids in map(action, actions)]


def add_turns(critic, tokenizer, records, max_length, pictures):
    """Gives the agent's messages and candidates their turn, under TURN; None where it is too long.

    Returns ({turn: reference turn}, how many are too long).
    """
    ref_of, too_long = {}, 0
    for r in records:
        history = r["dialogue_history"]
        for t, message in enumerate(history):
            if message["role"] != "assistant":
                continue
            actions = [message, *message.get("candidates", ())]
            turns = critic_turns(critic, tokenizer, r["task"], history[:t], actions, thinking_flag(r),
                                 pictures)
            for action, (turn, ref_turn) in zip(actions, turns):
                fits = sum(map(len, turn)) <= max_length
                action[TURN] = turn if fits else None
                if fits:
                    ref_of[turn] = ref_turn
                else:
                    too_long += 1
    if too_long:
        say(f"{too_long} turns are longer than --max_length: no advantage")
    return ref_of, too_long


def add_advantages(record, advantages):
    """The record, with advantages[turn] in the place of each message's and candidate's turn."""
    for message in agent_messages(record):
        for action in (message, *message.get("candidates", ())):
            turn = action.pop(TURN)
            action.pop("advantage", None)  # another critic's
            if turn is not None:
                action["advantage"] = advantages[turn]
    return record


def draw_records(args, records):
    """{page: PNG file in --out/pictures} of the agent's pages and of the hidden ones."""
    pages = {}
    for r in records:
        texts = [hidden_information(r["task"])]
        for m in agent_messages(r):
            texts += [m["content"], m.get("output")]
            texts += [candidate.get("output") for candidate in m.get("candidates", ())]
        for text in filter(None, texts):
            pages[environment(r["task"]).page(text)] = None
    pages.pop("", None)
    return draw_pages(args, pages, os.path.join(args.out, "pictures"))


def trajectory_pairs(records, mode, margin):
    """{task id: [Pair]}: two trajectories of a task, wherever they stand in records, by reward."""
    by_task, pairs = {}, {}
    for r in records:
        turns = tuple(m[TURN] for m in agent_messages(r))
        if None not in turns:
            by_task.setdefault(task_id(r["task"]), []).append((r["reward"], turns))
    for task, rows in by_task.items():
        best = max(rows, key=lambda row: row[0])
        if mode == "best":
            compared = [(best, row) for row in rows if best[0] >= 1]
        else:
            compared = [(a, b) for a in rows for b in rows if a[0] - b[0] >= margin]
        better = [Pair(a[1], b[1], gap=a[0] - b[0]) for a, b in compared if a[0] > b[0]]
        if better:
            pairs[task] = better
    return pairs


def prepare(args, records):
    """Reads stdin into `records`, whose messages and candidates get their turns.

    Returns ({turn: reference turn}, {task id: [Pair]} to train on, the same held out, how many
    turns are too long, and a Pictures or None).
    """
    need = needs("dialogue_history", "reward", to_train=True)
    records += read_jsonl(sys.stdin, need, skip_bad=args.skip_bad)
    path, tokenizer, config = find_model(args.model)
    pictures = None
    if has_vision(config) and not args.dry_run:
        pictures = Pictures(path, config, args.picture_tokens, draw_records(args, records))
    ref_of, too_long = add_turns(vars(args), tokenizer, records, args.max_length, pictures)
    pairs = trajectory_pairs(records, args.pairs, args.margin)
    if not pairs:
        fail(f"no pairs in {len(records)} trajectories: no task has a solved and a worse one "
             "(--pairs all --margin 0 takes whatever differs; collect.py -k draws more per task)")
    train, held = {}, {}
    for task in pairs:
        kept_out = rng("held out", args.seed, task).random() < args.held_out
        side = held if kept_out else train
        side[task] = pairs[task]
    if not train:
        fail(f"--held_out {args.held_out} keeps all {len(held)} tasks with pairs out of training")
    return ref_of, train, held, too_long, pictures


# --- a finished critic, for --score 1 and collect.py --critic -------------------------------------

def load_critic(folder, device, *how, **options):
    """(critic.json's dict, tokenizer, models, Pictures or None) of a finished run's --out.

    models: pi, and with --head logratio pi_ref; how and options: see model.load.
    """
    try:
        with open(os.path.join(folder, "critic.json")) as f:
            critic = {"head": "logratio", "ref_context": "hidden", **json.load(f)}
    except (OSError, ValueError) as e:
        fail(f"no critic in {folder}: critic.json: {getattr(e, 'strerror', e)}; name the --out of "
             "a train_critic.py that has finished")
    if critic["head"] not in ("logratio", "regression", "value"):
        fail(f"the critic in {folder} is of --head {critic['head']}, which is not known here")
    has_head = critic["head"] != "logratio"
    path, tokenizer, config = find_model(folder)
    models = [load(path, device, *how, head=has_head, **options)[0]]
    if not has_head:
        models.append(load(critic["ref"], device, *how, **options)[0])
    pictures = Pictures(path, config, critic["picture_tokens"]) if has_vision(config) else None
    for model in models:
        model.pictures = pictures
    return critic, tokenizer, models, pictures


def score_turns(critic, models, ref_of, max_tokens):
    """{turn: its advantage, a float} of {turn: reference turn}."""
    if not ref_of:
        return {}
    logps = score(models[0], list(ref_of), max_tokens)
    ref_logps = [torch.zeros(1)] * len(ref_of)
    if len(models) > 1:
        ref_logps = score(models[1], list(ref_of.values()), max_tokens)
    return {turn: advantage(*both, critic["normalize"]).item()
            for turn, *both in zip(ref_of, logps, ref_logps)}


def score_stream(args, emit, device):
    """--score 1: 64 records at a time, so that the memory does not grow with their number."""
    critic, tokenizer, models, pictures = load_critic(args.out, device, args.attention,
                                                      **load_options(args, device))
    need = needs("dialogue_history", to_train=True)
    stream = read_jsonl(sys.stdin, need, skip_bad=args.skip_bad)
    records, bad_line = [], []  # rank 0 alone has them

    def show(drawn):
        for page, file in drawn.items():
            pictures.add(page, file)

    def read_some():
        records.clear()
        try:
            records.extend(islice(stream, 64))
        except SystemExit as e:  # those before the bad line are scored first
            bad_line.append(e)
        if bad_line and not records:
            raise bad_line[0]
        drawn = draw_records(args, records) if pictures else {}
        show(drawn)
        ref_of, _ = add_turns(critic, tokenizer, records, args.max_length, pictures)
        return ref_of, drawn, len(records)

    while True:
        ref_of, drawn, n = from_rank_0(read_some)
        if not n:
            return
        show(drawn)
        advantages = score_turns(critic, models, ref_of, args.max_tokens)
        for r in records:
            emit(add_advantages(r, advantages))


# --- training -------------------------------------------------------------------------------------

def main(args):
    emit, device = open_stdout(), init_distributed()
    if args.score:
        return score_stream(args, emit, device)
    log, records = None if args.dry_run else Log(args), []  # rank 0 alone has the records
    ref_of, train, held, too_long, pictures = from_rank_0(lambda: prepare(args, records))
    groups, turns, ref_turns = list(train.values()), list(ref_of), list(ref_of.values())
    steps = [batch for epoch in range(args.epochs)
             for batch in batches(groups, args.batch_size, args.seed, epoch)]
    if args.dry_run:
        return emit(dry_run(args, find_model(args.model)[2], steps, [turns, ref_turns]))
    log.begin(steps=len(steps), pairs=sum(map(len, groups)), tasks=len(groups), too_long=too_long,
              held_out_pairs=sum(map(len, held.values())),
              data=digest([[digest(both) for both in ref_of.items()],
                           [[digest(pair[:2]) for pair in group] for group in groups]]),
              model_weights=base_digest(args.model))

    model, tokenizer = load(args.model, device, args.attention, head=args.head != "logratio",
                            **load_options(args, device))
    model.pictures = pictures
    ref = dict(zip(turns, reference_logps(model, ref_turns, args.max_tokens, args.out)))
    fused = device.type == "cuda" and not args.offload
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95),
                                  weight_decay=0.0, fused=fused)
    restore(model, optimizer, log)

    def pair_loss(pair, logps):
        """(loss, margin) of a Pair, by the log-probs of its turns, {turn: (L,)}."""
        sides = pair.chosen, pair.rejected
        chosen, rejected = ([logps[turn] for turn in side] for side in sides)
        ref_chosen, ref_rejected = ([ref[turn] for turn in side] for side in sides)
        if args.head == "value":
            return value_loss(chosen, rejected)
        nll_coef = args.nll_coef if args.head == "logratio" else 0  # a regression has no likelihood
        return critic_loss(chosen, rejected, ref_chosen, ref_rejected, args.beta, nll_coef,
                           args.normalize)

    for step in log.steps("critic", len(steps)):
        batch, total, right = steps[step], 0.0, 0.0
        for part, weight in deal(micro_batches(batch, args.max_tokens)):
            part_turns = turns_in(part)
            logps = dict(zip(part_turns, action_logps(model, part_turns, args.max_tokens)))
            losses, margins = zip(*(pair_loss(pair, logps) for pair in part))
            loss = weight * sum(losses) / len(batch)
            loss.backward()
            total += loss.item()
            right += weight * sum((m > 0).item() for m in margins) / len(batch)
        norm = gathered(torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)).item()
        total, right, signal = sum_over_ranks(total, right, SIGNALS.first)
        check_finite(step, loss=total, grad_norm=norm)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, len(steps), args.lr)
        optimizer.step()
        optimizer.zero_grad()
        log(step=step, loss=total, accuracy=right, grad_norm=norm, lr=group["lr"])
        if signal or args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(model, optimizer, args.out, step + 1)
        if signal:
            SIGNALS.end()
    if not log.trained:
        save(model, tokenizer, args.out)
        log(last=True, trained=len(steps), **token_counts())

    # the trained critic scores everything
    logps = dict(zip(turns, score(model, turns, args.max_tokens, "advantages")))

    def accuracy(logps):
        """Share of the held-out pairs that are ranked right; ties count half."""
        margins = [pair_loss(pair, logps)[1].item() for pairs in held.values() for pair in pairs]
        return sum((m > 0) + 0.5 * (m == 0) for m in margins) / len(margins) if margins else None

    if not log.finished:
        about = {"ref": os.path.abspath(args.model) if os.path.isdir(args.model) else args.model}
        for key in ("head", "hidden_info", "ref_context", "normalize", "picture_tokens"):
            about[key] = getattr(args, key)
        path = os.path.join(args.out, "critic.json")
        with writing(path), open(path, "w") as f:  # for load_critic
            json.dump(about, f)
        log(last=True, finished=len(steps), held_out_accuracy_before=accuracy(ref),
            held_out_accuracy=accuracy(logps), **token_counts())
    drop_checkpoints(args.out)
    advantages = {turn: advantage(logps[turn], ref[turn], args.normalize).item() for turn in turns}
    for r in records:
        emit(add_advantages(r, advantages))


if __name__ == "__main__":
    run(main, ARGS)
