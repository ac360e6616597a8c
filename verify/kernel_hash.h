/* kernel_hash.h: which bytes a kernel was: the file that a spec names, for records and certificates. */
#ifndef DKV_KERNEL_HASH_H
#define DKV_KERNEL_HASH_H

#include <stdbool.h>
#include <stddef.h>

/* SHA-256 of the shared object or Python file of a kernel spec, of libdualkv_cuda.so for the kernels that come from it, of
 * this program for those compiled into it; 64 hexadecimal digits, as the file was when it was pinned, or first asked for. "": not
 * known (outputs that lie in files, a worker that runs already, a file that cannot be read,
 * more than 32 specs). Never freed; any thread. */
const char *dkv_kernelHash(const char *spec);

/* A run begins with the file as it is now. */
void dkv_pinKernel(const char *spec);
/* Is the file another one than it was then? In words, "" where not (nor where no file is known). Costs a stat while it is
 * left alone. */
bool dkv_isKernelChanged(const char *spec, char *words, size_t n);

#endif
