#!/bin/bash
# shrink.sh PROGRAM POWER OUT [FAULT...]: every planted fault, found on a large line (a prompt of more than 200 tokens,
# more than 4 responses, 8 query heads), shrunk to the end. Wanted: at most two segments (that have tokens) and two heads
# within 60 s, for 9 of 10. POWER: records of `dualkv power`, whose lines say what shows a fault (mask, modifiers, type, fill, ...); their
# shape and heads are made large here. OUT/shrunk.jsonl gets a row a fault as it ends, OUT/shrunk.md the table; faults that
# have their row are not done again. Exit: 1 where fewer than 9 of 10 end as wanted.
#
#     JOBS=N   faults at a time (default: as many as cores); the seconds are wall time among them
set -u
export DUALKV=$1 OUT=$3 OPENBLAS_NUM_THREADS=1
power=$2
shift 3
only=" $* "
mkdir -p "$OUT" || exit 2
touch "$OUT/shrunk.jsonl"

# Plain; with trees, context limits and an empty response; a prompt of keys alone; a tile's edges.
export SHAPES='260+6x50,3x31 260+5x50@200,0,2x(31+2x20) 260k+6x50@200,3x31 256+6x64,1,128 256/260+6x50 220+20x9'
lines() { # LINE as it was found: large lines with its features, the likeliest first
    local words heads shape rest
    words=$(tr ' ' '\n' <<<"$1" | grep -v '^shape=\|^heads=' | tr '\n' ' ')
    heads=$(tr ' ' '\n' <<<"$1" | sed -n 's/^heads=//p')
    case $heads in
    *:1 | '') heads='8:1 8:2' ;;
    *) [ "${heads%:*}" = "${heads#*:}" ] && heads='8:8 8:2' || heads='8:2 8:1' ;;
    esac
    for rest in "$words" "$(tr ' ' '\n' <<<"$words" | grep -v '^fill=\|^seed=\|^layout=' | tr '\n' ' ')" "dim=64 scale=2 fill=outlier" "dim=17"; do
        for shape in $SHAPES; do
            for h in $heads; do echo "shape=$shape heads=$h ${rest% }"; done
        done
    done | awk '!seen[$0]++'
}
segments() { # LINE: how many segments with tokens its shape has
    tr ' ' '\n' <<<"$1" | sed -n 's/^shape=//p' | awk '
        function list(    n, times, c) { # of one list, until its bracket closes
            for (n = 0; at <= length(s);) {
                c = substr(s, at, 1)
                if (c == ")") { at++; return n }
                if (match(substr(s, at), /^[0-9]+x/)) { times = substr(s, at) + 0; at += RLENGTH } else times = 1
                if (substr(s, at, 1) == "(") { at++; n += times * list() }
                else if (match(substr(s, at), /^[0-9]+/)) { if (substr(s, at) + 0 > 0) n += times; at += RLENGTH }
                else at++
                if (match(substr(s, at), /^@[0-9]+/)) at += RLENGTH
            }
            return n
        }
        { s = $0; at = 1; print list() }'
}
one() { # FAULT LINE
    local from said start seconds line trials heads status met
    while read -r from; do
        "$DUALKV" check "$from" --kernel "emu+fault=$1" --quiet --jobs 1 >/dev/null 2>&1
        [ $? = 1 ] || continue
        start=$(date +%s%N)
        said=$("$DUALKV" shrink "$from" --kernel "emu+fault=$1" --time 300s 2>&1)
        status=$?
        [ $status -lt 128 ] || return 255
        [ $status = 0 ] || continue
        seconds=$((($(date +%s%N) - start) / 1000000))
        line=$(tail -1 <<<"$said") trials=$(sed -n 's/.* after \([0-9]*\) trials in .*/\1/p' <<<"$said")
        heads=$(tr ' ' '\n' <<<"$line" | sed -n 's/^heads=\([0-9]*\).*/\1/p')
        met=false
        [ "$(segments "$line")" -le 2 ] && [ "${heads:-1}" -le 2 ] && [ $seconds -lt 60000 ] && met=true
        printf '{"fault":"%s","from":"%s","line":"%s","reason":"%s","trials":%d,"seconds":%d.%03d,"segments":%d,"heads":%d,"wanted":%s}\n' \
            "$1" "$from" "$line" "$(sed -n 's/ after [0-9]* trials in .*//p' <<<"$said")" "${trials:-0}" \
            $((seconds / 1000)) $((seconds % 1000)) "$(segments "$line")" "${heads:-1}" $met >>"$OUT/shrunk.jsonl"
        return 0
    done < <(lines "$2")
    printf '{"fault":"%s","from":"","line":"","reason":"no such large line fails","wanted":false}\n' "$1" >>"$OUT/shrunk.jsonl"
}
export -f one lines segments

sed -n 's/.*"fault":"\([^"]*\)".*"control":false.*"first_line":"\([^"]*\)".*/\1 \2/p' "$power" | while read -r id line; do
    { [ "$only" = "  " ] || [[ $only == *" $id "* ]]; } && ! grep -q "\"fault\":\"$id\"," "$OUT/shrunk.jsonl" &&
        printf '%s\0%s\0' "$id" "$line"
done | xargs -0 -r -P "${JOBS:-$(nproc)}" -n 2 bash -c 'one "$0" "$1"'
[ $? -lt 124 ] || exit 130

sort -o "$OUT/shrunk.jsonl" "$OUT/shrunk.jsonl"
all=$(wc -l <"$OUT/shrunk.jsonl")
wanted=$(grep -c '"wanted":true' "$OUT/shrunk.jsonl")
{
    echo "$wanted of $all faults, found on a line with a prompt of more than 200 tokens, more than 4 responses and 8 query heads,"
    echo "end at one of at most two segments and two heads in less than 60 s. Each has one core; \`fuzz/shrink.sh\`."
    echo
    echo "| fault | found on | ends at | segments | heads | trials | seconds |"
    echo "|---|---|---|---|---|---|---|"
    sed -E 's/.*"fault":"([^"]*)","from":"([^"]*)","line":"([^"]*)","reason":"[^"]*","trials":([0-9]*),"seconds":([0-9.]*),"segments":([0-9]*),"heads":([0-9]*).*/| \1 | `\2` | `\3` | \6 | \7 | \4 | \5 |/; s/.*"fault":"([^"]*)".*"reason":"([^"]*)".*/| \1 | \2 | | | | | |/' "$OUT/shrunk.jsonl"
} >"$OUT/shrunk.md"
head -1 "$OUT/shrunk.md"
[ "$all" -gt 0 ] && [ $((10 * wanted)) -ge $((9 * all)) ]
