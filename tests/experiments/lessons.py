"""Shows what a policy will learn from scored candidates: look here before you train one.

    python tests/experiments/lessons.py --logprob_weight 0.1 < scored.jsonl

The candidate pairs are those that train_policy.py draws with the same flags. A message is an answer,
truncated (at --max_tokens), or else a question. The table on stderr has a row for each turn:

    pairs       number of candidate pairs
    answers     their share among chosen, among rejected and among all candidates, in %
    truncated   their share in the upper and in the lower half of the ranking, in %
    gap         mean advantage of the chosen less that of the rejected candidates
    spread      standard deviation within a turn, averaged over turns: of the advantage, and of
                --logprob_weight x log-prob
    corr        correlation of these two within turns

Then come the share of the trajectory pairs that the advantages order correctly, by which to choose
between a trained critic and the untrained one, warnings, and on stdout all numbers as one line of
JSON.
"""
import math
import sys
from itertools import chain
from pathlib import Path
from statistics import fmean

sys.path[:0] = map(str, [Path(__file__).resolve().parents[2], Path(__file__).resolve().parent])
import torch  # noqa: E402

from choose_critic import as_trajectory  # noqa: E402
from colbench import read_action, read_records  # noqa: E402
from model import Action, Turn, packed, turn_actions  # noqa: E402
from train_critic import count_ordered_pairs  # noqa: E402
from train_policy import candidate_pairs  # noqa: E402
from utils import fail, open_stdout, parser, run, say  # noqa: E402

COLUMNS = {  # {column of the table: name of its number}
    "turn": "turn", "pairs": "pairs", "answers: chosen": "answers_chosen",
    "rejected": "answers_rejected", "all": "answers", "truncated: upper": "truncated_upper",
    "lower": "truncated_lower", "gap": "gap", "spread: advantage": "advantage_spread",
    "log-prob": "logprob_spread", "corr": "correlation"}


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] < scored.jsonl")
    p.add_argument("--pairs_per_turn", type=int, default=4, help="as in train_policy.py")
    p.add_argument("--logprob_weight", type=float, default=0.0, help="as in train_policy.py, but "
                   "by the stored log-probs")
    p.add_argument("--min_gap", type=float, help="as in train_policy.py")
    p.add_argument("--seed", type=int, default=0, help="as in train_policy.py")
    return p.parse_args(argv)


# --- one turn -------------------------------------------------------------------------------------

def output_of(message):
    """Returns what the model wrote, or the content of a message that has no output."""
    return message["output"] if "output" in message else message["content"]


def kind_of(message):
    """Returns "truncated", "answer" or "question"."""
    if message.get("cut"):
        return "truncated"
    _, answer = read_action(output_of(message), last=False)
    return "question" if answer is None else "answer"


def action_of(message, prompt=""):
    """Returns the Action of a message, whose turn has a made-up prompt: pairs need no other."""
    ids = message.get("token_ids") or map(ord, output_of(message))
    return Action(message, Turn(prompt, packed(ids)), None)


class Ranked:
    """The scored candidates of one message, in the order of their values, and their pairs."""

    def __init__(self, args, candidates):
        def value(c):
            return c["advantage"] + args.logprob_weight * c.get("logprob", 0)

        ranked = sorted(candidates, key=value, reverse=True)
        half = len(ranked) // 2
        self.kinds = [kind_of(c) for c in ranked]
        self.upper, self.lower = self.kinds[:half], self.kinds[len(ranked) - half:]
        self.advantages = [c["advantage"] for c in ranked]
        self.logprobs = [args.logprob_weight * c.get("logprob", 0) for c in ranked]
        actions = [action_of(c) for c in candidates]
        logps = {a.turn: torch.tensor([a.fields.get("logprob", 0.0)]) for a in actions}
        fields_of = {action.turn: action.fields for action in actions}
        self.pairs = [(fields_of[pair.chosen[0]], fields_of[pair.rejected[0]])
                      for pair in candidate_pairs(args, actions, logps)]


# --- all turns ------------------------------------------------------------------------------------

def percent(kinds, kind):
    """Returns the share of a kind among kinds in %, None without any."""
    return round(100 * kinds.count(kind) / len(kinds), 1) if kinds else None


