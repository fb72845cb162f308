/* Launch a kernel or call a C function with everything but addresses fixed: 0.2 us, where ctypes
 * takes 4 us.
 *
 * The arguments are a template of constant bytes with addresses at their offsets, and tensor maps,
 * which cuTensorMapEncodeTiled encodes once for an address. They are built on the stack, so threads
 * share nothing but the cache of tensor maps, which the interpreter's lock protects. That lock is
 * released for the call, as in torch: a launch waits while the stream's queue is full, perhaps for
 * another thread's launch.
 *
 * cuLaunchKernel (cuda.h) and hipModuleLaunchKernel (hip_runtime_api.h) take the same arguments. So
 * the function's address suffices, and no vendor code is compiled or linked.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define VERSION 1 /* as in native.py, which ignores other versions */
#define MAX_BYTES 4096 /* of the arguments */
#define MAX_SLOTS 16
#define MAX_MAPS 8
#define MAX_ADDRESSES (MAX_SLOTS + MAX_MAPS)
/* Tensor map (cuda.h, CUtensorMap): bytes, alignment, most dimensions; most cached for one operand. */
#define MAP_BYTES 128
#define MAP_ALIGNMENT 64
#define MAX_RANK 5
#define MAX_ENTRIES 4096
/* Keys of HIP's list `extra` (hip_runtime_api.h, HIP_LAUNCH_PARAM_...). CUDA has such a list, too. But
 * its buffer is the whole parameter space, in which a parameter aligned to 64 begins at byte 48. */
#define BUFFER_POINTER 1
#define BUFFER_SIZE 2
#define BUFFER_END 3

typedef int (*launch_fn)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                         unsigned block_z, unsigned shared, void *stream, void **parameters, void **extra);

/* CUlaunchAttribute and CUlaunchConfig (cuda.h), for programmatic dependent launch. */
#define OVERLAPS 6 /* CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION */
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

typedef int (*struct_fn)(const void *arguments, void *stream);

typedef int (*describe_fn)(void *to, int type, unsigned rank, void *address, const uint64_t *sizes, const uint64_t *strides,
                           const uint32_t *box, const uint32_t *element_strides, int interleave, int swizzle, int promotion, int fill);

/* How the arguments are passed: to a launch_fn as the kernel's one parameter or in `extra`, to a
 * launch_ex_fn, or to a struct_fn; as in native.py. */
enum { PARAMETER, BUFFER, OVERLAPPING, STRUCT };

/* Description of an operand without its address. */
typedef struct {
    int type, kinds[4];
    unsigned rank;
    uint64_t sizes[MAX_RANK], strides[MAX_RANK];
    uint32_t box[MAX_RANK];
} MapDescription;

typedef struct {
    uint64_t address; /* 0: free entry */
    unsigned char bytes[MAP_BYTES];
} MapEntry;

/* Tensor maps of an operand by address: open addressing, at most half full. Layers share a launch. */
typedef struct {
    unsigned slot, source;   /* offset in the arguments, index of its address */
    unsigned capacity, used; /* entries (a power of two or 0), entries in use */
    MapEntry *entries;
    MapDescription description;
} MapCache;

typedef struct {
    PyObject_HEAD
    void *call;
    void *function;
    describe_fn describe;
    MapCache *maps;
    int convention;
    unsigned grid[3], threads, shared, slot_count, address_count, map_count; /* slots: for the first addresses */
    size_t bytes;
    unsigned slots[MAX_SLOTS];
    const char *arguments; /* bytes of `constant` */
    PyObject *constant;
    PyObject *owner; /* keeps the function alive */
} Launch;

static int read_slots(Launch *self, PyObject *slots) {
    Py_ssize_t i, count = PyTuple_Size(slots);
    if (count < 0)
        return -1;
    if (count > MAX_SLOTS) {
        PyErr_Format(PyExc_ValueError, "slots: at most %d (got %zd)", MAX_SLOTS, count);
        return -1;
    }
    for (i = 0; i < count; i++) {
        size_t slot = PyLong_AsSize_t(PyTuple_GetItem(slots, i));
        if (PyErr_Occurred())
            return -1;
        if (slot > MAX_BYTES || slot + sizeof(uint64_t) > self->bytes) {
            PyErr_Format(PyExc_ValueError, "slot %zd ends beyond the %zu bytes of arguments", i, self->bytes);
            return -1;
        }
        self->slots[i] = (unsigned)slot;
    }
    self->slot_count = self->address_count = (unsigned)count;
    return 0;
}

