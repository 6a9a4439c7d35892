import csv
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from amp_ray.clusters.device import CATALOGUE
from kernel_rates import HEADER, fitted, main
from published.sections import PUBLISHED


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_catalogue_has_the_fitted_rates_of_attention() -> None:
    rates = {
        (row["board"], int(row["kind"])): 1e12 * float(row["tflops"])
        for row in table(PUBLISHED / "kernels.csv")
        if row["kernel"] == "attention" and row["board"] in CATALOGUE
    }
    assert len(rates) == 15
    for (board, head_size), rate in rates.items():
        assert CATALOGUE[board].attention_flops(head_size, native=True) == rate


def test_a_fit_finds_rate_traffic_and_constant_beside_outliers() -> None:
    generator = np.random.default_rng(0)
    terms = generator.uniform(1.0, 10.0, (200, 3))
    seconds = terms @ (0.5, 0.2, 0.1)
    seconds[::10] *= 3.0
    solution, errors = fitted(terms, seconds)
    assert solution == pytest.approx([0.5, 0.2, 0.1], rel=1e-3)
    assert np.median(errors) < 1e-3


def test_raw_tables_become_one_line_for_each_kernel(tmp_path: Path) -> None:
    sizes = (1024, 2048, 4096)
    gemm = [
        f"bfloat16,{m},{n},{k},{1e3 * (2 * m * n * k / 5e14 + 3e-6)},90,100"
        for m in sizes
        for n in sizes
        for k in sizes
    ]
    heads = [
        f"{batch},{tokens},32,32,128,{1e3 * (2 * batch * 32 * tokens**2 * 128 / 3e14 + 2e-5)}"
        for batch in (1, 2, 4)
        for tokens in (4096, 8192)
    ]
    moe = ["bfloat16,1024,64,128,2,8,1,1,balanced,1.0", "bfloat16,1024,64,128,2,8,1,8,balanced,9"]
    columns = {
        "gemm_H100": ("dtype,m,n,k,latency_ms,power_w,power_limit_w", gemm),
        "attention_H100": (
            "batch,sequence_length,num_heads,num_key_value_heads,head_size,latency_ms",
            heads,
        ),
        "moe_H100": (
            "dtype,tokens,hidden_size,expert_size,top_k,num_experts,tp,ep,routing,latency_ms",
            moe,
        ),
    }
    for name, (header, lines) in columns.items():
        (tmp_path / f"{name}.csv").write_text("\n".join((header, *lines)), encoding="utf-8")
    output = CliRunner().invoke(main, [str(tmp_path)], catch_exceptions=False).output
    first, product, core, experts = csv.reader(output.splitlines())
    assert tuple(first) == HEADER
    assert product[:5] == ["H100", "product", "bfloat16", "27", "500"]
    assert float(product[5]) == pytest.approx(3.0, abs=0.1)
    assert product[-1] == "0.90"
    assert core[:5] == ["H100", "attention", "128", "6", "300"]
    assert experts[:5] == ["H100", "experts", "bfloat16 256", "1", "0"]
