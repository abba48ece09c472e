"""Stage 1: train a critic that sees the hidden information, then score every message with it.

    A(o_t, a_t, c) = 1/L_t sum_l log [ pi(a_t^l | o_t, a_t^<l, c) / pi_ref(a_t^l | o_t, a_t^<l, c) ]
    loss = -log sigmoid( beta sum_t A(o_t+, a_t+, c) - beta sum_t A(o_t-, a_t-, c) )
           + nll_coef NLL(tau+)

The advantage A (eq. 3 of the paper) is the mean log-ratio, over the L_t tokens of message a_t, of
the critic pi to its initial checkpoint pi_ref. Both read the dialogue o_t and the hidden
information c. The loss (eq. 2) is a Bradley-Terry model: of two trajectories of a task, the one
with the higher reward, tau+, should have the larger sum of advantages. The NLL is averaged over
the tokens of a turn, then over turns. A *turn* is (prompt, action), two strings: see model.py.

Scoring adds an `advantage` to every message and candidate. The untrained critic, --untrained 1,
needs no training: A is the mean of log pi(a | o, c) - log pi(a | o), both under --model.

Left out on purpose: a value head (value.diff), because the policy trained on its scores ended 75 %
of its episodes without an answer (RESULTS.md); early stopping (choose --epochs by the held-out
metrics instead); and a Trainer class, so that a change of this loop leaves the policy's alone.

    python train_critic.py --model runs/base --out runs/critic < in.jsonl > scored.jsonl
    torchrun --nproc_per_node=8 train_critic.py < in.jsonl > scored.jsonl
    python train_critic.py --score runs/critic < more.jsonl > scored.jsonl  # never trains
    python train_critic.py --untrained 1 --model runs/base < in.jsonl > scored.jsonl
"""
# Parse flags before importing torch, so that --help and flag errors are instant.
from utils import (Log, add_warning, changed_scripts, check_finite, fail, fail_on_error,
                   finished_critic, flag, from_rank_0, init_distributed, lr_at, machine_flags,
                   open_stdout, parser, print_warnings, read_jsonl, rng, rows_of, run, say)

import gc
import math
import os
import re
import sys
from itertools import permutations
from types import SimpleNamespace

from colbench import (HIDDEN, agent_messages, first_message, hidden_information, needs, task_id,
                      with_hidden)


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] < trajectories.jsonl > scored.jsonl", parallel=True)
    flag(p, "model", "meta-llama/Llama-3.1-8B-Instruct", "initial model, also the reference pi_ref")
    mode = p.add_mutually_exclusive_group()
    flag(mode, "out", "runs/critic", "directory of a run: train a critic there, or resume its "
         "training, then score")
    flag(mode, "score", None, "only score, with the finished critic in --out RUN", metavar="RUN")
    flag(mode, "untrained", 0, "1: only score, by the log-prob given the hidden information "
         "minus the log-prob without it, both under --model", choices=[0, 1])
    g = p.add_argument_group("pairs")
    flag(g, "min_gap", None, "default: pair a task's first solved trajectory with every unsolved "
         "one; a number: pair any two whose rewards differ by at least this", kind=float)
    flag(g, "held_out", 0.1, "share of tasks held out for loss and accuracy", most=1, only="--out")
    flag(g, "eval_every", 100, "steps between evaluations on these", least=1, only="--out")
    g = p.add_argument_group("objective and optimization")
    flag(g, "ref_context", "hidden", "what pi_ref reads: the hidden information too (eq. 3), or "
         "only what the agent reads", choices=["hidden", "agent"], only="--out")
    flag(g, "beta", 0.1, "scale of the reward margin", only="--out")
    flag(g, "nll_coef", 0.01, "weight of the chosen trajectory's NLL", only="--out")
    flag(g, "lr", 2e-7, "peak learning rate: 3%% warm-up, cosine decay to a tenth", only="--out")
    flag(g, "batch_size", 8, "pairs per step, over all GPUs", least=1, only="--out")
    flag(g, "epochs", 4, "passes over the pairs", only="--out")
    flag(g, "seed", 0, "random seed of the training order and held-out tasks", only="--out")
    machine_flags(p)
    args = p.parse_args(argv)
    if args.score is not None or args.untrained:
        args.out = None
    p.refuse_unused(args)
    if args.untrained:
        args.ref_context = "agent"
    return args