/* Read 1 to MAX_RANK numbers of a tuple; return how many, or -1 with an error. */
static int read_numbers(PyObject *numbers, uint64_t *to) {
    Py_ssize_t i, count = PyTuple_Size(numbers);
    if (count < 0)
        return -1;
    if (count < 1 || count > MAX_RANK) {
        PyErr_Format(PyExc_ValueError, "a tensor map has 1 to %d dimensions (got %zd)", MAX_RANK, count);
        return -1;
    }
    for (i = 0; i < count; i++) {
        to[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(numbers, i));
        if (PyErr_Occurred())
            return -1;
    }
    return (int)count;
}

/* Read sizes, strides of all but the first dimension, and the box. */
static int read_dimensions(MapDescription *description, PyObject *sizes, PyObject *strides, PyObject *box) {
    uint64_t boxes[MAX_RANK];
    int i, rank = read_numbers(sizes, description->sizes);
    if (rank < 0)
        return -1;
    description->rank = (unsigned)rank;
    if (PyTuple_Size(strides) != rank - 1 || PyTuple_Size(box) != rank || (rank > 1 && read_numbers(strides, description->strides) < 0) ||
        read_numbers(box, boxes) < 0) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "a tensor map of %d dimensions has %d strides and a box of %d", rank, rank - 1, rank);
        return -1;
    }
    for (i = 0; i < rank; i++)
        description->box[i] = (uint32_t)boxes[i];
    return 0;
}

/* Read (slot, source, type, sizes, strides, box, (interleave, swizzle, promotion, fill)). */
static int read_map(Launch *self, MapCache *map, PyObject *item) {
    MapDescription *description = &map->description;
    PyObject *sizes, *strides, *box;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "a tensor map is a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(item, "IIiOOO(iiii)", &map->slot, &map->source, &description->type, &sizes, &strides, &box, &description->kinds[0],
                          &description->kinds[1], &description->kinds[2], &description->kinds[3]))
        return -1;
    if (read_dimensions(description, sizes, strides, box))
        return -1;
    if (map->slot > MAX_BYTES || map->slot + (size_t)MAP_BYTES > self->bytes || map->source >= MAX_ADDRESSES) {
        PyErr_Format(PyExc_ValueError, "tensor map at byte %u of %zu, of address %u: out of range", map->slot, self->bytes, map->source);
        return -1;
    }
    if (map->source >= self->address_count)
        self->address_count = map->source + 1;
    return 0;
}

