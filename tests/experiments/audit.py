"""Audits the human: in how many episodes did it break its rules?

    cat runs/test-*.jsonl | python tests/experiments/audit.py > audit.jsonl
    ... | python tests/experiments/audit.py --faults 1    # writes each faulty reply instead

A system is a model with a human, as `meta` names them. Figures are % of its episodes:

    quoted        a reply has code of the reference: what collect.redact replaces, or an expression
                  of 3 or more tokens, such as `x * 0.85`, that the dialogue did not have before
    broke_off     a reply is empty, truncated or a refusal, or mentions the reference
    both_sides    a reply begins with a speaker's name, or speaks for the agent, too; of replies of
                  an LLM collect.py removes that
    redacted      a reply has [...], by which collect.py replaces quotes
    tainted       share of the solved episodes that have a fault of the first three kinds

Whether a reply is wrong, or tells what nobody has asked for, is not found: no rule that was tried
told these from clean replies (RESULTS.md). For those read replies yourself.
"""
import ast
import re
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from colbench import environment, message_texts, read_records, task_id  # noqa: E402
from collect import first_speech, redact  # noqa: E402
from utils import open_stdout, parser, run, say  # noqa: E402

KINDS = "quoted", "broke_off", "both_sides", "redacted"
DANGLING = (r"(\b(the|an?|of|and|or|with|would|should|is|are|to|for|if|than|in|by|who|which|"
            r"because)|,)\s*$")
REFUSAL = (r"\bas an ai\b|\ban? (ai|language) (assistant|model)\b|function that i have|"
           r"ground truth|reference (function|solution|code)|"
           r"hidden (function|information|reference|code)|"
           r"(can't|cannot|can not|unable to|not able to|not allowed to|not supposed to|not to) "
           r"(help|assist|answer|discuss|share|provide|reveal|disclose)")
ORDERS = ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq


def parsed(code):
    """Returns the syntax nodes of Python code, [] of other text."""
    try:
        return [*ast.walk(ast.parse(textwrap.dedent(code)))]
    except (SyntaxError, ValueError):
        return []


def strings_in(code):
    return {node.value for node in parsed(code)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value}


def tokens(text, strings):
    """Returns [(token, its start, its end)]. Each of the strings is one token, in any quotes."""
    literal = "|".join(map(re.escape, sorted(strings, key=len, reverse=True)))
    token = rf"(['\"])({literal})\1|\w+(?:\.\d+)?|[-+*/=!<>]=|//|\*\*|[^\w\s]"
    return [(repr(m[2]) if m[1] else m[0], *m.span()) for m in re.finditer(token, text)]


def computes(node):
    """Whether a syntax node is of code, and not also of prose, as those of "a and b", "fee = 3"."""
    if isinstance(node, ast.Compare):
        return any(isinstance(op, ORDERS) for op in node.ops)
    if isinstance(node, ast.BinOp):  # not 24 / 7
        return any(isinstance(x, ast.Name) for x in ast.walk(node))
    return isinstance(node, (ast.Call, ast.Subscript, ast.IfExp, ast.AugAssign, ast.For, ast.While,
                             ast.FunctionDef, ast.comprehension))


def is_code(text):
    """Whether a text is Python that computes, compares, calls or controls."""
    text = text.strip()
    return any(map(computes, parsed(f"{text} pass" if text.endswith(":") else text)))


def quotes(reply, task, before):
    """Whether a reply has code of the reference, as redact finds it or as an expression."""
    if environment(task).shows_pages:
        return False
    reply = re.sub(r"\breturn (['\"])[^'\"]*\1", "", reply)  # prose, too
    strings = strings_in(task["ground_truth"])
    words = tokens(reply, strings)
    known, said = (f" {' '.join(word for word, *_ in tokens(text, strings))} "
                   for text in (task["ground_truth"], before))
    for i, (_, start, _) in enumerate(words):
        for j in range(i + 3, len(words) + 1):
            run = f" {' '.join(word for word, *_ in words[i:j])} "
            if run not in known:
                break
            if run not in said and is_code(reply[start:words[j - 1][2]]):
                return True
    return redact(reply, task) != reply


def breaks_off(reply, task):
    """Whether a reply is empty, truncated or a refusal, or mentions the reference."""
    text = reply.lower().replace("’", "'").strip()
    truncated = len(reply) >= environment(task).reply_chars and text[-1:] not in (*".!?\"'`)",)
    return not text or truncated or bool(re.search(DANGLING, text) or re.search(REFUSAL, text))


def faults(task, before, reply):
    """Returns the kinds of faults of a reply to a dialogue."""
    said = "\n".join([task["problem_description"], *message_texts(before[1:])])
    found = (quotes(reply, task, said), breaks_off(reply, task),
             first_speech(reply) != reply.strip(), "[...]" in reply)
    return [kind for kind, is_found in zip(KINDS, found) if is_found]


def percent(flags):
    """Returns the share of flags that are true, in %."""
    flags = [*flags]
    return round(100 * sum(flags) / max(1, len(flags)), 1)


def main(args):
    emit, systems = open_stdout(), defaultdict(list)  # {name: [(solved, {kind of fault})]}
    for record in read_records(sys.stdin, "dialogue_history"):
        task, history, meta = record["task"], record["dialogue_history"], record.get("meta", {})
        found = set()
        for i, message in enumerate(history):
            kinds = faults(task, history[:i], message["content"]) if (
                i and message["role"] == "user") else []
            found |= {*kinds}
            if kinds and args.faults:
                emit({"task": task_id(task), "faults": kinds, "message": history[i - 1]["content"],
                      "reply": message["content"], "reference": task["ground_truth"]})
        agent = meta.get("agent_model") or meta.get("agent") or meta.get("model", "?")
        name = " with ".join(str(x).split(" ")[0] for x in (agent, meta.get("human", "?")))
        systems[name].append((record.get("reward", 0) >= 1, found))
    for name, episodes in systems.items():
        row = {kind: percent(kind in kinds for _, kinds in episodes) for kind in KINDS}
        row["success"] = percent(solved for solved, _ in episodes)
        row["tainted"] = percent(bool(kinds & {*KINDS[:3]}) for solved, kinds in episodes if solved)
        say(f"{name}, % of {len(episodes)} episodes: "
            + ", ".join(f"{column} {x}" for column, x in row.items()))
        if not args.faults:
            emit({"system": name, "episodes": len(episodes), **row})


if __name__ == "__main__":
    p = parser(__doc__, "%(prog)s [flags] < graded.jsonl > audit.jsonl")
    p.add_argument("--faults", type=int, default=0, choices=[0, 1],
                   help="1: write each faulty reply, not the figures")
    run(main, p.parse_args())
