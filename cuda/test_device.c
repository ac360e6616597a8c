/* test_device.c: the CUDA kernels against the fp64 oracle on a device, through the public ABI and device.h.
 *
 *     test_device [--lib libdualkv_cuda.so] [--kernel NAME] [--options OPT] [--once | --repeat N] [LINE...]
 *     test_device --list | --probe | --ipc | --time LINE...
 *
 * Without lines: the list below, in fp32 too (--list prints it). For each tensor: max over its elements of
 * |got - truth| / bound, where the bound is derived from the arithmetic that the kernel declares (oracle.h),
 * the rms of the difference over the rms of the truth, and z, the rms of got - twin in standard deviations.
 * Outputs and gaps between rows start as 0xFF bytes; gaps must keep them. Unless --once, each case runs twice
 * more, from a graph and beside a busy device (--repeat: N times more, idle and busy in turn), and must give
 * the same bits where the kernel promises so. Exit 0, or 1 where something failed, 3 where nothing ran. */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/dtype.h"
#include "../ref/mask.h"
#include "../ref/oracle.h"
#include "../ref/device.h"

static const char *const lines[] = {
    "shape=64 dim=64 grad=off",
    "shape=1 dim=64",
    "shape=128+2x64 dim=128",
    "shape=200+77,2x9 heads=4:2 dim=64",
    "shape=200+77,2x9/64+3x9 heads=4:2 dim=128",
    "shape=300+3x65 heads=8:2 dim=128 dtype=fp16",
    "shape=129+5x127 heads=4:1 dim=8",
    "shape=63+4x130 heads=3:3 dim=40",
    "shape=257+3x63 heads=2:1 dim=96 dtype=fp16",
    "shape=150+3x70 heads=4:2 dim=192:128",
    "shape=150+3x70 heads=4:2 dim=256",
    "shape=150+3x70 heads=2:1 dim=128:256",
    "shape=100+2x33 heads=2:2 dim=17:5",
    "shape=100+2x33 heads=2:1 dim=1:1 dtype=fp16",
    "shape=0+4x64 heads=2:1 dim=64",
    "shape=256+3x0 heads=2:1 dim=64",
    "shape=192k+16@100,16@33,16 heads=4:2 dim=128",
    "shape=192k+16@0,16@192 heads=4:2 dim=64 mask=full",
    "shape=100+3x(70+2x50) heads=4:2 dim=64",
    "shape=70+2x(33+(20+2x9),7) heads=2:1 dim=128 dtype=fp16",
    "shape=200+3x40@77,30@200 heads=4:2 dim=64",
    "shape=200+3x77 heads=4:2 dim=64 mask=full",
    "shape=200+3x77 heads=4:2 dim=128 mask=prefix",
    "shape=300+3x200 heads=4:2 dim=64 mask=window:100",
    "shape=300+3x200 heads=4:2 dim=128 mask=window:70:5 dtype=fp16",
    "shape=300+3x200 heads=4:2 dim=64 mask=chunk:96",
    "shape=300+3x200 heads=4:2 dim=64 mask=block:32:0.5:7",
    "shape=300+3x200 heads=4:2 dim=128 mask=block:7:0.2:3",
    "shape=200+3x77 heads=4:2 dim=64 softcap=5",
    "shape=200+3x77 heads=8:2 dim=64 alibi=on",
    "shape=200+3x77 heads=4:2 dim=64 sinklogit=0.5",
    "shape=200+3x77 heads=4:2 dim=128 dlse=on",
    "shape=200+3x77 heads=4:2 dim=64 softcap=20 alibi=on sinklogit=1 dlse=on dtype=fp16 mask=window:50:4",
    "shape=150k+3x40 heads=4:2 dim=64 mask=block:64:0.1:2 sinklogit=-1 dlse=on",
    "shape=150k+3x40 heads=4:2 dim=64 mask=block:64:0.1:2",
    "shape=200+3x77 heads=4:2 dim=64 scale=0.5",
    "shape=200+3x77 heads=4:2 dim=72 layout=padded",
    "shape=200+3x77 heads=4:2 dim=64 layout=strided",
    "shape=200+3x77 heads=4:2 dim=64 layout=fused dtype=fp16",
    "shape=700+4x300 heads=4:1 dim=128",
    "shape=64+24x90 heads=8:1 dim=128",
};