if __name__ == "__main__":
    ARGS = get_args()

import torch
import torch.nn.functional as F

from model import (TURN, Pair, accuracy, action_ids, action_logps, all_batches, base_digest,
                   common_prefix, find_model, full_tensor, load, load_checkpoint, packed,
                   pick_dtype, render, save, save_checkpoint, score, turn_actions, turns_in)


# --- the loss -------------------------------------------------------------------------------------

def advantage(logps, ref_logps):
    """Eq. 3 for one action: two (L,) tensors of log-probs to a scalar."""
    return (logps - ref_logps).mean()


def critic_loss(args, pair, logps, ref_logps):
    """Returns (loss, margin) of a pair of trajectories, eq. 2. logps, ref_logps: {turn: (L,)}."""
    def value(trajectory):
        return sum(advantage(logps[turn], ref_logps[turn]) for turn in trajectory)

    margin = args.beta * (value(pair.chosen) - value(pair.rejected))
    nll = -sum(logps[turn].mean() for turn in pair.chosen) / len(pair.chosen)
    return -F.logsigmoid(margin) + args.nll_coef * nll, margin


def batch_loss(args, pairs, logps, ref_logps):
    """Returns (mean loss over the pairs, {"accuracy": ..., "margin": ...})."""
    losses, margins = zip(*(critic_loss(args, pair, logps, ref_logps) for pair in pairs))
    margins = torch.stack(margins)  # (B,)
    metrics = {"accuracy": accuracy(margins), "margin": margins.mean().item()}
    return sum(losses) / len(pairs), metrics


# --- training and scoring -------------------------------------------------------------------------

def main(args):
    emit, device = open_stdout(), init_distributed()
    records, model, ref_logps = (score_only if args.out is None else train)(args, device)
    advantage_of = advantages(model, ref_logps, args.tree_tokens)
    if records is None:
        return  # only rank 0 has records
    print_pair_accuracy(args, records, advantage_of)
    for r in records:
        for _, actions in turn_actions(r):
            for action in actions:
                turn = action.pop(TURN)
                action.pop("advantage", None)  # left by an earlier critic
                if turn is not None:
                    action["advantage"] = advantage_of[turn]
        emit(r)


