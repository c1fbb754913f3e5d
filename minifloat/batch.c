/* Steps of a recorded program in one call: launches of compiled kernels, and products by cuBLASLt.
   And the keys of programs, as programs.py makes them, in less time.

   A plan is an array of 64-bit words, as batch.py writes it. A reference is two of them, (argument,
   number): the address given for that argument plus the number, or, where the argument is negative,
   the number itself. In a CUDA graph, launches aside run beside products. Nothing of CUDA is
   included or linked: the functions are given by address. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

enum { ADDRESSES = 256, PARAMETERS = 64, SCRATCH = 2 };
/* ASIDE: a launch that shares no memory with products before it, the last plan's included. */
enum { LAUNCH, PRODUCT, ASIDE };
/* Of a capture: its status, how its dependencies are updated, and how many are looked at. */
enum { CAPTURED = 1, ADD = 0, SET = 1, NODES = 8 };

typedef int64_t word;
typedef int (*launch_function)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                               unsigned, void *, void **, void **);
typedef int (*context_getter)(void **);
typedef int (*context_setter)(void *);
typedef int (*attribute_setter)(void *, int, const void *, size_t);
typedef int (*multiplier)(void *, void *, const void *, const void *, void *, const void *, void *,
                          const void *, const void *, void *, void *, void *, const void *, void *,
                          size_t, void *);
typedef int (*capture_getter)(void *, int *, uint64_t *, void **, void *const **, size_t *);
typedef int (*dependency_setter)(void *, void **, size_t, unsigned);

static launch_function launch;
static context_getter get_context;
static context_setter set_context;
static attribute_setter set_attribute;
static multiplier multiply;
static capture_getter get_capture;       /* NULL: everything waits for what was before it */
static dependency_setter set_dependencies;
/* A product's scales are attributes of its descriptor, which other threads may be using. */
static pthread_mutex_t descriptors = PTHREAD_MUTEX_INITIALIZER;

static inline word resolve(const word *reference, const word *addresses) {
    return reference[0] < 0 ? reference[1] : addresses[reference[0]] + reference[1];
}

/* [function, grid, threads, shared memory, n, n references] */
static int run_launch(const word **at, const word *addresses, void *stream) {
    const word *w = *at;
    word values[PARAMETERS + SCRATCH];
    void *parameters[PARAMETERS + SCRATCH];
    word n = w[4];
    *at = w + 5 + 2 * n;
    for (word i = 0; i < n + SCRATCH; i++) {
        values[i] = i < n ? resolve(w + 5 + 2 * i, addresses) : 0;
        parameters[i] = &values[i];
    }
    return launch((void *)w[0], (unsigned)w[1], 1, 1, (unsigned)w[2], 1, 1, (unsigned)w[3], stream,
                  parameters, NULL);
}

/* [handle, descriptor, layouts of a, b, c, d, algorithm, bytes of scratch, references to a, b, d and
   scratch, n, n times (attribute, reference)] */
static int run_product(const word **at, const word *addresses, void *stream) {
    static const float one = 1.0f, zero = 0.0f;
    const word *w = *at;
    word n = w[16];
    int status = 0;
    *at = w + 17 + 3 * n;
    void *a = (void *)resolve(w + 8, addresses), *b = (void *)resolve(w + 10, addresses);
    void *d = (void *)resolve(w + 12, addresses), *scratch = (void *)resolve(w + 14, addresses);
    pthread_mutex_lock(&descriptors);
    for (word i = 0; i < n && status == 0; i++) {
        const word *attribute = w + 17 + 3 * i;
        word address = resolve(attribute + 1, addresses);
        status = set_attribute((void *)w[1], (int)attribute[0], &address, sizeof address);
    }
    if (status == 0)
        status = multiply((void *)w[0], (void *)w[1], &one, a, (void *)w[2], b, (void *)w[3], &zero,
                          d, (void *)w[4], d, (void *)w[5], (const void *)w[6], scratch,
                          (size_t)w[7], stream);
    pthread_mutex_unlock(&descriptors);
    return status;
}

/* The products that this thread captured last, one behind the other, and launches aside of them:
   what either wait for, and their last nodes. What is captured behind waits for both, the products
   first: where they were a graph goes on at once, and elsewhere it waits. H200, the ends of two
   steps of scales beside products: a training step took 53.1 us for 55.7; products second, 57.6.
   (Products beside each other were no faster.) */
static _Thread_local struct {
    void *stream, *starts[NODES], *ends[2];
    uint64_t capture;
    int started, count; /* of starts and of ends; none is known where they are 0 */
    int open;
} group;

/* How many nodes what is captured next on a stream waits for, up to NODES of them; -1: nothing is
   captured, or it waits for more. (Not on the legacy stream, where it is an error to ask while
   others are captured.) */
static int tips(void *stream, uint64_t *capture, void **found) {
    int status = 0;
    size_t count = 0;
    void *graph = NULL, *const *nodes = NULL;
    if (get_capture == NULL || set_dependencies == NULL || stream == NULL ||
        get_capture(stream, &status, capture, &graph, &nodes, &count) != 0 ||
        status != CAPTURED || count > NODES)
        return -1;
    for (size_t i = 0; i < count; i++)
        found[i] = nodes[i];
    return (int)count;
}

