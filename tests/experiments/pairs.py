"""Writes the candidate pairs that train_policy.py draws, as preferences for other trainers.

    python tests/experiments/pairs.py --model runs/base --beta 1 < scored.jsonl > pairs.jsonl
    python -c 'import datasets; print(datasets.load_dataset("json", data_files="pairs.jsonl"))'

A line has `prompt`, the messages so far, and `chosen` and `rejected`, one message each: the form
that TRL, Axolotl, LLaMA-Factory and OpenRLHF read. `task` is the task's id. The flags are those of
train_policy.py; for the same pairs give those that select pairs, and --seed, the same values.

TRL's DPOTrainer computes our loss to 1e-4 with --beta and --nll_coef in its DPOConfig(beta=...,
loss_type=["sigmoid", "sft"], loss_weights=[1, NLL_COEF], max_length=None, disable_dropout=True).

Other trainers tokenize the texts anew, so that a message may get other tokens than were sampled,
and end a truncated message as if it were whole. Pairs of trajectories (--loss mtdpo, --mix) are
left out, because their messages answer different replies.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from utils import add_warning, fail, open_stdout, print_warnings, run  # noqa: E402


def texts_of_turns(trajectories, chat):
    """Returns {turn: (prompt, message, thinking)} of all candidates, as messages of a chat."""
    from model import turn_actions
    texts = {}
    for t in trajectories:
        thinking = t.record.get("meta", {}).get("thinking") or 0
        opening = chat.opening(thinking)  # the prompt has it, so that outputs lack it
        for (history, _), actions in zip(turn_actions(t.record), t.actions):
            prompt = [{"role": m["role"], "content": m["content"]} for m in history]
            for action in actions:
                text = action.fields.get("output") or action.fields.get("content", "")
                message = {"role": "assistant", "content": opening + text}
                texts[action.turn] = prompt, message, thinking
    return texts


def main(args):
    if args.loss != "dpo" or args.mix or args.held_out:
        fail("only pairs of candidates can be written: leave out --loss, --mix and --held_out")
    emit = open_stdout()
    from model import find_model, load
    from train_policy import candidate_logps, make_groups, read
    trajectories = read(args)
    model = load(args.model)[0] if args.logprob_weight else None
    ref_logps = candidate_logps(args, trajectories, model)
    texts, n_written = texts_of_turns(trajectories, find_model(args.model)[1]), 0
    for task, pairs in make_groups(args, trajectories, ref_logps):
        for pair in pairs:
            prompt, chosen, thinking = texts[pair.chosen[0]]
            _, rejected, _ = texts[pair.rejected[0]]
            if chosen == rejected:  # other tokens of the same text
                add_warning("pairs have two equal texts and are left out", f"the task {task}")
                continue
            line = {"prompt": prompt, "chosen": [chosen], "rejected": [rejected], "task": task}
            if thinking:
                line["meta"] = {"thinking": 1}
            emit(line)
            n_written += 1
    print_warnings()
    if not n_written:
        fail(f"no pairs in {len(trajectories)} records: no turn has two candidates of different "
             "texts and scores (train_critic.py adds scores)")


if __name__ == "__main__":
    from train_policy import get_args
    run(main, get_args())
