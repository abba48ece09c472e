# What the experiments share, to be sourced from the repo's root after the quickstart's install.
#
# The script that sources it sets s, the seed; R, the directory of a run; B, where its policies
# start; C, where its critics start. It defines play, learn and sweet (below: who calls them how).
# Everything goes to runs/. Killed and started again, a script goes on where it was.
#
# A row CRITIC@WEIGHT is a SWEET-RL policy, measured on the test tasks. Its critic is
#   eq3        the default
#   paper      with the paper's weight of the NLL; its policy has no pairs of whole trajectories
#   trained    --ref_context agent: starts as the untrained one
#   untrained  --untrained 1
#   none       all advantages are 0, so that only --logprob_weight ranks
#   without_c, trajectory, sum, regression, value      edits
#   better     as trained, but learns from the episodes of the policy $FIRST, by --nll_coef 1
#   again-untrained, again-better      of a second round: ranks the candidates of $FIRST, which the
#              policy starts from
set -euo pipefail
. .venv/bin/activate
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
FLAGS=${FLAGS:-}  # of the models' stages, such as "--dtype bf16"
mkdir -p runs

stage() {  # FILE COMMAND: the command's stdout, if it is not there yet
  if [ -e $1 ]; then return; fi
  local start=$SECONDS
  "${@:2}" > $1.part
  mv $1.part $1
  echo "$(date +%T) $((SECONDS - start)) s  $1" | tee -a runs/times >&2
}
edited() {  # EDITS: the directory of a copy of the scripts with them
  local copy
  copy=$(mktemp -d runs/edited.XXXXXX) && cp *.py $copy &&
    git apply --directory=$copy $(printf "tests/experiments/edits/%s.diff " "$@") && echo $copy
}
fit() {  # NAME [FLAGS]: a policy from $B, of stdin's records
  stage $R/$1.json python train_policy.py --seed $s $FLAGS --model $B --out $R/"$@"
}
scored() {  # CRITIC: its records, $R/scored-CRITIC.jsonl
  local E=.
  if [ -e $R/scored-$1.jsonl ]; then return; fi
  case $1 in
    none) scored untrained ;;
    without_c) E=$(edited no_hidden) ;;
    trajectory | sum | regression) E=$(edited $1) ;;
    value) E=$(edited regression value) ;;
    better) scored again-better ;;
    again-*) policy $FIRST; play again $R/$FIRST $R/tasks.jsonl "${draws[@]}" ;;
  esac
  stage $R/scored-$1.jsonl score $1
}
score() {  # CRITIC; learn NAME RECORDS [FLAGS] is the script's: trains and scores by $E's scripts
  case $1 in
    paper) learn paper train --nll_coef 0.01 ;;
    trained) learn trained train --ref_context agent ;;
    untrained) untrained train ;;
    none) sed -E 's/("advantage": )[-+.e0-9]+/\10/g' $R/scored-untrained.jsonl ;;
    better) python train_critic.py --out $R/critic-better $FLAGS < $R/train.jsonl ;;
    again-untrained) untrained again ;;
    again-better) learn better again --ref_context agent --nll_coef 1 ;;
    *) learn $1 train ;;
  esac
}
untrained() { python train_critic.py --untrained 1 $FLAGS --model $C < $R/$1.jsonl; }
policy() {  # CRITIC@WEIGHT; sweet NAME MIX WEIGHT is the script's, of the critic's records
  local B=$B mix=0.25
  scored ${1%@*}
  case $1 in
    again-*) B=$R/$FIRST ;;
    paper@*) mix=0 ;;
  esac
  sweet $1 $mix ${1#*@} < $R/scored-${1%@*}.jsonl
  try $1
}
try() {  # NAMES: on the test tasks; play NAME MODEL TASKS [FLAGS] is the script's
  local m
  for m in "$@"; do play test-$m $R/$m $tests ${test_draws:-}; done
}
