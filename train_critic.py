"""Stage 1: the critic reads the hidden information c, and learns from pairs which turns were good.

    A(o_t, a_t, c) = 1/L_t sum_l log [ pi(a_t^l | o_t, a_t^<l, c) / pi_ref(a_t^l | o_t, a_t^<l, c) ]
    loss = -log sigmoid( beta sum_t A(o_t+, a_t+, c) - beta sum_t A(o_t-, a_t-, c) )
           + nll_coef NLL(tau+)

These are eq. 3 and eq. 2 of the paper. o_t is the dialogue before message t, a_t the message, of
L_t tokens. tau+ and tau- are trajectories of one task; tau+ has the higher reward. The NLL is a
mean over the turns of tau+, in each a mean over its tokens. pi starts as pi_ref. In the code a
*turn* is (prompt, action): a message or candidate as token ids, packed into strings, with all that
the model reads before it.

After training, every message and every candidate gets its `advantage` A, and the records go on
to stdout. --head selects what A is:

logratio    eq. 3
regression  a linear head on the mean hidden state of (c, o_t, a_t); eq. 2 without the NLL
value       a linear head's logit that the trajectory is the better one of its pair, trained by
            cross-entropy on every turn of the pairs
teacher     mean log pi_ref(a|c,o) - mean log pi_ref(a|o): what c says of the action to the
            untrained model; trains nothing, and sets --ref_context agent

Only logratio needs the agent's own --model. A --model with vision (Qwen2-VL, Qwen2.5-VL) reads the
pages of frontend tasks as pictures.

    python train_critic.py --model runs/base --out runs/critic < in.jsonl > scored.jsonl
    torchrun --nproc_per_node=8 train_critic.py --out runs/critic < in.jsonl > scored.jsonl
    python train_critic.py --score 1 --out runs/critic < more.jsonl > scored.jsonl  # trains nothing
    for b in 0.1 1; do python train_critic.py --beta $b --out runs/c$b < in.jsonl > $b.jsonl; done
"""
# utils before what loads slowly: a wrong flag is told at once
from utils import (RANK, Log, check_finite, digest, drop_checkpoints, fail, fail_on_error, flag,
                   from_rank_0, init_distributed, lr_at, machine_flags, open_stdout, parser,
                   read_jsonl, rng, run, say, sum_over_ranks, writing)

import json
import math
import os
import sys
from functools import partial
from itertools import chain

from colbench import (agent_messages, browser_flag, draw_pages, environment, extract_page,
                      hidden_information, needs, task_id, with_hidden)

LINEAR = "regression", "value"  # those with a head of their own
KEPT = "head", "hidden_info", "ref_context", "normalize", "picture_tokens"  # in critic.json


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] < trajectories.jsonl > scored.jsonl")
    flag(p, "model", "meta-llama/Llama-3.1-8B-Instruct", "pi_ref, and where pi starts")
    flag(p, "out", None, "the run's directory: a new one, unless --resume or --score is given",
         required=True)
    g = p.add_argument_group("pairs")
    flag(g, "pairs", "best", "best: a task's solved trajectory and each worse; all: any 2",
         choices=["best", "all"])
    flag(g, "margin", 0.1, "--pairs all: least difference of the two rewards")
    flag(g, "held_out", 0.1, "share of the tasks kept out of training, to report accuracy on")
    g = p.add_argument_group("the critic")
    flag(g, "head", "logratio", "what A is: see the top of train_critic.py",
         choices=["logratio", "regression", "value", "teacher"])
    flag(g, "normalize", "turn", "mean of a turn (eq. 3), mean of a trajectory, or sum",
         choices=["turn", "trajectory", "none"])
    flag(g, "hidden_info", 1, "0: the critic reads what the agent reads", choices=[0, 1])
    flag(g, "ref_context", "hidden", "pi_ref reads c, too (eq. 3), or what the agent reads",
         choices=["hidden", "agent"])
    flag(g, "picture_tokens", 1024, "model with vision: most tokens of a page's picture",
         least=1)
    browser_flag(g)
    flag(g, "score", 0, "1: score stdin with the finished critic in --out and its flags",
         choices=[0, 1])
    g = p.add_argument_group("objective and optimization")
    flag(g, "beta", 0.1, "scale of the margin")
    flag(g, "nll_coef", 0.01, "weight of the chosen side's NLL")
    flag(g, "lr", 2e-7, "peak: 3%% of the steps warm up, then a cosine to a tenth")
    flag(g, "batch_size", 8, "pairs a step, over all GPUs", least=1)
    flag(g, "epochs", 4, "over the pairs")
    flag(g, "max_grad_norm", 1.0, "gradients are clipped to it")
    flag(g, "seed", 0, "of the order and of what is held out")
    machine_flags(p)
    args = p.parse_args(argv)
    if args.head == "teacher":  # pi is pi_ref with c in its prompt: no step
        args.hidden_info, args.ref_context, args.epochs, args.held_out = 1, "agent", 0, 0
    return args


