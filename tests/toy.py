"""A toy to run the scripts on: backend tasks, demonstrations, a scripted human and a tiny model.

    python tests/toy.py tasks --split train --n 400 > tasks.jsonl
    python tests/toy.py demos --n 8000 > demos.jsonl   # scripted episodes of mixed quality
    python tests/toy.py model --out runs/tiny          # an untrained Llama of 267k parameters
    ... | python collect.py --human tests/toy.py ...   # calls reply()

A reference is a function such as `def rent(x, rate=3, fee=12): return x * rate + fee`. Its *slots*,
rate and fee, have values that only the human knows, so the agent must ask for them. --world slots
has terse texts for the tiny model, --world english has whole sentences for a real model.
"""
import itertools
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))
from colbench import ANSWER, Episode, fill, hidden_information, task_id, with_hidden
from utils import fail, open_stdout, parser, rng, run


# --- two worlds -----------------------------------------------------------------------------------

class World(NamedTuple):
    """The functions of a world, and the texts from which its dialogues are made."""
    details: dict      # {slot: Detail}, in the order in which demonstrations ask
    stories: dict      # {function name: (what the function returns, unit)}
    bodies: dict       # {function name: {its slots: its body}}
    requests: tuple    # beginnings of a task's description
    unknown: tuple     # the human's replies if asked for anything but the function's slots
    answer_form: str   # how the agent writes its code
    task_fields: dict  # further fields of a task


class Detail(NamedTuple):
    """A slot: its values and texts, which may contain {unit} and, in replies, {n} for the value."""
    values: object    # a range, or a tuple of texts
    step: str         # the statements that use it, in the world english
    clauses: tuple    # sentences of the description, which do not reveal the value
    questions: tuple  # by the agent
    replies: tuple    # by the human
    pattern: str      # regex that finds the slot in a question


# The slots' values are disjoint, so that a small model can learn which number belongs where.
SLOTS = {"rate": range(2, 10), "fee": range(11, 21), "low": range(21, 31), "step": range(31, 41),
         "cap": range(41, 51), "mod": range(51, 61), "code": range(61, 71), "op": ("min", "max"),
         "color": ()}
# The functions of a family share a description: the agent must also find out which slots there are.
FAMILIES = {  # function name: (description, expressions of x and the slots)
    "rent": ("the rent for x days", (
        "x * rate + fee", "min(x * rate + fee, cap)",
        "code if x < 0 else min(x * rate, cap)", "code if x < 0 else min(x * rate + fee, cap)")),
    "ship": ("the cost of shipping x", (
        "x + fee if x < low else x", "x + fee if x < low else x * rate",
        "x // step * rate + fee", "x // step * rate + (fee if x < low else 0)")),
    "tax": ("the tax on x", (
        "max(x - low, 0) * rate", "code if x < 0 else max(x - low, 0) * rate",
        "min(max(x - low, 0) * rate, cap)", "code if x < 0 else min(max(x - low, 0) * rate, cap)")),
    "grade": ("the grade for x points", (
        "code if x < low else x", "code if x < low else x // step",
        "op(x % step, low)", "code if x < 0 else op(x % step, low)")),
    "pay": ("what to pay for x hours", (
        "x * rate + fee", "op(x * rate, x + fee)", "op(x * rate, cap)", "op(x * rate + fee, cap)")),
    "park": ("the price of parking for x minutes", (
        "x // step * rate", "code if x < 0 else x // step * rate",
        "x // step * rate + fee", "code if x < 0 else x // step * rate + fee")),
    "seat": ("the seat of guest x", (
        "x % mod + fee", "code if x > cap else x % mod + fee",
        "x % mod * rate + fee", "code if x > cap else x % mod * rate + fee")),
    "toll": ("the toll for x", (
        "x * rate + fee", "code if x < low else x * rate",
        "code if x < low else x * rate + fee",
        "code if x < low else min(x * rate + fee, cap * 9)")),
}
# In the order of their steps. Every function has a price and any of the others, but never a color.
DETAILS = {
    "limit": Detail(
        range(40, 60), "if x > limit:\n    return 0",
        ("too many {unit}s are refused, and the result is 0",
         "above a certain number of {unit}s we refuse, and the result is 0"),
        ("How many {unit}s do you accept?", "What is the largest number of {unit}s allowed?",
         "Above how many {unit}s do you refuse?"),
        ("We accept up to {n} {unit}s.", "More than {n} {unit}s are refused."),
        r"accept|refus|allow|too many|largest number|\blimit"),
    "free": Detail(
        range(2, 10), "x = max(x - free, 0)",
        ("the first few {unit}s are free", "some {unit}s at the start cost nothing"),
        ("How many {unit}s are free?", "How many {unit}s cost nothing?",
         "What number of {unit}s is free?"),
        ("The first {n} {unit}s are free.", "{n} {unit}s cost nothing."),
        r"free|nothing|includ|without pay"),
    "price": Detail(
        range(2, 10), "total = x * price",
        ("each {unit} has the same price", "you pay for each {unit}"),
        ("What is the price of each {unit}?", "How much does one {unit} cost?",
         "How much do you charge per {unit}?"),
        ("Each {unit} costs {n}.", "The price is {n} per {unit}."),
        r"each|every|\bper\b|\bone\b|single|\brate\b"),
    "fee": Detail(
        range(11, 21), "total = total + fee",
        ("a fixed fee is added", "a booking fee comes on top"),
        ("How high is the fixed fee?", "What fee is added?", "How much is the booking fee?"),
        ("The fee is {n}.", "We add {n} for the booking."),
        r"\bfees?\b|fixed|flat|booking|add|extra|on top|\bbase\b|service|surcharge"),
    "minimum": Detail(
        range(21, 31), "total = max(total, minimum)",
        ("it never costs less than a minimum", "there is a minimum total"),
        ("What is the minimum?", "What does it cost at least?", "What is the lowest total?"),
        ("The minimum is {n}.", "It costs at least {n}."),
        r"minim|at least|lowest|lower|smallest|less than|below|floor"),
    "maximum": Detail(
        range(61, 91), "total = min(total, maximum)",
        ("it never costs more than a maximum", "there is a maximum total"),
        ("What is the maximum?", "What does it cost at most?", "What is the highest total?"),
        ("The maximum is {n}.", "It costs at most {n}."),
        r"maxim|at most|highest|upper|more than|\bcap|exceed|ceiling"),
    "color": Detail((), "", (), ("What color should it be?",), (), r"\bcolor\b")}
