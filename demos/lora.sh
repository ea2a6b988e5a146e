#!/usr/bin/env bash
# LoRA on a trained model: the model of the first run writes ISO dates; small matrices beside it learn the German form.
#
#     demos/lora.sh [FOLDER]             after demos/first_run.sh FOLDER, or it trains the ISO model itself
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=${1:-$(mktemp -d)}
mkdir -p "$work" && cd "$work"
export WORKBENCH_RUNS="$work/runs"

if [ ! -d runs/dates-0001 ]; then
    workbench demo ${STEPS:+"optim.max_steps=$STEPS"}
fi
trained=$(ls -d "$PWD"/runs/dates-0001/checkpoints/checkpoint-* | sort -V | tail -1)
python -P "$here/make_rows.py" german german.jsonl
python -P "$here/make_rows.py" german german-held-out.jsonl --count 200 --held-out
cp "$here/lora.yaml" german.yaml
workbench check german.yaml
workbench preview german.yaml --rows 1
workbench train german.yaml "model.name=$trained" ${STEPS:+"optim.max_steps=$STEPS"}
workbench receipt german-0001
