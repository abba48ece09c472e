"""Stage 2: the policy. It learns from pairs of candidates that the critic ranked, and never reads
the hidden information.

    loss = -log sigmoid( beta log[pi(a+|o) / pi_ref(a+|o)] - beta log[pi(a-|o) / pi_ref(a-|o)] )
           + nll_coef NLL(a+)                                                               (eq. 4)

--loss selects what it learns from:

    dpo    SWEET-RL: a+ is of the upper, a- of the lower half of a turn's candidates by advantage;
           --mix adds pairs of whole trajectories
    mtdpo  multi-turn DPO, without a critic: a+ and a- are trajectories of a task, by reward
    rft    rejection fine-tuning: the NLL of solved trajectories, with --all 1 of all (supervised)

    python train_policy.py --loss rft --all 1 --out runs/base < demos.jsonl
    python train_policy.py --model runs/base --out runs/sweet < scored.jsonl
    torchrun --nproc_per_node=8 train_policy.py --out runs/sweet < scored.jsonl
    python train_policy.py --loss mtdpo --model runs/base --out runs/mtdpo < trajectories.jsonl
"""
# utils before what loads slowly: a wrong flag is told at once
from utils import (Log, check_finite, fail, flag, from_rank_0, init_distributed, lr_at,
                   machine_flags, open_stdout, parser, read_jsonl, rng, run)

import sys
from functools import partial
from itertools import chain, cycle

from colbench import agent_messages, needs, task_id


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] < scored.jsonl")
    flag(p, "model", "meta-llama/Llama-3.1-8B-Instruct", "pi_ref, and where pi starts")
    flag(p, "out", None, "the run's directory: a new one, or one to go on in", required=True)
    flag(p, "loss", "dpo", "what it learns from: see above",
         choices=["dpo", "mtdpo", "rft"])
    g = p.add_argument_group("pairs")
    flag(g, "pairs_per_turn", 4, "dpo: pairs drawn from a turn's candidates", least=1)
    flag(g, "logprob_weight", 0.0, "dpo: rank candidates by advantage + this * log-prob when "
         "sampled")
    flag(g, "mix", 0.0, "dpo: pairs of trajectories, as in mtdpo, for each pair of candidates")
    flag(g, "margin", None, "mtdpo, --mix: as in train_critic.py", kind=float)
    flag(g, "held_out", 0.0, "share of the tasks that are not trained on, but measured",
         most=1)
    flag(g, "eval_every", 100, "steps between measures of held-out pairs", least=1)
    flag(g, "all", 0, "rft: 1 takes unsolved trajectories, too", choices=[0, 1])
    g = p.add_argument_group("objective and optimization")
    flag(g, "beta", 0.1, "scale of the margin")
    flag(g, "nll_coef", 0.01, "weight of the chosen side's NLL per token")
    flag(g, "lr", 2e-7, "peak: 3%% of the steps warm up, then a cosine to a tenth")
    flag(g, "batch_size", None, "pairs a step, over all GPUs; not given: 8, as in the paper "
         "(rft: 32)", kind=int, least=1)
    flag(g, "epochs", None, "over the pairs; not given: 1, as in the paper (mtdpo, rft: 4)",
         kind=int)
    flag(g, "seed", 0, "of the order, and of pairs and held-out tasks drawn")
    machine_flags(p)
    args = p.parse_args(argv)
    if args.batch_size is None:
        args.batch_size = 32 if args.loss == "rft" else 8
    if args.epochs is None:
        args.epochs = 4 if args.loss in ("mtdpo", "rft") else 1
    return args


if __name__ == "__main__":
    ARGS = get_args()

import torch
import torch.nn.functional as F

from model import (TURN, Pair, accuracy, action_logps, base_digest, batches, find_model, gathered,
                   load_sharded, pick_dtype, restore, save, save_checkpoint, score, tell_cost,
                   try_save, turns_in)
