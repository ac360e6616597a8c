#!/bin/sh
# deps.sh build|test: installs the packages (Debian, Ubuntu) that are missing to build, or to build and to test. Where
# that may not be done it names them, exit 1. CC, CPPFLAGS and LDFLAGS are the compiler's.
set -u
build="libopenblas-dev librandom123-dev libcjson-dev libsqlite3-dev"
test="libcmocka-dev libxml2-utils gnuplot-nox python3-numpy python3-yaml python3-mypy"

compiles() { # HEADER... -lLIBRARY...: do they compile and link?
    for word; do
        case $word in *.h) echo "#include <$word>" ;; esac
    done | sed '$a int main(void) { return 0; }' |
        ${CC:-gcc} ${CPPFLAGS:-} -xc - -xnone ${LDFLAGS:-} $(printf '%s\n' "$@" | grep '^-l') -o "$scratch" 2>/dev/null
}
isThere() { # PACKAGE
    case $1 in
    libopenblas-dev) compiles cblas.h -lopenblas ;;
    librandom123-dev) compiles Random123/philox.h ;;
    libcjson-dev) compiles cjson/cJSON.h -lcjson ;;
    libsqlite3-dev) compiles sqlite3.h -l:libsqlite3.a -lm ;;
    libcmocka-dev) compiles stdarg.h stddef.h setjmp.h stdint.h cmocka.h -lcmocka ;;
    libxml2-utils) command -v xmllint >/dev/null ;;
    gnuplot-nox) command -v gnuplot >/dev/null ;;
    python3-*) /usr/bin/python3 -c "from importlib.util import find_spec; exit(not find_spec('${1#python3-}'))" 2>/dev/null ;;
    esac
}
missing() {
    compiles cblas.h Random123/philox.h cjson/cJSON.h sqlite3.h -lopenblas -lcjson -l:libsqlite3.a -lm || # all at once
        for p in $build; do isThere "$p" || printf ' %s' "$p"; done
    [ "$what" = build ] || for p in $test; do isThere "$p" || printf ' %s' "$p"; done
}

what=${1:-test}
scratch=$(mktemp) || exit 1
trap 'rm -f "$scratch"' EXIT
lack=$(missing)
[ -n "$lack" ] || exit 0
echo "installing$lack"
as=
[ "$(id -u)" = 0 ] || as='sudo -n'
[ -z "$as" ] || ! [ -t 0 ] || as=sudo
{ $as apt-get update -qq && DEBIAN_FRONTEND=noninteractive $as apt-get install -y -qq --no-install-recommends $lack; } \
    >/dev/null 2>&1
lack=$(missing)
[ -n "$lack" ] || exit 0
echo "cannot install them here. Please install:$lack" >&2
case $what in build)
    echo "or unpack them and name the folders: CPPFLAGS=-IDIR LDFLAGS=-LDIR make ...; or use what was built elsewhere:" >&2
    echo "\`make bundle\` on a machine that has them, then here: make verify BUNDLE=FOLDER" >&2 ;;
esac
exit 1