if __name__ == "__main__":
    ARGS = get_args()

import torch
import torch.nn.functional as F

from model import (PICTURE, TURN, Pair, Pictures, accuracy, action_ids, action_logps, actions_of,
                   base_digest, batches, dry_run, find_model, gathered, has_vision, load,
                   load_options, packed, pick_dtype, raw_text, reference_logps, render, restore,
                   save, save_checkpoint, score, tell_plan, turns_in, weights_digest)


# --- the loss -------------------------------------------------------------------------------------

def advantage(logps, ref_logps, normalize):
    """Eq. 3, one action: (L,) log-probs to a scalar; normalize="none" takes the sum.

    The records get this A. --normalize trajectory changes only the loss, by trajectory_score.
    """
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
    likelihood = sum(logps.mean() for logps in chosen) / len(chosen)
    return -F.logsigmoid(margin) - nll_coef * likelihood, margin


def value_loss(chosen, rejected):
    """(loss, margin) of one pair: (1,) logits, one a turn, that its trajectory is chosen."""
    chosen, rejected = torch.cat(chosen), torch.cat(rejected)
    loss = torch.cat([F.softplus(-chosen), F.softplus(rejected)]).mean()
    return loss, chosen.mean() - rejected.mean()


def pair_loss(args, pair, logps, ref):
    """(loss, margin) of a Pair, by the log-probs of its turns, {turn: (L,)}."""
    sides = pair.chosen, pair.rejected
    chosen, rejected = ([logps[turn] for turn in side] for side in sides)
    if args.head == "value":
        return value_loss(chosen, rejected)
    ref_chosen, ref_rejected = ([ref[turn] for turn in side] for side in sides)
    nll_coef = 0 if args.head in LINEAR else args.nll_coef  # a regression has no likelihood
    return critic_loss(chosen, rejected, ref_chosen, ref_rejected, args.beta, nll_coef,
                       args.normalize)


# --- training -------------------------------------------------------------------------------------