STORIES = {  # function name: (what the function returns, unit)
    "ride": ("the price of a taxi ride of x kilometers", "kilometer"),
    "rent": ("the rent of a boat for x days", "day"),
    "wash": ("the price of washing x shirts", "shirt"),
    "ship": ("the cost of shipping x parcels", "parcel"),
    "park": ("the price of parking for x hours", "hour"),
    "lessons": ("the price of x piano lessons", "lesson"),
    "call": ("the price of a phone call of x minutes", "minute"),
    "copies": ("the price of copying x pages", "page")}
BUGS = (("min(", "max("), ("max(", "min("), (" + ", " - "), (" * ", " + "), ("<", ">"), (">", "<"),
        ("//", "%"), ("%", "//"), ("else x", "else 0"))
SPLITS = ("train", "val", "test")  # a task's split is drawn with its name and values as the seed


def slots_in(expression):
    return tuple(slot for slot in SLOTS if re.search(rf"\b{slot}\b", expression))


def english_body(slots):
    steps = "\n".join(DETAILS[slot].step for slot in slots)
    return "\n" + textwrap.indent(f"{steps}\nreturn total", "    ")


OPTIONAL = [slot for slot in DETAILS if slot not in ("price", "color")]
SLOT_SETS = [tuple(slot for slot in DETAILS if slot == "price" or slot in chosen)
             for n in range(len(OPTIONAL) + 1) for chosen in itertools.combinations(OPTIONAL, n)]
WORLDS = {
    "slots": World(
        details={slot: Detail(values, step="", clauses=(), replies=(slot + "={n}",),
                              questions=(f"what is the {slot}?", f"which {slot} do you want?"),
                              pattern=rf"\b{slot}\b")
                 for slot, values in SLOTS.items()},
        stories={name: (what, "") for name, (what, _) in FAMILIES.items()},
        bodies={name: {slots_in(e): f" return {e}" for e in expressions}
                for name, (_, expressions) in FAMILIES.items()},
        requests=("write {name}(x): {what}",),
        unknown=("i do not know",),
        answer_form="{code}",
        task_fields={"agent_prompt": "{problem_description}"}),
    "english": World(
        details=DETAILS,
        stories=STORIES,
        bodies=dict.fromkeys(STORIES, {slots: english_body(slots) for slots in SLOT_SETS}),
        requests=("Please write a function {name}(x) that returns {what}.",
                  "I need a function {name}(x). It should return {what}.",
                  "Can you write {name}(x)? It returns {what}."),
        unknown=("I do not know.", "I can't say.", "That does not matter."),
        answer_form="```python\n{code}\n```",
        task_fields={"world": "english"})}


