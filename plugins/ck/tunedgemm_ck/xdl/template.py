"""Render the sources of Composable Kernel's instances: one shared object each.

A source includes CK's headers and exports the functions of ``call.h``.
"""

from __future__ import annotations

import attrs

from tunedgemm_ck.problem import Problem
from tunedgemm_ck.xdl.names import XdlInstance

_IMPL = "ck/tensor_operation/gpu/device/impl/"


@attrs.frozen
class DeviceOp:
    """A class of CK that computes an op.

    Attributes:
        header: the file that declares it.
        name: of the class, in ``ck::tensor_operation::device``.
        since: the first release of ROCm whose CK has it in the form used here.
        split: whether K can be split. Otherwise the launch ignores the solution's splitK, which
            AITER's
            tuner counts there too.
        epilogue: operands of the epilogue in addition to a bias.
        scaled: whether the class takes block scales, as template parameters and arguments.
    """

    header: str
    name: str
    since: str
    split: bool = True
    epilogue: tuple[str, ...] = ()
    scaled: bool = False


_V3 = "device_gemm_multiple_d_xdl_cshuffle_v3"
_ROWS = ("w_scale", "x_scale")

#: Sources: CK's changelog and the headers of 2024-10, 2025-07 and 2025-11. Scales of single rows
#: need CK of ROCm 7.0. The class of ROCm 6.4 has the same header but takes only whole tiles of
#: scales; its ``IsSupportedArgument`` rejects others.
DEVICE_OPS = {
    "a16w16": DeviceOp(f"{_V3}.hpp", "DeviceGemmMultiD_Xdl_CShuffle_V3", "6.3"),
    "a8w8": DeviceOp(f"{_V3}.hpp", "DeviceGemmMultiD_Xdl_CShuffle_V3", "6.3", epilogue=_ROWS),
    "a8w8_bpreshuffle": DeviceOp(f"{_V3}_b_preshuffle.hpp", "DeviceGemmMultiD_Xdl_CShuffle_V3_BPreshuffle", "7.0", epilogue=_ROWS),
    "a8w8_blockscale": DeviceOp(f"{_V3}_ab_scale.hpp", "DeviceGemmMultiD_ABScale_Xdl_CShuffle_V3", "7.0", scaled=True),
    "a8w8_blockscale_bpreshuffle": DeviceOp(
        f"{_V3}_blockscale_bpreshuffle.hpp", "DeviceGemmMultiD_BlockScale_Xdl_CShuffle_V3_BPreshuffle", "7.0", split=False, scaled=True
    ),
    "a4w4_blockscale": DeviceOp("device_gemm_xdl_cshuffle_v3_mx.hpp", "DeviceGemmMX_Xdl_CShuffleV3", "7.0", scaled=True),
    "batched_bf16": DeviceOp(
        "device_batched_gemm_multiple_d_xdl_cshuffle_v3.hpp", "DeviceBatchedGemmMultiD_Xdl_CShuffle_V3", "6.4", split=False
    ),
    "batched_a8w8": DeviceOp(
        "device_batched_gemm_multiple_d_xdl_cshuffle_v3.hpp", "DeviceBatchedGemmMultiD_Xdl_CShuffle_V3", "6.4", split=False, epilogue=_ROWS
    ),
}

#: CK's words for dtypes.
CK_TYPES = {
    "bf16": "ck::bhalf_t",
    "fp16": "ck::half_t",
    "fp32": "float",
    "int8": "int8_t",
    "fp8_e4m3fn": "ck::f8_t",
    "fp8_e4m3fnuz": "ck::f8_t",
    "fp4x2": "ck::f4x2_pk_t",
}

_HEADERS = """\
#if !__has_include("{header}")
#error "Composable Kernel's {header} is missing: ROCm {since} or later has it (package composablekernel-dev)"
#endif
#include "ck/ck.hpp"
#include "ck/tensor_operation/gpu/device/gemm_specialization.hpp"
#include "ck/tensor_operation/gpu/device/tensor_layout.hpp"
#include "ck/tensor_operation/gpu/element/element_wise_operation.hpp"
#include "ck/utility/blkgemmpipe_scheduler.hpp"
#include "{header}"
"""

_HEAD = """\
// {name}
// {problem}
#include "call.h"

#include <array>
#include <cstdint>
#include <hip/hip_runtime.h>

{headers}
namespace {{

using Row = ck::tensor_layout::gemm::RowMajor;
using Col = ck::tensor_layout::gemm::ColumnMajor;
using Same = ck::tensor_operation::element_wise::PassThrough;
using Spec = ck::tensor_operation::device::GemmSpecialization;
template <ck::index_t... Values>
using S = ck::Sequence<Values...>;

using In = {dtype};
using Out = {outdtype};
using Sum = {sum};
"""