static int is_captured(void *stream) {
    uint64_t capture;
    void *nodes[NODES];
    return tips(stream, &capture, nodes) >= 0;
}

/* Begin a group, if something has been captured that it can wait for. */
static void begin_group(void *stream) {
    group.stream = stream;
    group.count = 0;
    group.started = tips(stream, &group.capture, group.starts);
    group.open = group.started > 0;
}

/* Whether what was captured last on a stream is the group. */
static int is_group(void *stream) {
    uint64_t capture = 0;
    void *nodes[NODES];
    return group.count > 0 && stream == group.stream &&
           tips(stream, &capture, nodes) == group.count && capture == group.capture &&
           memcmp(nodes, group.ends, (size_t)group.count * sizeof *nodes) == 0;
}

/* Have what is captured next wait for all of the group. */
static int end_group(void) {
    group.open = 0;
    return group.count < 2 ? 0 : set_dependencies(group.stream, group.ends, 2, SET);
}

/* Have a step wait for what it must, and no more. */
static int before_step(word kind, void *stream) {
    int status = 0;
    if (group.open && (kind == LAUNCH || (kind == PRODUCT && group.count == 2)))
        status = end_group();
    if (!group.open && kind == PRODUCT && status == 0)
        begin_group(stream);
    else if (group.open && kind == ASIDE && group.count == 1)
        status = set_dependencies(stream, group.starts, (size_t)group.started, SET);
    return status;
}

/* Note the node of a step. */
static int after_step(word kind) {
    uint64_t capture;
    void *nodes[NODES];
    if (!group.open)
        return 0;
    if (tips(group.stream, &capture, nodes) == 1) {
        group.count = kind == ASIDE ? 2 : 1;
        group.ends[group.count - 1] = nodes[0];
        return 0;
    }
    group.open = 0; /* it is several nodes: wait for them, and for all else */
    size_t count = (size_t)group.count;
    group.count = 0;
    return kind == ASIDE ? set_dependencies(group.stream, group.ends, count, ADD) : 0;
}

/* run(plan, context, stream, *addresses): a plan is its number of steps, then each with its kind. */
static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    word addresses[ADDRESSES];
    if (count < 3 || count - 3 > ADDRESSES || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "run(plan, context, stream, *addresses)");
        return NULL;
    }
    const word *at = (const word *)PyBytes_AS_STRING(args[0]);
    void *wanted = PyLong_AsVoidPtr(args[1]), *stream = PyLong_AsVoidPtr(args[2]), *context = NULL;
    for (Py_ssize_t i = 3; i < count; i++)
        addresses[i - 3] = (word)PyLong_AsVoidPtr(args[i]);
    if (PyErr_Occurred())
        return NULL;
    word steps = *at++, i = 0;
    const char *who = "the CUDA driver";
    int status, captured;
    Py_BEGIN_ALLOW_THREADS;
    /* A thread that has done nothing on the device has no context yet. */
    status = get_context(&context);
    if (status == 0 && context == NULL)
        status = set_context(wanted);
    captured = is_captured(stream);
    if (captured)
        group.open = steps > 0 && *at == ASIDE && is_group(stream);
    for (; i < steps && status == 0; i++) {
        word kind = *at++;
        status = captured ? before_step(kind, stream) : 0;
        if (status != 0)
            continue;
        if (kind == LAUNCH || kind == ASIDE)
            status = run_launch(&at, addresses, stream);
        else if ((status = run_product(&at, addresses, stream)) != 0)
            who = "cuBLASLt";
        if (status == 0 && captured)
            status = after_step(kind);
    }
    if (status == 0 && captured && group.open)
        status = end_group();
    Py_END_ALLOW_THREADS;
    if (status != 0)
        return PyErr_Format(PyExc_RuntimeError,
                            "minifloat: step %lld of a recorded program failed: %s returned %d",
                            (long long)i, who, status);
    Py_RETURN_NONE;
}

enum { PLAIN, TENSOR, SEVERAL, INTERNED, FOREIGN, TOLD };

static PyObject *get_device, *shape, *stride, *dtype, *data_ptr, *told;

/* Whether list takes a new reference, which may be NULL after an error. */
static inline int append(PyObject *list, PyObject *item) {
    int status = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return status == 0;
}

/* An integer that a method of an object returns; -1 with an error set, if it does not. */
static int64_t ask(PyObject *object, PyObject *method) {
    PyObject *found = PyObject_CallMethodNoArgs(object, method);
    int64_t value = found == NULL ? -1 : (int64_t)PyLong_AsUnsignedLongLongMask(found);
    Py_XDECREF(found);
    return value;
}

