#!/bin/sh
# The long campaign (make test-long): no false alarm on clean kernels, every planted fault found.
#   fuzz/long.sh PROGRAM OUT [CASES [RUNS]]
# Each step leaves its records in OUT and is skipped where they are complete: an interrupted campaign goes on.
# Exit: 1 a false alarm or a fault that was missed.
set -u
dualkv=$1 out=$2 cases=${3:-20000} runs=${4:-200} here=$(dirname "$0")
mkdir -p "$out" || exit 2
bad=0

# 1. clean cases over all dtypes, and the control E5 (subnormal exponentials flushed: explained by no rule, harmless)
for kernel in emu emu-replicated emu+fault=E5; do
    n=$cases
    [ $kernel = emu ] || n=$((cases / 10))
    [ -f "$out/clean-$kernel.done" ] && continue
    "$dualkv" fuzz --kernel $kernel --cases $n --seed 2 --quiet --resume --json "$out/clean-$kernel.jsonl"
    case $? in
    0) "$dualkv" report --markdown "$out/clean-$kernel.md" "$out/clean-$kernel.jsonl" && touch "$out/clean-$kernel.done" ;;
    130 | 143) exit 130 ;;
    *) bad=1 ;;
    esac
    echo "clean $kernel: $(grep -c '"status":"PASSED"' "$out/clean-$kernel.jsonl") of $n PASSED"
done

# 2. suite ci with other seeds: the budget of false alarms of one run is 1e-4
"$here/reseed.sh" "$dualkv" "$out" "$runs"
case $? in
0) ;;
130) exit 130 ;;
*) bad=1 ;;
esac

# 3. planted faults: by the fuzzer for three seeds, by suite ci alone, by the usual rules; shrunk
if [ ! -f "$out/power.done" ]; then
    "$dualkv" power --kernel emu ci --json "$out/power.jsonl" --markdown "$out/power.md"
    case $? in
    0) touch "$out/power.done" ;;
    130 | 143) exit 130 ;;
    *) bad=1 ;;
    esac
fi

# 4. shrinking from large lines: at most two segments, one or two heads, within a minute
"$here/shrink.sh" "$dualkv" "$out/power.jsonl" "$out"
case $? in
0) ;;
130) exit 130 ;;
*) bad=1 ;;
esac

# 5. kill -9 at fifty moments while records are written, and fifty while they are indexed
if [ ! -f "$out/kill.done" ]; then
    if DUALKV_KILLS=50 DUALKV_BUILD=$(dirname "$dualkv") "$(dirname "$dualkv")/test/verify/test_kill" >"$out/kill.txt" 2>&1; then
        touch "$out/kill.done"
    else
        bad=1
    fi
    cat "$out/kill.txt"
fi
exit $bad
