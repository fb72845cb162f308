/* ``call.h`` of the plugin in C. */
#include <stdint.h>

typedef struct {
  const void *x, *weight, *x_scale, *w_scale, *bias;
  void *out, *workspace;
  int64_t m, n, k, batches, split;
} TunedGemmCall;

__attribute__((visibility("default"))) int tunedgemm_launch(const TunedGemmCall *call, void *stream);
__attribute__((visibility("default"))) int64_t tunedgemm_workspace(const TunedGemmCall *call);
