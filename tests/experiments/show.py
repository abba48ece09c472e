"""Prints the dialogues that a trainer would train on, with the trained tokens marked.

    python tests/experiments/show.py train_policy.py --loss rft --all 1 --model runs/base < demos.jsonl
    python tests/experiments/show.py train_critic.py --min_gap 0 --model runs/base < trajectories.jsonl

Put it before a trainer's command: the trainer's own functions read stdin with these flags and make
the pairs, so that what is printed is what would be trained, template and all. Nothing is trained,
and --out is not touched. A token is trained by where it is, not by what it says: the same text in a
prompt is not marked.

In a terminal the trained tokens of a pair's chosen side are green, those of its rejected side red;
elsewhere they stand in [[ and ]]. The rest is what the model reads. Control characters in texts are
printed as ?.
"""
import signal
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils import fail, run  # noqa: E402

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
    from model import common_prefix

    def decode(ids):
        return printable(tokenizer.decode([*map(ord, ids)], skip_special_tokens=False))

    before, after = "[[", "]]"
    if sys.stdout.isatty():
        before, after = COLOURS[side], RESET
    text, so_far = "", ""
    for turn in turns:
        shared = common_prefix(so_far, turn.prompt)
        if shared < len(so_far):
            text += f"\n... the next prompt shares {shared} tokens with the text above, then reads\n"
        text += decode(turn.prompt[shared:]) + before + decode(turn.action) + after
        so_far = turn.prompt + turn.action
    return text


def groups_of(args, trainer):
    """Returns [(task id, [Pair])] of stdin."""
    from model import read_trajectories, trajectory_pairs
    if trainer.__name__ == "train_policy":
        trajectories = read_trajectories(args, pi_reads_c=False, ref_reads_c=False)
        groups = [(task, pairs) for task, pairs in trainer.make_groups(args, trajectories) if pairs]
        return groups or fail("there is nothing to train on")
    trajectories = read_trajectories(args, "reward", pi_reads_c=True,
                                     ref_reads_c=args.ref_context == "hidden")
    groups = [*trajectory_pairs(trajectories, args.min_gap).items()]
    return groups or fail("no task has a pair of trajectories")


def main(args):
    from model import find_model
    tokenizer = find_model(args.model)[1]
    for task, pairs in groups_of(args, args.trainer):
        for i, pair in enumerate(pairs, 1):
            for side in ("chosen", "rejected"):
                turns = getattr(pair, side)
                if not turns:  # of --loss rft, which has one side
                    continue
                trained = sum(len(turn.action) for turn in turns)
                print(printable(f"--- task {task}, pair {i} of {len(pairs)}, {side}: {len(turns)} "
                                f"messages, {trained} trained tokens ---"))
                print(marked(tokenizer, turns, side), end="\n\n", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        sys.exit(print(__doc__))
    if sys.argv[1] not in TRAINERS:
        fail(f"{sys.argv[1]} is no trainer: give {' or '.join(TRAINERS)} and its flags")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `| head` ends it silently
    TRAINER = import_module(sys.argv[1].removesuffix(".py"))
    ARGS = TRAINER.get_args(sys.argv[2:])
    ARGS.trainer = TRAINER
    run(main, ARGS)
