"""Stage 2: the policy, trained turn by turn on candidates that the critic ranked; it never reads hidden information.

    loss = -log sigmoid( beta log[pi(a+|o) / pi_ref(a+|o)] - beta log[pi(a-|o) / pi_ref(a-|o)] )               (eq. 4)
           + nll_coef NLL(a+)

--loss dpo    a+ from the top half, a- from the bottom half of a turn's candidates by advantage: SWEET-RL; with --mix,
              pairs of whole trajectories among them
--loss mtdpo  the same loss on whole trajectories, better against worse by reward: multi-turn DPO, no critic
--loss rft    NLL of solved trajectories: rejection fine-tuning; with --all 1 of everything: supervised fine-tuning

    python train_policy.py --loss rft --all 1 --model tiny --out runs/base < demos.jsonl     # makes the tiny base
    python train_policy.py --model runs/base --out runs/sweet < scored.jsonl
    torchrun --nproc_per_node=8 train_policy.py --resume 1 --out runs/sweet < scored.jsonl
    python train_policy.py --loss mtdpo --model runs/base --out runs/mtdpo < trajectories.jsonl
"""
from utils import (SIGNALS, Log, digest, drop_checkpoints, fail, finite, from_rank_0, join, lr_at, machine_flags, most,
                   open_stdout, parser, read_jsonl, rng, run, say, summed)

import os
import sys
from itertools import cycle

import torch
import torch.nn.functional as F

from colbench import agent_messages, task_id
from train_critic import batches, needed, trajectory_pairs  # the pairs and the order of the critic

PAPER = {"dpo": {"batch_size": 8, "epochs": 1}, "mtdpo": {"batch_size": 8, "epochs": 4},
         "rft": {"batch_size": 32, "epochs": 4}}


def get_args(argv=None):
    p = parser(__doc__)
    p.add_argument("--model", default="meta-llama/Llama-3.1-8B-Instruct",
                   help="pi_ref, and where pi starts; tiny: a new one whose words are those of the records")
    p.add_argument("--out", required=True, help="new directory for the policy and its metrics.jsonl")
    p.add_argument("--loss", choices=["dpo", "mtdpo", "rft"], default="dpo")
    # examples
    p.add_argument("--pairs_per_turn", type=int, default=4, help="dpo: pairs drawn from each turn's candidates")
    p.add_argument("--prior", type=float, default=0,
                   help="dpo: candidates are ranked by advantage + prior * the log-prob with which they were sampled")
    p.add_argument("--mix", type=float, default=0, help="dpo: pairs of trajectories, by reward, per pair of candidates")
    p.add_argument("--pairs", choices=["best", "all"], default="best", help="of trajectories: as in train_critic.py")
    p.add_argument("--margin", type=float, default=0.1, help="of trajectories: as in train_critic.py")
    p.add_argument("--all", type=int, choices=[0, 1], default=0, help="rft: 1 takes every trajectory, solved or not")
    # objective
    p.add_argument("--beta", type=float, default=0.1)
    p.add_argument("--nll_coef", type=float, default=0.01, help="weight of the chosen side's NLL per token")
    # optimization
    p.add_argument("--lr", type=float, default=2e-7, help="peak learning rate")
    p.add_argument("--batch_size", type=int, help="pairs (rft: trajectories); not given: the paper's 8 (rft: 32)")
    p.add_argument("--epochs", type=int, help="not given: the paper's 1 (mtdpo, rft: 4)")
    p.add_argument("--clip", type=float, default=1.0, help="gradient norm is clipped here")
    p.add_argument("--seed", type=int, default=0)
    machine_flags(p)
    return p.parse_args(argv)


# --- the losses -------------------------------------------------------------------------------------------------------

def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta, nll_coef):
    """(loss, margin) of one pair, eq. 4: each argument holds the (L,) log-probs of one action, or of a trajectory's."""
    margin = beta * ((chosen.sum() - ref_chosen.sum()) - (rejected.sum() - ref_rejected.sum()))
    return -F.logsigmoid(margin) - nll_coef * chosen.mean(), margin


# --- examples: (chosen, rejected), each a list of turns ---------------------------------------------------------------

def candidate_pairs(message, per_turn, prior, *seed):
    """[(a+, a-)] of one turn: random candidates of the top and of the bottom half, unless equal.

    They are ranked by A + prior log pi_ref(a|o), as by pi_ref exp(A / prior), the policy of the highest
    E[A] - prior KL(pi || pi_ref). What is malformed stays below: the critic does not know it, but it is rare.
    """
    value = lambda c: c["advantage"] + (prior and prior * c["logprob"])
    ranked = sorted((c for c in message.get("candidates", ()) if "advantage" in c), key=value, reverse=True)
    half, r = len(ranked) // 2, rng("pairs", *seed)
    pairs = [(r.choice(ranked[:half]), r.choice(ranked[-half:])) for _ in range(per_turn if half else 0)]
    return [(tuple(a["token_ids"]), tuple(b["token_ids"])) for a, b in pairs if a["token_ids"] != b["token_ids"]]