def main(args):
    emit, device = open_stdout(), init_distributed()
    if args.score:
        return score_only(args, emit, device)
    log = None if args.dry_run else Log(args)
    records = []  # on rank 0 alone, to be written at the end; the rest goes to every rank
    ref_of, groups, held, pictures = from_rank_0(lambda: prepare(args, records))
    turns, ref_turns = list(ref_of), list(ref_of.values())
    steps = [batch for epoch in range(args.epochs)
             for batch in batches(groups, args.batch_size, seed=(args.seed, epoch))]
    tell_plan(f"pairs of {len(groups)} tasks", groups, steps)
    if args.dry_run:
        reference = ref_turns if args.head not in LINEAR else []
        return emit(dry_run(args, find_model(args.model)[2], steps, reference, turns))
    data = *ref_of.items(), *map(tuple, chain(*groups))
    log.begin(steps=len(steps), pairs=sum(map(len, groups)), tasks=len(groups),
              dtype=str(pick_dtype(args.dtype, device)), data=digest([*map(digest, data)]),
              model_weights=base_digest(args.model))

    start = args.out if log.finished else args.model
    model, tokenizer = load(start, device, head=args.head in LINEAR, **load_options(args))
    model.pictures = pictures
    # zeros for a linear head, whose value is A already
    ref = dict(zip(turns, reference_logps(model, ref_turns, args.tree_tokens, args.out)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95),
                                  weight_decay=0.0, fused=True)
    restore(model, optimizer, log)

    save_step = partial(save_checkpoint, model, optimizer, args.out)
    for step in log.steps("critic", len(steps), save_step):
        batch, before = steps[step], model.tokens
        read = turns_in(batch)
        logps = dict(zip(read, action_logps(model, read, args.tree_tokens)))
        losses, margins = zip(*(pair_loss(args, pair, logps, ref) for pair in batch))
        loss = sum(losses) / len(batch)  # on all ranks the same; FSDP sums their gradients
        loss.backward()
        margin = torch.stack(margins)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        norm, loss = gathered(norm).item(), loss.item()
        check_finite(step, loss=loss, grad_norm=norm)
        lr = lr_at(step, len(steps), args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        tokens = int(sum_over_ranks(model.tokens - before))
        log(step=step, loss=loss, accuracy=accuracy(margin), margin=margin.mean().item(),
            grad_norm=norm, lr=lr, tokens=tokens)

    if not log.finished:
        save(model, tokenizer, args.out)
        save_critic(args)
        log(finished=len(steps))
    drop_checkpoints(args.out)
    logps = dict(zip(turns, score(model, turns, args.tree_tokens, "advantages")))
    if held:
        margin = torch.stack([pair_loss(args, pair, logps, ref)[1] for pair in held])
        log(held_out_pairs=len(held), held_out_accuracy=accuracy(margin))
    add_advantages(records, {turn: advantage(p, ref[turn], args.normalize).item()
                             for turn, p in logps.items()}, emit)


# --- pairs ----------------------------------------------------------------------------------------

def trajectory_pairs(records, mode, margin):
    """[[Pair]], a task's in a list: two of its trajectories, wherever they stand, by reward."""
    by_task, groups = {}, []
    for r in records:
        turns = tuple(m[TURN] for m in agent_messages(r))
        if None not in turns:
            by_task.setdefault(task_id(r["task"]), []).append((r["reward"], turns))
    for rows in by_task.values():
        best = max(rows, key=lambda row: row[0])
        if mode == "all":
            compared = [(a, b) for a in rows for b in rows if a[0] - b[0] > margin - 1e-9]
        else:
            compared = [(best, row) for row in rows if best[0] >= 1]
        groups.append([Pair(a[1], b[1], gap=a[0] - b[0]) for a, b in compared if a[0] > b[0]])
    return [pairs for pairs in groups if pairs]


def prepare(args, records):
    """Fills `records` from stdin, makes pairs of them, and holds some out.

    Returns ({turn: reference turn}, [[Pair]] to train on, [Pair] held out, Pictures or None).
    """
    path, tokenizer, config = find_model(args.model)
    if has_vision(config) and args.dry_run:
        fail("--dry_run does not draw pages: give a --model that does not see")
    pictures = Pictures(path, config, args.picture_tokens) if has_vision(config) else None
    ref_of = read_stdin(args, ["reward"], records, vars(args), tokenizer, pictures)
    groups = trajectory_pairs(records, args.pairs, args.margin)
    if not groups and args.head != "teacher":
        lack = "a solved and a worse one" if args.pairs == "best" else "two that differ by --margin"
        fail(f"no pairs in {len(records)} trajectories: no task has {lack} (--pairs all --margin 0 "
             "takes whatever differs; collect.py -k draws more per task)")
    rng("held out", args.seed).shuffle(groups)
    few = min(math.ceil(args.held_out * len(groups)), len(groups) - 1)  # one task always trains
    return ref_of, groups[few:], list(chain(*groups[:few])), pictures


# --- what the critic reads ------------------------------------------------------------------------

def critic_turns(critic, tokenizer, task, history, actions, thinking=0, pictures=None):
    """[(turn, reference turn)] of actions after a history, what pi and what pi_ref read.

    They are the same, unless --ref_context agent takes c from the reference turn's prompt.
    critic: {flag: value} of head, hidden_info and ref_context. actions: messages or candidates.
    With pictures, a message's page stands behind it, and the page of c replaces the text of c.
    """
    def picture(text):
        return pictures.ids(extract_page(text)) if pictures else ()

    def prompt_ids(hidden):
        messages = [{**m, PICTURE: picture(m["content"]) if m["role"] == "assistant" else ()}
                    for m in history]
        if picture(hidden):
            messages[0][PICTURE] = picture(hidden)
        elif hidden:
            messages = with_hidden(messages, hidden)
        return packed(render(tokenizer, messages, thinking))

    def ids_of(action):
        if critic["head"] in LINEAR:  # it may judge another model's tokens
            return action_ids(tokenizer, action, False, picture(raw_text(action)))
        return action_ids(tokenizer, action)

    prompt = prompt_ids(hidden_information(task) if critic["hidden_info"] else "")
    ref_prompt = prompt if critic["ref_context"] == "hidden" else prompt_ids("")
    return [((prompt, ids), (ref_prompt, ids)) for ids in map(ids_of, actions)]


def read_turns(critic, tokenizer, records, max_length, pictures=None):
    """Sets action[TURN] for the agent's messages and candidates: their turn, None if too long.

    Returns {turn: reference turn} of those that fit. critic: as for critic_turns.
    """
    ref_of, too_long = {}, 0
    for r in records:
        thinking = r.get("meta", {}).get("thinking", 0)  # its dialogue was sampled so
        for history, actions in actions_of(r):
            turns = critic_turns(critic, tokenizer, r["task"], history, actions, thinking, pictures)
            for action, (turn, ref_turn) in zip(actions, turns):
                fits = sum(map(len, turn)) <= max_length
                action[TURN] = turn if fits else None
                too_long += not fits
                if fits:
                    ref_of[turn] = ref_turn
    if too_long:
        say(f"{too_long} messages and candidates are longer than --max_length and are left out, "
            "and so are trajectories with such a message")
    return ref_of


def read_stdin(args, fields, records, critic, tokenizer, pictures):
    """Fills `records`, which need `fields`, and draws their pages; returns what read_turns does."""
    records += read_jsonl(sys.stdin, needs("dialogue_history", *fields, to_train=True))
    if pictures:
        draw(args, records, pictures)
    return read_turns(critic, tokenizer, records, args.max_length, pictures)


def draw(args, records, pictures):
    """Adds the pages that the critic looks at to the Pictures: hidden ones and the agent's."""
    pages = set()
    for r in records:
        texts = [hidden_information(r["task"])]
        for _, actions in actions_of(r):
            texts += [action.get(key) or "" for action in actions for key in ("content", "output")]
        if environment(r["task"]).pages:
            pages.update(map(extract_page, texts))
    folder = os.path.join(args.out, "pictures")
    for page, file in draw_pages(args, sorted(pages - {""}), folder).items():
        pictures.add(page, file)


def add_advantages(records, advantages, emit):
    """Writes the records, with advantages[turn] in the place of each action's turn."""
    for r in records:
        for action in chain(*(actions for _, actions in actions_of(r))):
            turn = action.pop(TURN)
            action.pop("advantage", None)  # another critic's
            if turn is not None:
                action["advantage"] = advantages[turn]
        emit(r)


# --- a finished critic, for --score 1 and collect.py --critic -------------------------------------

def save_critic(args):
    """Writes critic.json, for load_critic."""
    about = {name: getattr(args, name) for name in KEPT}
    about["ref"] = os.path.abspath(args.model) if os.path.isdir(args.model) else args.model
    about["ref_weights"] = base_digest(args.model)
    if RANK == 0:
        with writing(os.path.join(args.out, "critic.json")) as part, open(part, "w") as f:
            json.dump(about, f)


def load_critic(folder, device, **options):
    """(critic.json's dict, tokenizer, models, Pictures or None) of a finished run's --out.

    models: [pi, pi_ref], or [pi] where a head gives A. options: see model.load.
    """
    with fail_on_error(f"no critic in {folder}, critic.json of a finished train_critic.py"):
        with open(os.path.join(folder, "critic.json")) as f:
            critic = json.load(f)
        critic = {name: critic[name] for name in (*KEPT, "ref", "ref_weights")}
    path, tokenizer, config = find_model(folder)
    ref, has_head = critic["ref"], critic["head"] in LINEAR
    models = [load(path, device, head=has_head, **options)[0]]
    if not has_head:
        if weights_digest(find_model(ref, weights=True)[0]) != critic["ref_weights"]:
            fail(f"{ref} has other weights now than the model that the critic in {folder} began as")
        models.append(load(ref, device, **options)[0])
    pictures = Pictures(path, config, critic["picture_tokens"]) if has_vision(config) else None
    for model in models:
        model.pictures = pictures
    return critic, tokenizer, models, pictures


def score_turns(critic, models, ref_of, tree_tokens):
    """{turn: its advantage, a float} of {turn: reference turn}, by the models of load_critic."""
    logps = score(models[0], list(ref_of), tree_tokens)
    ref_logps = [torch.zeros(1)] * len(ref_of)  # a head's value has no reference
    if len(models) > 1:
        ref_logps = score(models[1], list(ref_of.values()), tree_tokens)
    return {turn: advantage(p, ref, critic["normalize"]).item()
            for turn, p, ref in zip(ref_of, logps, ref_logps)}


def score_only(args, emit, device):
    """--score 1: writes stdin's records with the advantages of the finished critic in --out."""
    records = []
    critic, tokenizer, models, pictures = load_critic(args.out, device, **load_options(args))
    ref_of, pictures = from_rank_0(
        lambda: (read_stdin(args, [], records, critic, tokenizer, pictures), pictures))
    for model in models:
        model.pictures = pictures
    add_advantages(records, score_turns(critic, models, ref_of, args.tree_tokens), emit)


if __name__ == "__main__":
    run(main, ARGS)
