"""Prints what a trainer trains on, with the trained tokens marked: its whole input, or a step's.

    python tests/experiments/show.py train_policy.py --loss rft --all 1 --model M < demos.jsonl
    python tests/experiments/show.py runs/critic 48 < graded.jsonl   # step 48, where the loss jumps

The first form is a trainer's command, whose own functions read stdin and make the pairs. Nothing is
trained, and --out is not touched. The second form computes the batches of a run again, from the
data that it was trained on. Both print pairs in the order of training; held-out ones are left out.

In a terminal the trained tokens of a pair's chosen side are green, those of its rejected side red;
elsewhere they stand in [[ and ]]. The rest is what the model reads. A token is trained by where it
is: the same text in a prompt is not marked. Control characters are printed as ?.
"""
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from model import all_batches, common_prefix, data_hash, find_model, load  # noqa: E402
from utils import changed_scripts, fail, read_metrics, run, say  # noqa: E402

TRAINERS = "train_policy.py", "train_critic.py"
COLOURS = {"chosen": "\033[32m", "rejected": "\033[31m"}
RESET = "\033[0m"


def printable(text):
    """Returns the text with ? for control characters other than a newline or a tab."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def marked(tokenizer, turns, side):
    """Returns the text of a pair's side, with the trained tokens marked.

    Of a prompt only what follows the earlier text is shown. Where it differs from that text, as in
    templates that drop earlier thoughts, a line says so.
    """
    def decode(ids):
        return printable(tokenizer.decode([*map(ord, ids)], skip_special_tokens=False))

    before, after = "[[", "]]"
    if sys.stdout.isatty():
        before, after = COLOURS[side], RESET
    text, so_far = "", ""
    for turn in turns:
        shared = common_prefix(so_far, turn.prompt)
        if shared < len(so_far):
            text += f"\n... the next prompt shares {shared} tokens with the text above, then is\n"
        text += decode(turn.prompt[shared:]) + before + decode(turn.action) + after
        so_far = turn.prompt + turn.action
    return text


def groups_of(trainer, args, trajectories):
    """Returns [(task id, [Pair])] that the trainer trains on."""
    if trainer.__name__ == "train_critic":
        return trainer.make_pairs(args, trajectories)[0]
    model = load(args.model)[0] if args.logprob_weight else None
    ref_logps = trainer.candidate_logps(args, trajectories, model)
    return trainer.make_pairs(args, trajectories, ref_logps)[0]


def pairs_of_step(out, step):
    """Returns (the flags of the run in `out`, the pairs of one of its steps)."""
    *_, start = {"steps": 0}, *(row for row in read_metrics(out) if "args" in row)
    if not 0 <= step < start["steps"]:
        fail(f"no step {step}: the run in {out} has {start['steps']}, counted from 0")
    trainer = import_module(os.path.basename(start["argv"][0]).removesuffix(".py"))
    if changed := changed_scripts(out):
        say(f"warning: the run is of another {', '.join(changed)}, which may have made other batches")
    args = trainer.get_args([])
    vars(args).update(start["args"])
    path = os.path.join(start["cwd"], args.model)
    args.model = path if os.path.isdir(path) else args.model  # the run may have been elsewhere
    trajectories = trainer.read(args)
    if data_hash(trajectories) != start["data_hash"]:
        fail(f"stdin is not the data of the run in {out}: its data_hash is another")
    groups = groups_of(trainer, args, trajectories)
    return args, all_batches(groups, args.batch_size, args.epochs, args.seed)[step]


def main(argv):
    if argv[0] in TRAINERS:
        trainer = import_module(argv[0].removesuffix(".py"))
        args = trainer.get_args(argv[1:])
        groups = groups_of(trainer, args, trainer.read(args))
        pairs = [pair for _, group in groups for pair in group]
    else:
        args, pairs = pairs_of_step(argv[0], int(argv[1]))
    tokenizer = find_model(args.model)[1].tokenizer
    for i, pair in enumerate(pairs, 1):
        for side in ("chosen", "rejected"):
            turns = getattr(pair, side)
            if not turns:  # of --loss rft, which has one side
                continue
            trained = sum(len(turn.action) for turn in turns)
            print(f"--- pair {i} of {len(pairs)}, {side}: {len(turns)} messages, {trained} trained "
                  "tokens ---")
            print(marked(tokenizer, turns, side), end="\n\n", flush=True)


if __name__ == "__main__":
    is_step = len(sys.argv) == 3 and sys.argv[2].isdecimal()
    if not is_step and sys.argv[1:2] not in ([name] for name in TRAINERS):
        sys.exit(__doc__)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `| head` ends it silently
    run(main, sys.argv[1:])
