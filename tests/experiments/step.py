"""Prints the training pairs of one step of a run, for example where the loss spikes.

    python tests/experiments/step.py runs/critic 48 < graded.jsonl | jq -r '.task, .chosen[-1][]'

stdin: the data that the run was trained on, from which its batches are computed again. Each line is
a pair: its task's id, its gap (see Pair in model.py) and its two sides, chosen and rejected, which
are lists of turns, [prompt, action], as the model reads them. With --loss rft `rejected` is empty.
"""
import os
import sys
from importlib import import_module

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", ".."))
from model import all_batches, find_model
from utils import changed_scripts, digest, fail, open_stdout, parser, rows_of, run, say


def main(args):
    emit = open_stdout()
    *_, start = {"steps": 0}, *(row for row in rows_of(args.run) if "args" in row)
    if not 0 <= args.step < start["steps"]:
        fail(f"no step {args.step}: the run in {args.run} has {start['steps']}, counted from 0")
    trainer = import_module(os.path.basename(start["argv"][0]).removesuffix(".py"))
    if changed := changed_scripts(args.run):
        say(f"warning: the run is of another {changed}, which may have made other batches")
    flags = trainer.get_args([])
    vars(flags).update(start["args"])
    path = os.path.join(start["cwd"], flags.model)
    flags.model = path if os.path.isdir(path) else flags.model  # it may have moved
    groups, held_out = prepare(trainer, flags)
    pairs = [pair for group in groups for _, pair in group] + held_out
    if digest([digest(pair) for pair in pairs]) != start["pairs_hash"]:  # see RunDirectory
        fail(f"stdin is not the data of the run in {args.run}: its pairs_hash is another")
    tokenizer = find_model(flags.model)[1]

    def decoded(turns):
        return [[tokenizer.decode([*map(ord, part)]) for part in turn] for turn in turns]

    for task, pair in all_batches(groups, flags.batch_size, flags.epochs, flags.seed)[args.step]:
        emit({"task": task, "gap": pair.gap, "chosen": decoded(pair.chosen),
              "rejected": decoded(pair.rejected)})


def prepare(trainer, flags):
    """Returns ([[(task id, Pair)]] to train on, [Pair] held out), from the trainer's prepare()."""
    if trainer.__name__ == "train_critic":
        _, (_, pairs_of, held_out) = trainer.prepare(flags)
        return [[(task, pair) for pair in pairs] for task, pairs in pairs_of.items()], held_out
    made, make_groups = [], trainer.make_groups  # its task ids, which prepare() does not return
    trainer.make_groups = lambda *given: made.extend(make_groups(*given)) or made
    groups, held_out = trainer.prepare(flags)
    task_of = {id(pairs): task for task, pairs in made}
    return [[(task_of[id(pairs)], pair) for pair in pairs] for pairs in groups], held_out


if __name__ == "__main__":
    p = parser(__doc__, "%(prog)s RUN STEP < in.jsonl")
    p.add_argument("run", metavar="RUN", help="the --out directory of a trainer")
    p.add_argument("step", metavar="STEP", type=int, help="the step in its metrics.jsonl, from 0")
    run(main, p.parse_args())
