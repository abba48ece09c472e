#!/usr/bin/env bash
# Compares methods: each learns from the episodes of one base, and is tested on the same tasks.
#
#   bash tests/experiments/compare.sh plain early     # two setups, after the quickstart's install
#   SEEDS=0 N=60 TESTS=20 DEMOS=4000 METHODS="eq3 rft" bash tests/experiments/compare.sh plain
#   SEEDS="1 2" MODEL=DIR FLAGS="--dtype bf16" bash tests/experiments/compare.sh real
#
# A setup is a base, with its tasks:
#   plain            the quickstart's
#   early            a base that answers early, and fewer tasks
#   long             functions with four or five slots, ten turns
#   spelled, words   a waiter's orders (orders.py), which the base spells, or has as tokens
#   pages            toy web pages, after the installs of MANUAL.md, "Frontend Design"
#   real             SmolLM2-135M (MODEL), hours a seed; policies start at RFT's
# METHODS are rft, mtdpo (--loss of train_policy.py), or SWEET-RL by the candidates' scores of
#   eq3              train_critic.py
#   agent            the same with --ref_context agent
#   untrained        the base itself
#   better           eq3 or untrained, whichever orders more trajectory pairs (choose_critic.py)
#   another          eq3 on records with the hidden information of another task
#   none             no critic: all advantages are 0
#   EDIT+EDIT        train_critic.py with these edits/*.diff, such as regression+value
# CRITIC@WEIGHT sets the policy's --logprob_weight (0.1). METHOD-rft also learns a second time: by
# RFT, from what METHOD's policy solves.
#
# N, TESTS and DEMOS are the numbers of tasks, test tasks and demonstrations. Tables go to stderr
# and as JSON to runs/results.jsonl, all else to runs/compare/SETUP/SEED, and what programs say to
# runs/compare.log. What exists is not made again, so rerun a killed script to resume it.
set -euo pipefail
shopt -s inherit_errexit  # so that a stage which fails inside $(...) ends the script
. .venv/bin/activate
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
SEEDS=${SEEDS:-0 1 2 3 4}
METHODS=${METHODS:-eq3-rft untrained-rft mtdpo-rft rft-rft}
FLAGS=${FLAGS:-}  # for every script that runs a model

stage() {  # FILE COMMAND: writes the command's stdout to FILE, unless FILE exists
  if [ -e $1 ]; then return; fi
  local start=$SECONDS
  "${@:2}" > $1.part
  mv $1.part $1
  echo "$(date +%T) $((SECONDS - start)) s  $1" >&2
}
train_policy() {  # NAME FROM [FLAGS]: trains $dir/NAME on stdin's records; $dir/NAME.done is empty
  stage $dir/$1.done python train_policy.py --seed $seed $FLAGS --model $2 \
      --out $dir/$1 "${@:3}"
}
graded_episodes() {  # MODEL TASKS [FLAGS]
  python collect.py --model $1 --seed $seed $FLAGS $play "${@:3}" < $2 |
    python $grader grade
}
edited_copy() {  # EDITS: copies the scripts, applies the edits, and prints the copy's directory
  local copy
  copy=$(mktemp -d runs/edited.XXXXXX)
  cp *.py $copy
  git apply --directory=$copy $(printf "tests/experiments/edits/%s.diff " "$@")
  echo $copy
}

# --- setups ---------------------------------------------------------------------------------------
# Each makes $dir/base, $dir/tasks.jsonl and $dir/tests.jsonl, and sets the flags of all programs:

usual_flags() {
  play="--human tests/toy.py --max_turns 6 --max_tokens 40" grader=colbench.py
  explore="-k 4 --candidates 16 --candidates_share 0.5" test_flags=
  critic_flags="--beta 1 --nll_coef 0.3 --lr 4e-4 --batch_size 16"
  sweet_flags="--beta 1 --nll_coef 3 --mix 0.25 --lr 6e-4 --batch_size 32"
  mtdpo_flags="--beta 0.3 --nll_coef 3 --lr 3e-4 --batch_size 16"
  rft_flags="--lr 5e-4 --epochs 8"
}
toy_base() {  # PROGRAM NAME [FLAGS]: a tiny model that learns demonstrations
  stage $dir/tiny.log python $1 model --seed $seed --out $dir/tiny "${@:3}"
  stage $dir/demos.jsonl python $1 demos --seed $seed --n ${DEMOS:-8000} "${@:3}"
  train_policy $2 $dir/tiny --loss rft --all 1 --lr 3e-3 < $dir/demos.jsonl
}
make_tasks() {  # PROGRAM N TESTS [FLAGS]
  stage $dir/tasks.jsonl python $1 tasks --seed $seed --n $2 "${@:4}"
  stage $dir/tests.jsonl python $1 tasks --split test --n $3 "${@:4}"
}
setup_plain() {
  usual_flags
  toy_base tests/toy.py base
  make_tasks tests/toy.py ${N:-400} ${TESTS:-300}
}
setup_early() {
  usual_flags
  explore="-k 4 --candidates 16" critic_flags+=" --epochs 8"
  toy_base tests/toy.py plain
  stage $dir/early.jsonl python tests/toy.py demos --seed $((100 + seed)) \
      --n $((${DEMOS:-8000} * 3 / 8)) --at_once 0.65 --early 0.1 --distract 0.1
  train_policy base $dir/plain --loss rft --all 1 --lr 1e-3 --epochs 2 < $dir/early.jsonl
  make_tasks tests/toy.py ${N:-150} ${TESTS:-300}
}
setup_long() {
  usual_flags
  play="--human tests/toy.py --max_turns 10 --max_tokens 40"
  toy_base tests/toy.py base --min_slots 3 --max_slots 5 --max_turns 10
  make_tasks tests/toy.py ${N:-400} ${TESTS:-300} --min_slots 4 --max_slots 5
}
orders() {  # PROGRAM: a base that has learned orders; its vocabulary is this program's
  usual_flags
  play="--human tests/experiments/orders.py --max_turns 4 --max_tokens 40" test_flags="-k 4"
  stage $dir/tiny.log python $1 model --seed $seed --out $dir/tiny
  stage $dir/demos.jsonl python tests/experiments/orders.py demos --seed $seed --n ${DEMOS:-1000}
  train_policy base $dir/tiny --loss rft --all 1 --lr 3e-3 < $dir/demos.jsonl
  stage $dir/tasks.jsonl python tests/experiments/orders.py tasks --seed $seed --n ${N:-100}
  stage $dir/tests.jsonl python tests/experiments/orders.py tasks --seed 1000 --n ${TESTS:-100}
}
setup_spelled() { orders tests/toy.py; }
setup_words() { orders tests/experiments/orders.py; }
setup_pages() {
  usual_flags
  play="--human tests/toy_pages.py --max_turns 6 --max_tokens 40" test_flags="-k 2"
  grader=tests/toy_pages.py
  critic_flags="--min_gap 0.1 --beta 1 --lr 4e-4 --batch_size 16"
  sweet_flags="--beta 1 --nll_coef 3 --lr 6e-4 --batch_size 32" mtdpo_flags+=" --min_gap 0.1"
  DEMOS=${DEMOS:-4000} toy_base tests/toy_pages.py base
  make_tasks tests/toy_pages.py ${N:-150} ${TESTS:-150} --usual 0
}
setup_real() {
  usual_flags
  play="--human tests/toy.py --max_turns 6 --max_tokens 128" test_flags="-k 2"
  explore="-k 4 --candidates 12 --candidates_share 0.25"
  critic_flags="--save_every 20 --beta 1 --nll_coef 0.3 --lr 8e-5 --min_gap 0.3 --epochs 1"
  sweet_flags="--save_every 20 --beta 1 --nll_coef 0.3 --mix 0.25 --lr 3e-5 --batch_size 16
      --pairs_per_turn 2"
  mtdpo_flags="--beta 0.3 --nll_coef 3 --lr 3e-5 --epochs 2"
  rft_flags="--lr 5e-5 --batch_size 16 --epochs 3"
  stage $dir/demos.jsonl python tests/toy.py demos --world english --seed $seed --n ${DEMOS:-700}
  train_policy base ${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct} --loss rft --all 1 --lr 4e-4 \
      --epochs 1 --batch_size 8 --save_every 20 < $dir/demos.jsonl
  make_tasks tests/toy.py ${N:-120} ${TESTS:-300} --world english --usual 0.3
}

# --- methods --------------------------------------------------------------------------------------

