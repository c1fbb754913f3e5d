/* Steps of a recorded program in one call: launches of compiled kernels, and products by cuBLASLt.
   And the keys of programs, as programs.py makes them, in less time.

   A plan is an array of 64-bit words, as batch.py writes it. A reference is two of them, (argument,
   number): the address given for that argument plus the number, or, where the argument is negative,
   the number itself. Nothing of CUDA is included or linked: the functions are given by address. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

enum { ADDRESSES = 256, PARAMETERS = 64, SCRATCH = 2 };
enum { LAUNCH, PRODUCT };

typedef int64_t word;
typedef int (*launch_function)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                               unsigned, void *, void **, void **);
typedef int (*context_getter)(void **);
typedef int (*context_setter)(void *);
typedef int (*attribute_setter)(void *, int, const void *, size_t);
typedef int (*multiplier)(void *, void *, const void *, const void *, void *, const void *, void *,
                          const void *, const void *, void *, void *, void *, const void *, void *,
                          size_t, void *);

static launch_function launch;
static context_getter get_context;
static context_setter set_context;
static attribute_setter set_attribute;
static multiplier multiply;
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
    word steps = *at++, kind = LAUNCH, i = 0;
    int status;
    Py_BEGIN_ALLOW_THREADS;
    /* A thread that has done nothing on the device has no context yet. */
    status = get_context(&context);
    if (status == 0 && context == NULL)
        status = set_context(wanted);
    for (; i < steps && status == 0; i++) {
        kind = *at++;
        status = kind == LAUNCH ? run_launch(&at, addresses, stream)
                                : run_product(&at, addresses, stream);
    }
    Py_END_ALLOW_THREADS;
    if (status != 0)
        return PyErr_Format(PyExc_RuntimeError,
                            "minifloat: step %lld of a recorded program failed: %s returned %d",
                            (long long)i, kind == LAUNCH ? "the CUDA driver" : "cuBLASLt", status);
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

/* bind(launch, get_context, set_context, set_attribute, multiply): addresses of functions. */
static PyObject *bind(PyObject *self, PyObject *args) {
    unsigned long long found[5];
    if (!PyArg_ParseTuple(args, "KKKKK", found, found + 1, found + 2, found + 3, found + 4))
        return NULL;
    launch = (launch_function)(uintptr_t)found[0];
    get_context = (context_getter)(uintptr_t)found[1];
    set_context = (context_setter)(uintptr_t)found[2];
    set_attribute = (attribute_setter)(uintptr_t)found[3];
    multiply = (multiplier)(uintptr_t)found[4];
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
