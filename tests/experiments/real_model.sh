#!/usr/bin/env bash
# The method on a real language model, on two CPU cores: one seed in two hours at most.
#
#   bash tests/experiments/real_model.sh     # from the repo's root, after the quickstart's install
#   SEED=1 MODEL=DIR bash tests/experiments/real_model.sh
#   CRITICS="without_c eq3" bash tests/experiments/real_model.sh  # with trained critics, too
#
# The first table compares the warmed-up base with RFT, after about half an hour; the next ones all
# methods. Everything goes to runs/real$SEED; the tables to stderr and to *.results there, the times
# of the stages to times. Killed and started again, it goes on where it was. RESULTS.md says how
# the settings were chosen.
set -euo pipefail
SEED=${SEED:-0}
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}
FLAGS=${FLAGS:-}  # "--dtype bf16" takes half the time where the CPU has it (avx512_bf16)
DEMOS=${DEMOS:-700}   # scripted episodes that warm the model up
TASKS=${TASKS:-120}   # tasks to learn from, EPISODES of each
USUAL=${USUAL:-0.3}   # probability of a number that a guess names; the base solves a fifth then
EPISODES=${EPISODES:-4}
SHARE=${SHARE:-0.25}  # of the episodes that get CANDIDATES at every turn
CANDIDATES=${CANDIDATES:-12}
TESTS=${TESTS:-300}   # test tasks, DRAWS episodes of each
DRAWS=${DRAWS:-2}
CRITICS=${CRITICS:-}  # trained, eq3, without_c, none: SWEET-RL with each of these, too
. .venv/bin/activate
R=${R:-runs/real$SEED}
mkdir -p $R

stage() {  # FILE COMMAND: the command's stdout, if it is not there yet
  if [ -e $1 ]; then return; fi
  local start=$SECONDS
  echo "$(date +%T) $1" >&2
  "${@:2}" > $1.part
  mv $1.part $1
  echo "$((SECONDS - start)) s  $1" | tee -a $R/times >&2
}
tasks() {  # NAME N [FLAGS]
  stage $R/$1.jsonl python tests/toy.py tasks --world english --seed $SEED --usual $USUAL \
      --n $2 "${@:3}"
}
halves() {  # NAME MODEL TASKS [FLAGS]: two processes of one thread, each plays half of the tasks
  local half jobs=()
  for half in 0 1; do
    ( awk "NR % 2 == $half" $R/$3.jsonl |
        OMP_NUM_THREADS=1 python collect.py --human tests/toy.py --max_turns 6 --max_tokens 128 \
            --seed $SEED $FLAGS --model $2 --resume $R/$1.$half "${@:4}" |
        python colbench.py grade >> $R/$1.$half ) & jobs+=($!)
  done
  wait ${jobs[0]} && wait ${jobs[1]} && cat $R/$1.0 $R/$1.1
}
play() { stage $R/$1.jsonl halves "$@"; }
fit() {  # NAME MODEL [FLAGS]: a policy, of stdin's records
  stage $R/$1.json python train_policy.py --seed $SEED $FLAGS --save_every 50 --out $R/$1 \
      --model $2 "${@:3}"
}
edited() {  # EDITS: the directory of a copy of the scripts with them
  local copy=$(mktemp -d)
  cp *.py $copy
  git -C $copy apply $(printf "$PWD/tests/experiments/edits/%s.diff " "$@")
  echo $copy
}
critic() {  # NAME [FLAGS]
  stage $R/scored-$1.jsonl python ${E:-.}/train_critic.py --seed $SEED $FLAGS --save_every 50 \
      --out $R/critic-$1 --model $R/base --beta 1 --nll_coef 0.3 --lr 8e-5 \
      --margin 0.3 --epochs 1 "${@:2}" < $R/train.jsonl
}
rft() { fit "$@" --loss rft --lr 5e-5 --batch_size 16 --epochs 3 < $R/train.jsonl; }
mtdpo() {
  fit "$@" --loss mtdpo --beta 0.3 --nll_coef 3 --lr 3e-5 --epochs 2 < $R/train.jsonl
}
sweet() {  # NAME CRITIC
  fit $1 $R/rft --beta 1 --nll_coef 0.3 --lr 3e-5 --batch_size 16 \
      --pairs_per_turn 2 --mix 0.25 --prior 0.1 < $R/scored-$2.jsonl
}

table() {  # NAME SYSTEMS: differences are to the first system
  local m systems=()
  for m in "${@:2}"; do systems+=($m=$R/test-$m.jsonl); done
  python evaluate.py "${systems[@]}" > $R/$1.results
}

export OMP_NUM_THREADS=2
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=99999999999  # keep freed memory: 8 % faster steps
[ "${BASH_SOURCE[0]}" = "$0" ] || return 0  # never_loses.sh takes the functions

stage $R/demos.jsonl python tests/toy.py demos --world english --seed $SEED --n $DEMOS
fit base $MODEL --loss rft --all 1 --lr 4e-4 --epochs 1 --batch_size 8 < $R/demos.jsonl
tasks tasks $TASKS
play train $R/base tasks -k $EPISODES --candidates $CANDIDATES --candidates_share $SHARE
rft rft $R/base
tasks tests $TESTS --split test
for m in base rft; do play test-$m $R/$m tests -k $DRAWS; done
table rft base rft

# what c, the hidden information, says of an action to the base
stage $R/scored-untrained.jsonl python train_critic.py --untrained 1 $FLAGS --model $R/base \
    < $R/train.jsonl
sweet sweet_from_rft untrained
mtdpo mtdpo_from_rft $R/rft
rft rft_from_rft $R/rft
for m in sweet mtdpo rft; do play test-${m}_from_rft $R/${m}_from_rft tests -k $DRAWS; done
table all rft base rft_from_rft mtdpo_from_rft sweet_from_rft
for m in rft_from_rft mtdpo_from_rft; do table sweet_and_$m $m sweet_from_rft; done

for c in $CRITICS; do
  case $c in
    trained) critic trained --ref_context agent ;;  # it starts as the untrained one
    eq3) critic eq3 ;;                        # the reference reads c, too
    without_c) E=$(edited no_hidden) critic without_c ;;
    none) stage $R/scored-none.jsonl sed -E 's/("advantage": )[-+.e0-9]+/\10/g' \
              $R/scored-untrained.jsonl ;;        # only --prior ranks the candidates
  esac
  sweet sweet_$c $c
  play test-sweet_$c $R/sweet_$c tests -k $DRAWS
  table sweet_and_sweet_$c sweet_$c sweet_from_rft
done