_EPILOGUE = """
// The sum times the scales, plus the bias, rounded once: older versions of CK's conversion to
// bfloat16 truncate.
struct Epilogue {{
  template <typename E, typename C, typename... Ds>
  __host__ __device__ constexpr void operator()(E& e, const C& c, const Ds&... ds) const {{
    e = rounded<E>(combined(ck::type_convert<float>(c), ck::type_convert<float>(ds)...));
  }}
  template <typename E>
  __host__ __device__ static constexpr E rounded(float value) {{
    if constexpr (ck::is_same_v<E, ck::bhalf_t>) return ck::bf16_convert_rtn<ck::bhalf_t>(value);
    else return ck::type_convert<E>(value);
  }}
  {function}
}};
"""

_SPLIT = """
// The logarithm of the parts of K.
int split_of(const TunedGemmCall& call) {{ {body} }}
"""

_COMBINE = {
    (0, 0): "{ return sum; }",
    (0, 1): "{ return sum + d0; }",
    (2, 0): "{ return sum * d0 * d1; }",
    (2, 1): "{ return sum * d0 * d1 + d2; }",
}

_TAIL = """
{choice}

// Queries the device's properties once per set of sizes, since that takes longer than a launch.
template <typename Op, typename Argument>
bool supported(const TunedGemmCall& call, const Argument& argument) {{
  thread_local int64_t known[5] = {{-1, -1, -1, -1, -1}};
  const int64_t sizes[5] = {{call.m, call.n, call.k, call.batches, call.split}};
  bool same = true;
  for (int i = 0; i < 5; ++i) same = same && known[i] == sizes[i];
  if (same) return true;
  if (!Op::IsSupportedArgument(argument){checked}) return false;
  for (int i = 0; i < 5; ++i) known[i] = sizes[i];
  return true;
}}

}}  // namespace

TUNED_GEMM_EXPORT int64_t tunedgemm_workspace(const TunedGemmCall* call) {{
  return with_gemm(*call, [&](auto gemm) -> int64_t {{
    auto argument = argument_of<decltype(gemm)>(*call);
    return supported<decltype(gemm)>(*call, argument) ? static_cast<int64_t>(gemm.GetWorkSpaceSize(&argument)) : -1;
  }});
}}

TUNED_GEMM_EXPORT int tunedgemm_launch(const TunedGemmCall* call, void* stream) try {{
  return with_gemm(*call, [&](auto gemm) -> int {{
    auto argument = argument_of<decltype(gemm)>(*call);
    if (!supported<decltype(gemm)>(*call, argument)) return TUNED_GEMM_UNSUPPORTED;
    if (call->workspace != nullptr) gemm.SetWorkSpacePointer(&argument, call->workspace);
    decltype(gemm)::MakeInvoker().Run(argument, StreamConfig{{static_cast<hipStream_t>(stream), false}});
    return 0;
  }});
}} catch (...) {{  // CK throws where a launch fails
  const hipError_t error = hipGetLastError();
  return error == hipSuccess ? static_cast<int>(hipErrorUnknown) : static_cast<int>(error);
}}
"""


#: Tiles that fit the sizes exactly need no bounds checks; AITER's launchers choose alike.
_EITHER = """\
template <typename Act>
auto with_gemm(const TunedGemmCall& call, const Act& act) {{
  const bool whole = call.m % {m} == 0 && call.n % {n} == 0 && call.k % (int64_t{{{k}}} << split_of(call)) == 0;
  return whole ? act(Gemm<Spec::Default>{{}}) : act(Gemm<Spec::MNKPadding>{{}});
}}
"""

#: For a class that takes the parts of K after its other arguments, in versions that have parts.
_SET_SPLIT = """\
auto argument = {made};
  if constexpr (requires {{ Op{{}}.SetKBatch(&argument, 1); }}) {{
    if (call.split > 0) Op{{}}.SetKBatch(&argument, 1 << split_of(call));
  }}
  return argument;"""

#: CK does not pad mxfp4; rows beyond M are read as zeros and not written.
_DEFAULT = """\
template <typename Act>
auto with_gemm(const TunedGemmCall&, const Act& act) {
  return act(Gemm<Spec::Default>{});
}
"""


