#!/usr/bin/env bash
# A run that goes on from its mirror where its own folder is gone: the same command, on any number of workers.
#   bash examples/mirrored_run.sh 2 s3://BUCKET/FOLDER [more flags]
# s3fs finds its credentials in the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL.
set -euo pipefail
workers=${1:-2}
mirror=${2:-file:checkpoints/mirror}
shift $(($# < 2 ? $# : 2))

exec "${PYTHON:-python}" "$(dirname "$0")/../main_multi_gpu.py" --multi-gpu ddp --nproc-per-node "$workers" \
    --global-batch-size 64 --epochs 4 --checkpoint-every 10 --exact \
    --save-dir checkpoints/mirrored --mirror "$mirror" "$@"
