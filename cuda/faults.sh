#!/bin/bash
# faults.sh [DUALKV [PLUGIN]]: every planted fault of the test build (make cuda-faults; cuda/fault.cuh) must be a defect on
# some line of suite smoke or of the few below, and the same build without a fault must pass them. A row a fault: its id,
# how many lines found it, the first of them. Exit 1 where a fault is missed or the clean build is blamed. Needs a GPU.
#
#     JOBS=N  kernels at a time (default: as many as cores)
set -u
export DUALKV=${1:-build/dualkv} PLUGIN=${2:-build/libdualkv_cuda_faults.so}
case $PLUGIN in */*) ;; *) PLUGIN=./$PLUGIN ;; esac
# What smoke is too small for: several key tiles that add to one dQ, offsets beyond 16 bits, sinks of many rows; folds of
# dK and dV; rows without keys; a stream that is not the default one; dSink where its bound is narrow.
export MORE="shape=300+3x70 heads=8:2 dim=128 scale=0.1 sinklogit=1 dlse=on
shape=500+8x65 heads=8:1 dim=16
shape=0+3x17 heads=2:1 mask=block:4:0.3:1
shape=200+2x70 heads=4:2 dtype=fp16 run=side
shape=300+3x70 heads=4:2 dim=16 dtype=fp32 sinklogit=1"
ids=$("$DUALKV" check shape=1 --kernel "$PLUGIN:cuda+fault=none" 2>&1 | sed -n 's/.*ID one of \([A-Z0-9 ]*\)).*/\1/p')
[ -n "$ids" ] || { echo "faults.sh: $PLUGIN lists no faults" >&2; exit 3; }

one() { # ID, or - for the clean build
    local spec=$PLUGIN:cuda out rc n first more
    mapfile -t more <<<"$MORE"
    [ "$1" = - ] || spec+=+fault=$1
    out=$("$DUALKV" check smoke "${more[@]}" --kernel "$spec" --jobs 1 --timeout 30 --quiet 2>&1)
    rc=$?
    n=$(grep -cE '^[A-Z_]+  shape=' <<<"$out")
    first=$(grep -m1 -E '^[A-Z_]+  shape=' <<<"$out")
    case $1,$rc in
    -,0 | -,4) echo "ok      clean" ;;
    -,*) echo "BLAMED  clean  exit $rc  $(head -3 <<<"$out" | tr '\n' ' ')" ;;
    *,1) printf 'found   %-4s %3d lines  %s\n' "$1" "$n" "$first" ;;
    *) printf 'MISSED  %-4s exit %s  %s\n' "$1" "$rc" "$(tail -1 <<<"$out")" ;;
    esac
}
export -f one
table=$(printf '%s\n' - $ids | xargs -P "${JOBS:-$(nproc)}" -n 1 bash -c 'one "$0"' | tee >(cat >&2))
found=$(grep -c '^found' <<<"$table")
echo "$found of $(wc -w <<<"$ids") planted faults found"
[ "$found" = "$(wc -w <<<"$ids")" ] && grep -q '^ok' <<<"$table"
