"""Stage 1: train a critic that sees the hidden information, then score every message with it.

    A(o_t, a_t, c) = 1/L_t sum_l log [ pi(a_t^l | o_t, a_t^<l, c) / pi_ref(a_t^l | o_t, a_t^<l, c) ]
    loss = -log sigmoid( beta sum_t A(o_t+, a_t+, c) - beta sum_t A(o_t-, a_t-, c) )
           + nll_coef NLL(tau+)

The advantage A (eq. 3 of the paper) is the mean log-ratio, over the L_t tokens of message a_t, of
the critic pi to its initial checkpoint pi_ref. Both read the dialogue o_t and the hidden
information c. The loss (eq. 2) is a Bradley-Terry model: of two trajectories of a task, the one
with the higher reward, tau+, should have the larger sum of advantages. The NLL is averaged over
the tokens of a turn, then over turns. A *turn* is (prompt, action), two strings: see model.py.

Scoring adds an `advantage` to every message and candidate. Any model can score: --score pi with
--model pi_ref. The untrained critic is the agent itself, as pi and as a pi_ref that does not read
c: A is then the mean of log pi(a | o, c) - log pi(a | o).

Left out on purpose: a value head (value.diff), because the policy trained on its scores ended 75 %
of its episodes without an answer (RESULTS.md); early stopping (choose --epochs by the held-out
metrics instead); and a Trainer class: each script has a loop that you can change by itself.

    python train_critic.py --model runs/base --out runs/critic < in.jsonl > scored.jsonl
    torchrun --nproc_per_node=8 train_critic.py < in.jsonl > scored.jsonl
    python train_critic.py --score runs/critic < more.jsonl > scored.jsonl  # never trains
    python train_critic.py --score runs/base --model runs/base --ref_context agent < in.jsonl
"""
import gc
import time
from itertools import chain

import torch
import torch.nn.functional as F

from colbench import content_hash
from model import (all_batches, backward, check_finite, clip_gradient, find_model, forward,
                   hold_out, load, load_checkpoint, make_optimizer, mean_over_pairs, measure,
                   pair_accuracy, read_trajectories, reference_logps, run_facts, save,
                   save_checkpoint, trajectory_pairs, turn_logps, turns_in, weights_digest)
from utils import (RANK, RunLog, changed_scripts, fail, from_rank_0, init_distributed, lr_at,
                   machine_flags, open_stdout, parser, positive, read_metrics, run, say)


def get_args(argv=None):
    # A run is resumed only with equal flags, but for those that RunLog.MAY_CHANGE names.
    p = parser(__doc__, "%(prog)s [flags] < trajectories.jsonl > scored.jsonl")
    p.add_argument("--model", help="initial model, also the reference pi_ref; default: that of "
                   "the critic in --score; to train, meta-llama/Llama-3.1-8B-Instruct")
    p.add_argument("--out", default="runs/critic",
                   help="train a critic in this directory, or resume its training, then score")
    p.add_argument("--score", metavar="DIR", help="train nothing, only score, with this model as "
                   "pi: a trained critic, or any other")
    g = p.add_argument_group("pairs")
    g.add_argument("--min_gap", type=float, help="pair any two trajectories whose rewards differ "
                   "by this; default: the first solved one with every unsolved one")
    g.add_argument("--held_out", type=float, default=0.1,
                   help="share of tasks not trained on, to measure loss and accuracy")
    g.add_argument("--eval_every", type=positive, default=100,
                   help="steps between such measurements")
    g = p.add_argument_group("objective and optimization")
    g.add_argument("--ref_context", choices=["hidden", "agent"], help="pi_ref reads the hidden "
                   "information, too (eq. 3), or only what the agent reads; default: as the critic "
                   "in --score; agent for any other model there; to train, hidden")
    g.add_argument("--beta", type=float, default=0.1, help="scale of the reward margin")
    g.add_argument("--nll_coef", type=float, default=0.01, help="weight of the chosen side's NLL")
    g.add_argument("--lr", type=float, default=2e-7,
                   help="peak learning rate; short warm-up, cosine decay to a tenth")
    g.add_argument("--batch_size", type=positive, default=8,
                   help="pairs per step, over all GPUs; the last step of an epoch may have fewer")
    g.add_argument("--epochs", type=positive, default=4, help="passes over the pairs")
    g.add_argument("--seed", type=int, default=0, help="of the training order and held-out tasks")
    machine_flags(p)
    args = p.parse_args(argv)
    if not args.score:
        args.model = args.model or "meta-llama/Llama-3.1-8B-Instruct"
    critics_flags = read_critic(args.score).get("args", {}) if args.score else {}
    args.model = args.model or critics_flags.get("model")
    usual = "agent" if args.score else "hidden"  # else the untrained critic would give all 0
    args.ref_context = args.ref_context or critics_flags.get("ref_context", usual)
    if not args.model:
        fail(f"--model is needed, because {args.score} is no trained critic, which names its own")
    return args