from train_critic import by_sample, hold_out, measure, read_turns, trajectory_pairs


# --- the loss -------------------------------------------------------------------------------------

def tokens_of(turns, logps):
    """The log-probs of some turns' actions in one tensor; logps: {turn: (L,)}."""
    return torch.cat([logps[turn] for turn in turns])


def dpo_loss(args, pair, logps, ref):
    """(loss, margin) of a Pair, eq. 4: of actions, or of all actions of trajectories.

    logps, ref: {turn: (L,)} by pi and pi_ref.
    """
    chosen, rejected = tokens_of(pair.chosen, logps), tokens_of(pair.rejected, logps)
    ref_chosen, ref_rejected = tokens_of(pair.chosen, ref), tokens_of(pair.rejected, ref)
    margin = args.beta * ((chosen.sum() - ref_chosen.sum()) - (rejected.sum() - ref_rejected.sum()))
    return -F.logsigmoid(margin) - args.nll_coef * chosen.mean(), margin


def batch_loss(args, pairs, logps, ref):
    """(mean loss of some pairs, {"accuracy", "margin"}); of rft a mean over tokens, no margin."""
    if args.loss == "rft":
        chosen = [tokens_of(pair.chosen, logps) for pair in pairs]
        return -sum(logps.sum() for logps in chosen) / sum(map(len, chosen)), {}
    losses, margins = zip(*(dpo_loss(args, pair, logps, ref) for pair in pairs))
    margin = torch.stack(margins)
    return sum(losses) / len(pairs), {"accuracy": accuracy(margin), "margin": margin.mean().item()}


# --- training -------------------------------------------------------------------------------------