#: Options that inline all of a kernel.
INLINED = ("-mllvm", "-amdgpu-early-inline-all=true", "-mllvm", "-amdgpu-function-calls=false", "-mllvm", "-enable-post-misched=0")


def headers_of(header: str, since: str) -> str:
    """Return the includes of a device op's *header*, which CK has *since* a release of ROCm."""
    return _HEADERS.format(header=_IMPL + header, since=since)


def render(instance: XdlInstance, problem: Problem) -> str:
    """Return the source of an instance's shared object for a problem, the same in every process."""
    op = DEVICE_OPS[problem.op]
    description = (
        f"{problem.op} {problem.dtype} -> {problem.outdtype}, bias {problem.bias_dtype or 'none'}, {problem.layout}, {problem.gfx}"
    )
    head = _HEAD.format(
        name=instance.name,
        problem=description,
        headers=headers_of(op.header, op.since),
        dtype=CK_TYPES[problem.dtype],
        outdtype=CK_TYPES[problem.outdtype],
        sum="int32_t" if problem.dtype == "int8" else "float",
    )
    split = _SPLIT.format(body="return static_cast<int>(call.split);" if op.split else "(void)call; return 0;")
    if problem.op == "a4w4_blockscale":
        middle, choice = split + _mx(instance), _DEFAULT
    else:
        middle = _epilogue(op, problem) + _gemm(op, instance, problem) + split + _argument(op, problem)
        choice = _EITHER.format(m=instance.m, n=instance.n, k=instance.k)
    # older versions turn a split into parts no shorter than K, which sums all of K several times
    checked = " || (call.split > 0 && argument.KRead >= call.k)" if problem.op == "a8w8_blockscale" else ""
    return head + middle + _TAIL.format(choice=choice, checked=checked)


def flags(instance: XdlInstance, problem: Problem) -> tuple[str, ...]:
    """Return hipcc's flags for this library: CK's inlining options, and the kind of fp8 of
    ``f8_t``.
    """
    del instance
    ocp = has_ocp(problem.gfx)
    return (f"-DCK_USE_OCP_FP8={ocp}", f"-DCK_USE_FNUZ_FP8={1 - ocp}", "-DCK_ENABLE_ALL_DTYPES=1", *INLINED)


def has_ocp(gfx: str) -> int:
    """Return 1 where the fp8 of an architecture is OCP's, else 0."""
    return int(gfx not in ("gfx90a", "gfx942"))


def _epilogue(op: DeviceOp, problem: Problem) -> str:
    """Return the functor that converts sums to the output."""
    scales, biases = len(op.epilogue), int(bool(problem.bias_dtype))
    names = "".join(f", float d{place}" for place in range(scales + biases))
    function = f"__host__ __device__ static constexpr float combined(float sum{names}) {_COMBINE[scales, biases]}"
    return _EPILOGUE.format(function=function)


def _operands(op: DeviceOp, problem: Problem) -> list[tuple[str, str, str, str]]:
    """Return the epilogue's operands: dtype, layout, field of the call, and batch stride.

    The other strides of all of them are 0.
    """
    scales = [("float", "Row", "w_scale", "n"), ("float", "Col", "x_scale", "m")] if op.epilogue else []
    return [*scales, (CK_TYPES[problem.bias_dtype], "Row", "bias", "n")] if problem.bias_dtype else scales


def _sequence(numbers: tuple[int, ...]) -> str:
    return f"S<{', '.join(map(str, numbers))}>"


def _gemm(op: DeviceOp, of: XdlInstance, problem: Problem) -> str:
    """Return the alias of CK's class with all parameters of the instance."""
    operands = _operands(op, problem)
    # operands along N use the vector width that the name gives for w_scale; x_scale has one value
    # per row
    vectors = {"w_scale": (of.store[1:] or (1,))[0], "x_scale": (of.store[2:] or (1,))[0], "bias": of.store[0]}
    store = (of.store[0], *(vectors[field] for _, _, field, _ in operands))
    types = f"{'In, float, In, float' if op.scaled else 'In, In'}, ck::Tuple<{_joined(operands, 0)}>, Out, Sum, Sum"
    blocks = f"{of.threads}, {', '.join(map(str, of.scale))}" if op.scaled else str(of.threads)
    return f"""
template <Spec Padding>
using Gemm = ck::tensor_operation::device::{op.name}<
    Row, Col, ck::Tuple<{_joined(operands, 1)}>, Row,
    {types}, Same, Same, Epilogue, Padding,
    {blocks}, {of.m}, {of.n}, {of.k}, {of.a_k1}, {of.b_k1},
    {of.xdl[0]}, {of.xdl[1]}, {of.per_wave[0]}, {of.per_wave[1]},
    {_sequence(of.a_cluster)}, S<1, 0, 2>, S<1, 0, 2>, 2, {of.a_k1}, {of.a_k1}, 0,
    {_sequence(of.b_cluster)}, S<1, 0, 2>, S<1, 0, 2>, 2, {of.b_k1}, {of.b_k1}, 0,
    {of.shuffle[0]}, {of.shuffle[1]}, {_sequence(of.c_cluster)}, {_sequence(store)},
    ck::BlockGemmPipelineScheduler::{of.scheduler.capitalize()}, ck::BlockGemmPipelineVersion::v{of.pipeline}, In>;
"""