score() {  # CRITIC: writes $dir/scored-CRITIC.jsonl
  if [ -e $dir/scored-$1.jsonl ]; then return; fi
  local scripts=. records=$dir/train.jsonl
  local critic="--seed $seed $FLAGS --model $dir/base --out $dir/critic-$1 $critic_flags"
  case $1 in
    eq3) ;;
    another) records=$dir/another.jsonl; stage $records another_reference < $dir/train.jsonl ;;
    none) stage $dir/scored-none.jsonl no_advantage < $dir/train.jsonl; return ;;
    agent) critic+=" --ref_context agent" ;;
    untrained) critic="--score $dir/base --model $dir/base --ref_context agent $FLAGS" ;;
    better) score eq3; score untrained; stage $dir/scored-better.jsonl better_scores; return ;;
    *) scripts=$(edited_copy ${1//+/ }) ;;
  esac
  stage $dir/scored-$1.jsonl python $scripts/train_critic.py $critic < $records
}
another_reference() {  # permutes the hidden information of the tasks, at random in one circle
  python -c "
import json, random, sys
records = [json.loads(line) for line in sys.stdin]
references = {r['task']['id']: r['task'].get('hidden_information') or r['task']['ground_truth']
              for r in records}
ids = [*references]
random.Random($seed).shuffle(ids)
other = dict(zip(ids, ids[1:] + ids[:1]))
for r in records:
    r['task']['hidden_information'] = references[other[r['task']['id']]]
    print(json.dumps(r))"
}
no_advantage() {
  python -c "
import json, sys
for r in map(json.loads, sys.stdin):
    for message in r['dialogue_history']:
        for candidate in message.get('candidates', []):
            candidate['advantage'] = 0
    print(json.dumps(r))"
}
better_scores() {
  cat $(python tests/experiments/choose_critic.py $dir/scored-{eq3,untrained}.jsonl)
}
rft() {  # NAME FROM RECORDS
  train_policy $1 $2 --loss rft $rft_flags < $dir/$3.jsonl
}
try() {  # NAME: tests a policy
  stage $dir/test-$1.jsonl graded_episodes $dir/$1 $dir/tests.jsonl $test_flags
}
first_round() {  # METHOD
  local weight=${1#*@}
  if [ $weight = $1 ]; then weight=0.1; fi
  case $1 in
    rft) rft rft $start train ;;
    mtdpo) train_policy mtdpo $start --loss mtdpo $mtdpo_flags < $dir/train.jsonl ;;
    *)
      score ${1%@*}
      train_policy $1 $start $sweet_flags --logprob_weight $weight < $dir/scored-${1%@*}.jsonl ;;
  esac
  try $1
}
second_round() {  # METHOD
  stage $dir/again-$1.jsonl graded_episodes $dir/$1 $dir/tasks.jsonl -k 4
  rft $1-rft $dir/$1 again-$1
  try $1-rft
}
compare() {  # SETUP SEEDS
  local method
  for seed in $2; do
    dir=runs/compare/$1/$seed start=runs/compare/$1/$seed/base
    mkdir -p $dir
    setup_$1
    stage $dir/train.jsonl graded_episodes $dir/base $dir/tasks.jsonl $explore
    try base
    if [ $1 = real ]; then
      rft start $dir/base train
      start=$dir/start
    fi
    for method in $METHODS; do
      first_round ${method%-rft}
      case $method in *-rft) second_round ${method%-rft} ;; esac
    done
  done
}
names() {  # of the table's rows
  for m in $METHODS; do echo $m; done
  for m in $METHODS; do echo ${m%-rft}; done
  echo base
}
table() {  # SETUP
  local files="runs/compare/$1/%s/test-NAME.jsonl\n"
  python evaluate.py $(for m in $(names | awk '!seen[$0]++'); do
      echo $m=$(printf "${files/NAME/$m}" $SEEDS | paste -sd,)
    done) >> runs/results.jsonl
}

for setup in "${@:-}"; do
  declare -F setup_$setup > /dev/null || { sed -n '2,/^set/s/^# \?//p' "$0" >&2; exit 2; }
done
mkdir -p runs/compare
log=runs/compare.log
finish() {
  local status=$?
  kill $(jobs -p) 2> /dev/null || true
  if ((status)); then tail -n 5 $log >&2; fi  # what has failed
}
trap finish EXIT
for setup in "$@"; do
  unset ENVIRONMENTS_FILE
  case $setup in
    spelled | words) export ENVIRONMENTS_FILE=tests/experiments/orders.py ;;
  esac
  even=; odd=
  for seed in $SEEDS; do if ((seed % 2)); then odd+=" $seed"; else even+=" $seed"; fi; done
  compare $setup "$even" >> $log 2>&1 & first=$!
  compare $setup "$odd" >> $log 2>&1 & second=$!
  wait $first
  wait $second
  table $setup
done
