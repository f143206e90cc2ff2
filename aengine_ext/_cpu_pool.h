/* A few threads that help the calling thread with one loop after another.
 *
 * A loop of n independent chunks is published as one 64-bit ticket (loop number, n, next chunk);
 * whoever takes a chunk raises `next`. The caller takes chunks itself and waits only for chunks
 * that were taken: a helper that the operating system has not scheduled delays nothing. Helpers
 * spin for a few microseconds after the last loop, then sleep.
 */
#ifndef AENGINE_CPU_POOL_H
#define AENGINE_CPU_POOL_H

#include <stdint.h>

/* `worker` is 0 for the caller, 1 .. threads-1 for helpers: an index for scratch memory. */
typedef void (*cpu_chunk_fn)(void *context, int64_t chunk, int worker);

struct cpu_pool;

/* A pool that uses `threads` threads, the caller included; NULL when it cannot be had. Helpers
 * start with the first call that can use them. */
struct cpu_pool *cpu_pool_new(int threads, int spin_us);
void cpu_pool_free(struct cpu_pool *pool);
int cpu_pool_threads(const struct cpu_pool *pool);

/* To be called before a series of loops: after a fork, in which threads are lost, the caller works
 * alone. */
void cpu_pool_enter(struct cpu_pool *pool);

/* Run chunks 0 .. n-1, in any order and on any thread; returns when all are done. One caller at a
 * time. Chunk results must not depend on the thread or the order. */
void cpu_pool_run(struct cpu_pool *pool, int64_t n, cpu_chunk_fn fn, void *context);

#endif
