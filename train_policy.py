"""Stage 2: the policy. It learns from pairs of candidates that the critic ranked, and never reads
the hidden information.

    loss = -log sigmoid( beta log[pi(a+|o) / pi_ref(a+|o)] - beta log[pi(a-|o) / pi_ref(a-|o)] )
           + nll_coef NLL(a+)                                                               (eq. 4)

--loss selects what it learns from:

dpo    SWEET-RL: a+ is of the upper, a- of the lower half of a turn's candidates by advantage;
       --mix adds pairs of whole trajectories
mtdpo  multi-turn DPO, without a critic: a+ and a- are trajectories of a task, ranked by reward
rft    rejection fine-tuning: the NLL of solved trajectories, or with --all 1 of all (supervised)

    python train_policy.py --loss rft --all 1 --model tiny --out runs/base < demos.jsonl
    python train_policy.py --model runs/base --out runs/sweet < scored.jsonl
    torchrun --nproc_per_node=8 train_policy.py --resume 1 --out runs/sweet < scored.jsonl
    python train_policy.py --loss mtdpo --model runs/base --out runs/mtdpo < trajectories.jsonl
"""
# utils before what loads slowly: it sets up streams and signals
from utils import (Log, barrier, check_finite, digest, drop_checkpoints, end_by_signal, fail, flag,
                   from_rank_0, init_distributed, lr_at, machine_flags, open_stdout, parser,
                   read_jsonl, rng, run, say, stop_signal, sum_over_ranks)

import os
import sys
from itertools import chain, cycle

from colbench import PIECES, agent_messages, answers, needs, task_id


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] < scored.jsonl")
    flag(p, "model", "meta-llama/Llama-3.1-8B-Instruct",
         "pi_ref, and where pi starts; tiny: a new one, with the records' words")
    flag(p, "out", None, "directory for the model and its metrics.jsonl: a new one, or with "
         "--resume a run's", required=True)
    flag(p, "loss", "dpo", "what it learns from, see above", choices=["dpo", "mtdpo", "rft"])
    g = p.add_argument_group("pairs")
    flag(g, "pairs_per_turn", 4, "dpo: pairs drawn from a turn's candidates", least=1)
    flag(g, "prior", 0.0, "dpo: rank candidates by advantage + prior * log-prob when sampled")
    flag(g, "mix", 0.0, "dpo: pairs of trajectories, as in mtdpo, for each pair of candidates")
    flag(g, "balance", 0, "dpo: 1 leaves out pairs, until answers are preferred to questions as "
         "often as questions to answers", choices=[0, 1])
    flag(g, "group_by", "turn", "dpo: pairs that stay together in a batch; a trajectory's share "
         "more", choices=["turn", "trajectory"])
    flag(g, "pairs", "best", "mtdpo, --mix: as in train_critic.py", choices=["best", "all"])
    flag(g, "margin", 0.1, "mtdpo, --mix: as in train_critic.py")
    flag(g, "all", 0, "rft: 1 takes unsolved trajectories, too", choices=[0, 1])
    g = p.add_argument_group("objective and optimization")
    flag(g, "beta", 0.1, "scale of the margin")
    flag(g, "nll_coef", 0.01, "weight of the chosen side's NLL per token")
    flag(g, "lr", 2e-7, "peak: 3%% of the steps warm up, at least 3; then a cosine to a tenth")
    flag(g, "batch_size", None, "pairs a step, over all GPUs; not given: 8, as in the paper "
         "(rft: 32)", kind=int, least=1)
    flag(g, "epochs", None, "over the pairs; not given: 1, as in the paper (mtdpo, rft: 4)",
         kind=int)
    flag(g, "max_grad_norm", 1.0, "gradients are clipped to it")
    flag(g, "seed", 0, "of the order and of the pairs drawn")
    machine_flags(p)
    return p.parse_args(argv)


if __name__ == "__main__":
    ARGS = get_args()  # before the slow imports: a wrong flag is told at once

import torch
import torch.nn.functional as F

from model import (COUNT, TURN, Pair, action_ids, action_logps, base_digest, batches,
                   compare_tokens, count_of_all_ranks, dry_run, find_model, gathered, load,
                   load_options, pick_dtype, reference_logps, restore, save, save_checkpoint, tiny,
                   trajectory_pairs, turns_in, turns_of)


# --- data -----------------------------------------------------------------------------------------

