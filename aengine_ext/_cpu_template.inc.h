/* All kernels for one instruction set: included once by each _cpu_isa_*.c, which has defined the
 * vector width, the tile sizes and what its instructions do better than plain vector code. */
#include <math.h>

#include "_cpu_kernels.h"

#include "_cpu_vec.inc.h"

#include "_cpu_unpack.inc.h"

#include ISA_DOT_BLOCK

#include "_cpu_matmul_int.inc.h"

#include "_cpu_matmul_exact.inc.h"

#include "_cpu_ops.inc.h"

#include "_cpu_attention.inc.h"

#define KERNEL_TABLE(NAME)                                                                         \
    {                                                                                              \
        .name = NAME, .matmul = matmul, .rms_norm = rms_norm, .rope = rope, .swiglu = swiglu,      \
        .quantise = quantise, .attend_chunk = attend_chunk, .merge = merge,                        \
    }
