/* Launches a kernel with all arguments but the addresses fixed: 0.2 us; ctypes takes 4 us.
 *
 * cuLaunchKernel (cuda.h) and hipModuleLaunchKernel (hip_runtime_api.h) take the same arguments, so
 * the function's address is enough; no vendor code is compiled or linked in. The kernel's arguments
 * are built on the stack: threads share no state, so there is no lock. The interpreter's lock is
 * released meanwhile, as in torch: a launch may wait for a full queue or for the load of a kernel,
 * which may depend on a launch of another thread.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define POINTERS 8
#define SCALES 2 /* the last pointers, optional */
#define SIZES 32 /* bytes of Args (kernels/portable.h) after its pointers */

typedef int (*launch_fn)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                         unsigned block_z, unsigned shared, void *stream, void **parameters, void **extra);

/* CUlaunchConfig and CUlaunchAttribute (cuda.h), for programmatic dependent launch. */
#define OVERLAPPING 6 /* CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION */
typedef struct {
    int id, padding, value, rest[15];
} Attribute;
typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned count;
} Config;
typedef int (*launch_ex_fn)(const Config *config, void *function, void **parameters, void **extra);

typedef struct {
    PyObject_HEAD
    void *launch;
    void *function;
    unsigned grid[3], threads, shared;
    int overlaps; /* launch is a launch_ex_fn, else a launch_fn */
    unsigned char sizes[SIZES];
    PyObject *owner; /* keeps the function alive */
} Launch;

static int launch_init(Launch *self, PyObject *args, PyObject *kwargs) {
    unsigned long long launch, function;
    unsigned grid[3], threads, shared;
    const char *sizes;
    Py_ssize_t bytes;
    int overlaps;
    PyObject *owner, *before;
    if (kwargs != NULL && PyDict_Size(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "Launch takes no keywords");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "KK(III)IIy#pO", &launch, &function, &grid[0], &grid[1], &grid[2], &threads, &shared, &sizes, &bytes, &overlaps,
                          &owner))
        return -1;
    if (bytes != SIZES) {
        PyErr_Format(PyExc_ValueError, "sizes must have %d bytes (got %zd)", SIZES, bytes);
        return -1;
    }
    self->launch = (void *)(uintptr_t)launch;
    self->overlaps = overlaps;
    self->function = (void *)(uintptr_t)function;
    memcpy(self->grid, grid, sizeof self->grid);
    self->threads = threads;
    self->shared = shared;
    memcpy(self->sizes, sizes, SIZES);
    before = self->owner;
    Py_INCREF(owner);
    self->owner = owner;
    Py_XDECREF(before);
    return 0;
}

static PyObject *launch_launch(Launch *self, PyObject *const *args, Py_ssize_t count) {
    struct {
        void *pointer[POINTERS]; /* x, weight, bias, out, partial, counters, x_scale, w_scale */
        unsigned char sizes[SIZES];
    } values;
    void *stream, *parameters[1] = {&values};
    Py_ssize_t i;
    int status;
    if (count != POINTERS + 1 && count != POINTERS - SCALES + 1) {
        PyErr_Format(PyExc_TypeError, "launch takes %d or %d addresses (got %zd)", POINTERS - SCALES + 1, POINTERS + 1, count);
        return NULL;
    }
    values.pointer[POINTERS - 2] = values.pointer[POINTERS - 1] = NULL;
    stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]);
    for (i = 0; i < count - 1; i++)
        values.pointer[i] = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(args[i + 1]);
    if (PyErr_Occurred())
        return NULL;
    if (self->launch == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "Launch is not initialised; call Launch(...)");
        return NULL;
    }
    memcpy(values.sizes, self->sizes, SIZES);
    Py_BEGIN_ALLOW_THREADS
    if (self->overlaps) {
        Attribute attribute = {OVERLAPPING, 0, 1, {0}};
        Config config = {{self->grid[0], self->grid[1], self->grid[2]}, {self->threads, 1, 1}, self->shared, stream, &attribute, 1};
        status = ((launch_ex_fn)self->launch)(&config, self->function, parameters, NULL);
    } else {
        status = ((launch_fn)self->launch)(self->function, self->grid[0], self->grid[1], self->grid[2], self->threads, 1, 1, self->shared,
                                           stream, parameters, NULL);
    }
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
     "launch(stream, x, weight, bias, out, partial, counters[, x_scale, w_scale]) -> the driver's status; addresses as integers"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot launch_slots[] = {
    {Py_tp_doc, "Launch(launch_function, function, (grid_x, grid_y, grid_z), threads, shared_bytes, sizes, overlaps, owner)"},
    {Py_tp_init, launch_init},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, launch_dealloc},
    {Py_tp_methods, launch_methods},
    {0, NULL},
};

static PyType_Spec launch_spec = {"tunedgemm_skinny._shim.Launch", sizeof(Launch), 0, Py_TPFLAGS_DEFAULT, launch_slots};

static struct PyModuleDef shim_module = {PyModuleDef_HEAD_INIT, "_shim", "Launches of kernels.", -1, NULL, NULL, NULL, NULL, NULL};

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
