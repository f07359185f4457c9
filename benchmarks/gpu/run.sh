#!/usr/bin/env bash
# Measures HOPE on one GPU in at most 560 s, without a network:
#   bash benchmarks/gpu/run.sh FOLDER     FOLDER/gpu.jsonl gets a row per measurement (parts.py), gpu.log the rest
# Each part has a process and a time limit of its own: what a part has written before it ends stays. The archives of
# pack.sh are unpacked if build/gpu (or the folder PACK) has them. PYTHON names the interpreter. Without a GPU the same
# order runs with tiny sizes.
set -uo pipefail
out=$(realpath -m "${1:?usage: bash benchmarks/gpu/run.sh FOLDER}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p "$out" || exit 1
python=${PYTHON:-python3}
# Triton's cache holds paths, so it lies where pack.sh made it.
site=/tmp/hope_gpu
pack=${PACK:-build/gpu}
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
unset TRITON_INTERPRET HOPE_KERNELS

# limited SECONDS NAME COMMAND...: a row says why a command did not end well. LIMIT=S is the limit of all.
limited() {
  local limit=${LIMIT:-$1} name=$2 status reason
  shift 2
  echo "== $name" | tee -a "$out/gpu.log"
  timeout --signal=KILL "$limit" "$@" >>"$out/gpu.log" 2>&1 </dev/null
  status=$?
  [ "$status" -eq 0 ] && return
  reason="ended with status $status: $(tail -n 1 "$out/gpu.log" | tr -d '\\"[:cntrl:]' | cut -c1-120)"
  [ "$status" -eq 137 ] && reason="stopped after $limit s"
  printf '{"part": "%s", "measure": "note", "note": "%s"}\n' "$name" "$reason" | tee -a "$out/gpu.jsonl"
}
part() { limited "$1" "${*:2}" "$python" benchmarks/gpu/parts.py "$out" "${@:2}"; }
unpack() {
  limited "$1" unpack sh -c 'for archive; do "$0" -m tarfile -e "$archive" / || exit; done' "$python" "$pack"/*.tar.xz
}

#      s  part         words
if [ -e "$pack" ]; then
  unpack 25
  export PYTHONPATH="$site:$PYTHONPATH" TRITON_CACHE_DIR="$site/cache"
fi
part   20 machine
part   30 kernels      triton bfloat16 64
part   30 kernels      fla bfloat16 64 128
part   20 kernels      fla float32 64
part   30 scan
part   40 step         pilot hope
part   20 step         pilot llama
part   30 step         pilot gated_deltanet
part   20 step         pilot hope_torch
part   35 step         mid hope
part   20 step         mid llama
part   25 step         mid gated_deltanet
part   20 profile      mid hope
part   25 packed       mid hope
part   35 decode       mid hope
part   25 decode       mid llama
part   20 decode       mid gated_deltanet
part   20 recomputed   mid hope
part   20 step         mid-hybrid hope
part   25 projections
part   25 kernels      triton bfloat16 32 128 16
