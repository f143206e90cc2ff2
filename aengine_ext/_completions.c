/* Completion queue, timer, GIL-free spin and launch lists beneath aengine.device.
 *
 * Knows nothing of CUDA, torch or aengine: driver functions arrive as addresses. Limited API, so one
 * build serves every Python from 3.11 on. Linux only (eventfd, timerfd); elsewhere the import fails
 * and the pure-Python reactor takes over.
 */
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <Python.h>

#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__) || defined(__i386__)
#define CPU_RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define CPU_RELAX() __asm__ __volatile__("yield")
#else
#define CPU_RELAX() ((void)0)
#endif

#define MAX_CALL_ARGS 12
#define SLEEP_SLICE_NS 500000

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static PyObject *new_type(PyObject *module, PyType_Spec *spec) {
    return PyType_FromModuleAndSpec(module, spec, NULL);
}

static void free_heap_object(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* -- the completion queue ----------------------------------------------------------------------
 *
 * A stack that posters push onto with one compare-and-swap and that the reader takes whole with one
 * exchange: no ABA problem, since nothing is ever popped singly. Posters run on threads without a
 * Python state (the driver's callback thread), so nothing here touches the interpreter.
 */

typedef struct core {
    atomic_long references; /* the Queue object and every ticket that was not drained */
    _Atomic(struct ticket *) top;
    atomic_int rung; /* the eventfd was written and not read since */
    int fd;
} core;

typedef struct ticket {
    core *queue;
    struct ticket *next;
    uint64_t id;
} ticket;

static void core_release(core *q) {
    if (atomic_fetch_sub(&q->references, 1) != 1) return;
    ticket *t = atomic_load(&q->top);
    while (t) {
        ticket *next = t->next;
        free(t);
        t = next;
    }
    close(q->fd);
    free(q);
}

static void core_ring(core *q) {
    if (atomic_exchange(&q->rung, 1)) return;
    uint64_t one = 1;
    /* Cannot fail but for a full counter, and then the reader has reason enough to wake. */
    ssize_t ignored = write(q->fd, &one, sizeof one);
    (void)ignored;
}

/* The function whose address is `post_address`: what the driver calls with a ticket. */
static void post_ticket(void *address) {
    ticket *t = address;
    core *q = t->queue;
    /* Once pushed, the ticket may be drained and freed, and with it its hold on the queue. */
    atomic_fetch_add(&q->references, 1);
    t->next = atomic_load(&q->top);
    while (!atomic_compare_exchange_weak(&q->top, &t->next, t)) {
    }
    core_ring(q);
    core_release(q);
}

typedef struct {
    PyObject_HEAD
    core *q;
    int closed;
} QueueObject;

static PyObject *queue_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    if (!PyArg_ParseTuple(args, ":Queue")) return NULL;
    core *q = calloc(1, sizeof *q);
    if (!q) return PyErr_NoMemory();
    q->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (q->fd < 0) {
        free(q);
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    atomic_store(&q->references, 1);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    QueueObject *self = (QueueObject *)allocate(type, 0);
    if (!self) {
        core_release(q);
        return NULL;
    }
    self->q = q;
    return (PyObject *)self;
}

static void queue_dealloc(PyObject *self) {
    core_release(((QueueObject *)self)->q);
    free_heap_object(self);
}

static core *queue_open(PyObject *self) {
    QueueObject *queue = (QueueObject *)self;
    if (!queue->closed) return queue->q;
    PyErr_SetString(PyExc_ValueError, "the queue is closed");
    return NULL;
}

static PyObject *queue_fileno(PyObject *self, PyObject *unused) {
    (void)unused;
    core *q = queue_open(self);
    return q ? PyLong_FromLong(q->fd) : NULL;
}

static ticket *make_ticket(PyObject *self, PyObject *id) {
    core *q = queue_open(self);
    if (!q) return NULL;
    uint64_t number = PyLong_AsUnsignedLongLong(id);
    if (PyErr_Occurred()) return NULL;
    ticket *t = malloc(sizeof *t);
    if (!t) {
        PyErr_NoMemory();
        return NULL;
    }
    t->queue = q;
    t->next = NULL;
    t->id = number;
    atomic_fetch_add(&q->references, 1);
    return t;
}

static PyObject *queue_ticket(PyObject *self, PyObject *id) {
    ticket *t = make_ticket(self, id);
    return t ? PyLong_FromVoidPtr(t) : NULL;
}

static PyObject *queue_discard(PyObject *self, PyObject *address) {
    (void)self;
    ticket *t = PyLong_AsVoidPtr(address);
    if (!t && PyErr_Occurred()) return NULL;
    if (t) {
        core *q = t->queue;
        free(t);
        core_release(q);
    }
    Py_RETURN_NONE;
}

static PyObject *queue_post(PyObject *self, PyObject *id) {
    ticket *t = make_ticket(self, id);
    if (!t) return NULL;
    post_ticket(t);
    Py_RETURN_NONE;
}

static PyObject *queue_ring(PyObject *self, PyObject *unused) {
    (void)unused;
    /* A closed queue is rung by posters that do not know yet; that is no error. */
    core_ring(((QueueObject *)self)->q);
    Py_RETURN_NONE;
}

static PyObject *queue_drain(PyObject *self, PyObject *unused) {
    (void)unused;
    core *q = ((QueueObject *)self)->q;
    PyObject *ids = PyList_New(0);
    if (!ids) return NULL;
    uint64_t count;
    ssize_t ignored = read(q->fd, &count, sizeof count);
    (void)ignored;
    /* Before the take: whoever pushes after the take finds rung == 0 and writes again. */
    atomic_store(&q->rung, 0);
    ticket *taken = atomic_exchange(&q->top, NULL);
    ticket *oldest = NULL;
    while (taken) {
        ticket *next = taken->next;
        taken->next = oldest;
        oldest = taken;
        taken = next;
    }
    int failed = 0;
    while (oldest) {
        ticket *next = oldest->next;
        if (!failed) {
            PyObject *id = PyLong_FromUnsignedLongLong(oldest->id);
            failed = !id || PyList_Append(ids, id) < 0;
            Py_XDECREF(id);
        }
        free(oldest);
        core_release(q);
        oldest = next;
    }
    if (failed) {
        Py_DECREF(ids);
        return NULL;
    }
    return ids;
}

static PyObject *queue_close(PyObject *self, PyObject *unused) {
    (void)unused;
    /* The descriptor stays open until the last ticket has come back: a driver thread may be about
     * to write to it, and its number must not belong to somebody else by then. */
    ((QueueObject *)self)->closed = 1;
    Py_RETURN_NONE;
}

static PyMethodDef queue_methods[] = {
    {"fileno", queue_fileno, METH_NOARGS, "The eventfd: readable when something was posted."},
    {"ticket", queue_ticket, METH_O, "ticket(id) -> address to hand to post_address, once."},
    {"discard", queue_discard, METH_O, "Free a ticket that nobody will post."},
    {"post", queue_post, METH_O, "post(id): what post_address does with a ticket of that id."},
    {"ring", queue_ring, METH_NOARGS, "Make the eventfd readable."},
    {"drain", queue_drain, METH_NOARGS, "The posted ids, oldest first; resets the eventfd."},
    {"close", queue_close, METH_NOARGS, "Take no new tickets. Idempotent."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot queue_slots[] = {
    {Py_tp_new, queue_new},
    {Py_tp_dealloc, queue_dealloc},
    {Py_tp_methods, queue_methods},
    {Py_tp_doc, "A lock-free queue of ids with an eventfd that is written once for many posts."},
    {0, NULL},
};

static PyType_Spec queue_spec = {
    .name = "aengine_ext._completions.Queue",
    .basicsize = sizeof(QueueObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = queue_slots,
};

/* -- the timer ----------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    int fd;
} TimerObject;

static PyObject *timer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    if (!PyArg_ParseTuple(args, ":Timer")) return NULL;
    int fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (fd < 0) return PyErr_SetFromErrno(PyExc_OSError);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    TimerObject *self = (TimerObject *)allocate(type, 0);
    if (!self) {
        close(fd);
        return NULL;
    }
    self->fd = fd;
    return (PyObject *)self;
}

static void timer_dealloc(PyObject *self) {
    close(((TimerObject *)self)->fd);
    free_heap_object(self);
}

static PyObject *timer_fileno(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(((TimerObject *)self)->fd);
}

static PyObject *timer_arm(PyObject *self, PyObject *deadline) {
    long long at = PyLong_AsLongLong(deadline);
    if (at == -1 && PyErr_Occurred()) return NULL;
    /* Zero would disarm; a time in the past fires at once, as asked. */
    if (at < 1) at = 1;
    struct itimerspec spec = {.it_value = {at / 1000000000, at % 1000000000}};
    if (timerfd_settime(((TimerObject *)self)->fd, TFD_TIMER_ABSTIME, &spec, NULL) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *timer_drain(PyObject *self, PyObject *unused) {
    (void)unused;
    uint64_t count;
    ssize_t got = read(((TimerObject *)self)->fd, &count, sizeof count);
    return PyBool_FromLong(got == sizeof count);
}

static PyMethodDef timer_methods[] = {
    {"fileno", timer_fileno, METH_NOARGS, "The timerfd: readable when the time has come."},
    {"arm", timer_arm, METH_O, "arm(deadline): absolute ns of time.perf_counter_ns()."},
    {"drain", timer_drain, METH_NOARGS, "Reset the descriptor; whether the timer had fired."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot timer_slots[] = {
    {Py_tp_new, timer_new},
    {Py_tp_dealloc, timer_dealloc},
    {Py_tp_methods, timer_methods},
    {Py_tp_doc, "A timer finer than an event loop's: a descriptor that becomes readable."},
    {0, NULL},
};

static PyType_Spec timer_spec = {
    .name = "aengine_ext._completions.Timer",
    .basicsize = sizeof(TimerObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = timer_slots,
};

/* -- the launch list ----------------------------------------------------------------------------- */

/* Every call passes twelve 64-bit integers. In the C calling conventions of x86-64 and AArch64
 * Linux a function of fewer (or narrower) integer and pointer parameters ignores the rest. */
typedef uint64_t word;
typedef int (*driver_call)(word, word, word, word, word, word, word, word, word, word, word, word);

typedef struct {
    driver_call function;
    word args[MAX_CALL_ARGS];
} prepared_call;

typedef struct {
    Py_ssize_t call, arg;
} slot;

typedef struct {
    PyObject_HEAD
    prepared_call *calls;
    slot *slots;
    Py_ssize_t num_calls, num_slots;
    Py_ssize_t failed; /* index of the call that failed in the last run; num_calls: none */
} LaunchListObject;

static int read_word(PyObject *value, word *out) {
    *out = PyLong_AsUnsignedLongLongMask(value);
    return *out == (word)-1 && PyErr_Occurred() ? -1 : 0;
}

static int read_call(PyObject *item, prepared_call *call) {
    PyObject *address, *args;
    if (!PyArg_ParseTuple(item, "OO!:LaunchList", &address, &PyTuple_Type, &args)) return -1;
    word function;
    if (read_word(address, &function) < 0) return -1;
    if (!function) {
        PyErr_SetString(PyExc_ValueError, "a call has the null address");
        return -1;
    }
    call->function = (driver_call)(uintptr_t)function;
    Py_ssize_t count = PyTuple_Size(args);
    if (count > MAX_CALL_ARGS) {
        PyErr_Format(PyExc_ValueError, "a call takes at most %d arguments", MAX_CALL_ARGS);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (read_word(PyTuple_GetItem(args, i), &call->args[i]) < 0) return -1;
    return 0;
}

static int read_slot(PyObject *item, LaunchListObject *list, slot *out) {
    if (!PyArg_ParseTuple(item, "nn:LaunchList", &out->call, &out->arg)) return -1;
    if (out->call < 0 || out->call >= list->num_calls || out->arg < 0 || out->arg >= MAX_CALL_ARGS) {
        PyErr_SetString(PyExc_IndexError, "a slot names no argument of the list");
        return -1;
    }
    return 0;
}

static int fill_list(LaunchListObject *self, PyObject *calls, PyObject *slots) {
    Py_ssize_t num_calls = PyTuple_Size(calls), num_slots = PyTuple_Size(slots);
    self->calls = calloc(num_calls ? num_calls : 1, sizeof *self->calls);
    self->slots = calloc(num_slots ? num_slots : 1, sizeof *self->slots);
    if (!self->calls || !self->slots) {
        PyErr_NoMemory();
        return -1;
    }
    self->num_calls = self->failed = num_calls;
    self->num_slots = num_slots;
    for (Py_ssize_t i = 0; i < num_calls; i++)
        if (read_call(PyTuple_GetItem(calls, i), &self->calls[i]) < 0) return -1;
    for (Py_ssize_t i = 0; i < num_slots; i++)
        if (read_slot(PyTuple_GetItem(slots, i), self, &self->slots[i]) < 0) return -1;
    return 0;
}

static PyObject *list_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    PyObject *calls, *slots = NULL;
    if (!PyArg_ParseTuple(args, "O!|O!:LaunchList", &PyTuple_Type, &calls, &PyTuple_Type, &slots))
        return NULL;
    PyObject *none = slots ? NULL : PyTuple_New(0);
    if (!slots && !none) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *self = allocate(type, 0);
    if (self && fill_list((LaunchListObject *)self, calls, slots ? slots : none) < 0) {
        Py_DECREF(self);
        self = NULL;
    }
    Py_XDECREF(none);
    return self;
}

static void list_dealloc(PyObject *self) {
    free(((LaunchListObject *)self)->calls);
    free(((LaunchListObject *)self)->slots);
    free_heap_object(self);
}

/* The GIL is held on purpose: each call takes microseconds, and to let it go would cost a thread
 * beside a busy one up to a switch interval (5 ms) to get it back. */
static PyObject *list_run(PyObject *object, PyObject *values) {
    LaunchListObject *self = (LaunchListObject *)object;
    if (PyTuple_Size(values) != self->num_slots) {
        PyErr_Format(PyExc_TypeError, "the list has %zd slots", self->num_slots);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < self->num_slots; i++) {
        slot *s = &self->slots[i];
        if (read_word(PyTuple_GetItem(values, i), &self->calls[s->call].args[s->arg]) < 0)
            return NULL;
    }
    self->failed = self->num_calls;
    for (Py_ssize_t i = 0; i < self->num_calls; i++) {
        word *a = self->calls[i].args;
        int code = self->calls[i].function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8],
                                           a[9], a[10], a[11]);
        if (code) {
            self->failed = i;
            return PyLong_FromLong(code);
        }
    }
    return PyLong_FromLong(0);
}

static PyObject *list_failed(PyObject *object, void *unused) {
    (void)unused;
    LaunchListObject *self = (LaunchListObject *)object;
    if (self->failed == self->num_calls) Py_RETURN_NONE;
    return PyLong_FromSsize_t(self->failed);
}

static PyMethodDef list_methods[] = {
    {"run", list_run, METH_VARARGS,
     "run(*slot_values) -> 0, or the code of the first call that did not return 0."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef list_getset[] = {
    {"failed_call", list_failed, NULL, "Index of the call that failed in the last run, or None.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot list_slots[] = {
    {Py_tp_new, list_new},
    {Py_tp_dealloc, list_dealloc},
    {Py_tp_methods, list_methods},
    {Py_tp_getset, list_getset},
    {Py_tp_doc,
     "LaunchList(calls, slots=()): calls made in order with the GIL held. A call is (address, "
     "(int, ...)); a slot (call, argument) names an argument that each run gives anew."},
    {0, NULL},
};

static PyType_Spec list_spec = {
    .name = "aengine_ext._completions.LaunchList",
    .basicsize = sizeof(LaunchListObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = list_slots,
};

/* -- functions ----------------------------------------------------------------------------------- */

static int reached(const _Atomic uint32_t *flag, uint32_t target) {
    /* Sequence numbers wrap; the signed difference tells which is later. */
    return (int32_t)(atomic_load_explicit(flag, memory_order_acquire) - target) >= 0;
}

typedef struct {
    const _Atomic uint32_t *flag;
    uint32_t target;
} awaited_t;

enum { TIMED_OUT = -1, OTHER_CAME = 0, MOST_OTHERS = 31 };

/* Returns when the first of the flags was seen, OTHER_CAME if it was another, or TIMED_OUT. Sleeps in
 * slices until `spin_from`, since what is waited for may come early; then spins. */
static int64_t await_flag(const awaited_t *flags, int count, int64_t spin_from, int64_t limit) {
    int64_t now = now_ns();
    while (now < spin_from) {
        for (int f = 0; f < count; f++)
            if (reached(flags[f].flag, flags[f].target)) return f ? OTHER_CAME : now;
        int64_t until = now + SLEEP_SLICE_NS < spin_from ? now + SLEEP_SLICE_NS : spin_from;
        struct timespec at = {until / 1000000000, until % 1000000000};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
        now = now_ns();
    }
    do {
        for (int i = 0; i < 32; i++) {
            for (int f = 0; f < count; f++)
                if (reached(flags[f].flag, flags[f].target)) return f ? OTHER_CAME : now_ns();
            CPU_RELAX();
        }
    } while (now_ns() < limit);
    return TIMED_OUT;
}

/* One flag from an address and a target; 0, or -1 with an exception. */
static int read_awaited(awaited_t *into, PyObject *address, PyObject *target) {
    into->flag = PyLong_AsVoidPtr(address);
    if (!into->flag) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the null address");
        return -1;
    }
    unsigned long value = PyLong_AsUnsignedLong(target);
    if (value == (unsigned long)-1 && PyErr_Occurred()) return -1;
    into->target = (uint32_t)value;
    return 0;
}

static PyObject *wait_flag(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *address, *target, *others = NULL;
    long long spin_from, limit;
    int hold = 0;
    if (!PyArg_ParseTuple(args, "OOLL|pO!:wait_flag", &address, &target, &spin_from, &limit, &hold,
                          &PyTuple_Type, &others))
        return NULL;
    awaited_t flags[1 + MOST_OTHERS];
    int count = 1;
    if (read_awaited(flags, address, target) < 0) return NULL;
    Py_ssize_t more = others ? PyTuple_Size(others) : 0;
    /* More than there is room for are left out: whoever waits for those has another way to hear. */
    for (Py_ssize_t i = 0; i + 1 < more && count < 1 + MOST_OTHERS; i += 2)
        if (read_awaited(flags + count++, PyTuple_GetItem(others, i), PyTuple_GetItem(others, i + 1)) < 0)
            return NULL;
    int64_t seen;
    if (hold) {
        seen = await_flag(flags, count, 0, limit);
    } else {
        Py_BEGIN_ALLOW_THREADS
        seen = await_flag(flags, count, spin_from, limit);
        Py_END_ALLOW_THREADS
    }
    if (seen == TIMED_OUT) Py_RETURN_NONE;
    return PyLong_FromLongLong(seen);
}

static PyObject *flag_reached(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *address;
    unsigned int target;
    if (!PyArg_ParseTuple(args, "OI:flag_reached", &address, &target)) return NULL;
    const _Atomic uint32_t *flag = PyLong_AsVoidPtr(address);
    if (!flag) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the null address");
        return NULL;
    }
    return PyBool_FromLong(reached(flag, target));
}

static PyObject *symbol(PyObject *module, PyObject *args) {
    (void)module;
    const char *library, *name;
    if (!PyArg_ParseTuple(args, "ss:symbol", &library, &name)) return NULL;
    void *handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) return PyErr_Format(PyExc_LookupError, "%s is not loaded", library);
    void *address = dlsym(handle, name);
    dlclose(handle); /* only our own reference: whoever loaded it holds another */
    if (!address) return PyErr_Format(PyExc_LookupError, "%s has no symbol %s", library, name);
    return PyLong_FromVoidPtr(address);
}

static PyMethodDef functions[] = {
    {"wait_flag", wait_flag, METH_VARARGS,
     "wait_flag(address, target, spin_from_ns, limit_ns, hold_gil=False, others=()) -> when the "
     "32-bit word was seen to have reached target; 0: another did before it; None: the limit."},
    {"flag_reached", flag_reached, METH_VARARGS, "Whether the 32-bit word has reached target."},
    {"symbol", symbol, METH_VARARGS, "symbol(library, name) -> address, of a library already loaded."},
    {NULL, NULL, 0, NULL},
};

static int add_type(PyObject *module, const char *name, PyType_Spec *spec) {
    PyObject *type = new_type(module, spec);
    if (!type) return -1;
    int failed = PyModule_AddObjectRef(module, name, type);
    Py_DECREF(type);
    return failed;
}

static int exec_module(PyObject *module) {
    if (add_type(module, "Queue", &queue_spec) < 0 || add_type(module, "Timer", &timer_spec) < 0 ||
        add_type(module, "LaunchList", &list_spec) < 0)
        return -1;
    PyObject *address = PyLong_FromVoidPtr((void *)post_ticket);
    if (!address) return -1;
    int failed = PyModule_AddObjectRef(module, "post_address", address);
    Py_DECREF(address);
    return failed;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, exec_module},
    {0, NULL},
};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "aengine_ext._completions",
    .m_doc = "Completion queue, timer, GIL-free spin and launch lists beneath aengine.device.",
    .m_methods = functions,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__completions(void) { return PyModuleDef_Init(&module_def); }
