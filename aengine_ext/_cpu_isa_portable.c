/* Plain C: what any compiler makes of four-lane vectors. Also the reference for the others. */
#define VL 4
#define INT_TOKENS 2
#define BYTES_SIGNED 0
#define EXACT_GROUPS 1
#define EXACT_TOKENS 2
#define FEW_GROUPS 1
#define SCORE_QUERIES 3
#define VALUE_QUERIES 3
#define VALUE_VECTORS 4
#define ISA_DOT_BLOCK "_cpu_dot_portable.inc.h"
#include "_cpu_template.inc.h"

const struct cpu_kernels *cpu_kernels_portable(void)
{
    static const struct cpu_kernels table = KERNEL_TABLE("portable");
    return &table;
}
