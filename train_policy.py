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
# Parse flags before importing torch, so that --help and flag errors are instant.
from utils import (Log, RunDirectory, fail, flag, from_rank_0, init_distributed, lr_at,
                   machine_flags, open_stdout, parser, rng, run)

from itertools import chain, cycle, product


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] < scored.jsonl")
    flag(p, "model", "meta-llama/Llama-3.1-8B-Instruct", "initial model, also the reference pi_ref")
    flag(p, "out", "runs/policy", "output directory; an interrupted run in it is resumed")
    flag(p, "loss", "dpo", "training data and objective, see above",
         choices=["dpo", "mtdpo", "rft"])
    g = p.add_argument_group("pairs")
    flag(g, "pairs_per_turn", 4, "distinct pairs to draw of a turn", least=1,
         only="with --loss dpo")
    flag(g, "logprob_weight", 0.0, "rank candidates by advantage + this x the message's log-prob "
         "when sampled", only="with --loss dpo")
    flag(g, "mix", 0.0, "trajectory pairs (as in mtdpo) per candidate pair",
         only="with --loss dpo")
    flag(g, "min_gap", None, "default: pair a task's first solved trajectory with every unsolved "
         "one; a number: any two whose rewards differ by at least it", kind=float,
         only="with --loss mtdpo or --mix")
    flag(g, "held_out", 0.0, "share of the tasks held out to measure loss and accuracy", most=1)
    flag(g, "eval_every", 100, "steps between evaluations", least=1, only="with --held_out")
    flag(g, "all", 0, "1: train on unsolved trajectories, too (plain SFT)", choices=[0, 1],
         only="with --loss rft")
    g = p.add_argument_group("objective and optimization")
    by_pairs = "with --loss dpo or mtdpo"
    flag(g, "beta", 0.1, "DPO's beta, the scale of the reward margin", only=by_pairs)
    flag(g, "nll_coef", 0.01, "weight of the chosen side's mean NLL per token", only=by_pairs)
    flag(g, "lr", 2e-7, "peak learning rate; 3%% or 3 steps of warm-up, cosine decay to a tenth")
    flag(g, "batch_size", None, "pairs per step, over all GPUs; an epoch's last step has those "
         "that are left, at the full learning rate; default: 8 as in the paper (rft: 32 "
         "trajectories)", kind=int, least=1)
    flag(g, "epochs", None, "passes over the pairs; default: 1 as in the paper (mtdpo, rft: 4)",
         kind=int, least=1)
    flag(g, "seed", 0, "random seed of the training order, the pairs and the held-out tasks")
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

from model import (Pair, Trajectory, action_logps, all_batches, by_task, hold_out, load,
                   load_checkpoint, mean_loss, model_facts, read_trajectories, save,
                   save_checkpoint, score, trajectory_pairs, turns_in, update)


# --- the loss -------------------------------------------------------------------------------------

def joined_logps(turns, logps):
    """Concatenates the log-probs of several turns into one tensor. logps: {turn: (L,)}."""
    return torch.cat([logps[turn] for turn in turns])


def dpo_loss(args, pair, logps, ref_logps):
    """Returns (loss, margin) of a pair, eq. 4; sums over turns. logps, ref_logps: {turn: (L,)}."""
    def log_ratio(turns):
        return joined_logps(turns, logps).sum() - joined_logps(turns, ref_logps).sum()

    margin = args.beta * (log_ratio(pair.chosen) - log_ratio(pair.rejected))
    nll = -joined_logps(pair.chosen, logps).mean()
    return -F.logsigmoid(margin) + args.nll_coef * nll, margin


def batch_loss(args, pairs, logps, ref_logps):
    """Returns (mean loss over the pairs, metrics). For rft, returns (mean NLL per token, {}).

    The metrics chosen_change and rejected_change are means over the pairs of log pi - log pi_ref of
    a side, in nats: by how much training has changed the log-prob of its messages.
    """
    if args.loss == "rft":
        chosen = [joined_logps(pair.chosen, logps) for pair in pairs]
        return -sum(x.sum() for x in chosen) / sum(map(len, chosen)), {}
    loss, metrics = mean_loss(dpo_loss(args, pair, logps, ref_logps) for pair in pairs)
    for side in "chosen", "rejected":
        changes = [(logps[turn] - ref_logps[turn]).sum().item()
                   for pair in pairs for turn in getattr(pair, side)]
        metrics[f"{side}_change"] = sum(changes) / len(pairs)
    return loss, metrics


# --- training -------------------------------------------------------------------------------------

