#define _GNU_SOURCE
#include "_cpu_pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* ticket: loop number (24 bits) | chunks of the loop (20 bits) | next chunk (20 bits) */
enum { FIELD = 20 };
static const uint64_t FIELD_MASK = ((uint64_t)1 << FIELD) - 1;

struct helper {
    struct cpu_pool *pool;
    pthread_t thread;
    int index;
};

struct cpu_pool {
    _Alignas(64) _Atomic uint64_t ticket;
    _Alignas(64) _Atomic int64_t done;
    _Alignas(64) _Atomic int sleepers;
    _Atomic int caller_waits;
    _Atomic int stopping;
    /* the loop: written by the caller while no chunk of it can be taken, read by chunk holders */
    _Alignas(64) cpu_chunk_fn fn;
    void *context;
    uint64_t number;
    int threads, started, spin_us;
    pid_t pid; /* threads do not survive a fork: the child's caller works alone */
    pthread_mutex_t lock;
    pthread_cond_t work, finished;
    struct helper *helpers;
};

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static int has_chunk(uint64_t ticket)
{
    return (ticket & FIELD_MASK) < (ticket >> FIELD & FIELD_MASK);
}

/* Take and run chunks until none is left. */
static void work(struct cpu_pool *p, int worker)
{
    uint64_t ticket = atomic_load_explicit(&p->ticket, memory_order_acquire);
    while (has_chunk(ticket)) {
        if (!atomic_compare_exchange_weak_explicit(&p->ticket, &ticket, ticket + 1,
                                                   memory_order_acq_rel, memory_order_acquire))
            continue;
        int64_t chunks = (int64_t)(ticket >> FIELD & FIELD_MASK);
        p->fn(p->context, (int64_t)(ticket & FIELD_MASK), worker);
        if (atomic_fetch_add(&p->done, 1) + 1 == chunks && atomic_load(&p->caller_waits)) {
            pthread_mutex_lock(&p->lock);
            pthread_cond_signal(&p->finished);
            pthread_mutex_unlock(&p->lock);
        }
        ticket = atomic_load_explicit(&p->ticket, memory_order_acquire);
    }
}

static void wait_for_work(struct cpu_pool *p)
{
    int64_t start = now_us();
    for (;;) {
        for (int i = 0; i < 64; i++) {
            if (has_chunk(atomic_load_explicit(&p->ticket, memory_order_acquire)) ||
                atomic_load_explicit(&p->stopping, memory_order_relaxed))
                return;
            relax();
        }
        if (now_us() - start >= p->spin_us)
            break;
    }
    pthread_mutex_lock(&p->lock);
    /* raised before the ticket is read, as the caller writes the ticket before it reads this:
     * one of the two sees the other */
    atomic_fetch_add(&p->sleepers, 1);
    while (!has_chunk(atomic_load(&p->ticket)) && !atomic_load(&p->stopping))
        pthread_cond_wait(&p->work, &p->lock);
    atomic_fetch_sub(&p->sleepers, 1);
    pthread_mutex_unlock(&p->lock);
}

static void *helper_main(void *arg)
{
    struct helper *h = arg;
    while (!atomic_load(&h->pool->stopping)) {
        work(h->pool, h->index);
        wait_for_work(h->pool);
    }
    return NULL;
}

struct cpu_pool *cpu_pool_new(int threads, int spin_us)
{
    struct cpu_pool *p = aligned_alloc(64, (sizeof *p + 63) & ~(size_t)63);
    if (!p)
        return NULL;
    *p = (struct cpu_pool){.threads = threads, .spin_us = spin_us, .pid = getpid()};
    p->helpers = calloc((size_t)threads, sizeof *p->helpers);
    if (!p->helpers) {
        free(p);
        return NULL;
    }
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->finished, NULL);
    return p;
}

/* Signals belong to the host's threads: a helper blocks them all. */
static void start_helpers(struct cpu_pool *p)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (p->started < p->threads - 1) {
        struct helper *h = &p->helpers[p->started];
        h->pool = p;
        h->index = p->started + 1;
        if (pthread_create(&h->thread, NULL, helper_main, h)) {
            p->threads = p->started + 1; /* fewer threads are slower, not wrong */
            break;
        }
        p->started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void cpu_pool_free(struct cpu_pool *p)
{
    if (!p)
        return;
    if (p->pid == getpid()) {
        pthread_mutex_lock(&p->lock);
        atomic_store(&p->stopping, 1);
        pthread_cond_broadcast(&p->work);
        pthread_mutex_unlock(&p->lock);
        for (int i = 0; i < p->started; i++)
            pthread_join(p->helpers[i].thread, NULL);
        pthread_mutex_destroy(&p->lock);
        pthread_cond_destroy(&p->work);
        pthread_cond_destroy(&p->finished);
    }
    free(p->helpers);
    free(p);
}

int cpu_pool_threads(const struct cpu_pool *p) { return p->threads; }

void cpu_pool_enter(struct cpu_pool *p)
{
    if (p->pid != getpid())
        p->threads = 1;
}

static void wait_until_done(struct cpu_pool *p, int64_t n)
{
    int64_t start = now_us();
    for (;;) {
        for (int i = 0; i < 64; i++) {
            if (atomic_load_explicit(&p->done, memory_order_acquire) == n)
                return;
            relax();
        }
        if (now_us() - start >= p->spin_us)
            break;
    }
    pthread_mutex_lock(&p->lock);
    atomic_store(&p->caller_waits, 1);
    while (atomic_load(&p->done) != n)
        pthread_cond_wait(&p->finished, &p->lock);
    atomic_store(&p->caller_waits, 0);
    pthread_mutex_unlock(&p->lock);
}

static void run_some(struct cpu_pool *p, int64_t n)
{
    atomic_store_explicit(&p->done, 0, memory_order_relaxed);
    p->number++;
    atomic_store(&p->ticket, p->number << (2 * FIELD) | (uint64_t)n << FIELD);
    if (atomic_load(&p->sleepers)) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_broadcast(&p->work);
        pthread_mutex_unlock(&p->lock);
    }
    work(p, 0);
    wait_until_done(p, n);
}

void cpu_pool_run(struct cpu_pool *p, int64_t n, cpu_chunk_fn fn, void *context)
{
    if (n <= 1 || p->threads == 1 || n > (int64_t)FIELD_MASK) {
        for (int64_t i = 0; i < n; i++)
            fn(context, i, 0);
        return;
    }
    if (p->started < p->threads - 1)
        start_helpers(p);
    p->fn = fn;
    p->context = context;
    run_some(p, n);
}
