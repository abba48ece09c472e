"""Tokens that the trainers' batches compute, beside those of the official procedure.

    python tests/bench_tokens.py

Made-up trajectories of the paper's shape: six turns with histories of 300 to 1,500 tokens, 16
candidates and four pairs a turn; for the critic four trajectories a task. The batches are made and
dealt to ranks by the trainers' own functions. Of your own data, `--dry_run N` prints the same.
"""
import os
import random
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from model import Pair, batches, even_parts, tree_tokens, turns_in  # noqa: E402

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


def trajectory_group(r, best):
    """[Pair] of four trajectories of a task: all pairs, or the first one against the others."""
    start, trajectories = tokens(r, 300, 500), []
    for _ in range(4):
        history, turns = start, []
        for _ in range(6):
            turns.append((history, tokens(r, 20, 100)))
            history += turns[-1][1] + tokens(r, 60, 160)
        trajectories.append(tuple(turns))
    chosen = trajectories[:1] if best else trajectories
    return [Pair(a, b) for i, a in enumerate(chosen) for b in trajectories[i + 1:]]


def official(pair):
    """Two sequences, each a side's last turn with all before it, padded to the longer one."""
    return 2 * max(len(prompt) + len(action) for prompt, action in (pair.chosen[-1],
                                                                    pair.rejected[-1]))


def ratios(groups, batch_size, ranks):
    """Official tokens over all computed ones, and over the slowest rank's times the ranks."""
    total = computed = slowest = 0
    for batch in batches(groups, batch_size, 0, 0):
        total += sum(map(official, batch))
        sizes = [tree_tokens(turns_in(part)) for part in even_parts(batch, MAX_TOKENS, ranks)]
        sizes += sizes[-1:] * (-len(sizes) % ranks)
        computed += sum(sizes)
        slowest += ranks * max(sum(sizes[rank::ranks]) for rank in range(ranks))
    return total / computed, total / slowest


def main():
    r = random.Random(0)
    trajectories = [candidate_groups(r) for _ in range(32)]
    by_turn = [group for groups in trajectories for group in groups]
    by_trajectory = [[pair for group in groups for pair in group] for groups in trajectories]
    rows = [("policy", by_turn, 8), ("policy", by_turn, 32), ("policy", by_turn, 128),
            ("policy by trajectory", by_trajectory, 24),
            ("policy by trajectory", by_trajectory, 32),
            ("policy by trajectory", by_trajectory, 128),
            ("critic, all pairs", [trajectory_group(r, 0) for _ in range(16)], 8),
            ("critic, all pairs", [trajectory_group(r, 0) for _ in range(16)], 48),
            ("critic, best", [trajectory_group(r, 1) for _ in range(32)], 48)]
    print(f"{'':22}batch  1 process  8 processes  slowest of 8")
    for name, groups, size in rows:
        alone, _ = ratios(groups, size, 1)
        eight, slowest = ratios(groups, size, 8)
        print(f"{name:22}{size:5}{alone:11.1f}{eight:13.1f}{slowest:14.1f}", flush=True)


if __name__ == "__main__":
    main()