def main(args):
    emit, device = open_stdout(), init_distributed()
    directory = RunDirectory(args)
    groups, held_out = from_rank_0(lambda: prepare(args))
    batches = all_batches(groups, args.batch_size, args.epochs, args.seed)
    directory.begin(groups, held_out, len(batches), **model_facts(args, device))
    summary = {"summary": "train_policy", "out": args.out, "steps": len(batches)}
    if directory.finished:
        emit(summary)
        return

    model, tokenizer = load(args.model, device, args.dtype, args, train=True)
    ref_logps = {}
    if args.loss != "rft":
        ref_logps = score(model, turns_in(chain(*groups, held_out)), args.tree_tokens, "reference")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95),
                                  weight_decay=0.0, fused=True)
    load_checkpoint(model, optimizer, directory)

    log = Log(directory, "policy", len(batches))
    for step in log.steps():
        batch, tokens_before = batches[step], model.tokens
        logps = action_logps(model, turns_in(batch), args.tree_tokens)  # {turn: (L,)}
        loss, metrics = batch_loss(args, batch, logps, ref_logps)
        lr = lr_at(step, len(batches), args.lr)
        norm = update(model, optimizer, step, loss, lr)
        log.step_row(step=step, loss=loss.item(), **metrics, grad_norm=norm, lr=lr,
                     tokens=model.tokens - tokens_before)
        if held_out and ((step + 1) % args.eval_every == 0 or step + 1 == len(batches)):
            # measured after the update; the training row of this step was measured before it
            logps = score(model, turns_in(held_out), args.tree_tokens)
            loss, metrics = batch_loss(args, held_out, logps, ref_logps)
            log.row(step=step, held_out_loss=loss.item(),
                    **{f"held_out_{name}": value for name, value in metrics.items()})
        if (step + 1) % args.save_every == 0:
            save_checkpoint(model, optimizer, args.out, step + 1)

    save(model, tokenizer, args.out)
    log.finish()
    emit(summary)


# --- pairs ----------------------------------------------------------------------------------------

def prepare(args):
    """Reads stdin; returns ([[Pair]] to train on, [Pair] held out)."""
    needs_reward = args.loss == "mtdpo" or args.mix > 0 or (args.loss == "rft" and not args.all)
    fields = ["reward"] if needs_reward else []
    trajectories = read_trajectories(args, *fields, pi_reads_c=False, ref_reads_c=False)
    groups = [(task, pairs) for task, pairs in make_groups(args, trajectories) if pairs]
    if not groups:
        fail(f"nothing to train on with --loss {args.loss}: dpo needs candidates with advantages, "
             "mtdpo a solved and an unsolved trajectory of a task, rft a solved one")
    _, held_tasks = hold_out(dict(groups), args.held_out, args.seed)
    held_tasks = set(held_tasks)
    training = [pairs for task, pairs in groups if task not in held_tasks]
    held_out = [pair for task, pairs in groups if task in held_tasks for pair in pairs]
    return training, held_out


def make_groups(args, trajectories):
    """Returns [(task id, [Pair])], one group per task or, for candidates, one per trajectory."""
    if args.loss == "rft":
        return [(task, [Pair(t.turns()) for t in group if args.all or t.record["reward"] >= 1])
                for (task, _), group in by_task(trajectories).items()]
    if args.loss == "mtdpo":
        return list(trajectory_pairs(trajectories, args.min_gap).items())
    groups = []
    for t in sorted(trajectories, key=Trajectory.sort_key):
        pairs = [pair for _, *candidates in t.actions for pair in candidate_pairs(args, candidates)]
        groups.append((t.task, pairs))
    if args.mix:
        n_pairs = args.mix * sum(len(pairs) for _, pairs in groups)
        groups += groups_to_mix(args, trajectories, n_pairs)
    return groups


def candidate_pairs(args, candidates):
    """Returns distinct [Pair] of a turn: random candidates of the upper half and of the lower.

    They are ranked by A + w logprob, where A is a mean over tokens, logprob a sum, and w is
    --logprob_weight. If pi_ref sampled them, this ranks them by their probability under the policy
    pi_ref exp(A / w), which maximizes E[A] - w KL(pi || pi_ref). A truncated candidate is never
    chosen, because it has no end token.
    """
    def value(candidate):
        fields = candidate.fields
        if args.logprob_weight and "logprob" not in fields:
            fail("--logprob_weight needs the candidates' logprob: use collect.py --candidates")
        return fields["advantage"] + args.logprob_weight * fields.get("logprob", 0)

    scored = [c for c in candidates if c.turn and "advantage" in c.fields]
    ranked = sorted(scored, key=value, reverse=True)
    half = len(ranked) // 2  # an odd one out in the middle is skipped
    pairs = [Pair((chosen.turn,), (rejected.turn,), value(chosen) - value(rejected))
             for chosen, rejected in product(ranked[:half], ranked[len(ranked) - half:])
             if value(chosen) > value(rejected) and not chosen.fields.get("cut")]
    # seeded by the candidates' token ids, not by the order of the records
    rng("pairs", args.seed, *(c.turn.action for c in ranked)).shuffle(pairs)
    distinct = {(pair.chosen, pair.rejected): pair for pair in pairs
                if pair.chosen != pair.rejected}
    return list(distinct.values())[:args.pairs_per_turn]


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


if __name__ == "__main__":
    run(main, ARGS)
