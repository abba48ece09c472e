"""Stage 1: the critic. It reads the hidden information c and learns from pairs of trajectories
which turns were good.

    A(o_t, a_t, c) = 1/L_t sum_l log [ pi(a_t^l | o_t, a_t^<l, c) / pi_ref(a_t^l | o_t, a_t^<l, c) ]
    loss = -log sigmoid( beta sum_t A(o_t+, a_t+, c) - beta sum_t A(o_t-, a_t-, c) )
           + nll_coef NLL(tau+)

These are eq. 3 and eq. 2 of the paper. o_t is the dialogue before message t, a_t the message, of
L_t tokens. tau+ and tau- are trajectories of one task; tau+ has the higher reward. The NLL is a
mean over its tokens. pi starts as pi_ref. In the code a *turn* is (prompt_ids, action_ids): a
message or candidate as token ids, with all that the model reads before it.

After training, every message and every candidate gets its `advantage` A, and the records go on
to stdout. --head selects what A is:

logratio    eq. 3
regression  a linear head on the mean hidden state of (c, o_t, a_t); eq. 2 without the NLL
value       a linear head's logit that the trajectory is the better one of its pair, trained by
            cross-entropy on every turn of the pairs
teacher     mean log pi_ref(a|c,o) - mean log pi_ref(a|o): what c says of the action to the
            untrained model

A --model with vision (Qwen2-VL, Qwen2.5-VL) reads the pages of frontend tasks as pictures.

    python train_critic.py --model runs/base --out runs/critic < in.jsonl > scored.jsonl
    torchrun --nproc_per_node=8 train_critic.py --out runs/critic < in.jsonl > scored.jsonl
    python train_critic.py --score 1 --out runs/critic < more.jsonl > scored.jsonl  # trains nothing
    for b in 0.1 1; do python train_critic.py --beta $b --out runs/c$b < in.jsonl > $b.jsonl; done
"""
# utils before what loads slowly: it sets up streams and signals
from utils import (RANK, Log, check_finite, digest, drop_checkpoints, end_by_signal, fail, flag,
                   from_rank_0, init_distributed, lr_at, machine_flags, open_stdout, parser,
                   progress, read_jsonl, rng, run, say, stop_signal, sum_over_ranks, writing)

import inspect
import json
import os
import sys

from colbench import (agent_messages, browser_flags, draw_pages, environment, hidden_information,
                      needs, with_hidden)

HEADS = "logratio", "regression", "value", "teacher"
LINEAR = "regression", "value"  # those with a head of their own
NORMALIZE = "turn", "trajectory", "none"
KEPT = "head", "hidden_info", "ref_context", "normalize", "picture_tokens"  # in critic.json


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] < trajectories.jsonl > scored.jsonl")
    flag(p, "model", "meta-llama/Llama-3.1-8B-Instruct", "pi_ref, and where pi starts")
    flag(p, "out", None, "directory for the model and its metrics.jsonl: a new one, or with "
         "--resume or --score a run's", required=True)
    g = p.add_argument_group("pairs")
    flag(g, "pairs", "best", "best: a task's best trajectory, if solved, and each worse one; "
         "all: any 2", choices=["best", "all"])
    flag(g, "margin", 0.1, "--pairs all: least difference of the two rewards")
    flag(g, "held_out", 0.1, "share of the tasks kept out of training, to report accuracy on; at "
         "least one, if it is above 0")
    g = p.add_argument_group("the critic")
    flag(g, "head", "logratio", "what A is, see above; only logratio needs the agent's own "
         "--model; teacher trains nothing and sets --ref_context agent", choices=HEADS)
    flag(g, "normalize", "turn", "log-ratios in the loss: the mean of a turn (eq. 3), the mean of "
         "a trajectory (released code), or none: their sum", choices=NORMALIZE)
    flag(g, "hidden_info", 1, "0: the critic reads what the agent reads", choices=[0, 1])
    flag(g, "ref_context", "hidden", "pi_ref reads c, too (eq. 3), or what the agent reads "
         "(released code)", choices=["hidden", "agent"])
    flag(g, "picture_tokens", 1024, "model with vision: most tokens of a page's picture",
         least=1)
    flag(g, "score", 0, "1: score stdin, of any length, with the finished critic in --out",
         choices=[0, 1])
    g = p.add_argument_group("objective and optimization")
    flag(g, "beta", 0.1, "scale of the margin")
    flag(g, "nll_coef", 0.01, "weight of the chosen side's NLL per token")
    flag(g, "lr", 2e-7, "peak: 3%% of the steps warm up, at least 3; then a cosine to a tenth")
    flag(g, "batch_size", 8, "pairs a step, over all GPUs", least=1)
    flag(g, "epochs", 4, "over the pairs")
    flag(g, "max_grad_norm", 1.0, "gradients are clipped to it")
    flag(g, "seed", 0, "of the order and of what is held out")
    machine_flags(p)
    browser_flags(p)
    args = p.parse_args(argv)
    if args.head == "teacher":  # pi is pi_ref with c in its prompt: no step
        args.hidden_info, args.ref_context, args.epochs, args.held_out = 1, "agent", 0, 0
    return args


