/* emu.h: a tile-faithful CPU emulation of the fused shared-prompt kernel, as kernels of the public ABI.
 *
 *   emu             packed, two or more key ranges a row
 *   emu-replicated  the same arithmetic, standard attention on the replicated layout: the same-precision peer
 *
 * Options: bm=N, bn=N (query and key tile, default 64), acc=rn|tc (fp32 accumulation one product a step to
 * nearest; or the tensor core's k16 truncating sum), order=up|down, p=rounded|normalised|exact (P and dS rounded
 * to the problem's type; P divided by its sum first; kept in fp32), delta=rounded|exact (from O rounded or not),
 * partials=exact|low (dK, dV of a query head rounded), scores=exact|low (scores and dP rounded), in=exact|tf32
 * (operands, P and dS), lazy=N (the running maximum is raised only where a tile's, or the sink's, is larger by more than a
 * factor of 2^N; 0: always), sink=last|first (the maximum and the sum start from the sink), undeclared (it says nothing about its arithmetic), fault=ID (one planted fault, table in
 * emu_fault.h). */
#ifndef DKV_EMU_H
#define DKV_EMU_H

#include "dualkv_kernel.h"

extern const dualkv_kernel dkv_emuKernel, dkv_emuReplicatedKernel;

/* Planted faults: id ("D1"), the row of faults.md it comes from or "own", one line. NULL past the end. */
typedef struct dkv_fault {
    const char *id, *kind, *doc;
    int control; /* 1: the harness must NOT alarm on it */
} dkv_fault;
const dkv_fault *dkv_listFault(int i);

#endif
