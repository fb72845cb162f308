/* One call of an Lt library with everything but addresses fixed: 0.2 us, where ctypes takes 3 us.
 *
 * Matmul and MatmulDescSetAttribute take the same arguments in both libraries (cublasLt.h,
 * hipblaslt.h). Their addresses are enough: no vendor code is compiled or linked. The object's lock is
 * held from the first attribute to the launch, so that threads cannot set each other's pointers.
 * The interpreter's lock is released meanwhile, as in torch. A launch may wait for a full queue or a
 * kernel's loading, which may depend on another thread's launch.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MAX_ALGO 64
#define ADDRESSES 8

typedef int (*matmul_fn)(void *handle, void *desc, const void *alpha, const void *a, void *a_layout, const void *b, void *b_layout,
                         const void *beta, const void *c, void *c_layout, void *d, void *d_layout, const void *algo, void *workspace,
                         size_t workspace_bytes, void *stream);
typedef int (*set_fn)(void *desc, int attribute, const void *value, size_t size);

typedef struct {
    PyObject_HEAD
    matmul_fn matmul;
    set_fn set;
    void *handle, *desc, *a, *b, *d;
    uint64_t algo[MAX_ALGO / 8];
    size_t workspace_bytes;
    union { float real; int32_t whole; } alpha, beta;
    int attributes[3]; /* of bias, scales of A, scales of B; -1 for none */
    PyThread_type_lock lock;
    PyObject *owner; /* keeps handle, descriptor and layouts alive */
} Launch;

static int launch_init(Launch *self, PyObject *args, PyObject *kwargs) {
    unsigned long long matmul, set, handle, desc, a, b, d, workspace_bytes;
    const char *algo;
    Py_ssize_t algo_bytes;
    int whole, *attribute = self->attributes;
    PyObject *owner;
    if (kwargs != NULL && PyDict_Size(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "Launch takes no keywords");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "KKKKKKKy#Kp(iii)O", &matmul, &set, &handle, &desc, &a, &b, &d, &algo, &algo_bytes, &workspace_bytes,
                          &whole, &attribute[0], &attribute[1], &attribute[2], &owner))
        return -1;
    if (algo_bytes > MAX_ALGO) {
        PyErr_Format(PyExc_ValueError, "an algorithm has %d bytes at most", MAX_ALGO);
        return -1;
    }
    if (self->lock == NULL && (self->lock = PyThread_allocate_lock()) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->matmul = (matmul_fn)(uintptr_t)matmul;
    self->set = (set_fn)(uintptr_t)set;
    self->handle = (void *)(uintptr_t)handle;
    self->desc = (void *)(uintptr_t)desc;
    self->a = (void *)(uintptr_t)a;
    self->b = (void *)(uintptr_t)b;
    self->d = (void *)(uintptr_t)d;
    memset(self->algo, 0, sizeof self->algo);
    memcpy(self->algo, algo, (size_t)algo_bytes);
    self->workspace_bytes = (size_t)workspace_bytes;
    if (whole) {
        self->alpha.whole = 1;
        self->beta.whole = 0;
    } else {
        self->alpha.real = 1.0f;
        self->beta.real = 0.0f;
    }
    PyObject *before = self->owner;
    Py_INCREF(owner);
    self->owner = owner;
    Py_XDECREF(before);
    return 0;
}

static PyObject *launch_launch(Launch *self, PyObject *const *args, Py_ssize_t count) {
    void *address[ADDRESSES]; /* stream, d, a, b, workspace, bias, scales of A, scales of B */
    int status = 0, i;
    if (count != ADDRESSES) {
        PyErr_Format(PyExc_TypeError, "launch takes %d addresses (got %zd)", ADDRESSES, count);
        return NULL;
    }
    for (i = 0; i < ADDRESSES; i++)
        address[i] = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(args[i]);
    if (PyErr_Occurred())
        return NULL;
    if (self->matmul == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "Launch was not initialised");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    for (i = 0; i < 3 && status == 0; i++)
        if (self->attributes[i] >= 0)
            status = self->set(self->desc, self->attributes[i], &address[5 + i], sizeof(void *));
    if (status == 0)
        status = self->matmul(self->handle, self->desc, &self->alpha, address[2], self->a, address[3], self->b, &self->beta, address[1],
                              self->d, address[1], self->d, self->algo, address[4], self->workspace_bytes, address[0]);
    PyThread_release_lock(self->lock);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

static void launch_dealloc(Launch *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    if (self->lock != NULL)
        PyThread_free_lock(self->lock);
    Py_XDECREF(self->owner);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef launch_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launch_launch, METH_FASTCALL,
     "launch(stream, d, a, b, workspace, bias, a_scale, b_scale) -> the library's status; addresses as integers"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot launch_slots[] = {
    {Py_tp_doc, "Launch(matmul, set_attribute, handle, desc, a, b, d, algo, workspace_bytes, whole, (bias, a_scale, b_scale), owner)"},
    {Py_tp_init, launch_init},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, launch_dealloc},
    {Py_tp_methods, launch_methods},
    {0, NULL},
};

static PyType_Spec launch_spec = {"tunedgemm_hipblaslt._shim.Launch", sizeof(Launch), 0, Py_TPFLAGS_DEFAULT, launch_slots};

static struct PyModuleDef shim_module = {PyModuleDef_HEAD_INIT, "_shim", "One call of an Lt library.", -1, NULL, NULL, NULL, NULL, NULL};

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