def main(args):
    emit, device = open_stdout(), init_distributed()
    log = Log(args)
    groups, held = from_rank_0(lambda: prepare(args))
    steps = [batch for epoch in range(args.epochs)
             for batch in batches(groups, args.batch_size, seed=(args.seed, epoch))]
    log.begin(data=chain(*groups, held), steps=len(steps), pairs=sum(map(len, groups)),
              held_out_pairs=len(held), dtype=str(pick_dtype(args.dtype, device)),
              model_weights=base_digest(args.model))
    summary = {"summary": "train_policy", "out": args.out, "steps": len(steps)}
    if log.finished:
        return emit(summary)

    model, tokenizer = load_sharded(args.model, device, args)
    try_save(model, tokenizer, args.out)
    all_turns, ref = turns_in(chain(*groups, held)), {}
    tell_cost(model, all_turns)
    if args.loss in ("dpo", "mtdpo"):
        ref = dict(zip(all_turns, score(model, all_turns, args.tree_tokens, "reference")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95),
                                  weight_decay=0.0, fused=True)
    restore(model, optimizer, log)

    save_step = partial(save_checkpoint, model, optimizer, args.out)
    for step in log.steps("policy", save_step):
        batch, tokens_before = steps[step], model.tokens
        turns = turns_in(batch)
        logps = dict(zip(turns, action_logps(model, turns, args.tree_tokens)))
        loss, metrics = batch_loss(args, batch, logps, ref)
        loss.backward()  # on all ranks the same loss; FSDP sums their gradients
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm, loss = gathered(norm).item(), loss.item()
        check_finite(step, loss=loss, grad_norm=norm)
        lr = lr_at(step, len(steps), args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        log(step=step, loss=loss, **metrics, grad_norm=norm, lr=lr,
            tokens=model.tokens - tokens_before)
        if held and ((step + 1) % args.eval_every == 0 or step + 1 == len(steps)):
            # by the weights after this step; the row above is by those before it
            log(step=step, **measure(batch_loss, args, model, held, ref))

    save(model, tokenizer, args.out)
    log.finish()
    emit(summary)


# --- pairs ----------------------------------------------------------------------------------------

def prepare(args):
    """([[Pair]] to train on, [Pair] held out), which make_groups makes of stdin's records."""
    by_reward = (args.loss == "mtdpo" or (args.loss == "dpo" and args.mix > 0)
                 or (args.loss == "rft" and not args.all))
    fields = ["dialogue_history", "reward"] if by_reward else ["dialogue_history"]
    records = by_sample(read_jsonl(sys.stdin, needs(*fields, to_train=True)))
    _, tokenizer, config = find_model(args.model)
    read_turns(tokenizer, config, records, args.max_length, pi_reads_c=False, ref_reads_c=False)
    groups = [(task, pairs) for task, pairs in make_groups(args, records) if pairs]
    if not groups:
        why = ("no trajectory is solved (--all 1 takes every one)" if args.loss == "rft" else
               "no turn has two unlike candidates with an advantage (collect.py --candidates 16, "
               "train_critic.py), which --loss mtdpo does not need")
        fail(f"nothing to train on in {len(records)} records: {why}")
    _, held_out = hold_out(dict(groups), args.held_out, args.seed)
    held_out = set(held_out)  # tasks: some have several groups
    return ([pairs for task, pairs in groups if task not in held_out],
            [pair for task, pairs in groups if task in held_out for pair in pairs])


def make_groups(args, records):
    """[(task id, [Pair])]: pairs of a task's trajectories, or of a trajectory's candidates."""
    if args.loss == "rft":
        by_task = {}
        for r in records:
            turns = tuple(message[TURN] for message in agent_messages(r))
            if None not in turns and (args.all or r["reward"] >= 1):
                by_task.setdefault(task_id(r["task"]), []).append(Pair(turns))
        return list(by_task.items())
    if args.loss == "mtdpo":
        return list(trajectory_pairs(records, args.margin).items())
    groups = []
    for r in records:
        of_turns = [message.get("candidates", ()) for message in agent_messages(r)]
        pairs = [pair for candidates in of_turns for pair in candidate_pairs(args, candidates)]
        groups.append((task_id(r["task"]), pairs))
    if args.mix:
        groups += mixed_in(args, records, args.mix * sum(len(pairs) for _, pairs in groups))
    return groups


def mixed_in(args, records, number):
    """[(task id, [Pair])] of trajectories, at least `number` pairs; few tasks come again."""
    by_task = list(trajectory_pairs(records, args.margin).items())
    rng("mix", args.seed).shuffle(by_task)
    endless, groups = cycle(by_task), []
    while number > 0:
        groups.append(next(endless))
        number -= len(groups[-1][1])
    return groups


def candidate_pairs(args, candidates):
    """[Pair] of one turn: random candidates of the upper half, each with one of the lower half.

    They are ranked by A + w log pi_ref(a|o), the order of pi_ref exp(A / w): that is the policy
    with the highest E[A] - w KL(pi || pi_ref). w: --logprob_weight.
    """
    def value(candidate):
        if not args.logprob_weight:
            return candidate["advantage"]
        if "logprob" not in candidate:
            fail("--logprob_weight needs the candidates' logprob: see collect.py --candidates")
        return candidate["advantage"] + args.logprob_weight * candidate["logprob"]

    rated = [c for c in candidates if c.get(TURN) and "advantage" in c]
    ranked = sorted(rated, key=value, reverse=True)
    half = len(ranked) // 2  # of an odd number the middle one is left out
    if not half:
        return []
    # by the candidates' ids: records may come in any order
    draw = rng("pairs", args.seed, *(c[TURN][1] for c in ranked)).choice
    pairs = []
    for _ in range(args.pairs_per_turn):
        better, worse = draw(ranked[:half]), draw(ranked[-half:])
        gap = value(better) - value(worse)
        if better[TURN] != worse[TURN] and gap > 0:
            pairs.append(Pair((better[TURN],), (worse[TURN],), gap))
    return pairs


if __name__ == "__main__":
    run(main, ARGS)
