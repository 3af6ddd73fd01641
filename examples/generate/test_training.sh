#!/bin/sh
# A few steps of training, and text from what they made.
# Usage: test_training.sh TRAIN GENERATE TEXT SCRATCH_DIR
set -eu
train=$1 generate=$2 text=$3 scratch=$4
rm -rf "$scratch"
mkdir -p "$scratch"
cd "$scratch"

# A model that has learned nothing is no better than log(256) = 5.55 nats a byte.
"$train" "$text" model.safetensors 4 | tee log
awk '/^held out/ { found = 1; if (!($4 < 5)) exit 1 } END { exit !found }' log
"$generate" -n 20 model.safetensors libfa3
