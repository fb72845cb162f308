// Describes a GPU to DeepGEMM in a process without one, so that it compiles a kernel for that GPU.
//
// Preloaded, it answers what DeepGEMM and torch's allocator ask of CUDA's runtime, and stands for
// the driver. The file of a compiled kernel is printed instead of loaded.
// -DMAJOR, -DMINOR and -DSMS describe the GPU.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime_api.h>

extern "C" {

cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int) {
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = *greatest = 0;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    std::memset(properties, 0, sizeof *properties);
    properties->major = MAJOR;
    properties->minor = MINOR;
    properties->multiProcessorCount = SMS;
    return cudaSuccess;
}

// Since 2.8.1 it makes a context by this call.
cudaError_t cudaFree(void*) {
    return cudaSuccess;
}

// Torch's allocator for tensors of the described GPU.
void* allocate(ssize_t bytes, int, cudaStream_t) {
    return std::malloc(bytes);
}

void release(void* memory, ssize_t, int, cudaStream_t) {
    std::free(memory);
}

CUresult cuTensorMapEncodeTiled(
    CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
    const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    return CUDA_SUCCESS;
}

CUresult cuLibraryLoadFromFile(
    CUlibrary*, const char* file, CUjit_option*, void**, unsigned, CUlibraryOption*, void**, unsigned) {
    std::fprintf(stderr, "compiled %s\n", file);
    return CUDA_ERROR_NO_DEVICE;
}

CUresult cuGetErrorName(CUresult, const char** text) {
    *text = "CUDA_ERROR_NO_DEVICE";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char** text) {
    *text = "the GPU is only described";
    return CUDA_SUCCESS;
}
}
