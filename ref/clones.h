/* clones.h: a function compiled for several widths of vectors, chosen when the program starts. For plain loops, whose
 * results do not depend on the width. */
#ifndef DKV_CLONES_H
#define DKV_CLONES_H

/* Resolvers of clones run before a sanitizer is ready; device compilers know no clones. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(__CUDACC__)
#define DKV_CLONES
#else
#define DKV_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

#endif
