/* kernel_hash.h: which bytes a kernel was: the file that a spec names, for records and certificates. */
#ifndef DKV_KERNEL_HASH_H
#define DKV_KERNEL_HASH_H

/* SHA-256 of the shared object or Python file of a kernel spec, of libdualkv_cuda.so for the kernels that come from it, of
 * this program for those compiled into it; 64 hexadecimal digits, as the file was when it was first asked for. "": not
 * known (outputs that lie in files, a worker that runs already, a file that cannot be read,
 * more than 32 specs). Never freed; any thread. */
const char *dkv_kernelHash(const char *spec);

#endif
