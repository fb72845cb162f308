/* Launch a kernel with everything but addresses fixed: 0.4 us where ctypes takes 11 us (busy CPU,
 * 4 addresses).
 *
 * hipModuleLaunchKernel (hip_runtime_api.h) and cuLaunchKernel (cuda.h) take the same arguments, so the
 * function's address suffices and no vendor code is compiled or linked. The kernel gets one argument
 * buffer: a template of constant bytes with addresses at their offsets, and tensor maps, which
 * cuTensorMapEncodeTiled encodes once for an address. The buffer is on the stack. The interpreter's lock
 * protects the cache of tensor maps and is released for the launch, as in torch: a launch waits while the
 * stream's queue is full, perhaps for another thread's launch.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define VERSION 4 /* as in native.py, which ignores other versions */
#define MOST_BYTES 4096 /* of the argument buffer */
#define MOST_SLOTS 16
#define MOST_MAPS 3
#define MOST_ADDRESSES (MOST_SLOTS + MOST_MAPS)
/* Tensor map (cuda.h, CUtensorMap): bytes, alignment, most dimensions; most cached for one operand. */
#define MAP_BYTES 128
#define MAP_BOUNDARY 64
#define MOST_RANK 3
#define MOST_KEPT 4096
/* HIP's keys of the list `extra`, which HIP_LAUNCH_PARAM_END ends. CUDA gets the buffer as the kernel's one
 * parameter: its buffer of extra arguments is the whole parameter space, in which the first parameter
 * aligned to 64 begins at byte 48. */
#define BUFFER_POINTER 1
#define BUFFER_SIZE 2

typedef int (*launch_fn)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                         unsigned block_z, unsigned shared, void *stream, void **parameters, void **extra);

typedef int (*describe_fn)(void *to, int type, unsigned rank, void *address, const uint64_t *sizes, const uint64_t *strides,
                           const uint32_t *box, const uint32_t *every, int interleave, int swizzle, int promotion, int fill);

/* Description of an operand without its address. */
typedef struct {
    int type, kinds[4];
    unsigned rank;
    uint64_t sizes[MOST_RANK], strides[MOST_RANK];
    uint32_t box[MOST_RANK];
} Told;

typedef struct {
    uint64_t address; /* 0: free entry */
    unsigned char bytes[MAP_BYTES];
} Kept;

/* Tensor maps of an operand by address: open addressing, at most half full. Layers share a launch. */
typedef struct {
    unsigned slot, source; /* offset in the buffer, index of its address */
    unsigned room, kept;   /* entries (a power of two or 0), entries in use */
    Kept *entries;
    Told told;
} Map;

typedef struct {
    PyObject_HEAD
    launch_fn launch;
    describe_fn describe;
    void *function;
    Map *maps;
    unsigned grid[3], threads, shared, count, addresses, map_count; /* count: slots, for the first addresses */
    size_t bytes;
    uintptr_t end; /* end of the list; 0: no list */
    unsigned slot[MOST_SLOTS];
    const char *arguments; /* bytes of `constant` */
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

/* Read 1 to MOST_RANK numbers of a tuple; return how many, or -1 with an error. */
static int read_numbers(PyObject *numbers, uint64_t *to) {
    Py_ssize_t i, count = PyTuple_Size(numbers);
    if (count < 0)
        return -1;
    if (count < 1 || count > MOST_RANK) {
        PyErr_Format(PyExc_ValueError, "a descriptor has 1 to %d dimensions (got %zd)", MOST_RANK, count);
        return -1;
    }
    for (i = 0; i < count; i++) {
        to[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(numbers, i));
        if (PyErr_Occurred())
            return -1;
    }
    return (int)count;
}

/* Read (slot, source, type, sizes, strides, box, (interleave, swizzle, promotion, fill)). */
static int read_map(Launch *self, Map *map, PyObject *item) {
    PyObject *sizes, *strides, *box;
    uint64_t boxes[MOST_RANK];
    Told *told = &map->told;
    int rank, i;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "a map is a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(item, "IIiOOO(iiii)", &map->slot, &map->source, &told->type, &sizes, &strides, &box, &told->kinds[0], &told->kinds[1],
                          &told->kinds[2], &told->kinds[3]))
        return -1;
    if ((rank = read_numbers(sizes, told->sizes)) < 0)
        return -1;
    told->rank = (unsigned)rank;
    if (PyTuple_Size(strides) != rank - 1 || PyTuple_Size(box) != rank || (rank > 1 && read_numbers(strides, told->strides) < 0) ||
        read_numbers(box, boxes) < 0) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "a descriptor of %d dimensions has %d strides and a box of %d", rank, rank - 1, rank);
        return -1;
    }
    for (i = 0; i < rank; i++)
        told->box[i] = (uint32_t)boxes[i];
    if (map->slot > MOST_BYTES || map->slot + (size_t)MAP_BYTES > self->bytes || map->source >= MOST_ADDRESSES) {
        PyErr_Format(PyExc_ValueError, "a descriptor at byte %u of %zu, of address %u", map->slot, self->bytes, map->source);
        return -1;
    }
    if (map->source >= self->addresses)
        self->addresses = map->source + 1;
    return 0;
}

static void free_maps(Map *maps, unsigned count) {
    while (maps != NULL && count > 0)
        PyMem_Free(maps[--count].entries);
    PyMem_Free(maps);
}

