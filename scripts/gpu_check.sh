#!/usr/bin/env bash
# Checks on a GPU, in parts of at most eight minutes each, without a network:
#
#   scripts/gpu_check.sh correctness      # kernels against the PyTorch reference, no waiting, memory; torch, triton, numpy, pytest
#   scripts/gpu_check.sh speed            # passes, methods, codes; the same packages
#   scripts/gpu_check.sh training         # the trainer; packages: docs/how_to/measure_on_a_gpu.md
#   scripts/gpu_check.sh losses           # 11 M parameters, four replicas; the same packages, and a prepared text
#   scripts/gpu_check.sh ranks            # stages of a rank on NCCL, and a rank that is lost; the same packages
#   scripts/gpu_check.sh methods          # every method, overlap, [sharding] and Muon on NCCL; the same packages
#   scripts/gpu_check.sh lease            # the most important steps of all parts that are not stored yet
#
# --smoke: tiny sizes, on a CPU too. --output DIR: instead of results/gpu. --only a,b: these steps. --seconds N: of all
# steps together. PYTHON: which interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m scripts.gpu.check "$@"
