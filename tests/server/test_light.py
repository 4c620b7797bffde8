"""The HTTP process without torch and transformers: `Ready` carries what it needs of them."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from specserve.exchange.messages import Ready
from specserve.models.weight_forms import MapForm, WeightForms
from specserve.server import serve
from specserve.server.completion import fingerprint
from specserve.text.chat_template import ChatTemplate
from tests.checkpoints import tiny_checkpoint
from tests.server.asking import COMPLETIONS, saying
from tests.server.in_process import server_threads
from tests.server.server_process import ServerProcess


def mapped(pid):
    return Path(f"/proc/{pid}/maps").read_text()


def test_the_http_process_has_not_mapped_torch(server):
    assert server.post(COMPLETIONS, saying(2)).status == 200
    assert "libtorch" in mapped(server.engine_pid)
    assert "libtorch" not in mapped(server.process.pid)


def test_it_lets_collections_leave_alone_what_start_up_made(folder, monkeypatch):
    asked = Mock()
    monkeypatch.setattr(serve, "keep_objects", asked)
    with server_threads(folder):
        asked.assert_called_once_with()


def test_a_full_disk_under_stderr_stops_no_server(folder):
    with open("/dev/full", "w") as full, ServerProcess(folder, stderr=full) as server:
        assert server.post(COMPLETIONS, saying(2)).status == 200


READY = Ready(
    phases={},
    drafter="ngram",
    vocab_size=320,
    max_model_len=512,
    dtype="bf16",
    kv_dtype="bf16",
    arithmetic="cpu avx512_bf16 avx512f avx2",
    block_size=16,
    num_blocks=10,
    kv_formats={},
)
OTHERS = {  # what the engine process says -> whether the text may differ by it
    "another type of numbers": ({"dtype": "fp32"}, True),
    "KV of another type": ({"kv_dtype": "int8"}, True),
    "another instruction set": ({"arithmetic": "cpu amx_bf16 avx512_bf16 avx512f avx2"}, True),
    "another build": ({"arithmetic": "reference avx512_bf16 avx512f avx2"}, True),
    "other weights": ({"weights": WeightForms((MapForm(4, 64, 2),), 9)}, True),
    "another drafter": ({"drafter": "model"}, False),
    "another pool": ({"num_blocks": 99}, False),
    "a shorter context": ({"max_model_len": 100}, False),
}


@pytest.mark.parametrize(("changes", "differs"), OTHERS.values(), ids=OTHERS)
def test_the_fingerprint_reports_what_the_text_depends_on(folder, changes, differs):
    ready = Ready(**{name: getattr(READY, name) for name in Ready.__struct_fields__} | changes)
    assert (fingerprint(folder, ready) != fingerprint(folder, READY)) == differs


def test_another_chat_template_has_another_fingerprint(folder):
    templates = ChatTemplate("a", {}), ChatTemplate("b", {}), ChatTemplate("a", {}, "c"), None
    assert len({fingerprint(folder, READY, template) for template in templates}) == 4


def test_other_weights_have_another_fingerprint(folder, tmp_path):
    other = tiny_checkpoint(tmp_path, seed=2)
    assert fingerprint(other, READY) != fingerprint(folder, READY)
