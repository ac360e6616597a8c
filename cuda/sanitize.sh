#!/bin/bash
# sanitize.sh [DUALKV [FAULTY_PLUGIN]]: compute-sanitizer's racecheck, memcheck, initcheck and synccheck over suite smoke
# for `cuda` and `cuda+det`; a row a tool and kernel: lines run, errors found. Exit 1 on a finding, or where a tool saw
# no kernel. Where FAULTY_PLUGIN (make cuda-faults) is given, racecheck must first find its missing barrier (fault H2): a
# tool that finds nothing there does not see into the worker. Needs a GPU.
#
#     TOOLS, KERNELS, SUITE   what to run (defaults as above)
#     ORACLE=cuda             the kernels of the oracle on the device, too (default: cpu)
#     JOBS=N                  processes at a time (default: as many as cores)
#     LOGS=DIR                where the tools' words go (default: a temporary folder). What is complete there, of the same
#                             program, is not run again: cut off by a limit, the next call goes on
#
# racecheck, the slow one, runs a process a line, the longest first. On SIGTERM it says what it has so far, and fails.
set -u
export DUALKV=${1:-build/dualkv} LOGS=${LOGS:-$(mktemp -d)}
faulty=${2:-}
tools=${TOOLS:-racecheck memcheck initcheck synccheck}
kernels=${KERNELS:-cuda cuda+det}
suite=${SUITE:-${DUALKV_DATA:-data}/suites/smoke.txt}
export ORACLE=${ORACLE:-cpu}
export DUALKV_EXACT_MEMORY=1 # allocations as large as their blocks
mkdir -p "$LOGS"
if [ "$("$DUALKV" --version)" != "$(cat "$LOGS/version" 2>/dev/null)" ]; then
    rm -f "$LOGS"/*.txt
    "$DUALKV" --version >"$LOGS/version" || exit 3
fi

# The suite's lines, the longest first: tokens squared, heads, head dim.
export LINES_FILE=$LOGS/lines.txt
sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "$suite" | awk '
    function word(key, otherwise) {
        return match($0, key "=[0-9]+") ? substr($0, RSTART + length(key) + 1, RLENGTH - length(key) - 1) : otherwise
    }
    {
        tokens = 0
        shape = $0
        sub(/.*shape=/, "", shape)
        sub(/ .*/, "", shape)
        gsub(/@[0-9]+/, "", shape)
        for (; match(shape, /[0-9]+(x[0-9]+)?/); shape = substr(shape, RSTART + RLENGTH)) {
            n = split(substr(shape, RSTART, RLENGTH), x, "x")
            tokens += n == 2 ? x[1] * x[2] : x[1]
        }
        printf "%.0f\t%s\n", tokens * tokens * word("heads", 1) * word("dim", 64), $0
    }' | sort -rn | cut -f2- >"$LINES_FILE"
count=$(wc -l <"$LINES_FILE")
[ "$count" -gt 0 ] || exit 3

logOf() { echo "$LOGS/$1.$(tr -c 'a-zA-Z0-9\n' _ <<<"$2").$3.txt"; } # TOOL KERNEL PART
isDone() { tail -n 1 "$1" 2>/dev/null | grep -q '^rc [0-9]* lines'; }
part() { # TOOL KERNEL PART PARTS: every PARTS-th line, from PART on
    local log lines
    log=$(logOf "$1" "$2" "$3")
    isDone "$log" && return 0
    mapfile -t lines < <(awk -v n="$4" -v i="$3" 'NR % n == i' "$LINES_FILE")
    [ ${#lines[@]} -gt 0 ] || return 0
    compute-sanitizer --tool "$1" --target-processes all --print-limit 20 \
        "$DUALKV" check "${lines[@]}" --kernel "$2" --oracle "$ORACLE" --jobs 1 --repeats 0 --timeout 600 >"$log" 2>&1
    echo "rc $? lines ${#lines[@]}" >>"$log"
}
export -f part logOf isDone

# Errors of a tool: the sum over its summaries ("ERROR SUMMARY: 2 errors", "RACECHECK SUMMARY: 1 hazard displayed ...").
errors() {
    cat "$@" 2>/dev/null | sed -nE 's/.*(ERROR|RACECHECK) SUMMARY: ([0-9]+) (error|hazard).*/\2/p' |
        awk '{ n += $1 } END { print n + 0 }'
}

{
    [ -z "$faulty" ] || echo "racecheck $faulty:cuda+fault=H2 $((count < 3 ? 0 : 3)) $count" # not the longest
    for tool in $tools; do
        n=3
        [ "$tool" = racecheck ] && n=$count
        for ((i = 1; i <= n; i++)); do
            for kernel in $kernels; do echo "$tool $kernel $((i % n)) $n"; done
        done
    done
} >"$LOGS/tasks"

bad=0
table() {
    local tool kernel log logs n lines passed summaries note
    printf '%-10s %-10s %6s %8s  %s\n' tool kernel lines errors "cases"
    for tool in $tools; do
        for kernel in $kernels; do
            logs=(/dev/null)
            log=$(logOf "$tool" "$kernel" "")
            for log in "${log%.txt}"[0-9]*.txt; do isDone "$log" && logs+=("$log"); done
            n=$(errors "${logs[@]}")
            lines=$(cat "${logs[@]}" | awk '/^rc [0-9]+ lines/ { n += $4 } END { print n + 0 }')
            passed=$(cat "${logs[@]}" | grep -c '^PASSED\|^[^ ]*PASSED ')
            summaries=$(cat "${logs[@]}" | grep -c 'SUMMARY:')
            note="$passed passed"
            [ "$n" = 0 ] || { bad=1; note+="; see $(grep -lE 'SUMMARY: [1-9]' "${logs[@]}" | head -1)"; }
            [ "$summaries" -ge $((${#logs[@]} - 1)) ] || { bad=1; note+="; a process without a summary"; }
            [ "$lines" = "$count" ] || { bad=1; note+="; not all run"; }
            [ "$passed" = "$lines" ] || { bad=1; note+="; not all passed"; }
            printf '%-10s %-10s %6s %8s  %s\n' "$tool" "$kernel" "$lines" "$n" "$note"
        done
    done
    if [ -n "$faulty" ]; then
        n=$(errors "$LOGS"/racecheck.*fault_H2*.txt)
        [ "$n" -gt 0 ] && note="found, as it must be" || { bad=1 note=MISSED; }
        printf '%-10s %-10s %6s %8s  %s\n' racecheck fault=H2 "" "$n" "$note"
    fi
}

trap 'table; exit 1' TERM
xargs -P "${JOBS:-$(nproc)}" -L 1 -a "$LOGS/tasks" bash -c 'part "$@"' part &
wait $!
table
exit $bad
