/* All kernels for one instruction set: included once by each _cpu_isa_*.c, which has defined the
 * vector width, the tile sizes and what its instructions do better than plain vector code. */
#include <math.h>

#include "_cpu_kernels.h"

#include "_cpu_vec.inc.h"

#include "_cpu_unpack.inc.h"

/* Keys and values of a position from `at` on. */
INLINE vf kv_load(int half, const void *row, int at)
{
    return half ? vf_half((const uint16_t *)row + at) : vf_load((const float *)row + at);
}

#include ISA_DOT_BLOCK

#include "_cpu_matmul_int.inc.h"

#include "_cpu_matmul_exact.inc.h"

#include "_cpu_ops.inc.h"

#include "_cpu_attention.inc.h"

#define KERNEL_TABLE(NAME)                                                                         \
    {                                                                                              \
        .name = NAME, .matmul = matmul, .rms_norm = rms_norm, .rope = rope, .swiglu = swiglu,      \
        .quantise = quantise, .narrow = narrow, .attend_chunk = attend_chunk, .merge = merge,      \
    }