if __name__ == "__main__":
    ARGS = get_args()  # before the slow imports: a wrong flag is told at once

import torch
import torch.nn.functional as F

from model import (COUNT, PICTURE, TURN, Pictures, action_ids, action_logps, base_digest, batches,
                   compare_tokens, count_of_all_ranks, dry_run, find_model, gathered, has_vision,
                   load, load_options, pick_dtype, raw_text, reference_logps, render, restore,
                   save, save_checkpoint, score, thinking_flag, trajectory_pairs, turns_in,
                   weights_digest)


# --- what the critic reads ------------------------------------------------------------------------

def as_read(history, hidden=None, picture_ids=None):
    """A conversation as a critic reads it, with `hidden`, the information c, in front.

    picture_ids(text): the ids of the picture of the page in a text, or (). A message's picture
    stands behind it. The picture of c stands behind the first message and replaces c's text.
    """
    if picture_ids:
        history = [{**m, PICTURE: picture_ids(m["content"])} if m["role"] == "assistant" else m
                   for m in history]
        hidden_picture = picture_ids(hidden) if hidden is not None else ()
        if hidden_picture:
            return [{**history[0], PICTURE: hidden_picture}, *history[1:]]
    return history if hidden is None else with_hidden(history, hidden)


def critic_turns(critic, tokenizer, task, history, actions, thinking=0, pictures=None):
    """[(turn, reference turn)] of actions after a history, what pi and what pi_ref read.

    They are the same, unless --ref_context agent takes c from the reference turn's prompt.
    critic: {flag: value} of head, hidden_info and ref_context. actions: messages or candidates.
    """
    page_in = environment(task).page
    picture_ids = (lambda text: pictures.ids(page_in(text))) if pictures else None

    def prompt_ids(hidden=None):
        return tuple(render(tokenizer, as_read(history, hidden, picture_ids), thinking))

    def ids_of(action):
        if critic["head"] not in LINEAR:
            return action_ids(tokenizer, action)
        picture = picture_ids(raw_text(action)) if pictures else ()
        return action_ids(tokenizer, action, False, picture)

    prompt = prompt_ids(hidden_information(task) if critic["hidden_info"] else None)
    ref_prompt = prompt if critic["ref_context"] == "hidden" else prompt_ids()
    return [((prompt, ids), (ref_prompt, ids)) for ids in map(ids_of, actions)]


def pages_in(records):
    """The pages that the critic looks at: the hidden ones and those that the agent wrote."""
    pages = set()
    for r in records:
        texts = [hidden_information(r["task"])]
        for message in agent_messages(r):
            texts += [message["content"], message.get("output")]
            texts += [candidate.get("output") for candidate in message.get("candidates", ())]
        pages.update(environment(r["task"]).page(text) for text in texts if text)
    return sorted(pages - {""})


