// The launch of a kernel of sm_90, whose blocks form clusters.
#include "cute/tensor.hpp"
#include "cutlass/device_kernel.h"

namespace tunedgemm {

// Sets up a device before the first launch: kernels need an opt-in for more shared memory.
template <class Kernel>
cudaError_t set_up_kernel() {
  return cudaFuncSetAttribute(cutlass::device_kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::SharedStorageSize);
}

template <class Kernel, class Cluster>
cudaError_t launch_kernel(typename Kernel::Params& params, dim3 grid, cudaStream_t stream) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {cute::size<0>(Cluster{}), cute::size<1>(Cluster{}), 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = Kernel::get_block_shape();
  config.dynamicSmemBytes = Kernel::SharedStorageSize;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = cute::size(Cluster{}) > 1 ? 1 : 0;
  void* parameters[] = {&params};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(cutlass::device_kernel<Kernel>), parameters);
}

}  // namespace tunedgemm
