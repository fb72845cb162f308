/* One launch of a kernel with everything but addresses fixed before: 0.4 us where ctypes takes 11 us (busy CPU, 4 addresses).
 *
 * The arguments of hipModuleLaunchKernel (hip_runtime_api.h) and of cuLaunchKernel (cuda.h) are the same, so the function's address is
 * enough; nothing of a vendor is compiled or linked in. The kernel gets one buffer of arguments: a template of constant bytes in which the
 * addresses are put at their offsets, and bytes such as descriptors of operands. It is put together on the stack: nothing is shared
 * between threads, so there is no lock. The interpreter's is given back meanwhile, as torch does: a launch waits where the stream's queue
 * is full, maybe for what another thread has yet to launch.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define VERSION 3 /* native.py has the same: what was built from another text is not used */
#define MOST_BYTES 4096 /* of arguments */
#define MOST_SLOTS 16
/* HIP's words of the list `extra`, ended by HIP_LAUNCH_PARAM_END. CUDA gets the buffer as the kernel's one parameter: its buffer of extra
 * arguments is the whole space of parameters, in which the first one of a boundary of 64 begins at byte 48. */
#define BUFFER_POINTER 1
#define BUFFER_SIZE 2

typedef int (*launch_fn)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                         unsigned block_z, unsigned shared, void *stream, void **parameters, void **extra);

typedef struct {
    PyObject_HEAD
    launch_fn launch;
    void *function;
    unsigned grid[3], threads, shared, count; /* count: of slots */
    size_t bytes;
    uintptr_t end; /* of the list; 0: there is none */
    unsigned slot[MOST_SLOTS];
    const char *arguments; /* the bytes of constant */
    PyObject *constant;
    PyObject *owner; /* keeps the function alive */
} Launch;

static int read_slots(Launch *self, PyObject *slots) {
    Py_ssize_t i, count = PyTuple_Size(slots);
    if (count < 0)
        return -1;
    if (count > MOST_SLOTS) {
        PyErr_Format(PyExc_ValueError, "there are at most %d slots (got %zd)", MOST_SLOTS, count);
        return -1;
    }
    for (i = 0; i < count; i++) {
        size_t slot = PyLong_AsSize_t(PyTuple_GetItem(slots, i));
        if (PyErr_Occurred())
            return -1;
        if (slot > MOST_BYTES || slot + sizeof(void *) > self->bytes) {
            PyErr_Format(PyExc_ValueError, "slot %zd ends beyond the %zu bytes of arguments", i, self->bytes);
            return -1;
        }
        self->slot[i] = (unsigned)slot;
    }
    self->count = (unsigned)count;
    return 0;
}

static int launch_init(Launch *self, PyObject *args, PyObject *kwargs) {
    unsigned long long launch, function, end;
    unsigned grid[3], threads, shared;
    Py_ssize_t bytes;
    PyObject *constant, *slots, *owner, *constant_before, *owner_before;
    if (kwargs != NULL && PyDict_Size(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "Launch takes no keywords");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "KK(III)IISOKO", &launch, &function, &grid[0], &grid[1], &grid[2], &threads, &shared, &constant, &slots, &end,
                          &owner))
        return -1;
    bytes = PyBytes_Size(constant);
    if (bytes > MOST_BYTES) {
        PyErr_Format(PyExc_ValueError, "arguments have at most %d bytes (got %zd)", MOST_BYTES, bytes);
        return -1;
    }
    self->launch = NULL;
    self->bytes = (size_t)bytes;
    if (read_slots(self, slots))
        return -1;
    self->function = (void *)(uintptr_t)function;
    memcpy(self->grid, grid, sizeof self->grid);
    self->threads = threads;
    self->shared = shared;
    self->end = (uintptr_t)end;
    self->launch = (launch_fn)(uintptr_t)launch;
    constant_before = self->constant;
    owner_before = self->owner;
    Py_INCREF(constant);
    Py_INCREF(owner);
    self->arguments = PyBytes_AsString(constant);
    self->constant = constant;
    self->owner = owner;
    Py_XDECREF(constant_before);
    Py_XDECREF(owner_before);
    return 0;
}

static PyObject *launch_launch(Launch *self, PyObject *const *args, Py_ssize_t count) {
    unsigned char arguments[MOST_BYTES];
    size_t bytes = self->bytes;
    void *parameters[] = {arguments}, *extra[] = {(void *)BUFFER_POINTER, arguments, (void *)BUFFER_SIZE, &bytes, (void *)self->end};
    void *stream;
    unsigned i;
    int status;
    if (self->launch == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "Launch was not initialised");
        return NULL;
    }
    if (count != (Py_ssize_t)self->count + 1) {
        PyErr_Format(PyExc_TypeError, "launch takes a stream and %u addresses (got %zd arguments)", self->count, count);
        return NULL;
    }
    memcpy(arguments, self->arguments, bytes);
    stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]);
    for (i = 0; i < self->count; i++) {
        void *address;
        if (PyBytes_Check(args[i + 1])) { /* a descriptor */
            size_t room = bytes - self->slot[i], size = (size_t)PyBytes_Size(args[i + 1]);
            memcpy(arguments + self->slot[i], PyBytes_AsString(args[i + 1]), size < room ? size : room);
            continue;
        }
        address = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(args[i + 1]);
        memcpy(arguments + self->slot[i], &address, sizeof address);
    }
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = self->launch(self->function, self->grid[0], self->grid[1], self->grid[2], self->threads, 1, 1, self->shared, stream,
                          self->end ? NULL : parameters, self->end ? extra : NULL);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

static void launch_dealloc(Launch *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    Py_XDECREF(self->constant);
    Py_XDECREF(self->owner);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef launch_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launch_launch, METH_FASTCALL,
     "launch(stream, for each slot an address as an integer, or bytes that go there) -> the driver's status"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot launch_slots[] = {
    {Py_tp_doc, "Launch(launch_function, function, (grid_x, grid_y, grid_z), threads, shared_bytes, arguments, slots, end, owner)"},
    {Py_tp_init, launch_init},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, launch_dealloc},
    {Py_tp_methods, launch_methods},
    {0, NULL},
};

static PyType_Spec launch_spec = {"tunedgemm_asm._shim.Launch", sizeof(Launch), 0, Py_TPFLAGS_DEFAULT, launch_slots};

static struct PyModuleDef shim_module = {PyModuleDef_HEAD_INIT, "_shim", "One launch of a kernel.", -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__shim(void) {
    PyObject *module = PyModule_Create(&shim_module), *type;
    if (module == NULL)
        return NULL;
    type = PyType_FromSpec(&launch_spec);
    if (type == NULL || PyModule_AddIntConstant(module, "VERSION", VERSION) < 0 || PyModule_AddObject(module, "Launch", type) < 0) {
        Py_XDECREF(type);
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
