# DualKV Verify. `make` lists the targets; B=DIR builds elsewhere; SAN=1 builds with ASan and UBSan.
B       ?= build
PREFIX  ?= /usr/local
CC      := gcc
NVCC    ?= $(shell command -v nvcc 2>/dev/null)
VERSION := 0.1.0
COMMIT  := $(shell git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)

WARN     := -Wall -Wextra -Werror -Wshadow -Wvla -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith
OPT      := -O2 -ftree-vectorize
CPPFLAGS += -D_GNU_SOURCE -DDUALKV_VERSION='"$(VERSION)"' -DDUALKV_DATADIR='"$(PREFIX)/share/dualkv"'
CFLAGS   := -std=c11 $(OPT) -g -fPIC -fno-math-errno -fno-trapping-math -ffp-contract=off -pthread -MMD -MP $(WARN)
LDLIBS   := -lopenblas -lcjson -lquadmath -ldl -lm -pthread
ifeq ($(SAN),1)
  CFLAGS  += -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
  LDFLAGS += -fsanitize=address,undefined
endif

ROOMS := ref data verify fuzz reports
SRC   := $(filter-out %/main.c $(wildcard */test_*.c),$(wildcard $(addsuffix /*.c,$(ROOMS))))
OBJ   := $(SRC:%.c=$(B)/obj/%.o)
TESTS := $(patsubst %.c,%,$(wildcard $(addsuffix /test_*.c,$(ROOMS))))
HDRS  := $(wildcard $(addsuffix /*.h,$(ROOMS) cuda))

.DEFAULT_GOAL := help
.PHONY: help all test test-unit test-one verify test-long bench deps install bundle clean headers FORCE

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

all: $(B)/dualkv $(B)/libdualkv.so ## the program and its library

$(B)/obj/%.o: %.c Makefile | deps
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -c $< -o $@

# The commit is compiled into one small file only, rewritten when it changes.
$(B)/commit.h: FORCE
	@mkdir -p $(B); echo '#define DUALKV_COMMIT "$(COMMIT)"' | cmp -s - $@ || \
	  echo '#define DUALKV_COMMIT "$(COMMIT)"' > $@
$(B)/obj/verify/version.o: $(B)/commit.h
$(B)/obj/verify/version.o: CPPFLAGS += -include $(B)/commit.h

$(B)/libdualkv.a: $(OBJ)
	@rm -f $@
	ar rcs $@ $^
$(B)/libdualkv.so: $(OBJ)
	$(CC) -shared $(LDFLAGS) $^ $(LDLIBS) -o $@
$(B)/dualkv: $(B)/obj/verify/main.o $(B)/libdualkv.a
	$(CC) $(LDFLAGS) -rdynamic $^ $(LDLIBS) -o $@

$(B)/test/%: $(B)/obj/%.o $(B)/libdualkv.a
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) $^ -lcmocka $(LDLIBS) -o $@

test-one: $(B)/test/$(T) ## one test: make test-one T=ref/test_problem
	DUALKV_DATA=data $(B)/test/$(T)

# Installs what is missing, once, where it may.
DEPS := libopenblas-dev libcmocka-dev librandom123-dev libcjson-dev python3-numpy gnuplot-nox
deps: ## install the packages that are needed (Debian, Ubuntu)
	@if ! printf '#include <stdarg.h>\n#include <stddef.h>\n#include <setjmp.h>\n#include <stdint.h>\n#include <cmocka.h>\n#include <cblas.h>\n#include <cjson/cJSON.h>\n#include <Random123/philox.h>\n' \
	    | $(CC) -fsyntax-only -xc - 2>/dev/null; then \
	  echo "installing $(DEPS)"; S=; [ "$$(id -u)" = 0 ] || S=sudo; \
	  $$S apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$S apt-get install -y -qq --no-install-recommends $(DEPS) >/dev/null \
	  || { echo "cannot install; please install: $(DEPS)" >&2; exit 1; }; fi

clean: ## remove what was built
	rm -rf $(B)

-include $(shell find $(B)/obj -name '*.d' 2>/dev/null)