def deviations(values):
    """Returns what the values deviate from their mean by."""
    mean = fmean(values)
    return [x - mean for x in values]


def spread(values):
    return math.sqrt(fmean(x * x for x in deviations(values)))


def correlation(turns):
    """Returns the correlation of advantage and log-prob within turns, None if one is constant."""
    a = [x for turn in turns for x in deviations(turn.advantages)]
    b = [x for turn in turns for x in deviations(turn.logprobs)]
    size = math.hypot(*a) * math.hypot(*b)
    return round(sum(x * y for x, y in zip(a, b)) / size, 2) if size > 1e-12 else None


def numbers_of(turns):
    """Returns the numbers of some Ranked turns, see the module's docstring."""
    pairs = [pair for turn in turns for pair in turn.pairs]
    gaps = [chosen["advantage"] - rejected["advantage"] for chosen, rejected in pairs]
    return {
        "turns": len(turns), "pairs": len(pairs),
        "answers_chosen": percent([kind_of(chosen) for chosen, _ in pairs], "answer"),
        "answers_rejected": percent([kind_of(rejected) for _, rejected in pairs], "answer"),
        "answers": percent([kind for turn in turns for kind in turn.kinds], "answer"),
        "truncated_upper": percent([kind for turn in turns for kind in turn.upper], "truncated"),
        "truncated_lower": percent([kind for turn in turns for kind in turn.lower], "truncated"),
        "gap": round(fmean(gaps), 3) if gaps else None,
        "advantage_spread": round(fmean(spread(turn.advantages) for turn in turns), 3),
        "logprob_spread": round(fmean(spread(turn.logprobs) for turn in turns), 3),
        "correlation": correlation(turns)}


# --- what to do -----------------------------------------------------------------------------------

def warnings_of(rows, right, n):
    """Yields texts. rows: {number of the turn, or "all": its numbers}."""
    total = rows["all"]
    by_turn = [row for number, row in rows.items() if number != "all" and row["pairs"]]
    rejects = [row["answers_chosen"] < row["answers_rejected"] for row in by_turn
               if row["answers_chosen"] or row["answers_rejected"]]
    if n and right / n < 2 / 3:
        yield "the advantages order fewer than two thirds of the trajectory pairs: try another critic"
    if rejects and all(rejects):
        yield ("in every turn answers are rejected more often than chosen: the policy may learn "
               "never to answer (train_policy.py --mix 0.25 adds whole trajectories)")
    if (total["truncated_upper"] or 0) > (total["truncated_lower"] or 0):
        yield ("truncated messages rank higher than others: they are never chosen, but their turns' "
               "pairs are unsound; sample again with a larger --max_tokens, or raise "
               "--logprob_weight")


def print_table(rows):
    lines = [[*COLUMNS]]
    for number, row in rows.items():
        values = [{"turn": number, **row}[name] for name in COLUMNS.values()]
        lines.append(["-" if value is None else str(value) for value in values])
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        say("  ".join(text.rjust(width) for text, width in zip(line, widths)))


def main(args):
    emit, by_turn = open_stdout(), {}  # {number of the turn: [Ranked]}
    records = [*read_records(sys.stdin, "dialogue_history")]
    for record in records:
        for number, (_, (_, *candidates)) in enumerate(turn_actions(record), 1):
            scored = [c for c in candidates if "advantage" in c]
            if len(scored) > 1:
                by_turn.setdefault(number, []).append(Ranked(args, scored))
    if not by_turn:
        fail("no turn has two candidates with an advantage, as train_critic.py adds it")
    rows = {number: numbers_of(by_turn[number]) for number in sorted(by_turn)}
    rows["all"] = numbers_of([*chain(*by_turn.values())])
    print_table(rows)
    right, n = count_ordered_pairs([*map(as_trajectory, records)], args.min_gap)
    if n:
        say(f"{100 * right / n:.1f} % of {n} trajectory pairs are ordered correctly by the sum of "
            "their advantages")
    warnings = [*warnings_of(rows, right, n)]
    for text in warnings:
        say(f"warning: {text}")
    emit({"by_turn": rows, "trajectory_pairs": n, "ordered": right, "warnings": warnings})


if __name__ == "__main__":
    run(main, get_args())