def train(args, device):
    """Trains, and returns (rank 0's records or None, the critic, {turn: (L,) pi_ref log-probs})."""
    log = Log(args)
    records, (ref_turn_of, pairs_of, held_out) = from_rank_0(lambda: prepare(args))
    groups = list(pairs_of.values())
    batches = all_batches(groups, args.batch_size, args.epochs, args.seed)
    log.begin(groups, held_out, steps=len(batches), dtype=str(pick_dtype(args.dtype, device)),
              model_weights=base_digest(args.model), tasks=list(pairs_of))
    if log.finished:
        return records, *load_critic(args, args.out, ref_turn_of, device)

    model, tokenizer = load(args.model, device, args.dtype, args, train=True)
    ref_logps = reference_logps(model, ref_turn_of, args.tree_tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95),
                                  weight_decay=0.0, fused=True)
    load_checkpoint(model, optimizer, log)

    for step in log.steps("critic"):
        batch, tokens_before = batches[step], model.tokens
        logps = action_logps(model, turns_in(batch), args.tree_tokens)  # {turn: (L,)}
        loss, metrics = batch_loss(args, batch, logps, ref_logps)
        loss.backward()  # each rank holds the gradient of its own turns; FSDP sums them
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm, loss = full_tensor(norm).item(), loss.item()
        check_finite(step, loss=loss, grad_norm=norm)
        lr = lr_at(step, len(batches), args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        log(step=step, loss=loss, **metrics, grad_norm=norm, lr=lr,
            tokens=model.tokens - tokens_before)
        if held_out and ((step + 1) % args.eval_every == 0 or step + 1 == len(batches)):
            # measured after the update; the training row of this step was measured before it
            log(step=step, **held_out_metrics(batch_loss, args, model, held_out, ref_logps))
        if (step + 1) % args.save_every == 0:
            save_checkpoint(model, optimizer, args.out, step + 1)

    save(model, tokenizer, args.out)
    log.finish()
    return records, model, ref_logps


def score_only(args, device):
    """Loads the critic of --score or --untrained; returns what train() returns."""
    if args.score is not None:
        trained = finished_flags(args.score, args.model if "model" in args.given else None)
        for name in {"model", "ref_context", "min_gap", "dtype", "max_length"} - {*args.given}:
            setattr(args, name, getattr(trained, name))
    records, ref_turn_of = from_rank_0(lambda: read_stdin(args))
    return records, *load_critic(args, args.score, ref_turn_of, device)


def load_critic(args, folder, ref_turn_of, device):
    """Returns (critic, {turn: (L,) pi_ref log-probs}). folder: None for the untrained critic."""
    model, _ = load(args.model, device, args.dtype, args)
    ref_logps = reference_logps(model, ref_turn_of, args.tree_tokens)
    if folder:
        del model
        gc.collect()  # free its memory before loading pi
        model, _ = load(folder, device, args.dtype, args)
    return model, ref_logps


def print_pair_accuracy(args, records, advantage_of):
    """Prints the advantages' accuracy on trajectory pairs of tasks outside the training set."""
    folder = args.out or args.score
    trained_on = rows_of(folder)[0].get("tasks", ()) if folder else ()
    correct = []  # a bool per pair
    for (task, _), trajectories in trajectories_by_task(records).items():
        values = [(reward, sum(advantage_of[turn] for turn in turns))
                  for reward, turns in trajectories if reward is not None]
        if task not in trained_on:
            correct += [a > b for (high, a), (low, b) in permutations(values, 2)
                        if is_pair(high, low, args.min_gap)]
    if correct:
        share = sum(correct) / len(correct)
        say(f"the advantages order {100 * share:.1f} % of {len(correct)} trajectory pairs "
            "correctly, on tasks that the critic was not trained on")
        if share < 2 / 3:
            say("warning: this is below two thirds; a policy trained on these advantages may get "
                'worse: try another critic (README, "Trained or untrained critic")')


def held_out_metrics(loss_of_pairs, args, model, pairs, ref_logps):
    """Returns {"held_out_loss": ..., ...}. loss_of_pairs: batch_loss of one of the trainers."""
    logps = score(model, turns_in(pairs), args.tree_tokens)
    loss, metrics = loss_of_pairs(args, pairs, logps, ref_logps)
    metrics = {"loss": loss.item(), **metrics}
    return {"held_out_" + name: value for name, value in metrics.items()}


def reference_logps(model, ref_turn_of, tree_tokens):
    """Returns {turn: (L,) log-probs under pi_ref}. ref_turn_of: {pi's turn: pi_ref's turn}."""
    logps = score(model, list(ref_turn_of.values()), tree_tokens, "reference")
    return {turn: logps[ref_turn] for turn, ref_turn in ref_turn_of.items()}


def advantages(model, ref_logps, tree_tokens):
    """Returns {turn: advantage} under the critic `model`, for the turns of ref_logps."""
    logps = score(model, list(ref_logps), tree_tokens, "advantages")
    return {turn: advantage(logps[turn], ref_logps[turn]).item() for turn in logps}


def finished_flags(folder, model=None):
    """Returns the flags that a finished critic was trained with; flags.model is pi_ref's path."""
    start = finished_critic(folder)
    flags, weights = SimpleNamespace(**start["args"]), start["model_weights"]
    if not model:  # look up pi_ref relative to the critic's folder, as both may have moved
        old_model, old_out = (os.path.join(start["cwd"], path) for path in (flags.model, flags.out))
        moved = os.path.join(folder, os.path.relpath(old_model, old_out))
        model = moved if os.path.isdir(moved) else flags.model
    if changed := changed_scripts(folder):
        say(f"warning: the critic in {folder} was trained by another {changed}; to score as then, "
            f"run its own copies (python {folder}/NAME.py)")
    try:
        found = base_digest(model)
    except SystemExit as e:
        fail(f"the pi_ref of the critic in {folder} is not there; move it back, or pass it to "
             f"train_critic.py --score by --model ({e.code})")
    if found not in (weights, None):  # only rank 0 has a digest
        fail(f"{model} is not the pi_ref of the critic in {folder}: its weights differ. Restore "
             "them, or run train_critic.py with the right --model")
    flags.model = model
    return flags


# --- pairs ----------------------------------------------------------------------------------------

def prepare(args):
    """Returns (records, ({turn: reference turn}, {training task: [Pair]}, held-out [Pair]))."""
    records, ref_turn_of = read_stdin(args, "reward")
    pairs_of = trajectory_pairs(sorted_records(records), args.min_gap)
    train_tasks, held_tasks = hold_out(pairs_of, args.held_out, args.seed)
    return records, (ref_turn_of, {task: pairs_of[task] for task in train_tasks},
                     [pair for task in held_tasks for pair in pairs_of[task]])


def sorted_records(records):
    """Sorts by task and sample, so that pairs do not depend on which episode finished first."""
    return sorted(records, key=lambda r: (task_id(r["task"]), r.get("sample", 0)))


def hold_out(tasks, share, seed):
    """Shuffles tasks; returns (training tasks, held out), with at least one to train on."""
    tasks = list(tasks)
    rng("held out", seed).shuffle(tasks)
    n_held = min(math.ceil(share * len(tasks)), len(tasks) - 1)
    return tasks[n_held:], tasks[:n_held]


def trajectories_by_task(records):
    """Returns {(task id, pair): [(reward or None, turns)]}, without those that have a long turn.

    pair: the field that keeps converted preference pairs apart; None for episodes.
    """
    by_task = {}
    for r in records:
        turns = tuple(message[TURN] for message in agent_messages(r))
        if None not in turns:
            key = task_id(r["task"]), r.get("pair")
            by_task.setdefault(key, []).append((r.get("reward"), turns))
    return by_task


def is_pair(high, low, min_gap):
    """Whether two rewards make a pair: solved and unsolved, or at least min_gap apart."""
    return high >= 1 > low if min_gap is None else high > low and high - low > min_gap - 1e-9


def trajectory_pairs(records, min_gap):
    """Returns {task id: [Pair of its trajectories]}, selected by --min_gap, or fails."""
    groups, graders, by_task = {}, {}, trajectories_by_task(records)
    for r in records:
        task = task_id(r["task"])
        if graders.setdefault(task, r.get("reward_by")) != r.get("reward_by"):
            add_warning("trajectories are paired by rewards of different graders: grade all "
                        "episodes alike (colbench.py grade)", f"the task {task}")
    print_warnings()
    for (task, _), trajectories in by_task.items():
        first_solved = [(reward, turns) for reward, turns in trajectories if reward >= 1][:1]
        pairs = [Pair(chosen, rejected, gap=high - low)
                 for high, chosen in (first_solved if min_gap is None else trajectories)
                 for low, rejected in trajectories
                 if is_pair(high, low, min_gap) and chosen != rejected]
        if pairs:
            groups.setdefault(task, []).extend(pairs)
    if not groups:
        if not by_task:
            why = "all are too long for --max_length or --model"
        elif all(len({reward for reward, _ in x}) == 1 for x in by_task.values()):
            why = ("no task has two that differ in reward: sample more episodes per task with "
                   "collect.py -k, or collect on easier or harder tasks")
        elif min_gap is None:
            why = "no task has both a solved and an unsolved one; try --min_gap 0"
        else:
            why = f"no task has two whose rewards differ by {min_gap} or more"
        fail(f"no pairs in {len(records)} trajectories: {why}")
    return groups


# --- what the critic reads ------------------------------------------------------------------------

def read_stdin(args, *fields):
    """Returns (records, {turn: reference turn}). fields: what each record must have."""
    records = list(read_jsonl(sys.stdin, needs("dialogue_history", *fields, to_train=True)))
    _, tokenizer, config = find_model(args.model)
    return records, read_turns(tokenizer, config, records, args.max_length, pi_reads_c=True,
                               ref_reads_c=args.ref_context == "hidden")


def critic_turns(tokenizer, record, history, actions, *, pi_reads_c, ref_reads_c):
    """Returns (pi's turn, pi_ref's turn) for each action after a history.

    They differ only in the prompt. pi_reads_c, ref_reads_c: does the prompt of that model include
    the hidden information, c? actions: messages or candidates.
    """
    thinking = record.get("meta", {}).get("thinking", 0)  # the setting it was sampled with

    def prompt_ids(reads_c):
        c = hidden_information(record["task"]) if reads_c else ""
        messages = with_hidden(history, c) if c else history
        return packed(render(tokenizer, messages, thinking))

    prompt = prompt_ids(pi_reads_c)
    ref_prompt = prompt if ref_reads_c == pi_reads_c else prompt_ids(ref_reads_c)
    turns = []
    for action in actions:
        ids, n_dropped = action_ids(tokenizer, action, history, thinking)
        # both prompts end alike, so the same number of tokens is dropped: see action_ids
        turn = prompt[:len(prompt) - n_dropped], ids
        ref_turn = ref_prompt[:len(ref_prompt) - n_dropped], ids
        turns.append((turn, ref_turn))
    return turns


def read_turns(tokenizer, config, records, max_length, *, pi_reads_c, ref_reads_c):
    """Returns {turn: reference turn} of every message and candidate of at most max_length tokens.

    Sets action[TURN] of each to its turn, or to None if it is too long.
    """
    config = config.get_text_config()
    longest = min(max_length, getattr(config, "max_position_embeddings", None) or max_length)
    extra_ids = len(tokenizer) > config.vocab_size
    ref_turn_of = {}
    for r in records:
        name = f"the task {task_id(r['task'])}"
        if pi_reads_c and not hidden_information(r["task"]):
            add_warning("records without hidden information for the critic", name)
        sampled = any(message.get("token_ids") for message in agent_messages(r))
        if r["task"]["problem_description"] and not sampled:
            check_opening(r, name)
        for history, actions in turn_actions(r):
            with fail_on_error(f"--model's chat template rejects {name}"):
                turns = critic_turns(tokenizer, r, history, actions, pi_reads_c=pi_reads_c,
                                     ref_reads_c=ref_reads_c)
            for action, (turn, ref_turn) in zip(actions, turns):
                if extra_ids and ord(max("".join(turn))) >= config.vocab_size:
                    fail(f"{name} has a token id outside --model's vocabulary of "
                         f"{config.vocab_size} tokens: use the model that sampled it")
                fits = sum(map(len, turn)) <= longest
                action[TURN] = turn if fits else None
                if fits:
                    ref_turn_of[turn] = ref_turn
                else:
                    add_warning(f"turns exceed {longest} tokens (--max_length or --model's limit): "
                                "they get no score, and their trajectories no pairs", name)
    print_warnings()
    return ref_turn_of


def check_opening(record, name):
    """Warns if a dialogue's first message differs from first_message(task) in more than numbers."""
    task, text = record["task"], record["dialogue_history"][0]["content"]
    text = text.removeprefix(HIDDEN.format(hidden=hidden_information(task)))
    rendered = first_message(task, 10)["content"]  # 10 turns, or another number
    if re.sub(r"\d+", "", text) != re.sub(r"\d+", "", rendered):
        start = max(0, common_prefix(text, rendered) - 20)
        add_warning("dialogues do not begin with first_message(task, max_turns), which collect.py "
                    "shows the agent: an agent trained on them may fail there", f"{name} has "
                    f"{text[start:start + 60]!r}, first_message {rendered[start:start + 60]!r}")


if __name__ == "__main__":
    run(main, ARGS)
