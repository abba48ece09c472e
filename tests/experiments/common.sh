# Shared by the experiments, which source it from the repo's root after the quickstart's install.
#
# They set seed, dir (of a run's files), tests (the test tasks), base and critic_base (the models
# that policies and critics start from), and define run_episodes, train_critic and train_sweet. All
# files go to runs/. One that exists is not made again, so rerun a killed script to resume it.
#
# A row CRITIC@WEIGHT is a SWEET-RL policy, trained with --logprob_weight WEIGHT on candidates that
# CRITIC has scored, and evaluated on the test tasks. The critics:
#   eq3        pi_ref reads the hidden information, as in eq. 3 (the default)
#   paper      the same with the paper's NLL weight; the policy has --mix 0
#   trained    --ref_context agent: before training it equals the untrained critic
#   untrained  --score BASE --model BASE --ref_context agent
#   none       all advantages are 0, so that only the log-prob ranks
#   without_c, trajectory, sum, regression, value      changed by tests/experiments/edits
#   better     like trained, but on the episodes of the policy $FIRST and with --nll_coef 1
#   again-untrained, again-better   a second round: from the policy $FIRST, on its candidates
set -euo pipefail
. .venv/bin/activate
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
SEEDS=${SEEDS:-0 1 2 3 4}
FLAGS=${FLAGS:-}  # for every script that runs a model, such as "--dtype bf16"
mkdir -p runs

stage() {  # FILE COMMAND: writes the command's stdout to FILE, unless FILE exists
  if [ -e $1 ]; then return; fi
  local start=$SECONDS
  "${@:2}" > $1.part
  mv $1.part $1
  echo "$(date +%T) $((SECONDS - start)) s  $1" | tee -a runs/times >&2
}
edited_copy() {  # EDITS: copies the scripts, applies the edits, and prints the copy's directory
  local copy
  copy=$(mktemp -d runs/edited.XXXXXX) && cp *.py $copy &&
    git apply --directory=$copy $(printf "tests/experiments/edits/%s.diff " "$@") && echo $copy
}
train_policy() {  # NAME [FLAGS]: trains $dir/NAME, from $base, on stdin's records
  stage $dir/$1.json python train_policy.py --seed $seed $FLAGS --model $base --out $dir/"$@"
}
score() {  # CRITIC: writes $dir/scored-CRITIC.jsonl
  local code=.  # the directory of the scripts
  if [ -e $dir/scored-$1.jsonl ]; then return; fi
  case $1 in
    none) score untrained ;;
    without_c) code=$(edited_copy no_hidden) ;;
    trajectory | sum | regression) code=$(edited_copy $1) ;;
    value) code=$(edited_copy regression value) ;;
    better) score again-better ;;
    again-*) sweet_row $FIRST; run_episodes again $dir/$FIRST $dir/tasks.jsonl "${train_args[@]}" ;;
  esac
  stage $dir/scored-$1.jsonl scored_records $1
}
scored_records() {  # CRITIC: prints them; train_critic NAME RECORDS [FLAGS] trains and scores
  case $1 in
    paper) train_critic paper train --nll_coef 0.01 ;;
    trained) train_critic trained train --ref_context agent ;;
    untrained) score_untrained train ;;
    none) sed -E 's/("advantage": )[-+.e0-9]+/\10/g' $dir/scored-untrained.jsonl ;;
    better) python train_critic.py --score $dir/critic-better $FLAGS < $dir/train.jsonl ;;
    again-untrained) score_untrained again ;;
    again-better) train_critic better again --ref_context agent --nll_coef 1 ;;
    *) train_critic $1 train ;;
  esac
}
score_untrained() {  # RECORDS
  python train_critic.py --score $critic_base --model $critic_base --ref_context agent $FLAGS \
    < $dir/$1.jsonl
}
sweet_row() {  # CRITIC@WEIGHT: trains it by train_sweet NAME MIX WEIGHT < RECORDS, and tests it
  local base=$base mix=0.25
  score ${1%@*}
  case $1 in
    again-*) base=$dir/$FIRST ;;
    paper@*) mix=0 ;;
  esac
  train_sweet $1 $mix ${1#*@} < $dir/scored-${1%@*}.jsonl
  test_policies $1
}
test_policies() {  # NAMES: on the test tasks, by run_episodes NAME MODEL TASKS [FLAGS]
  local m
  for m in "$@"; do run_episodes test-$m $dir/$m $tests ${test_args:-}; done
}
run_parts() {  # SEEDS PARTS: runs these functions for each seed, sequentially
  ( for seed in $1; do
      seed_dir=runs/seed$seed; mkdir -p $seed_dir
      for part in $2; do $part; done
    done ) >> runs/lane.log 2>&1
}
run_in_parallel() {  # SEEDS PARTS: even and odd seeds on a core each
  even=""; odd=""
  for seed in $1; do if ((seed % 2)); then odd+=" $seed"; else even+=" $seed"; fi; done
  run_parts "$even" "$2" & local even_pid=$!
  run_parts "$odd" "$2" &
  wait $even_pid && wait $! || { tail -3 runs/lane.log >&2; exit 1; }
}
row() {  # NAME FILE SEEDS: prints NAME=FILE,FILE,... for evaluate.py
  echo "$1=$(for seed in $3; do echo runs/seed$seed/$2.jsonl; done | paste -sd,)"
}
rows() { for m in "${@:3}"; do row $m $1/test-$m "$2"; done; }  # PART SEEDS NAMES
