#!/usr/bin/env bash
# The first run without a terminal: a config, its check, the very tokens, a training that is stopped and taken up again.
#
#     demos/first_run.sh [FOLDER]        everything goes into FOLDER (default: a new one under /tmp)
#     STEPS=60 demos/first_run.sh        fewer steps
set -euo pipefail
work=${1:-$(mktemp -d)}
mkdir -p "$work" && cd "$work"
export WORKBENCH_RUNS="$work/runs"
say() { printf '\n== %s\n' "$*"; }

say "a config from a recipe, with comments that say what to change"
workbench new --recipe demo -o dates.yaml --force
say "what is wrong with it"
workbench check dates.yaml
say "the first rows as the model will read them: what is between ‹ › is learned"
workbench preview dates.yaml --rows 2
say "training starts and goes on without this window"
workbench train dates.yaml --detach ${STEPS:+"optim.max_steps=$STEPS"}
say "save and stop"
workbench stop dates-0001 --save
workbench runs
say "and on from there, to the end"
workbench resume dates-0001
say "what was really done"
workbench receipt dates-0001
workbench runs