static const dkv_device_ops *ops;
static const dualkv_kernel *kernel;
static void *self;
static int once, repeats; /* --once, --repeat */

static void die(const char *what) {
    fprintf(stderr, "%s: %s\n", what, ops ? ops->error() : "");
    exit(3);
}
#define TRY(call)                                                                                            \
    do {                                                                                                     \
        if (call) die(#call);                                                                                \
    } while (0)

static double uniform(uint64_t *x) { /* splitmix64 */
    uint64_t z = *x += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return ((double)((z ^ z >> 31) >> 11) + 0.5) * 0x1p-53;
}
static double normal(uint64_t *x) {
    double r = sqrt(-2 * log(uniform(x)));
    return r * cos(6.283185307179586 * uniform(x));
}

/* One tensor of the launch: [rows, heads, d], or [heads, rows] where d = 0 (then fp32). */
typedef struct buffer {
    dualkv_tensor t;
    size_t element, bytes;
    int64_t rows, heads, d;
    unsigned char *host;
} buffer;
enum { Q, K, V, DO, DLSE, SINK, O, LSE, DQ, DK, DV, DSINK, BUFFERS };
static const char *const names[BUFFERS] = {"q", "k",   "v",  "dO", "dLSE", "sink",
                                           "O", "LSE", "dQ", "dK", "dV",   "dSink"};

static void makeBuffer(buffer *b, const dkv_problem *p, int64_t rows, int64_t heads, int64_t d,
                       size_t element) {
    memset(b, 0, sizeof *b);
    b->rows = rows, b->heads = heads, b->d = d, b->element = element;
    int64_t width = d ? d : 1;
    b->t.row = d ? heads * width : 1;
    b->t.head = d ? width : rows;
    if (d && p->layout == DKV_PADDED) b->t.row += 8;
    if (d && p->layout == DKV_FUSED) b->t.row *= 3;
    if (d && p->layout == DKV_STRIDED) b->t.row = width + 1, b->t.head = rows * (width + 1) + 3;
    int64_t last = rows && heads ? (rows - 1) * b->t.row + (heads - 1) * b->t.head + width : 0;
    b->bytes = (size_t)last * element;
    TRY(ops->alloc(&b->t.data, b->bytes));
    b->host = malloc(b->bytes + 1);
    if (!b->host) die("out of memory");
    memset(b->host, 0xff, b->bytes + 1);
}

static int64_t count(const buffer *b) { return b->rows * b->heads * (b->d ? b->d : 1); }

/* Offset in elements of canonical element i: packed [rows, heads, d] or [heads, rows]. */
static int64_t at(const buffer *b, int64_t i) {
    if (!b->d) return i / (b->rows ? b->rows : 1) * b->t.head + i % (b->rows ? b->rows : 1) * b->t.row;
    return i / (b->heads * b->d) * b->t.row + i / b->d % b->heads * b->t.head + i % b->d;
}

static void put(buffer *b, const void *from) {
    for (int64_t i = 0; i < count(b); i++)
        memcpy(b->host + (size_t)at(b, i) * b->element, (const char *)from + (size_t)i * b->element,
               b->element);
    TRY(ops->copyIn(b->t.data, b->host, b->bytes, NULL));
}

/* What was read back, in canonical order; returns how many bytes of gaps were changed. */
static int64_t gather(buffer *b, void *to) {
    int64_t changed = 0;
    for (int64_t i = 0; i < count(b); i++) {
        unsigned char *p = b->host + (size_t)at(b, i) * b->element;
        memcpy((char *)to + (size_t)i * b->element, p, b->element);
        memset(p, 0xff, b->element);
    }
    for (size_t i = 0; i < b->bytes; i++) changed += b->host[i] != 0xff;
    return changed;
}

typedef struct device_case {
    dkv_problem p;
    dkv_layout l;
    buffer b[BUFFERS];
    dualkv_launch launch;
    void *segments, *ranges, *slopes, *stream;
} device_case;

static void *upload(const void *from, size_t n) {
    void *p;
    TRY(ops->alloc(&p, n));
    TRY(ops->copyIn(p, from, n, NULL));
    return p;
}

static void openCase(device_case *c) {
    const dualkv_problem *v = &c->l.view;
    size_t e = dkv_dtypeSize((dualkv_dtype)v->dtype);
    const struct {
        int64_t rows, heads, d;
        size_t e;
        int on;
    } s[BUFFERS] = {
        [Q] = {v->tq, v->hq, v->dqk, e, 1},
        [K] = {v->tk, v->hkv, v->dqk, e, 1},
        [V] = {v->tk, v->hkv, v->dv, e, 1},
        [DO] = {v->tq, v->hq, v->dv, e, v->grad},
        [DLSE] = {v->tq, v->hq, 0, 4, v->grad && v->dlse},
        [SINK] = {1, v->hq, 0, 4, v->sink},
        [O] = {v->tq, v->hq, v->dv, e, 1},
        [LSE] = {v->tq, v->hq, 0, 4, 1},
        [DQ] = {v->tq, v->hq, v->dqk, e, v->grad},
        [DK] = {v->tk, v->hkv, v->dqk, e, v->grad},
        [DV] = {v->tk, v->hkv, v->dv, e, v->grad},
        [DSINK] = {1, v->hq, 0, 4, v->grad && v->sink},
    };
    for (int i = 0; i < BUFFERS; i++)
        if (s[i].on) makeBuffer(&c->b[i], &c->p, s[i].rows, s[i].heads, s[i].d, s[i].e);
    c->segments = upload(v->segments, (size_t)v->n_segments * sizeof *v->segments);
    c->ranges = upload(v->ranges, (size_t)v->n_ranges * sizeof *v->ranges);
    if (v->alibi) c->slopes = upload(v->alibi_slopes, (size_t)v->hq * 4);
    TRY(ops->openStream(&c->stream));
    dualkv_launch *l = &c->launch;
    l->size = sizeof *l;
    l->problem = v;
    l->device_segments = c->segments, l->device_ranges = c->ranges, l->device_alibi_slopes = c->slopes;
    l->stream = c->stream;
    size_t fwd = kernel->workspace(self, v, 0), bwd = v->grad ? kernel->workspace(self, v, 1) : 0;
    l->workspace_size = fwd > bwd ? fwd : bwd;
    TRY(ops->alloc(&l->workspace, l->workspace_size));
    l->q = c->b[Q].t, l->k = c->b[K].t, l->v = c->b[V].t, l->sink = c->b[SINK].t.data;
    l->o = c->b[O].t, l->lse = c->b[LSE].t, l->d_o = c->b[DO].t, l->d_lse = c->b[DLSE].t;
    l->dq = c->b[DQ].t, l->dk = c->b[DK].t, l->dv = c->b[DV].t, l->dsink = c->b[DSINK].t.data;
}

static void closeCase(device_case *c) {
    for (int i = 0; i < BUFFERS; i++) {
        TRY(ops->release(c->b[i].t.data));
        free(c->b[i].host);
    }
    TRY(ops->release(c->segments) || ops->release(c->ranges) || ops->release(c->slopes));
    TRY(ops->release(c->launch.workspace) || ops->closeStream(c->stream));
}

static void launchCase(device_case *c, int backward_only) {
    char err[300] = "";
    if (!backward_only && kernel->forward(self, &c->launch, err, sizeof err)) die(err);
    if (c->l.view.grad && kernel->backward(self, &c->launch, err, sizeof err)) die(err);
}

/* Poisons outputs and workspace, then runs: 0 plainly, 1 from a graph, 2 beside a busy device. Returns 0
 * where that device was no longer busy at the end. */
static int runCase(device_case *c, int how) {
    void *graph = NULL, *busy = NULL;
    int beside = 1;
    for (int i = O; i < BUFFERS; i++) TRY(ops->fill(c->b[i].t.data, 0xff, c->b[i].bytes, c->stream));
    TRY(ops->fill(c->launch.workspace, 0xff, c->launch.workspace_size, c->stream));
    TRY(ops->syncStream(c->stream));
    if (how == 1) TRY(ops->beginGraph(c->stream));
    if (how == 2) TRY(ops->startBusy(1, &busy));
    launchCase(c, 0);
    if (how == 1) TRY(ops->endGraph(c->stream, &graph) || ops->launchGraph(graph, c->stream));
    TRY(ops->syncStream(c->stream));
    if (how == 1) TRY(ops->closeGraph(graph));
    if (how == 2) TRY(ops->stopBusy(busy, &beside));
    TRY(ops->sync());
    return beside;
}

/* Packed inputs, normal values. */
static void fillInputs(const device_case *c, dkv_inputs *in) {
    const dualkv_problem *v = &c->l.view;
    uint64_t x = c->p.seed * 1000003;
    void *const to[4] = {in->q, in->k, in->v, in->d_o};
    for (int i = 0; i < 4; i++) {
        if (!to[i]) continue;
        int64_t n = count(&c->b[i]);
        double *tmp = malloc((size_t)n * sizeof *tmp + 1);
        if (!tmp) die("out of memory");
        for (int64_t j = 0; j < n; j++) tmp[j] = normal(&x);
        dkv_encodeArray(tmp, (dualkv_dtype)v->dtype, (size_t)n, to[i]);
        free(tmp);
    }
    for (int64_t j = 0; in->d_lse && j < v->hq * v->tq; j++) in->d_lse[j] = (float)normal(&x);
    for (int64_t j = 0; in->sink && j < v->hq; j++) in->sink[j] = c->p.sinklogit + (float)(0.1 * normal(&x));
}

/* Decodes what was read of tensor i. */
static double *decode(const device_case *c, int i, const void *got) {
    double *x = malloc((size_t)count(&c->b[i]) * sizeof *x + 1);
    if (!x) die("out of memory");
    dkv_decodeArray(got, c->b[i].element == 4 ? DUALKV_FP32 : (dualkv_dtype)c->l.view.dtype,
                    (size_t)count(&c->b[i]), x);
    return x;
}

/* One tensor against the truth, its bound and its twin. Returns 1 where it fails. */
static int judge(const device_case *c, int i, const double *got, const dkv_oracle *oracle) {
    const dkv_tensor_id id = (dkv_tensor_id)(i - O);
    const double *truth = dkv_outputAt(&oracle->truth, id), *bound = dkv_outputAt(&oracle->bound, id);
    const double *twin = dkv_outputAt(&oracle->twin, id), *sigma2 = dkv_outputAt(&oracle->sigma2, id);
    double worst = 0, error = 0, size = 0, z2 = 0;
    int64_t wrong = 0, n = count(&c->b[i]), where = -1;
    for (int64_t j = 0; j < n; j++) {
        if (sigma2[j] > 0) z2 += (got[j] - twin[j]) * (got[j] - twin[j]) / sigma2[j];
        if (truth[j] == got[j]) continue;
        double d = fabs(got[j] - truth[j]), ratio = d / bound[j];
        if (!(ratio <= 1) && !wrong++) where = j;
        if (ratio > worst) worst = ratio;
        error += d * d;
        size += truth[j] * truth[j];
    }
    printf("  %s %.3f %.1e", names[i], worst, size > 0 ? sqrt(error / size) : 0);
    if (oracle->has_twin[id] && n) printf(" z %.2f", sqrt(z2 / (double)n));
    if (wrong)
        printf(" [%lld of %lld wrong, first at %lld]", (long long)wrong, (long long)n, (long long)where);
    return wrong != 0;
}

static int judgeAll(const device_case *c, const dkv_inputs *in, const dualkv_arithmetic *a,
                    void *const raw[BUFFERS], dkv_oracle *oracle) {
    const dkv_ref_options opt = {.mutant = DKV_MUTANT_NONE};
    double *got[BUFFERS] = {NULL};
    dkv_err err;
    int bad = 0;
    for (int i = O; i < BUFFERS; i++)
        if (raw[i]) got[i] = decode(c, i, raw[i]);
    if (dkv_oracleBound(&c->p, &c->l, in, a, &opt, oracle, &err) ||
        dkv_oracleTwin(&c->p, &c->l, in, a, &opt, got[O], got[LSE], oracle, &err))
        die(err.text);
    for (int i = O; i < BUFFERS; i++)
        if (got[i]) bad |= judge(c, i, got[i], oracle);
    for (int i = O; i < BUFFERS; i++) free(got[i]);
    return bad;
}

static int checkCase(const char *line) {
    device_case c;
    dkv_inputs in;
    dkv_oracle oracle;
    dualkv_arithmetic arithmetic = {.size = sizeof arithmetic};
    dkv_err err;
    int bad = 0;
    memset(&c, 0, sizeof c);
    if (dkv_parseProblem(line, NULL, &c.p, &err) || dkv_maskAdmissible(&c.p, &err) ||
        dkv_makeLayout(&c.p, &c.l, &err)) {
        printf("FAIL %s: %s\n", line, err.text);
        return 1;
    }
    const char *why = kernel->refuses(self, &c.l.view);
    if (why) {
        printf("REFUSED %s: %s\n", line, why);
        return 0;
    }
    kernel->arithmetic(self, &c.l.view, &arithmetic);
    if (dkv_checkArithmetic(&arithmetic, &err) || dkv_allocInputs(&c.l, &in, &err) ||
        dkv_allocOracle(&c.l, &oracle, &err))
        die(err.text);
    openCase(&c);
    fillInputs(&c, &in);
    const void *const from[6] = {in.q, in.k, in.v, in.d_o, in.d_lse, in.sink};
    for (int i = 0; i < O; i++)
        if (c.b[i].t.data) put(&c.b[i], from[i]);
    const int promised = kernel->deterministic(self, &c.l.view);
    void *first[BUFFERS] = {NULL}, *image[BUFFERS] = {NULL};
    int64_t changed = 0;
    int differ = 0, alone = 0;
    printf("%s\n", line);
    for (int run = 0; run < (once ? 1 : 3 + repeats); run++) {
        const int how = run < 3 ? run : run % 2 * 2;
        alone += !runCase(&c, how);
        for (int i = O; i < BUFFERS; i++) {
            buffer *b = &c.b[i];
            if (!b->t.data) continue;
            TRY(ops->copyOut(b->host, b->t.data, b->bytes, NULL));
            if (run) {
                if ((promised || i < DQ) && memcmp(b->host, image[i], b->bytes)) differ |= 1 << how;
                continue;
            }
            image[i] = malloc(b->bytes + 1);
            first[i] = malloc((size_t)count(b) * b->element + 1);
            if (!image[i] || !first[i]) die("out of memory");
            memcpy(image[i], b->host, b->bytes);
            changed += gather(b, first[i]);
        }
    }
    bad |= judgeAll(&c, &in, &arithmetic, first, &oracle);
    if (changed) printf("  [%lld bytes between rows changed]", (long long)changed);
    if (differ)
        printf("  [other bits:%s%s%s]", differ & 1 ? " plain" : "", differ & 2 ? " graph" : "",
               differ & 4 ? " busy" : "");
    if (alone) printf("  [%d runs ended after the busy kernel]", alone);
    bad |= changed || differ || alone;
    printf("\n  %s\n", bad ? "FAIL" : "ok");
    for (int i = 0; i < BUFFERS; i++) {
        free(first[i]);
        free(image[i]);
    }
    closeCase(&c);
    dkv_freeInputs(&in);
    dkv_freeOracle(&oracle);
    dkv_freeLayout(&c.l);
    dkv_freeProblem(&c.p);
    return bad;
}

static int byValue(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Median of device times of forward and backward on inputs that repeat a block of random normal values. */
static int timeCase(const char *line) {
    enum { BLOCK = 1 << 20, REPEATS = 7 };
    device_case c;
    dkv_err err;
    void *first, *last;
    uint64_t x = 1;
    memset(&c, 0, sizeof c);
    if (dkv_parseProblem(line, NULL, &c.p, &err) || dkv_makeLayout(&c.p, &c.l, &err)) die(err.text);
    openCase(&c);
    double *tmp = malloc(BLOCK * sizeof *tmp);
    void *block = malloc(BLOCK * 4);
    if (!tmp || !block) die("out of memory");
    for (int i = 0; i < BLOCK; i++) tmp[i] = normal(&x);
    for (int i = 0; i < O; i++) {
        if (!c.b[i].t.data) continue;
        size_t n = BLOCK * c.b[i].element;
        dkv_encodeArray(tmp, c.b[i].d ? (dualkv_dtype)c.l.view.dtype : DUALKV_FP32, BLOCK, block);
        for (size_t o = 0; o < c.b[i].bytes; o += n)
            TRY(ops->copyIn((char *)c.b[i].t.data + o, block, o + n > c.b[i].bytes ? c.b[i].bytes - o : n,
                            NULL));
    }
    TRY(ops->openEvent(&first) || ops->openEvent(&last));
    float ms[2][REPEATS];
    for (int r = -2; r < REPEATS; r++) {
        char why[300];
        TRY(ops->recordEvent(first, c.stream));
        if (kernel->forward(self, &c.launch, why, sizeof why)) die(why);
        TRY(ops->recordEvent(last, c.stream) || ops->elapsed(first, last, &ms[0][r < 0 ? 0 : r]));
        TRY(ops->recordEvent(first, c.stream));
        launchCase(&c, 1);
        TRY(ops->recordEvent(last, c.stream) || ops->elapsed(first, last, &ms[1][r < 0 ? 0 : r]));
    }
    for (int i = 0; i < 2; i++) qsort(ms[i], REPEATS, sizeof(float), byValue);
    printf("%s\n  forward %.3f ms %.1f TFLOP/s", line, ms[0][REPEATS / 2],
           dkv_forwardFlops(&c.p) / ms[0][REPEATS / 2] * 1e-9);
    if (c.l.view.grad)
        printf("   backward %.3f ms %.1f TFLOP/s   workspace %.2f GB", ms[1][REPEATS / 2],
               dkv_backwardFlops(&c.p) / ms[1][REPEATS / 2] * 1e-9, (double)c.launch.workspace_size * 1e-9);
    printf("\n");
    TRY(ops->closeEvent(first) || ops->closeEvent(last));
    closeCase(&c);
    free(tmp);
    free(block);
    dkv_freeLayout(&c.l);
    dkv_freeProblem(&c.p);
    return 0;
}

static void openPlugin(const char *lib, const char *name, const char *options) {
    int n = 0, devices = 0;
    char err[300] = "";
    void *so = dlopen(lib, RTLD_NOW | RTLD_LOCAL);
    if (!so) die(dlerror());
    dkv_device_ops_fn table;
    dualkv_kernels_fn kernels;
    *(void **)&table = dlsym(so, DKV_DEVICE_SYMBOL);
    *(void **)&kernels = dlsym(so, DUALKV_KERNELS_SYMBOL);
    if (!table || !kernels) die("symbols missing");
    ops = table();
    TRY(ops->count(&devices));
    if (!devices) die("no device");
    const dualkv_kernel *const *list = kernels(DUALKV_ABI, &n);
    for (int i = 0; i < n; i++)
        if (!strcmp(list[i]->name, name)) kernel = list[i];
    if (!kernel) die(name);
    self = kernel->open(options, err, sizeof err);
    if (!self) die(err);
}

/* The list, each line as it is and, where it names no type, in fp32. Returns the sum of what f returned. */
static int eachLine(int (*f)(const char *)) {
    int sum = 0;
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        char line[300];
        sum += f(lines[i]);
        snprintf(line, sizeof line, "%s dtype=fp32", lines[i]);
        if (!strstr(lines[i], "dtype")) sum += f(line);
    }
    return sum;
}
/* Two buffers, one of them small, through CUDA IPC to another process, which answers with a byte. */
static int shareBuffers(const char *program, const char *lib) {
    const size_t sizes[2] = {1 << 22, 1000};
    void *p[2];
    int bad = 0;
    for (int i = 0; i < 2; i++) {
        uint8_t handle[DKV_IPC_BYTES], first = 0;
        char command[2 * DKV_IPC_BYTES + 800], hex[2 * DKV_IPC_BYTES + 1];
        TRY(ops->alloc(&p[i], sizes[i]) || ops->fill(p[i], 0x51 + i, sizes[i], NULL) || ops->sync());
        TRY(ops->exportBuffer(p[i], handle));
        for (int j = 0; j < DKV_IPC_BYTES; j++) snprintf(hex + 2 * j, 3, "%02x", handle[j]);
        snprintf(command, sizeof command, "%.300s --lib %.300s --open %s:%d", program, lib, hex, 0x51 + i);
        fflush(stdout);
        int rc = system(command);
        TRY(ops->copyOut(&first, p[i], 1, NULL));
        printf("ipc of %zu bytes: %s\n", sizes[i], rc == 0 && first == 0x77 ? "ok" : "FAIL");
        bad |= rc != 0 || first != 0x77;
    }
    for (int i = 0; i < 2; i++) TRY(ops->release(p[i]));
    return bad;
}

static int openShared(const char *word) {
    uint8_t handle[DKV_IPC_BYTES], got[1000];
    void *p;
    int bad = 0;
    if (strlen(word) < 2 * DKV_IPC_BYTES + 2) return 1;
    for (int j = 0; j < DKV_IPC_BYTES; j++) {
        unsigned byte = 0;
        sscanf(word + 2 * j, "%2x", &byte);
        handle[j] = (uint8_t)byte;
    }
    TRY(ops->openBuffer(handle, &p) || ops->copyOut(got, p, sizeof got, NULL));
    for (size_t j = 0; j < sizeof got; j++) bad |= got[j] != atoi(word + 2 * DKV_IPC_BYTES + 1);
    TRY(ops->fill(p, 0x77, 1, NULL) || ops->sync() || ops->closeBuffer(p));
    return bad;
}

/* Patterns end where they should, and every two bytes count in a sum, by their place. */
static int paintAndSum(void) {
    enum { N = 1 << 20 };
    static const size_t begin[] = {0, 2, 4, 10}, length[] = {2, 4, 1002, N - 64};
    uint16_t *got = malloc(N);
    uint8_t *p = NULL;
    uint64_t sum, other;
    int bad = got == NULL;
    TRY(ops->alloc((void **)&p, N));
    for (int i = 0; i < 16 && got; i++) {
        const size_t at = begin[i / 4], n = length[i % 4];
        TRY(ops->fill(p, 0x11, N, NULL) || ops->paint(p + at, 0x7fc3, n, NULL) || ops->copyOut(got, p, N, NULL));
        for (size_t k = 0; k < N / 2; k++) bad |= got[k] != (2 * k >= at && 2 * k < at + n ? 0x7fc3 : 0x1111);
        TRY(ops->sum(p + at, n, NULL, &sum) || ops->fill(p + at + n, 0, 2, NULL) || ops->sum(p + at, n, NULL, &other));
        bad |= sum != other;
        TRY(ops->fill(p + at + n - 1, 0, 1, NULL) || ops->sum(p + at, n, NULL, &other));
        bad |= sum == other;
    }
    const uint16_t ab[2] = {1, 2}, ba[2] = {2, 1};
    TRY(ops->copyIn(p, ab, sizeof ab, NULL) || ops->sum(p, sizeof ab, NULL, &sum));
    TRY(ops->copyIn(p, ba, sizeof ba, NULL) || ops->sum(p, sizeof ba, NULL, &other));
    bad |= sum == other;
    printf("patterns and sums: %s\n", bad ? "FAIL" : "ok");
    TRY(ops->release(p));
    free(got);
    return bad;
}

static int printLine(const char *line) { return puts(line) < 0; }

int main(int argc, char **argv) {
    const char *lib = "./libdualkv_cuda.so", *name = "cuda", *options = "";
    const char *opened = NULL;
    int timing = 0, probe = 0, ipc = 0, ran = 0, bad = 0;
    dkv_device_info info;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--lib") && i + 1 < argc)
            lib = argv[++i];
        else if (!strcmp(argv[i], "--kernel") && i + 1 < argc)
            name = argv[++i];
        else if (!strcmp(argv[i], "--options") && i + 1 < argc)
            options = argv[++i];
        else if (!strcmp(argv[i], "--time"))
            timing = 1;
        else if (!strcmp(argv[i], "--once"))
            once = 1;
        else if (!strcmp(argv[i], "--repeat") && i + 1 < argc)
            repeats = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--ipc"))
            ipc = 1;
        else if (!strcmp(argv[i], "--open") && i + 1 < argc)
            opened = argv[++i];
        else if (!strcmp(argv[i], "--probe"))
            probe = 1;
        else if (!strcmp(argv[i], "--list"))
            return eachLine(printLine);
        else if (!strchr(argv[i], '='))
            die(argv[i]);
    }
    openPlugin(lib, name, options);
    if (opened) return openShared(opened);
    TRY(ops->describe(0, &info));
    printf("%s sm_%s, driver %d, runtime %d, %d multiprocessors; kernel %s %s\n", info.name, info.capability,
           info.driver, info.runtime, info.sms, name, options);
    if (ipc) {
        bad += shareBuffers(argv[0], lib) + paintAndSum();
        ran++;
    }
    if (probe) {
        static char json[16384];
        TRY(ops->probe(json, sizeof json));
        printf("%s\n", json);
        ran++;
    }
    for (int i = 1; i < argc; i++)
        if (strchr(argv[i], '=')) {
            bad += timing ? timeCase(argv[i]) : checkCase(argv[i]);
            ran++;
        }
    if (!ran) bad = eachLine(checkCase);
    TRY(ops->sync());
    kernel->close(self);
    printf("%s: %d failed\n", bad ? "FAIL" : "PASS", bad);
    return bad ? 1 : 0;
}
