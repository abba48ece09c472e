"""Scores messages without a critic: fills the `advantage` of messages and candidates.

    python tests/experiments/credit.py --by progress --model runs/base < graded.jsonl > scored.jsonl

progress: A(a_t) = 1/L [log p(y | o_t, a_t, r_t) - log p(y | o_t)] under --model. y is the reference
as the agent's message, L tokens with ANSWER and the end token, after the dialogue o_t, message a_t
and reply r_t. A candidate or last message has no reply: y follows a_t, a second message in a row.

reaction: 1 if the reply, less sentences such as "I do not mind", has a word that the dialogue has
not had yet, else -1; 0 for an answer, which gets no reply. A candidate gets the mean over replies
to the same text in the task's episodes, or no advantage. --model, --dtype and the like are
train_critic.py's.
"""
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch  # noqa: E402

from colbench import ANSWER, message_texts, read_action, read_records, task_id  # noqa: E402
from model import (Action, Trajectory, load, read_actions, turn_logps,  # noqa: E402
                   turn_actions)
from train_critic import get_args, print_ordered_pairs, trajectory_value  # noqa: E402
from utils import (fail_on_error, init_distributed, open_stdout, parser,  # noqa: E402
                   print_warnings, run, say)

REFUSAL = re.compile(r"(n['’]t|not|never) (know|mind|say|care|tell|matter|sure)|up to you")


def progress(args, steps):
    """Returns the advantage of each step (see main)."""
    model, chat = load(args.model, init_distributed(), args.dtype, args)

    def turn(r, o):
        y = {"role": "assistant", "content": f"{ANSWER}\n{r['task']['ground_truth']}"}
        with fail_on_error("--model's chat template rejects the dialogue"):
            action, = read_actions(chat, r, o, [y], pi_reads_hidden=False,
                                   ref_reads_hidden=False)
            return action.turn

    pairs = [(turn(r, history), turn(r, [*history, message, *(reply or ())]))  # (before, after)
             for _, r, history, message, reply in steps]
    unique = sorted({turn for pair in pairs for turn in pair})
    logps = turn_logps(model, unique, args.tree_tokens, "references")
    return [(logps[after].mean() - logps[before].mean()).item() for before, after in pairs]


def reaction(args, steps):
    """Returns the advantage of each step (see main), None if no reply is known."""
    replies, values = {}, []  # replies: {(task id, message): [reply]}
    for _, r, _, message, reply in steps:
        replies.setdefault((task_id(r["task"]), message["content"]), []).extend(reply or ())
    for _, r, history, message, reply in steps:
        if reply is None:
            reply = replies[task_id(r["task"]), message["content"]] or None
        news = [is_informative(m["content"], [*history, message]) for m in reply or ()]
        values.append(None if reply is None else 2 * sum(news) / len(news) - 1 if news else 0.0)
    return values


def is_informative(reply, history):
    """Whether a reply has a word, outside of refusals, that the dialogue has not had yet."""
    parts = re.split(r"[.!?;]\s+|\n|\bbut\b", reply.lower())
    told = " ".join(part for part in parts if not REFUSAL.search(part))
    known = re.findall(r"\w+", " ".join(message_texts(history)).lower())
    return not {*re.findall(r"\w+", told)} <= {*known}


def main(by, args):
    emit, records = open_stdout(), [*read_records(sys.stdin, "dialogue_history")]
    steps = []  # [(action, record, history, action as a message, [reply], [] or None: unknown)]
    for r in records:
        for history, actions in turn_actions(r):
            asked = sum(m["role"] == "assistant" for m in history)
            last = asked == r.get("meta", {}).get("max_turns", 10) - 1
            reply = r["dialogue_history"][len(history) + 1:len(history) + 2]
            for action in actions:
                text = action.get("content") or action.get("output", "")
                content, answer = read_action(text, last)
                if action is not actions[0]:  # a candidate
                    reply = None if answer is None else []
                message = {**action, "role": "assistant", "content": content}
                steps.append((action, r, history, message, reply))
    values = {"progress": progress, "reaction": reaction}[by](args, steps)
    for (action, *_), value in zip(steps, values):
        action["advantage"] = value  # readers of records drop None
    say(f"{values.count(None)} of {len(values)} messages and candidates got no advantage")
    print_warnings()
    print_accuracy(args, records)
    for r in records:
        emit(r)


def print_accuracy(args, records):
    """Prints the pairs ordered by a critic whose log-ratio, of one token, is a message's credit."""
    trajectories = []
    for r in records:
        credits, messages = {}, []
        for history, (message, *_) in turn_actions(r):
            turn = tuple(message_texts(r["dialogue_history"][:len(history) + 2]))  # with its reply
            credits[turn] = torch.tensor([message["advantage"]])
            messages.append([Action(message, turn, None)])
        t = Trajectory(task_id(r["task"]), r, messages)
        zeros = dict.fromkeys(credits, torch.zeros(1))
        r["value"] = trajectory_value(t.turns(), credits, zeros).item()
        trajectories.append(t)
    print_ordered_pairs(trajectories, args.min_gap, ())


if __name__ == "__main__":
    p = parser(__doc__, "%(prog)s --by progress|reaction [flags] < graded.jsonl > scored.jsonl")
    p.add_argument("--by", required=True, choices=["progress", "reaction"])
    own, flags = p.parse_known_args()
    run(lambda args: main(own.by, args), get_args(["--out", "no run", *flags]))
