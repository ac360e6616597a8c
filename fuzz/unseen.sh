#!/bin/sh
# The diagnosis of faults that it was not written for: verify/testkernels/planted.c, and what each of its faults really is.
#   fuzz/unseen.sh PROGRAM PLUGIN OUT [FAULT...]
# A row: fault; line; its stages, alternatives by /; what must be said of the region; the cause, where one may be claimed. Exit: 1 where fewer than 13 of 15 have stage and region right, or where a wrong cause is claimed twice.
set -u
dualkv=$1 plugin=$2 out=$3
shift 3
mkdir -p "$out" || exit 2
only=" $* " right=0 all=0 wrong=0
while IFS=';' read -r id line stages region cause; do
    [ "$only" = "  " ] || case $only in *" $id "*) ;; *) continue ;; esac
    "$dualkv" diagnose "$line" --kernel "$plugin:planted+fault=$id" --time 60s >"$out/$id.txt" 2>&1 </dev/null
    [ $? -lt 128 ] || exit 130
    all=$((all + 1)) stage=right where=right claim=unknown
    for s in $stages; do
        grep -qE "^  stage:  ($(echo "$s" | tr / '|'))," "$out/$id.txt" || stage=wrong
    done
    head -1 "$out/$id.txt" | grep -qE -- "$region" || where=wrong
    if ! grep -q '^  cause: .*unknown' "$out/$id.txt"; then
        claim=WRONG
        [ -z "$cause" ] || ! grep '^  cause:' "$out/$id.txt" | grep -qE -- "$cause" || claim=right
    fi
    [ $stage$where != rightright ] || right=$((right + 1))
    [ $claim != WRONG ] || wrong=$((wrong + 1))
    echo "$id stage $stage, region $where, cause $claim: $(head -1 "$out/$id.txt" | cut -c1-200)"
done <<'END'
P1;shape=120+3x60 heads=4:2;backward-scores;head 2;head 2.*(1.015|scale)
P2;shape=96+2x50,70 heads=4:2 dim=32 dtype=fp32;dv/reduce;KV head 1;response 2.* 2 times
P3;shape=100+3x45 heads=2:1;lse;last, partial tile of (16 to )?32 rows;
P4;shape=130+2x90 heads=4:4 mask=prefix;dk;keys 0-7 .*dims 0-7;
P5;shape=90+4x40 heads=4:2 softcap=2;ds;dQ and dK .*all 4 heads;
P6;shape=150+3x40 heads=6:2;mask;last 86 rows.*keys 64-127;miss key 64
P7;shape=110+4x33 heads=4:2 dim=48;delta;the first row of the responses;
P8;shape=160+2x64 heads=8:2;o/pv;O is wrong.*of the responses, all 8 heads;0.99
P9;shape=90+3x50 heads=4:1 dlse=on;mask;response 1,;see key 0 of response .segment 1.
P10;shape=100+2x75 heads=4:2 dim=96 alibi=on;dq;last, partial tile of (16 to )?32 rows;rows of dQ hold others
P11;shape=80+2x40/80+2x40 heads=4:2;dk/reduce;group 1;16 bit
P12;shape=70+3x50 heads=4:2 mask=window:64;dq;all 4 heads, dim 17;
P13;shape=80+2x(30+2x20),25 heads=4:2;mask;every row of the responses, all 4 heads;X4 and Y9
P14;shape=100+3x50 heads=4:2 sinklogit=0.5;sum reduce;the last response;Y18 and (X14|segment 3 without the keys of 0)
P15;shape=100+2x60 heads=6:2 softcap=3;ds reduce;response-response;Y2 and G3|G3 and Y2
END
echo "$right of $all: stage and region right; a wrong cause claimed: $wrong"
[ "$wrong" -le 1 ] && [ $((all - right)) -le 2 ]
