"""Chooses the critic to train a policy with, by RESULTS.md's "One number to choose by".

    python train_critic.py --model M --out runs/critic < graded.jsonl > trained.jsonl
    python train_critic.py --score M --model M --ref_context agent < graded.jsonl > untrained.jsonl
    scored=$(python tests/experiments/choose_critic.py trained.jsonl untrained.jsonl)
    python train_policy.py --model M --out runs/policy < $scored

The files hold the same episodes, each with another critic's scores. Prints to stdout the name of
the file whose scores order more trajectory pairs correctly (of equals the first), and all counts to
stderr. A pair is ordered correctly if the better trajectory's advantages have the larger sum.
"""
import sys
from pathlib import Path

sys.path[:0] = map(str, [Path(__file__).resolve().parents[2], Path(__file__).resolve().parent])
from colbench import read_records, task_id  # noqa: E402
from lessons import ordered_pairs  # noqa: E402
from utils import fail, fail_on_error, flag, parser, run, say  # noqa: E402


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] FILE FILE...")
    p.add_argument("files", nargs="+", metavar="FILE", help="the output of train_critic.py")
    flag(p, "min_gap", None, "as in train_critic.py", kind=float)
    return p.parse_args(argv)


def main(args):
    ordered, episodes = {}, {}  # by the file's name: how many pairs, which episodes
    for name in args.files:
        with fail_on_error(name):
            file = open(name, encoding="utf-8")
        records = [*read_records(file, "dialogue_history", source=name)]
        episodes[name] = sorted((task_id(r["task"]), r.get("sample", 0)) for r in records)
        if episodes[name] != episodes[args.files[0]]:
            fail(f"{args.files[0]} and {name} have different episodes: let both critics score the "
                 "same")
        ordered[name], n = ordered_pairs(args, records)
        if not n:
            fail(f"{name} has no trajectory pairs with advantages, as train_critic.py adds them")
        say(f"{name} orders {ordered[name]} of {n} trajectory pairs correctly")
    print(max(args.files, key=ordered.get))


if __name__ == "__main__":
    run(main, get_args())
