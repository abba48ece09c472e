"""Stage 2: train the policy by DPO, turn by turn, on the candidates that the critic ranked.

    loss = -log sigmoid( beta log[pi(a+|o) / pi_ref(a+|o)] - beta log[pi(a-|o) / pi_ref(a-|o)] )
           + nll_coef NLL(a+)                                                               (eq. 4)

Log-probs are sums over tokens. The policy never reads the hidden information. --loss selects:

    dpo    SWEET-RL: a+ from the upper, a- from the lower half of a turn's candidates by advantage;
           --mix adds pairs of whole trajectories
    mtdpo  multi-turn DPO, without a critic: a+ and a- are trajectories of a task, ranked by reward
    rft    rejection fine-tuning: NLL of the solved trajectories; --all 1: of all (plain SFT)

Left out on purpose: online sampling (instead, sample a second round with the trained policy), LoRA
(lora.diff adds it), and a Trainer class: each script has a loop that you can change by itself.

    python train_policy.py --loss rft --all 1 --out runs/base < demos.jsonl
    python train_policy.py --model runs/base --out runs/sweet < scored.jsonl
    torchrun --nproc_per_node=8 train_policy.py < scored.jsonl
    python train_policy.py --loss mtdpo --model runs/base --out runs/mtdpo < trajectories.jsonl
"""
import time
from itertools import chain, cycle, product

import torch
import torch.nn.functional as F

from model import (Pair, Trajectory, all_batches, backward, check_finite, clip_gradient,
                   comparable_groups, forward, hold_out, load, load_checkpoint, make_optimizer,
                   mean_over_pairs, measure, pair_accuracy, read_trajectories, run_facts, save,
                   save_checkpoint, trajectory_pairs, turn_logps, turns_in)
from utils import (RANK, RunLog, fail, from_rank_0, init_distributed, lr_at, machine_flags, parser,
                   positive, rng, run, say)


def get_args(argv=None):
    # A run is resumed only with equal flags, but for those that RunLog.MAY_CHANGE names.
    p = parser(__doc__, "%(prog)s [flags] < scored.jsonl")
    p.add_argument("--model", default="meta-llama/Llama-3.1-8B-Instruct",
                   help="initial model, also the reference pi_ref")
    p.add_argument("--out", default="runs/policy",
                   help="output directory; an interrupted run in it is resumed")
    p.add_argument("--loss", default="dpo", choices=[*LOSSES],
                   help="training data and objective, see above")
    g = p.add_argument_group("pairs")
    g.add_argument("--pairs_per_turn", type=positive, default=4,
                   help="dpo: distinct pairs of a turn")
    g.add_argument("--logprob_weight", type=float, default=0.0,
                   help="dpo: rank candidates by advantage + this x log-prob under pi_ref")
    g.add_argument("--mix", type=float, default=0.0,
                   help="dpo: trajectory pairs, as in mtdpo, per candidate pair")
    g.add_argument("--min_gap", type=float, help="pair any two trajectories whose rewards differ "
                   "by this; default: the first solved one with every unsolved one")
    g.add_argument("--held_out", type=float, default=0.0,
                   help="share of tasks not trained on, to measure loss and accuracy")
    g.add_argument("--eval_every", type=positive, default=100,
                   help="steps between such measurements")
    g.add_argument("--all", type=int, default=0, choices=[0, 1],
                   help="rft: 1: train on unsolved trajectories, too (plain SFT)")
    g = p.add_argument_group("objective and optimization")
    g.add_argument("--beta", type=float, default=0.1, help="DPO's beta, the scale of the margin")
    g.add_argument("--nll_coef", type=float, default=0.01, help="weight of the chosen side's NLL")
    g.add_argument("--lr", type=float, default=2e-7,
                   help="peak learning rate; short warm-up, cosine decay to a tenth")
    g.add_argument("--batch_size", type=positive, help="pairs per step, over all GPUs; the last "
                   "step of an epoch may have fewer; default: 8 (rft: 32 trajectories)")
    g.add_argument("--epochs", type=positive,
                   help="passes over the pairs; default: 1 (mtdpo, rft: 4)")
    g.add_argument("--seed", type=int, default=0, help="of the order, pairs and held-out tasks")
    machine_flags(p)
    args = p.parse_args(argv)
    if args.batch_size is None:
        args.batch_size = 32 if args.loss == "rft" else 8
    if args.epochs is None:
        args.epochs = 4 if args.loss in ("mtdpo", "rft") else 1
    return args


# --- pairs ----------------------------------------------------------------------------------------