# --- tasks ----------------------------------------------------------------------------------------

def draw_values(r, slots, usual):
    """Draws {slot: value} from {slot: values}, with probability `usual` a slot's first value."""
    return {slot: values[0] if r.random() < usual else r.choice(values)
            for slot, values in slots.items()}


def drawn_tasks(draw, split):
    """Yields tasks from draw(), forever. It may return None, but not 10,000 times in a row."""
    misses = 0
    while misses < 10_000:
        task = draw()
        misses = 0 if task else misses + 1
        if task:
            yield task
    fail(f"found no such task of the {split} split in 10,000 draws")


def slots_of(code):
    """Returns {slot: value as text} of a reference: the defaults in `def f(x, rate=3): ...`."""
    signature = code.partition("\n")[0].partition(":")[0]
    return dict(re.findall(r"(\w+)=([^\s,()]+)", signature))


def function_code(name, values, body):
    """Returns the code of a function whose slots have these values; slots_of reads them back."""
    defaults = ", ".join(f"{slot}={value}" for slot, value in values.items())
    return f"def {name}(x, {defaults}):{body}"


def choose_inputs(outputs, values, choices, r):
    """Returns ten inputs x at which any other value of any one slot changes an output, or None.

    outputs(inputs, values): the function's outputs; choices: {slot: its possible values}.
    """
    numbers = [v for v in values.values() if isinstance(v, int)]
    inputs = {v + d for v in numbers for d in (-2, -1, 0, 1, 2)}
    inputs |= {-r.randrange(1, 20), *range(4), 500, *r.sample(range(150), 30)}
    inputs = sorted(inputs)
    expected = outputs(inputs, values)
    variants = [outputs(inputs, {**values, slot: value})
                for slot in values for value in choices[slot] if value != values[slot]]
    detects = {x: {n for n, variant in enumerate(variants) if variant[i] != expected[i]}
               for i, x in enumerate(inputs)}  # {input: variants whose output differs there}
    missed, chosen = set(range(len(variants))), []
    while missed and len(chosen) < 10:  # greedy set cover
        best = max((x for x in inputs if x not in chosen), key=lambda x: len(detects[x] & missed))
        chosen.append(best)
        missed -= detects[best]
    if missed:
        return None
    chosen += r.sample([x for x in inputs if x not in chosen], 10 - len(chosen))
    r.shuffle(chosen)
    return chosen


def allowed_bodies(world, name, args):
    """Returns {slots: body} of the functions of a name with --min_slots to --max_slots slots."""
    return {slots: body for slots, body in world.bodies[name].items()
            if args.min_slots <= len(slots) <= args.max_slots}


def make_task(world, name, values, body):
    """Returns a task whose slots have these values, or None if choose_inputs fails."""
    code, namespace = function_code(name, values, body), {"min": min, "max": max}
    exec(code, namespace)  # our own code

    def outputs(inputs, values):
        values = {slot: namespace.get(value, value) for slot, value in values.items()}
        return [namespace[name](x, **values) for x in inputs]

    r, (what, unit) = rng("tests", name, values), world.stories[name]
    choices = {slot: world.details[slot].values for slot in values}
    inputs = choose_inputs(outputs, values, choices, r)
    if inputs is None:
        return None
    sentences = [fill(r.choice(world.requests), name=name, what=what)]
    for slot in values:
        if world.details[slot].clauses:
            clause = fill(r.choice(world.details[slot].clauses), unit=unit)
            sentences.append(f"{clause[0].upper()}{clause[1:]}.")
    return {"id": "-".join([name, *(f"{slot}{value}" for slot, value in values.items())]),
            "kind": "backend", "problem_description": " ".join(sentences), **world.task_fields,
            "ground_truth": code,
            "test_cases": {f"test{i}": f"{name}({x})" for i, x in enumerate(inputs, 1)}}


def tasks(split, args):
    """Yields tasks of a split, forever. Splits share no task, but a task may come twice."""
    r, world = rng("tasks", split, args.seed), WORLDS[args.world]
    names = [name for name in world.stories if allowed_bodies(world, name, args)]
    if not names:
        fail(f"no function has {args.min_slots} to {args.max_slots} slots")

    def draw():
        name = r.choice(names)
        slots, body = r.choice(list(allowed_bodies(world, name, args).items()))
        values = draw_values(r, {slot: world.details[slot].values for slot in slots}, args.usual)
        if rng("split", name, values).choice(SPLITS) == split:
            return make_task(world, name, values, body)

    return drawn_tasks(draw, split)


