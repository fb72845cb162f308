"""Render the source of one stage of fmoe: CK's device op, and the code around it in ``sources``."""

from __future__ import annotations

import functools
from pathlib import Path

from tunedgemm.plugin import PluginError

from tunedgemm_ck.problem import Problem
from tunedgemm_ck.stages import render_constants
from tunedgemm_ck.xdl.moe.cut import RENDERED_ACTIVATIONS, cut_of, unrenderable
from tunedgemm_ck.xdl.moe.names import BLOCK, DTYPE_WORDS, MoeInstance
from tunedgemm_ck.xdl.template import CK_TYPES, IMPL

_SOURCES = Path(__file__).parents[1] / "sources"

#: The first release of ROCm whose CK has the device ops; the templates follow its headers of
#: November 2025.
SINCE = "7.0"

_HEAD = """\
// {name}
// {problem}
#include "moe_call.h"
#include "moe.h"
#include "moe_kernels.h"

#include <array>
#include <cstdint>
#include <hip/hip_runtime.h>

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

_TYPES = """\
namespace tunedgemm::stage {{

using Row = ck::tensor_layout::gemm::RowMajor;
using Col = ck::tensor_layout::gemm::ColumnMajor;
using Same = ck::tensor_operation::element_wise::PassThrough;
template <ck::index_t... Values>
using S = ck::Sequence<Values...>;

using In = {dtype};
using Out = {outdtype};
using Sum = {sum};
constexpr bool first = {first}, weighted = {weighted}, scaled = {scaled}, blocks = {blocks};
constexpr int tile_m = {m};

// CK's kernel has applied scales and weights of the routing: the sum is rounded once. Older
// versions of CK's conversion to bfloat16 truncate.
struct Epilogue {{
  template <typename E, typename C, typename... Ds>
  __host__ __device__ constexpr void operator()(E& e, const C& c, const Ds&...) const {{
    if constexpr (ck::is_same_v<E, ck::bhalf_t>) e = ck::bf16_convert_rtn<ck::bhalf_t>(ck::type_convert<float>(c));
    else e = ck::type_convert<E>(c);
  }}
}};
"""

_GEMM = """
using Gemm = ck::tensor_operation::device::{name}<
    Row, Col, {layouts}, Row,
    {types}, Out, Sum, float, Same, Same, Epilogue, ck::tensor_operation::device::GemmSpecialization::Default,
    {threads}, {m}, {n}, {k}, {k1}, {k1}, 16, 16, {per_wave_m}, {per_wave_n},
    S<{k0}, {rows}, 1>, S<1, 0, 2>, S<1, 0, 2>, 2, {k1}, {k1}, 0,
    S<{k0}, {rows}, 1>, S<1, 0, 2>, S<1, 0, 2>, 2, {k1}, {k1}, 0,
    {shuffle_m}, {per_wave_n}, S<1, {store_m}, 1, {store_n}>, S<{store}, 1, 1, 1>,
    ck::BlockGemmPipelineScheduler::Intrawave, ck::BlockGemmPipelineVersion::v{pipeline}, {act}, false, first, weighted,{token}
    ck::index_t, In>;

}}  // namespace tunedgemm::stage

"""


def render_stage(of: MoeInstance, problem: Problem) -> str:
    """Return the source of a stage's shared object, the same in every process.

    Raises:
        PluginError: the instance is of the other stage, or cannot be rendered.
    """
    if reason := unrenderable(of) or (f"it is of stage {of.stage}, not {problem.stage}" if of.stage != problem.stage else ""):
        raise PluginError(f"ck {of.name}: {reason}")
    header = "device_moe_gemm_blockscale.hpp" if of.quant == BLOCK else "device_moe_gemm.hpp"
    head = _HEAD.format(name=of.name, problem=f"{problem.op} on {problem.gfx}", header=IMPL + header, since=SINCE)
    types = _TYPES.format(
        dtype=_type(of.dtypes[0]),
        outdtype=_type(of.dtypes[2]),
        sum="int32_t" if of.dtypes[0] == "I8" else "float",
        first=_truth(of.stage == 1),
        weighted=_truth(of.weighted),
        scaled=_truth(of.quant != 0),
        blocks=_truth(of.quant == BLOCK),
        m=of.m,
    )
    return head + render_constants(problem) + _source("route.h") + types + _gemm(of) + _source("stages.h")


def _gemm(of: MoeInstance) -> str:
    """Return the alias of CK's class with all parameters of the instance."""
    cut, block = cut_of(of), of.quant == BLOCK
    three = "ck::Tuple<float, float, float>"
    return _GEMM.format(
        name="DeviceMoeGemmBlockScale" if block else "DeviceMoeGemm",
        layouts="ck::Tuple<Row>" if block else "ck::Tuple<Row, Col, Row>",
        types="In, float, In, float, ck::Tuple<float>" if block else f"In, In, {three}",
        threads=f"{of.threads}, 1, 128, 128" if block else str(of.threads),
        m=of.m,
        n=of.n,
        k=of.k,
        k1=cut.k1,
        per_wave_m=cut.per_wave[0],
        per_wave_n=cut.per_wave[1],
        k0=of.k // cut.k1,
        rows=of.threads // (of.k // cut.k1),
        shuffle_m=cut.shuffle_m,
        store_m=cut.store_m,
        store_n=cut.store_n,
        store=cut.store,
        pipeline=of.pipeline,
        act=RENDERED_ACTIVATIONS[of.act] if of.stage == 1 else 0,
        token="" if block else f" {_truth(of.quant != 1)},",
    )


def _type(word: str) -> str:
    dtype = DTYPE_WORDS[word]
    return CK_TYPES["fp8_e4m3fn" if dtype == "fp8" else dtype]


def _truth(value: bool) -> str:
    return "true" if value else "false"


@functools.cache
def _source(name: str) -> str:
    return (_SOURCES / name).read_text("utf-8") + "\n"
