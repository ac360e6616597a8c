/* certificate.h: what a set of records proved of one kernel on one device, as a JSON envelope, and asking it. It speaks of
 * the bytes of the kernel's file, of the device and driver of its records, of the problems of its scope (scope.h), and never
 * expires: what it says stays true of them.
 *
 * `seal` is the SHA-256 of the rest, printed without spaces: an edited file is refused. It is no signature: who edits can
 * seal again. */
#ifndef DKV_CERTIFICATE_H
#define DKV_CERTIFICATE_H

#include <stdint.h>

#include "report_power.h"
#include "scope.h"

enum {
    DKV_CERT_WORDS = 32,      /* different words kept of a field; the rest are counted */
    DKV_CERT_LEAST_CASES = 20 /* different ones, judged and passed; with fewer no certificate is made */
};

typedef struct dkv_cert_words {
    char *word[DKV_CERT_WORDS]; /* owned */
    long count[DKV_CERT_WORDS], more;
    int n;
} dkv_cert_words;

typedef struct dkv_cert_file {
    char *path, *hash; /* owned */
    long records;
} dkv_cert_file;

typedef struct dkv_evidence { /* of records; zeroed to begin with */
    const char *kernel, *device;  /* wanted; NULL: the only one that there is */
    dkv_cert_words kernels, hashes, devices, capabilities, drivers, hosts, commits, compilers, libraries, generators, oracles, commands,
        arithmetic, profiles, not_judged, reasons, waived;
    char *defect;                /* owned; words of the first defect that no waiver excuses */
    long total, passed, defects, harness, weak, refused, others, undeclared; /* others: of other kernels and devices */
    long nameless;               /* say of no file, or of no device */
    uint64_t *lines;             /* owned; digests of the problems that passed */
    long n_lines, room_lines;
    double tests, alarms, level; /* statistical tests; their levels added up; the largest */
    struct {
        double elements, ratio, least_rms, most_rms;
        bool twin;
    } tensor[6];
    dkv_power_table power;
    long planted, found, clean_cases, false_alarms; /* of `power` */
    dkv_scope scope;
    dkv_cert_file *files;
    int n_files;
} dkv_evidence;

/* One line of a file of records. 1: taken, 0: no record, -1: out of memory, or more features than a scope holds. */
int dkv_addEvidence(dkv_evidence *e, const char *json);
/* A whole file, whose SHA-256 is `hash`. DKV_EUSER where it cannot be read, or a line is no record: all of it counts. */
int dkv_readEvidence(dkv_evidence *e, const char *path, const char *hash, dkv_err *err);
void dkv_freeEvidence(dkv_evidence *e);

/* Why there is no certificate: DKV_EREFUSED and the status that fits (1 a defect, 3 nothing or too little was judged, 4 power
 * is missing) in *code; 0: there is. DKV_EUSER: kernels or devices are mixed. */
int dkv_refuseCertificate(const dkv_evidence *e, int *code, dkv_err *err);
/* Sealed, as text of several lines, malloc'ed; NULL: out of memory. `command` makes it again. */
char *dkv_printCertificate(const dkv_evidence *e, const char *version, const char *command);

typedef struct dkv_certificate {
    cJSON *o; /* owned */
    const char *kernel, *hash, *device, *driver;
    dkv_scope scope;
} dkv_certificate;

/* DKV_EUSER: no certificate, of a later version, edited. */
int dkv_readCertificate(const char *path, dkv_certificate *c, dkv_err *err);
void dkv_freeCertificate(dkv_certificate *c);

#endif