def read_critic(folder):
    """Returns the first row of the metrics of a critic's training, {} if another model is there.

    In it are args, the flags; model_weights, a hash of those of pi_ref; and tasks, the content
    hashes of those that it was trained on.
    """
    row, *_ = read_metrics(folder) or [{}]
    return row if "tasks" in row else {}


# --- data -----------------------------------------------------------------------------------------

def read(args):
    """Returns [Trajectory] of stdin. pi reads the hidden information, pi_ref by --ref_context."""
    needed = [] if args.score else ["reward"]
    return read_trajectories(args, *needed, pi_reads_hidden=True,
                             ref_reads_hidden=args.ref_context == "hidden")


def ref_turns(trajectories):
    """Returns {turn: the turn that pi_ref reads} of all messages and candidates."""
    actions = chain(*(chain(*t.actions) for t in trajectories))
    return {action.turn: action.ref_turn for action in actions if action.turn}


def make_pairs(args, trajectories):
    """Returns ([(task id, [Pair])] to train on, [Pair] held out)."""
    pairs_by_task = trajectory_pairs(trajectories, args.min_gap)
    if not pairs_by_task:
        fail("no task has a pair of trajectories: sample more per task with collect.py -k, or pair "
             "by --min_gap 0")
    train_tasks, held_tasks = hold_out(pairs_by_task, args.held_out, args.seed)
    held_out = [pair for task in held_tasks for pair in pairs_by_task[task]]
    return [(task, pairs_by_task[task]) for task in train_tasks], held_out


# --- the loss -------------------------------------------------------------------------------------

def advantage(logps, ref_logps):
    """Eq. 3 for one action: two (L,) tensors of log-probs to a scalar."""
    return (logps - ref_logps).mean()


def trajectory_value(turns, logps, ref_logps):
    """Returns the value by which eq. 2 ranks trajectories, a scalar: the sum of advantages."""
    return sum(advantage(logps[turn], ref_logps[turn]) for turn in turns)


@mean_over_pairs
def critic_loss(args, pair, logps, ref_logps):
    """Returns (loss, {metric: scalar}) of a pair of trajectories, eq. 2.

    logps, ref_logps: {turn: (L,)}.
    """
    chosen = trajectory_value(pair.chosen, logps, ref_logps)
    rejected = trajectory_value(pair.rejected, logps, ref_logps)
    nll = -sum(logps[turn].mean() for turn in pair.chosen) / len(pair.chosen)
    margin = args.beta * (chosen - rejected)
    loss = -F.logsigmoid(margin) + args.nll_coef * nll
    return loss, {"accuracy": pair_accuracy(chosen - rejected), "margin": margin}


# --- training -------------------------------------------------------------------------------------

def train(args, log, trajectories, ref_turn_of, device):
    """Trains a critic. Returns (critic, {turn: (L,) pi_ref log-probs})."""
    groups, held_out = from_rank_0(lambda: make_pairs(args, trajectories))
    batches = all_batches(groups, args.batch_size, args.epochs, args.seed)
    train_tasks = {task for task, _ in groups}
    tasks = sorted({content_hash(t.record["task"]) for t in trajectories if t.task in train_tasks})
    n_pairs = sum(len(pairs) for _, pairs in groups)
    say(f"{n_pairs} pairs, {len(batches)} steps")
    model, chat = load(args.model, device, args.dtype, args, train=True)
    ref_logps = reference_logps(model, ref_turn_of, args.tree_tokens)
    optimizer = make_optimizer(model, args.lr)
    load_checkpoint(model, optimizer, args.out, log.step)
    log.start("critic", len(batches), pairs=n_pairs, held_out_pairs=len(held_out), tasks=tasks)

    for step in range(log.step, len(batches)):
        batch, began = batches[step], time.monotonic()
        logps, computed = forward(model, turns_in(batch), args.tree_tokens)  # {turn: (L,)}
        loss, metrics = critic_loss(args, batch, logps, ref_logps)
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
            log.row(step=step, **measure(args, model, critic_loss, held_out, ref_logps))
        if (step + 1) % args.save_every == 0:
            save_checkpoint(model, optimizer, args.out, step + 1)

    save(model, chat, args.out)
    log.finish()
    return model, ref_logps


