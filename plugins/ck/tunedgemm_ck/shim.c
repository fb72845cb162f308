/* One call of a compiled instance with the sizes fixed before: 0.2 us where ctypes takes 3 us.
 *
 * The interpreter's lock is given back meanwhile, as torch does: a launch waits where the stream's queue is full or a kernel is loaded,
 * maybe for what another thread has yet to launch.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define POINTERS 7
#define SIZES 5

/* TunedGemmCall of sources/call.h. */
typedef struct {
    void *pointers[POINTERS];
    int64_t sizes[SIZES];
} Call;
typedef int (*launch_fn)(const Call *call, void *stream);

typedef struct {
    PyObject_HEAD
    launch_fn launch;
    int64_t sizes[SIZES];
    PyObject *owner; /* keeps the object loaded */
} Launch;

static int launch_init(Launch *self, PyObject *args, PyObject *kwargs) {
    unsigned long long launch;
    long long sizes[SIZES];
    PyObject *owner, *before = self->owner;
    int i;
    if (kwargs != NULL && PyDict_Size(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "Launch takes no keywords");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "K(LLLLL)O", &launch, &sizes[0], &sizes[1], &sizes[2], &sizes[3], &sizes[4], &owner))
        return -1;
    self->launch = (launch_fn)(uintptr_t)launch;
    for (i = 0; i < SIZES; i++)
        self->sizes[i] = sizes[i];
    Py_INCREF(owner);
    self->owner = owner;
    Py_XDECREF(before);
    return 0;
}

static PyObject *launch_launch(Launch *self, PyObject *const *args, Py_ssize_t count) {
    Call call;
    void *address[POINTERS + 1]; /* stream, then the pointers of a call */
    int status, i;
    if (count != POINTERS + 1) {
        PyErr_Format(PyExc_TypeError, "launch takes %d addresses (got %zd)", POINTERS + 1, count);
        return NULL;
    }
    for (i = 0; i <= POINTERS; i++)
        address[i] = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(args[i]);
    if (PyErr_Occurred())
        return NULL;
    if (self->launch == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "Launch was not initialised");
        return NULL;
    }
    memcpy(call.pointers, address + 1, sizeof call.pointers);
    memcpy(call.sizes, self->sizes, sizeof call.sizes);
    Py_BEGIN_ALLOW_THREADS
    status = self->launch(&call, address[0]);
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
     "launch(stream, x, weight, x_scale, w_scale, bias, out, workspace) -> the instance's status; addresses as integers"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot launch_slots[] = {
    {Py_tp_doc, "Launch(function, (m, n, k, batches, split), owner)"},
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