# --- the human ------------------------------------------------------------------------------------

def asked_for(world, message):
    """Returns the slot that a message asks for first, or None."""
    starts = {slot: match.start() for slot, detail in world.details.items()
              if (match := re.search(detail.pattern, message, re.I))}
    if not starts and re.search("price|cost|charge|how much", message, re.I):
        return "price"
    return min(starts, key=starts.get, default=None)


def reply(task, history):
    """The human for collect.py: gives the value of the first slot that the message asks for."""
    world, message = WORLDS[task.get("world", "slots")], history[-1]["content"]
    slots, slot = slots_of(hidden_information(task)), asked_for(world, message)
    if not slots:
        raise ValueError("the reference has no slots: this human needs tasks of tests/toy.py")
    r = rng("reply", task_id(task), message)
    if slot not in slots:
        return r.choice(world.unknown)
    _, unit = world.stories.get(task_id(task).partition("-")[0], ("", ""))
    return fill(r.choice(world.details[slot].replies), n=slots[slot], unit=unit)


# --- demonstrations -------------------------------------------------------------------------------

def episode(task, max_turns, agent, human, show_hidden=False):
    """Returns the record of an episode between two functions, agent and human.

    agent(turn, reply) returns its raw output; reply is the human's last one, at first None.
    human(history) returns the next reply. show_hidden: the first message begins with the reference.
    """
    dialogue, human_reply = Episode(task, max_turns), None
    while not dialogue.ended:
        dialogue.act(agent(dialogue.turn, human_reply))
        if not dialogue.ended:
            human_reply = human(dialogue.history)
            dialogue.reply(human_reply)
    fields = dialogue.fields()
    history = fields["dialogue_history"]
    if show_hidden:
        history = with_hidden(history, task["ground_truth"])
    return {"task": task, "dialogue_history": history, "answer": fields["answer"]}


def demonstration(world, task, r, args):
    """Returns a scripted episode of an imperfect agent, whose probabilities are in args."""
    name, details = task["id"].partition("-")[0], world.details
    functions = allowed_bodies(world, name, args)
    reference, learned, ruled_out = slots_of(task["ground_truth"]), {}, set()
    informed, silent = r.random() < args.hidden, r.random() < args.silent
    if any(details[slot].clauses for slot in reference):  # the description mentions all slots
        functions = {tuple(reference): world.bodies[name][tuple(reference)]}

    def answer(possible):
        """Writes the function, guessing the slots and values that the agent has not learned."""
        known = tuple(slot for slot in details if slot in (reference if informed else learned))
        slots = r.choice([known] if known in possible else list(possible))
        usual = {slot: details[slot].values[0] for slot in slots}
        guess = reference if informed else usual
        values = {slot: learned.get(slot) or guess[slot] for slot in slots}
        body = possible[slots]
        if r.random() < args.noise:  # a bug: swap one operator
            right, wrong = r.choice([swap for swap in BUGS if swap[0] in body])
            body = body.replace(right, wrong, 1)
        return f"{ANSWER}\n" + fill(world.answer_form, code=function_code(name, values, body))

    def agent(turn, human_reply):
        possible = {slots: body for slots, body in functions.items()
                    if set(learned) <= set(slots) and not ruled_out & set(slots)}
        unknown = [slot for slot in details
                   if slot not in learned and any(slot in slots for slots in possible)]
        early = r.random() < (args.at_once if turn == 0 else args.early)
        last = turn == args.max_turns - 1
        if not silent and (early or last or not unknown):
            return answer(possible)
        distracted = not unknown or r.random() < args.distract
        asked = r.choice(list(details) if distracted else unknown[:2])
        return fill(r.choice(details[asked].questions), unit=world.stories[name][1])

    def human(history):
        slot = asked_for(world, history[-1]["content"])
        if slot in reference:
            learned[slot] = reference[slot]
        else:
            ruled_out.add(slot)
        return reply(task, history)

    return episode(task, args.max_turns, agent, human, show_hidden=informed)


def demos(args):
    """Yields args.n demonstrations on tasks of the train split; a task may come twice."""
    for i, task in zip(range(args.n), tasks("train", args)):
        yield demonstration(WORLDS[args.world], task, rng("demo", args.seed, i), args)


# --- a tiny model ---------------------------------------------------------------------------------

# Its tokens: markers, a function's head and body, `name=`, numbers, words, other characters.
PIECES = (r"[A-Z][A-Z ]+:\n|Hidden reference:\n|def \w+\(x|\): return [^\n]+"
          r"| ?\w+=|\d+| ?\w+|[^\w]")