# --- data -----------------------------------------------------------------------------------------

def add_turns(critic, tokenizer, records, max_length, pictures):
    """Sets action[TURN] for the agent's messages and candidates: their turn, None if too long.

    Returns ({turn: reference turn}, how many are too long).
    """
    ref_of, too_long = {}, 0
    for r in records:
        history = r["dialogue_history"]
        for t, message in enumerate(history):
            if message["role"] != "assistant":
                continue
            actions = [message, *message.get("candidates", ())]
            turns = critic_turns(critic, tokenizer, r["task"], history[:t], actions,
                                 thinking_flag(r), pictures)
            for action, (turn, ref_turn) in zip(actions, turns):
                fits = sum(map(len, turn)) <= max_length
                action[TURN] = turn if fits else None
                too_long += not fits
                if fits:
                    ref_of[turn] = ref_turn
    if too_long:
        say(f"{too_long} messages and candidates are longer than --max_length: they get no "
            "advantage, and trajectories with such a message are in no pair")
    return ref_of, too_long


def add_advantages(record, advantages):
    """The record, with advantages[turn] in the place of each message's and candidate's turn."""
    for message in agent_messages(record):
        for action in (message, *message.get("candidates", ())):
            turn = action.pop(TURN)
            action.pop("advantage", None)  # another critic's
            if turn is not None:
                action["advantage"] = advantages[turn]
    return record


def what_it_learned(args, train, held, logps, ref):
    """{"pair_loss", "held_out_accuracy"} of a critic. pair_loss: of the pairs it trained on."""
    def margins(groups):
        return torch.tensor([pair_loss(args, pair, logps, ref)[1] for pairs in groups.values()
                             for pair in pairs])

    def mean(values):
        return values.double().mean().item() if len(values) else None

    return {"pair_loss": mean(F.softplus(-margins(train))),
            "held_out_accuracy": mean(margins(held) > 0)}


def prepare(args, records):
    """Fills `records` from stdin, gives their actions turns, makes pairs, holds some out.

    Returns ({turn: reference turn}, {task id: [Pair]} to train on, the same held out, how many
    turns are too long, and Pictures or None).
    """
    need = needs("dialogue_history", "reward", to_train=True)
    records += read_jsonl(sys.stdin, need, skip_bad=args.skip_bad)
    path, tokenizer, config = find_model(args.model)
    pictures = None
    if has_vision(config) and not args.dry_run:
        files = draw_pages(args, pages_in(records), os.path.join(args.out, "pictures"))
        pictures = Pictures(path, config, args.picture_tokens, files)
    ref_of, too_long = add_turns(vars(args), tokenizer, records, args.max_length, pictures)
    pairs = trajectory_pairs(records, args.pairs, args.margin)
    if not pairs and args.head != "teacher":
        lack = "a solved and a worse one" if args.pairs == "best" else "two that differ by --margin"
        fail(f"no pairs in {len(records)} trajectories: no task has {lack} (--pairs all --margin 0 "
             "takes whatever differs; collect.py -k draws more per task)")
    draws = {task: rng("held out", args.seed, task).random() for task in pairs}
    held = {task: pairs[task] for task, draw in draws.items() if draw < args.held_out}
    if args.held_out > 0 and not held and len(pairs) > 1:  # at least one
        task = min(draws, key=draws.get)
        held[task] = pairs[task]
    if args.held_out > 0 and len(pairs) == 1:
        held = {}
        say("one task alone has pairs, so nothing is held out: no accuracy tells what it learns")
    train = {task: pairs[task] for task in pairs if task not in held}
    if pairs and not train:
        fail(f"--held_out {args.held_out} keeps all {len(held)} tasks with pairs out of training")
    return ref_of, train, held, too_long, pictures


