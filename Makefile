# DualKV Verify. `make` lists the targets; B=DIR builds elsewhere; SAN=1 builds with ASan and UBSan; V=1 shows commands.
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
LDLIBS   := -lopenblas -lcjson -l:libsqlite3.a -lquadmath -ldl -lm -pthread
ifeq ($(SAN),1)
  CFLAGS  += -O1 -g1 -Wno-format-truncation -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
  LDFLAGS += -fsanitize=address,undefined
endif

Q   := $(if $(V),,@)
say  = @$(if $(V),:,echo '  $(1)')

ROOMS := ref data verify fuzz reports
SRC   := $(filter-out %/main.c $(wildcard */test_*.c),$(wildcard $(addsuffix /*.c,$(ROOMS))))
OBJ   := $(SRC:%.c=$(B)/obj/%.o)
TESTS := $(patsubst %.c,%,$(wildcard $(addsuffix /test_*.c,$(ROOMS))))
HDRS  := $(wildcard $(addsuffix /*.h,$(ROOMS) cuda))

.DEFAULT_GOAL := help
# All cores, unless told otherwise.
ifeq ($(filter -j%,$(MAKEFLAGS)),)
  MAKEFLAGS += -j$(shell nproc 2>/dev/null || echo 2)
endif
.SECONDARY:
.PHONY: help all test test-unit test-one test-python test-wheel test-browser test-fuzz test-long verify bench deps deps-build install bundle wheel wheel-files cuda clean FORCE

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

all: $(B)/dualkv $(B)/libdualkv.so $(B)/python ## the program and its library

# The Python package, where the program looks for it.
$(B)/python:
	@mkdir -p $(B)
	ln -sfn $(CURDIR)/verify/python $@

$(B)/obj/%.o: %.c Makefile | deps-build
	@mkdir -p $(@D)
	$(call say,cc $<)
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -c $< -o $@

# The inner loops of the blocked references: -O2 vectorises too little in gcc 12.
$(B)/obj/ref/tiles.o $(B)/obj/ref/vexp.o $(B)/obj/ref/truth.o $(B)/obj/ref/twin_squares.o $(B)/obj/ref/twin_loops.o $(B)/obj/ref/twin_forward.o $(B)/obj/ref/twin_backward.o $(B)/obj/ref/twin_chain.o $(B)/obj/ref/oracle_twin.o $(B)/obj/ref/bound_terms.o $(B)/obj/ref/bound_chains.o $(B)/obj/ref/oracle_bound.o: CFLAGS += -O3

# The commit is compiled into one small file only, rewritten when it changes.
$(B)/commit.h: FORCE
	@mkdir -p $(B); printf '#define DUALKV_COMMIT "%s"\n#define DUALKV_FLAGS "%s"\n' '$(COMMIT)' \
	  '$(filter-out -W% -M% -g,$(CFLAGS))' | cmp -s - $@ || \
	  printf '#define DUALKV_COMMIT "%s"\n#define DUALKV_FLAGS "%s"\n' '$(COMMIT)' '$(filter-out -W% -M% -g,$(CFLAGS))' > $@
$(B)/obj/verify/version.o: $(B)/commit.h
$(B)/obj/verify/version.o: CPPFLAGS += -include $(B)/commit.h

$(B)/libdualkv.a: $(OBJ)
	@rm -f $@
	$(call say,ar $@)
	$(Q)ar rcs $@ $^
# Only the public names of verify/dualkv.h are exported.
$(B)/libdualkv.so: $(OBJ) verify/dualkv.map
	$(call say,ld $@)
	$(Q)$(CC) -shared $(LDFLAGS) $(OBJ) $(LDLIBS) -Wl,--version-script=verify/dualkv.map -o $@
$(B)/dualkv: $(B)/obj/verify/main.o $(B)/libdualkv.a
	$(call say,ld $@)
	$(Q)$(CC) $(LDFLAGS) -rdynamic $^ $(LDLIBS) -o $@

$(TESTS:%=$(B)/obj/%.o): | deps
$(B)/test/%: $(B)/obj/%.o $(B)/libdualkv.a
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) $^ -lcmocka $(LDLIBS) -o $@

# Shared objects of the public ABI, for the tests: one that works, and those that must be refused.
HOSTILE     := none abi size forward open list empty null crash name
OWNKERNELS  := $(patsubst %,$(B)/testkernels/%.so,plain moody careless planted)
TESTKERNELS := $(OWNKERNELS) $(HOSTILE:%=$(B)/testkernels/hostile_%.so)
SOFLAGS     := -std=c11 -O2 -fPIC -shared $(WARN) -I ref
$(OWNKERNELS): $(B)/testkernels/%.so: verify/testkernels/%.c ref/dualkv_kernel.h
	@mkdir -p $(@D)
	$(CC) $(SOFLAGS) $< -lm -o $@
TESTKERNELS += $(B)/examples/plain_kernel.so
$(B)/examples/plain_kernel.so: verify/examples/plain_kernel.c ref/dualkv_kernel.h
	@mkdir -p $(@D)
	$(CC) $(SOFLAGS) $< -lm -o $@
$(B)/testkernels/hostile_%.so: verify/testkernels/hostile.c ref/dualkv_kernel.h
	@mkdir -p $(@D)
	$(CC) $(SOFLAGS) -DHOW=$* $< -o $@

# A device in host memory, whose streams run when they are waited for, and a kernel on it.
TESTKERNELS += $(B)/testkernels/fake_cuda.so
$(B)/testkernels/fake_cuda.so: verify/testkernels/fake_cuda.c verify/testkernels/fake_oracle.c $(B)/libdualkv.a
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(filter-out -MMD -MP,$(CFLAGS)) -shared $(LDFLAGS) $^ $(LDLIBS) -Wl,-Bsymbolic -o $@

test-one: $(B)/test/$(T) all $(TESTKERNELS) ## one test: make test-one T=ref/test_problem
	DUALKV_DATA=data DUALKV_BUILD=$(B) $(B)/test/$(T)

# Installs what is missing, once, where it may; else names it.
DEPS = CC='$(CC)' CPPFLAGS='$(filter -I%,$(CPPFLAGS))' LDFLAGS='$(LDFLAGS)' .ci/deps.sh
deps: deps-build ## install the packages that are needed (Debian, Ubuntu)
	@$(DEPS) test
deps-build: # what the program itself needs
	@$(DEPS) build

# The tests of one build, each its own program, one a core; prints "N passed, N failed".
define RUN_ONE
if DUALKV_DATA=data DUALKV_BUILD=$(B) $(B)/test/$$0 >$(B)/test/$$0.log 2>&1; \
then echo "ok    $$0  $$(grep -ao "[0-9]* test(s)\." $(B)/test/$$0.log | head -1)"; \
else echo "FAIL  $$0"; tail -40 $(B)/test/$$0.log; fi
endef
RUN_TESTS = printf '%s\n' $(TESTS) | xargs -P $$(nproc) -n 1 sh -c '$(RUN_ONE)' | tee $(B)/test/summary; \
    pass=$$(grep -c '^ok  ' $(B)/test/summary); \
    echo "$$pass passed, $$(($(words $(TESTS)) - pass)) failed"; [ $$pass = $(words $(TESTS)) ] && [ $$pass -gt 0 ]

test-unit: $(TESTS:%=$(B)/test/%) all $(TESTKERNELS) ## unit tests of one build (SAN=1: under ASan and UBSan)
	@$(RUN_TESTS)

# A Python that can import NumPy.
FIND_PYTHON = for p in $(PYTHON) python3 /usr/bin/python3; do $$p -c 'import numpy' 2>/dev/null && break; done
test-python: all deps ## tests of the Python package (PYTHON=… names the interpreter; it needs NumPy)
	@$(FIND_PYTHON); DUALKV_DATA=$(CURDIR)/data PYTHONPATH=$(abspath $(B))/python PYTHONDONTWRITEBYTECODE=1 \
	  $$p -W error -m unittest discover -s verify/python/tests

test-wheel: wheel ## the wheel in a fresh virtual environment
	@$(FIND_PYTHON); $$p verify/python/tests/check_wheel.py $(B)/dist/dualkv-$(VERSION)-*.whl

test: ## everything CI runs: unit tests, the same under sanitizers, Python, self-test, `verify` and its page, a minute of fuzzing, CUDA
	$(MAKE) verify
	DUALKV_RECORDS=$(B)/verify/records.jsonl $(MAKE) all test-unit
	$(MAKE) test-python
	$(MAKE) test-wheel
	$(MAKE) B=$(B)/san SAN=1 test-unit
	$(B)/dualkv selftest
	$(MAKE) test-browser
	$(MAKE) test-fuzz
	$(MAKE) cuda-check

# Planted faults of every kind: masks, tails, maxima, merges, sums, heads, modifiers, precision, order, memory.
SMOKE_FAULTS := A1,A3,B3,B6,C2,D1,D3,E2,F1,G1,G3,H4,H5,I1,J1,L1,X1,X6,X9,X13,X16,X17,Y5,Y12
test-fuzz: all ## ci and the corpus together, which leave no stratum blind; a minute of fuzzing, some of the planted faults
	DUALKV_DATA=data $(B)/dualkv check ci corpus --kernel emu --quiet
	@rm -f $(B)/fuzz.jsonl
	DUALKV_DATA=data $(B)/dualkv fuzz --kernel emu --time 60s --json $(B)/fuzz.jsonl
	DUALKV_DATA=data $(B)/dualkv power --kernel emu --faults E5,$(SMOKE_FAULTS) --seeds 1 --no-shrink --no-matrix

test-long: all $(B)/testkernels/planted.so $(B)/test/verify/test_gate_repo $(B)/test/verify/test_kill $(B)/test/verify/test_explain ## two hours: 20000 clean cases, 200 reseeded runs of ci, every planted fault for three seeds, 50 kills; resumable; the gate over a repository, on ci
	DUALKV_DATA=data fuzz/long.sh $(B)/dualkv $(B)/long
	DUALKV_EXPLAIN=$(B)/long/diagnose.jsonl DUALKV_DATA=data DUALKV_BUILD=$(B) $(B)/test/verify/test_explain
	DUALKV_GATE_FULL=1 DUALKV_DATA=data DUALKV_BUILD=$(B) $(B)/test/verify/test_gate_repo
	DUALKV_DATA=data fuzz/unseen.sh $(B)/dualkv $(B)/testkernels/planted.so $(B)/long/unseen

# Where there is a GPU, its kernel beside the emulated one. BUNDLE=DIR: by the program of `make bundle` that lies there,
# nothing is built.
BUILT = $(or $(BUNDLE),$(B))
verify: $(if $(BUNDLE),,all $(if $(wildcard /dev/nvidia0),cuda)) ## judge the kernels on suite ci and on recorded activations: records, report.html and report.md (BUNDLE=DIR: by what `make bundle` made elsewhere)
	@mkdir -p $(B)/verify
	$(Q)gpu=; if $(BUILT)/dualkv list device >$(B)/verify/device.txt 2>&1; then gpu='device --kernel cuda'; \
	else echo "no GPU kernel: $$(tail -1 $(B)/verify/device.txt)"; fi; \
	DUALKV_DATA=data $(BUILT)/dualkv check ci recorded --kernel emu $$gpu --json $(B)/verify/records.jsonl; s=$$?; \
	$(BUILT)/dualkv report --html $(B)/verify/report.html --markdown $(B)/verify/report.md --plots $(B)/verify/plots \
	  $(B)/verify/records.jsonl && \
	echo "the report: $(B)/verify/report.html" && exit $$s

# Installs Chromium where it may; without one the test says so.
FIND_CHROMIUM = command -v chromium || command -v chromium-browser || command -v google-chrome
test-browser: verify ## the HTML of `make verify`, and one of everything, in a headless Chromium
	@{ $(FIND_CHROMIUM); } >/dev/null || { S=; [ "$$(id -u)" = 0 ] || S="sudo -n"; echo "installing chromium"; \
	  $$S apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$S apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core \
	    >/dev/null 2>&1 || echo "cannot install chromium"; }
	@DUALKV_DATA=data python3 reports/test_browser.py --program $(B)/dualkv $(B)/verify/report.html

bench: all ## speed of the fp64 reference against dgemm on this machine
	DUALKV_DATA=data $(B)/dualkv bench --kernel ref 'shape=2048+8x256 heads=8:2 dim=128'

install: all ## install under PREFIX (DESTDIR honoured)
	install -Dm755 $(B)/dualkv $(DESTDIR)$(PREFIX)/bin/dualkv
	install -Dm755 $(B)/libdualkv.so $(DESTDIR)$(PREFIX)/lib/libdualkv.so
	[ ! -f $(B)/libdualkv_cuda.so ] || \
	  install -Dm755 $(B)/libdualkv_cuda.so $(DESTDIR)$(PREFIX)/lib/libdualkv_cuda.so
	install -Dm644 ref/dualkv_kernel.h $(DESTDIR)$(PREFIX)/include/dualkv_kernel.h
	install -Dm644 verify/dualkv.h $(DESTDIR)$(PREFIX)/include/dualkv.h
	cd verify/python && find dualkv -type f ! -name '*.pyc' \
	  -exec install -Dm644 '{}' '$(DESTDIR)$(PREFIX)/share/dualkv/python/{}' \;
	cd data && find suites corpus recorded waivers.txt -type f \
	  -exec install -Dm644 '{}' '$(DESTDIR)$(PREFIX)/share/dualkv/{}' \;

# CUDA: compiles and links without a GPU; says so where nvcc is missing.
CUDA_SRC := $(wildcard cuda/*.cu)
cuda: deps-build ## the CUDA plugin libdualkv_cuda.so (needs nvcc)
ifeq ($(CUDA_SRC),)
	@echo "no CUDA kernels in this tree"
else ifeq ($(NVCC),)
	@echo "nvcc not found: CUDA kernels are not built (everything else is)"
else
	$(MAKE) $(B)/libdualkv_cuda.so $(B)/test_device $(B)/examples/cuda_kernel.so
endif

# Machine code for sm_80 and sm_90a, and PTX for what comes later. CUDA's runtime is linked in: the plugin needs only
# the driver, and only once it is loaded. CUDA_ARCH=90a alone compiles faster.
CUDA_ARCH ?= 80 90a
GENCODE80  := -gencode=arch=compute_80,code=[sm_80,compute_80]
GENCODE90a := -gencode=arch=compute_90a,code=sm_90a
NVCCFLAGS  := -std=c++17 -O3 -cudart static -lineinfo -Werror all-warnings \
  -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra,-Werror $(foreach a,$(CUDA_ARCH),$(GENCODE$(a)))
$(B)/obj/%.o: %.cu Makefile
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
# The oracle takes a few functions of ref/ from the library; cuBLAS it loads itself, when first used.
$(B)/libdualkv_cuda.so: $(CUDA_SRC:%.cu=$(B)/obj/%.o) $(B)/libdualkv.a
	$(NVCC) -shared -cudart static $(foreach a,$(CUDA_ARCH),$(GENCODE$(a))) $^ \
	  -Xlinker --exclude-libs,ALL,-z,defs -o $@
# The same with planted faults (cuda/fault.cuh); a usual build has none of them.
FAULTY := forward backward simple32 passes plugin
$(B)/faults/%.o: %.cu Makefile
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -DDKV_CUDA_FAULTS -MMD -MP -MF $(@:.o=.d) -c $< -o $@
$(B)/libdualkv_cuda_faults.so: $(FAULTY:%=$(B)/faults/cuda/%.o) \
  $(patsubst %.cu,$(B)/obj/%.o,$(filter-out $(FAULTY:%=cuda/%.cu),$(CUDA_SRC))) $(B)/libdualkv.a
	$(NVCC) -shared -cudart static $(foreach a,$(CUDA_ARCH),$(GENCODE$(a))) $^ \
	  -Xlinker --exclude-libs,ALL,-z,defs -o $@
.PHONY: cuda-faults cuda-check
cuda-faults: $(B)/libdualkv_cuda_faults.so ## the CUDA plugin with planted faults (cuda/fault.cuh), for a test of the tests
# Does it all compile and link, for every architecture? Without the optimisers, which take two thirds of the time; what has
# planted faults as PTX alone. Nothing of this is run.
UNOPTIMISED := -Xcicc -O0 -Xptxas -O0
$(B)/check/%.o: %.cu Makefile
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) $(UNOPTIMISED) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
$(B)/check/libdualkv_cuda.so: $(CUDA_SRC:%.cu=$(B)/check/%.o) $(B)/libdualkv.a
	$(NVCC) -shared -cudart static $(foreach a,$(CUDA_ARCH),$(GENCODE$(a))) $^ \
	  -Xlinker --exclude-libs,ALL,-z,defs -o $@
$(B)/faults/%.ptx.o: %.cu Makefile
	@mkdir -p $(@D)
	$(NVCC) $(filter-out -gencode=%,$(NVCCFLAGS)) -gencode=arch=compute_90a,code=compute_90a $(UNOPTIMISED) \
	  -DDKV_CUDA_FAULTS -MMD -MP -MF $(@:.o=.d) -c $< -o $@
cuda-check: deps-build ## does the CUDA plugin compile and link, with and without planted faults? (without optimisation)
ifeq ($(NVCC),)
	@echo "nvcc not found: CUDA kernels are not compiled"
else
	$(MAKE) $(B)/check/libdualkv_cuda.so $(FAULTY:%=$(B)/faults/cuda/%.ptx.o) $(B)/test_device $(B)/examples/cuda_kernel.so
endif
.PHONY: test-device
test-device: $(if $(BUNDLE),,all cuda cuda-faults) ## everything that needs a GPU: suites, repeats, faults, sanitizers, bench, peers (BUNDLE=DIR, STEPS="cuda det")
	DUALKV_DATA=data cuda/device.sh $(BUILT) $(B)/device
$(B)/examples/cuda_kernel.so: verify/examples/cuda_kernel.cu ref/dualkv_kernel.h
	@mkdir -p $(@D)
	$(NVCC) -shared $(filter-out -lineinfo,$(NVCCFLAGS)) -Xcompiler -fvisibility=default -I ref $< -o $@
# Need a device to run, so `test` only builds them.
$(B)/test_device: $(B)/%: $(B)/obj/cuda/%.o $(B)/libdualkv.a
	$(CC) $(LDFLAGS) $^ $(LDLIBS) -o $@

# A folder that runs on a bare machine: program, plugin, data, and the libraries they need beside them.
BUNDLE_RPATH := -Wl,-rpath,'$$ORIGIN/lib' -Wl,--disable-new-dtags
bundle: all cuda ## build/bundle and bundle.tar.gz: run on a machine without the packages
	rm -rf $(B)/bundle && mkdir -p $(B)/bundle/lib
	cp $(B)/dualkv $(wildcard $(B)/libdualkv_cuda.so $(B)/libdualkv_cuda_faults.so) $(B)/bundle/
	mkdir $(B)/bundle/data && cp -r data/suites data/corpus data/recorded data/waivers.txt $(B)/bundle/data/
	for l in $$(ldd $(B)/dualkv | awk '/openblas|cjson|quadmath|gfortran/ {print $$3}'); do cp -L $$l $(B)/bundle/lib/; done
	$(CC) $(LDFLAGS) -rdynamic $(B)/obj/verify/main.o $(B)/libdualkv.a $(LDLIBS) $(BUNDLE_RPATH) -o $(B)/bundle/dualkv
	$(CC) -shared $(LDFLAGS) $(OBJ) $(LDLIBS) $(BUNDLE_RPATH) -Wl,--version-script=verify/dualkv.map \
	  -o $(B)/bundle/libdualkv.so
	mkdir $(B)/bundle/python && cp -r verify/python/dualkv $(B)/bundle/python/
	[ ! -f $(B)/test_device ] || $(CC) $(LDFLAGS) $(B)/obj/cuda/test_device.o $(B)/libdualkv.a \
	  $(LDLIBS) $(BUNDLE_RPATH) -o $(B)/bundle/test_device
	tar -C $(B) -czf $(B)/bundle.tar.gz bundle
	du -sh $(B)/bundle $(B)/bundle.tar.gz

# What a wheel carries beside the package: program, library, plugin (where it was built), data, and the libraries they
# need, with the licences of these.
WHEEL := $(B)/wheel
wheel-files: all
	rm -rf $(WHEEL) && mkdir -p $(WHEEL)/lib/licenses $(WHEEL)/data
	cp $(wildcard $(B)/libdualkv_cuda.so) ref/dualkv_kernel.h verify/dualkv.h $(WHEEL)/
	cp -r data/suites data/corpus data/recorded data/waivers.txt $(WHEEL)/data/
	for l in $$(ldd $(B)/dualkv | awk '/openblas|cjson|quadmath|gfortran/ {print $$3}'); do cp -L $$l $(WHEEL)/lib/; done
	for l in libopenblas0-pthread libcjson1 libquadmath0 libgfortran5; do f=/usr/share/doc/$$l/copyright; \
	  [ ! -f $$f ] || cp $$f $(WHEEL)/lib/licenses/$$l; done
	$(CC) -s $(LDFLAGS) -rdynamic $(B)/obj/verify/main.o $(B)/libdualkv.a $(LDLIBS) $(BUNDLE_RPATH) -o $(WHEEL)/dualkv
	$(CC) -s -shared $(LDFLAGS) $(OBJ) $(LDLIBS) $(BUNDLE_RPATH) -Wl,--version-script=verify/dualkv.map \
	  -o $(WHEEL)/libdualkv.so
wheel: wheel-files ## build/dist/dualkv-….whl: the Python package with program, library and data (for this platform)
	python3 verify/python/build_backend.py $(WHEEL) $(B)/dist

clean: ## remove what was built
	rm -rf $(B)

-include $(shell find $(B)/obj $(B)/faults $(B)/check -name '*.d' 2>/dev/null)