def tiny_model(records, seed=0, pieces=PIECES):
    """Returns (model, tokenizer): an untrained Llama of about 260k parameters.

    Its vocabulary is the words that occur at least twice in the records. Other words are spelled
    byte by byte, so that any text is decoded unchanged.
    """
    import torch
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging
    logging.disable_progress_bar()
    counts = Counter()
    for record in records:
        for message in record["dialogue_history"]:
            counts.update(re.findall(pieces, message.get("output") or message["content"]))
    special = ["<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    vocab = [(token, 0.0) for token in special]
    vocab += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    # equal scores, so that the tokenization with the fewest words wins
    vocab += [(word, -1.0) for word in sorted(counts) if counts[word] > 1]
    t = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    t.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), "isolated")
    t.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    t.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=t, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>",
        clean_up_tokenization_spaces=False, additional_special_tokens=special[3:])
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
    torch.manual_seed(seed)
    # With the usual initializer_range of 0.02, a model of this size never learns to copy a value.
    config = LlamaConfig(vocab_size=len(vocab), hidden_size=96, intermediate_size=256,
                         num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                         head_dim=32, max_position_embeddings=16384, tie_word_embeddings=True,
                         initializer_range=0.08, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return LlamaForCausalLM(config), tokenizer


# --- command line ---------------------------------------------------------------------------------

PROBABILITIES = {  # of the scripted agent
    "at_once": (0.15, "it answers in its first message"),
    "early": (0.3, "it answers in a later message, before it has learned every slot"),
    "distract": (0.15, "it asks an irrelevant question, or asks again"),
    "noise": (0.04, "its answer has a bug"),
    "silent": (0.12, "it never answers"),
    "hidden": (0.4, "its first prompt shows the reference, as a critic's does")}


def command_parsers(doc):
    """Returns (parser, its subparsers), with the flags that toy.py and toy_pages.py share."""
    root = parser(doc, usage=None)
    subparsers = root.add_subparsers(dest="command", required=True)
    for name, n, usual in ("tasks", 500, 0.65), ("demos", 8000, 0.0), ("model", 8000, 0.0):
        p = subparsers.add_parser(name, allow_abbrev=False)
        p.add_argument("--n", type=int, default=n, help="number of tasks or demonstrations (model: "
                       "whose words it knows) [%(default)s]")
        p.add_argument("--seed", type=int, default=0, help="random seed [%(default)s]")
        p.add_argument("--usual", type=float, default=usual, help="probability that a slot has its "
                       "usual value, which agents guess [%(default)s]")
        if name == "tasks":
            p.add_argument("--split", default="train", choices=SPLITS,
                           help="tasks to write; no two splits share one [%(default)s]")
            continue
        if name == "model":
            p.add_argument("--out", required=True, help="output directory")
        p.add_argument("--max_turns", type=int, default=6,
                       help="maximum number of messages the agent may send [%(default)s]")
        g = p.add_argument_group("probabilities of the scripted agent")
        for event, (default, text) in PROBABILITIES.items():
            g.add_argument(f"--{event}", type=float, default=default, help=f"{text} [%(default)s]")
    return root, subparsers


def get_args(argv=None):
    root, subparsers = command_parsers(__doc__)
    for p in subparsers.choices.values():
        p.add_argument("--world", default="slots", choices=WORLDS,
                       help="slots: for the tiny model; english: for a real model [%(default)s]")
        p.add_argument("--min_slots", type=int, default=2, help="fewest slots [%(default)s]")
        p.add_argument("--max_slots", type=int, default=4, help="most slots [%(default)s]")
    return root.parse_args(argv)


def write_tasks(stream, args, emit):
    """Writes the first args.n different tasks."""
    seen = set()
    for i, task in enumerate(stream):
        if len(seen) == args.n:
            return
        if i > 100 * args.n:
            fail(f"found only {len(seen)} such tasks of the {args.split} split, not {args.n}")
        if task["id"] not in seen:
            seen.add(task["id"])
            emit({"task": task})


def main(args, tasks=tasks, demos=demos, pieces=PIECES):
    emit = open_stdout()
    if args.command == "tasks":
        write_tasks(tasks(args.split, args), args, emit)
    elif args.command == "demos":
        for record in demos(args):
            emit(record)
    else:
        for part in tiny_model(demos(args), args.seed, pieces):
            part.save_pretrained(args.out)


if __name__ == "__main__":
    run(main, get_args())
