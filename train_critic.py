"""Stage 1: the critic reads the hidden information c, and learns from pairs which turns were good.

    A(o_t, a_t, c) = 1/L_t sum_l log [ pi(a_t^l | o_t, a_t^<l, c) / pi_ref(a_t^l | o_t, a_t^<l, c) ]
    loss = -log sigmoid( beta sum_t A(o_t+, a_t+, c) - beta sum_t A(o_t-, a_t-, c) )
           + nll_coef NLL(tau+)

These are eq. 3 and eq. 2 of the paper: a Bradley-Terry model of trajectories, whose reward is a sum
of advantages. o_t is the dialogue before message t, a_t the message, of L_t tokens. tau+ and tau-
are trajectories of one task; tau+ has the higher reward. The NLL is a mean over the turns of tau+,
in each a mean over its tokens. pi starts as pi_ref. In the code a *turn* is (prompt, action): all
that the model reads, then a message or candidate, both as token ids packed into strings.

After training, every message and every candidate gets its `advantage` A, and the records go on
to stdout. A new --out is trained, a stopped one goes on, and a finished one only scores.
--untrained 1 trains nothing: one model reads each message twice, and A is the mean of
log pi(a | o, c) - log pi(a | o). Other critics are edits: see the README.

    python train_critic.py --model runs/base --out runs/critic < in.jsonl > scored.jsonl
    torchrun --nproc_per_node=8 train_critic.py --out runs/critic < in.jsonl > scored.jsonl
    python train_critic.py --out runs/critic < more.jsonl > scored.jsonl  # a finished one scores
    python train_critic.py --untrained 1 --model runs/base < in.jsonl > scored.jsonl
"""
# Flags are read before torch loads: --help and a wrong flag answer at once.
from utils import (Log, check_finite, fail, fail_on_error, flag, from_rank_0, init_distributed,
                   lr_at, machine_flags, note, open_stdout, parser, read_jsonl, rng, rows_of, run,
                   tell_changes, tell_notes)

import gc
import math
import os
import sys
from types import SimpleNamespace

from colbench import agent_messages, hidden_information, needs, task_id, with_hidden


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] < trajectories.jsonl > scored.jsonl")
    flag(p, "model", "meta-llama/Llama-3.1-8B-Instruct", "pi_ref, and where pi starts")
    flag(p, "out", None, "the run's directory: a new one trains, a finished one scores")
    flag(p, "untrained", 0, "1: score by --model with c less without, and train nothing",
         choices=[0, 1])
    g = p.add_argument_group("pairs")
    flag(g, "min_gap", None, "pair trajectories of a task whose rewards differ by at least this; "
         "not given: the first solved one with each worse one", kind=float)
    flag(g, "held_out", 0.1, "share of the tasks kept out of training, to measure loss and "
         "accuracy on", most=1)
    flag(g, "eval_every", 100, "steps between measures of held-out pairs", least=1)
    g = p.add_argument_group("objective and optimization")
    flag(g, "ref_context", "hidden", "what pi_ref reads: c, too (eq. 3), or the agent's prompt",
         choices=["hidden", "agent"])
    flag(g, "beta", 0.1, "scale of the margin")
    flag(g, "nll_coef", 0.01, "weight of the chosen side's NLL")
    flag(g, "lr", 2e-7, "peak: 3%% of the steps warm up, then a cosine to a tenth")
    flag(g, "batch_size", 8, "pairs a step, over all GPUs", least=1)
    flag(g, "epochs", 4, "over the pairs")
    flag(g, "seed", 0, "of the order and of what is held out")
    machine_flags(p)
    args = p.parse_args(argv)
    if bool(args.out) == bool(args.untrained):
        p.error("give --out, or else --untrained 1")
    if args.untrained and "ref_context" in args.given:
        p.error("--untrained 1 has no --ref_context: pi_ref reads what the agent reads")
    if args.untrained:
        args.ref_context = "agent"
    return args


if __name__ == "__main__":
    ARGS = get_args()

import torch
import torch.nn.functional as F

