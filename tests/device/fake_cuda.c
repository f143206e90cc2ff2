/* A driver library that plays a GPU: streams are threads, kernels are sleeps.
 *
 * It has just the functions that aengine.device.driver uses, so that all of the CUDA device but its
 * torch guard runs where there is no GPU. Events are never freed: a test process is short.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum kind { KERNEL, WRITE, RECORD, WAIT, HOST, COPY, GATE, FAULT };

typedef struct event {
    int recorded, reached;
    int64_t time;
} event;

typedef struct op {
    enum kind kind;
    uintptr_t a, b, c;
    struct op *next;
} op;

typedef struct stream {
    pthread_t thread;
    op *first, *last;
    int running, priority, first_sm, sms;
    struct stream *next;
} stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int device_error;
static stream *streams;
static uintptr_t context = 0x1;
static __thread uintptr_t current[16];
static __thread int depth;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void sleep_until(int64_t at) {
    struct timespec t = {at / 1000000000, at % 1000000000};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
}

/* Runs one operation without the lock, except where it looks at shared state. */
static void perform(op *o) {
    if (o->kind == KERNEL) sleep_until(now_ns() + (int64_t)o->a);
    if (o->kind == WRITE) __atomic_store_n((uint32_t *)o->a, (uint32_t)o->b, __ATOMIC_SEQ_CST);
    if (o->kind == COPY) memcpy((void *)o->a, (void *)o->b, o->c);
    if (o->kind == GATE)
        while (__atomic_load_n((uint32_t *)o->a, __ATOMIC_SEQ_CST) < o->b && !device_error)
            sleep_until(now_ns() + 200000);
    if (o->kind == HOST) ((void (*)(void *))o->a)((void *)o->b);
    pthread_mutex_lock(&lock);
    if (o->kind == RECORD) {
        ((event *)o->a)->reached = 1;
        ((event *)o->a)->time = now_ns();
    }
    if (o->kind == FAULT) device_error = 700;
    if (o->kind == WAIT)
        while (!((event *)o->a)->reached && !device_error) pthread_cond_wait(&changed, &lock);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void *work(void *arg) {
    stream *s = arg;
    for (;;) {
        pthread_mutex_lock(&lock);
        while (!s->first) pthread_cond_wait(&changed, &lock);
        op *o = s->first;
        s->running = 1;
        int dead = device_error;
        pthread_mutex_unlock(&lock);
        /* After a context error nothing runs any more: no write, no event, no host function. */
        if (!dead) perform(o);
        pthread_mutex_lock(&lock);
        s->first = o->next;
        if (!s->first) s->last = NULL;
        s->running = 0;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
        free(o);
    }
    return NULL;
}

static int push(uintptr_t handle, enum kind kind, uintptr_t a, uintptr_t b, uintptr_t c) {
    stream *s = (stream *)handle;
    op *o = calloc(1, sizeof *o);
    o->kind = kind;
    o->a = a;
    o->b = b;
    o->c = c;
    pthread_mutex_lock(&lock);
    int error = device_error;
    if (kind == RECORD) ((event *)a)->recorded = 1;
    if (s->last) s->last->next = o;
    else s->first = o;
    s->last = o;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return error;
}

int cuInit(unsigned flags) { (void)flags; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return index ? 101 : 0; }
int cuDevicePrimaryCtxRetain(uintptr_t *out, int device) { (void)device; *out = context; return 0; }
int cuCtxGetCurrent(uintptr_t *out) { *out = depth ? current[depth - 1] : 0; return 0; }
int cuCtxSetCurrent(uintptr_t c) { depth = 1; current[0] = c; return 0; }
int cuCtxPushCurrent_v2(uintptr_t c) { current[depth++] = c; return 0; }
int cuCtxPopCurrent_v2(uintptr_t *out) { *out = current[--depth]; return 0; }

/* Streaming multiprocessors: a device's, and how they can be split. */
static int device_sms = 132, sm_unit = 8, sm_minimum = 8, sm_refusal, has_priorities = 1;
static const char *device_name = "Simulated GPU";
static int green_contexts;

int cuStreamCreateWithPriority(uintptr_t *out, unsigned flags, int priority) {
    (void)flags;
    stream *s = calloc(1, sizeof *s);
    s->priority = priority;
    s->sms = device_sms;
    pthread_mutex_lock(&lock);
    s->next = streams;
    streams = s;
    pthread_mutex_unlock(&lock);
    pthread_create(&s->thread, NULL, work, s);
    *out = (uintptr_t)s;
    return 0;
}

typedef struct resource {
    int type;
    unsigned char padding[92];
    unsigned sms, first; /* the driver keeps its own data behind the count, and so does this */
    unsigned char rest[40];
} resource;

typedef struct green {
    unsigned sms, first;
} green;

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 16 ? device_sms : attribute == 78 ? has_priorities : 0;
    return 0;
}

int cuDeviceGetName(char *name, int size, int device) {
    (void)device;
    strncpy(name, device_name, (size_t)size);
    return 0;
}

int cuDeviceGetDevResource(int device, resource *out, int type) {
    (void)device;
    if (sm_refusal) return sm_refusal;
    memset(out, 0, sizeof *out);
    out->type = type;
    out->sms = (unsigned)device_sms;
    return type == 1 ? 0 : 1;
}