static int read_maps(Launch *self, PyObject *maps) {
    Py_ssize_t i, count = PyTuple_Size(maps);
    Map *made;
    if (count < 0)
        return -1;
    if (count > MOST_MAPS) {
        PyErr_Format(PyExc_ValueError, "there are at most %d descriptors (got %zd)", MOST_MAPS, count);
        return -1;
    }
    if ((made = PyMem_Calloc(count ? (size_t)count : 1, sizeof *made)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->addresses = self->count;
    for (i = 0; i < count; i++)
        if (read_map(self, &made[i], PyTuple_GetItem(maps, i))) {
            PyMem_Free(made);
            return -1;
        }
    free_maps(self->maps, self->map_count);
    self->maps = made;
    self->map_count = (unsigned)count;
    return 0;
}

/* Return the entry of an address, or the free entry for it; one is always free. */
static Kept *find_kept(Kept *entries, unsigned room, uint64_t address) {
    unsigned at = (unsigned)((address >> 4) * 0x9E3779B97F4A7C15u >> 32) & (room - 1);
    while (entries[at].address != 0 && entries[at].address != address)
        at = (at + 1) & (room - 1);
    return &entries[at];
}

/* Cache a tensor map if memory suffices; clear a full cache first. */
static void keep(Map *map, uint64_t address, const unsigned char *bytes) {
    Kept *to;
    if (map->kept >= MOST_KEPT) {
        memset(map->entries, 0, map->room * sizeof *map->entries);
        map->kept = 0;
    } else if (2 * map->kept >= map->room) {
        unsigned i, room = map->room ? 2 * map->room : 4;
        Kept *wider = PyMem_Calloc(room, sizeof *wider);
        if (wider == NULL)
            return;
        for (i = 0; i < map->room; i++)
            if (map->entries[i].address != 0)
                *find_kept(wider, room, map->entries[i].address) = map->entries[i];
        PyMem_Free(map->entries);
        map->entries = wider;
        map->room = room;
    }
    to = find_kept(map->entries, map->room, address);
    map->kept += to->address == 0;
    to->address = address;
    memcpy(to->bytes, bytes, MAP_BYTES);
}

/* Write the tensor map of an address; return the driver's status. */
static int describe(Launch *self, unsigned number, uint64_t address, unsigned char *to) {
    static const uint32_t every[MOST_RANK] = {1, 1, 1};
    unsigned char made[MAP_BYTES + MAP_BOUNDARY], *aligned = made + (-(uintptr_t)made & (MAP_BOUNDARY - 1));
    Map *maps = self->maps, *map = &maps[number];
    Told told;
    int status;
    if (map->room > 0 && address != 0) {
        const Kept *found = find_kept(map->entries, map->room, address);
        if (found->address == address) {
            memcpy(to, found->bytes, MAP_BYTES);
            return 0;
        }
    }
    told = map->told; /* another thread may reinitialize the launch during the driver's call */
    status = self->describe(aligned, told.type, told.rank, (void *)(uintptr_t)address, told.sizes, told.strides, told.box, every, told.kinds[0],
                            told.kinds[1], told.kinds[2], told.kinds[3]);
    if (status != 0)
        return status;
    memcpy(to, aligned, MAP_BYTES);
    if (self->maps == maps && address != 0)
        keep(map, address, aligned);
    return 0;
}

static int launch_init(Launch *self, PyObject *args, PyObject *kwargs) {
    unsigned long long launch, describe, function, end;
    unsigned grid[3], threads, shared;
    Py_ssize_t bytes;
    PyObject *constant, *slots, *maps, *owner, *constant_before, *owner_before;
    if (kwargs != NULL && PyDict_Size(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "Launch takes no keywords");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "KK(III)IISOKOKO", &launch, &function, &grid[0], &grid[1], &grid[2], &threads, &shared, &constant, &slots, &end,
                          &owner, &describe, &maps))
        return -1;
    bytes = PyBytes_Size(constant);
    if (bytes > MOST_BYTES) {
        PyErr_Format(PyExc_ValueError, "arguments have at most %d bytes (got %zd)", MOST_BYTES, bytes);
        return -1;
    }
    self->launch = NULL;
    self->bytes = (size_t)bytes;
    if (read_slots(self, slots) || read_maps(self, maps))
        return -1;
    if (self->map_count > 0 && describe == 0) {
        PyErr_SetString(PyExc_ValueError, "descriptors need a function that makes them");
        return -1;
    }
    self->describe = (describe_fn)(uintptr_t)describe;
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
    uint64_t addresses[MOST_ADDRESSES];
    void *stream;
    unsigned i;
    int status;
    if (self->launch == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "Launch was not initialised");
        return NULL;
    }
    if (count != (Py_ssize_t)self->addresses + 1) {
        PyErr_Format(PyExc_TypeError, "launch takes a stream and %u addresses (got %zd arguments)", self->addresses, count);
        return NULL;
    }
    memcpy(arguments, self->arguments, bytes);
    stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]);
    for (i = 0; i + 1 < (unsigned)count; i++)
        addresses[i] = PyLong_AsUnsignedLongLong(args[i + 1]);
    if (PyErr_Occurred())
        return NULL;
    for (i = 0; i < self->count; i++)
        memcpy(arguments + self->slot[i], &addresses[i], sizeof addresses[i]);
    for (i = 0; i < self->map_count; i++)
        if ((status = describe(self, i, addresses[self->maps[i].source], arguments + self->maps[i].slot)) != 0)
            return PyLong_FromLong(-(long)status);
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
    free_maps(self->maps, self->map_count);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef launch_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launch_launch, METH_FASTCALL,
     "launch(stream, an address as an integer for each slot, then those that descriptors alone are of) -> the driver's status, or, of a "
     "descriptor that it does not make, its status times -1"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot launch_slots[] = {
    {Py_tp_doc, "Launch(launch_function, function, (grid_x, grid_y, grid_z), threads, shared_bytes, arguments, slots, end, owner, "
                "describe_function, maps)"},
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
