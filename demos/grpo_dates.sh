#!/usr/bin/env bash
# GRPO: a model that is right at times learns from a rule alone, without seeing an answer.
#
#     demos/grpo_dates.sh [FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=${1:-$(mktemp -d)}
mkdir -p "$work" && cd "$work"
export WORKBENCH_RUNS="$work/runs"

# A first run, stopped long before it is good: about a third of the answers are right.
workbench demo optim.max_steps=${FIRST:-180}
trained=$(ls -d "$PWD"/runs/dates-0001/checkpoints/checkpoint-* | sort -V | tail -1)
cp "$here/grpo_dates.yaml" rules.yaml
cp "$here/dates_rewards.py" .
workbench check rules.yaml
workbench train rules.yaml "model.name=$trained" ${STEPS:+"optim.max_steps=$STEPS"}
workbench receipt grpo-dates-0001