def read(args):
    """Returns [Trajectory] of stdin."""
    needs_reward = args.loss == "mtdpo" or args.mix > 0 or (args.loss == "rft" and not args.all)
    fields = ["reward"] if needs_reward else []
    return read_trajectories(args, *fields, pi_reads_hidden=False, ref_reads_hidden=False)


def make_pairs(args, trajectories, ref_logps):
    """Returns ([(task id, [Pair])] to train on, [Pair] held out). ref_logps: see make_groups."""
    groups = [(task, pairs) for task, pairs in make_groups(args, trajectories, ref_logps) if pairs]
    if not groups:
        fail(f"nothing to train on with --loss {args.loss}: dpo needs candidates with advantages, "
             "mtdpo a solved and an unsolved trajectory of a task, rft a solved one")
    tasks = dict.fromkeys(task for task, _ in groups)
    train_tasks, held_tasks = map(set, hold_out(tasks, args.held_out, args.seed))
    training = [(task, pairs) for task, pairs in groups if task in train_tasks]
    held_out = [pair for task, pairs in groups if task in held_tasks for pair in pairs]
    return training, list(dict.fromkeys(held_out))  # --mix repeats pairs


def make_groups(args, trajectories, ref_logps):
    """Returns [(task id, [Pair])], one group per task or, for candidates, one per trajectory.

    An epoch keeps a group together, so that a batch's turns share prefixes.
    ref_logps: {turn: (L,) log-probs under pi_ref} of the candidates, if there is --logprob_weight.
    """
    if args.loss == "rft":
        return [(task, [Pair(t.turns()) for t in group if args.all or t.record["reward"] >= 1])
                for task, group in comparable_groups(trajectories)]
    if args.loss == "mtdpo":
        return list(trajectory_pairs(trajectories, args.min_gap).items())
    groups = []
    for t in sorted(trajectories, key=Trajectory.sort_key):
        pairs = [pair for _, *candidates in t.actions
                 for pair in candidate_pairs(args, candidates, ref_logps)]
        groups.append((t.task, pairs))
    if args.mix:
        n_pairs = args.mix * sum(len(pairs) for _, pairs in groups)
        groups += groups_to_mix(args, trajectories, n_pairs)
    return groups


def scored_candidates(candidates):
    """Returns those that can be ranked: they have an advantage, and are not too long."""
    return [c for c in candidates if c.turn and "advantage" in c.fields]


def candidate_pairs(args, candidates, ref_logps):
    """Returns distinct [Pair] of a turn: random candidates of the upper half and of the lower.

    They are ranked by A + w log pi_ref, where A is a mean over tokens, log pi_ref a sum, and w is
    --logprob_weight. That is the order of their probabilities under pi_ref exp(A / w), the policy
    that maximizes E[A] - w KL(pi || pi_ref). A truncated candidate is never chosen, because it has
    no end token.
    """
    def rank(candidate):
        if not args.logprob_weight:
            return candidate.fields["advantage"]
        logp = ref_logps[candidate.turn].sum().item()
        return candidate.fields["advantage"] + args.logprob_weight * logp

    ranked = [(rank(c), c) for c in scored_candidates(candidates)]
    ranked.sort(key=lambda x: x[0], reverse=True)
    half = len(ranked) // 2  # an odd one out in the middle is skipped
    upper, lower = ranked[:half], ranked[len(ranked) - half:]
    pairs = [Pair((chosen.turn,), (rejected.turn,), high, low)
             for (high, chosen), (low, rejected) in product(upper, lower)
             if high > low and chosen.turn != rejected.turn and not chosen.fields.get("cut")]
    # seeded by the candidates' token ids, not by the order of the records
    rng("pairs", args.seed, *(c.turn.action for _, c in ranked)).shuffle(pairs)
    distinct = {(pair.chosen, pair.rejected): pair for pair in pairs}
    return [*distinct.values()][:args.pairs_per_turn]


def candidate_logps(args, trajectories, model):
    """Returns {turn: (L,) log-probs under pi_ref} of all candidates, {} without --logprob_weight.

    Only rank 0 has trajectories. model: pi_ref.
    """
    if not args.logprob_weight:
        return {}
    candidates = [c for t in trajectories for _, *found in t.actions
                  for c in scored_candidates(found)]
    turns = from_rank_0(lambda: sorted({c.turn for c in candidates}))
    return turn_logps(model, turns, args.tree_tokens, "candidates")


