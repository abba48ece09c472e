"""A waiter's orders: the agent asks the guest for dish, size and extra, then writes the order.

The scripts know this kind of task after `export ENVIRONMENTS_FILE=tests/experiments/orders.py`
(MANUAL.md, "Your own environment").

    python tests/experiments/orders.py tasks --n 100 > tasks.jsonl
    python tests/experiments/orders.py demos --shown 0.4 > demos.jsonl  # scripted, of mixed quality
    python tests/experiments/orders.py model --out tiny  # toy.py's Llama, with these words as tokens
"""
import sys
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[1:3])
from colbench import ANSWER, Environment, first_message, with_hidden  # noqa: E402
from utils import open_stdout, parser, rng, run  # noqa: E402

CHOICES = {"dish": ("soup", "pizza", "salad"), "size": ("small", "large"),
           "extra": ("salt", "cheese", "lemon", "no extra")}


class Orders(Environment):

    def grade(self, record):
        ours, wanted = record["answer"].lower(), record["task"]["ground_truth"]
        pairs = zip(ours.split(","), wanted.split(", "))
        return {"reward": sum(ours.strip() == wanted for ours, wanted in pairs) / len(CHOICES)}


ENVIRONMENTS = {"orders": Orders()}


def reply(task, history):  # for --human orders.py
    for name, value in zip(CHOICES, task["ground_truth"].split(", ")):
        if name in history[-1]["content"]:
            return value
    return "I do not know"


def tasks(split, args):
    for i in range(args.n):
        dish, size, extra = map(rng(split, args.seed, i).choice, CHOICES.values())
        yield {"id": f"{split}{args.seed}-{i}", "ground_truth": f"{dish}, {size}, {extra}",
               "kind": "orders", "problem_description": "A guest comes in.",
               "hidden_information": f"a {size} {dish} with {extra}"}


def demos(args):
    """Yields scripted episodes that ask for each detail with probability 0.7 and else guess it.

    The share args.shown begins with the hidden information, and reads there what it does not ask.
    """
    for task in tasks("demo", args):
        r, order, history = rng("demo", task["id"]), [], [first_message(task, max_turns=4)]
        shown = r.random() < args.shown
        for (name, choices), value in zip(CHOICES.items(), task["ground_truth"].split(", ")):
            if r.random() < 0.7:
                history.append({"role": "assistant", "content": f"Which {name}?"})
                history.append({"role": "user", "content": reply(task, history)})
                order.append(value)
            else:
                order.append(value if shown else r.choice(choices))
        history.append({"role": "assistant", "content": f"{ANSWER} {', '.join(order)}"})
        if shown:
            history = with_hidden(history, task["hidden_information"])
        yield {"task": task, "dialogue_history": history}


def main(args):
    emit = open_stdout()
    if args.command == "model":
        from toy import tiny_model  # imports torch
        args.shown = 0.5  # so that the hidden information's words are tokens, too
        for part in tiny_model(demos(args), args.seed):
            part.save_pretrained(args.out)
    else:
        for record in demos(args) if args.command == "demos" else tasks("task", args):
            emit(record)


if __name__ == "__main__":
    p = parser(__doc__, usage=None)
    p.add_argument("command", choices=["tasks", "demos", "model"])
    p.add_argument("--n", type=int, default=1000, help="number of tasks, or of demonstrations")
    p.add_argument("--seed", type=int, default=0, help="random seed")
    p.add_argument("--shown", type=float, default=0,
                   help="share of the demonstrations that begin with the reference")
    p.add_argument("--out", help="model: its directory")
    run(main, p.parse_args())