int cuDevSmResourceSplitByCount(resource *groups, unsigned *count, const resource *from,
                                resource *rest, unsigned flags, unsigned minimum) {
    unsigned unit = (unsigned)sm_unit, least = (unsigned)sm_minimum;
    unsigned sms = minimum < least ? least : minimum;
    (void)flags;
    sms = (sms + unit - 1) / unit * unit;
    if (*count != 1 || sms > from->sms) return 914;
    *groups = *rest = *from;
    groups->sms = sms;
    rest->first += sms;
    rest->sms -= sms;
    return 0;
}

int cuDevResourceGenerateDesc(uintptr_t *out, const resource *resources, unsigned count) {
    if (count != 1 || !resources->sms) return 1;
    green *g = malloc(sizeof *g);
    *g = (green){resources->sms, resources->first};
    *out = (uintptr_t)g;
    return 0;
}

int cuGreenCtxCreate(uintptr_t *out, uintptr_t desc, int device, unsigned flags) {
    (void)device;
    green_contexts++;
    *out = desc;
    return flags == 1 ? 0 : 1;
}

int cuGreenCtxStreamCreate(uintptr_t *out, uintptr_t context, unsigned flags, int priority) {
    int code = flags == 1 ? cuStreamCreateWithPriority(out, flags, priority) : 1;
    if (code) return code;
    ((stream *)*out)->first_sm = (int)((green *)context)->first;
    ((stream *)*out)->sms = (int)((green *)context)->sms;
    return 0;
}

int cuStreamQuery(uintptr_t handle) {
    stream *s = (stream *)handle;
    pthread_mutex_lock(&lock);
    int code = device_error ? device_error : (s->first || s->running) ? 600 : 0;
    pthread_mutex_unlock(&lock);
    return code;
}

int cuStreamWaitEvent(uintptr_t s, uintptr_t e, unsigned flags) {
    (void)flags;
    return ((event *)e)->recorded ? push(s, WAIT, e, 0, 0) : 0;
}

int cuStreamWriteValue32_v2(uintptr_t s, uint64_t at, uint32_t value, unsigned flags) {
    (void)flags;
    return push(s, WRITE, at, value, 0);
}

int cuStreamWaitValue32_v2(uintptr_t s, uint64_t at, uint32_t value, unsigned flags) {
    (void)flags;
    return push(s, GATE, at, value, 0);
}

int cuLaunchHostFunc(uintptr_t s, uintptr_t function, uintptr_t data) {
    return push(s, HOST, function, data, 0);
}

int cuMemcpyDtoHAsync_v2(uintptr_t to, uint64_t from, size_t size, uintptr_t s) {
    return push(s, COPY, to, from, size);
}

int cuEventCreate(uintptr_t *out, unsigned flags) {
    (void)flags;
    *out = (uintptr_t)calloc(1, sizeof(event));
    return 0;
}

int cuEventDestroy_v2(uintptr_t e) { (void)e; return 0; }
int cuEventRecord(uintptr_t e, uintptr_t s) { return push(s, RECORD, e, 0, 0); }

int cuEventQuery(uintptr_t handle) {
    event *e = (event *)handle;
    pthread_mutex_lock(&lock);
    int code = device_error ? device_error : e->recorded && !e->reached ? 600 : 0;
    pthread_mutex_unlock(&lock);
    return code;
}

int cuEventSynchronize(uintptr_t handle) {
    event *e = (event *)handle;
    pthread_mutex_lock(&lock);
    while (e->recorded && !e->reached && !device_error) pthread_cond_wait(&changed, &lock);
    int code = device_error;
    pthread_mutex_unlock(&lock);
    return code;
}

int cuEventElapsedTime(float *ms, uintptr_t from, uintptr_t to) {
    event *a = (event *)from, *b = (event *)to;
    pthread_mutex_lock(&lock);
    int open = !a->reached || !b->reached;
    *ms = (float)((double)(b->time - a->time) / 1e6);
    pthread_mutex_unlock(&lock);
    return open ? 600 : 0;
}

int cuMemHostAlloc(uintptr_t *out, size_t size, unsigned flags) {
    (void)flags;
    void *memory = NULL;
    int code = posix_memalign(&memory, 64, size);
    *out = (uintptr_t)memory;
    return code;
}

int cuMemHostGetDevicePointer_v2(uint64_t *out, uintptr_t host, unsigned flags) {
    (void)flags;
    *out = host;
    return 0;
}

int cuGetErrorName(int code, const char **name) {
    *name = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 101 ? "CUDA_ERROR_INVALID_DEVICE"
                                                                    : "CUDA_ERROR_UNKNOWN";
    return 0;
}

/* What a test adds to the driver. */
void fakeSms(int sms, int unit, int minimum, int refusal, int priorities, const char *name) {
    device_sms = sms;
    sm_unit = unit;
    sm_minimum = minimum;
    sm_refusal = refusal;
    has_priorities = priorities;
    device_name = name;
}
int fakeGreenContexts(void) { return green_contexts; }
int fakeFirstSm(uintptr_t s) { return ((stream *)s)->first_sm; }
int fakeNumSms(uintptr_t s) { return ((stream *)s)->sms; }
int fakePriority(uintptr_t s) { return ((stream *)s)->priority; }
int fakeDepth(void) { return depth; }
int fakeKernel(uintptr_t s, uint64_t ns) { return push(s, KERNEL, ns, 0, 0); }
int fakeFault(uintptr_t s) { return push(s, FAULT, 0, 0, 0); }
void fakeHeal(void) {
    pthread_mutex_lock(&lock);
    device_error = 0;
    pthread_mutex_unlock(&lock);
}
