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
# Parse flags before importing torch, so that --help and flag errors are instant.
from utils import (RANK, Log, RunDirectory, changed_scripts, fail, flag, init_distributed,
                   kept_and_shared, lr_at, machine_flags, open_stdout, parser, rows_of, run, say)

import gc
from itertools import chain


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] < trajectories.jsonl > scored.jsonl")
    flag(p, "model", None, "initial model, also the reference pi_ref; default: "
         "meta-llama/Llama-3.1-8B-Instruct, or with --score the one of that run")
    mode = p.add_mutually_exclusive_group()
    flag(mode, "out", "runs/critic", "directory of a run: train a critic there, or resume its "
         "training, then score")
    flag(mode, "score", None, "only score, with this model as pi: a trained critic, or any other",
         metavar="DIR")
    g = p.add_argument_group("pairs")
    flag(g, "min_gap", None, "default: pair a task's first solved trajectory with every unsolved "
         "one; a number: pair any two whose rewards differ by at least this", kind=float)
    flag(g, "held_out", 0.1, "share of tasks that are not trained on, to measure loss and "
         "accuracy", most=1, only="with --out")
    flag(g, "eval_every", 100, "steps between evaluations on held-out tasks", least=1,
         only="with --out")
    g = p.add_argument_group("objective and optimization")
    flag(g, "ref_context", None, "what pi_ref reads: the hidden information too (eq. 3), or only "
         "what the agent reads; default: hidden, or with --score that of the run",
         choices=["hidden", "agent"])
    flag(g, "beta", 0.1, "scale of the reward margin", only="with --out")
    flag(g, "nll_coef", 0.01, "weight of the chosen trajectory's NLL", only="with --out")
    flag(g, "lr", 2e-7, "peak learning rate; 3%% or 3 steps of warm-up, cosine decay to a tenth",
         only="with --out")
    flag(g, "batch_size", 8, "pairs per step, over all GPUs; an epoch's last step has those that "
         "are left, at the full learning rate", least=1, only="with --out")
    flag(g, "epochs", 4, "passes over the pairs", least=1, only="with --out")
    flag(g, "seed", 0, "random seed of the training order and held-out tasks", only="with --out")
    machine_flags(p)
    args = p.parse_args(argv)
    run_flags = {"model": "meta-llama/Llama-3.1-8B-Instruct"}
    if args.score is not None:
        args.out, run_flags = None, flags_of(args.score)
    args.model = args.model or run_flags.get("model")
    args.ref_context = args.ref_context or run_flags.get("ref_context", "hidden")
    if not args.model:
        p.error(f"--model is needed, because --score {args.score!r} is not a run with an own one")
    return args


def flags_of(folder):
    """Returns the flags of a trainer's run, {} for another model's folder."""
    rows = rows_of(folder)
    return rows[0]["args"] if rows else {}


if __name__ == "__main__":
    ARGS = get_args()

import torch
import torch.nn.functional as F

from colbench import content_hash
from model import (action_logps, all_batches, base_digest, hold_out, load, load_checkpoint,
                   mean_loss, model_facts, read_trajectories, reference_logps, save,
                   save_checkpoint, score, trajectory_pairs, turns_in, update)


# --- the loss -------------------------------------------------------------------------------------

def advantage(logps, ref_logps):
    """Eq. 3 for one action: two (L,) tensors of log-probs to a scalar."""
    return (logps - ref_logps).mean()


def trajectory_value(turns, logps, ref_logps):
    """Returns the value by which eq. 2 ranks trajectories, a scalar: the sum of advantages."""
    return sum(advantage(logps[turn], ref_logps[turn]) for turn in turns)


def critic_loss(args, pair, logps, ref_logps):
    """Returns (loss, margin) of a pair of trajectories, eq. 2. logps, ref_logps: {turn: (L,)}."""
    chosen = trajectory_value(pair.chosen, logps, ref_logps)
    rejected = trajectory_value(pair.rejected, logps, ref_logps)
    margin = args.beta * (chosen - rejected)
    nll = -sum(logps[turn].mean() for turn in pair.chosen) / len(pair.chosen)
    return -F.logsigmoid(margin) + args.nll_coef * nll, margin


def batch_loss(args, pairs, logps, ref_logps):
    """Returns (mean loss over the pairs, {"accuracy": ..., "margin": ...})."""
    return mean_loss(critic_loss(args, pair, logps, ref_logps) for pair in pairs)


# --- training and scoring -------------------------------------------------------------------------

