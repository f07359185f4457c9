#!/usr/bin/env bash
# Gathers in build/gpu what a machine with a Hopper GPU and no network lacks: flash-linear-attention, a Triton whose
# gradients are right there, a cache of compiled kernels (warm_cache.py), and packages of the trainer.
#   PYTHON=python3.12 bash benchmarks/gpu/pack.sh
# PYTHON is a Python 3.12 with torch, transformers and einops; PIP_ARGS goes to pip. The cache is that of the present
# commit; after WARM seconds it holds what is compiled by then. The clone and build/gpu together have at most 64 MiB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3.12} triton=3.7.1 most=$((64 << 20)) pack=build/gpu
site=$(sed -n 's/^SITE = "\(.*\)"/\1/p' benchmarks/gpu/run.py)
die() { echo "error: $*" >&2 && exit 1; }
"$python" -c 'import sys, einops, torch, transformers; sys.exit(sys.version_info[:2] != (3, 12))' ||
  die "PYTHON=$python is not a Python 3.12 with torch, transformers and einops: name one that is"

mkdir -p "$pack" build/wheels "$site/cache"
# The cache is kept: what has not changed is not compiled again.
find "$site" -mindepth 1 -maxdepth 1 ! -name cache -exec rm -r {} +
# get WHEEL VERSION FOLDER
get() {
  # shellcheck disable=SC2086
  "$python" -m pip download --quiet ${PIP_ARGS:-} --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp --platform manylinux_2_27_x86_64 --platform manylinux_2_28_x86_64 -d build/wheels "$1==$2" ||
    die "pip cannot download $1 $2: check the network, or give PIP_ARGS"
  "$python" -m pip install --quiet --no-deps --no-compile --no-index --target "$site" \
    "build/wheels/${1//-/_}-$2"-*.whl || die "pip cannot install $1 $2"
}
get triton "$triton"
# What a Hopper GPU does not use: profilers, disassemblers, assemblers of other chips, plugins, AMD's headers.
(
  cd "$site/triton"
  rm -rf _C/libproton.so FileCheck instrumentation plugins profiler backends/amd/{include,lib} \
    backends/nvidia/lib/cupti backends/nvidia/bin/{ptxas-blackwell,nvdisasm,cuobjdump} "$site/bin"
  strip --strip-unneeded _C/libtriton.so
) || die "triton $triton has other files than pack.sh removes"
# The same wheel gives the same archive, which takes minutes.
[ -e "$pack/triton-$triton.tar.xz" ] || {
  XZ_OPT="-T0 -6" tar -cJf "$pack/part" --exclude="${site#/}/cache" -C / "${site#/}"
  mv "$pack/part" "$pack/triton-$triton.tar.xz"
}
# What the trainer needs beside torch and transformers; the last two are needs of datasets.
for name in fla-core datasets evaluate; do get "$name" "$(sed -n "s/^$name==//p" constraints.txt)"; done
get dill 0.4.1
get multiprocess 0.70.19
rm -rf "$site/bin"
PYTHONPATH="$site:$PWD" TRITON_CACHE_DIR="$site/cache" OMP_NUM_THREADS=1 \
  timeout "${WARM:-3600}" "$python" benchmarks/gpu/warm_cache.py ||
  [ $? -eq 124 ] || die "benchmarks/gpu/warm_cache.py failed: see above"
echo "$(find "$site/cache" -name "*.cubin" | wc -l) kernels in the cache"
# Triton reads nothing else of an entry.
find "$site/cache" -type f ! -name "*.cubin" ! -name "*.json" -delete
(
  cd "$site"
  find . -maxdepth 1 -mindepth 1 ! -path "./triton*" | XZ_OPT=-9 tar -cJf "$OLDPWD/$pack/light-and-cache.tar.xz" \
    --transform "s,^\.,${site#/}," -T -
)

tree=$(git ls-files -z --cached --others --exclude-standard | xargs -0 du -cb | tail -n 1 | cut -f1)
packed=$(du -cb "$pack"/*.tar.xz | tail -n 1 | cut -f1)
du -b "$pack"/*.tar.xz | awk '{ printf "%6.1f MiB %s\n", $1 / 2^20, $2 }'
awk -v p="$packed" -v t="$tree" 'BEGIN { printf "%6.1f MiB with the clone (%.1f)\n", (p + t) / 2^20, t / 2^20 }'
[ $((packed + tree)) -le "$most" ] || die "that is more than $((most >> 20)) MiB"
