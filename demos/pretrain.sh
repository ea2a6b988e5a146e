#!/usr/bin/env bash
# Plain text: every token is learned, long texts become several rows.
#
#     demos/pretrain.sh [FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=${1:-$(mktemp -d)}
mkdir -p "$work" && cd "$work"
export WORKBENCH_RUNS="$work/runs"

python -P "$here/make_rows.py" text dates.txt --count 3000
python -P "$here/make_rows.py" text dates-held-out.txt --count 200 --held-out
cp "$here/pretrain.yaml" text.yaml
workbench check text.yaml
workbench preview text.yaml --rows 1
workbench train text.yaml ${STEPS:+"optim.max_steps=$STEPS"}
workbench receipt text-0001
