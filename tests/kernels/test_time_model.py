"""The time model: launches as the launchers make them, and time by the resource that is used up."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

from kernels import bench_tiles, time_model
from kernels.common.gpus import CHIPS, GRAPH_GAP, ceilings
from kernels.common.spec import BFLOAT16
from kernels.common.verify import upload
from kernels.compile_report import Row
from kernels.loop_report import Loop, hottest_loop_of
from kernels.registry import load_op
from kernels.time_model import launches_of, predict

A100 = "NVIDIA A100-SXM4-80GB"
SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   FFMA R1, R2, R3, R1 ;
.L_x_1:
        /*0020*/                   LDGSTS.E.BYPASS.LTC128B.128 [R4], [R5.64] ;
        /*0030*/              @!PT LDS RZ, [RZ] ;
        /*0040*/                   LDSM.16.M88.4 R8, [R4] ;
        /*0050*/                   LDSM.16.MT88.2 R8, [R4] ;
        /*0060*/               @P1 LDS.64 R8, [R4] ;
        /*0070*/                   HMMA.16816.F32.BF16 R8, R8, R4, R8 ;
        /*0080*/                   LDG.E.64 R8, [R4.64] ;
        /*0090*/               @P0 BRA `(.L_x_1) ;
        /*00a0*/                   FFMA R1, R2, R3, R1 ;
        /*00b0*/              @!P2 BRA `(.L_x_0) ;
.L_x_2:
        /*00c0*/                   BRA `(.L_x_2) ;
"""


def arrays(dtype, **shapes):
    return {name: shape and np.broadcast_to(np.zeros((), dtype), shape)
            for name, shape in shapes.items()}


def product(dtype, M=4096, N=1024, K=512):
    return {**arrays(dtype, y=(M, N), pre_gelu=None, x=(M, K), w=(K, N), bias=None, residual=None),
            "transpose_w": False}


def test_the_innermost_loop_with_products_is_counted():
    loop = hottest_loop_of(SASS)
    assert loop == Loop(instructions=8, hmma=1, ldsm=2, ldgsts=1, lds=1, wavefronts=4 + 4 + 2 + 2,
                        loaded=512 + 256)
    without = "\n".join(line for line in SASS.splitlines() if "HMMA" not in line)
    assert hottest_loop_of(without).ffma == 2, "else the multiply-adds decide"
    assert hottest_loop_of(SASS.split(".L_x_0")[0]) == Loop()


def row(kernel, **fields):
    none = dict.fromkeys((field.name for field in dataclasses.fields(Row)), 0)
    return Row(**{**none, "kernel": kernel, "capability": "8.0", "threads": 256, "registers": 128,
                  "occupancy": "", "nvjitlink": "", "faults": "", "reason": "", **fields})


@pytest.mark.parametrize(("loop", "bound", "cycles"), [
    ({"hmma": 64, "instructions": 100}, "tensor", 64 * 8 * 8 / 4),
    ({"hmma": 64, "instructions": 1000}, "issue", 1000 * 8 / 4),
    ({"hmma": 64, "wavefronts": 200}, "shared", 200 * 8),
    ({"hmma": 64, "mufu": 100}, "special", 100 * 256 / 16),
    ({"hmma": 64, "ffma": 600}, "float32", 600 * 256 / 64),
    ({"hmma": 64, "loaded": 16384}, "l2", 16384 * 8 * 108 / 5120),
])
def test_time_is_that_of_the_resource_that_is_used_up(monkeypatch, loop, bound, cycles):
    """One block of 256 threads, whose loop of 64 products of 2048 turns K / 32 times."""
    name = "matmul.gpu_bf16._linear_256"
    monkeypatch.setattr(time_model, "_row", lambda kernel, capability: row(kernel, **loop))
    monkeypatch.setattr(time_model, "launches_of", lambda *given: [
        time_model.Launch(name, 108, 256, 73728, {"K": 32000})])
    [made] = predict("matmul", "forward", product(BFLOAT16), A100)
    assert made.bound == bound
    assert made.seconds == pytest.approx((1000 * cycles + 470) / 1.41e9 + GRAPH_GAP)
    assert made.apart >= made.seconds


def test_launches_are_those_of_the_launcher():
    [launch] = launches_of("matmul", "forward", product(BFLOAT16), CHIPS[A100])
    columns = int(launch.kernel.rpartition("_")[2])
    assert launch.kernel.startswith("matmul.gpu_bf16._linear_")
    assert launch.blocks == 4096 // 128 * (1024 // columns) and launch.shared
    assert launch.arguments["M"] == 4096 and launch.arguments["K"] == 512
    [other] = launches_of("matmul", "forward", product(np.float32), CHIPS[A100])
    assert other.kernel.startswith("matmul.gpu._linear_")