static int read_maps(Launch *self, PyObject *maps) {
    Py_ssize_t i, count = PyTuple_Size(maps);
    if (count < 0)
        return -1;
    if (count > MAX_MAPS) {
        PyErr_Format(PyExc_ValueError, "tensor maps: at most %d (got %zd)", MAX_MAPS, count);
        return -1;
    }
    if (count > 0 && self->describe == NULL) {
        PyErr_SetString(PyExc_ValueError, "tensor maps need a function that encodes them");
        return -1;
    }
    if (count > 0 && (self->maps = PyMem_Calloc((size_t)count, sizeof *self->maps)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->map_count = (unsigned)count;
    for (i = 0; i < count; i++)
        if (read_map(self, &self->maps[i], PyTuple_GetItem(maps, i)))
            return -1;
    return 0;
}

/* Return the entry of an address, or the free entry for it; one is always free. */
static MapEntry *find_entry(MapEntry *entries, unsigned capacity, uint64_t address) {
    unsigned at = (unsigned)((address >> 4) * 0x9E3779B97F4A7C15u >> 32) & (capacity - 1);
    while (entries[at].address != 0 && entries[at].address != address)
        at = (at + 1) & (capacity - 1);
    return &entries[at];
}

/* Cache a tensor map if memory suffices; clear a full cache first. */
static void cache(MapCache *map, uint64_t address, const unsigned char *bytes) {
    MapEntry *entry;
    if (map->used >= MAX_ENTRIES) {
        memset(map->entries, 0, map->capacity * sizeof *map->entries);
        map->used = 0;
    } else if (2 * map->used >= map->capacity) {
        unsigned i, capacity = map->capacity ? 2 * map->capacity : 4;
        MapEntry *entries = PyMem_Calloc(capacity, sizeof *entries);
        if (entries == NULL)
            return;
        for (i = 0; i < map->capacity; i++)
            if (map->entries[i].address != 0)
                *find_entry(entries, capacity, map->entries[i].address) = map->entries[i];
        PyMem_Free(map->entries);
        map->entries = entries;
        map->capacity = capacity;
    }
    entry = find_entry(map->entries, map->capacity, address);
    map->used += entry->address == 0;
    entry->address = address;
    memcpy(entry->bytes, bytes, MAP_BYTES);
}

/* Write the tensor map of an address; return the driver's status. */
static int write_map(const Launch *self, MapCache *map, uint64_t address, unsigned char *to) {
    static const uint32_t ones[MAX_RANK] = {1, 1, 1, 1, 1};
    unsigned char memory[MAP_BYTES + MAP_ALIGNMENT], *aligned = memory + (-(uintptr_t)memory & (MAP_ALIGNMENT - 1));
    const MapDescription *description = &map->description;
    int status;
    if (map->capacity > 0 && address != 0) {
        const MapEntry *entry = find_entry(map->entries, map->capacity, address);
        if (entry->address == address) {
            memcpy(to, entry->bytes, MAP_BYTES);
            return 0;
        }
    }
    status = self->describe(aligned, description->type, description->rank, (void *)(uintptr_t)address, description->sizes,
                            description->strides, description->box, ones, description->kinds[0], description->kinds[1],
                            description->kinds[2], description->kinds[3]);
    if (status != 0)
        return status;
    memcpy(to, aligned, MAP_BYTES);
    if (address != 0)
        cache(map, address, aligned);
    return 0;
}

/* Call the function as the convention says. */
static int call(const Launch *self, void *stream, void *arguments) {
    void *parameters[] = {arguments};
    size_t bytes = self->bytes;
    void *extra[] = {(void *)BUFFER_POINTER, arguments, (void *)BUFFER_SIZE, &bytes, (void *)BUFFER_END};
    if (self->convention == STRUCT)
        return ((struct_fn)self->call)(arguments, stream);
    if (self->convention == OVERLAPPING) {
        Attribute attribute = {OVERLAPS, 0, 1, {0}};
        Config config = {{self->grid[0], self->grid[1], self->grid[2]}, {self->threads, 1, 1}, self->shared, stream, &attribute, 1};
        return ((launch_ex_fn)self->call)(&config, self->function, parameters, NULL);
    }
    return ((launch_fn)self->call)(self->function, self->grid[0], self->grid[1], self->grid[2], self->threads, 1, 1, self->shared, stream,
                                   self->convention == BUFFER ? NULL : parameters, self->convention == BUFFER ? extra : NULL);
}

/* Return an address; set `failed` where Python reports an error, which a value alone does not prove. */
static uint64_t read_address(PyObject *number, int *failed) {
    uint64_t address = PyLong_AsUnsignedLongLong(number);
    if (address == UINT64_MAX && PyErr_Occurred())
        *failed = 1;
    return address;
}

/* Write tensor maps at their slots; return the driver's status. */
static int write_maps(const Launch *self, const uint64_t *addresses, unsigned char *arguments) {
    unsigned i;
    int status = 0;
    for (i = 0; i < self->map_count && status == 0; i++)
        status = write_map(self, &self->maps[i], addresses[self->maps[i].source], arguments + self->maps[i].slot);
    return status;
}

static PyObject *launch_launch(Launch *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t words[MAX_BYTES / sizeof(uint64_t)], addresses[MAX_ADDRESSES]; /* a struct is aligned to 8 */
    unsigned char *arguments = (unsigned char *)words;
    unsigned i, slot_count = self->slot_count;
    int status, failed = 0;
    void *stream;
    if (count != (Py_ssize_t)self->address_count + 1) {
        PyErr_Format(PyExc_TypeError, "launch takes a stream and %u addresses (got %zd arguments)", self->address_count, count);
        return NULL;
    }
    memcpy(arguments, self->arguments, self->bytes);
    stream = (void *)(uintptr_t)read_address(*args++, &failed);
    for (i = 0; i < slot_count; i++) {
        addresses[i] = read_address(args[i], &failed);
        memcpy(arguments + self->slots[i], &addresses[i], sizeof addresses[i]);
    }
    for (; i < self->address_count; i++)
        addresses[i] = read_address(args[i], &failed);
    if (failed)
        return NULL;
    if (self->map_count > 0 && (status = write_maps(self, addresses, arguments)) != 0)
        return PyLong_FromLong(-(long)status);
    Py_BEGIN_ALLOW_THREADS
    status = call(self, stream, arguments);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

static void launch_dealloc(Launch *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    unsigned i;
    for (i = 0; i < self->map_count; i++)
        PyMem_Free(self->maps[i].entries);
    PyMem_Free(self->maps);
    Py_XDECREF(self->constant);
    Py_XDECREF(self->owner);
    release(self);
    Py_DECREF(type);
}

/* Read what remains of the arguments of Launch(...), whose numbers are set. */
static int read_template(Launch *self, PyObject *constant, PyObject *slots, PyObject *maps) {
    Py_ssize_t bytes = PyBytes_Size(constant);
    if (bytes < 0)
        return -1;
    if (bytes > MAX_BYTES) {
        PyErr_Format(PyExc_ValueError, "arguments: at most %d bytes (got %zd)", MAX_BYTES, bytes);
        return -1;
    }
    self->bytes = (size_t)bytes;
    self->arguments = PyBytes_AsString(constant);
    return read_slots(self, slots) || read_maps(self, maps) ? -1 : 0;
}

/* A launch is immutable but for its cache, so other threads never see half of one. */
static PyObject *launch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    unsigned long long called, function, describe;
    PyObject *constant, *slots, *maps, *owner;
    unsigned grid[3], threads, shared;
    int convention;
    Launch *self;
    if (kwargs != NULL && PyDict_Size(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "Launch takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "iKK(III)IIOOKOO", &convention, &called, &function, &grid[0], &grid[1], &grid[2], &threads, &shared, &constant,
                          &slots, &describe, &maps, &owner))
        return NULL;
    if ((self = (Launch *)PyType_GenericAlloc(type, 0)) == NULL)
        return NULL;
    self->convention = convention;
    self->call = (void *)(uintptr_t)called;
    self->function = (void *)(uintptr_t)function;
    self->describe = (describe_fn)(uintptr_t)describe;
    memcpy(self->grid, grid, sizeof self->grid);
    self->threads = threads;
    self->shared = shared;
    Py_INCREF(constant);
    self->constant = constant;
    Py_INCREF(owner);
    self->owner = owner;
    if (read_template(self, constant, slots, maps)) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyMethodDef launch_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launch_launch, METH_FASTCALL,
     "launch(stream, addresses of slots in order, those of tensor maps alone) -> status, negated of a tensor map"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot launch_slots[] = {
    {Py_tp_doc, "Launch(convention, called, function, (grid_x, grid_y, grid_z), threads, shared, arguments, slots, describe, maps, owner)"},
    {Py_tp_new, launch_new},
    {Py_tp_dealloc, launch_dealloc},
    {Py_tp_methods, launch_methods},
    {0, NULL},
};

static PyType_Spec launch_spec = {"tunedgemm.backends._native.Launch", sizeof(Launch), 0, Py_TPFLAGS_DEFAULT, launch_slots};

static struct PyModuleDef native_module = {PyModuleDef_HEAD_INIT, "_native", "Launches of kernels.", -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&native_module), *type;
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
