// Describes a GPU to DeepGEMM in a process without one, so that it compiles a kernel for that GPU.
//
// Preloaded, it answers the two questions of CUDA's runtime that DeepGEMM asks, and stands for the
// driver. The file of a compiled kernel is printed instead of loaded.
// -DMAJOR, -DMINOR and -DSMS describe the GPU.
#include <cstdio>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime_api.h>

extern "C" {

cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    std::memset(properties, 0, sizeof *properties);
    properties->major = MAJOR;
    properties->minor = MINOR;
    properties->multiProcessorCount = SMS;
    return cudaSuccess;
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
