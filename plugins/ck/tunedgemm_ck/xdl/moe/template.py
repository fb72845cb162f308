"""Render the source of one stage of fmoe: CK's device op, and the code around it in ``sources``."""

from __future__ import annotations

import functools
from pathlib import Path

from tunedgemm.plugin import PluginError

from tunedgemm_ck.problem import Problem
from tunedgemm_ck.stages import render_constants
from tunedgemm_ck.xdl.moe.cut import RENDERED_ACTIVATIONS, cut_of, unrenderable
from tunedgemm_ck.xdl.moe.names import BLOCK, DTYPE_WORDS, MoeInstance
from tunedgemm_ck.xdl.template import CK_TYPES, headers_of

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
constexpr int tile_m = {of.m};

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
    {threads}, {of.m}, {of.n}, {of.k}, {cut.k1}, {cut.k1}, 16, 16, {cut.per_wave[0]}, {cut.per_wave[1]},
    S<{k0}, {rows}, 1>, S<1, 0, 2>, S<1, 0, 2>, 2, {cut.k1}, {cut.k1}, 0,
    S<{k0}, {rows}, 1>, S<1, 0, 2>, S<1, 0, 2>, 2, {cut.k1}, {cut.k1}, 0,
    {cut.shuffle_m}, {cut.per_wave[1]}, S<1, {cut.store_m}, 1, {cut.store_n}>, S<{cut.store}, 1, 1, 1>,
    ck::BlockGemmPipelineScheduler::Intrawave, ck::BlockGemmPipelineVersion::v{of.pipeline}, {act}, false, first, weighted,{token}
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
    head = _HEAD.format(name=of.name, problem=f"{problem.op} on {problem.gfx}") + headers_of(header, SINCE) + "\n"
    types = _TYPES.format(
        dtype=_type(of.dtypes[0]),
        outdtype=_type(of.dtypes[2]),
        sum="int32_t" if of.dtypes[0] == "I8" else "float",
        first=_truth(of.stage == 1),
        weighted=_truth(of.weighted),
        scaled=_truth(of.quant != 0),
        blocks=_truth(of.quant == BLOCK),
        of=of,
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
        of=of,
        cut=cut,
        k0=of.k // cut.k1,
        rows=of.threads // (of.k // cut.k1),
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
