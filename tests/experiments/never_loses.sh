#!/usr/bin/env bash
# Is a trained critic ever behind its untrained self? RESULTS.md, "A critic that never loses".
#
#   bash tests/experiments/never_loses.sh plain early      # bases of the toy, five seeds
#   SEED=1 FLAGS="--dtype bf16" bash tests/experiments/never_loses.sh real   # the real model
#
# Trained is A = A_untrained + D: --ref_context agent. A recipe weighs the records of two critics,
# so it trains nothing new. Each makes a row of ranks, on validation tasks, and a row of its policy,
# on test tasks. Killed and started again, it goes on where it was.
set -euo pipefail
RECIPES=${RECIPES:-untrained trained eq3 a25 a50 min x50 x100 untrained-p3 trained-p3 eq3-p3}

parts() {  # RECIPE: what `weigh` takes
  case $1 in
    untrained* | trained* | eq3*) echo 1 ${1%-p3} ;;  # NAME-p3: its policy has --prior 0.3
    a25) echo 0.75 untrained 0.25 trained ;;  # A_untrained + 0.25 D
    a50) echo 0.5 untrained 0.5 trained ;;
    x50) echo 1 untrained 0.5 eq3 ;;          # the D of eq. 3, whose pi_ref reads c, too
    x100) echo 1 untrained 1 eq3 ;;
    min) echo min untrained min trained ;;    # A_untrained + min(D, 0)
  esac
}
flags() {  # CRITIC: of train_critic.py
  case $1 in
    untrained) echo --head teacher ;;
    trained) echo --ref_context agent ;;
  esac
}
prior() { if [[ $1 = *-p3 ]]; then echo 0.3; else echo 0.1; fi; }
weigh() {  # START WEIGHT CRITIC ..: the records $R/START-CRITIC.jsonl, with a sum of their advantages
  python - $R/$1 "${@:2}" <<'PYTHON'
import json
import sys


def actions(record):
    for message in record["dialogue_history"]:
        for action in (message, *message.get("candidates", ())):
            if "advantage" in action:
                yield action


start, *parts = sys.argv[1:]
weights = parts[::2]
for lines in zip(*(open(f"{start}-{name}.jsonl") for name in parts[1::2]), strict=True):
    records = [json.loads(line) for line in lines]
    for same in zip(*map(actions, records), strict=True):
        values = [action["advantage"] for action in same]
        same[0]["advantage"] = (min(values) if "min" in weights else
                                sum(float(w) * v for w, v in zip(weights, values)))
    print(json.dumps(records[0]))
PYTHON
}
made() {  # FILE COMMAND: the command's stdout, if it is not there yet
  if [ -e $1 ]; then return; fi
  "${@:2}" > $1.part
  mv $1.part $1
}
recipes() {  # what `policy` makes of each recipe, and the ranks of all
  local r c files=()
  for c in untrained trained eq3; do
    made $R/scored-$c.jsonl learn $c $(flags $c)
    made $R/valid-$c.jsonl valued $c
  done
  for r in $RECIPES; do
    made $R/scored-$r.jsonl weigh scored $(parts $r)
    made $R/valid-$r.jsonl weigh valid $(parts $r)
    files+=($R/valid-$r.jsonl)
  done
  python tests/experiments/ranks.py ${files[@]} > $R/ranks.txt
  for r in $RECIPES; do policy $r; done
}

toy() (  # BASE: plain, early or long
  . tests/experiments/compare.sh
  [ -e runs/tests.jsonl ] || python colbench.py tasks --split test --n 300 > runs/tests.jsonl
  [ -e runs/tests-long.jsonl ] ||
    python colbench.py tasks --split test --n 300 --min_slots 4 --max_slots 5 > runs/tests-long.jsonl
  learn() {
    python train_critic.py --model $C --seed $s --resume 1 --out $R/critic-$1 --beta 1 \
        --nll_coef 0.3 --lr 4e-4 --batch_size 16 --epochs $((4 * e)) "${@:2}" < $R/train.jsonl
  }
  valued() { python train_critic.py --score 1 --out $R/critic-$1 --model $C < $R/valid.jsonl; }
  policy() { sweet $1 --prior $(prior $1); try $1; }
  for s in $SEEDS; do
    S=runs/seed$s
    R=$S/$1
    mkdir -p $R
    of=(--n 400)
    case $1 in
      plain) at_plain; demos=(); from=(--model tiny --lr 3e-3); share=0.5 ;;
      early)
        C=$S/early-base B=$S/early-base turns=6 tests=runs/tests.jsonl q=1 e=2 share=1
        of=(--n 150)
        demos=(--seed $((100 + s)) --n 3000 --at_once 0.65 --early 0.1 --distract 0.1)
        from=(--model $S/base --lr 1e-3 --epochs 2) ;;
      long)
        C=$S/long-base B=$S/long-base turns=10 tests=runs/tests-long.jsonl q=1 e=1 share=0.5
        of=(--n 400 --min_slots 4 --max_slots 5)
        demos=(--min_slots 3 --max_slots 5 --max_turns 10) from=(--model tiny --lr 3e-3) ;;
    esac
    [ -e $C/model.safetensors ] ||
      python colbench.py demos --seed $s ${demos[@]+"${demos[@]}"} | base "${from[@]}"
    collect $1 $share "${of[@]}"
    python colbench.py tasks --split val --seed $s "${of[@]}" --n 100 > $R/val.jsonl
    play valid $B -k 1 --candidates 16 --candidates_share 1 < $R/val.jsonl
    recipes
  done
  for r in $RECIPES; do
    echo $r=$(for s in $SEEDS; do echo runs/seed$s/$1/test-$r.jsonl; done | paste -sd,)
  done | xargs python evaluate.py > runs/never_loses_$1.results
)

real() (
  . tests/experiments/real_model.sh
  learn() {
    python train_critic.py --seed $SEED $FLAGS --save_every 20 --resume 1 --out $R/critic-$1 \
        --model $R/base --beta 1 --nll_coef 0.3 --lr 8e-5 --pairs all --margin 0.3 --epochs 1 \
        "${@:2}" < $R/train.jsonl
  }
  valued() {
    python train_critic.py --score 1 $FLAGS --out $R/critic-$1 --model $R/base < $R/valid.jsonl
  }
  policy() {
    fit sweet_$1 $R/rft --beta 1 --nll_coef 0.3 --lr 3e-5 --batch_size 16 --pairs_per_turn 2 \
        --mix 0.25 --prior $(prior $1) < $R/scored-$1.jsonl
    play test-sweet_$1 $R/sweet_$1 tests -k $DRAWS
  }
  stage $R/demos.jsonl python colbench.py demos --kind english --seed $SEED --n $DEMOS
  fit base $MODEL --loss rft --all 1 --lr 4e-4 --epochs 1 --batch_size 8 < $R/demos.jsonl
  tasks tasks $TASKS
  play train $R/base tasks -k $EPISODES --candidates $CANDIDATES --candidates_share $SHARE
  tasks val 40 --split val
  play valid $R/base val -k 1 --candidates $CANDIDATES --candidates_share 1
  rft rft $R/base
  tasks tests $TESTS --split test
  recipes
  table never_loses $(for r in $RECIPES; do echo sweet_$r; done)
)

for part in "$@"; do
  if [ $part = real ]; then real; else toy $part; fi
done
