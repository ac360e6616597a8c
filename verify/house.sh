#!/bin/bash
# house.sh: the rooms of the tree as the README's table has them. Each include goes in an allowed direction, each header
# compiles alone as C11 (those that CUDA code includes also as C++), no source file has more than 800 lines.
# Run in the top folder; a line a finding, exit 1 where there is one. CC, CXX: the compilers (gcc, g++).
set -u
CC=${CC:-gcc} CXX=${CXX:-g++} bad=0
scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
finding() { echo "$*"; bad=1; }

# room: rooms and single headers that it may include. The program's commands are where the rooms meet.
allowed() { # FILE
    case $1 in
    verify/cmd_*) echo 'ref/ data/ fuzz/ reports/' ;;
    ref/*) echo '' ;;
    data/*) echo 'ref/' ;;
    cuda/*) echo 'ref/' ;;
    verify/*) echo 'ref/ data/' ;;
    fuzz/*) echo 'ref/ data/ verify/' ;;
    reports/*) echo 'ref/ data/ verify/record.h verify/status.h' ;;
    esac
}

while IFS=: read -r file target; do
    ok=
    for a in $(allowed "$file"); do
        case $target in "$a"*) ok=1 ;; esac
    done
    [ $ok ] || finding "$file includes $target: against the direction of the rooms"
done < <(grep -oE '^ *#include "\.\./[^"]+' {ref,data,cuda,verify,fuzz,reports}/*.{c,h,cu,cuh} 2>/dev/null |
    sed -E 's/: *#include "\.\.\//:/')

cuda_reads=$(grep -hoE '^ *#include "\.\./[^"]+' cuda/* | sed -E 's/.*"\.\.\///' | sort -u)
n=0
for h in {ref,data,verify,fuzz,reports}/*.h; do
    n=$((n + 1))
    printf '#include "%s"\n' "$PWD/$h" >"$scratch/$n.c"
    case $'\n'$cuda_reads$'\n' in *$'\n'$h$'\n'*) cp "$scratch/$n.c" "$scratch/$n.cc" ;; esac
done
[ $n -gt 20 ] || finding "only $n headers found: is this the top folder?"
export CC CXX
compile() {
    local compiler=$CC std=c11
    case $1 in *.cc) compiler=$CXX std=c++17 ;; esac
    "$compiler" -std=$std -fsyntax-only -D_GNU_SOURCE -Wall -Wextra -Werror "$1" && return
    echo "$(sed 's/#include "\(.*\)"/\1/' "$1") does not compile alone as $std"
    return 1
}
export -f compile
printf '%s\0' "$scratch"/*.c "$scratch"/*.cc | xargs -0 -P "$(nproc)" -n 1 bash -c 'compile "$0"' || bad=1

while read -r lines file; do
    [ "$lines" -le 800 ] || finding "$file: $lines lines, more than 800"
done < <(wc -l {ref,data,cuda,verify,fuzz,reports}/*.{c,h,cu,cuh,py,sh} 2>/dev/null | grep -v ' total$')
[ $bad = 0 ] && echo "house: $n headers compile alone, $(ls "$scratch"/*.cc | wc -l) of them as C++ too; includes go in the rooms' direction"
exit $bad