from model import (TURN, Pair, accuracy, action_ids, action_logps, actions_of, all_batches,
                   base_digest, find_model, load, packed, pick_dtype, render, restore, save,
                   save_checkpoint, score, turns_in, unsharded)


# --- the loss -------------------------------------------------------------------------------------

def advantage(logps, ref_logps):
    """Eq. 3, one action: (L,) log-probs to a scalar."""
    return (logps - ref_logps).mean()


def critic_loss(args, pair, logps, ref_logps):
    """(loss, margin) of a Pair of trajectories, eq. 2. logps, ref_logps: {turn: (L,)}."""
    def value(trajectory):
        return sum(advantage(logps[turn], ref_logps[turn]) for turn in trajectory)

    margin = args.beta * (value(pair.chosen) - value(pair.rejected))
    nll = -sum(logps[turn].mean() for turn in pair.chosen) / len(pair.chosen)
    return -F.logsigmoid(margin) + args.nll_coef * nll, margin


def batch_loss(args, pairs, logps, ref_logps):
    """(mean loss of some pairs, {"accuracy", "margin"})."""
    losses, margins = zip(*(critic_loss(args, pair, logps, ref_logps) for pair in pairs))
    margins = torch.stack(margins)
    metrics = {"accuracy": accuracy(margins), "margin": margins.mean().item()}
    return sum(losses) / len(pairs), metrics


# --- training and scoring -------------------------------------------------------------------------

def main(args):
    emit, device = open_stdout(), init_distributed()
    log = None if args.untrained else Log(args)
    if log and not log.finished:
        records, model, ref_logps = train(args, log, device)
    else:
        records, model, ref_logps = load_to_score(args, device)
    advantage_of = advantages(model, ref_logps, args.tree_tokens)
    for r in records or ():  # None on other ranks
        for _, actions in actions_of(r):
            for action in actions:
                turn = action.pop(TURN)
                action.pop("advantage", None)  # another critic's
                if turn is not None:
                    action["advantage"] = advantage_of[turn]
        emit(r)


