"""what-if.html as a file: complete, escaped, and made quickly. tests/browser opens it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testbed.predict.calibrate import calibrate
from testbed.predict.page import MAX_RACKED, NODES, as_script, document, render, write
from testbed.predict.scale import MAX_NODES, Predictor
from testbed.spec.mode import SyncMode
from testbed.spec.topology import Topology
from tests.support.synthetic import Conditions, make_run

LINK: dict[str, Any] = {"link": {"rate": "500mbit"}, "experiment": "quick"}
TEN = [
    *("ring", "allreduce", "gather", "tree", "halving", "ddp", "ring/pipeline", "ring/every:8"),
    *("direct/bucket:5MiB/overlap", "ddp/fp16"),
]


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    folder = tmp_path_factory.mktemp("quick")
    for seed, mode in enumerate(("none", "ring", "ddp")):
        make_run(folder / mode, Conditions(seed=seed), mode=mode, **LINK)
    return Predictor(calibrate([folder]))


def test_the_page_is_one_file_that_loads_nothing(predictor: Predictor, tmp_path: Path) -> None:
    text = write(predictor, [SyncMode.parse("ring")], tmp_path).read_text()
    assert "default-src 'none'" in text and "http://www.w3.org/2000/svg" in text
    assert text.count("http") == text.count("http://www.w3.org") + text.count("http-equiv")
    assert "src=" not in text.replace("default-src", "")


def test_a_page_from_runs_with_emulated_compute_says_so(predictor: Predictor) -> None:
    base = predictor.calibration.base.model_copy(update={"compute": "emulated:p.json"})
    emulated = Predictor(replace(predictor.calibration, base=base))
    said = "on 4 nodes with emulated compute"
    assert said in render(emulated, []) and said not in render(predictor, [])


def test_text_of_a_run_folder_cannot_end_the_script() -> None:
    hostile = {"name": "</script><script>alert(1)</script>&\u2028"}
    text = as_script(hostile)
    assert "<" not in text and json.loads(text) == hostile


def test_rounds_are_there_for_every_number_of_nodes(predictor: Predictor) -> None:
    found = document(predictor, [SyncMode.parse(text) for text in ("ring", "ring/pipeline", "none")])
    assert found["nodes"] == sorted(NODES) and max(found["nodes"]) == MAX_NODES
    assert set(found["rounds"]) == {"ring/"}
    assert set(found["rounds"]["ring/"]) == {n for n in NODES if n > 1}
    assert found["rounds"]["ring/"][8] == {
        "all": [[1 / 8, 1 / 8, 0.0, 1, 14]],
        "reduce": [[1 / 8, 1 / 8, 0.0, 1, 7]],
        "gather": [[1 / 8, 1 / 8, 0.0, 1, 7]],
    }
    assert found["modes"][2]["key"] is None


def test_with_racks_the_page_ends_where_no_rounds_are_made(predictor: Predictor) -> None:
    topology = Topology(racks=((0, 1), (2, 3)))
    base = predictor.calibration.base.model_copy(update={"topology": topology})
    racked = Predictor(replace(predictor.calibration, base=base))
    modes = [SyncMode.parse("ring")]
    found = document(racked, modes)
    assert max(found["nodes"]) == MAX_RACKED == max(found["rounds"]["ring/"])
    assert f"with racks up to {MAX_RACKED} nodes" in render(racked, modes)


def test_ten_modes_are_written_quickly(predictor: Predictor, tmp_path: Path) -> None:
    begun = time.process_time()
    path = write(predictor, [SyncMode.parse(text) for text in TEN], tmp_path)
    took = time.process_time() - begun
    assert took < 5.0, f"{took:.1f} s of processor time"
    assert path.stat().st_size < 2_000_000
