/* hipBLASLt's C++ functions of names (hipblaslt-ext.hpp), as its compiler mangles and returns them. */
#ifdef FAKE_HIPBLASLT
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#define EXPORT __attribute__((visibility("default")))

typedef void *hipblasLtHandle_t;
typedef struct _hipblasLtMatmulAlgo_t {
    uint8_t data[16];
    size_t max_workspace_bytes;
} hipblasLtMatmulAlgo_t;

/* Index 1000 + s has kernel s / 2: two solutions share it. Kernels 0 and 2 have names of few characters:
 * those of their solutions have 16 and 15, of which only 15 fit into a std::string itself. */
static int solution_of(const hipblasLtMatmulAlgo_t &algo) {
    int32_t index;
    std::memcpy(&index, algo.data, sizeof index);
    return index - 1000;
}

#ifndef FAKE_LT_NAMELESS
namespace hipblaslt_ext {
EXPORT std::string getKernelNameFromAlgo(hipblasLtHandle_t handle, hipblasLtMatmulAlgo_t &algo) {
    if (!handle) {
        return "";
    }
    int kernel = solution_of(algo) / 2;
    return kernel == 0 ? "Cijk_000" : kernel == 2 ? "Cijk_22" : "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT16x16x" + std::to_string(kernel);
}
EXPORT std::string getSolutionNameFromAlgo(hipblasLtHandle_t handle, hipblasLtMatmulAlgo_t &algo) {
    return getKernelNameFromAlgo(handle, algo) + "_SN_WGM" + std::to_string(solution_of(algo));
}
}
#endif
#endif
