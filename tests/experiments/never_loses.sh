#!/usr/bin/env bash
# Is a trained critic ever behind its untrained self? RESULTS.md, "A critic that never loses".
#
#   bash tests/experiments/never_loses.sh plain early      # bases of the toy, five seeds
#   SEED=1 FLAGS="--dtype bf16" bash tests/experiments/never_loses.sh real   # the real model
#
# A row CRITIC@PRIOR is a policy, measured on the test tasks. Its critic is
#   untrained  --untrained 1
#   trained    --ref_context agent: starts as the untrained one, learns from the base's episodes
#   eq3        the default: pi_ref reads c, too
#   better     as trained, but learns from the episodes of the untrained critic's policy, by
#              --nll_coef 1 (trained and eq3: 0.3)
#   again-CRITIC      of a second round: ranks the untrained critic's policy's own candidates
# The real model with more tasks: TASKS=400 EPISODES=2 SHARE=0.11 EPOCHS=2 in the environment.
# Killed and started again, it goes on where it was.
set -euo pipefail
ROWS=${ROWS:-untrained@0.1 untrained@0.3 untrained@1 trained@0.1 trained@0.3 eq3@0.1 eq3@0.3
    better@0.1 better@0.3 better@1 again-untrained@0.3 again-better@0.3}
EPOCHS=${EPOCHS:-1}  # of the real model's critic

scored() {  # CRITIC: its records, $R/scored-CRITIC.jsonl
  if [ -e $R/scored-$1.jsonl ]; then return; fi
  case $1 in
    better) scored again-better ;;
    again-*) policy $FIRST; again ;;
  esac
  case $1 in
    untrained) untrained train ;;
    trained) learn trained train --ref_context agent ;;
    eq3) learn eq3 train ;;
    better) score better train ;;
    again-untrained) untrained again ;;
    again-better) learn better again --ref_context agent --nll_coef 1 ;;
  esac > $R/scored-$1.part
  mv $R/scored-$1.part $R/scored-$1.jsonl
}

toy() (  # BASE: plain, early or long
  . tests/experiments/compare.sh
  [ -e runs/tests.jsonl ] || python tests/toy.py tasks --split test --n 300 > runs/tests.jsonl
  [ -e runs/tests-long.jsonl ] ||
    python tests/toy.py tasks --split test --n 300 --min_slots 4 --max_slots 5 > runs/tests-long.jsonl
  FIRST=untrained@0.3
  untrained() { python train_critic.py --untrained 1 --model $C < $R/$1.jsonl; }
  score() { python train_critic.py --out $R/critic-$1 --model $C < $R/$2.jsonl; }
  learn() {
    python train_critic.py --model $C --seed $s --out $R/critic-$1 --beta 1 \
        --nll_coef 0.3 --lr 4e-4 --batch_size 16 --epochs $((4 * e)) "${@:3}" < $R/$2.jsonl
  }
  again() { play again $R/$FIRST -k 4 --candidates 16 --candidates_share $share < $R/tasks.jsonl; }
  policy() (
    scored ${1%@*}
    case $1 in again-*) B=$R/$FIRST ;; esac
    fit $1 --beta 1 --nll_coef 3 --lr 6e-4 --batch_size 32 --mix 0.25 --prior ${1#*@} \
        < $R/scored-${1%@*}.jsonl > $R/$1.json
    try $1
  )
  for s in $SEEDS; do
    S=runs/seed$s
    of=(--n 400)
    case $1 in
      plain) at_plain; demos=(); from=($S/tiny --lr 3e-3); share=0.5 ;;
      early)
        C=$S/early-base B=$S/early-base turns=6 tests=runs/tests.jsonl q=1 e=2 share=1
        of=(--n 150)
        demos=(--seed $((100 + s)) --n 3000 --at_once 0.65 --early 0.1 --distract 0.1)
        from=($S/base --lr 1e-3 --epochs 2) ;;
      long)
        C=$S/long-base B=$S/long-base turns=10 tests=runs/tests-long.jsonl q=1 e=1 share=0.5
        of=(--n 400 --min_slots 4 --max_slots 5)
        demos=(--min_slots 3 --max_slots 5 --max_turns 10) from=($S/tiny --lr 3e-3) ;;
    esac
    if ! [ -e $C/model.safetensors ]; then
      if [ $1 != early ]; then tiny ${demos[@]+"${demos[@]}"}; fi
      python tests/toy.py demos --seed $s ${demos[@]+"${demos[@]}"} | base "${from[@]}"
    fi
    collect $1 $share "${of[@]}"
    for row in $ROWS; do policy $row; done
  done
  for row in $ROWS; do
    echo $row=$(for s in $SEEDS; do echo runs/seed$s/$1/test-$row.jsonl; done | paste -sd,)
  done | xargs python evaluate.py > runs/never_loses_$1.results
)

real() (
  . tests/experiments/real_model.sh
  FIRST=untrained@0.1
  draws=(-k $EPISODES --candidates $CANDIDATES --candidates_share $SHARE)
  untrained() { python train_critic.py --untrained 1 $FLAGS --model $R/base < $R/$1.jsonl; }
  score() {
    python train_critic.py --out $R/critic-$1 --model $R/base $FLAGS < $R/$2.jsonl
  }
  learn() {
    python train_critic.py --seed $SEED $FLAGS --save_every 20 \
        --out $R/critic-$1 --model $R/base --beta 1 --nll_coef 0.3 --lr 8e-5 \
        --margin 0.3 --epochs $EPOCHS "${@:3}" < $R/$2.jsonl
  }
  again() { play again $R/$FIRST tasks "${draws[@]}"; }
  policy() (
    scored ${1%@*}
    from=$R/rft
    case $1 in again-*) from=$R/$FIRST ;; esac
    fit $1 $from --beta 1 --nll_coef 0.3 --lr 3e-5 --batch_size 16 --pairs_per_turn 2 \
        --mix 0.25 --prior ${1#*@} < $R/scored-${1%@*}.jsonl
    play test-$1 $R/$1 tests -k $DRAWS
  )
  stage $R/demos.jsonl python tests/toy.py demos --world english --seed $SEED --n $DEMOS
  fit base $MODEL --loss rft --all 1 --lr 4e-4 --epochs 1 --batch_size 8 < $R/demos.jsonl
  tasks tasks $TASKS
  play train $R/base tasks "${draws[@]}"
  rft rft $R/base
  tasks tests $TESTS --split test
  for row in $ROWS; do policy $row; done
  table never_loses $ROWS
)

for part in "$@"; do
  if [ $part = real ]; then real; else toy $part; fi
done
