/* Python's view of the CPU kernels: `Model`, filled a tensor at a time, then `forward`.
 *
 * Shapes and ranges are checked by aengine.kernels.native, which is the only caller; what is checked
 * here is what would corrupt memory if that were wrong in size.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "_cpu_forward.h"

static const char CAPSULE[] = "aengine_ext._cpu.model";
enum { SPIN_US = 50 };

static const struct cpu_kernels *pick_kernels(const char *wanted)
{
    const struct cpu_kernels *all[] = {cpu_kernels_avx512(), cpu_kernels_avxvnni(),
                                       cpu_kernels_avx2(), cpu_kernels_neon(),
                                       cpu_kernels_portable()};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] && (!*wanted || !strcmp(all[i]->name, wanted)))
            return all[i];
    return NULL;
}

static void free_model(struct cpu_model *m)
{
    int64_t matrices = m->layers * W_PER_LAYER + 2, vectors = m->layers * V_PER_LAYER + 1;
    if (m->matrices)
        for (int64_t i = 0; i < matrices; i++)
            cpu_matrix_free(&m->matrices[i]);
    if (m->vectors)
        for (int64_t i = 0; i < vectors; i++)
            free(m->vectors[i]);
    if (m->pool)
        cpu_pool_free(m->pool);
    free(m->matrices);
    free(m->vectors);
    free(m->inv_freq);
    free(m->memory);
    free(m);
}

static void destroy(PyObject *capsule)
{
    struct cpu_model *m = PyCapsule_GetPointer(capsule, CAPSULE);
    if (m)
        free_model(m);
}

static struct cpu_model *model_of(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, CAPSULE);
}

static PyObject *isas(PyObject *self, PyObject *args)
{
    (void)self;
    (void)args;
    const char *names[] = {"avx512", "avxvnni", "avx2", "neon", "portable"};
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < sizeof names / sizeof *names; i++) {
        const struct cpu_kernels *found = pick_kernels(names[i]);
        if (!found || strcmp(found->name, names[i]))
            continue;
        PyObject *name = PyUnicode_FromString(names[i]);
        if (!name || PyList_Append(list, name))
            Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

static PyObject *row_bytes(PyObject *self, PyObject *args)
{
    int type;
    long long cols;
    (void)self;
    if (!PyArg_ParseTuple(args, "iL", &type, &cols))
        return NULL;
    return PyLong_FromSize_t(cols > 0 ? cpu_raw_row_bytes(type, cols) : 0);
}

static PyObject *new_model(PyObject *self, PyObject *args)
{
    long long layers, hidden, inner, heads, kv_heads, dim, vocab;
    double eps;
    int threads;
    const char *isa;
    Py_buffer freq;
    (void)self;
    if (!PyArg_ParseTuple(args, "LLLLLLLdiy*s", &layers, &hidden, &inner, &heads, &kv_heads, &dim,
                          &vocab, &eps, &threads, &freq, &isa))
        return NULL;
    const struct cpu_kernels *kernels = pick_kernels(isa);
    struct cpu_model *m = NULL;
    if (!kernels) {
        PyErr_Format(PyExc_ValueError, "this processor has no instruction set %s", isa);
        goto out;
    }
    if (layers < 1 || hidden < 1 || inner < 1 || heads < 1 || kv_heads < 1 || heads % kv_heads ||
        heads / kv_heads > CPU_MAX_QUERIES || dim < 1 || vocab < 1 || threads < 1 ||
        freq.len != (Py_ssize_t)(dim / 2 * 4)) {
        PyErr_SetString(PyExc_ValueError, "the sizes do not fit each other");
        goto out;
    }
    m = calloc(1, sizeof *m);
    if (!m) {
        PyErr_NoMemory();
        goto out;
    }
    m->layers = layers;
    m->hidden = hidden;
    m->inner = inner;
    m->heads = heads;
    m->kv_heads = kv_heads;
    m->dim = dim;
    m->vocab = vocab;
    m->eps = (float)eps;
    m->kernels = kernels;
    m->inv_freq = malloc((size_t)freq.len);
    m->matrices = calloc((size_t)layers * W_PER_LAYER + 2, sizeof *m->matrices);
    m->vectors = calloc((size_t)layers * V_PER_LAYER + 1, sizeof *m->vectors);
    m->pool = cpu_pool_new(threads, SPIN_US);
    if (!m->inv_freq || !m->matrices || !m->vectors || !m->pool) {
        free_model(m);
        m = NULL;
        PyErr_NoMemory();
        goto out;
    }
    memcpy(m->inv_freq, freq.buf, (size_t)freq.len);
out:
    PyBuffer_Release(&freq);
    return m ? PyCapsule_New(m, CAPSULE, destroy) : NULL;
}

static PyObject *set_matrix(PyObject *self, PyObject *args)
{
    PyObject *capsule;
    long long index, rows, cols;
    int type, int8, failed;
    Py_buffer raw;
    (void)self;
    if (!PyArg_ParseTuple(args, "OLiLLpy*", &capsule, &index, &type, &rows, &cols, &int8, &raw))
        return NULL;
    struct cpu_model *m = model_of(capsule);
    size_t bytes = cols > 0 ? cpu_raw_row_bytes(type, cols) : 0;
    if (m && (index < 0 || index >= m->layers * W_PER_LAYER + 2 || m->matrices[index].data ||
              rows < 1 || !bytes || (size_t)raw.len != bytes * (size_t)rows)) {
        PyErr_SetString(PyExc_ValueError, "the matrix does not have the size that it should");
        m = NULL;
    }
    if (!m) {
        PyBuffer_Release(&raw);
        return NULL;
    }
    struct cpu_matrix *w = &m->matrices[index];
    Py_BEGIN_ALLOW_THREADS
    failed = cpu_matrix_pack(w, type, rows, cols, raw.buf);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&raw);
    if (failed)
        return PyErr_NoMemory();
    w->int8 = int8 && cpu_is_int(w);
    return PyLong_FromSize_t(cpu_matrix_bytes(w));
}

static PyObject *set_vector(PyObject *self, PyObject *args)
{
    PyObject *capsule;
    long long index;
    Py_buffer raw;
    (void)self;
    if (!PyArg_ParseTuple(args, "OLy*", &capsule, &index, &raw))
        return NULL;
    struct cpu_model *m = model_of(capsule);
    if (m && (index < 0 || index >= m->layers * V_PER_LAYER + 1 || m->vectors[index])) {
        PyErr_SetString(PyExc_ValueError, "there is no such vector, or it was set before");
        m = NULL;
    }
    float *copy = m ? malloc((size_t)raw.len) : NULL;
    if (copy)
        memcpy(copy, raw.buf, (size_t)raw.len);
    else if (m)
        PyErr_NoMemory();
    PyBuffer_Release(&raw);
    if (!copy)
        return NULL;
    m->vectors[index] = copy;
    Py_RETURN_NONE;
}

static int addresses(PyObject *sequence, int64_t count, void **out)
{
    if (PySequence_Size(sequence) != (Py_ssize_t)count)
        return -1;
    for (int64_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(sequence, (Py_ssize_t)i);
        out[i] = item ? PyLong_AsVoidPtr(item) : NULL;
        Py_XDECREF(item);
        if (!out[i])
            return -1;
    }
    return 0;
}

static PyObject *forward(PyObject *self, PyObject *args)
{
    PyObject *capsule, *keys, *values;
    long long tokens, rows, logits, width, block_size;
    unsigned long long ids, positions, slots, index, starts, tables, out;
    int kv_itemsize;
    (void)self;
    if (!PyArg_ParseTuple(args, "OLLLLLKKKKKKKOOi", &capsule, &tokens, &rows, &logits, &width,
                          &block_size, &ids, &positions, &slots, &index, &starts, &tables, &out,
                          &keys, &values, &kv_itemsize))
        return NULL;
    struct cpu_model *m = model_of(capsule);
    if (!m)
        return NULL;
    if (kv_itemsize != 2 && kv_itemsize != 4) {
        PyErr_SetString(PyExc_ValueError, "keys and values: of 2 or 4 bytes");
        return NULL;
    }
    int64_t matrices = m->layers * W_PER_LAYER + 1;
    for (int64_t i = 0; i < matrices; i++)
        if (!m->matrices[i].data) {
            PyErr_SetString(PyExc_ValueError, "not all matrices are set");
            return NULL;
        }
    /* The GIL is held: this is the lock. */
    if (m->busy) {
        PyErr_SetString(PyExc_RuntimeError, "the model is computing a step already");
        return NULL;
    }
    void **kv = malloc((size_t)m->layers * 2 * sizeof *kv);
    if (!kv)
        return PyErr_NoMemory();
    if (addresses(keys, m->layers, kv) || addresses(values, m->layers, kv + m->layers)) {
        free(kv);
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "keys and values: one address a layer");
        return NULL;
    }
    struct cpu_step step = {
        .tokens = tokens,
        .rows = rows,
        .logits = logits,
        .table_width = width,
        .block_size = block_size,
        .token_ids = (const int64_t *)(uintptr_t)ids,
        .positions = (const int64_t *)(uintptr_t)positions,
        .slots = (const int64_t *)(uintptr_t)slots,
        .logit_index = (const int64_t *)(uintptr_t)index,
        .query_start = (const int32_t *)(uintptr_t)starts,
        .tables = (const int32_t *)(uintptr_t)tables,
        .keys = kv,
        .values = kv + m->layers,
        .kv_half = kv_itemsize == 2,
        .out = (float *)(uintptr_t)out,
    };
    int failed;
    m->busy = 1;
    Py_BEGIN_ALLOW_THREADS
    failed = cpu_forward(m, &step);
    Py_END_ALLOW_THREADS
    m->busy = 0;
    free(kv);
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *isa_of(PyObject *self, PyObject *capsule)
{
    (void)self;
    struct cpu_model *m = model_of(capsule);
    return m ? PyUnicode_FromString(m->kernels->name) : NULL;
}

static PyMethodDef methods[] = {
    {"isas", isas, METH_NOARGS, "Instruction sets that this processor has, best first."},
    {"row_bytes", row_bytes, METH_VARARGS, "Bytes of a stored row; 0 for what cannot be packed."},
    {"new_model", new_model, METH_VARARGS, "An empty model."},
    {"set_matrix", set_matrix, METH_VARARGS, "Pack a matrix; the bytes it takes."},
    {"set_vector", set_vector, METH_VARARGS, "Copy a float32 vector."},
    {"forward", forward, METH_VARARGS, "One step, without the GIL."},
    {"isa_of", isa_of, METH_O, "The instruction set that a model uses."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_cpu", "CPU kernels: a decoder's step in one call.", 0, methods,
    NULL,                  NULL,   NULL,                                        NULL,
};

PyMODINIT_FUNC PyInit__cpu(void) { return PyModuleDef_Init(&definition); }
