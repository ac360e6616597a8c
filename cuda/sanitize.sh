#!/bin/bash
# sanitize.sh [DUALKV [FAULTY_PLUGIN]]: compute-sanitizer's memcheck, initcheck, synccheck and racecheck over suite smoke
# for `cuda` and `cuda+det`; a row a tool and kernel: lines run, errors found. Exit 1 on a finding, or where a tool saw
# no kernel. Where FAULTY_PLUGIN (make cuda-faults) is given, racecheck must also find its missing barrier (fault H2): a
# tool that finds nothing there is not looking. Needs a GPU.
#
#     TOOLS, KERNELS, SUITE   what to run (defaults as above)
#     PARTS=N                 processes a kernel under racecheck, the slow one: each takes every N-th line (default: half
#                             the cores); the other tools get half of that
#
# On SIGTERM it says what it has so far, and fails.
#     LOGS=DIR                where the tools' words go (default: a temporary folder)
set -u
export DUALKV=${1:-build/dualkv} LOGS=${LOGS:-$(mktemp -d)}
faulty=${2:-}
tools=${TOOLS:-racecheck memcheck initcheck synccheck}
kernels=${KERNELS:-cuda cuda+det}
parts=${PARTS:-$((($(nproc) + 1) / 2))}
suite=${SUITE:-${DUALKV_DATA:-data}/suites/smoke.txt}
mkdir -p "$LOGS"
export LINES_FILE=$LOGS/lines.txt
sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "$suite" >"$LINES_FILE" || exit 3

part() { # TOOL KERNEL PART PARTS
    local log=$LOGS/$1.$(tr -c 'a-zA-Z0-9\n' _ <<<"$2").$3.txt lines
    mapfile -t lines < <(awk -v n="$4" -v i="$3" 'NR % n == i' "$LINES_FILE")
    [ ${#lines[@]} -gt 0 ] || return 0
    compute-sanitizer --tool "$1" --target-processes all --print-limit 20 \
        "$DUALKV" check "${lines[@]}" --kernel "$2" --jobs 1 --repeats 0 --timeout 600 >"$log" 2>&1
    echo "rc $? lines ${#lines[@]}" >>"$log"
}
export -f part

# Errors of a tool: the sum over its summaries ("ERROR SUMMARY: 2 errors", "RACECHECK SUMMARY: 1 hazard displayed ...").
errors() {
    cat "$@" 2>/dev/null | sed -nE 's/.*(ERROR|RACECHECK) SUMMARY: ([0-9]+) (error|hazard).*/\2/p' |
        awk '{ n += $1 } END { print n + 0 }'
}

{
    [ -z "$faulty" ] || echo "racecheck $faulty:cuda+fault=H2 0 14"
    for tool in $tools; do
        n=$parts
        [ "$tool" = racecheck ] || n=$(((parts + 1) / 2))
        for kernel in $kernels; do
            for ((i = 0; i < n; i++)); do echo "$tool $kernel $i $n"; done
        done
    done
} >"$LOGS/tasks.txt"

bad=0
table() {
    local tool kernel logs n lines passed summaries note
    printf '%-10s %-10s %6s %8s  %s\n' tool kernel lines errors "cases"
    for tool in $tools; do
        for kernel in $kernels; do
            logs=("$LOGS/$tool.$(tr -c 'a-zA-Z0-9\n' _ <<<"$kernel")."[0-9]*.txt)
            n=$(errors "${logs[@]}")
            lines=$(cat "${logs[@]}" 2>/dev/null | awk '/^rc [0-9]+ lines/ { n += $4 } END { print n + 0 }')
            passed=$(cat "${logs[@]}" 2>/dev/null | grep -c '^PASSED\|^[^ ]*PASSED ')
            summaries=$(cat "${logs[@]}" 2>/dev/null | grep -c 'SUMMARY:')
            note="$passed passed"
            [ "$n" = 0 ] || { bad=1; note+="; see ${logs[0]%.*.txt}.*"; }
            [ "$summaries" -ge ${#logs[@]} ] || { bad=1; note+="; a process without a summary"; }
            [ "$lines" = "$(wc -l <"$LINES_FILE")" ] || { bad=1; note+="; not all run"; }
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
xargs -P "$(nproc)" -L 1 -a "$LOGS/tasks.txt" bash -c 'part "$@"' part &
wait $!
table
exit $bad
