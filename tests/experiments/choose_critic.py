"""Chooses the critic to train a policy with, by RESULTS.md's "One number to choose by".

    python train_critic.py --model M --out runs/critic < graded.jsonl > trained.jsonl
    python train_critic.py --score M --model M --ref_context agent < graded.jsonl > untrained.jsonl
    scored=$(python tests/experiments/choose_critic.py trained.jsonl untrained.jsonl)
    python train_policy.py --model M --out runs/policy < $scored

The files hold the same episodes, each with another critic's scores. Prints to stdout the name of
the file whose scores order more trajectory pairs correctly (of equals the first), and all counts,
which train_critic.py prints, too, to stderr.
"""
import sys
from pathlib import Path

sys.path[:0] = map(str, [Path(__file__).resolve().parents[2], Path(__file__).resolve().parent])
from colbench import agent_messages, message_texts, read_records, task_id  # noqa: E402
from model import Action, Trajectory, Turn, turn_actions  # noqa: E402
from train_critic import count_ordered_pairs  # noqa: E402
from utils import fail, fail_on_error, parser, run, say  # noqa: E402


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] FILE FILE...")
    p.add_argument("files", nargs="+", metavar="FILE", help="the output of train_critic.py")
    p.add_argument("--min_gap", type=float, help="as in train_critic.py")
    return p.parse_args(argv)


def as_trajectory(record):
    """Returns the Trajectory of a scored record, with texts instead of tokens in its turns."""
    task = task_id(record["task"])  # episodes of two tasks may have the same texts
    actions = []
    for history, (message, *_) in turn_actions(record):
        turn = Turn(repr([task, message_texts(history)]), message["content"])
        actions.append([Action(message, turn, None)])
    return Trajectory(task, record, actions)


def content(record):
    """Returns what files that belong together have in common: a record but for its scores."""
    has_scores = ["advantage" in m for m in agent_messages(record)]
    return (task_id(record["task"]), record.get("sample", 0), record.get("reward"),
            message_texts(record["dialogue_history"]), has_scores, "value" in record)


def main(args):
    ordered, contents = {}, {}  # by the file's name
    for name in args.files:
        with fail_on_error(name):
            file = open(name, encoding="utf-8")
        records = [*read_records(file, "dialogue_history", source=name)]
        contents[name] = sorted(map(repr, map(content, records)))
        if contents[name] != contents[args.files[0]]:
            fail(f"{args.files[0]} and {name} do not belong together: let both critics score the "
                 "same records, with the same --max_length")
        ordered[name], n = count_ordered_pairs([*map(as_trajectory, records)], args.min_gap)
        if not n:
            fail(f"{name} has no trajectory pairs with values, as train_critic.py adds them")
        say(f"{name} orders {ordered[name]:g} of {n} trajectory pairs correctly")
    print(max(args.files, key=ordered.get))


if __name__ == "__main__":
    run(main, get_args())
