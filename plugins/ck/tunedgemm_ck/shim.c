/* One call of a compiled instance with fixed sizes: 0.2 us, where ctypes takes 3 us.
 *
 * It releases the interpreter's lock meanwhile, as torch does. A launch waits where the stream's
 * queue is full or a kernel is loaded, possibly for what another thread has yet to launch.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* Upper bounds of the structs of sources/. */
#define MOST_POINTERS 16
#define MOST_SIZES 8

/* A struct of sources/: words of 8 bytes, first addresses, then sizes. */
typedef int (*launch_fn)(const uint64_t *call, void *stream);

typedef struct {
    PyObject_HEAD
    launch_fn launch;
    int pointers;
    size_t bytes; /* of the sizes */
    int64_t sizes[MOST_SIZES];
    PyObject *owner; /* keeps the object loaded */
} Launch;

static int launch_init(Launch *self, PyObject *args, PyObject *kwargs) {
    unsigned long long launch;
    PyObject *sizes, *owner, *before = self->owner;
    Py_ssize_t count, i;
    int pointers;
    if (kwargs != NULL && PyDict_Size(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "Launch takes no keywords");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "KiOO", &launch, &pointers, &sizes, &owner))
        return -1;
    count = PyTuple_Check(sizes) ? PyTuple_Size(sizes) : -1;
    if (pointers < 0 || pointers > MOST_POINTERS || count < 0 || count > MOST_SIZES) {
        PyErr_Format(PyExc_TypeError, "Launch takes up to %d addresses and a tuple of up to %d sizes", MOST_POINTERS, MOST_SIZES);
        return -1;
    }
    for (i = 0; i < count; i++)
        self->sizes[i] = PyLong_AsLongLong(PyTuple_GetItem(sizes, i));
    if (PyErr_Occurred())
        return -1;
    self->launch = (launch_fn)(uintptr_t)launch;
    self->pointers = pointers;
    self->bytes = (size_t)count * sizeof self->sizes[0];
    Py_INCREF(owner);
    self->owner = owner;
    Py_XDECREF(before);
    return 0;
}

static PyObject *launch_launch(Launch *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t words[1 + MOST_POINTERS + MOST_SIZES]; /* stream, then the struct */
    int status, i;
    if (count != self->pointers + 1) {
        PyErr_Format(PyExc_TypeError, "launch takes %d addresses (got %zd)", self->pointers + 1, count);
        return NULL;
    }
    for (i = 0; i <= self->pointers; i++)
        words[i] = PyLong_AsUnsignedLongLong(args[i]);
    if (PyErr_Occurred())
        return NULL;
    if (self->launch == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "Launch was not initialised");
        return NULL;
    }
    memcpy(words + 1 + self->pointers, self->sizes, self->bytes);
    Py_BEGIN_ALLOW_THREADS
    status = self->launch(words + 1, (void *)(uintptr_t)words[0]);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

static void launch_dealloc(Launch *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    Py_XDECREF(self->owner);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef launch_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launch_launch, METH_FASTCALL,
     "launch(stream, *addresses) -> the instance's status; addresses as integers, in the order of the struct"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot launch_slots[] = {
    {Py_tp_doc, "Launch(function, number of addresses, sizes, owner)"},
    {Py_tp_init, launch_init},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, launch_dealloc},
    {Py_tp_methods, launch_methods},
    {0, NULL},
};

static PyType_Spec launch_spec = {"tunedgemm_ck._shim.Launch", sizeof(Launch), 0, Py_TPFLAGS_DEFAULT, launch_slots};

static struct PyModuleDef shim_module = {PyModuleDef_HEAD_INIT, "_shim", "One call of a compiled instance.", -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__shim(void) {
    PyObject *module = PyModule_Create(&shim_module), *type;
    if (module == NULL)
        return NULL;
    type = PyType_FromSpec(&launch_spec);
    if (type == NULL || PyModule_AddObject(module, "Launch", type) < 0) {
        Py_XDECREF(type);
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