def attention(T=1000, H=12, D=64):
    return {**arrays(BFLOAT16, out=(T, H * D)), **arrays(np.float32, lse=(1, H, T)),
            **arrays(BFLOAT16, qkv=(T, 3 * H * D))}


def test_the_model_counts_the_work_of_each_block():
    given = product(np.float32, M=1000, N=1000, K=1001)
    [launch] = launches_of("matmul", "forward", given, CHIPS[A100])
    tile = int(launch.kernel.rsplit("_", 1)[1].removesuffix("_odd")) if "odd" not in launch.kernel \
        else 64
    total, largest = time_model._work(launch, given)
    assert (total, largest) == (launch.blocks * tile * tile * 1008, tile * tile * 1008)
    [launch] = launches_of("attention", "forward", attention(), CHIPS[A100])
    total, largest = time_model._work(launch, attention())
    tiles = launch.blocks // 12
    exact = 2 * 64 * 12 * 1000 * 1001 // 2
    assert exact < total < exact * (1 + 2 / tiles) and largest == total // 12 * 2 // (tiles + 1)


@pytest.mark.parametrize("gpu", CHIPS)
def test_no_prediction_beats_the_published_rates(gpu):
    for op, name, given, in_bf16, flops in (
            ("matmul", "forward", product(BFLOAT16), True, 2 * 4096 * 1024 * 512),
            ("matmul", "forward", product(np.float32), False, 2 * 4096 * 1024 * 512),
            ("attention", "forward", attention(), True, 2 * 1000 * 1001 * 768)):
        known = ceilings(gpu)
        rate = known.bfloat16 if in_bf16 else known.float32
        nbytes = sum(value.nbytes for value in given.values() if hasattr(value, "nbytes"))
        launches = predict(op, name, given, gpu)
        assert launches, (op, name)
        assert sum(launch.seconds for launch in launches) > max(flops / (1e12 * rate),
                                                                nbytes / (1e9 * known.bandwidth))


def test_unknown_gpus_and_kernels_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="no time model of 'GeForce 256', only of NVIDIA A100"):
        predict("matmul", "forward", product(BFLOAT16), "GeForce 256")
    monkeypatch.setattr(time_model, "_table", dict)
    with pytest.raises(ValueError, match=r"run python -m kernels\.compile_report"):
        predict("matmul", "forward", product(BFLOAT16), A100)


def test_the_published_rate_of_the_tensor_cores_is_that_of_the_chips():
    for name, chip in CHIPS.items():
        peak = 1e-3 * chip.multiprocessors * chip.clock * 4 * 2 * time_model.MMA / chip.hmma
        share = peak / ceilings(name).bfloat16
        expected = 4 / 6.5 if chip.capability == (9, 0) else 1
        assert share == pytest.approx(expected, rel=0.01), name


def test_tiles_are_compared_by_the_model_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(bench_tiles, "WIDTHS", (768,))
    rows = list(bench_tiles.rows(""))
    assert {row["gpu"] for row in rows} == set(CHIPS) and {row["median_ms"] for row in rows} == {""}
    of_one = [row for row in rows if row["gpu"] == A100 and row["form"] == "dw"
              and (row["N"], row["K"]) == ("3072", "768")]
    assert len(of_one) == 16 and sum(bool(row["best"]) for row in of_one) == 1


@pytest.mark.parametrize(("op", "given"), [
    ("matmul", product(BFLOAT16, M=256, N=256, K=256)), ("attention", attention(T=256, H=1)),
])
def test_the_virtual_gpu_executes_what_the_model_counts(op, given):
    """Reads of fragments: those of the loop by the model, and what comes before and after it."""
    vgpu = pytest.importorskip("vgpu")
    on_gpu = {name: upload(np.ones(value.shape, value.dtype), "gpu")
              if hasattr(value, "shape") else value for name, value in given.items()}
    with vgpu.options(count=True):
        load_op(op, "gpu").forward(*on_gpu.values())
        [record] = vgpu.launches()[-1:]
    executed = sum(site.warps for site in record.statistics.sites if "ldmatrix" in site.text)
    [launch] = launches_of(op, "forward", given, CHIPS["NVIDIA H100 80GB HBM3"])
    loop = time_model._row(launch.kernel, (9, 0)).loop
    total, _ = time_model._work(launch, given)
    counted = total / time_model.MMA / loop.hmma * loop.ldsm
    assert 0.8 * counted <= executed <= 1.3 * counted  # warps skip what none of their rows sees