def add_turns(tokenizer, records, max_length):
    """Sets action[TURN] for the agent's messages and candidates: their turn, None if too long.

    Candidates without an advantage get none. Returns how many are too long.
    """
    too_long = 0
    for r in records:
        for message, (prompt, _) in zip(agent_messages(r), turns_of(tokenizer, r)):
            candidates = [c for c in message.get("candidates", ()) if "advantage" in c]
            for action in (message, *candidates):
                turn = prompt, action_ids(tokenizer, action)
                fits = sum(map(len, turn)) <= max_length
                action[TURN] = turn if fits else None
                too_long += not fits
    if too_long:
        say(f"{too_long} messages and candidates are longer than --max_length and are left out, "
            "and so are trajectories with such a message")
    return too_long


def candidate_pairs(candidates, per_turn, prior, *seed):
    """[Pair] of one turn: random candidates of the upper half, each with one of the lower half.

    They are ranked by A + prior * log pi_ref(a|o), the order of pi_ref exp(A / prior). That is the
    policy with the highest E[A] - prior * KL(pi || pi_ref).
    """
    def value(candidate):
        if prior and "logprob" not in candidate:
            fail("--prior needs the candidates' logprob: see collect.py --candidates")
        return candidate["advantage"] + (prior and prior * candidate["logprob"])

    ranked = [c for c in candidates if "advantage" in c and c[TURN] is not None]
    ranked.sort(key=value, reverse=True)
    half, random = len(ranked) // 2, rng("pairs", *seed)
    pairs = []
    for _ in range(per_turn if half else 0):
        better, worse = random.choice(ranked[:half]), random.choice(ranked[-half:])
        if better[TURN] != worse[TURN]:
            pairs.append(Pair((better[TURN],), (worse[TURN],), gap=value(better) - value(worse)))
    return pairs


def solved_trajectories(records, take_all):
    """{task id: [Pair]} for rft: each trajectory of reward 1, or with take_all each one, alone."""
    groups = {}
    for r in records:
        turns = tuple(m[TURN] for m in agent_messages(r))
        if None not in turns and (take_all or r["reward"] >= 1):
            groups.setdefault(task_id(r["task"]), []).append(Pair(turns))
    return groups


def balanced(groups, records, *seed):
    """The groups without some random pairs: as many answers win over questions as lose to them."""
    ends = {action[TURN] for r in records for message in agent_messages(r)
            for action in (message, *message.get("candidates", ()))
            if action.get(TURN) and answers(action)}
    wins, losses = [], []
    for pair in chain.from_iterable(groups):
        chosen, rejected = (side[-1] in ends for side in pair[:2])
        if chosen != rejected:
            (wins if chosen else losses).append(id(pair))
    few, many = sorted((wins, losses), key=len)
    left_out = set(rng("balance", *seed).sample(many, len(many) - len(few)))
    groups = [[pair for pair in pairs if id(pair) not in left_out] for pairs in groups]
    return [pairs for pairs in groups if pairs]


NOTHING = {"dpo": "no turn has two unlike candidates with an advantage "
                  "(collect.py --candidates 16, train_critic.py)",
           "mtdpo": "no task has a solved and a worse trajectory "
                    "(--pairs all --margin 0 takes whatever differs)",
           "rft": "no trajectory is solved (--all 1 takes every one)"}


def make_groups(args, records):
    """[[Pair]]: a group has the pairs of a turn, a trajectory, or a task."""
    if args.loss == "rft":
        return list(solved_trajectories(records, args.all).values())
    trajectories = []
    if args.loss == "mtdpo" or args.mix > 0:
        trajectories = list(trajectory_pairs(records, args.pairs, args.margin).values())
    if args.loss == "mtdpo":
        return trajectories
    groups = []
    for i, r in enumerate(records):
        by_turn = []
        for t, message in enumerate(agent_messages(r)):
            candidates = message.get("candidates", ())
            pairs = candidate_pairs(candidates, args.pairs_per_turn, args.prior, args.seed, i, t)
            by_turn.append(pairs)
        if args.group_by == "trajectory":
            by_turn = [[pair for pairs in by_turn for pair in pairs]]
        groups += [pairs for pairs in by_turn if pairs]
    if args.balance:
        groups = balanced(groups, records, args.seed)
    if args.mix > 0 and not trajectories:
        fail(f"--mix: {NOTHING['mtdpo']}")
    rng("mix", args.seed).shuffle(trajectories)
    missing = args.mix * sum(map(len, groups))
    for pairs in cycle(trajectories):  # where there are few, each is taken several times
        if missing <= 0:
            break
        groups.append(pairs)
        missing -= len(pairs)
    return groups


