#!/bin/bash
# sanitize.sh [DUALKV [FAULTY_PLUGIN]]: compute-sanitizer's memcheck, initcheck, synccheck and racecheck over suite smoke
# for `cuda` and `cuda+det`; a row a tool and kernel: lines run, errors found. Exit 1 on a finding, or where a tool saw
# no kernel. Where FAULTY_PLUGIN (make cuda-faults) is given, racecheck must also find its missing barriers (Z1, H2): a
# tool that finds nothing there is not looking. Needs a GPU.
#
#     TOOLS, KERNELS, SUITE   what to run (defaults as above)
#     PARTS=N                 processes a tool and kernel: each takes every N-th line (default: half the cores)
#     LOGS=DIR                where the tools' words go (default: a temporary folder)
set -u
export DUALKV=${1:-build/dualkv} LOGS=${LOGS:-$(mktemp -d)}
faulty=${2:-}
tools=${TOOLS:-memcheck initcheck synccheck racecheck}
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
        "$DUALKV" check "${lines[@]}" --kernel "$2" --jobs 1 --timeout 600 >"$log" 2>&1
    echo "rc $? lines ${#lines[@]}" >>"$log"
}
export -f part

# Errors of a tool: the sum over its summaries ("ERROR SUMMARY: 2 errors", "RACECHECK SUMMARY: 1 hazard displayed ...").
errors() { cat "$@" | sed -nE 's/.*(ERROR|RACECHECK) SUMMARY: ([0-9]+) (error|hazard).*/\2/p' | awk '{ n += $1 } END { print n + 0 }'; }

for tool in $tools; do
    for kernel in $kernels; do
        for ((i = 0; i < parts; i++)); do echo "$tool $kernel $i $parts"; done
    done
done | xargs -P "$(nproc)" -L 1 bash -c 'part "$@"' part
if [ -n "$faulty" ]; then
    for id in Z1 H2; do echo "racecheck $faulty:cuda+fault=$id 0 ${PARTS_FAULTY:-9}"; done |
        xargs -P 2 -L 1 bash -c 'part "$@"' part
fi

bad=0
printf '%-10s %-10s %6s %8s  %s\n' tool kernel lines errors "cases"
for tool in $tools; do
    for kernel in $kernels; do
        logs=("$LOGS/$tool.$(tr -c 'a-zA-Z0-9\n' _ <<<"$kernel")."[0-9]*.txt)
        n=$(errors "${logs[@]}")
        lines=$(cat "${logs[@]}" | awk '/^rc [0-9]+ lines/ { n += $4 } END { print n + 0 }')
        passed=$(cat "${logs[@]}" | grep -c '^PASSED\|^[^ ]*PASSED ')
        summaries=$(cat "${logs[@]}" | grep -c 'SUMMARY:')
        note="$passed passed"
        [ "$n" = 0 ] || { bad=1; note+="; see ${logs[0]%.*.txt}.*"; }
        [ "$summaries" -ge ${#logs[@]} ] || { bad=1; note+="; a process without a summary"; }
        [ "$passed" = "$lines" ] || { bad=1; note+="; not all passed"; }
        printf '%-10s %-10s %6s %8s  %s\n' "$tool" "$kernel" "$lines" "$n" "$note"
    done
done
if [ -n "$faulty" ]; then
    for id in Z1 H2; do
        n=$(errors "$LOGS"/racecheck.*fault_$id.*.txt)
        [ "$n" -gt 0 ] || bad=1
        printf '%-10s %-10s %6s %8s  %s\n' racecheck "fault=$id" "" "$n" "$([ "$n" -gt 0 ] && echo 'found, as it must be' || echo 'MISSED')"
    done
fi
exit $bad
