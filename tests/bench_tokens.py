"""The official procedure's tokens, over those that the trainers' batches compute.

    python tests/bench_tokens.py

Made-up trajectories of the paper's shape: six turns with histories of 300 to 1,500 tokens, 16
candidates and four pairs a turn; for the critic four trajectories a task, also those of
bench_train.py. The batches are made and dealt to ranks by the trainers' own functions. The slowest
of 8: over each step's slowest rank's tokens, times 8. The last column counts the reference, too, in
one epoch: officially it computes what training does. Of your own data, `--dry_run N` prints these.
"""
import os
import random
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from model import Pair, batches, count_tokens, deal, official_tokens, turns_in  # noqa: E402

MAX_TOKENS = 16384


def tokens(r, low, high):
    return tuple(r.randrange(50_000) for _ in range(r.randint(low, high)))


def candidate_groups(r):
    """[[Pair]], a group for each turn of a trajectory."""
    history, groups = tokens(r, 300, 500), []
    for _ in range(6):
        candidates = [tokens(r, 20, 100) for _ in range(16)]
        drawn = [r.sample(candidates, 2) for _ in range(4)]
        groups.append([Pair(((history, a),), ((history, b),)) for a, b in drawn])
        history += r.choice(candidates) + tokens(r, 60, 160)
    return groups


def trajectory_group(r, best=0, start=(300, 500), action=(20, 100), reply=(60, 160)):
    """[Pair] of four trajectories of a task: all pairs, or the first one against the others."""
    start, trajectories = tokens(r, *start), []
    for _ in range(4):
        history, turns = start, []
        for _ in range(6):
            turns.append((history, tokens(r, *action)))
            history += turns[-1][1] + tokens(r, *reply)
        trajectories.append(tuple(turns))
    chosen = trajectories[:1] if best else trajectories
    return [Pair(a, b) for i, a in enumerate(chosen) for b in trajectories[i + 1:]]


def ratios(groups, batch_size, ranks):
    """Official tokens over all computed ones, over the slowest rank's, and with the reference."""
    steps, computed, slowest = batches(groups, batch_size, seed=(0, 0)), 0, 0
    for batch in steps:
        parts = list(map(count_tokens, deal(turns_in(batch), MAX_TOKENS, ranks)))
        share = -(-len(parts) // ranks)
        computed += sum(parts)
        slowest += ranks * max(sum(parts[n:n + share]) for n in range(0, len(parts), share))
    turns = turns_in(pair for group in groups for pair in group)
    reference = sum(map(count_tokens, deal(turns, MAX_TOKENS, 1)))
    total = sum(map(official_tokens, steps))
    return total / computed, total / slowest, 2 * total / (computed + reference)


def main():
    r = random.Random(0)
    trajectories = [candidate_groups(r) for _ in range(32)]
    policy = [[pair for group in groups for pair in group] for groups in trajectories]
    every = [trajectory_group(r) for _ in range(16)]
    like_bench_train = [trajectory_group(r, 0, (660, 660), (40, 80), (160, 160)) for _ in range(16)]
    rows = [("policy", policy, 8), ("policy", policy, 24), ("policy", policy, 32),
            ("policy", policy, 128), ("policy", policy, 192),
            ("critic, all pairs", every, 8), ("critic, all pairs", every, 48),
            ("critic of bench_train", like_bench_train, 48),
            ("critic, best", [trajectory_group(r, 1) for _ in range(32)], 48)]
    print(f"{'':22}batch  1 process  2 processes  8 processes  slowest of 8  8 and reference")
    for name, groups, size in rows:
        (alone, _, _), (two, _, _), eight = (ratios(groups, size, n) for n in (1, 2, 8))
        print(f"{name:22}{size:5}{alone:11.1f}{two:13.1f}{eight[0]:13.1f}{eight[1]:14.1f}"
              f"{eight[2]:17.1f}", flush=True)


if __name__ == "__main__":
    main()
