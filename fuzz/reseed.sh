#!/bin/bash
# reseed.sh PROGRAM OUT [RUNS]: suite ci with other seeds (--reseed 1, 2, ... RUNS; default 200), kernel emu. The budget of
# false alarms of one run is 1e-4. OUT/reseeded.jsonl gets a row a run as it ends, OUT/reseeded-alarms.jsonl the records
# of cases that did not pass. Runs that have their row are not made again: an interrupted campaign goes on. Exit: 1 an alarm.
#
#     JOBS=N    runs at a time, each on one core (default: as many as cores)
#     FIRST=N   the first seed (default 1): reseed.sh PROGRAM OUT 16 makes runs 1 to 16
set -u
export DUALKV=$1 OUT=$2 OPENBLAS_NUM_THREADS=1
runs=${3:-200}
mkdir -p "$OUT" || exit 2
touch "$OUT/reseeded.jsonl"

one() { # N
    local at code passed cases commit
    at=$(mktemp -d "$OUT/run.XXXXXX") || return 1
    "$DUALKV" check ci --kernel emu --reseed "$1" --quiet --jobs 1 --json "$at/records.jsonl" >"$at/said.txt" 2>&1
    code=$?
    if [ $code -lt 128 ]; then
        cases=$(wc -l <"$at/records.jsonl") passed=$(grep -c '"status":"PASSED"' "$at/records.jsonl")
        commit=$(grep -om1 '"commit":"[^"]*"' "$at/records.jsonl")
        grep -v '"status":"PASSED"' "$at/records.jsonl" >>"$OUT/reseeded-alarms.jsonl" && cat "$at/said.txt" >&2
        printf '{"suite":"ci","reseed":%d,"exit":%d,"cases":%d,"not_passed":%d,%s}\n' "$1" $code "$cases" \
            $((cases - passed)) "${commit:-\"commit\":null}" >>"$OUT/reseeded.jsonl"
    fi
    rm -rf "$at"
    [ $code -lt 128 ] || return 255 # ends xargs
}
export -f one

rm -rf "$OUT"/run.*
seq "${FIRST:-1}" "$runs" | while read -r n; do
    grep -q "\"reseed\":$n," "$OUT/reseeded.jsonl" || echo "$n"
done | xargs -r -P "${JOBS:-$(nproc)}" -n 1 bash -c 'one "$0"'
[ $? -lt 124 ] || exit 130
sort -t: -k3,3n -o "$OUT/reseeded.jsonl" "$OUT/reseeded.jsonl"
made=$(wc -l <"$OUT/reseeded.jsonl")
good=$(grep -c '"exit":0,.*"not_passed":0,' "$OUT/reseeded.jsonl")
echo "reseeded ci: $good of $made runs without an alarm, $(awk -F'[:,]' '{ n += $8 } END { print n + 0 }' "$OUT/reseeded.jsonl") cases"
[ "$good" = "$made" ] && [ "$made" -ge $((runs - ${FIRST:-1} + 1)) ]