/* What was told of a tuple once, (key, tensors, index of their device), again; a `tell`. */
static int repeat(PyObject *all, PyObject *key, PyObject *found, long index) {
    PyObject *its_key, *tensors;
    long where;
    if (!PyArg_ParseTuple(all, "OO!l", &its_key, &PyTuple_Type, &tensors, &where))
        return -1;
    if (where != index)
        return 0;
    int status = PyList_Append(key, its_key);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors) && status == 0; i++)
        status = PyList_Append(found, PyTuple_GET_ITEM(tensors, i));
    return status == 0 ? 1 : -1;
}

/* 1: told, 0: of something that no key tells, -1: an error is set. programs.walk says it in Python. */
static int tell(PyObject *parts, PyObject *part_of, PyObject *value, PyObject *key, PyObject *found,
                long index) {
    PyObject *items = PySequence_Fast(value, "walk: a tuple or a list is needed");
    if (items == NULL)
        return -1;
    int status = 1;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items) && status == 1; i++) {
        PyObject *v = PySequence_Fast_GET_ITEM(items, i), *kind = (PyObject *)Py_TYPE(v);
        PyObject *part = PyDict_GetItemWithError(parts, kind), *made = NULL;
        if (part == NULL && !PyErr_Occurred()) {
            part = made = PyObject_CallOneArg(part_of, kind);
            if (part != NULL && PyDict_SetItem(parts, kind, part) != 0)
                part = NULL;
        }
        long what = part == NULL ? -1 : PyLong_AsLong(part);
        Py_XDECREF(made);
        status = -1;
        if (what == TOLD) {
            made = PyObject_GetAttr(v, told);
            if (made == Py_None)
                what = SEVERAL;
            else if (made != NULL)
                status = repeat(made, key, found, index);
            Py_XDECREF(made);
        }
        if (what == PLAIN) {
            status = PyList_Append(key, v) == 0 ? 1 : -1;
        } else if (what == TENSOR) {
            int64_t device = ask(v, get_device);
            if (PyErr_Occurred())
                break;
            status = 0;
            if (device == index && append(key, PyObject_GetAttr(v, shape)) &&
                append(key, PyObject_CallMethodNoArgs(v, stride)) &&
                append(key, PyObject_GetAttr(v, dtype))) {
                int64_t address = ask(v, data_ptr);
                if (!PyErr_Occurred())
                    status = append(key, PyLong_FromLong((long)(address & 15))) &&
                             PyList_Append(found, v) == 0;
            }
            if (PyErr_Occurred()) {
                status = -1;
                if (PyErr_ExceptionMatches(PyExc_RuntimeError)) {
                    PyErr_Clear(); /* no memory of its own: sparse, nested, or of a transform */
                    status = 0;
                }
            }
        } else if (what == SEVERAL) {
            Py_ssize_t size = PyObject_Size(v);
            if (size >= 0 && PyList_Append(key, kind) == 0 && append(key, PyLong_FromSsize_t(size)))
                status = tell(parts, part_of, v, key, found, index);
        } else if (what == INTERNED) {
            status = append(key, PyLong_FromVoidPtr(v)) ? 1 : -1;
        } else if (what == FOREIGN) {
            status = 0;
        }
    }
    Py_DECREF(items);
    return status;
}

/* walk(parts, part_of, value, key, found, index) */
static PyObject *walk(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 6 || !PyDict_Check(args[0]) || !PyList_Check(args[3]) || !PyList_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "walk(parts, part_of, value, key, found, index)");
        return NULL;
    }
    long index = PyLong_AsLong(args[5]);
    if (PyErr_Occurred())
        return NULL;
    int status = tell(args[0], args[1], args[2], args[3], args[4], index);
    return status < 0 ? NULL : PyBool_FromLong(status);
}

/* bind(launch, get_context, set_context, set_attribute, multiply, get_capture, set_dependencies):
   addresses of functions, the last two 0 where the driver has none. */
static PyObject *bind(PyObject *self, PyObject *args) {
    unsigned long long found[7];
    if (!PyArg_ParseTuple(args, "KKKKKKK", found, found + 1, found + 2, found + 3, found + 4,
                          found + 5, found + 6))
        return NULL;
    launch = (launch_function)(uintptr_t)found[0];
    get_context = (context_getter)(uintptr_t)found[1];
    set_context = (context_setter)(uintptr_t)found[2];
    set_attribute = (attribute_setter)(uintptr_t)found[3];
    multiply = (multiplier)(uintptr_t)found[4];
    get_capture = (capture_getter)(uintptr_t)found[5];
    set_dependencies = (dependency_setter)(uintptr_t)found[6];
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL, NULL},
    {"bind", bind, METH_VARARGS, NULL},
    {"walk", (PyCFunction)(void (*)(void))walk, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "minifloat_batch", NULL, -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_minifloat_batch(void) {
    get_device = PyUnicode_InternFromString("get_device");
    shape = PyUnicode_InternFromString("shape");
    stride = PyUnicode_InternFromString("stride");
    dtype = PyUnicode_InternFromString("dtype");
    data_ptr = PyUnicode_InternFromString("data_ptr");
    told = PyUnicode_InternFromString("told");
    return PyModule_Create(&module);
}