# --- scoring --------------------------------------------------------------------------------------

def load_critic(args, folder, ref_turn_of, device):
    """Returns (the model in a folder as pi, {turn: (L,) pi_ref log-probs})."""
    model, _ = load(args.model, device, args.dtype, args)
    ref_logps = reference_logps(model, ref_turn_of, args.tree_tokens)
    del model
    gc.collect()  # free its memory before loading pi
    model, _ = load(folder, device, args.dtype, args)
    return model, ref_logps


def check_pi_ref(folder, model):
    """Exits if `folder` has a critic that was trained with other weights than `model` as pi_ref."""
    critic = read_critic(folder)
    if not critic:
        return  # any other model, which has no pi_ref of its own
    if changed := changed_scripts(folder):
        say(f"warning: the critic in {folder} was trained by another {', '.join(changed)}; to "
            f"score as then, run its own copies (python {folder}/NAME.py)")
    pi_ref, *_ = find_model(model, weights=True)
    if weights_digest(pi_ref) != critic["model_weights"]:
        fail(f"{model} is not the pi_ref of the critic in {folder}; give that by --model")


def add_scores(trajectories, logps, ref_logps):
    """Adds the advantage of every message and candidate, and the value of every trajectory."""
    for t in trajectories:
        for action in chain(*t.actions):
            action.fields.pop("advantage", None)  # left by an earlier critic
            if action.turn:
                a = advantage(logps[action.turn], ref_logps[action.turn])
                action.fields["advantage"] = a.item()  # in t.record, too
        t.record.pop("value", None)
        if turns := t.turns():
            t.record["value"] = trajectory_value(turns, logps, ref_logps).item()


def count_ordered_pairs(trajectories, min_gap):
    """Returns (how many trajectory pairs the values order correctly, the number of pairs).

    The trajectories have values, by add_scores. min_gap: see pairs_in_group in model.py. A tie
    counts half.
    """
    rated = [t for t in trajectories if {"reward", "value"} <= t.record.keys()]
    value_of = {t.turns(): t.record["value"] for t in rated}
    pairs = [*chain(*trajectory_pairs(rated, min_gap).values())]
    differences = [value_of[pair.chosen] - value_of[pair.rejected] for pair in pairs]
    return pair_accuracy(torch.tensor(differences)).sum().item(), len(pairs)


def print_ordered_pairs(trajectories, min_gap, trained_on):
    """Prints the count of ordered pairs. trained_on: content hashes of the critic's tasks."""
    unseen = [t for t in trajectories if content_hash(t.record["task"]) not in trained_on]
    for tasks, counted in (("all", trajectories), ("that it was not trained on", unseen)):
        right, n = count_ordered_pairs(counted, min_gap)
        say(f"the critic orders {right:g} of {n} trajectory pairs correctly (tasks: {tasks})")


def main(args):
    emit, device = open_stdout(), init_distributed()
    log = None if args.score else RunLog(args)  # locks --out before stdin is read
    if args.score:
        check_pi_ref(args.score, args.model)
    trajectories = [] if RANK else read(args)  # only rank 0 has them
    ref_turn_of = from_rank_0(lambda: ref_turns(trajectories))
    if log:
        log.check(run_facts(args, device, trajectories))
    folder = args.score or args.out
    if log and not log.finished:
        model, ref_logps = train(args, log, trajectories, ref_turn_of, device)
    else:
        model, ref_logps = load_critic(args, folder, ref_turn_of, device)
    logps = turn_logps(model, list(ref_logps), args.tree_tokens, "advantages")
    if RANK:
        return
    add_scores(trajectories, logps, ref_logps)
    trained_on = {*read_critic(folder).get("tasks", ())}
    print_ordered_pairs(trajectories, args.min_gap, trained_on)
    for t in trajectories:
        emit(t.record)


if __name__ == "__main__":
    run(main, get_args())