def prepare(args):
    """Returns ([[Pair]] of stdin, how many turns are too long, the tiny model).

    The last is --model tiny's (model, tokenizer), made here; None for other models.
    """
    needs_reward = {"mtdpo": True, "rft": not args.all}.get(args.loss, args.mix > 0)
    fields = ["dialogue_history", "reward"] if needs_reward else ["dialogue_history"]
    need = needs(*fields, to_train=True)
    records = list(read_jsonl(sys.stdin, need, skip_bad=args.skip_bad))
    made = tiny(records, args.seed, PIECES) if args.model == "tiny" else None
    tokenizer = made[1] if made else find_model(args.model)[1]
    too_long = add_turns(tokenizer, records, args.max_length)
    groups = make_groups(args, records)
    if not groups:
        fail(f"nothing to train on in {len(records)} records: {NOTHING[args.loss]}")
    return groups, too_long, made


# --- the loss -------------------------------------------------------------------------------------

def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta, nll_coef):
    """(loss, margin) of one pair, eq. 4: (L,) log-probs of an action, or of a trajectory's."""
    margin = beta * ((chosen.sum() - ref_chosen.sum()) - (rejected.sum() - ref_rejected.sum()))
    return -F.logsigmoid(margin) - nll_coef * chosen.mean(), margin


def pair_loss(args, pair, logps, ref):
    """(loss, margin) of a Pair, by the log-probs of its turns, {turn: (L,)}."""
    if args.loss == "rft":
        return -torch.cat([logps[turn] for turn in pair.chosen]).sum(), torch.zeros(())
    sides = pair.chosen, pair.rejected
    chosen, rejected = (torch.cat([logps[turn] for turn in side]) for side in sides)
    ref_chosen, ref_rejected = (torch.cat([ref[turn] for turn in side]) for side in sides)
    return dpo_loss(chosen, rejected, ref_chosen, ref_rejected, args.beta, args.nll_coef)


# --- training -------------------------------------------------------------------------------------

def main(args):
    emit, device = open_stdout(), init_distributed()
    log = None if args.dry_run else Log(args)
    groups, too_long, made = from_rank_0(lambda: prepare(args))
    turns = turns_in(pair for group in groups for pair in group) if args.loss != "rft" else []
    batch_size = args.batch_size or (32 if args.loss == "rft" else 8)
    epochs = args.epochs
    if epochs is None:
        epochs = 1 if args.loss == "dpo" else 4
    steps = [batch for epoch in range(epochs)
             for batch in batches(groups, batch_size, args.seed, epoch)]
    config = made[0].lm.config if made else find_model(args.model)[2]
    if args.dry_run:
        return emit(dry_run(args, config, steps, turns))
    log.begin(steps=len(steps), examples=sum(map(len, groups)), groups=len(groups),
              too_long=too_long, dtype=str(pick_dtype(args.dtype, device, config)),
              data=digest([[digest(tuple(pair)) for pair in group] for group in groups]),
              model_weights=None if made else base_digest(args.model))

    start = args.model
    if made:
        start = os.path.join(args.out, "init")
        save(*made, start)
        barrier()
    model, tokenizer = load(start, device, **load_options(args, device))
    ref = dict(zip(turns, reference_logps(model, turns, args.max_tokens, args.out)))
    fused = device.type == "cuda" and not args.offload
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95),
                                  weight_decay=0.0, fused=fused)
    restore(model, optimizer, log)

    for step in log.steps("policy", len(steps)):
        batch, before = steps[step], COUNT["tokens"]
        size, right = len(batch), {}
        if args.loss == "rft":  # its loss is a mean over tokens
            size = sum(len(action) for pair in batch for _, action in pair.chosen)
        read = turns_in(batch)
        logps = dict(zip(read, action_logps(model, read, args.max_tokens)))
        losses, margins = zip(*(pair_loss(args, pair, logps, ref) for pair in batch))
        loss = sum(losses) / size  # on all ranks the same; FSDP sums their gradients
        loss.backward()
        if args.loss != "rft":
            margin = torch.stack(margins)
            right = {"accuracy": (margin > 0).double().mean().item(),
                     "margin": margin.mean().item()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        norm, loss = gathered(norm).item(), loss.item()
        stop, tokens = sum_over_ranks(stop_signal(), COUNT["tokens"] - before)
        check_finite(step, loss=loss, grad_norm=norm)
        lr = lr_at(step, len(steps), args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        log(step=step, loss=loss, **right, grad_norm=norm, lr=lr, **log.speed(tokens))
        if stop or (args.save_every and (step + 1) % args.save_every == 0):
            save_checkpoint(model, optimizer, args.out, step + 1)
        if stop:
            end_by_signal()
    if not log.finished:
        save(model, tokenizer, args.out)
        log(last=True, finished=len(steps), **compare_tokens(steps, **count_of_all_ranks()))
    drop_checkpoints(args.out)
    emit({"summary": "train_policy", "out": args.out, "steps": len(steps)})


if __name__ == "__main__":
    run(main, ARGS)