# --- a finished critic, for --score 1 and collect.py --critic -------------------------------------

def save_critic(args):
    """Writes critic.json, for load_critic."""
    about = {"ref": os.path.abspath(args.model) if os.path.isdir(args.model) else args.model,
             "advantage": digest(inspect.getsource(advantage))}
    about.update({name: getattr(args, name) for name in KEPT})
    if RANK == 0:
        about["ref_weights"] = base_digest(args.model)
        with writing(os.path.join(args.out, "critic.json")) as part, open(part, "w") as f:
            json.dump(about, f)


def read_critic(folder):
    """critic.json's dict, of a finished run's --out."""
    try:
        with open(os.path.join(folder, "critic.json")) as f:
            critic = {"head": "logratio", "ref_context": "hidden", **json.load(f)}
    except (OSError, ValueError) as e:
        fail(f"no critic in {folder}: critic.json: {getattr(e, 'strerror', e)}; name the --out of "
             "a train_critic.py that has finished")
    for name, known in (("head", HEADS), ("normalize", NORMALIZE)):
        if critic[name] not in known:
            fail(f"the critic in {folder} is of --{name} {critic[name]}, which is not known here")
    return critic


def load_critic(folder, device, **options):
    """(critic.json's dict, tokenizer, models, Pictures or None) of a finished run's --out.

    models: [pi, pi_ref], or [pi] where a head gives A. options: see model.load.
    """
    critic = read_critic(folder)
    if critic.get("advantage", now := digest(inspect.getsource(advantage))) != now:
        say(f"advantage() has been edited since the critic in {folder} was trained")
    has_head = critic["head"] in LINEAR
    path, tokenizer, config = find_model(folder)
    models = [load(path, device, head=has_head, **options)[0]]
    if not has_head:
        ref = critic["ref"]
        if os.path.isabs(ref) and not os.path.isdir(ref):
            fail(f"the critic in {folder} needs pi_ref, the model that it began as: no {ref}")
        weights = weights_digest(find_model(ref, weights=True)[0])
        if critic.get("ref_weights", weights) != weights:
            fail(f"{ref} has other weights now than the model that the critic in {folder} began as")
        models.append(load(ref, device, **options)[0])
    pictures = Pictures(path, config, critic["picture_tokens"]) if has_vision(config) else None
    for model in models:
        model.pictures = pictures
    return critic, tokenizer, models, pictures


def score_turns(critic, models, ref_of, max_tokens):
    """{turn: its advantage, a float} of {turn: reference turn}, by the models of load_critic."""
    if not ref_of:
        return {}
    logps = score(models[0], list(ref_of), max_tokens)
    ref_logps = [torch.zeros(1)] * len(ref_of)  # a head's value has no reference
    if len(models) > 1:
        ref_logps = score(models[1], list(ref_of.values()), max_tokens)
    return {turn: advantage(p, ref, critic["normalize"]).item()
            for turn, p, ref in zip(ref_of, logps, ref_logps)}


def in_chunks(stream, size):
    """Lists of `size` records. A bad line ends the stream after the records before it."""
    chunk = []
    try:
        for record in stream:
            chunk.append(record)
            if len(chunk) == size:
                yield chunk
                chunk = []
    except SystemExit:
        yield chunk
        raise
    yield chunk