def train(args, device):
    """Trains a critic. Returns ([Trajectory] of stdin, critic, {turn: (L,) pi_ref log-probs}).

    Only rank 0 has the trajectories; the others get None.
    """
    directory = RunDirectory(args)
    trajectories, (ref_turn_of, pairs_of_task, held_out) = kept_and_shared(lambda: prepare(args))
    groups = list(pairs_of_task.values())
    batches = all_batches(groups, args.batch_size, args.epochs, args.seed)
    tasks = sorted({content_hash(t.record["task"]) for t in trajectories or ()
                    if t.task in pairs_of_task})
    directory.begin(groups, held_out, len(batches), tasks=tasks, **model_facts(args, device))
    if directory.finished:
        return trajectories, *load_critic(args, args.out, ref_turn_of, device)

    model, tokenizer = load(args.model, device, args.dtype, args, train=True)
    ref_logps = reference_logps(model, ref_turn_of, args.tree_tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95),
                                  weight_decay=0.0, fused=True)
    load_checkpoint(model, optimizer, directory)

    log = Log(directory, "critic", len(batches))
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
    return trajectories, model, ref_logps


def score_only(args, device):
    """Loads pi of --score. Returns what train() returns."""
    check_pi_ref(args.score, args.model)
    trajectories, ref_turn_of = kept_and_shared(lambda: read_stdin(args))
    return trajectories, *load_critic(args, args.score, ref_turn_of, device)


def load_critic(args, folder, ref_turn_of, device):
    """Returns (the critic in a folder, {turn: (L,) pi_ref log-probs})."""
    model, _ = load(args.model, device, args.dtype, args)
    ref_logps = reference_logps(model, ref_turn_of, args.tree_tokens)
    del model
    gc.collect()  # free its memory before loading pi
    model, _ = load(folder, device, args.dtype, args)
    return model, ref_logps


def main(args):
    emit, device = open_stdout(), init_distributed()
    if args.score is not None:
        trajectories, model, ref_logps = score_only(args, device)
    else:
        trajectories, model, ref_logps = train(args, device)
    logps = score(model, list(ref_logps), args.tree_tokens, "advantages")
    if RANK:
        return
    for t in trajectories:
        for action in chain(*t.actions):
            action.fields.pop("advantage", None)  # left by an earlier critic
            if action.turn:
                value = advantage(logps[action.turn], ref_logps[action.turn])
                action.fields["advantage"] = value.item()
    print_pair_accuracy(args, trajectories, logps, ref_logps)
    for t in trajectories:
        emit(t.record)


def print_pair_accuracy(args, trajectories, logps, ref_logps):
    """Prints the accuracy on the trajectory pairs of tasks that the critic was not trained on."""
    start = next(iter(rows_of(args.out or args.score)), {})
    trained_on = start.get("tasks", ())  # contents; other models than critics record none
    unseen = [t for t in trajectories
              if "reward" in t.record and content_hash(t.record["task"]) not in trained_on]
    pairs = list(chain(*trajectory_pairs(unseen, args.min_gap).values()))
    if not pairs:
        return say("no pair accuracy: no task that the critic was not trained on has a pair")
    _, metrics = batch_loss(args, pairs, logps, ref_logps)
    say(f"pair accuracy {100 * metrics['accuracy']:.1f} % ({len(pairs)} pairs of tasks that the "
        "critic was not trained on)")


# --- data -----------------------------------------------------------------------------------------

def read_stdin(args, *fields):
    """Returns ([Trajectory] of stdin, {turn: the turn that pi_ref reads})."""
    trajectories = read_trajectories(args, *fields, pi_reads_c=True,
                                     ref_reads_c=args.ref_context == "hidden")
    actions = chain(*(chain(*t.actions) for t in trajectories))
    return trajectories, {action.turn: action.ref_turn for action in actions if action.turn}


def prepare(args):
    """Reads stdin. Returns ([Trajectory], what all ranks need to train).

    That is {turn: pi_ref's turn}, {training task: [Pair]} and the held-out [Pair].
    """
    trajectories, ref_turn_of = read_stdin(args, "reward")
    pairs_of = trajectory_pairs(trajectories, args.min_gap)
    if not pairs_of:
        fail("no task has a pair of trajectories: sample more per task with collect.py -k, or pair "
             "by --min_gap 0")
    train_tasks, held_tasks = hold_out(pairs_of, args.held_out, args.seed)
    held_out = [pair for task in held_tasks for pair in pairs_of[task]]
    return trajectories, (ref_turn_of, {task: pairs_of[task] for task in train_tasks}, held_out)


# --- a trained critic -----------------------------------------------------------------------------

def check_pi_ref(folder, model):
    """Exits if `folder` has a critic that was trained with other weights than `model` as pi_ref."""
    if "ref_context" not in flags_of(folder):
        return  # any other model, which has no pi_ref of its own
    if changed := changed_scripts(folder):
        say(f"warning: the critic in {folder} was trained by another {changed}; to score as then, "
            f"run its own copies (python {folder}/NAME.py)")
    if base_digest(model) != rows_of(folder)[0]["model_weights"]:
        fail(f"{model} is not the pi_ref of the critic in {folder}; give that by --model")


if __name__ == "__main__":
    run(main, ARGS)