def groups_to_mix(args, trajectories, n_pairs):
    """Returns [(task id, [Pair] of trajectories)], with at least n_pairs: whole tasks, repeated."""
    by_reward = list(trajectory_pairs(trajectories, args.min_gap).items())
    if not by_reward:
        fail("--mix: no task has a pair of trajectories")
    rng("mix", args.seed).shuffle(by_reward)
    groups = []
    for task, pairs in cycle(by_reward):
        if n_pairs <= 0:
            return groups
        groups.append((task, pairs))
        n_pairs -= len(pairs)


# --- the loss -------------------------------------------------------------------------------------

def joined_logps(turns, logps):
    """Concatenates the log-probs of several turns into one tensor. logps: {turn: (L,)}."""
    return torch.cat([logps[turn] for turn in turns])


@mean_over_pairs
def dpo_loss(args, pair, logps, ref_logps):
    """Returns (loss, {metric: scalar}) of a pair, eq. 4; sums over turns.

    The metrics chosen_change and rejected_change are log pi - log pi_ref of a side, in nats: by how
    much training has changed the log-prob of its messages. logps, ref_logps: {turn: (L,)}.
    """
    def log_ratio(turns):
        return joined_logps(turns, logps).sum() - joined_logps(turns, ref_logps).sum()

    chosen, rejected = log_ratio(pair.chosen), log_ratio(pair.rejected)
    margin = args.beta * (chosen - rejected)
    nll = -joined_logps(pair.chosen, logps).mean()
    loss = -F.logsigmoid(margin) + args.nll_coef * nll
    return loss, {"accuracy": pair_accuracy(chosen - rejected), "margin": margin,
                  "chosen_change": chosen, "rejected_change": rejected}


def rft_loss(args, pairs, logps, ref_logps):
    """Returns (NLL of a batch's trajectories, its mean over their tokens, {})."""
    chosen = [joined_logps(pair.chosen, logps) for pair in pairs]
    return -sum(x.sum() for x in chosen) / sum(map(len, chosen)), {}


# A new loss is a function like dpo_loss, or of a whole batch like rft_loss, and a line here;
# make_groups gives it candidate pairs.
LOSSES = {
    "dpo": dpo_loss,
    "mtdpo": dpo_loss,
    "rft": rft_loss,
}


# --- training -------------------------------------------------------------------------------------

def train(args, log, trajectories, device):
    """Trains a policy, and saves it in --out."""
    batch_loss = LOSSES[args.loss]
    model, chat = load(args.model, device, args.dtype, args, train=True)
    ref_logps = candidate_logps(args, trajectories, model)
    groups, held_out = from_rank_0(lambda: make_pairs(args, trajectories, ref_logps))
    batches = all_batches(groups, args.batch_size, args.epochs, args.seed)
    n_pairs = sum(len(pairs) for _, pairs in groups)
    say(f"{n_pairs} {'trajectories' if args.loss == 'rft' else 'pairs'}, {len(batches)} steps")
    if args.loss != "rft":
        turns = turns_in(chain(*(group for _, group in groups), held_out))
        ref_logps |= turn_logps(model, [turn for turn in turns if turn not in ref_logps],
                                args.tree_tokens, "pi_ref")
    optimizer = make_optimizer(model, args.lr)
    load_checkpoint(model, optimizer, args.out, log.step)
    log.start("policy", len(batches), pairs=n_pairs, held_out_pairs=len(held_out))

    for step in range(log.step, len(batches)):
        batch, began = batches[step], time.monotonic()
        logps, computed = forward(model, turns_in(batch), args.tree_tokens)  # {turn: (L,)}
        loss, metrics = batch_loss(args, batch, logps, ref_logps)
        loss.backward()  # as far as the log-probs,
        n_tokens = backward(model, computed)  # and from there to the weights
        norm = clip_gradient(model)
        check_finite(step, loss=loss.item(), grad_norm=norm)
        lr = lr_at(step, len(batches), args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        log.step_row(began, n_tokens, step=step, loss=loss.item(), **metrics, grad_norm=norm, lr=lr)
        if held_out and ((step + 1) % args.eval_every == 0 or step + 1 == len(batches)):
            # measured after the update; the training row of this step was measured before it
            log.row(step=step, **measure(args, model, batch_loss, held_out, ref_logps))
        if (step + 1) % args.save_every == 0:
            save_checkpoint(model, optimizer, args.out, step + 1)

    save(model, chat, args.out)
    log.finish()


def main(args):
    device = init_distributed()
    log = RunLog(args)
    trajectories = [] if RANK else read(args)  # only rank 0 has them
    log.check(run_facts(args, device, trajectories))
    if not log.finished:
        train(args, log, trajectories, device)


if __name__ == "__main__":
    run(main, get_args())