def _joined(operands: list[tuple[str, str, str, str]], index: int) -> str:
    return ", ".join(operand[index] for operand in operands)


def _argument(op: DeviceOp, problem: Problem) -> str:
    """Return the function that fills CK's argument from a call."""
    operands = _operands(op, problem)
    count = len(operands)
    pointers = f"std::array<const void*, {count}>{{{', '.join(f'call.{field}' for _, _, field, _ in operands)}}}"
    zeros = f"std::array<ck::index_t, {count}>{{{', '.join('0' for _ in operands)}}}"
    sizes, ending = "m, n, k, k, k", "Same{}, Same{}, Epilogue{}"
    if problem.op.startswith("batched_"):
        between = f"std::array<ck::index_t, {count}>{{{', '.join(operand[3] for operand in operands)}}}"
        middle = f"m, n, k, batches, k, k, {zeros}, n, m * k, n * k, {between}, m * n"
    elif op.scaled:
        middle = f"{sizes}, {zeros}, n, call.x_scale, call.w_scale"
    else:
        middle = f"{sizes}, {zeros}, n, 1 << split_of(call)"
    batches = "\n  const auto batches = static_cast<ck::index_t>(call.batches);" if problem.op.startswith("batched_") else ""
    made = f"Op::MakeArgument(\n      call.x, call.weight, {pointers}, call.out, {middle},\n      {ending})"
    body = _SET_SPLIT.format(made=made) if op.scaled and op.split else f"return {made};"
    return f"""
template <typename Op>
auto argument_of(const TunedGemmCall& call) {{
  const auto m = static_cast<ck::index_t>(call.m), n = static_cast<ck::index_t>(call.n), k = static_cast<ck::index_t>(call.k);{batches}
  {body}
}}
"""


def _mx(of: XdlInstance) -> str:
    """Return the class and the argument of mxfp4: sizes count values, tiles count bytes."""
    return f"""
// A word has four e8m0 scales, each of 32 values.
using Scales = int32_t;

template <Spec Padding>
using Gemm = ck::tensor_operation::device::DeviceGemmMX_Xdl_CShuffleV3<
    Row, ck::tensor_layout::gemm::MFMA, Row, In, Scales, In, Scales, Out, Sum, Out, Same, Same, Same, Padding,
    32, {of.threads}, {of.m}, {of.n}, {of.k}, {of.a_k1}, {of.b_k1},
    {of.xdl[0]}, {of.xdl[1]}, {of.per_wave[0]}, {of.per_wave[1]},
    {_sequence(of.a_cluster)}, S<1, 0, 2>, S<1, 0, 2>, 2, {of.a_k1}, {of.a_k1}, true,
    {_sequence(of.b_cluster)}, S<1, 0, 2>, S<1, 0, 2>, 2, {of.b_k1}, {of.b_k1}, true,
    {of.shuffle[0]}, {of.shuffle[1]}, {_sequence(of.c_cluster)}, {of.store[0]},
    ck::BlockGemmPipelineScheduler::{of.scheduler.capitalize()}, ck::BlockGemmPipelineVersion::v{of.pipeline}, In, In>;

// A row of scales has a multiple of 8 of them.
template <typename Op>
auto argument_of(const TunedGemmCall& call) {{
  const auto m = static_cast<ck::index_t>(call.m), n = static_cast<ck::index_t>(call.n), k = static_cast<ck::index_t>(call.k);
  const ck::index_t scales = (k / 32 + 7) / 8 * 8;
  return Op::MakeArgument(
      static_cast<const In*>(call.x), static_cast<const Scales*>(call.x_scale), static_cast<const In*>(call.weight),
      static_cast<const Scales*>(call.w_scale), static_cast<Out*>(call.out), m, n, k, k, scales, k, scales, n, 1 << split_of(call),
      Same{{}}, Same{{}}, Same{{}});
}}
"""
