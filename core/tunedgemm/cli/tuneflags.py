"""Flags of ``tunedgemm tune``: AITER's with their names and defaults, and further ones."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tunedgemm.cli.flags import add_model, add_overrides
from tunedgemm.process.paths import expanded
from tunedgemm.text.number import whole_number

#: Begins the help of a flag that changes nothing here.
ACCEPTED = "accepted for AITER's scripts"


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "t", "1", "yes", "y"):
        return True
    if text.lower() in ("false", "f", "0", "no", "n"):
        return False
    raise argparse.ArgumentTypeError(f"expected True or False (got {text!r})")


def tables(text: str) -> Path | tuple[Path, ...]:
    """Return the paths of a text such as ``A:B``; a Path for one."""
    paths = [expanded(part) for part in text.split(os.pathsep) if part]
    return paths[0] if len(paths) == 1 else tuple(paths)


def _part(text: str) -> tuple[int, int]:
    part, parts = map(whole_number, text.partition("/")[::2])
    if part is None or parts is None:
        raise argparse.ArgumentTypeError(f"expected I/N such as 2/8 (got {text!r:.60})")
    return part, parts


def _port(text: str) -> int:
    port = whole_number(text)
    if port is None or port > 65535:
        raise argparse.ArgumentTypeError(f"expected a port, 0 to 65535 (got {text!r:.60})")
    return port


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Define the flags; those of the backends follow once ``--libtype`` is known."""
    _add_files(parser.add_argument_group("shapes and tables"))
    add_model(parser.add_argument_group("shapes of a model, instead of -i; its ops are tuned one after the other"))
    add_overrides(parser.add_argument_group("changes of all shapes"))
    _add_choices(parser.add_argument_group("which solutions may win"))
    _add_measure(parser.add_argument_group("measurement"))
    _add_machines(parser.add_argument_group("devices"))
    live = "serve the report on this machine while it grows, at an address that is printed; PORT: a free one by default"
    parser.add_argument("--live", nargs="?", type=_port, const=0, metavar="PORT", help=live)
    _add_production(parser.add_argument_group("timing the op as it runs in production"))


def _add_files(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    captured = "those captured with AITER_TUNE_GEMM=1"
    add("--op", default="", help="op to tune; default: the op that the columns of -i fit, a16w16 for M,N,K alone and without -i")
    shapes = f"shapes: a file, the bare name of a shipped one, or a folder of lists; default: GTUNE_INPUT, else {captured}"
    add("-i", "--untune_file", "--input_file", dest="input", help=shapes)
    default = "GTUNE_TUNED, else the op's in the user folder, of --batch-invariant in its batch_invariant/"
    table = f"table, or FOLDER/ for one of each op; of A:B it is A, and B's rows count; default: {default}"
    add("-o", "--tune_file", "--tuned_file", dest="output", help=table)
    add("-o2", "--profile_file", dest="profile", default="", help="CSV to which every candidate's result is appended")
    add("--all", action="store_true", help="also tune shapes that the table already has")
    add("--last", action="store_true", help="tune only the last shape, even if the table has it; --all precedes it")
    add("--stale", action="store_true", help="tune only rows of the table whose library has another version now")
    add("--no-resume", dest="resume", action="store_false", help="do not reuse the trials of an interrupted run")
    add("--shard", type=_part, default=(1, 1), metavar="I/N", help="tune the I-th of N parts of the shapes; `table merge` joins the tables")
    add("--batch", type=int, default=100, help="shapes whose kernels are compiled ahead (default: %(default)s)")
    add("--sort", nargs="?", const=True, default=True, type=_boolean, help="sort the table by its key, N before M; a flag, or True/False")


def _add_choices(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--libtype", default="all", help="comma list of libtypes; its order decides ties; both is ck,cktile (default: %(default)s)")
    add("--errRatio", type=float, default=0.05, help="largest share of wrong elements (default: %(default)s)")
    add("--atol", type=float, help="absolute tolerance of an element; default: the op's")
    add("--rtol", type=float, help="relative tolerance of an element; default: the op's")
    add("--deterministic", action="store_true", help="only solutions with the same bits in repeated runs; these may depend on M")
    invariant = "only solutions of one bit class for each N, K: a row's bits depend on neither M, the other rows nor its place"
    add("--batch-invariant", action="store_true", help=invariant)
    add("-k", "--splitK", action="store_true", help=f"{ACCEPTED}: split-K solutions are always candidates")
    add("--preshuffle", action="store_true", help="tune the op for shuffled weights: --op OP_bpreshuffle instead of --op OP")
    add("--grouped-gemm", action="store_true", help=f"{ACCEPTED}: tunes the op with every installed backend")
    add("--mxfp4-flydsl", action="store_true", help=f"{ACCEPTED}: both stages of fmoe are always tuned as one")
    add("--with-hipblaslt", action="store_true", help=f"{ACCEPTED}: every installed backend is in --libtype all")


def _add_measure(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--cache", default="cold", metavar="cold|hot", help="cold: weights from memory, as in a model; hot: from the cache (default: cold)")
    add("--timing", default="graph", metavar="graph|eager", help="replay captured calls, or launch them one by one (default: graph)")
    add("--warmup", type=int, default=5, help="uncounted rounds before timing (default: %(default)s)")
    add("--iters", type=int, default=101, help="most rounds for a solution (default: %(default)s)")
    add("--candidates", type=int, default=0, help="solutions of each libtype to try, best guesses first; 0 is all (default: %(default)s)")
    quick = "full: try each list and many neighbours; quick: the beginning of lists whose order was measured (default: %(default)s)"
    add("--search", default="quick", metavar="quick|full", help=quick)
    add("--topk", type=int, default=20, help="solutions of each libtype in the accurate phase (default: %(default)s)")
    add("--seconds", type=float, default=4.0, help="device seconds of the accurate phase for a shape (default: %(default)g)")
    add(
        "--budget",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wall time of the whole run; where it is expected to save most comes first",
    )
    add("--whole", action="store_true", help="with --budget, all M of one (N, K) before the next")
    add("--timeout", type=float, default=1800.0, help="seconds for one compilation, 0 for no limit (default: %(default)g)")
    add(
        "--kernel_timeout", type=float, default=30.0, help="seconds after which a kernel counts as hung, 0 for never (default: %(default)g)"
    )


def _add_machines(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--mp", type=int, default=0, help="GPUs of this machine to tune on at once; 0 is all of them (default: %(default)s)")
    add("--device", default="", metavar="I,J|cpu", help="these GPUs of this machine, or its CPU; default: all GPUs, else the CPU")
    add("--blockPerCu", nargs="+", type=int, metavar="N", help=f"{ACCEPTED}: a backend lists its own solutions")
    add("--shape_grouped", action="store_true", help=f"{ACCEPTED}: a shape is always tuned on one GPU")
    add("--jobs", type=int, default=0, help="processes that compile ahead; 0 is one for each core (default: %(default)s)")
    add("--executor", default="local", metavar="local|ray", help="this machine, or every GPU of a Ray cluster (default: local)")
    add("--ray-address", default="", metavar="ADDRESS", help="the cluster; default: the one that Ray finds, or starts")


def _add_production(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--run_config",
        nargs="?",
        const="",
        metavar="CSV",
        help="tune nothing: time and check the op with this table, or with the configured tables",
    )
    add("--compare", action="store_true", help="time the op before and after tuning; only --update_improved changes the table")
    add("--update_improved", action="store_true", help="with --compare: write the improved rows to the table")
    add("--min_improvement_pct", type=float, default=3.0, help="smallest improvement, in per cent, of a new row (default: %(default)g)")