def train(args, log, device):
    """(stdin's records on rank 0, the trained critic, {turn: its log-probs by pi_ref})."""
    records, (ref_turn_of, groups, held) = from_rank_0(lambda: prepare(args))
    batches = all_batches(groups, args.batch_size, args.epochs, args.seed)
    log.begin(groups, held, steps=len(batches), dtype=str(pick_dtype(args.dtype, device)),
              model_weights=base_digest(args.model))

    model, tokenizer = load(args.model, device, args.dtype, args, train=True)
    ref_logps = reference_logps(model, ref_turn_of, args.tree_tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95),
                                  weight_decay=0.0, fused=True)
    restore(model, optimizer, log)

    for step in log.steps("critic"):
        batch, tokens_before = batches[step], model.tokens
        logps = action_logps(model, turns_in(batch), args.tree_tokens)
        loss, metrics = batch_loss(args, batch, logps, ref_logps)
        loss.backward()  # a rank has the gradient of its own turns; FSDP sums them
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm, loss = unsharded(norm).item(), loss.item()
        check_finite(step, loss=loss, grad_norm=norm)
        lr = lr_at(step, len(batches), args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        log(step=step, loss=loss, **metrics, grad_norm=norm, lr=lr,
            tokens=model.tokens - tokens_before)
        if held and ((step + 1) % args.eval_every == 0 or step + 1 == len(batches)):
            # by the weights after this step; the row above is by those before it
            log(step=step, **held_out_metrics(batch_loss, args, model, held, ref_logps))
        if (step + 1) % args.save_every == 0:
            save_checkpoint(model, optimizer, args.out, step + 1)

    save(model, tokenizer, args.out)
    log.finish()
    return records, model, ref_logps


def load_to_score(args, device):
    """What train() returns, for a finished critic or --untrained 1: nothing is trained."""
    if args.out:
        moved_to = args.model if "model" in args.given else None
        args.model = finished_flags(args.out, moved_to).model
    records, ref_turn_of = from_rank_0(lambda: read_stdin(args))
    model, _ = load(args.model, device, args.dtype, args)
    ref_logps = reference_logps(model, ref_turn_of, args.tree_tokens)
    if args.out:
        del model
        gc.collect()  # room for pi
        model, _ = load(args.out, device, args.dtype, args)
    return records, model, ref_logps


def held_out_metrics(loss_of_pairs, args, model, pairs, ref_logps):
    """{"held_out_loss", "held_out_accuracy"} of held-out pairs, by a trainer's batch_loss."""
    logps = score(model, turns_in(pairs), args.tree_tokens)
    loss, metrics = loss_of_pairs(args, pairs, logps, ref_logps)
    metrics = {"loss": loss.item(), **metrics}
    return {"held_out_" + name: value for name, value in metrics.items()}


def reference_logps(model, ref_turn_of, tree_tokens):
    """{turn: its action's log-probs by pi_ref, the model}. ref_turn_of: {turn: reference turn}."""
    logps = score(model, list(ref_turn_of.values()), tree_tokens, "reference")
    return {turn: logps[ref_turn] for turn, ref_turn in ref_turn_of.items()}


def advantages(model, ref_logps, tree_tokens):
    """{turn: A, a float} by the critic, the model. ref_logps: {turn: log-probs by pi_ref}."""
    logps = score(model, list(ref_logps), tree_tokens, "advantages")
    return {turn: advantage(logps[turn], ref_logps[turn]).item() for turn in logps}


# --- a finished critic's reference ----------------------------------------------------------------

def finished_flags(folder, model=None):
    """The flags that the finished critic in a folder was trained with; flags.model is pi_ref.

    model: where pi_ref is now. Not given: at its old path relative to the critic's folder, so that
    both may be moved together.
    """
    with fail_on_error(f"{folder} is no finished run of train_critic.py"):
        rows = rows_of(folder)
        begun = [row for row in rows if "args" in row][-1]
        flags, weights = SimpleNamespace(**begun["args"]), begun["model_weights"]
        if "finished" not in rows[-1] or not hasattr(flags, "ref_context"):
            raise ValueError("its training has not ended, or it is a policy's")
    if not model:
        old_model, old_out = (os.path.join(begun["cwd"], path) for path in (flags.model, flags.out))
        moved = os.path.join(folder, os.path.relpath(old_model, old_out))
        model = moved if os.path.isdir(moved) else flags.model
    tell_changes(folder)
    if base_digest(model) not in (weights, None):  # None on other ranks
        fail(f"{model} has other weights than the pi_ref of the critic in {folder}")
    flags.model = model
    return flags


# --- pairs ----------------------------------------------------------------------------------------

def prepare(args):
    """(stdin's records, ({turn: reference turn}, [[Pair]] to train on, [Pair] held out))."""
    records, ref_turn_of = read_stdin(args, "reward")
    pairs_of = trajectory_pairs(sorted_records(records), args.min_gap)
    train_tasks, held_tasks = hold_out(pairs_of, args.held_out, args.seed)
    return records, (ref_turn_of, [pairs_of[task] for task in train_tasks],
                     [pair for task in held_tasks for pair in pairs_of[task]])


def sorted_records(records):
    """The records by task and sample: pairs do not depend on which episode ended first."""
    return sorted(records, key=lambda r: (task_id(r["task"]), r.get("sample", 0)))


def hold_out(tasks, share, seed):
    """(the tasks to train on, at least one; the others, a share of them), in random order."""
    tasks = list(tasks)
    rng("held out", seed).shuffle(tasks)
    n_held = min(math.ceil(share * len(tasks)), len(tasks) - 1)
    return tasks[n_held:], tasks[:n_held]


def trajectory_pairs(records, min_gap):
    """{task id: [Pair]} of a task's trajectories, the better and the worse; fails without any.

    min_gap: all pairs whose rewards differ by at least this. None: the first solved trajectory with
    each worse one.
    """
    by_task, groups = {}, {}
    for r in records:
        turns = tuple(m[TURN] for m in agent_messages(r))
        if None not in turns:
            by_task.setdefault(task_id(r["task"]), []).append((r["reward"], turns))
    for task, trajectories in by_task.items():
        better = trajectories
        if min_gap is None:
            better = [(reward, turns) for reward, turns in trajectories if reward >= 1][:1]
        pairs = [Pair(chosen, rejected, gap=high - low)
                 for high, chosen in better for low, rejected in trajectories
                 if high > low and high - low > (min_gap or 0) - 1e-9 and chosen != rejected]
        if pairs:
            groups[task] = pairs
    if not groups:
        lack = "a solved and a worse one" if min_gap is None else "two that differ so much"
        fail(f"no pairs in {len(records)} trajectories: no task has {lack} (--min_gap 0 takes "
             "whatever differs; collect.py -k draws more per task; a weak --model solves none)")
    return groups


# --- what the critic reads ------------------------------------------------------------------------

def read_stdin(args, *fields):
    """(stdin's records, which need `fields`, too; {turn: reference turn})."""
    need = needs("dialogue_history", *fields, to_train=True)
    records = list(read_jsonl(sys.stdin, need))
    _, tokenizer, config = find_model(args.model)
    return records, read_turns(tokenizer, config, records, args.max_length, pi_reads_c=True,
                               ref_reads_c=args.ref_context == "hidden")


def critic_turns(tokenizer, record, history, actions, *, pi_reads_c, ref_reads_c):
    """[(turn, reference turn)] of a record's actions, messages or candidates, after a history.

    The turn has the prompt that pi reads, the reference turn the one that pi_ref reads.
    """
    thinking = record.get("meta", {}).get("thinking", 0)  # as when its dialogue was sampled

    def prompt_ids(reads_c):
        c = hidden_information(record["task"]) if reads_c else ""
        messages = with_hidden(history, c) if c else history
        return packed(render(tokenizer, messages, thinking))

    prompt = prompt_ids(pi_reads_c)
    ref_prompt = prompt if ref_reads_c == pi_reads_c else prompt_ids(ref_reads_c)
    turns = []
    for action in actions:
        ids, n_dropped = action_ids(tokenizer, action, history, thinking)
        turn = prompt[:len(prompt) - n_dropped], ids
        ref_turn = ref_prompt[:len(ref_prompt) - n_dropped], ids  # both end in the same header
        turns.append((turn, ref_turn))
    return turns


def read_turns(tokenizer, config, records, max_length, *, pi_reads_c, ref_reads_c):
    """{turn: reference turn} of all messages and candidates of the agent that are not too long.

    Sets action[TURN] for each: its turn, or None if it is too long.
    """
    config = config.get_text_config()
    longest = min(max_length, getattr(config, "max_position_embeddings", None) or max_length)
    extra_ids = len(tokenizer) > config.vocab_size
    ref_turn_of = {}
    for r in records:
        name = f"the task {task_id(r['task'])}"
        if pi_reads_c and not hidden_information(r["task"]):
            note("records have no hidden information for the critic to read", name)
        for history, actions in actions_of(r):
            with fail_on_error(f"{name} does not suit this --model's chat template"):
                turns = critic_turns(tokenizer, r, history, actions, pi_reads_c=pi_reads_c,
                                     ref_reads_c=ref_reads_c)
            for action, (turn, ref_turn) in zip(actions, turns):
                if extra_ids and ord(max("".join(turn))) >= config.vocab_size:
                    fail(f"{name} has a token beyond the model's embedding of {config.vocab_size}")
                fits = sum(map(len, turn)) <= longest
                action[TURN] = turn if fits else None
                if fits:
                    ref_turn_of[turn] = ref_turn
                else:
                    note(f"messages and candidates are longer than {longest} tokens (--max_length "
                         "or the model's own limit) and are left out, and so are trajectories with "
                         "such a message", name)
    tell_notes()
    return ref_turn_of


if __name__ == "__main__":
    run(main, ARGS)