def score_stream(args, emit, device):
    """--score 1: scores 64 records at a time, so memory does not grow with their number."""
    kept, defaults = read_critic(args.out), get_args(["--out", args.out])
    for name in KEPT:
        value = getattr(args, name)
        if value not in (getattr(defaults, name), kept.get(name)):
            fail(f"--{name} {value}: the critic in {args.out} has {kept.get(name)}; leave it out")
    critic, tokenizer, models, pictures = load_critic(args.out, device,
                                                      **load_options(args, device))
    need = needs("dialogue_history", to_train=True)
    chunks = in_chunks(read_jsonl(sys.stdin, need, skip_bad=args.skip_bad), 64)
    bar = progress("scored")
    while (records := from_rank_0(lambda: next(chunks, None))) is not None:
        if pictures:
            folder = os.path.join(args.out, "pictures")
            drawn = from_rank_0(lambda: draw_pages(args, pages_in(records), folder))
            for page, file in drawn.items():
                pictures.add(page, file)
        ref_of, _ = add_turns(critic, tokenizer, records, args.max_length, pictures)
        advantages = score_turns(critic, models, ref_of, args.max_tokens)
        for r in records:
            emit(add_advantages(r, advantages))
        bar.update(len(records))
    bar.close()


# --- the loss -------------------------------------------------------------------------------------

def advantage(logps, ref_logps, normalize):
    """Eq. 3, one action: (L,) log-probs to a scalar; normalize="none" takes the sum.

    This is what is written. "trajectory" changes the loss alone, by trajectory_score.
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
    return -F.logsigmoid(margin) - nll_coef * torch.cat(chosen).mean(), margin


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
        return score_stream(args, emit, device)
    log = None if args.dry_run else Log(args)
    records = []  # on rank 0 alone, to be written at the end; the rest goes to every rank
    ref_of, train, held, too_long, pictures = from_rank_0(lambda: prepare(args, records))
    groups, turns, ref_turns = list(train.values()), list(ref_of), list(ref_of.values())
    steps = [batch for epoch in range(args.epochs)
             for batch in batches(groups, args.batch_size, args.seed, epoch)]
    config = find_model(args.model)[2]
    if args.dry_run:
        reference = ref_turns if args.head not in LINEAR else []
        return emit(dry_run(args, config, steps, reference, turns))
    log.begin(steps=len(steps), pairs=sum(map(len, groups)), tasks=len(groups), too_long=too_long,
              held_out_pairs=sum(map(len, held.values())),
              dtype=str(pick_dtype(args.dtype, device, config)),
              data=digest([[digest(both) for both in ref_of.items()],
                           [[digest(tuple(pair)) for pair in group] for group in groups]]),
              model_weights=base_digest(args.model))

    start = args.out if log.trained else args.model
    model, tokenizer = load(start, device, head=args.head in LINEAR, **load_options(args, device))
    model.pictures = pictures
    # zeros for a linear head, whose value is A already
    ref = dict(zip(turns, reference_logps(model, ref_turns, args.max_tokens, args.out)))
    fused = device.type == "cuda" and not args.offload
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95),
                                  weight_decay=0.0, fused=fused)
    restore(model, optimizer, log)

    for step in log.steps("critic", len(steps)):
        batch, before = steps[step], COUNT["tokens"]
        read = turns_in(batch)
        logps = dict(zip(read, action_logps(model, read, args.max_tokens)))
        losses, margins = zip(*(pair_loss(args, pair, logps, ref) for pair in batch))
        loss = sum(losses) / len(batch)  # on all ranks the same; FSDP sums their gradients
        loss.backward()
        margin = torch.stack(margins)
        right = {"accuracy": (margin > 0).double().mean().item(), "margin": margin.mean().item()}
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
    if not log.trained:
        save(model, tokenizer, args.out)
        log(last=True, trained=len(steps), **compare_tokens(steps, **count_of_all_ranks()))

    # the trained critic scores everything; a run that was killed here is `trained`, not `finished`
    logps = dict(zip(turns, score(model, turns, args.max_tokens, "advantages")))
    advantages = {turn: advantage(logps[turn], ref[turn], args.normalize).item() for turn in turns}
    if not log.finished:
        save_critic(args)
        log(last=True, finished=len(steps),
            **what_it_learned(args, train, held, logps, ref))
    drop_checkpoints(args.out)
    for r in records:
        emit(add_advantages(r, advantages))


if __name__ == "__main__":
    run(main, ARGS)
