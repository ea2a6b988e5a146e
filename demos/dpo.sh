#!/usr/bin/env bash
# DPO: of two right answers the model learns to prefer one - ISO form to the American order.
#
#     demos/dpo.sh [FOLDER]              after demos/first_run.sh FOLDER, or it trains the ISO model itself
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=${1:-$(mktemp -d)}
mkdir -p "$work" && cd "$work"
export WORKBENCH_RUNS="$work/runs"

if [ ! -d runs/dates-0001 ]; then
    workbench demo ${STEPS:+"optim.max_steps=$STEPS"}
fi
trained=$(ls -d "$PWD"/runs/dates-0001/checkpoints/checkpoint-* | sort -V | tail -1)
python -P "$here/make_rows.py" pairs pairs.jsonl --count 2000
cp "$here/dpo.yaml" pairs.yaml
workbench preview pairs.yaml --rows 1
workbench train pairs.yaml "model.name=$trained" ${STEPS:+"optim.max_steps=$STEPS"}
workbench receipt pairs-0001
