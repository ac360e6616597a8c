#!/bin/bash
# device.sh [BUILD [OUT]]: what the CUDA kernels must show on a GPU machine, in order, each step with its command; records go
# to OUT (default BUILD/device). `make test-device` builds what it needs. Exit 1 where a step failed; the others still run.
#
# BUILD may be a bundle (`make bundle`); what needs the planted faults is then left out, and named, where it has none.
#
#     STEPS="name ..."   only these     PYTHON=python3   one with PyTorch, for the peers
set -u
build=${1:-build} out=${2:-$build/device} steps=${STEPS:-} failed= left=
dualkv=$build/dualkv faulty=$build/libdualkv_cuda_faults.so
case $faulty in /*) ;; *) faulty=./$faulty ;; esac
here=$(dirname "$0")
mkdir -p "$out"
export DUALKV_DATA=${DUALKV_DATA:-$here/../data}

step() { # NAME COMMAND...
    local name=$1 start=$SECONDS rc
    shift
    [ -z "$steps" ] || grep -qw -- "$name" <<<"$steps" || return 0
    printf '\n== %s:' "$name"
    printf ' %s' "${@@Q}"
    echo
    "$@" >"$out/$name.txt" 2>&1
    rc=$?
    tail -n "${SHOW:-3}" "$out/$name.txt"
    echo "== $name: exit $rc, $((SECONDS - start)) s"
    [ $rc = 0 ] || failed+=" $name"
}

suites=(corpus ci recorded edge device)
large='shape=32768+28x2048 heads=32:8 dim=128'
# Lines that fill the GPU: every type, several groups, splits of the walk over rows.
repeat=('shape=1000+8x100 heads=8:1 dim=128' 'shape=1000+8x100 heads=8:2 dim=64 dtype=fp16 dlse=on'
    'shape=700+8x100 heads=8:1 dim=128 dtype=fp32' 'shape=65+2x(33+2x17)/300+3x129 heads=4:1 dim=256')

step machine "$dualkv" list device
step plumbing "$build/test_device" --lib "$build/libdualkv_cuda.so"
step oracle "$dualkv" check ci --kernel cuda-fp64 --kernel cuda --oracle both --json "$out/check-oracles.jsonl"
step cuda "$dualkv" check "${suites[@]}" --kernel cuda --json "$out/check-cuda.jsonl"
step det "$dualkv" check "${suites[@]}" --kernel cuda+det --json "$out/check-cuda-det.jsonl"
step replicated "$dualkv" check "${suites[@]}" --kernel cuda-replicated --json "$out/check-cuda-replicated.jsonl"
step idle "$dualkv" check "${repeat[@]}" --kernel cuda+det --repeats 100 --json "$out/repeat-idle.jsonl"
step busy "$dualkv" check "${repeat[@]/%/ run=busy}" --kernel cuda+det --repeats 100 --json "$out/repeat-busy.jsonl"
step large "$dualkv" check "$large" --kernel cuda --oracle cuda --json "$out/check-large.jsonl"
if [ -f "$faulty" ]; then
    SHOW=40 step faults "$here/faults.sh" "$dualkv" "$faulty"
elif [ -z "$steps" ] || grep -qwE 'faults|sanitizers' <<<"$steps"; then
    left="$faulty is missing (make cuda-faults): no planted faults, and no proof that racecheck sees into the worker"
    faulty=
fi
SHOW=12 LOGS=$out/sanitizers step sanitizers "$here/sanitize.sh" "$dualkv" ${faulty:+"$faulty"}
SHOW=30 step bench "$dualkv" bench paper --kernel cuda --json "$out/bench-cuda.jsonl"
SHOW=12 step peers "${PYTHON:-python3}" "$here/peers.py" --plugin "$build/libdualkv_cuda.so" \
    --json "$out/peers.jsonl" --markdown "$out/peers.md"
echo
[ -z "$left" ] || echo "left out: $left"
[ -n "$failed" ] || { echo "all steps passed" && exit 0; }
echo "failed:$failed"
exit 1