def make_examples(args, records, all_turns):
    """Groups of examples that share prefixes, [[([turn, ...], [turn, ...])]]; the right side is empty for rft."""
    if args.loss == "rft":
        groups = {}
        for r, turns in zip(records, all_turns):
            if args.all or r["reward"] >= 1:
                groups.setdefault(task_id(r["task"]), []).append((turns, []))
        return list(groups.values())
    whole = [[(all_turns[i], all_turns[j]) for i, j in pairs] for pairs in trajectory_pairs(
        records, args.pairs, args.margin).values()] if args.loss == "mtdpo" or args.mix > 0 else []
    if args.loss == "mtdpo":
        return whole
    groups = []
    for i, r in enumerate(records):
        for t, message in enumerate(agent_messages(r)):
            prompt = all_turns[i][t][0]
            pairs = candidate_pairs(message, args.pairs_per_turn, args.prior, args.seed, i, t)
            groups += [[([(prompt, a)], [(prompt, b)]) for a, b in pairs]] * bool(pairs)
    if args.mix > 0 and not whole:
        fail(f"--mix: {NOTHING['mtdpo']}")
    rng("mix", args.seed).shuffle(whole)
    left, whole = args.mix * sum(map(len, groups)), cycle(whole)  # few trajectories: each several times
    while left > 0:
        groups.append(next(whole))
        left -= len(groups[-1])
    return groups


NOTHING = {"dpo": "no turn has two unlike candidates with an advantage (collect.py --candidates 16, train_critic.py)",
           "mtdpo": "no task has a solved and a worse trajectory (--pairs all --margin 0 takes whatever differs)",
           "rft": "no trajectory is solved (--all 1 takes every one)"}


def prepare(args):
    """Reads stdin; returns (groups of examples, how many were too long, --model tiny made of the records' words)."""
    from model import action_ids, open_directory, tiny, turns_of
    needs_reward = {"dpo": args.mix > 0, "mtdpo": True, "rft": not args.all}[args.loss]
    records = list(read_jsonl(sys.stdin, lambda r: needed(r, needs_reward), skip_bad=args.skip_bad))
    made = tiny(records, args.seed) if args.model == "tiny" else None
    tokenizer = made[1] if made else open_directory(args.model)[1]
    for c in (c for r in records for m in agent_messages(r) for c in m.get("candidates", ()) if args.loss == "dpo"):
        c["token_ids"] = action_ids(tokenizer, c)  # checked; of its text where it has none
        if args.prior and "logprob" not in c:
            fail("--prior needs the candidates' logprob, which collect.py --candidates writes")
    groups = make_examples(args, records, [turns_of(tokenizer, r) for r in records])
    fits = lambda example: all(len(prompt) + len(action) <= args.max_length
                               for side in example for prompt, action in side)
    short = [g for g in ([e for e in group if fits(e)] for group in groups) if g]
    if long := sum(map(len, groups)) - sum(map(len, short)):
        say(f"{long} examples have turns longer than --max_length and are left out")
    if not short:
        fail(f"nothing to train on in {len(records)} records: {NOTHING[args.loss]}")
    return short, long, made


# --- training ---------------------------------------------------------------------------------------------------------

def main(args):
    emit, device = open_stdout(), join()
    log = None if args.dry_run else Log(args)
    from model import (action_logps, base_digest, count, deal, load, machine, micro_batches,
                       open_directory, plan, reference,
                       restore, save, save_checkpoint, whole)
    batch_size, epochs = (getattr(args, k) or PAPER[args.loss][k] for k in ("batch_size", "epochs"))
    turns_in = lambda examples: sorted({turn for example in examples for side in example for turn in side})

    groups, too_long, made = from_rank_0(lambda: prepare(args))
    steps = [batch for e in range(epochs) for batch in batches(groups, batch_size, args.seed, e)]
    turns = turns_in(example for g in groups for example in g) if args.loss != "rft" else []
    if args.dry_run:
        return emit(plan(args, made[0].lm.config if made else open_directory(args.model)[2], steps, turns_in, [turns]))
    log.begin(steps=len(steps), examples=sum(map(len, groups)), groups=len(groups), too_long=too_long,
              data=digest(groups),
              model_weights=None if made else base_digest(args.model))  # made of the data
    start = args.model
    if made:
        save(*made, start := os.path.join(args.out, "init"))
        most(0)  # a barrier: all wait until it is there
    model, tokenizer = load(start, device, args.attention, **machine(args, device))
    ref = dict(zip(turns, reference(model, turns, args.max_tokens, args.out) if turns else ()))  # once, before step 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0,
                                  fused=device.type == "cuda" and not args.offload)
    restore(model, optimizer, log)
    for step in log.steps("policy", len(steps)):
        batch, total, right = steps[step], 0.0, 0.0
        tokens = sum(len(action) for chosen, _ in batch for _, action in chosen)
        for part, weight in deal(micro_batches(batch, turns_in, args.max_tokens), turns_in):
            used = turns_in(part)
            logps = dict(zip(used, action_logps(model, used, args.max_tokens)))
            side = lambda x, turns: torch.cat([x[turn] for turn in turns])
            if args.loss == "rft":
                loss = -sum(side(logps, chosen).sum() for chosen, _ in part) * weight / tokens
            else:
                losses, margins = zip(*(dpo_loss(side(logps, a), side(logps, b), side(ref, a), side(ref, b),
                                                 args.beta, args.nll_coef) for a, b in part))
                loss = weight * sum(losses) / len(batch)
                right += weight * sum((m > 0).item() for m in margins) / len(batch)
            loss.backward()
            total += loss.item()
        norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)).item()
        total, right, signal = summed(total, right, SIGNALS.first)
        finite(step, loss=total, grad_norm=norm)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, len(steps), args.lr)
        optimizer.step()
        optimizer.zero_grad()
        log(step=step, loss=total, accuracy=None if args.loss == "rft" else right, grad_norm=norm,
            lr=group["lr"])
        if signal or args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(model, optimizer, args.out, step + 1)
        if signal:
            SIGNALS.end()
    if not log.finished:
        save(model, tokenizer, args.out)
        log(last=True, finished=len(steps), **count())
    drop_checkpoints(args.out)
    emit({"summary": "train_policy", "out": args.out, "steps": len(steps)})


if __name__ == "__main__":
    run(main, get_args())
