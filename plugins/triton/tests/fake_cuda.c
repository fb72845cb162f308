// A CUDA driver without a device: it records what a launch passes. Linked as libcuda.so.1.
#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define MOST 4096
// Handles of modules are 1, 2, ...; a function has its module's.
static unsigned char is_loaded[MOST];
static uintptr_t modules;
// Bytes of each parameter of the next launch, and the text and parameters of the last one.
static size_t sizes[64], count, used;
static char head[256];
static unsigned char recorded[8192];

void fake_sizes(size_t number, const size_t *of_each) {
  count = number;
  memcpy(sizes, of_each, number * sizeof(size_t));
}
const char *fake_head(void) { return head; }
void fake_recorded(unsigned char *into) { memcpy(into, recorded, used); }

CUresult cuInit(unsigned int flags) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_INVALID_HANDLE ? "unloaded function" : "error";
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) {
  *device = 0;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 0;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) {
  *version = 13020;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? 9
           : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? 0
                                                                      : 227 << 10;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  if (modules + 1 >= MOST)
    return CUDA_ERROR_OUT_OF_MEMORY;
  *module = (CUmodule)++modules;
  is_loaded[modules] = 1;
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) {
  is_loaded[(uintptr_t)module] = 0;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)module;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
  *clusters = 1;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

// A map is what it was made of.
struct map {
  uint64_t address, sizes[3], strides[2];
  uint32_t box[3], steps[3], dtype, rank, interleave, swizzle, promotion, fill;
};
_Static_assert(sizeof(struct map) <= sizeof(CUtensorMap), "a map's fields fit");

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType dtype, cuuint32_t rank, void *address,
                                const cuuint64_t *extent, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  struct map made = {.address = (uint64_t)address, .dtype = dtype, .rank = rank, .interleave = interleave,
                     .swizzle = swizzle, .promotion = promotion, .fill = fill};
  for (unsigned axis = 0; axis < rank; ++axis) {
    made.sizes[axis] = extent[axis];
    made.box[axis] = box[axis];
    made.steps[axis] = steps[axis];
    if (axis + 1 < rank)
      made.strides[axis] = strides[axis];
  }
  memset(map, 0, sizeof *map);
  memcpy(map, &made, sizeof made);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  if (!is_loaded[(uintptr_t)function])
    return CUDA_ERROR_INVALID_HANDLE;
  snprintf(head, sizeof head, "grid %u %u %u block %u %u %u shared %u stream %lu attributes %u", config->gridDimX,
           config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY, config->blockDimZ,
           config->sharedMemBytes, (unsigned long)config->hStream, config->numAttrs);
  used = 0;
  for (size_t index = 0; index < count; ++index) {
    memcpy(recorded + used, parameters[index], sizes[index]);
    used += sizes[index];
  }
  return CUDA_SUCCESS;
}
